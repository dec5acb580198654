"""Weights on a device: changes are found, coded, decoded and landed there, bit for bit as on the CPU.

Where there is no GPU, Triton's interpreter runs the kernels on CPU tensors, in a process of its own, and every torch
tensor passes for one on a device: what is near is then an array. `python -m tests.patch.test_device` does either.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace

import numpy as np
import pytest

from tests.gpu_runs import hasten_interpreter, only_compile, run, streams_of

pytest.importorskip("triton")
torch = pytest.importorskip("torch")

CUDA = torch.cuda.is_available()
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
inside = pytest.mark.skipif(not CUDA and not INTERPRETED, reason="runs in the interpreter, see test_interpreted")

if CUDA or INTERPRETED:
    import sparserl
    from sparserl import Part, Region, Shards, codec, errors
    from sparserl.codec.coders import CODERS, Zstd
    from sparserl.kernels import cpu, gpu
    from sparserl.patch import Patch, capture, stage_all
    from sparserl.patch import gpu_apply as device_apply
    from sparserl.patch import gpu_compare as device_diff
    from sparserl.patch.assemble import rewrite
    from sparserl.plan import buckets
    from sparserl.session.baseline import NoBaseline, choose
    from sparserl.weights import memory, staging
    from sparserl.weights import on_gpu as device
    from sparserl.weights.dtypes import BY_NAME, Bits
    from sparserl.weights.local import LocalWeights
    from sparserl.wire import encode_bucket, encode_table, table_hash
    from tests.classes import always

    DEVICE = torch.device("cuda", 0) if CUDA else torch.device("cpu")
    FEW = 10  # changes that are coded, of 9000 elements: the interpreter takes 10 ms for a symbol

if INTERPRETED and not CUDA:
    hasten_interpreter()


outside = pytest.mark.skipif(CUDA or INTERPRETED, reason="starts a process of its own")


def run_all(which):
    command = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", which, __file__)
    return run(*command, TRITON_INTERPRET="0" if CUDA else "1")


@outside
@pytest.mark.parametrize("which", ["not long", pytest.param("long", marks=pytest.mark.long)])
def test_interpreted(which):
    """The tests below pass in Triton's interpreter."""
    assert "passed" in run_all(which)


@outside
def test_compiled():
    """The compiler takes the kernels that are used here alone, for an H200: the interpreter accepts what it rejects."""
    assert "compiled 8 kernels" in run(__file__, "compile", TRITON_INTERPRET="0")


def poisoned(_, size, dtype):
    """Whatever a kernel does not write is wrong, not zero by chance."""
    return torch.full((size * dtype.itemsize,), 0xA5, dtype=torch.uint8).view(dtype)


@pytest.fixture(autouse=True)
def _there(monkeypatch):
    """Torch tensors are on a device, few changes are coded there too, and classes always pay."""
    if CUDA or INTERPRETED:
        if not CUDA:
            monkeypatch.setattr(memory, "is_on_gpu", lambda _: True)
            monkeypatch.setattr(gpu.changes.Blocks, "empty", poisoned)
        monkeypatch.setattr(device_diff, "FEW_CHANGES", 0)
        monkeypatch.setattr(device_apply, "FEW_BYTES", 0)
        monkeypatch.setattr(device_apply, "FEW_CHANGES", 0)
        monkeypatch.setattr(device_diff, "decide", always)
        monkeypatch.setattr(buckets, "choose", always)


@pytest.fixture
def stay(monkeypatch):
    """No bits of weights come to the host but those that changed, and tensors so small that most of them did."""
    read = staging.StagedMemory.read

    def small(self, region):
        assert np.prod(region.size if region else self.shape) <= 70, "weights were brought to the host"
        return read(self, region)

    monkeypatch.setattr(staging.StagedMemory, "read", small)
    monkeypatch.setattr(staging.StagedMemory, "view", None)


def far(bits):
    """Bits as a torch tensor on the device."""
    signed = bits.array.view(np.uint8 if bits.dtype.width == 1 else f"i{bits.dtype.width}").copy()
    return torch.from_numpy(signed).view(getattr(torch, bits.dtype.name)).to(DEVICE)


def near(tensor):
    """A tensor on the device as bits in host memory."""
    if isinstance(tensor, Bits):
        return Bits(tensor.array.copy(), tensor.dtype)
    dtype = BY_NAME[str(tensor.dtype).removeprefix("torch.")]
    ints = tensor.detach().contiguous().view(gpu.changes.INTS[dtype.width]).cpu().numpy()
    return Bits(ints.view(dtype.uint).copy().reshape(tuple(tensor.shape)), dtype)


def there(weights):
    return {name: far(bits) for name, bits in weights.items()}


def here(weights):
    return {name: near(bits) for name, bits in weights.items()}


def same(a, b):
    a, b = here(a), here(b)
    return a.keys() == b.keys() and all(np.array_equal(a[name].array, b[name].array) for name in a)


def drawn(name, shapes, changes=None, seed=0):
    """Two versions: small steps in as many elements as said, of each tensor some; one named `all` has other bits."""
    rng, dtype = np.random.default_rng(seed), BY_NAME[name]
    total = sum(int(np.prod(shape)) for n, shape in shapes.items() if n != "all")
    changes = FEW * max(1, total // 9000) if changes is None else changes
    old, new = {}, {}
    for tensor, shape in shapes.items():
        bits = rng.integers(0, 256, int(np.prod(shape)) * dtype.width, dtype=np.uint8).view(dtype.uint)
        other = bits.copy()
        where = rng.permutation(bits.size)[: -(-changes * bits.size // max(1, total))]
        other[where] += rng.integers(1, 4, where.size).astype(dtype.uint)
        if tensor == "all":
            other = rng.permutation(bits)
        old[tensor], new[tensor] = Bits(bits.reshape(shape), dtype), Bits(other.reshape(shape), dtype)
    return old, new


SHAPES = {"empty": (0, 3), "one": (), "tiny": (5,), "odd": (7, 41), "large": (3, 600_001 if CUDA else 3001)}
TWO = {"odd": (7, 41), "large": (3, 600_001 if CUDA else 2003)}


def profiles(patch):
    return {head.profile.name for head in patch.heads}


def alike(a, b):
    """Patches with the same ends and entries, whatever their streams are."""
    told = [sorted((e.tensor, str(e.region), e.changed, e.dense) for e in patch) for patch in (a, b)]
    return told[0] == told[1] and (a.base, a.result, a.changed) == (b.base, b.result, b.changed)


@inside
@pytest.mark.parametrize(
    ("name", "profile"),
    [
        *((n, "ctx") for n in ("bfloat16", "float32", "float8_e4m3fn", "int32")),
        *(pytest.param(n, "ctx", marks=pytest.mark.long) for n in ("float16", "int8", "int64")),
        *(("bfloat16", p) for p in ("raw", "gap", "ulp")),
        *(pytest.param(n, p, marks=pytest.mark.long) for n, p in (("bfloat16", "auto"), ("int32", "ulp"))),
    ],
)
def test_round_trips(name, profile, stay):
    """Whoever encodes and whoever decodes, the new bits come out; no weights come to the host."""
    every = (name, profile) == ("bfloat16", "ctx")
    old, new = drawn(name, SHAPES if every else TWO if name == "bfloat16" else {"odd": TWO["large"]})
    known = None if every else sparserl.digest(old)
    mine, theirs = (sparserl.diff(f(old), f(new), profile=profile, base_digest=known) for f in (there, here))
    assert alike(mine, theirs)
    assert ("ctx" if profile == "auto" else profile) in profiles(mine)
    both = [(mine, there(old))] if name == "bfloat16" else []
    for patch, weights in ((mine, here(old)), *both, (theirs, there(old))):
        done = Patch.from_bytes(patch.to_bytes()).apply(weights, digest=known)
        assert (done.changed, done.already) == (patch.changed, False)
        assert same(weights, new)
        assert not every or (sparserl.digest(weights) == patch.result and patch.apply(weights).already)


@inside
@pytest.mark.long
def test_every_pattern():
    """Payloads of NaNs, signs of zeros, infinities and subnormals are bits like all others."""
    dtype = BY_NAME["bfloat16"]
    old = np.arange(1 << 16, dtype=np.uint16)[:: 1 if CUDA else 512].repeat(2)
    old[::2] = [0x7FC0, 0x7F81, 0xFFFF, 0x0000, 0x8000, 0x7F80, 0x0001, 0x8001] * (old.size // 16)
    new = old.copy()
    new[::16] ^= 0x8000
    new[1::16] ^= 0x0041
    was, now = {"w": Bits(old, dtype)}, {"w": Bits(new, dtype)}
    for profile in ("ulp", "ctx"):
        patch = sparserl.diff(there(was), there(now), profile=profile, base_digest=sparserl.digest(was))
        weights = there(was)
        patch.apply(weights, digest=patch.base)
        assert same(weights, now)
        assert patch.changed == (old != new).sum()


@inside
@pytest.mark.long
def test_dense_entries_and_many_changes():
    """Tensors that change as a whole are sent dense, beside others that are not; both land on either side."""
    old, new = drawn("bfloat16", {"all": (40,), "large": (9000,)})
    mine, theirs = (sparserl.diff(f(old), f(new), profile="ctx") for f in (there, here))
    assert any(e.dense for e in theirs)
    assert {e.tensor for e in mine if e.dense} == {e.tensor for e in theirs if e.dense}
    for patch in (mine, theirs):
        for weights in (there(old), here(old)):
            patch.apply(weights, digest=patch.base)
            assert same(weights, new)


@inside
def test_bytes_are_sent_one_behind_the_other():
    """Whoever owns them, and whether they can be written to or not; none is nothing to send."""
    parts = [b"ab", memoryview(bytearray(b"cde")), b"", memoryview(b"xfghx")[1:-1]]
    assert bytes(device.send(parts, DEVICE).cpu().numpy()) == b"abcdefgh"


@inside
def test_nothing_changed():
    """A patch of nothing lands on weights that stay as they are."""
    old, _ = drawn("bfloat16", SHAPES)
    patch, weights = sparserl.diff(there(old), there(old)), there(old)
    assert (patch.changed, patch.buckets, patch.base) == (0, 0, sparserl.digest(old))
    assert patch.apply(weights).already
    assert same(weights, old)


@inside
def test_small_weights_are_decoded_by_the_cpu(monkeypatch):
    """Below the crossover old bits are brought to the host, and the changes written back."""
    monkeypatch.setattr(device_apply, "FEW_BYTES", 1 << 30)
    monkeypatch.setattr(device_apply, "FEW_CHANGES", 1 << 30)
    monkeypatch.setattr(device_apply, "_located", None)
    old, new = drawn("bfloat16", TWO)
    for profile in ("ctx", "ulp"):
        weights = there(old)
        sparserl.diff(old, new, profile=profile).apply(weights)
        assert same(weights, new)


@inside
def test_squashed_and_inverted():
    """Patches of patches are made with a base that is on the device."""
    old, new = drawn("bfloat16", TWO)
    last = {name: Bits(bits.array[::-1].copy(), bits.dtype) for name, bits in new.items()}
    one, two = sparserl.diff(old, new, profile="ctx"), sparserl.diff(new, last)
    for patch, start, end in (
        (sparserl.squash(one, two, base=there(old)), old, last),
        (one.invert(there(old)), new, old),
    ):
        weights = there(start)
        patch.apply(weights)
        assert same(weights, end)


@inside
def test_few_changes_are_left_to_the_cpu(monkeypatch, stay):
    """Below the crossover nothing is coded on the device, and still no weights leave it."""
    monkeypatch.setattr(device_diff, "FEW_CHANGES", 1 << 30)
    monkeypatch.setattr(device_diff, "_FEW_FOR_CTX", 1 << 30)
    monkeypatch.setattr(device_diff, "_encode", None)
    old, new = drawn("bfloat16", TWO)
    for profile in ("ctx", "auto"):
        patch, weights = sparserl.diff(there(old), there(new), profile=profile), there(old)
        assert profiles(patch) == {"ulp"}
        patch.apply(weights)
        assert same(weights, new)


@inside
def test_mixed_weights():
    """Some tensors on the device, some not, also in one bucket; a side in host memory and one that is not."""
    old, new = drawn("bfloat16", TWO)

    def mixed(weights):
        return {n: far(b) if n == "odd" else near(b) for n, b in weights.items()}

    for profile in ("gap", "ctx"):
        for was, now in ((mixed(old), mixed(new)), (here(old), there(new)), (there(old), mixed(new))):
            patch = sparserl.diff(was, now, profile=profile)
            assert (patch.base, patch.result) == (sparserl.digest(old), sparserl.digest(new))
            patch.apply(was, digest=patch.base)
            assert same(was, new)


@pytest.mark.long
@inside
def test_any_layout():
    """Transposed tensors and slices of columns are read and written where they are; so are shards of both kinds."""
    old, new = drawn("bfloat16", {"w": (40, 30), "v": (20, 10)})
    for profile in ("ctx", "ulp"):
        patch = sparserl.diff(there(old), there(new), profile=profile)
        room = torch.zeros((40, 64), dtype=torch.bfloat16, device=DEVICE)
        room[:, 7:37] = far(old["w"])
        weights = {"w": room[:, 7:37], "v": far(Bits(old["v"].array.T.copy(), old["v"].dtype)).T}
        assert sparserl.digest(weights) == patch.base
        assert alike(sparserl.diff(weights, there(new), profile=profile), patch)
        patch.apply(weights)
        assert same(weights, new)
        assert not room[:, :7].any()
        assert not room[:, 37:].any()
    table = sparserl.tensor_table(old)
    for box in (Region((10, 0), (20, 30)), Region((0, 5), (40, 9))):
        was, now, bare = (Shards(table, [Part("w", box, f(v["w"].array[box.slices].copy()))]) for v, f in (
            (old, lambda a: far(Bits(a, old["w"].dtype))),
            (new, lambda a: far(Bits(a, old["w"].dtype))),
            (new, lambda a: Bits(a, old["w"].dtype)),
        ))  # fmt: skip
        patch = sparserl.diff(was, now, profile="ctx")
        assert patch.result == sparserl.digest(bare)
        patch.apply(was)
        assert np.array_equal(near(was.parts[0].data).array, bare.parts[0].data.array)


def forged(patch, change, **fields):
    """A patch whose first bucket has other streams and fields, with every checksum right."""
    head, reader = patch.opened(0)
    head = replace(head, **fields)
    streams = {stream: (coder, [bytes(c) for c in chunks]) for stream, (coder, chunks) in reader.left().items()}
    streams.pop(codec.Stream.ENTRIES, None)
    change(streams)
    others = [patch.bucket(i) for i in range(1, patch.buckets)]
    bucket = encode_bucket(head, streams, table_hash(encode_table(patch.table)))
    return Patch(rewrite(patch.table, [bucket, *others], patch.base, patch.result, patch.changed, None))


def flip(stream, at):
    def change(streams):
        coder, chunks = streams[stream]
        spoiled = bytearray(chunks[0])
        spoiled[at] ^= 1
        streams[stream] = coder, [bytes(spoiled), *chunks[1:]]

    return change


def refused(patch, change, old, weights):
    """A patch that was changed so is refused by the device as by the CPU, and the weights are as before."""
    bad = forged(patch, change)
    with pytest.raises(errors.FormatError) as on_cpu:
        bad.apply(here(old))
    with pytest.raises(errors.FormatError) as on_device:
        bad.apply(weights)
    assert type(on_device.value) is type(on_cpu.value)
    assert same(weights, old)


@inside
def test_spoiled_buckets():
    """Flipped bits, streams that are missing or too long: an error of the CPU's kind, and weights as before."""
    old, new = drawn("bfloat16", {"w": (2000,)}, changes=20)
    patch = sparserl.diff(old, new, profile="ctx")
    streams = dict(patch.opened(0)[1].left())
    weights = there(old)
    data = bytearray(patch.to_bytes())
    data[len(data) // 2] ^= 4
    with pytest.raises(errors.FormatError):
        Patch.from_bytes(bytes(data)).apply(weights)
    first = min(stream for stream in streams if stream >= codec.Stream.CLASS)
    changes = [
        flip(codec.Stream.CLASSES, 1),
        flip(codec.Stream.TILE_TOKENS, 0),
        flip(first, -1),
        lambda s: s.pop(first),
        lambda s: s.update({first: (s[first][0], [*s[first][1], b"x"])}),
        lambda s: s.update({codec.Stream.POSITIONS: (CODERS[0], [b"1234"])}),
        lambda s: s.update({first + 1: (CODERS[0], [b"\0" * 99])}),
        lambda s: s.update({codec.Stream.DENSE_PLANE: (CODERS[0], [b"x"])}),
    ]
    for change in changes:
        refused(patch, change, old, weights)
    patch.apply(weights)
    assert same(weights, new)


@inside
@pytest.mark.parametrize("profile", [pytest.param("raw", marks=pytest.mark.long), "ulp"])
def test_spoiled_buckets_without_classes(profile, monkeypatch):
    """Positions and gaps that lead astray, streams that are missing, too short or too long are refused alike."""
    monkeypatch.setattr(buckets, "_TILE_CHANGES", 1)  # several tiles, and so counts
    old, new = drawn("bfloat16", {"v": (70_000,), "w": (2000,)}, changes=20)
    patch, weights = sparserl.diff(old, new, profile=profile), there(old)
    first = codec.Stream.POSITIONS if profile == "raw" else codec.Stream.GAP_TOKENS
    changes = [
        lambda s: s.pop(first),
        lambda s: s.update({first: (s[first][0], [*s[first][1], b"x"])}),
        lambda s: s.update({codec.Stream.CLASS: (CODERS[0], [b"x"])}),
        lambda s: s.update({first: (s[first][0], [s[first][1][0][:-1]])}),
        flip(first, 2),
    ]
    if profile == "ulp":
        changes += [flip(codec.Stream.TILE_TOKENS, 0), flip(codec.Stream.GAP_LOWS, 0)]
    for change in changes:
        refused(patch, change, old, weights)
    patch.apply(weights)
    assert same(weights, new)


@inside
@pytest.mark.parametrize("profile", ["ctx", "ulp"])
def test_tokens_in_zstd(profile, monkeypatch):
    """The device reads what the CPU may write: what is in zstd is carried over as tokens."""
    monkeypatch.setattr(buckets, "_TILE_CHANGES", 1)  # several tiles, and so counts
    old, new = drawn("bfloat16", {"w": (70000,)}, changes=20)
    patch = sparserl.diff(old, new, profile=profile)
    layout, told = patch.heads[0].layout, codec.Stream
    sizes = {told.TILE_TOKENS: (4 if profile == "ctx" else 1) * codec.ctx.tiles(layout)}
    if profile == "ulp":
        sizes |= {told.GAP_TOKENS: layout.changes, told.STEP_TOKENS: layout.changes}

    def squeezed(streams):
        for stream, size in sizes.items():
            coder, (chunk,) = streams[stream]
            streams[stream] = Zstd(), [Zstd().encode(coder.decode(chunk, size))]

    other, weights = forged(patch, squeezed), there(old)
    held = LocalWeights.of(weights)
    assert device_apply.bucket(held, 0, *other.opened(0)) is not None
    other.apply(weights)
    assert same(weights, new)


@inside
@pytest.mark.parametrize("profile", ["raw", "ulp", "ctx"])
def test_chunks_are_found(profile, monkeypatch):
    """What is given to the device has every chunk of the streams, in order, where the directory says."""
    monkeypatch.setattr(buckets, "CHUNK_LOG", 8)
    old, new = drawn("bfloat16", {"v": (50,), "w": (40_000,), "all": (90,)}, changes=3000)
    patch = sparserl.diff(old, new, profile=profile)
    head, reader = patch.opened(0)
    wanted = {s: (coder.id, [bytes(c) for c in chunks]) for s, (coder, chunks) in reader.left().items()}
    held, streams = LocalWeights.of(there(old)), (codec.Stream.POSITIONS, codec.Stream.WORDS)
    found = [device_apply.bucket(held, 0, head, reader.copy()) for _ in range(2)]
    assert found[0].dense
    if profile == "raw":
        assert [bytes(found[0].of(s)) for s in streams] == [b"".join(wanted[s][1]) for s in streams]
        return
    arrived = device_apply._arrived(found, DEVICE)
    data = bytes(arrived.data.cpu().numpy())
    for b in range(2):
        rows = streams_of(arrived.directory, b)
        for stream, (coder, places) in rows.items():
            assert (coder, [data[at : at + n] for at, n in places]) == wanted[stream]
        missing = {s for s in wanted if s not in rows and not codec.Stream.is_dense(s)}
        assert missing <= {codec.Stream.CLASSES, codec.Stream.TILE_TOKENS, codec.Stream.TILE_LOWS}
    assert max(len(chunks) for _, chunks in wanted.values()) > 3


@inside
@pytest.mark.parametrize("profile", ["raw", *(pytest.param(p, marks=pytest.mark.long) for p in ("ulp", "ctx"))])
def test_streams_of_several_chunks(profile, monkeypatch):
    """They are decoded on the device, whoever cut them."""
    monkeypatch.setattr(buckets, "CHUNK_LOG", 8)
    monkeypatch.setattr(device_diff, "CHUNK_LOG", 8)
    monkeypatch.setattr(gpu.cells, "_SPAN", 100)
    old, new = drawn("bfloat16", {"w": (9000,)}, changes=270)
    for f in (here, there):
        patch, weights = sparserl.diff(f(old), f(new), profile=profile), there(old)
        assert patch.heads[0].chunk_log == 8
        with monkeypatch.context() as context:
            context.setattr(Patch, "decode", None)  # by the CPU
            patch.apply(weights, digest=patch.base)
        assert same(weights, new)


@inside
def test_counts_of_tiles_that_are_negative():
    """2^31 is no 32-bit count, though the counts of every part and class then add up to what they should be."""
    old, new = drawn("bfloat16", {"a": (2000,), "b": (2000,), "c": (2000,)}, changes=60)
    patch = sparserl.diff(old, new, profile="ctx")
    names = codec.Stream.TILE_TOKENS, codec.Stream.TILE_LOWS
    layout, reader = patch.heads[0].layout, patch.opened(0)[1]
    n = codec.numbers.read(layout, reader, 12, 1 << 31, np.int64, *names).reshape(3, 4)
    v, top, parts, totals = n.copy(), 1 << 31, n.sum(1), n.sum(0)
    v[0, 0] = v[1, 1] = v[2, 2] = top
    v[0, 1] = top // 2
    v[0, 2] = top + parts[0] - n[0, 3] - v[0, 1]
    v[1, 2] = top + totals[2] - v[0, 2]
    v[1, 0] = top + parts[1] - n[1, 3] - v[1, 2]
    v[2, 0], v[2, 1] = top + totals[0] - v[1, 0], top + totals[1] - v[0, 1]
    wrapped = v.astype(np.int32).astype(np.int64)
    assert np.array_equal(wrapped.sum(0), totals)
    assert np.array_equal(wrapped.sum(1), parts)

    def change(streams):
        streams.update(codec.code(codec.numbers.write(layout, v.ravel().astype(np.uint32), *names)))

    bad, weights = forged(patch, change, tile_log=31), there(old)
    for where in (here(old), weights):
        with pytest.raises(errors.InvalidField, match="tile"):
            bad.apply(where)
    assert same(weights, old)


@inside
def test_wrong_base():
    """Weights that are not the base are refused; vouched for wrongly, they are as they were in the end."""
    old, new = drawn("bfloat16", {"w": (3000,)})
    where = int(np.flatnonzero(old["w"].array != new["w"].array)[5])
    for profile in ("ctx", "ulp"):
        patch, weights = sparserl.diff(there(old), there(new), profile=profile), there(old)
        weights["w"].view(torch.int16)[where] ^= 3
        before = here(weights)
        with pytest.raises(errors.WrongBase):
            patch.apply(weights)
        with pytest.raises(errors.SparserlError):
            patch.apply(weights, digest=patch.base)
        assert same(weights, before)


@inside
def test_staged_and_committed():
    """Staging writes nothing, a commit can be taken back, and weights that moved meanwhile are left as they are."""
    old, new = drawn("bfloat16", {"all": (20,), "large": (9000,)})
    for profile in ("ctx", "gap"):
        patch, weights = sparserl.diff(there(old), there(new), profile=profile), there(old)
        landing = stage_all(patch, weights)
        assert same(weights, old)
        undo = landing.commit()
        assert same(weights, new)
        undo()
        assert same(weights, old)
        where = int(np.flatnonzero(old["large"].array != new["large"].array)[3])
        weights["large"].view(torch.int16)[where] ^= 1
        before = here(weights)
        with pytest.raises(errors.WrongBase):
            landing.commit()
        assert same(weights, before)
        weights["large"].view(torch.int16)[where] ^= 1
        weights["all"].view(torch.int16)[2] ^= 1  # which is written last
        before = here(weights)
        with pytest.raises(errors.WrongBase):
            landing.commit()
        assert same(weights, before)


@pytest.mark.long
@inside
def test_overlapping_entries_are_not_staged():
    """A patch that changes elements twice is refused before a bit is written, though its digests add up."""
    old, new = drawn("bfloat16", {"w": (2000,)}, changes=20)
    patch = sparserl.diff(old, new, profile="ctx")
    bucket, result = patch.bucket(0), patch.result + patch.result - patch.base
    twice = Patch(rewrite(patch.table, [bucket, bucket], patch.base, result, 2 * patch.changed, None))
    for weights in (here(old), there(old)):
        with pytest.raises(errors.RegionOverlap):
            stage_all(Patch.from_bytes(twice.to_bytes()), weights).commit()
        assert same(weights, old)


@inside
@pytest.mark.long
def test_tied_tensors():
    """Two names for one tensor change together, or not at all; tensors that share some elements are refused."""
    old, new = drawn("bfloat16", {"a": (50, 20)})
    twice = [{"a": v["a"], "b": v["a"]} for v in (old, new)]
    patch = sparserl.diff(*map(there, twice), profile="ctx")
    shared = far(old["a"])
    patch.apply({"a": shared, "b": shared})
    assert same({"a": shared}, new)
    split = sparserl.diff(there(twice[0]), there({"a": new["a"], "b": old["a"]}), profile="ctx")
    shared = far(old["a"])
    with pytest.raises(errors.TiedConflict):
        split.apply({"a": shared, "b": shared})
    assert same({"a": shared}, old)
    flat = shared.reshape(-1)
    apart = sparserl.diff(*map(there, drawn("bfloat16", {"a": (9,), "b": (9,)})), profile="raw")
    with pytest.raises(errors.SparserlError):
        apart.apply({"a": flat[:9], "b": flat[5:14]}, digest=apart.base)


@pytest.mark.long
@inside
def test_captured():
    """What was captured can be encoded in any profile after the weights went on, and turned round."""
    old, new = drawn("bfloat16", TWO)
    was, now = there(old), there(new)
    found = capture(was, now)
    for tensor in now.values():
        tensor.zero_()
    for patch in (found.encode(), found.encode(link="100GB/s"), found.back()):
        start, end = (new, old) if patch.base == sparserl.digest(new) else (old, new)
        weights = here(start)
        patch.apply(weights)
        assert same(weights, end)
    assert profiles(found.encode(link="100GB/s")) != profiles(found.encode(link="1Mbit"))
    for allowed in ({"raw"}, {"gap"}, {"ulp", "gap"}):
        stream = found.stream(profiles=allowed)
        patch, weights = stream.patch([*stream.buckets]), there(old)
        assert profiles(patch) <= allowed
        patch.apply(weights)
        assert same(weights, new)


@pytest.mark.long
@inside
def test_large_tensors_are_cut(monkeypatch):
    """Pieces, groups and buckets have bounds; the parts of a tensor are entries of their own, in any of them."""
    monkeypatch.setattr(device, "LARGE_BYTES", 6000)
    monkeypatch.setattr(device, "GROUP_BYTES", 20000)
    monkeypatch.setattr(device_apply, "GROUP_BYTES", 20000)
    monkeypatch.setattr(device_diff, "COVER_BYTES", 10000)
    old, new = drawn("bfloat16", {"a": (20, 500), "b": (77,)}, changes=20)
    patch, weights = sparserl.diff(there(old), there(new), profile="ctx"), there(old)
    assert len([*patch]) > 4
    assert patch.buckets > 2
    assert (patch.base, patch.result) == (sparserl.digest(old), sparserl.digest(new))
    patch.apply(weights, digest=patch.base)
    assert same(weights, new)
    weights = here(old)
    patch.apply(weights)
    assert same(weights, new)


def renamed(weights):
    weights["a"], weights["b"] = weights["b"], weights["a"]


@inside
def test_nothing_is_taken_for_what_it_was():
    """Tables are kept from sync to sync. Weights that lie elsewhere, or are others by the same name, have their own."""
    old, new = drawn("bfloat16", {"a": (90, 100), "b": (90, 100)}, changes=20)
    _, other = drawn("bfloat16", {"a": (90, 100), "b": (90, 100)}, changes=20, seed=1)
    more = drawn("bfloat16", {"c": (77,)}, changes=5)
    was, now, rollout = there(old), there(new), there(old)
    changes = (
        lambda: None,
        lambda: now.update(a=far(other["a"])),  # another tensor of the same shape
        lambda: setattr(rollout["b"], "data", rollout["b"].clone()),  # the same tensor in other memory
        lambda: [renamed(weights) for weights in (was, now, rollout)],
        lambda: [w.update({name: t.view(torch.float16) for name, t in w.items()}) for w in (was, now, rollout)],
        lambda: [w.update(there(bits)) for w, bits in zip((was, now, rollout), (*more, more[0]), strict=True)],
        lambda: [w.pop("a") for w in (was, now, rollout)],
    )
    for change in changes:
        change()
        patch = sparserl.diff(was, now, profile="raw", base_digest=sparserl.digest(here(was)))
        assert patch.result == sparserl.digest(here(now))
        patch.apply(rollout, digest=patch.base)
        assert same(rollout, now)
        for name, tensor in was.items():
            rollout[name].copy_(tensor)


@inside
def test_tables_are_kept():
    """The same parts have the same blocks again, and few tables are kept with them; other addresses have others."""
    old, _ = drawn("bfloat16", {"a": (90, 100), "b": (7,)})
    held = [LocalWeights.of(there(old)) for _ in range(12)]
    made = []
    for one in held:
        (runs,) = device.groups(device.split_by_gpu(one.places, one)[1], one.table)
        with device.on_stream(one, runs.device):
            blocks, (side,) = runs.blocks(one.table.keys)
        made.append((blocks, side))
        found = side.at.cpu().numpy() * 2 + side.base.data_ptr()
        assert np.array_equal(found, runs.address[0])
    assert all(blocks is made[0][0] for blocks, _ in made)
    assert len(blocks._kept) <= 8


@inside
def test_classes_that_do_not_pay(monkeypatch):
    """Where telling elements apart saves nothing, `ctx` becomes `ulp`."""
    monkeypatch.setattr(device_diff, "decide", lambda *_: (None, 0.0))
    old, new = drawn("bfloat16", {"w": (9000,)})
    patch, weights = sparserl.diff(there(old), there(new), profile="ctx"), there(old)
    assert profiles(patch) == {"ulp"}
    patch.apply(weights, digest=patch.base)
    assert same(weights, new)


@inside
@pytest.mark.parametrize("profile", ["ulp", pytest.param("auto", marks=pytest.mark.long)])
def test_compacted_only_where_it_is_needed(profile, monkeypatch):
    """A patch has the same bytes whether its changes were compacted too, for other profiles, or not."""
    old, new = map(there, drawn("bfloat16", {"w": (9000,)}))
    compacted, made = device_diff._Compared.compacted, []
    monkeypatch.setattr(device_diff._Compared, "compacted", lambda self: made.append(1) or compacted(self))
    patch = sparserl.diff(old, new, profile=profile)
    assert not made
    assert capture(old, new, profile=profile).encode().to_bytes() == patch.to_bytes()
    assert made
    monkeypatch.setattr(device_diff._Draft, "settled", False)
    assert sparserl.diff(old, new, profile=profile).to_bytes() == patch.to_bytes()
    assert len(made) == 2


@inside
def test_histograms_are_those_of_the_cpu():
    """The keys of a sample are counted as the CPU counts them, so that classes are the same."""
    for name, shift in (("bfloat16", 6), ("int32", 20), ("float8_e4m3fn", 0)):
        old, _ = drawn(name, {"a": (5000,), "b": (3,), "c": (900,)})
        dtype, held = BY_NAME[name], LocalWeights.of(there(old))
        (runs,) = device.groups(device.split_by_gpu(held.places, held)[1], held.table)
        blocks, (side,) = runs.blocks(held.table.keys)
        kind = 0 if dtype.sign_magnitude else 1
        every, row = np.array([3, 2]), np.array([0, 0, 1])
        found = gpu.cells.key_histogram(blocks, side, kind, row, every, np.array([shift, shift])).cpu().numpy()
        sample, keep = codec.ctx.magnitude(dtype)
        for r, parts in enumerate((["a", "b"], ["c"])):
            wanted = np.zeros(512, np.int64)
            address = np.array([old[p].array.ctypes.data for p in parts])
            numel = np.array([old[p].array.size for p in parts])
            cpu.classes.key_histogram(sample, address, numel, keep, np.uint64(shift), int(every[r]), wanted)
            assert np.array_equal(found[r], wanted)


@inside
def test_classes_are_chosen(monkeypatch):
    """Where small weights change and large ones do not, classes pay, and what is chosen says so."""
    monkeypatch.undo()
    if not CUDA:
        monkeypatch.setattr(memory, "is_on_gpu", lambda _: True)
    monkeypatch.setattr(device_diff, "FEW_CHANGES", 0)
    monkeypatch.setattr("sparserl.plan.classes._TABLE_BITS", 0)  # there are few changes to pay for tables
    rng = np.random.default_rng(0)
    value = rng.normal(0, 0.02, 30000).astype(np.float32)
    old = (value.view(np.uint32) >> 16).astype(np.uint16)
    new = old.copy()
    new[rng.permutation(np.flatnonzero(abs(value) < 0.001))[:64]] += 1
    was, now = ({"w": Bits(bits, BY_NAME["bfloat16"])} for bits in (old, new))
    mine, theirs = sparserl.diff(there(was), there(now)), sparserl.diff(was, now)
    assert profiles(mine) == profiles(theirs) == {"ctx"}
    assert mine.heads[0].estimates == theirs.heads[0].estimates
    weights = there(was)
    mine.apply(weights)
    assert same(weights, now)


class Model(torch.nn.Module):
    """A few parameters on the device."""

    def __init__(self, weights):
        super().__init__()
        for name, tensor in there(weights).items():
            self.register_parameter(name, torch.nn.Parameter(tensor, requires_grad=False))


@inside
def test_published_and_followed(tmp_path):
    """A trainer with its baseline on the device, and a module there that follows it over a store."""
    one, two = drawn("bfloat16", {"w": (300, 9), "v": (70,)}, changes=9)
    _, other = drawn("bfloat16", {"w": (300, 9), "v": (70,)}, changes=9, seed=1)
    trainer, rollout = Model(one), Model(other)
    publisher = sparserl.Publisher(
        tmp_path.as_uri(), sparserl.sources.module(trainer), baseline="device", profile="ctx"
    )
    subscriber = sparserl.Subscriber(tmp_path.as_uri(), sparserl.targets.module(rollout))
    publisher.publish()
    assert "where the weights are" in publisher.baseline
    subscriber.goto(None)
    assert same(rollout.state_dict(), one)
    for weights in (two, one):
        with torch.no_grad():
            for name, tensor in there(weights).items():
                getattr(trainer, name).copy_(tensor)
        publisher.publish()
        subscriber.goto(None)
        assert same(rollout.state_dict(), weights)


@pytest.mark.long
@inside
def test_baselines():
    """A baseline lies where the weights are, and moves on there; weights in host memory have theirs in host memory."""
    old, new = drawn("bfloat16", TWO)
    weights = there(old) | {"near": np.zeros(9, np.float32)}
    kept, words = choose(weights, kind="device")
    assert "where the weights are" in words
    assert all(isinstance(bits, Bits) == (name == "near") for name, bits in kept.weights.items())
    for name, tensor in there(new).items():
        weights[name].copy_(tensor)
    weights["near"][3] = 1.0
    found = kept.capture(weights)
    patch = found.encode()
    kept.advance(patch, found)
    assert same({name: kept.weights[name] for name in new}, new)
    assert kept.digest == sparserl.digest(weights)
    _, words = choose(here(old), kind="device")
    assert "in host memory" in words


@inside
@pytest.mark.parametrize("mastered", [True, False])
def test_tracked(mastered, stay):
    """Steps on a device are marked there: the changes of each and no others, and how the sums moved with them."""
    old, _ = drawn("bfloat16", {"w": (30, 40), "v": (70,), "tied": (50,)})
    for bits in old.values():
        bits.array[...] &= 0xBFFF  # neither NaNs nor infinities
    model = Model(old)
    model.twin = model.tied
    params = dict(model.named_parameters())
    masters = {p: p.detach().float() for p in params.values()} if mastered else {}
    written = [*masters.values()] if mastered else [*params.values()]
    source = sparserl.sources.track(None, model, params=written, masters=masters)
    kept = NoBaseline(source.weights())
    source.committed()
    seen = here(model.state_dict())
    marked = {name: np.zeros(bits.array.shape, bool) for name, bits in seen.items()}
    rng, rollout = np.random.default_rng(0), there(seen)
    for _ in range(2):
        with source.step(), torch.no_grad():
            for tensor in written:
                flat = tensor.view(-1)
                where = torch.from_numpy(rng.permutation(flat.numel())[:9])
                flat[where.to(DEVICE)] = flat[where.to(DEVICE)] * 2 + 1
        now = here(model.state_dict())
        for name, bits in now.items():
            marked[name] |= bits.array != seen[name].array
        seen = now
    shards = source.weights()
    for part in shards.parts:
        assert np.array_equal(part.marks.between(0, part.region.numel), np.flatnonzero(marked[part.tensor]))
    found = kept.capture(shards)
    patch = found.encode()
    assert patch.changed == sum(map(np.count_nonzero, marked.values()))
    rollout["twin"] = rollout["tied"]
    patch.apply(rollout)
    assert same(rollout, seen)


def compile_all():
    """Hand every kernel to the compiler."""
    from sparserl.kernels import gpu

    made = only_compile()
    for width in (1, 2, 4, 8):
        blocks, bits = gpu.changes.Blocks(width, [9000], "cpu"), torch.zeros(9000, dtype=gpu.changes.INTS[width])
        side, where = blocks.side([bits]), torch.zeros(64, dtype=torch.int64)
        gpu.cells.scatter(bits, where, gpu.cells.gather(bits, where))
        found = gpu.classes.LocatedChanges(where, bits, bits, gpu.changes.new_sums("cpu"))
        bad = torch.zeros(1, dtype=torch.int32)
        gpu.cells.swap(side, found, bad)
        gpu.cells.locate(blocks, side, np.array([64]), torch.zeros(64, dtype=torch.int32), bits[:64], bad)
        tiles, log = gpu.classes.Tiles.of(blocks, 16), torch.full((1,), 16, dtype=torch.int32)
        spread = gpu.classes.ChangeLayout(torch.ones(1, dtype=torch.int32), where[:1], where[:1], 1)
        numbers = spread, torch.zeros(1, dtype=torch.int32), bits[:1]
        gpu.cells.tile_positions(blocks, side, tiles, log, *numbers, bad, True)
        one = np.ones(1, np.int64)
        gpu.cells.sample(blocks, side, side, blocks.bitmap(), torch.zeros(2, dtype=torch.int32), where)
        for kind in (0, 1, 2):
            gpu.cells.key_histogram(blocks, side, kind, 0 * one, one, one)
        sums = gpu.sums.digests(blocks, side)
        gpu.sums.digest_deltas(blocks, side, side, sums)
        if width == 2:
            gpu.sums.digest_deltas(blocks, gpu.changes.Blocks(4, [9000], "cpu").side([torch.zeros(9000)]), side, sums)
    assert made == {n for m in (gpu.cells, gpu.sums) for n in vars(m) if n.endswith("_kernel")}
    print("compiled", len(made), "kernels")


if __name__ == "__main__":
    if sys.argv[1:] == ["compile"]:
        compile_all()
    else:
        print(run_all("long or not long")[-8000:])
