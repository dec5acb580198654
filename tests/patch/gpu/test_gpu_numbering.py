"""Digits are made on the GPU that an engine is on, and put together there."""

from __future__ import annotations

import pytest

from sparserl.targets.numbering import number_pieces
from tests.patch.gpu.gpu_weights import CUDA, DEVICE, needs_gpu
from tests.targets.engines import Engine, checkpoint, named
from tests.targets.test_learn import find_pieces, require_learnt
from tests.targets.test_numbering import HostElements, specs

torch = pytest.importorskip("torch")

pytestmark = needs_gpu
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn])


class GpuEngine(Engine):
    """An engine on a GPU, which knows where the tensors were that it has loaded."""

    def __init__(self, rank, ranks, dtype):
        super().__init__(rank, ranks, dtype)
        self.live = {name: tensor.to(DEVICE) for name, tensor in self.live.items()}
        self.devices = set()

    def load_one(self, name, tensor):
        self.devices.add(tensor.device)
        super().load_one(name, tensor)


def require_same_as_on_host(dtype, device):
    """On a GPU the pieces are those of host memory; digits are made on this device."""
    for rank in range(2):
        engine = GpuEngine(rank, 2, dtype)
        on_host = Engine(rank, 2, dtype)
        tensors = named(checkpoint(dtype))
        pieces = number_pieces(tensors, engine.live, engine.load)
        assert engine.devices == {device}
        assert pieces == number_pieces(tensors, on_host.live, on_host.load)
        require_learnt(pieces, engine, checkpoint(dtype))


@DTYPES
def test_digits_are_made_on_the_gpu(dtype):
    """All tensors of a pass are on the GPU of the engine."""
    require_same_as_on_host(dtype, DEVICE)


@DTYPES
@pytest.mark.skipif(not CUDA, reason="is about the memory of a GPU")
def test_a_gpu_without_room(monkeypatch, dtype):
    """Where a GPU has no memory to spare, digits are made in host memory, and put together there."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (0, 0))
    monkeypatch.setattr(torch.cuda, "memory_reserved", torch.cuda.memory_allocated)
    require_same_as_on_host(dtype, torch.device("cpu"))


@pytest.mark.skipif(not CUDA, reason="tells host memory from that of a GPU")
def test_elements_stay_on_the_gpu():
    """Of a tensor in whole rows, nothing but letters and the first number of each row comes to the host."""
    tensors = specs(["layers.0.w"], (512, 4096))
    live = {"layers.0.w": torch.zeros(512, 4096, device=DEVICE)}
    order = torch.randperm(512, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    with HostElements() as host:
        pieces = number_pieces(tensors, live, lambda some: [live[name].copy_(t[order]) for name, t in some])
    assert sum(piece.region.numel for piece in pieces) == 512 * 4096
    assert 0 < host.most <= 512


def test_buffers_in_host_memory():
    """A buffer that stays in host memory does not bring digits there."""
    tensors = specs(["layers.0.w"])
    live = {"layers.0.w": torch.zeros(tensors[0].shape, device=DEVICE), "layers.0.steps": torch.zeros(3)}
    devices = set()

    def load(some):
        for name, tensor in some:
            devices.add(tensor.device)
            live[name].copy_(tensor.flip(0))

    pieces = find_pieces(tensors, live, load)
    assert DEVICE in devices
    assert {piece.live for piece in pieces} == {"layers.0.w"}
    assert sum(piece.region.numel for piece in pieces) == tensors[0].numel
