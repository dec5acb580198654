"""fp32 tensors on a GPU that are published in bf16: which of them kernels read, and where."""

from __future__ import annotations

import pytest

import sparserl
from sparserl.errors import UnsupportedTensor
from sparserl.weights import memory
from sparserl.weights.local import LocalWeights
from sparserl.weights.staging import cast_origin, lazy_bits
from sparserl.weights.tensors import memory_of

torch = pytest.importorskip("torch")


@pytest.fixture(autouse=True)
def _on_gpu(monkeypatch):
    """Torch tensors pass for such on a GPU; nothing is launched there."""
    monkeypatch.setattr(memory, "is_on_gpu", lambda _: True)


def split(old, *new):
    from sparserl.weights.on_gpu import split_by_gpu

    on_host, runs = split_by_gpu(old.places, old, *new)
    return [old.table.specs[tensor].name for tensor, _ in on_host], runs


def test_casts_are_runs_of_their_own():
    """They have the fp32 elements' addresses, also when they are cut; the first version is never cast."""
    wide = {"odd": torch.randn(7, 41), "number": torch.randn(()), "none": torch.randn(0, 3), "w": torch.randn(9)}
    narrow = {name: tensor.bfloat16() for name, tensor in wide.items()} | {"counts": torch.arange(3)}
    old = LocalWeights.of(narrow)
    casts = {name: lazy_bits(tensor, torch.bfloat16) for name, tensor in wide.items() if name != "w"}
    new = LocalWeights.of(narrow | casts)
    on_host, runs = split(old, new)
    assert on_host == []
    names = {(part.dtype.name, part.is_cast): [old.table.specs[i].name for i in part.tensor] for part in runs}
    assert names == {
        ("bfloat16", True): ["none", "number", "odd"],
        ("bfloat16", False): ["w"],
        ("int64", False): ["counts"],
    }
    cast = next(part for part in runs if part.is_cast)
    pieces = cast.pieces(100)
    at = pieces.start[-1]
    assert at > 0
    assert pieces.address[:, -1].tolist() == [narrow["odd"].data_ptr() + 2 * at, wide["odd"].data_ptr() + 4 * at]
    on_host, _ = split(new)
    assert on_host == ["none", "number", "odd"]


def test_other_casts_are_read_through_host_memory():
    """Kernels cast fp32 to bf16 and nothing else, and only what is contiguous."""
    weights = {
        "half": lazy_bits(torch.randn(5), torch.float16),
        "double": lazy_bits(torch.randn(5, dtype=torch.float64), torch.bfloat16),
        "turned": lazy_bits(torch.randn(3, 5).t(), torch.bfloat16),
    }
    dtypes = {"half": torch.float16, "double": torch.bfloat16, "turned": torch.bfloat16}
    shapes = {"half": (5,), "double": (5,), "turned": (5, 3)}
    old = LocalWeights.of({name: torch.zeros(shapes[name], dtype=dtypes[name]) for name in weights})
    on_host, runs = split(old, LocalWeights.of(weights))
    assert sorted(on_host) == sorted(weights)
    assert runs == []
    assert [name for name in weights if cast_origin(memory_of(name, weights[name])) is not None] == ["turned"]


def test_a_cast_of_freed_memory_is_refused():
    """A kernel would read whatever is there."""
    tensor = torch.randn(4, 4)
    tensor.untyped_storage().resize_(0)
    with pytest.raises(UnsupportedTensor, match="its storage was freed"):
        sparserl.digest({"w": lazy_bits(tensor, torch.bfloat16)})


def test_a_number_is_copied():
    """A cast tensor of no dimensions is copied as any other: a publisher keeps such copies."""
    for value in (2.5, -0.75):
        copy = memory_of("w", lazy_bits(torch.tensor(value), torch.bfloat16)).copied()
        assert int(copy) == int(torch.tensor(value).view(torch.int32)) >> 16 & 0xFFFF
