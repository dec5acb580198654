"""A patch that is spoiled or does not fit leaves weights on a GPU as they were."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import sparserl
from sparserl import codec, errors
from sparserl.codec.coders import CODERS, Zstd
from sparserl.kernels import gpu
from sparserl.patch import Patch, gpu_encode, stage_all
from sparserl.patch import gpu_apply as device_apply
from sparserl.patch.contents import BucketList, Contents, Ends
from sparserl.plan import buckets
from sparserl.weights.local import LocalWeights
from sparserl.wire import encode_bucket, encode_table, table_hash
from tests.patch.gpu.gpu_weights import DEVICE, needs_gpu, needs_kernels, on_gpu, on_host, same_bits, two_versions
from tests.triton_runs import streams_of

pytest.importorskip("triton")
torch = pytest.importorskip("torch")


def forged(patch, change, **fields):
    """A patch whose first bucket has other streams and fields, with every checksum right."""
    head, reader = patch.contents.open_bucket(0)
    head = replace(head, **fields)
    streams = {stream: (coder, [bytes(c) for c in chunks]) for stream, (coder, chunks) in reader.left().items()}
    streams.pop(codec.Stream.ENTRIES, None)
    change(streams)
    others = [patch.contents.bucket(i) for i in range(1, patch.buckets)]
    bucket = encode_bucket(head, streams, table_hash(encode_table(patch.table)))
    return Patch(Contents(patch.table, Ends(patch.base, patch.result, patch.changed), BucketList.of([bucket, *others])))


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
        bad.apply(on_host(old))
    with pytest.raises(errors.FormatError) as on_device:
        bad.apply(weights)
    assert type(on_device.value) is type(on_cpu.value)
    assert same_bits(weights, old)


@needs_gpu
def test_spoiled_buckets():
    """Flipped bits, streams that are missing or too long: an error of the CPU's kind, and weights as before."""
    old, new = two_versions("bfloat16", {"w": (2000,)}, changes=20)
    patch = sparserl.diff(old, new, profile="ctx")
    streams = dict(patch.contents.open_bucket(0)[1].left())
    weights = on_gpu(old)
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
    assert same_bits(weights, new)


@needs_gpu
@pytest.mark.long
@pytest.mark.parametrize("profile", [pytest.param("raw", marks=pytest.mark.long), "ulp"])
def test_spoiled_buckets_without_classes(profile, monkeypatch):
    """Positions and gaps that lead astray, streams that are missing, too short or too long are refused alike."""
    monkeypatch.setattr(buckets, "_TILE_CHANGES", 1)  # several tiles, and so counts
    old, new = two_versions("bfloat16", {"v": (70_000,), "w": (2000,)}, changes=20)
    patch, weights = sparserl.diff(old, new, profile=profile), on_gpu(old)
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
    assert same_bits(weights, new)


@needs_kernels
@pytest.mark.parametrize("profile", ["ctx", "ulp"])
def test_tokens_in_zstd(profile, monkeypatch):
    """The device reads what the CPU may write: what is in zstd is carried over as tokens."""
    monkeypatch.setattr(buckets, "_TILE_CHANGES", 1)  # several tiles, and so counts
    old, new = two_versions("bfloat16", {"w": (70000,)}, changes=20)
    patch = sparserl.diff(old, new, profile=profile)
    layout, told = patch.contents.heads[0].layout, codec.Stream
    sizes = {told.TILE_TOKENS: (4 if profile == "ctx" else 1) * codec.ctx.tiles(layout)}
    if profile == "ulp":
        sizes |= {told.GAP_TOKENS: layout.changes, told.STEP_TOKENS: layout.changes}

    def squeezed(streams):
        for stream, size in sizes.items():
            coder, (chunk,) = streams[stream]
            streams[stream] = Zstd(), [Zstd().encode(coder.decode(chunk, size))]

    other, weights = forged(patch, squeezed), on_gpu(old)
    held = LocalWeights.of(weights)
    assert device_apply.gpu_bucket(held, 0, *other.contents.open_bucket(0)) is not None
    other.apply(weights)
    assert same_bits(weights, new)


@needs_kernels
@pytest.mark.parametrize("profile", ["raw", "ulp", "ctx"])
def test_chunks_are_found(profile, monkeypatch):
    """What is given to the device has every chunk of the streams, in order, where the directory says."""
    monkeypatch.setattr(buckets, "CHUNK_LOG", 8)
    old, new = two_versions("bfloat16", {"v": (50,), "w": (40_000,), "all": (90,)}, changes=3000)
    patch = sparserl.diff(old, new, profile=profile)
    head, reader = patch.contents.open_bucket(0)
    wanted = {s: (coder.id, [bytes(c) for c in chunks]) for s, (coder, chunks) in reader.left().items()}
    held, streams = LocalWeights.of(on_gpu(old)), (codec.Stream.POSITIONS, codec.Stream.WORDS)
    found = [device_apply.gpu_bucket(held, 0, head, reader.copy()) for _ in range(2)]
    assert found[0].dense
    if profile == "raw":
        assert [bytes(found[0].stored(s)) for s in streams] == [b"".join(wanted[s][1]) for s in streams]
        return
    arrived = device_apply._send_chunks(found, DEVICE)
    data = bytes(arrived.data.cpu().numpy())
    for b in range(2):
        rows = streams_of(arrived.directory, b)
        for stream, (coder, places) in rows.items():
            assert (coder, [data[at : at + n] for at, n in places]) == wanted[stream]
        missing = {s for s in wanted if s not in rows and not codec.Stream.is_dense(s)}
        assert missing <= {codec.Stream.CLASSES, codec.Stream.TILE_TOKENS, codec.Stream.TILE_LOWS}
    assert max(len(chunks) for _, chunks in wanted.values()) > 3


@needs_kernels
@pytest.mark.parametrize("profile", ["raw", *(pytest.param(p, marks=pytest.mark.long) for p in ("ulp", "ctx"))])
def test_streams_of_several_chunks(profile, monkeypatch):
    """They are decoded on the device, whoever cut them."""
    monkeypatch.setattr(buckets, "CHUNK_LOG", 8)
    monkeypatch.setattr(gpu_encode, "CHUNK_LOG", 8)
    monkeypatch.setattr(gpu.cells, "_SPAN", 100)
    old, new = two_versions("bfloat16", {"w": (9000,)}, changes=270)
    for f in (on_host, on_gpu):
        patch, weights = sparserl.diff(f(old), f(new), profile=profile), on_gpu(old)
        assert patch.contents.heads[0].chunk_log == 8
        with monkeypatch.context() as context:
            context.setattr(Contents, "decode", None)  # by the CPU
            patch.apply(weights, digest=patch.base)
        assert same_bits(weights, new)


@needs_gpu
@pytest.mark.long
def test_counts_of_tiles_that_are_negative():
    """2^31 is no 32-bit count, though the counts of every part and class then add up to what they should be."""
    old, new = two_versions("bfloat16", {"a": (2000,), "b": (2000,), "c": (2000,)}, changes=60)
    patch = sparserl.diff(old, new, profile="ctx")
    names = codec.Stream.TILE_TOKENS, codec.Stream.TILE_LOWS
    layout, reader = patch.contents.heads[0].layout, patch.contents.open_bucket(0)[1]
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
        streams.update(codec.encode_streams(codec.numbers.write(layout, v.ravel().astype(np.uint32), *names)))

    bad, weights = forged(patch, change, tile_log=31), on_gpu(old)
    for where in (on_host(old), weights):
        with pytest.raises(errors.InvalidField, match="tile"):
            bad.apply(where)
    assert same_bits(weights, old)


@needs_gpu
def test_wrong_base():
    """Weights that are not the base are refused; vouched for wrongly, they are as they were in the end."""
    old, new = two_versions("bfloat16", {"w": (3000,)})
    where = int(np.flatnonzero(old["w"].array != new["w"].array)[5])
    for profile in ("ctx", "ulp"):
        patch, weights = sparserl.diff(on_gpu(old), on_gpu(new), profile=profile), on_gpu(old)
        weights["w"].view(torch.int16)[where] ^= 3
        before = on_host(weights)
        with pytest.raises(errors.WrongBase):
            patch.apply(weights)
        with pytest.raises(errors.SparserlError):
            patch.apply(weights, digest=patch.base)
        assert same_bits(weights, before)


@needs_gpu
@pytest.mark.long
def test_staged_and_committed():
    """Staging writes nothing, a commit can be taken back, and weights that moved meanwhile are left as they are."""
    old, new = two_versions("bfloat16", {"all": (20,), "large": (9000,)})
    for profile in ("ctx", "gap"):
        patch, weights = sparserl.diff(on_gpu(old), on_gpu(new), profile=profile), on_gpu(old)
        landing = stage_all(patch.contents, weights)
        assert same_bits(weights, old)
        undo = landing.commit()
        assert same_bits(weights, new)
        undo()
        assert same_bits(weights, old)
        where = int(np.flatnonzero(old["large"].array != new["large"].array)[3])
        weights["large"].view(torch.int16)[where] ^= 1
        before = on_host(weights)
        with pytest.raises(errors.WrongBase):
            landing.commit()
        assert same_bits(weights, before)
        weights["large"].view(torch.int16)[where] ^= 1
        weights["all"].view(torch.int16)[2] ^= 1  # which is written last
        before = on_host(weights)
        with pytest.raises(errors.WrongBase):
            landing.commit()
        assert same_bits(weights, before)


@pytest.mark.long
@needs_gpu
def test_overlapping_entries_are_not_staged():
    """A patch that changes elements twice is refused before a bit is written, though its digests add up."""
    old, new = two_versions("bfloat16", {"w": (2000,)}, changes=20)
    patch = sparserl.diff(old, new, profile="ctx")
    bucket, result = patch.contents.bucket(0), patch.result + patch.result - patch.base
    twice = Patch(Contents(patch.table, Ends(patch.base, result, 2 * patch.changed), BucketList.of([bucket, bucket])))
    for weights in (on_host(old), on_gpu(old)):
        with pytest.raises(errors.RegionOverlap):
            stage_all(Patch.from_bytes(twice.to_bytes()).contents, weights).commit()
        assert same_bits(weights, old)
