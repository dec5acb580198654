"""Ranks of an engine on a GPU: patches that are cut along their parts are decoded and staged there, exactly."""

from __future__ import annotations

import numpy as np
import pytest

import sparserl
from sparserl import Region, codec, errors
from sparserl.codec.coders import CODERS, Stored
from sparserl.patch import Patch
from sparserl.patch import replacement as replacement_module
from sparserl.patch.contents import BucketList, Contents
from sparserl.patch.sliced import _Slices, stage_slices
from sparserl.patch.warmup import warm_up_cpu
from sparserl.session.parts import apply_to_parts
from sparserl.targets import engine as engine_module
from sparserl.targets.engine import copy_shards
from sparserl.targets.target import Change
from sparserl.weights import gpu_zeros
from sparserl.weights.digest import Digest
from sparserl.weights.dtypes import BY_NAME, Bits
from sparserl.weights.holdings import Holdings
from sparserl.weights.local import LocalWeights
from sparserl.weights.region import Rows
from sparserl.wire import encode_bucket
from tests.integrations.fleet import fleet
from tests.patch.gpu.gpu_weights import DEVICE, WITHOUT_KERNELS, host_bits, needs_gpu, needs_kernels
from tests.patch.gpu.rank_weights import BF16, SHAPES, Ranks, fetched, versions

pytest.importorskip("triton")
torch = pytest.importorskip("torch")


@pytest.fixture
def only_on_gpu(monkeypatch, nothing_leaves_the_gpu):
    """No bucket is decoded on the CPU, and no sample of the weights is larger than what may leave the GPU."""
    warm_up_cpu({BY_NAME["bfloat16"], BY_NAME["float32"]})  # attaching would, by patches of its own in host memory
    monkeypatch.setattr(replacement_module, "_SAMPLE_ELEMENTS", 64)
    if not WITHOUT_KERNELS:
        monkeypatch.setattr(Contents, "decode", None)


@pytest.mark.parametrize(
    ("region", "shape", "rows"),
    [
        (Region((2, 0), (3, 8)), (9, 8), Rows(16, 24, 0)),
        (Region((0, 3), (9, 2)), (9, 8), Rows(3, 2, 6)),
        (Region((4, 3), (1, 2)), (9, 8), Rows(35, 2, 0)),
        (Region((0, 3), (9, 1)), (9, 8), Rows(3, 1, 7)),
        (Region((0, 1, 0), (2, 3, 5)), (2, 4, 5), Rows(5, 15, 5)),
        (Region((0, 0, 1), (2, 4, 3)), (2, 4, 5), Rows(1, 3, 2)),
        (Region((0, 1, 1), (2, 3, 3)), (2, 4, 5), None),
        (Region((), ()), (), Rows(0, 1, 0)),
    ],
)
def test_rows(region, shape, rows):
    """A box lies in rows of one length at one distance, or it has none."""
    assert Rows.of(region, shape) == rows
    if rows is not None:
        at = np.arange(region.numel)
        positions = rows.start + at + at // rows.columns * rows.gap
        assert np.array_equal(positions, np.arange(int(np.prod(shape))).reshape(shape)[region.slices].ravel())


@needs_gpu
@pytest.mark.usefixtures("only_on_gpu")
@pytest.mark.parametrize(
    ("ranks", "profile"),
    [
        (2, "ctx"),
        (3, "ulp"),
        *(pytest.param(*case, marks=pytest.mark.long) for case in [(3, "ctx"), (1, "ctx"), (2, "raw")]),
    ],
)
def test_cut_patches(ranks, profile):
    """Rows, columns and what all ranks have: nothing is decoded or read on the host, and all bits are right."""
    old, new = versions(2)
    engine = Ranks(old, ranks)
    patch = engine.patch(old, new, profile)
    engine.commit(engine.prepare(new, [patch]), old, new)


@needs_gpu
@pytest.mark.parametrize(("ranks", "profile"), [(2, "gap"), (3, "raw")])
def test_other_patches(ranks, profile):
    """Those that are cut along nothing, or other ranks, and profiles for the CPU, lead to the same bits."""
    old, new = versions(2)
    engine = Ranks(old, ranks)
    engine.commit(engine.prepare(new, [sparserl.diff(old, new, profile=profile)]), old, new)
    other = Ranks(old, ranks + 1)
    places = {f"{n} of {len(of.ranks)}": one.places for of in (engine, other) for n, one in enumerate(of.ranks)}
    patch = engine.patch(old, new, "ctx", Holdings(engine.table, places))
    engine.commit(engine.prepare(new, [patch]), old, new)


@needs_kernels
@pytest.mark.usefixtures("only_on_gpu")
@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.long)])
def test_several_versions(ranks, monkeypatch):
    """Patches that follow one another are applied to copies on the GPU, and the difference is staged there."""
    monkeypatch.setattr(engine_module, "copy_shards", None)
    monkeypatch.setattr(engine_module, "diff", None)
    old, middle, new = versions(3)
    engine = Ranks(old, ranks)
    patches = [engine.patch(old, middle, "ctx"), engine.patch(middle, new, "ulp")]
    engine.commit(engine.prepare(new, patches), old, new)


@needs_kernels
@pytest.mark.parametrize("where", ["copies", "changes", "difference"])
def test_where_there_is_no_room(where, monkeypatch):
    """What does not fit the GPU is done in host memory."""
    full = torch.cuda.OutOfMemoryError

    def no_room(*_, **__):
        raise full("no room")

    old, middle, new = versions(3, 0.01)
    engine = Ranks(old, 2)
    if where == "copies":
        monkeypatch.setattr(gpu_zeros, "zero_parts_like", lambda _: None)
    elif where == "difference":
        from sparserl.patch import gpu_difference

        monkeypatch.setattr(gpu_difference, "stage_difference", no_room)
    else:
        stage = engine_module.stage_slices
        monkeypatch.setattr(
            engine_module,
            "stage_slices",
            lambda p, b, *a: no_room() if b.gpu_streams and len(a[0]) == 1 else stage(p, b, *a),
        )
    patches = [engine.patch(old, middle, "raw"), engine.patch(middle, new, "raw")]
    engine.commit(engine.prepare(new, patches), old, new)


@needs_kernels
@pytest.mark.usefixtures("only_on_gpu")
@pytest.mark.parametrize("share", [0.03, pytest.param(0.9, marks=pytest.mark.long)])
def test_fresh_parts(share, monkeypatch):
    """Parts that an anchor was built into on the GPU are compared there with those in use, or exchanged."""
    monkeypatch.setattr(engine_module, "diff", None)
    old, new = versions(2, share)
    engine = Ranks(old, 2)
    fresh = [one.fresh(new) for one in engine.ranks]
    engine.commit(engine.prepare(new, [], fresh_parts=fresh, owns_fresh=[True, True]), old, new)


@needs_gpu
def test_ranks_that_had_different_bits():
    """Parts that ranks share are the same afterwards, although one of them was damaged before."""
    old, new = versions(2)
    engine = Ranks(old, 2)
    damaged = engine.ranks[1]
    next(p for p in damaged.pieces if p.tensor == "norm").view(damaged.live)[3] += 1
    fresh = [one.fresh(new) for one in engine.ranks]
    changes = [Change("run", 0.0, 1, sparserl.digest(new), [], fresh_parts=parts) for parts in fresh]
    prepared = [one.target.prepare(change) for one, change in zip(engine.ranks, changes, strict=True)]
    shared = [{members: sums.after for members, sums in one.sums.items() if len(members) > 1} for one in prepared]
    assert shared[0] == shared[1]
    for one in prepared:
        one.commit()
    assert engine.has(new)


@needs_kernels
@pytest.mark.usefixtures("only_on_gpu")
@pytest.mark.parametrize("profile", ["ulp", pytest.param("ctx", marks=pytest.mark.long)])
def test_patches_behind_an_anchor(profile):
    """They change the parts that were built of it, on the GPU."""
    old, new = versions(2)
    engine = Ranks(old, 2)
    patch = engine.patch(old, new, profile)
    for one in engine.ranks:
        parts = one.fresh(old)
        apply_to_parts(parts, [patch], 1)  # all of it: an anchor's rank may have fetched no less
        assert all(
            np.array_equal(host_bits(part.data).array, new[part.tensor].array[part.region.slices])
            for part in parts.parts
        )


def forged(patch, change):
    """The patch with other streams in every bucket that they are in, and the right checksums."""
    contents = patch.contents
    buckets = []
    for index in range(len(contents)):
        head, reader = contents.open_bucket(index)
        streams = {stream: (coder, [bytes(c) for c in chunks]) for stream, (coder, chunks) in reader.left().items()}
        change(streams)
        buckets.append(encode_bucket(head, streams, contents.table_hash))
    return Patch(Contents(contents.table, contents.ends, BucketList.of(buckets)))


def too_long(streams):
    stream = codec.Stream.POSITIONS
    coder, chunks = streams[stream]
    streams[stream] = coder, [chunks[0] + bytes(4), *chunks[1:]]


def other_tokens(streams):
    stream = codec.Stream.GAP_TOKENS
    coder, chunks = streams[stream]
    streams[stream] = coder, [chunks[0][:-1] + bytes([chunks[0][-1] ^ 255]), *chunks[1:]]


def falling(streams):
    stream = codec.Stream.POSITIONS
    coder, chunks = streams[stream]
    assert coder.id == Stored.id
    positions = np.frombuffer(chunks[0], np.uint32)
    streams[stream] = coder, [positions[::-1].tobytes() if positions.size > 1 else bytes([255] * 4), *chunks[1:]]


def strange(streams):
    streams[codec.Stream.CLASS] = CODERS[Stored.id], [b"x"]


@needs_kernels
@pytest.mark.parametrize("change", [too_long, falling, strange, other_tokens])
def test_hostile_buckets(change):
    """They are refused on every rank as on the CPU, and nothing is written."""
    old, new = versions(2)
    engine = Ranks(old, 2)
    bad = forged(engine.patch(old, new, "ulp" if change is other_tokens else "raw"), change)
    for one in engine.ranks:
        local = one.target.local_weights
        parts = LocalWeights.of(copy_shards(engine_module._shards(local)))
        own = fetched(one, bad)
        with pytest.raises(errors.FormatError) as on_host:
            stage_slices(own.contents, parts, [parts], 1)
        with pytest.raises(errors.FormatError) as on_device:
            one.target.prepare(Change("run", 0.0, 1, own.result, [own]))
        assert type(on_device.value) is type(on_host.value)
    assert engine.has(old)


@needs_kernels
def test_a_bucket_that_comes_twice():
    """It is refused before anything is written: a GPU would not notice that its changes were made already."""
    old, new = versions(2)
    engine = Ranks(old, 2)
    contents = engine.patch(old, new, "ulp").contents
    twice = BucketList.of([contents.bucket(i) for i in range(len(contents)) for _ in range(2)])
    patch = Patch(Contents(contents.table, contents.ends, twice, is_partial=True))
    for one in engine.ranks:
        with pytest.raises(errors.RegionOverlap):
            one.target.prepare(Change("run", 0.0, 1, patch.result, [patch]))
    assert engine.has(old)


@needs_gpu
def test_other_bits_are_noticed():
    """A bucket that decodes to other bits does not lead to the digest of the version."""
    old, new = versions(2)
    engine = Ranks(old, 2)

    def flip(streams):
        coder, chunks = streams[codec.Stream.WORDS]
        streams[codec.Stream.WORDS] = coder, [bytes([chunks[0][0] ^ 1]) + chunks[0][1:], *chunks[1:]]

    with pytest.raises(AssertionError):
        engine.prepare(new, [forged(engine.patch(old, new, "raw"), flip)])
    assert engine.has(old)


@needs_gpu
@pytest.mark.parametrize("tensor", ["q", "o"])
def test_foreign_writes_are_noticed(tensor):
    """A commit on weights that somebody changed meanwhile puts everything back, rows and columns."""
    old, new = versions(2)
    engine = Ranks(old, 2)
    prepared = engine.prepare(new, [engine.patch(old, new, "ulp")])
    one = engine.ranks[1]
    live = next(piece for piece in one.pieces if piece.tensor == tensor).view(one.live)
    region = one.regions[tensor]
    changed = np.argwhere(old[tensor].array[region.slices] != new[tensor].array[region.slices])[0].tolist()
    bits = live.view(torch.int16)
    bits[tuple(changed)] ^= 64
    before = {name: host_bits(room).array for name, room in one.live.items()}
    with pytest.raises(errors.WrongBase):
        prepared[1].commit()
    assert all(np.array_equal(host_bits(room).array, before[name]) for name, room in one.live.items())


@needs_kernels
@pytest.mark.parametrize("way", ["one patch", "several patches", "fresh parts"])
def test_transposed_parts(way):
    """What the engine keeps in another order is written beside the rest, whichever way a version comes."""
    old, middle, new = versions(3)
    engine = Ranks(old, 2, turned=("o", "up"))
    if way == "fresh parts":
        fresh = [one.fresh(new) for one in engine.ranks]
        prepared = engine.prepare(new, [], fresh_parts=fresh, owns_fresh=[True, True])
    else:
        steps = [(old, new)] if way == "one patch" else [(old, middle), (middle, new)]
        prepared = engine.prepare(new, [engine.patch(*step, "ulp") for step in steps])
    engine.commit(prepared, old, new)


@needs_gpu
def test_tied_tensors():
    """Names that share memory are changed alike, or nothing is."""
    old, new = versions(2)
    for weights in (old, new):
        weights["tied"] = Bits(weights["norm"].array.copy(), BF16)
    with pytest.MonkeyPatch.context() as context:
        context.setitem(SHAPES, "tied", SHAPES["norm"])
        engine = Ranks(old, 2, tied=("norm", "tied"))
        assert engine.ranks[0].target.local_weights.tied
        engine.commit(engine.prepare(new, [engine.patch(old, new, "ulp")]), old, new)
        other = new | {"tied": Bits(new["tied"].array + np.uint16(1), BF16)}
        with pytest.raises(errors.TiedConflict):
            engine.prepare(other, [engine.patch(old, other, "ulp")])
        assert engine.has(old)


@needs_gpu
def test_nothing_changes():
    """A patch without changes moves no digest."""
    (old,) = versions(1)
    engine = Ranks(old, 2)
    for one in engine.prepare(old, [engine.patch(old, old, "ulp")]):
        assert one.changed == 0
        assert {sums.after for sums in one.sums.values()} == {Digest()}
        one.commit()
    assert engine.has(old)


def in_host_memory(weights):
    """The publisher's weights, which share the memory of the tensors and are not on a GPU."""
    return {name: Bits(tensor.view(torch.int16).numpy().view(np.uint16), BF16) for name, tensor in weights.items()}


@needs_kernels
@pytest.mark.long
@pytest.mark.parametrize("profile", ["ctx", "ulp"])
def test_sessions(tmp_path, profile, monkeypatch):
    """Ranks follow a run version by version, and several behind; what is cut is decoded on the GPU, all is exact."""
    launched = []
    launch = _Slices._launch

    def counted(self, number, group):
        launched.append(len(group))
        launch(self, number, group)

    monkeypatch.setattr(_Slices, "_launch", counted)
    options = {"profile": profile, "anchor_after": 100, "device": DEVICE, "published": in_host_memory}
    with fleet(tmp_path, 2, **options) as engine:
        assert engine.all(lambda s: s.commit_version()) == [None, None]
        for behind in (1, 2):
            launched.clear()
            for seed in range(behind):
                engine.train(seed)
            assert {report.kind for report in engine.all(lambda s: s.commit_version())} == {"patch"}
            engine.require_exact()
            assert len(launched) >= 2 * behind
        assert engine.all(lambda s: s.audit()) == [None, None]
