"""Publishing from kept old bits: the patches that a full baseline gives, byte for byte, in a fraction of its memory."""

from __future__ import annotations

import numpy as np
import pytest

import sparserl
from sparserl.errors import Unavailable
from sparserl.session.baseline import HostBaseline, NoBaseline
from sparserl.sources import track
from sparserl.sources import tracked_rows as rows
from sparserl.transport.stores.folder import FolderStore
from sparserl.weights import batches
from sparserl.weights.holdings import Holdings
from sparserl.weights.region import Region
from tests.sources.small_trainer import BF16, Fixed, bits

torch = pytest.importorskip("torch")
PROFILES = ("auto", "ctx", "ulp", "gap", "raw")


class Weights:
    """Parameters of several dtypes, one of them not contiguous, that steps write at random places."""

    def __init__(self, seed, sizes=((300, 270), (90, 200), (7,), (300,))):
        generator = torch.Generator().manual_seed(seed)
        kinds = (BF16, BF16, torch.float32, torch.float16)
        values = [torch.randn(s, generator=generator).to(k) for s, k in zip(sizes, kinds, strict=True)]
        values[1] = values[1].t().contiguous().t()
        self.params = [torch.nn.Parameter(v, requires_grad=False) for v in values]
        self.rng = np.random.default_rng(seed)
        self.tensors = {f"w{i}": p.detach() for i, p in enumerate(self.params)}
        self.source = track(None, Fixed(self.tensors), params=self.params)

    def copies(self):
        return {name: t.clone() for name, t in self.tensors.items()}

    def write(self, share):
        """One step: small changes, changes back to what was, and writes of equal bits."""
        with self.source.step():
            for p in self.params:
                ints = p.data.view(torch.int16 if p.itemsize == 2 else torch.int32)
                where = torch.from_numpy(self.rng.random(tuple(p.shape)))
                where = where < share * torch.where(p.abs() < 0.3, 1.0, 0.05)  # small weights change more often
                how = self.rng.integers(3)
                if how == 0:
                    ints[where] += int(self.rng.integers(1, 3))
                elif how == 1:
                    ints[where] ^= 1  # done twice, it is undone
                else:
                    ints[where] = ints[where].clone()


@pytest.fixture
def small_pieces(monkeypatch):
    """Tensors of a few kilobytes count as large: they are cut, as those of many megabytes are."""
    for where in (batches, rows):
        monkeypatch.setattr(where, "PIECE_BYTES", 30_000)


def halves(table):
    """Two receivers, each of which has half of the columns of a tensor, and all else."""
    rest = [(tensor, None) for tensor in (1, 2, 3)]
    boxes = [Region((0, 0), (300, 130)), Region((0, 130), (300, 140))]
    return Holdings(table, {str(i): [(0, box), *rest] for i, box in enumerate(boxes)})


@pytest.mark.parametrize("cut", [pytest.param(False, marks=pytest.mark.long), True])
@pytest.mark.parametrize("profile", PROFILES)
def test_the_same_bytes_as_with_a_full_baseline(profile, cut, small_pieces):
    """Over random steps, several a publish, with publishes that fail; also cut along what receivers have."""
    trained = Weights(PROFILES.index(profile))
    shards = trained.source.weights()
    holdings = halves(shards.table) if cut else None
    full, none = HostBaseline(shards), NoBaseline(shards)
    trained.source.committed()
    seen = set()
    for version in range(12):
        for _ in range(int(trained.rng.integers(0, 4))):
            trained.write(float(trained.rng.choice([0.0, 0.002, 0.02, 0.3, 0.9], p=[0.1, 0.3, 0.3, 0.2, 0.1])))
        shards = trained.source.weights()
        wanted = full.capture(shards, profile=profile, holdings=holdings)
        found = none.capture(shards, profile=profile, holdings=holdings)
        patch = found.encode()
        assert patch.to_bytes() == wanted.encode().to_bytes()
        seen |= {head.profile.name for head in patch.contents.heads}
        if version % 3:  # else it fails, and nothing is committed
            full.advance(patch, wanted)
            none.advance(patch, found)
            trained.source.committed()
            assert trained.source.old_bytes == 0
    assert ("ctx" if profile == "auto" else profile) in seen


@pytest.mark.parametrize("background", [False, True])
def test_publishes_that_fail_and_restarts(tmp_path, background):
    """A store that goes away, a trainer that starts again: the objects of both runs have the same bytes."""

    class Away(FolderStore):
        away = False

        def put(self, name, data):
            if self.away and "bucket" in name:
                raise Unavailable("away")
            super().put(name, data)

    def patches(kind):
        trained = Weights(5)
        store = Away(tmp_path / kind)
        options = {"baseline": kind, "state": tmp_path / f"state-{kind}", "profile": "ctx", "ladder": None}
        publisher = sparserl.Publisher(store, trained.source, **options)
        sizes = []

        def publish():
            report = publisher.publish_in_background().result() if background else publisher.publish()
            sizes.append((report.kind, report.changed, report.bytes, report.digest))

        publish()
        for version in range(6):
            trained.write(0.02)
            store.away = version % 2 == 1
            if store.away:
                with pytest.raises(Unavailable):
                    publish()
                store.away = False
                trained.write(0.01)
            if version == 3:
                publisher.close()
                trained.source.close()
                trained.source = track(None, Fixed(trained.tensors), params=trained.params)
                store = Away(tmp_path / kind)
                publisher = sparserl.Publisher(store, trained.source, **options)
            publish()
        publisher.close()
        received = {name: torch.zeros_like(t) for name, t in trained.tensors.items()}
        sparserl.Subscriber(tmp_path / kind, received).sync()
        assert {n: bits(t) for n, t in received.items()} == {n: bits(t) for n, t in trained.tensors.items()}
        return sizes

    assert patches("none") == patches("host")


def test_the_memory_of_old_bits():
    """At 1% of bf16 elements the old bits take 3% of the weights; while a publish is in flight, those of both times."""
    weight = torch.nn.Parameter(torch.zeros(1_000_000, dtype=BF16), requires_grad=False)
    source = track(None, Fixed({"w": weight.detach()}), params=[weight])
    source.weights()
    source.committed()
    assert source.old_bytes == 0
    rng = np.random.default_rng(0)
    where = torch.from_numpy(rng.choice(weight.numel(), 20_000, replace=False))
    for some in (where[:6000], where[4000:10_000]):  # 1% in two steps, some elements in both
        with source.step():
            weight.data.view(torch.int16)[some] += 1
    assert source.old_bytes <= 0.04 * weight.nbytes
    in_flight = source.weights()
    with source.step():
        weight.data.view(torch.int16)[where[5000:15_000]] += 1
    assert source.old_bytes <= 2 * 0.04 * weight.nbytes
    del in_flight
    source.weights()  # the publish has failed: the next one has 1.5%
    assert source.old_bytes <= 1.5 * 0.04 * weight.nbytes
    source.committed()
    assert source.old_bytes == 0


def test_old_bits_never_take_more_than_the_weights():
    """Where most elements change, all old bits are kept, and patches are the same still."""
    trained = Weights(9, ((200, 50), (30, 40), (900,), (300,)))
    shards = trained.source.weights()
    full, none = HostBaseline(shards), NoBaseline(shards)
    trained.source.committed()
    for _ in range(3):
        with trained.source.step():
            for p in trained.params:
                p.data.view(torch.int16 if p.itemsize == 2 else torch.int32)[...] += 1
        trained.write(0.02)
        assert trained.source.old_bytes <= sum(p.nbytes for p in trained.params)
        shards = trained.source.weights()
        wanted, found = (baseline.capture(shards) for baseline in (full, none))
        patch = found.encode()
        assert patch.to_bytes() == wanted.encode().to_bytes()
        full.advance(patch, wanted)
        none.advance(patch, found)
        trained.source.committed()


def test_parts_that_move_keep_their_old_bits():
    """A new plan, since parameters came: what is known of the others is taken over, and stays first."""
    trained = Weights(3)
    shards = trained.source.weights()
    full, none = HostBaseline(shards), NoBaseline(shards)
    trained.source.committed()
    trained.write(0.02)
    extra = torch.nn.Parameter(torch.zeros(3))
    trained.source._params = (*trained.source._params, extra)  # what add_param_group does for an optimizer
    trained.write(0.02)
    trained.write(0.02)
    shards = trained.source.weights()
    assert all(part.marks is not None for part in shards.parts)
    assert none.capture(shards).encode().to_bytes() == full.capture(shards).encode().to_bytes()
