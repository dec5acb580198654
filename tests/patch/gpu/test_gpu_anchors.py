"""Coded anchors of weights on a GPU are decoded there, or refused as on the CPU."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import sparserl
from sparserl import Part, Region, Shards, codec, errors
from sparserl.codec.coders import CODERS, Rans, Stored, Zstd
from sparserl.kernels import gpu, reference
from sparserl.patch import gpu_restoration
from sparserl.patch import snapshot as snapshot_module
from sparserl.patch.contents import BucketList, Contents
from sparserl.patch.snapshot import Restoration, restore, snapshot
from sparserl.plan import buckets
from sparserl.session import anchors
from sparserl.session.anchors import begin_parts, zeros
from sparserl.session.parts import apply_to_parts
from sparserl.weights.dtypes import BY_NAME, Bits
from sparserl.weights.gpu_zeros import zeros_like
from sparserl.weights.local import LocalWeights
from sparserl.wire import encode_bucket
from tests.dtypes import long_if_rare
from tests.integrations.fleet import fleet
from tests.patch.gpu.gpu_weights import (
    CUDA,
    DEVICE,
    INTERPRETED,
    WITHOUT_KERNELS,
    host_bits,
    needs_gpu,
    needs_kernels,
    on_gpu,
    same_bits,
)

pytest.importorskip("triton")
torch = pytest.importorskip("torch")

SHAPES = {"large": (3, 500_001 if CUDA else 11), "odd": (2, 7), "one": ()}  # the interpreter takes 10 ms for a symbol
PLANE = codec.Stream.DENSE_PLANE


def some_weights(name="bfloat16", shapes=SHAPES):
    """Weights whose highest bytes are few, as those of floats are, and whose lowest are any."""
    rng, dtype = np.random.default_rng(0), BY_NAME[name]
    weights = {}
    for tensor, shape in shapes.items():
        table = rng.integers(0, 256, (int(np.prod(shape)), dtype.width), np.uint8)
        table[:, -1] = rng.choice([7, 8, 9], table.shape[0], p=[0.6, 0.25, 0.15])
        weights[tensor] = Bits(table.reshape(-1).view(dtype.uint).reshape(shape), dtype)
    return weights


def fresh_like(weights):
    return zeros_like(on_gpu(weights))


def coders_of(contents):
    """The coder of every plane of every bucket."""
    readers = [contents.open_bucket(index)[1] for index in range(len(contents))]
    return [coder.id for reader in readers for _, (coder, _) in sorted(reader.left().items())]


@pytest.fixture
def decoded_buckets(monkeypatch):
    """The buckets that the GPU decodes, as they come; none is decoded on the CPU."""
    indices = []
    add = gpu_restoration.DenseDecoder.add

    def counted(self, bucket):
        indices.append(bucket.index)
        add(self, bucket)

    monkeypatch.setattr(gpu_restoration.DenseDecoder, "add", counted)
    monkeypatch.setattr(Contents, "decode", None)
    return indices


@needs_kernels
@pytest.mark.parametrize("width", [1, 2, 4, 8])
def test_planes_are_joined(width):
    """As `reference.planes` has cut them, wherever they lie, and not a byte beside the elements."""
    rng = np.random.default_rng(width)
    sizes = [70_001, 1, 8192, 31] if CUDA else [70, 1, 64, 31]
    words = [rng.integers(0, 256, n * width, np.uint8).view(f"u{width}") for n in sizes]
    room = torch.zeros(sum(sizes) + 2 * len(sizes), dtype=gpu.ints.INTS[width], device=DEVICE)
    begins = np.cumsum([0, *(n + 2 for n in sizes)]) + 1
    targets = [room[begin : begin + n] for begin, n in zip(begins.tolist(), sizes, strict=False)]
    cut = [reference.planes(bits) for bits in words]
    data = np.concatenate([np.zeros(3, np.uint8), *(plane for planes in cut for plane in planes)])
    order = np.argsort(rng.random((len(sizes), width)), axis=1)  # planes of a part in any order
    data = np.concatenate([data[:3], *(cut[part][plane] for part in range(len(sizes)) for plane in order[part])])
    at = np.zeros((len(sizes), width), np.int64)
    offset = 3
    for part, n in enumerate(sizes):
        for plane in order[part]:
            at[part, plane] = offset
            offset += n
    blocks = gpu.changes.Blocks(width, sizes, DEVICE, block=64 if not CUDA else 8192)
    bad = torch.ones(1, dtype=torch.int32, device=DEVICE)
    arguments = blocks, blocks.side(targets), blocks.upload(at), torch.from_numpy(data).to(DEVICE), bad
    gpu.planes.join(*arguments)
    assert not room.any()
    bad.zero_()
    gpu.planes.join(*arguments)
    wanted = np.concatenate([np.pad(bits, 1) for bits in words])
    assert np.array_equal(room.cpu().numpy().view(f"u{width}"), wanted)


@pytest.mark.filterwarnings("ignore:ComplexHalf support")
@needs_kernels
@pytest.mark.parametrize("dtype", [pytest.param(name, marks=long_if_rare(name)) for name in BY_NAME])
def test_every_dtype(dtype, decoded_buckets):
    """All bits, from planes that are coded and planes that are not."""
    weights = some_weights(dtype)
    fresh = fresh_like(weights)
    contents = snapshot(weights)
    assert Rans.id in coders_of(contents)
    restore(contents, fresh)
    assert same_bits(fresh, weights)
    assert decoded_buckets == [*range(len(contents))]


@needs_kernels
@pytest.mark.parametrize("profile", [*(pytest.param(p, marks=pytest.mark.long) for p in ("raw", "ctx")), "ulp"])
def test_every_profile(profile, monkeypatch):
    """Anchors of earlier releases were compared with zeros, in any profile; some buckets have dense entries alone."""
    weights = some_weights(shapes={"w": (31,), "v": (5,)})
    weights["few"] = Bits(np.eye(9, dtype=np.uint16), BY_NAME["bfloat16"])
    nothing = {name: Bits(np.zeros_like(bits.array), bits.dtype) for name, bits in weights.items()}
    contents = sparserl.diff(nothing, weights, profile=profile).contents
    fresh = fresh_like(weights)
    restore(contents, fresh)
    assert same_bits(fresh, weights)


@needs_kernels
def test_groups_of_buckets(monkeypatch, decoded_buckets):
    """Buckets of several dtypes, some of several chunks, are decoded in groups that take little memory."""
    monkeypatch.setattr(snapshot_module, "BUCKET_PAYLOAD_BYTES", 1 << 20 if CUDA else 48)
    monkeypatch.setattr(gpu_restoration, "_TABLE_BYTES", 0)
    monkeypatch.setattr(gpu_restoration, "_RUN_BYTES", 0)
    weights = some_weights() | {"wide": some_weights("float32", {"w": (9,)})["w"]}
    contents = snapshot(weights)
    launched = []
    decode = gpu_restoration._decode

    def observed(local, group):
        launched.append(group)
        return decode(local, group)

    monkeypatch.setattr(gpu_restoration, "_decode", observed)
    monkeypatch.setattr(gpu_restoration, "_SHARE", 1)
    fresh = fresh_like(weights)
    restore(contents, fresh, 2 if CUDA else 1)
    assert same_bits(fresh, weights)
    assert decoded_buckets == [*range(len(contents))]
    assert len(contents) > len(launched) > 1
    most = sum(bits.array.nbytes for bits in weights.values())
    assert all(len(group) == 1 or sum(bucket.gpu_bytes for bucket in group) <= most for group in launched)


@needs_kernels
@pytest.mark.long
def test_chunks(monkeypatch, decoded_buckets):
    """Planes of several chunks, the last of which is shorter."""
    monkeypatch.setattr(buckets, "CHUNK_LOG", 14 if CUDA else 8)
    monkeypatch.setattr(gpu_restoration, "LEAST_CHUNK_LOG", 8)
    weights = some_weights(shapes={"w": (50_000,) if CUDA else (530,)})
    fresh = fresh_like(weights)
    restore(snapshot(weights), fresh)
    assert same_bits(fresh, weights)


@needs_kernels
def test_short_chunks_are_for_the_cpu(monkeypatch):
    """A GPU would need a table of 16 KiB for every 256 symbols."""
    monkeypatch.setattr(buckets, "CHUNK_LOG", 8)
    monkeypatch.setattr(gpu_restoration, "_decode", None)
    weights = some_weights()
    fresh = fresh_like(weights)
    restore(snapshot(weights), fresh)
    assert same_bits(fresh, weights)


@needs_kernels
def test_it_goes_on_where_buckets_stopped(monkeypatch, decoded_buckets):
    """What was staged and not yet written is not lost."""
    monkeypatch.setattr(snapshot_module, "BUCKET_PAYLOAD_BYTES", 1 << 20 if CUDA else 48)
    weights = some_weights()
    contents = snapshot(weights)
    whole = [bytes(contents.bucket(index)) for index in range(len(contents))]
    arriving = BucketList(len(whole), transient=True, memory_bytes=1 << 30)
    fresh = fresh_like(weights)
    restoration = Restoration(Contents(contents.table, contents.ends, arriving), fresh)
    for bucket in whole[:2]:
        arriving.add(bucket)
    arriving.stop()
    with pytest.raises(errors.SessionError, match="never arrived"):
        restoration.run()
    arriving.reopen()
    for bucket in whole[2:]:
        arriving.add(bucket)
    restoration.run()
    assert same_bits(fresh, weights)
    assert decoded_buckets == [*range(len(whole))]


def forged(contents, change, **fields):
    """An anchor of one bucket with other streams and fields, and the right checksum."""
    head, reader = contents.open_bucket(0)
    streams = {stream: (coder, [bytes(chunk) for chunk in chunks]) for stream, (coder, chunks) in reader.left().items()}
    change(streams)
    bucket = encode_bucket(replace(head, **fields), streams, contents.table_hash)
    return Contents(contents.table, contents.ends, BucketList.of([bucket]))


def flip(stream, at, bit=1):
    def change(streams):
        coder, (chunk,) = streams[stream]
        spoiled = bytearray(chunk)
        spoiled[at] ^= bit
        streams[stream] = coder, [bytes(spoiled)]

    return change


def with_chunks(stream, edit):
    """A change of the chunks of a stream."""

    def change(streams):
        coder, chunks = streams[stream]
        streams[stream] = coder, edit(chunks)

    return change


LOW, HIGH = int(PLANE), int(PLANE) + 1  # stored, and coded
HOSTILE = {
    "lowest symbol": flip(HIGH, 0, 248),
    "span": flip(HIGH, 1, 128),
    "rest": flip(HIGH, 2, 128),
    "frequencies": flip(HIGH, 4, 255),
    "state": flip(HIGH, -1, 255),
    "a word too many": with_chunks(HIGH, lambda chunks: [chunks[0] + b"ab"]),
    "half a word": with_chunks(HIGH, lambda chunks: [chunks[0] + b"a"]),
    "far too long": with_chunks(HIGH, lambda chunks: [chunks[0] + bytes(9000)]),
    "cut off": with_chunks(HIGH, lambda chunks: [chunks[0][:-1]]),
    "almost nothing": with_chunks(HIGH, lambda chunks: [chunks[0][:2]]),
    "another chunk": with_chunks(HIGH, lambda chunks: [*chunks, b"x"]),
    "stored, too short": with_chunks(LOW, lambda chunks: [chunks[0][:-1]]),
    "stored, too long": with_chunks(LOW, lambda chunks: [chunks[0] + b"x"]),
    "no plane": lambda streams: streams.pop(LOW),
    "another plane": lambda streams: streams.update({HIGH + 1: (CODERS[Stored.id], [b"x"])}),
    "changes": lambda streams: streams.update({codec.Stream.GAP_TOKENS: (CODERS[Stored.id], [b"x"])}),
    "no frame": lambda streams: streams.update({LOW: (CODERS[Zstd.id], [b"\0junk"])}),
}


@needs_kernels
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_streams(name):
    """They are refused with the error of the CPU, and nothing of them is written."""
    weights = some_weights(shapes={"w": (40,)})
    contents = forged(snapshot(weights), HOSTILE[name])
    fresh = fresh_like(weights)
    with pytest.raises(errors.FormatError) as on_cpu:
        restore(contents, zeros(contents.table))
    restoration = Restoration(contents, fresh)
    for _ in range(2):  # it is refused again, if somebody tries again
        with pytest.raises(errors.FormatError) as on_device:
            restoration.run()
        assert type(on_device.value) is type(on_cpu.value)
        assert str(on_device.value) == str(on_cpu.value)
    assert not host_bits(fresh["w"]).array.any()


@needs_kernels
def test_another_result_is_refused(decoded_buckets):
    """The digest is summed up on the GPU: planes that decode to other bits are noticed."""
    weights = some_weights(shapes={"w": (40,)})
    contents = snapshot(weights)
    with pytest.raises(errors.InvalidField, match="promises"):
        restore(forged(contents, flip(LOW, 5)), fresh_like(weights))
    assert decoded_buckets == [0]


@needs_kernels
def test_planes_in_zstd(decoded_buckets):
    """The host decompresses them; the GPU does the rest."""
    weights = some_weights(shapes={"w": (40,)})

    def squeezed(streams):
        _, (chunk,) = streams[LOW]
        streams[LOW] = CODERS[Zstd.id], [Zstd().encode(chunk)]

    contents = forged(snapshot(weights), squeezed)
    assert coders_of(contents) == [Zstd.id, Rans.id]
    fresh = fresh_like(weights)
    restore(contents, fresh)
    assert same_bits(fresh, weights)
    assert decoded_buckets == [0]


@needs_kernels
def test_a_gpu_that_errs(monkeypatch):
    """What the CPU can decode is refused all the same."""
    weights = some_weights(shapes={"w": (40,)})
    monkeypatch.setattr(gpu.rans, "decode", lambda *arguments: arguments[-1].fill_(1))
    with pytest.raises(errors.InvalidField, match="do not decode on"):
        restore(snapshot(weights), fresh_like(weights))


@needs_kernels
def test_few_weights_are_for_the_cpu(monkeypatch):
    """Launches take as long, whatever the size."""
    from sparserl.patch import gpu_apply

    monkeypatch.setattr(gpu_apply, "FEW_BYTES", 1 << 20)
    assert gpu_restoration.DenseDecoder.of(LocalWeights.of(on_gpu(some_weights(shapes={"w": (40,)})))) is None


TENSOR = (30, 40, 50) if CUDA else (2, 3, 5)
PARTS = {
    "rows": Region((1, 0, 0), (TENSOR[0] - 1, *TENSOR[1:])),
    "columns": Region((0, 0, 2), (*TENSOR[:2], TENSOR[2] - 3)),
    "middle": Region((0, 1, 0), (TENSOR[0], 2, TENSOR[2])),
    "one": Region((1, 2, 3), (1, 1, 1)),
}


def shards_on_gpu(table, places, weights):
    """Parts on the device with bits of no meaning."""
    data = [torch.ones_like(on_gpu(weights)[name][region.slices]) for name, region in places]
    return Shards(table, [Part(name, region, bits) for (name, region), bits in zip(places, data, strict=True)])


def same_parts(shards, weights):
    return all(
        np.array_equal(host_bits(part.data).array, weights[part.tensor].array[part.region.slices])
        for part in shards.parts
    )


@needs_gpu
@pytest.mark.parametrize("coded", [True, pytest.param(False, marks=pytest.mark.long)])
def test_parts(coded, monkeypatch):
    """Parts of tensors, cut in any dimension, are built beside those on the device, from an anchor of everything."""
    monkeypatch.setattr(gpu_restoration, "_LEAST_ROW", 1)
    weights = some_weights(shapes={"w": TENSOR, "v": (9,), "other": (2,)})
    contents = snapshot(weights, coded=coded)
    table = contents.table
    places = [("v", Region((2,), (5,))), ("w", PARTS["rows"])]
    for name in ("rows", "columns", "middle", "one"):
        places[1] = ("w", PARTS[name])
        beside = shards_on_gpu(table, places, weights)
        with monkeypatch.context() as context:
            if coded and not WITHOUT_KERNELS:
                context.setattr(Contents, "decode", None)  # by the CPU
            restoration = begin_parts(contents, LocalWeights.of(beside).places, beside)
            restoration.run()
        built = restoration.weights
        assert LocalWeights.of(built).places == LocalWeights.of(beside).places
        assert all(isinstance(part.data, torch.Tensor) for part in built.parts)
        assert same_parts(built, weights), name
        assert all((part.data == 1).all() for part in beside.parts)


@needs_kernels
def test_short_rows_are_for_the_cpu(monkeypatch):
    """A table of runs would take more memory than the elements."""
    monkeypatch.setattr(gpu_restoration, "_decode", None)
    weights = some_weights(shapes={"w": (12, 5)})
    contents = snapshot(weights)
    beside = shards_on_gpu(contents.table, [("w", Region((0, 1), (12, 2)))], weights)
    restoration = begin_parts(contents, LocalWeights.of(beside).places, beside)
    restoration.run()
    assert same_parts(restoration.weights, weights)


@needs_gpu
@pytest.mark.parametrize("profile", ["raw", "ulp", pytest.param("gap", marks=pytest.mark.long)])
def test_changes_of_parts(profile):
    """Patches behind an anchor change the parts on the device, as do anchors that were compared with zeros."""
    weights = {"w": Bits(np.arange(60, dtype=np.uint16).reshape(12, 5) % 7 // 6, BY_NAME["bfloat16"])}
    nothing = {"w": Bits(np.zeros((12, 5), np.uint16), BY_NAME["bfloat16"])}
    contents = sparserl.diff(nothing, weights, profile=profile).contents
    assert all(head.layout.changes for head in contents.heads)
    beside = shards_on_gpu(contents.table, [("w", Region((1, 1), (10, 3)))], weights)
    restoration = begin_parts(contents, LocalWeights.of(beside).places, beside)
    restoration.run()
    assert same_parts(restoration.weights, weights)
    back = sparserl.diff(weights, nothing, profile=profile)
    apply_to_parts(restoration.weights, [back], 1)
    assert same_parts(restoration.weights, nothing)


@pytest.mark.skipif(CUDA, reason="the engine's tensors are not on it")
@pytest.mark.skipif(not INTERPRETED, reason="torch tensors pass for those on a GPU")
@pytest.mark.parametrize("profile", ["ulp", pytest.param("raw", marks=pytest.mark.long)])
def test_ranks_of_an_engine(tmp_path, monkeypatch, profile):
    """Each of two ranks builds its parts of an anchor where its tensors lie, and exchanges them there."""
    monkeypatch.setenv("SPARSERL_GPU", "off")  # kernels take minutes
    monkeypatch.setattr(anchors, "_zero_parts", None)  # in host memory
    with fleet(tmp_path, 2, profile=profile) as engine:
        for one in engine.engines:
            one.live["o"].fill_(3)
        assert {report.kind for report in engine.all(lambda s: s.commit_version())} == {"anchor"}
        engine.require_exact()
        assert engine.all(lambda s: s.audit()) == [None, None]
