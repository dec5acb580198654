"""Publishing from kept old bits, of weights on a GPU: the bytes of a baseline there, and no weights on the host."""

from __future__ import annotations

import numpy as np
import pytest

import sparserl
from sparserl.session.baseline import HostBaseline, NoBaseline
from sparserl.sources import tracked_rows
from tests.patch.gpu.gpu_weights import CUDA, DEVICE, needs_gpu, needs_kernels, on_gpu, on_host, same_bits, two_versions

pytest.importorskip("triton")
torch = pytest.importorskip("torch")
SHAPES = {"large": (3, 600_001 if CUDA else 701), "odd": (7, 41), "v": (70,)}


class Trained:
    """Parameters on the device that steps write, as they are, by masters, or as fp32 that is published in bf16."""

    def __init__(self, kind, seed=0):
        old, _ = two_versions("bfloat16", SHAPES, seed=seed)
        for bits in old.values():
            bits.array[...] &= 0xBFFF  # neither NaNs nor infinities
        self.kind = kind
        narrow = on_gpu(old)
        tensors = {name: t.float() for name, t in narrow.items()} if kind == "cast" else narrow
        self.params = {name: torch.nn.Parameter(t, requires_grad=False) for name, t in tensors.items()}
        self.masters = {p: p.detach().float() for p in self.params.values()} if kind == "masters" else {}
        self.written = [*(self.masters or self.params).values()]
        module = torch.nn.Module()
        for name, param in self.params.items():
            module.register_parameter(name, param)
        cast = torch.bfloat16 if kind == "cast" else None
        options = {"params": self.written, "masters": self.masters, "cast": cast}
        self.source = sparserl.sources.track(None, module, **options)
        self.rng = np.random.default_rng(seed)

    def published(self):
        return {name: p.detach().to(torch.bfloat16) for name, p in self.params.items()}

    def step(self, count):
        with self.source.step(), torch.no_grad():
            for tensor in self.written:
                flat = tensor.view(-1)
                where = torch.from_numpy(self.rng.permutation(flat.numel())[:count]).to(DEVICE)
                flat[where] = flat[where] * 1.01


LONG = [("masters", "ctx", 3), ("pure", "auto", 3), ("masters", "ulp", 2), ("pure", "raw", 2)]


@needs_kernels
@pytest.mark.parametrize(
    ("kind", "profile", "versions"),
    [("pure", "ctx", 1), *(pytest.param(*case, marks=pytest.mark.long) for case in LONG)],
)
def test_the_same_bytes_as_with_a_baseline_on_the_gpu(kind, profile, versions, nothing_leaves_the_gpu):
    """Steps, publishes that fail, changes that are undone: every patch is what a comparison on the device gives."""
    trained = Trained(kind)
    shards = trained.source.weights()
    full = HostBaseline(shards, sparserl.digest(shards), on_gpu=True)
    none = NoBaseline(shards)
    trained.source.committed()
    received = {name: t.clone() for name, t in trained.published().items()}
    for version in range(versions):
        trained.step(2)
        trained.step(1)
        shards = trained.source.weights()
        wanted, found = (baseline.capture(shards, profile=profile) for baseline in (full, none))
        patch = found.encode()
        assert patch.changed
        assert patch.to_bytes() == wanted.encode().to_bytes()
        if version != 1:  # else the publish fails
            patch.apply(received)
            full.advance(patch, wanted)
            none.advance(patch, found)
            trained.source.committed()
            assert same_bits(received, trained.published())


@needs_gpu
@pytest.mark.parametrize("kind", ["pure", "masters", "cast"])
def test_the_old_bits_are_those_of_the_first_step(kind, monkeypatch):
    """Rows are compared on the device, large ones in pieces; of several steps the first old bits count."""
    monkeypatch.setattr(tracked_rows, "GPU_CUT_BYTES", 2000)
    trained = Trained(kind, 1)
    trained.source.weights()
    trained.source.committed()
    before = on_host(trained.published())
    for _ in range(2):
        trained.step(6)
        trained.step(30)
    now = on_host(trained.published())
    for part in trained.source.weights().parts:
        positions, old = part.marks.run(0, part.region.numel)
        was, is_now = (side[part.tensor].array.reshape(-1) for side in (before, now))
        assert np.array_equal(old, was[positions])
        assert set(np.flatnonzero(was != is_now)) <= set(positions.tolist())
        assert positions.size < part.region.numel or part.tensor != "large"


@needs_gpu
def test_cast_weights_are_published():
    """Parameters in fp32 on the device, published in bf16: exact, with the old bits that were kept."""
    trained = Trained("cast", 2)
    none = NoBaseline(trained.source.weights())
    trained.source.committed()
    received = {name: t.clone() for name, t in trained.published().items()}
    for _ in range(2):
        trained.step(6)
        found = none.capture(trained.source.weights(), profile="ctx")
        patch = found.encode()
        assert not any(entry.dense for entry in patch)
        patch.apply(received)
        none.advance(patch, found)
        trained.source.committed()
        assert same_bits(received, trained.published())
