"""The kernels for GPUs in Triton's interpreter, bit for bit against the specification and the CPU.

Whether Triton interprets is decided when it is imported, so that happens in a process of its own. On a real GPU
`python -m benchmarks.gpu` checks the same on large data before it measures.
"""

from __future__ import annotations

import os

import numpy as np
import pytest

from tests.triton_runs import hasten_interpreter, run, streams_of

pytest.importorskip("triton")
torch = pytest.importorskip("torch")

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
UINT = {w: np.dtype(f"u{w}") for w in (1, 2, 4, 8)}
inside = pytest.mark.skipif(not INTERPRETED, reason="runs in the interpreter, see test_interpreted")
outside = pytest.mark.skipif(INTERPRETED, reason="starts a process of its own")

if INTERPRETED:
    from sparserl import codec
    from sparserl.codec.coders import Rans
    from sparserl.codec.profile import BucketLayout, Classes
    from sparserl.errors import InvalidField
    from sparserl.kernels import gpu, reference
    from sparserl.weights.dtypes import BY_NAME

    hasten_interpreter()


@outside
@pytest.mark.timeout(3600)
@pytest.mark.long
@pytest.mark.parametrize("which", ["not long", "long"])
def test_interpreted(which):
    """The tests below pass in Triton's interpreter."""
    options = ("-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", which)
    out = run("-m", "pytest", *options, __file__, TRITON_INTERPRET="1")
    assert "passed" in out, out


@pytest.fixture(autouse=True)
def _poisoned(monkeypatch):
    """Whatever a kernel does not write is wrong, not zero by chance."""
    if INTERPRETED:

        def poisoned(self, size, dtype):
            return torch.full((size * dtype.itemsize,), 0xA5, dtype=torch.uint8).view(dtype)

        monkeypatch.setattr(gpu.changes.Blocks, "empty", poisoned)


def tensor(bits, shift=0):
    """Bit patterns as a torch tensor of integers, which begins `shift` elements behind an aligned address."""
    width = bits.itemsize
    room = torch.zeros(bits.size + 16, dtype=gpu.ints.INTS[width])
    begin = -(room.data_ptr() // width) % (16 // width) + shift
    room[begin : begin + bits.size] = torch.from_numpy(bits.view(np.uint8 if width == 1 else f"i{width}").copy())
    return room[begin : begin + bits.size]


def array(tensor, width):
    return tensor.numpy().view(UINT[width])


def pair(width, sizes, seed=0, share=0.03, ulp=False):
    """Parts in two versions; those of less than 100 elements change as a whole."""
    rng = np.random.default_rng(seed)
    olds, news = [], []
    for n in sizes:
        old = rng.integers(0, 256, n * width, dtype=np.uint8).view(UINT[width])
        new = old.copy()
        hit = rng.random(n) < (2 if n < 100 else share)
        new[hit] = new[hit] + 1 if ulp else rng.integers(0, 256, hit.sum() * width, dtype=np.uint8).view(UINT[width])
        olds.append(old)
        news.append(new)
    return olds, news


def numbers(two):
    return two.numpy().view(np.uint64).tolist()


def digests(keys, starts, parts):
    found = [reference.digest(k, s, p) for k, s, p in zip(keys, starts, parts, strict=True)]
    return [sum(column) % 2**64 for column in zip(*found, strict=True)]


@inside
@pytest.mark.parametrize(("width", "shift"), [(1, 0), (2, 0), (2, 1), (4, 1), (8, 0)])
def test_changes_found_and_landed(width, shift):
    """Positions, bits, steps, marks and digests are those of the specification; landing leads to the new bits."""
    sizes, starts = [1, 1024, 0, 1031, 63], [0, 5, 0, 2**33, 1]
    olds, news = pair(width, sizes)
    keys = np.random.default_rng(1).integers(0, 2**64, (len(sizes), 2), dtype=np.uint64)
    blocks = gpu.changes.Blocks(width, sizes, "cpu", keys, starts, block=1024)
    old, new = (blocks.side([tensor(p, shift) for p in side]) for side in (olds, news))
    assert old.aligned == (shift == 0)
    wanted = [reference.diff(a, b) for a, b in zip(olds, news, strict=True)]
    positions, before, after = (np.concatenate(column) for column in zip(*wanted, strict=True))
    words, counts = gpu.changes.diff(blocks, old, new)
    for first, (marked, _, _), n in zip(blocks.first_block.tolist(), wanted, sizes, strict=True):
        mine = words[first * 32 : (first + -(-n // 1024)) * 32].numpy().view(np.uint64)
        assert np.array_equal(reference.list_marks(mine, 0, 64 * mine.size), marked)
    total = positions.size
    assert int(counts.sum()) == total
    found, out, kept, sums = gpu.changes.compact(blocks, old, new, words, counts, total, keep_old=True)
    assert np.array_equal(array(found, 4), positions)
    assert np.array_equal(array(out, width), after)
    assert np.array_equal(array(kept, width), before)
    _, steps, _, _ = gpu.changes.compact(blocks, old, new, words, counts, total, steps=True)
    assert np.array_equal(array(steps, width), reference.steps(before, after, True))
    was, now = digests(keys, starts, olds), digests(keys, starts, news)
    assert numbers(gpu.changes.digest(blocks, old)) == was
    assert [(a + b) % 2**64 for a, b in zip(was, numbers(gpu.changes.sum_slots(sums)), strict=True)] == now
    bad, per = torch.zeros(1, dtype=torch.int32), np.array([p.size for p, _, _ in wanted])
    located = gpu.cells.locate(blocks, old, per, found, out, bad)
    assert int(bad) == 0
    assert np.array_equal(array(located.old, width), before)
    assert torch.equal(gpu.changes.sum_slots(located.sums), gpu.changes.sum_slots(sums))
    gpu.classes.write(old, located, located.new, bad)
    assert all(map(torch.equal, old.owners, new.owners))


@inside
@pytest.mark.parametrize("fault", ["none", "twice", "behind the end"])
def test_wrong_positions_are_refused(fault, monkeypatch):
    """Positions that do not rise, also from span to span, or leave their part, are noticed; then nothing is written."""
    monkeypatch.setattr(gpu.cells, "_SPAN", 1)
    blocks = gpu.changes.Blocks(2, [100, 50], "cpu", block=1024)
    target = blocks.side([tensor(np.zeros(n, np.uint16)) for n in (100, 50)])
    positions = torch.tensor([3, 99, 3, 49], dtype=torch.int32)
    if fault != "none":
        positions[1 if fault == "twice" else 3] = 3 if fault == "twice" else 50
    bad, ones = torch.zeros(1, dtype=torch.int32), torch.ones(4, dtype=torch.int16)
    found = gpu.cells.locate(blocks, target, np.array([2, 2]), positions, ones, bad)
    assert int(bad) == (fault != "none")
    gpu.classes.write(target, found, ones, bad)
    assert sum(int(part.sum()) for part in target.owners) == (4 if fault == "none" else 0)


@inside
def test_cast_compare_mark_copy():
    """Masters land in the weights as torch casts them, infinities, subnormals and NaNs among them; marks add up."""
    patterns = np.random.default_rng(0).integers(0, 2**32, 2100, dtype=np.uint32)
    patterns[:8] = [0, 0x80000000, 0x7F800000, 0xFF800001, 0x7F7FFFFF, 1, 0x3F808000, 0x3F818000]
    masters = [torch.from_numpy(p.view(np.float32)) for p in np.split(patterns, [2051])]
    # Which NaN torch makes of a NaN on a CPU depends on how it is vectorized; on a GPU the benchmark checks them too.
    cast = [m.to(torch.bfloat16).view(torch.int16).masked_fill(m.isnan(), 0x7FC0) for m in masters]
    blocks, wide = (gpu.changes.Blocks(w, [2051, 49], "cpu", block=1024) for w in (2, 4))
    weights = [c.clone() for c in cast]
    weights[0][::97] ^= 1
    words, counts = blocks.bitmap(), blocks.empty(blocks.count, torch.int32)
    side = blocks.side(weights)
    gpu.changes.mark(blocks, wide.side(masters), side, words, counts)
    assert all(map(torch.equal, side.owners, cast))
    marked = reference.list_marks(words.numpy().view(np.uint64), 0, 32 * words.numel())
    assert np.array_equal(marked, np.arange(0, 2051, 97))
    other = [c.clone() for c in cast]
    other[0][1] ^= 4
    gpu.changes.mark(blocks, blocks.side(other), side, words, counts)
    assert all(map(torch.equal, side.owners, other))
    assert int(counts.sum()) == marked.size + 1


def cpu_streams(dtype, olds, news, log, chunk_log, classes):
    """What the CPU writes in `ctx`: coder and chunks by stream."""
    live = [(a, *reference.diff(a, b)) for a, b in zip(olds, news, strict=True) if (a != b).any()]
    layout = BucketLayout(
        dtype,
        np.array([a.size for a, *_ in live]),
        np.array([p.size for _, p, _, _ in live]),
        log,
        chunk_log,
        old_addresses=np.array([a.ctypes.data for a, *_ in live]),
        classes=classes,
    )
    steps = np.concatenate([reference.steps(x, y, dtype.sign_magnitude) for _, _, x, y in live])
    streams = codec.profile_by_name("ctx").encode(layout, [np.concatenate([p for _, p, _, _ in live])], [steps])
    coded = codec.encode_streams({id: chunks for id, chunks in streams.items() if id != codec.Stream.CLASSES})
    return {int(id): (coder.id, [bytes(c) for c in chunks]) for id, (coder, chunks) in coded.items()}


def change_numbers(counts, gaps, steps):
    """Numbers of changes, from their counts by tile and class, when no stream has room to spare behind it."""
    by_tile, by_class = counts.reshape(-1), counts.t().reshape(-1)
    starts = [torch.cumsum(column, 0, dtype=torch.int64) - column for column in (by_class, by_tile)]
    return gpu.classes.ChangeNumbers(gpu.classes.ChangeLayout(by_tile, *starts), gaps, steps, int(by_tile.sum()))


def decoded(plan, side, sent, bad):
    """What was encoded, located."""
    return gpu.streams.decode(
        plan, side, sent.changes, bad, lambda: gpu.streams.ReceivedChunks(sent.data, sent.directory)
    )


@inside
@pytest.mark.parametrize(
    ("name", "shift", "classes"),
    [
        pytest.param("bfloat16", 0, (6, (100, 300, 400)), marks=pytest.mark.long),
        pytest.param("float16", 0, (0, (1, 2, 9, 300, 400, 500, 511)), marks=pytest.mark.long),
        ("int32", 1, (22, (50, 300))),
        pytest.param("float64", 0, (54, (256, 300)), marks=pytest.mark.long),
    ],
)
def test_ctx_is_that_of_the_cpu(name, shift, classes):
    """Every byte of the streams is the one that the CPU writes, and the decoder leads to the new bits."""
    dtype, sizes, bucket, log = BY_NAME[name], [2500, 300, 19, 1100], [0, 0, 0, 1], 11
    olds, news = pair(dtype.width, sizes, share=0.015, ulp=True)
    news[1][:] = olds[1]  # a part without changes is in no bucket
    limits = np.tile(np.array(classes[1], np.uint64) << np.uint64(classes[0]), (len(sizes), 1))
    blocks = gpu.changes.Blocks(dtype.width, sizes, "cpu", block=1024)
    old, new = (blocks.side([tensor(p, shift) for p in side]) for side in (olds, news))
    order = {"sign_magnitude": dtype.sign_magnitude, "signed": dtype.signed}
    plan = gpu.streams.StreamPlan.of(blocks, bucket, log, limits, chunk=256, **order)
    encoded = gpu.streams.encode(plan, old, new)
    data = encoded.data.numpy().tobytes()
    for b, parts in enumerate(([0, 1, 2], [3])):
        wanted = cpu_streams(dtype, [olds[i] for i in parts], [news[i] for i in parts], log, 8, Classes(*classes))
        for id, (coder, places) in streams_of(encoded.directory, b).items():
            if id >= codec.Stream.CLASS:  # the CPU may take zstd for counts of tiles
                assert (coder, [data[at : at + n] for at, n in places]) == wanted.pop(id)
        assert not [id for id in wanted if id >= codec.Stream.CLASS]
    bad = torch.zeros(1, dtype=torch.int32)
    found = decoded(plan, old, encoded, bad)
    assert int(bad) == 0
    assert torch.equal(gpu.changes.sum_slots(found.sums), encoded.digest_delta)
    gpu.classes.write(old, found, found.new, bad)
    assert all(map(torch.equal, old.owners, new.owners))


@inside
def test_a_kernel_on_trial(monkeypatch):
    """Its sums are those of the specification; if they are not, that is noticed."""
    device = torch.device("cpu")
    assert gpu.trial.sums_are_right(device)
    digests = gpu.sums.digests
    monkeypatch.setattr(gpu.sums, "digests", lambda *arguments: digests(*arguments) ^ 1)
    assert not gpu.trial.sums_are_right(device)


@inside
def test_a_warm_up_goes_unseen(monkeypatch):
    """Nobody who watches Triton's compiler is told of a warm-up, and all are told again afterwards."""
    from triton import knobs

    def hook(**_):
        raise AssertionError("compiled")

    monkeypatch.setattr(knobs.runtime, "jit_post_compile_hook", hook)
    with gpu.warmup.unwatched():
        assert knobs.runtime.jit_post_compile_hook is None
    assert knobs.runtime.jit_post_compile_hook is hook


@inside
@pytest.mark.long
def test_a_warm_up(monkeypatch):
    """It runs all kernels that syncs launch, and leaves nothing behind."""
    launched = set()
    for module in (gpu.cells, gpu.changes, gpu.classes, gpu.rans, gpu.streams, gpu.sums):
        for name, kernel in [*vars(module).items()]:
            if name.endswith("_kernel"):
                monkeypatch.setattr(module, name, Launched(kernel, name, launched))
    order = {"sign_magnitude": True, "signed": False}
    monkeypatch.setattr(gpu.warmup, "MOST_THRESHOLDS", 1)
    gpu.warmup.warm_up(2, torch.device("cpu"), aligned=True, has_rows=True, block=1024, **order)
    others = {"_mark_kernel", "_digest_deltas_kernel", "_grid_digests_kernel"}  # of trackers, and of ranks of an engine
    kernels = {name for module in (gpu.cells, gpu.changes, gpu.classes, gpu.rans, gpu.sums) for name in vars(module)}
    assert launched == {name for name in kernels if name.endswith("_kernel")} - others


class Launched:
    """A kernel that notes its launches."""

    def __init__(self, kernel, name, launched):
        self.kernel, self.name, self.launched = kernel, name, launched

    def __getitem__(self, grid):
        self.launched.add(self.name)
        return self.kernel[grid]


@inside
@pytest.mark.parametrize("shift", [0, 1])
def test_diff_and_count_in_one_pass(shift):
    """Both passes together find what each finds alone, in pairs and one by one; members are counted right."""
    sizes = [1100, 0, 33]
    olds, news = pair(2, sizes)
    blocks = gpu.changes.Blocks(2, sizes, "cpu", block=1024)
    old, new = (blocks.side([tensor(p, shift) for p in side]) for side in (olds, news))
    limits = np.tile(np.array([0, 9, 300, 20000, 30000], np.uint64), (3, 1))
    classification = gpu.classes.Classification.of(blocks, limits, 11, True)
    words, counts, ranks = gpu.classes.diff_with_class_ranks(blocks, classification, old, new)
    alone = gpu.classes.class_ranks(blocks, classification, old)
    assert all(map(torch.equal, (words, counts), gpu.changes.diff(blocks, old, new)))
    assert all(map(torch.equal, (ranks.members, ranks.low, ranks.high), (alone.members, alone.low, alone.high)))
    filled = [np.append(p & 0x7FFF, np.zeros(-p.size % 1024)).reshape(-1, 1024) for p in olds]
    below = [int((block < 20000).sum()) for part in filled for block in part]
    assert ranks.members.view(6, -1)[:4].sum(0).tolist() == below


@inside
def test_columns_in_one_copy():
    """Columns come as they are, each at a 16-byte boundary."""
    blocks = gpu.changes.Blocks(2, [1], "cpu", block=1024)
    columns = [np.arange(n) - 5 for n in (3, 0, 4, 1)]
    there = blocks.upload_columns(*columns)
    assert [t.tolist() for t in there] == [c.tolist() for c in columns]
    assert not any(t.data_ptr() % 16 for t in there if t.numel())


@inside
def test_samples_of_a_bitmap():
    """Each change by its number: the old and new bits that compacting finds in its place."""
    sizes = [1100, 0, 33, 2500]
    olds, news = pair(2, sizes)
    blocks = gpu.changes.Blocks(2, sizes, "cpu", block=1024)
    old, new = (blocks.side([tensor(p) for p in side]) for side in (olds, news))
    words, counts = gpu.changes.diff(blocks, old, new)
    total = int(counts.sum())
    _, after, before, _ = gpu.changes.compact(blocks, old, new, words, counts, total, keep_old=True)
    which = torch.arange(0, total, 3)
    found = gpu.cells.sample(blocks, old, new, words, counts, which)
    assert torch.equal(found, torch.stack((before[which], after[which])))


@inside
@pytest.mark.parametrize("fault", ["none", "part", "bucket", "chunks", "huge"])
def test_how_changes_lie(fault):
    """Where the numbers of each tile and class begin, and how large chunks are; counts that do not fit are noticed.

    Whatever the counts are, no chunk is larger than the room for it.
    """
    rng, bucket, chunk = np.random.default_rng(0), np.array([0, 0, 1]), 16
    blocks = gpu.changes.Blocks(2, [5000, 900, 3000], "cpu", block=1024)
    tiles = gpu.classes.Tiles.of(blocks, 11)
    counts = rng.integers(0, 9, (tiles.count, 3))
    changes = np.bincount(tiles.part, counts.sum(1)).astype(np.int64)
    totals = np.stack([np.bincount(bucket[tiles.part], counts[:, c], 2) for c in range(3)]).astype(np.int64)
    many = -(-totals // chunk)
    room = np.minimum(many * chunk, np.bincount(bucket, changes).astype(np.int64))
    begin = np.cumsum(room).reshape(3, 2) - room
    if fault == "part":
        counts[0, 0] += 1
        counts[3, 0] -= 1 if counts[3, 0] else -1
    elif fault == "huge":
        counts[0, 0] = 2**32 - 1
    elif fault == "bucket":
        counts[-1, 1] += 1
    elif fault == "chunks":
        many[1, 0] -= 1
    bad, told = torch.zeros(1, dtype=torch.int32), torch.from_numpy(counts.astype(np.uint32).view(np.int32))
    args = told.reshape(-1), bucket, changes, begin.ravel(), many.ravel(), chunk, bad
    layout, sizes = gpu.classes.change_layout(blocks, tiles, *args)
    assert int(bad) == (fault != "none")
    n = int(many.sum())
    assert torch.equal(sizes[:n], sizes[n:])
    rooms = [min(chunk, r - i * chunk) for r, m in zip(room.ravel(), many.ravel(), strict=True) for i in range(m)]
    assert (sizes[:n].numpy() <= rooms).all()
    if fault == "none":
        ends = [t - i * chunk for t, m in zip(totals.ravel(), many.ravel(), strict=True) for i in range(m)]
        assert sizes[:n].tolist() == np.minimum(ends, chunk).tolist()
        flat = counts.ravel()
        assert layout.by_tile.tolist() == (np.cumsum(flat) - flat).tolist()
        before = np.cumsum(counts, 0) - counts
        before[bucket[tiles.part] == 1] -= counts[bucket[tiles.part] == 0].sum(0)
        assert layout.by_class.view(3, -1).tolist() == (begin[:, bucket[tiles.part]] + before.T).tolist()


@inside
def test_numbers_above_the_limit_are_refused():
    """They are noticed, and zeros take their place: later kernels find their way by them."""
    blocks = gpu.changes.Blocks(2, [1], "cpu", block=1024)
    numbers = np.array([3, 300, 0xFFFFFFFB, 17, 40], np.uint32)
    tokens, lows = (np.frombuffer(part, np.uint8).copy() for part in reference.pack(numbers))
    values = torch.full((5,), -1, dtype=torch.int32)
    for limit, wrong in ((2**32 - 1, 0), (300, 1)):
        bad = torch.zeros(1, dtype=torch.int32)
        chunks = gpu.rans.EncodedChunks(*blocks.upload_columns([0], [5], [0], [lows.size]))
        gpu.rans.unpack(chunks, torch.from_numpy(tokens), torch.from_numpy(lows), values, limit, bad)
        assert int(bad) == wrong
        assert np.array_equal(array(values, 4), np.where(numbers > limit, 0, numbers))


@inside
def test_a_gap_that_leaves_its_tile_is_refused():
    """Ranks that no member of the class has are noticed, and then nothing is written."""
    old, _ = pair(2, [2500], share=0.02)
    blocks = gpu.changes.Blocks(2, [2500], "cpu", block=1024)
    side = blocks.side([tensor(old[0])])
    classification = gpu.classes.Classification.of(blocks, np.array([[20000]]), 11, True)
    tiles, bad = gpu.classes.Tiles.of(blocks, 11), torch.zeros(1, dtype=torch.int32)
    members = int(((old[0][2048:] & 0x7FFF) < 20000).sum())
    counts, steps = torch.tensor([[0, 0], [1, 0]], dtype=torch.int32), torch.ones(1, dtype=torch.int16)
    ranks = gpu.classes.class_ranks(blocks, classification, side)
    for gap, wrong in ((members - 1, 0), (2500, 1)):
        numbers = change_numbers(counts, torch.tensor([gap], dtype=torch.int32), steps)
        found = gpu.classes.class_positions(blocks, classification, side, tiles, ranks, numbers, bad)
        assert int(bad) == wrong
    gpu.classes.write(side, found, steps, bad)
    assert np.array_equal(array(side.owners[0], 2), old[0])


@inside
def test_ulp_is_that_of_the_cpu():
    """Gaps, steps and counts of tiles are the CPU's, token by token and bit by bit."""
    sizes, log = [2500, 9, 1100], 11
    olds, news = pair(2, sizes, share=0.02)
    blocks = gpu.changes.Blocks(2, sizes, "cpu", block=1024)
    old, new = (blocks.side([tensor(p) for p in side]) for side in (olds, news))
    plan = gpu.streams.StreamPlan.of(blocks, [0, 0, 0], log, chunk=256)
    encoded = gpu.streams.encode(plan, old, new)
    found = [reference.diff(a, b) for a, b in zip(olds, news, strict=True)]
    told = [reference.tile_gaps(p, n, 1 << log) for (p, _, _), n in zip(found, sizes, strict=True)]
    gaps = np.array([gap for _, part in told for gap in part])
    steps = np.concatenate([reference.steps(x, y, True) for _, x, y in found])
    data = encoded.data.numpy().tobytes()
    rows = streams_of(encoded.directory, 0)
    for stream, values in ((4, np.array(told[0][0])), (6, gaps), (8, steps)):
        coder, places = rows[stream]
        lows = rows.get(stream + 1, (0, []))[1] or [(0, 0)] * len(places)
        for chunk, ((at, n), (low_at, low_n)) in enumerate(zip(places, lows, strict=True)):
            tokens, tail = reference.pack(values[256 * chunk : 256 * chunk + 256])
            coded = data[at : at + n]
            assert tokens == (bytes(Rans().decode(coded, len(tokens))) if coder == Rans.id else coded)
            assert tail == data[low_at : low_at + low_n]
    bad = torch.zeros(1, dtype=torch.int32)
    located = decoded(plan, old, encoded, bad)
    assert int(bad) == 0
    assert torch.equal(gpu.changes.sum_slots(located.sums), encoded.digest_delta)
    gpu.classes.write(old, located, located.new, bad)
    assert all(map(torch.equal, old.owners, new.owners))


@inside
@pytest.mark.parametrize(("gap", "wrong"), [(451, 0), (452, 1), (2**31, 1)])
def test_a_gap_that_leaves_its_tile_or_part_is_refused(gap, wrong):
    """Where a gap leads out, that is noticed, and then nothing is written."""
    blocks = gpu.changes.Blocks(2, [2500], "cpu", block=1024)
    side = blocks.side([tensor(np.zeros(2500, np.uint16))])
    tiles, bad = gpu.classes.Tiles.of(blocks, 11), torch.zeros(1, dtype=torch.int32)
    log, steps = torch.tensor([11], dtype=torch.int32), torch.ones(1, dtype=torch.int16)
    gaps = torch.from_numpy(np.array([gap], np.uint32).view(np.int32))
    numbers = change_numbers(torch.tensor([[0], [1]], dtype=torch.int32), gaps, steps)
    found = gpu.cells.tile_positions(blocks, side, tiles, log, numbers, bad, True)
    assert int(bad) == wrong
    gpu.classes.write(side, found, found.new, bad)
    assert np.flatnonzero(side.owners[0].numpy()).tolist() == ([] if wrong else [2048 + gap])


@inside
def test_rans_chunks_are_those_of_the_cpu():
    """Tables, states and words are; spoiled chunks get the same verdict from both decoders.

    Chunks of several lanes are long, and the interpreter is slow: the benchmark checks them on a GPU.
    """
    rng = np.random.default_rng(0)
    values = np.minimum(rng.geometric(0.4, 60 + 30 + 20), 200).astype(np.uint16)
    values[90:] = 7  # a single symbol
    blocks = gpu.changes.Blocks(2, [1], "cpu", block=1024)
    cuts, _ = gpu.rans.NumberChunks.of_streams(blocks, [60, 30, 20], 1 << 16)
    packed = gpu.rans.PackedNumbers.of(cuts, 16)
    packed.pack(0, 3, torch.from_numpy(values.view(np.int16)))
    code = gpu.rans.encode(packed)
    tokens, chunks = packed.tokens.numpy(), []
    _, lengths, made = packed.numbers.tolist()
    for i, (begin, n) in enumerate(zip(cuts.host_begin, cuts.host_size, strict=True)):
        table = code.tables.numpy().view(np.uint8)[1024 * i :][: lengths[i]]
        states = code.states.numpy()[32 * i : 32 * i + int(gpu.rans.lanes(n))]
        words = code.words.numpy()[begin + n - made[i] : begin + n]
        chunks.append(table.tobytes() + states.tobytes() + words.tobytes())
        assert chunks[-1] == bytes(Rans().encode(tokens[begin : begin + n].tobytes()))
    spoiled = [chunks[1], *(bytearray(chunks[1]) for _ in range(4))]
    for at, chunk in zip((2, 4, 9, len(chunks[1]) - 1), spoiled[1:], strict=True):
        chunk[at] ^= 1 << at % 8
    for chunk, size in [(chunks[0], 60), *((bytes(c), 30) for c in spoiled)]:
        out, bad = torch.zeros(size, dtype=torch.uint8), torch.zeros(1, dtype=torch.int32)
        one = gpu.rans.EncodedChunks(*blocks.upload_columns([0], [size], [0], [len(chunk)]))
        data = torch.from_numpy(np.frombuffer(chunk, np.uint8).copy())
        gpu.rans.decode(blocks, one, data, out, bad)
        try:
            wanted = bytes(Rans().decode(chunk, size))
        except InvalidField:
            assert int(bad) == 1
        else:
            assert (int(bad), out.numpy().tobytes()) == (0, wanted)
