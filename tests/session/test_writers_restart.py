"""Several ranks that publish one run are killed or end, and others go on with it. Real processes over Gloo."""

from __future__ import annotations

import datetime as dt
from pathlib import Path

import numpy as np
import pytest

import sparserl
from sparserl import Part, Region, Shards, Subscriber
from sparserl.errors import SessionError
from sparserl.session.store.resume import SavedAnchor
from sparserl.session.store.retention import faults, read_head, read_index
from sparserl.transport.stores.folder import FolderStore
from sparserl.weights.dtypes import BY_NAME, Bits
from tests.session.killed_processes import driver
from tests.session.ranks import finish, launch

SHAPES = {"embed": (803, 64), "up": (192, 270), "norm": (16,), "none": (0, 4)}


def whole(version: int) -> dict[str, Bits]:
    """The weights of a version. Small ones change, as in training, which is what `ctx` makes use of."""
    rng = np.random.default_rng(5)
    weights = {}
    for name, shape in SHAPES.items():
        array = (rng.standard_normal(shape).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
        for _ in range(version):
            is_small = (array & 0x7FFF) < 0x3F00
            array += (rng.random(shape) < 0.2).astype(np.uint16) & is_small
        weights[name] = Bits(array, BY_NAME["bfloat16"])
    return weights


def is_version(weights: dict[str, Bits], version: int) -> bool:
    return all((weights[name].array == bits.array).all() for name, bits in whole(version).items())


def empty() -> dict[str, Bits]:
    return {name: Bits(np.zeros_like(bits.array), bits.dtype) for name, bits in whole(0).items()}


def shards(version: int, rank: int, size: int) -> Shards:
    """Rows of one tensor, columns of another; what is replicated has one owner."""
    weights = whole(version)
    rows, columns = ([n * r // size for r in (rank, rank + 1)] for n in (SHAPES["embed"][0], SHAPES["up"][1]))
    regions = {
        "embed": Region((rows[0], 0), (rows[1] - rows[0], 64)),
        "up": Region((0, columns[0]), (192, columns[1] - columns[0])),
    }
    if rank == size - 1:
        regions |= {"norm": Region((0,), (16,)), "none": Region((0, 0), (0, 4))}
    parts = [Part(name, r, Bits(weights[name].array[r.slices], weights[name].dtype)) for name, r in regions.items()]
    return Shards(sparserl.tensor_table(weights), parts)


class Trainer:
    """A source whose shards are those of a version."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self.version = 0

    def weights(self) -> Shards:
        return shards(self.version, self.rank, self.size)


def publisher_of(rank: int, size: int, folder: str, attempt: int, **options) -> tuple[Trainer, sparserl.Publisher]:
    import torch.distributed as dist

    limit = dt.timedelta(seconds=60)
    init = f"file://{folder}/init-{attempt}"
    dist.init_process_group("gloo", init_method=init, rank=rank, world_size=size, timeout=limit)
    trainer = Trainer(rank, size)
    return trainer, sparserl.Publisher(f"{folder}/store", trainer, writers=dist.group.WORLD, timeout=60, **options)


def publish_some(rank: int, size: int, folder: str, attempt: int, first: int, last: int, options: dict) -> None:
    """Publish some versions, after another attempt has published those before; the first must be found again."""
    trainer, publisher = publisher_of(rank, size, folder, attempt, **options)
    assert publisher.version == (first - 1 if first else None)
    run = publisher.run
    for version in range(first, last):
        trainer.version = version
        report = publisher.publish()
        assert (report.version, report.kind) == (version, "patch" if version else "anchor")
        assert report.digest == sparserl.digest(whole(version)).hex
        assert run in (None, report.run), "a new run has begun"
    publisher.close()


def attempts(tmp_path: Path, sizes: list[int], **options) -> None:
    """One attempt after another, each with another number of ranks, publishes three versions; a subscriber follows."""
    mine = empty()
    subscriber = Subscriber(f"{tmp_path}/store", mine)
    for attempt, size in enumerate(sizes):
        args = (attempt, 3 * attempt, 3 * attempt + 3, options)
        finish(launch(publish_some, size, tmp_path, *args), tmp_path)
        report = subscriber.sync()
        assert (report.version, report.kind) == (3 * attempt + 2, "patch" if attempt else "anchor")
        assert is_version(mine, report.version)
    store = FolderStore(f"{tmp_path}/store")
    assert list(faults(store)) == []
    steps = read_index(store, read_head(store)[0]).steps
    assert all(options["profile"] in step.profiles for step in steps if step.base is not None)


@pytest.mark.long
@pytest.mark.parametrize("profile", ["ctx", "gap"])
def test_more_or_fewer_ranks_go_on_with_a_run_from_the_store(tmp_path, profile):
    attempts(tmp_path, [2, 3, 1, 2], profile=profile, anchor_after=100.0)


def test_ranks_go_on_from_what_each_has_saved(tmp_path, monkeypatch):
    """Only patches are fetched: the anchor is gone from the store, and the ranks go on all the same."""
    state = str(tmp_path / "state")
    options = {"profile": "ctx", "state": state, "anchor_after": 100.0}
    finish(launch(publish_some, 2, tmp_path, 0, 0, 3, options), tmp_path)
    store = FolderStore(f"{tmp_path}/store")
    mine = empty()
    subscriber = Subscriber(store, mine)
    subscriber.sync()
    head = read_head(store)[0]
    saved = sorted(path.name for path in Path(state).glob("rank-*/*.srl"))
    assert len(saved) == 2
    assert all(head.run in name for name in saved)
    anchor = next(step for step in subscriber._snapshot.index.steps if step.base is None)
    (tmp_path / "store" / "runs" / head.run / "manifests" / anchor.manifest).unlink()
    finish(launch(publish_some, 2, tmp_path, 1, 3, 5, options), tmp_path)
    assert subscriber.sync().kind == "patch"
    assert is_version(mine, 4)


@pytest.mark.long
def test_saved_shards_of_other_ranks_are_not_used(tmp_path):
    attempts(tmp_path, [2, 3, 2], profile="ctx", state=str(tmp_path / "state"), anchor_after=100.0)


@pytest.mark.long
def test_a_saved_anchor_with_other_bits_is_noticed_by_all(tmp_path):
    """One rank has saved other bits under the name of this run: the ranks begin from the store together."""
    state = str(tmp_path / "state")
    options = {"profile": "gap", "state": state, "anchor_after": 100.0}
    finish(launch(publish_some, 2, tmp_path, 0, 0, 2, options), tmp_path)
    head = read_head(FolderStore(f"{tmp_path}/store"))[0]
    wrong = shards(5, 1, 2)
    zeros = wrong.map(lambda part: Bits(np.zeros_like(part.data.array), part.data.dtype))
    saved = SavedAnchor(Path(state) / "rank-1", f"{tmp_path}/store")
    (path,) = Path(state).glob("rank-1/*.srl")
    sparserl.diff(zeros, wrong).save(path)
    saved.close()
    assert head.run in path.name
    finish(launch(publish_some, 2, tmp_path, 1, 2, 4, options), tmp_path)
    mine = empty()
    Subscriber(f"{tmp_path}/store", mine).sync()
    assert is_version(mine, 3)


def one_has_all(rank: int, size: int, folder: str, attempt: int) -> None:
    """Rank 0 has all weights, the others nothing: they are replicas."""
    import torch.distributed as dist

    limit = dt.timedelta(seconds=60)
    init = f"file://{folder}/init-{attempt}"
    dist.init_process_group("gloo", init_method=init, rank=rank, world_size=size, timeout=limit)
    weights = whole(attempt)
    parts = [Part(name, Region((0,) * bits.array.ndim, bits.array.shape), bits) for name, bits in weights.items()]
    shards = Shards(sparserl.tensor_table(weights), parts if rank == 0 else [])
    options = {"link": "25Gbit"} if attempt else {}
    with sparserl.Publisher(
        f"{folder}/store", lambda: shards, writers=dist.group.WORLD, timeout=60, **options
    ) as publisher:
        assert publisher.publish().version == attempt


@pytest.mark.long
def test_a_rank_that_has_everything_goes_on(tmp_path):
    for attempt in range(2):
        finish(launch(one_has_all, 2, tmp_path, attempt), tmp_path)
    mine = empty()
    Subscriber(f"{tmp_path}/store", mine).sync()
    assert is_version(mine, 1)


@pytest.mark.long
def test_writers_are_killed_over_and_over():
    seen = driver("-m", "tests.session.soak_writers", "--kills", 12, "--seed", 7)
    assert seen["kills"] >= 12
    assert seen["faults"] == 0
    assert seen["published"] > 0


def refused(rank: int, size: int, folder: str, attempt: int, words: str) -> None:
    with pytest.raises(SessionError, match=words):
        publisher_of(rank, size, folder, attempt)
    if rank == 0:
        print("refused", flush=True)


@pytest.mark.long
def test_a_run_that_cannot_be_rebuilt_is_refused_on_all_ranks(tmp_path):
    finish(launch(publish_some, 2, tmp_path, 0, 0, 2, {}), tmp_path)
    store = FolderStore(f"{tmp_path}/store")
    head = read_head(store)[0]
    for path in (tmp_path / "store" / "runs" / head.run / "manifests").iterdir():
        path.unlink()
    said = finish(launch(refused, 2, tmp_path, 1, "cannot be rebuilt.*new_run=True"), tmp_path)
    assert "refused" in said[0]
    assert read_head(store)[0] == head
