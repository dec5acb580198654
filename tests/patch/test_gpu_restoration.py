"""What is handed to a GPU of an anchor, with plain versions of the kernels: tests/patch/gpu has the real ones."""

from __future__ import annotations

import numpy as np
import pytest

from sparserl import Part, Patch, Region, Shards
from sparserl.codec.coders import Rans
from sparserl.errors import FormatError, InvalidField
from sparserl.patch import gpu_apply, gpu_restoration
from sparserl.patch import snapshot as snapshot_module
from sparserl.patch.contents import Contents
from sparserl.patch.snapshot import Restoration, restore, snapshot
from sparserl.plan import buckets
from sparserl.session.anchors import begin_parts
from sparserl.weights import memory
from sparserl.weights.dtypes import BY_NAME, Bits
from sparserl.weights.gpu_zeros import zero_parts_like, zeros_like
from sparserl.weights.holdings import Holdings
from sparserl.weights.local import LocalWeights
from sparserl.weights.memory import Memory
from tests.dtypes import each_dtype

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
gpu = gpu_restoration.gpu


def rans_decode(blocks, chunks, data, tokens, bad):
    """`gpu.rans.decode`, chunk by chunk on the CPU."""
    for begin, size, offset, length in zip(*(column.tolist() for column in chunks), strict=True):
        try:
            symbols = Rans().decode(data[offset : offset + length].numpy().tobytes(), size)
        except FormatError:
            bad.fill_(1)
            return
        tokens[begin : begin + size] = torch.frombuffer(bytearray(symbols), dtype=torch.uint8)


def join(blocks, target, planes, data, bad):
    """`gpu.planes.join`, part by part on the CPU."""
    dtype = next(dtype for dtype in BY_NAME.values() if dtype.width == blocks.width)
    for numel, at, row in zip(blocks.sizes.tolist(), target.at.tolist(), planes.tolist(), strict=True):
        address = target.base.data_ptr() + at * blocks.width
        cut = np.stack([data[begin : begin + numel].numpy() for begin in row], axis=1)
        if not int(bad):
            Memory(dtype, (numel,), address, None, True, target).view()[...] = cut.reshape(-1).view(dtype.uint)


@pytest.fixture(autouse=True)
def _plain_kernels(monkeypatch):
    """Torch tensors pass for such on a GPU; nothing is launched, and no bucket is decoded on the CPU."""
    monkeypatch.setattr(memory, "is_on_gpu", lambda _: True)
    monkeypatch.setattr(gpu_apply, "FEW_BYTES", 0)
    monkeypatch.setattr(gpu.rans, "decode", rans_decode)
    monkeypatch.setattr(gpu.planes, "join", join)
    monkeypatch.setattr(Contents, "decode", None)
    monkeypatch.setattr(snapshot_module, "digest", lambda *_, **__: None)  # there are kernels for it
    monkeypatch.setattr(snapshot_module, "require_result", lambda *_: None)


def some_weights(dtype, shapes):
    """Weights whose upper bytes are few, so that these planes are coded."""
    rng = np.random.default_rng(3)
    weights = {}
    for name, shape in shapes.items():
        table = rng.integers(0, 256, (int(np.prod(shape)), dtype.width), np.uint8)
        upper = table[:, dtype.width // 2 :]
        upper[...] = rng.choice([7, 8, 9], upper.shape, p=[0.6, 0.25, 0.15])
        weights[name] = Bits(table.reshape(-1).view(dtype.uint).reshape(shape), dtype)
    return weights


def as_tensor(bits):
    signed = bits.array.view(np.uint8 if bits.dtype.width == 1 else f"i{bits.dtype.width}").copy()
    return torch.from_numpy(signed).view(getattr(torch, bits.dtype.name))


def bits_of(tensor, dtype):
    return tensor.contiguous().view(gpu.ints.INTS[dtype.width]).numpy().view(dtype.uint)


def require_same(tensors, weights):
    for name, bits in weights.items():
        assert np.array_equal(bits_of(tensors[name], bits.dtype), bits.array), name


@pytest.mark.parametrize("dtype", each_dtype())
@pytest.mark.parametrize("threads", [1, 3])
def test_all_bits(dtype, threads, monkeypatch):
    """Several buckets, chunks and groups, on any number of threads."""
    monkeypatch.setattr(snapshot_module, "BUCKET_PAYLOAD_BYTES", 64 << 10)
    monkeypatch.setattr(buckets, "CHUNK_LOG", 14)
    monkeypatch.setattr(gpu_restoration, "_SHARE", 1)
    weights = some_weights(dtype, {"large": (5, 40_000), "odd": (7, 41), "one": (), "none": (0, 3), "last": (9_001,)})
    fresh = zeros_like({name: as_tensor(bits) for name, bits in weights.items()})
    launched = []
    decode = gpu_restoration._decode
    monkeypatch.setattr(gpu_restoration, "_decode", lambda w, group: launched.append(group) or decode(w, group))
    restore(snapshot(weights), fresh, threads)
    require_same(fresh, weights)
    assert len(launched) > 1
    assert max(map(len, launched)) > 1


def test_the_memory_of_a_group():
    """A sixteenth of the weights, or one bucket; many small buckets are counted with the tables of their chunks."""
    weights = some_weights(BY_NAME["bfloat16"], {f"t{i}": (30,) for i in range(2000)})
    local = LocalWeights.of({name: as_tensor(bits) for name, bits in weights.items()})
    decoder = gpu_restoration.DenseDecoder(local)
    assert decoder._most == local.nbytes // 16
    one = Patch(snapshot({"t": weights["t0"]})).contents
    head, reader = one.open_bucket(0)
    alone = gpu_restoration.DenseDecoder(LocalWeights.of({"t": as_tensor(weights["t0"])}))
    assert alone.stage(0, head, reader).gpu_bytes > 17 << 10


@pytest.mark.parametrize("is_cut", [False, True])
def test_parts(is_cut):
    """Parts that are cut in any dimension; an anchor may be cut along them, or not at all."""
    dtype = BY_NAME["bfloat16"]
    weights = some_weights(dtype, {"a": (6, 100, 200), "b": (300, 100), "c": (500,), "d": (90,)})
    whole = snapshot(weights)
    boxes = {
        "a": [Region((0, 0, 70), (6, 100, 80)), Region((2, 10, 0), (3, 50, 70))],
        "b": [Region((100, 0), (50, 100))],
        "c": [Region((0,), (500,))],
    }
    parts = [
        Part(name, box, torch.ones_like(as_tensor(weights[name])[box.slices].contiguous()))
        for name, regions in boxes.items()
        for box in regions
    ]
    beside = Shards(whole.table, parts)
    places = LocalWeights.of(beside).places
    contents = snapshot(weights, holdings=Holdings(whole.table, {"rank": places})) if is_cut else whole
    restoration = begin_parts(contents, places, beside)
    restoration.run()
    for part in restoration.weights.parts:
        expected = weights[part.tensor].array[part.region.slices]
        assert np.array_equal(bits_of(part.data, dtype), expected), (part.tensor, part.region)
    assert all((part.data == 1).all() for part in beside.parts)


def test_planes_that_are_not_coded():
    """Bits of no pattern are stored; there is nothing to decode, and they arrive all the same."""
    bits = np.random.default_rng(0).integers(0, 256, 9000).astype(np.uint8)
    weights = {"w": Bits(bits, BY_NAME["uint8"])}
    fresh = zeros_like({"w": as_tensor(weights["w"])})
    restore(snapshot(weights), fresh)
    require_same(fresh, weights)


def test_what_does_not_decode(monkeypatch):
    """It is refused, and refused again; the CPU says why, or that it does not know."""
    weights = some_weights(BY_NAME["bfloat16"], {"w": (5000,)})
    contents = snapshot(weights)
    restoration = Restoration(contents, zeros_like({"w": as_tensor(weights["w"])}))
    monkeypatch.setattr(gpu.rans, "decode", lambda *arguments: arguments[-1].fill_(1))
    for _ in range(2):
        with pytest.raises(InvalidField, match="do not decode on"):
            restoration.run()
    assert not bits_of(restoration.weights["w"], BY_NAME["bfloat16"]).any()


def test_room_on_the_gpu():
    """Where some parts are in host memory, all are built there."""
    table = snapshot(some_weights(BY_NAME["float32"], {"w": (4,), "v": (4,)})).table
    box = Region((0,), (4,))
    both = [Part("v", box, torch.zeros(4)), Part("w", box, np.zeros(4, np.float32))]
    assert zero_parts_like(Shards(table, both)) is None
    assert zeros_like({"v": both[0].data, "w": both[1].data}) is None
