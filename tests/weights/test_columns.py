"""Very many tensors, looked at column by column: what one look at each of them gives."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sparserl import Bits
from sparserl.weights import columns
from sparserl.weights.columns import array_addresses, find_gpus, look_at
from sparserl.weights.dtypes import BY_NAME
from sparserl.weights.local import LocalWeights
from sparserl.weights.tensors import memories, memory_of

RNG = np.random.default_rng(3)
ARRAYS = [
    np.zeros(5, np.float32),
    RNG.standard_normal((3, 4)).astype(np.float16),
    np.zeros((), np.int64),
    np.arange(12, dtype=np.float32).reshape(3, 4).T,
    np.arange(12, dtype=np.uint8)[3:],
    np.zeros((0, 3), np.int8),
]
READ_ONLY = np.zeros(3, np.float32)
READ_ONLY.flags.writeable = False
TENSORS = {
    "arrays": [*ARRAYS, READ_ONLY],
    "bits": [Bits(array.view(f"u{array.itemsize}"), BY_NAME[array.dtype.name]) for array in [*ARRAYS, READ_ONLY]],
    "torch": [torch.from_numpy(array) for array in ARRAYS],
    "parameters": [torch.nn.Parameter(torch.from_numpy(array), requires_grad=False) for array in ARRAYS],
    "mixed": [READ_ONLY, torch.zeros(3), Bits(np.zeros(3, np.uint16), BY_NAME["bfloat16"]), torch.zeros(3, 4).t()],
}


@pytest.mark.parametrize("kind", TENSORS)
def test_all_together_are_what_each_is(kind):
    """Column by column or one by one, a tensor has the same memory."""
    weights = {f"w{i}": tensor for i, tensor in enumerate(TENSORS[kind])}
    one_by_one = [memory_of(name, tensor) for name, tensor in weights.items()]
    assert [memory[:5] for memory in memories(weights).values()] == [memory[:5] for memory in one_by_one]
    contiguous = {name: tensor for name, tensor in weights.items() if memory_of(name, tensor).strides is None}
    local = LocalWeights.of(contiguous)
    for (name, tensor), (_, memory) in zip(sorted(contiguous.items()), local.parts, strict=True):
        assert memory == memory_of(name, tensor)
        assert memory.owner is (tensor.array if isinstance(tensor, Bits) else tensor)


def test_addresses_of_arrays():
    """NumPy keeps the address of an array where its C interface says."""
    arrays = [np.zeros(7)[i:] for i in range(8)] + ARRAYS
    assert array_addresses(arrays).tolist() == [array.ctypes.data for array in arrays]


def test_addresses_of_arrays_with_another_interface(monkeypatch):
    """A NumPy that keeps it elsewhere is asked for every address."""
    arrays = [np.zeros(7)[i:] for i in range(8)]
    monkeypatch.setattr(columns.cpu.objects, "read_words", lambda _, out: out.fill(1))
    assert array_addresses(arrays).tolist() == [array.ctypes.data for array in arrays]


def are_odd(tensors):
    looked_at = look_at(tensors)
    return looked_at is None or find_gpus(tensors, looked_at) is None


@pytest.mark.parametrize(
    "odd",
    [
        np.zeros(3, ">f4"),
        np.zeros(3, "U4"),
        np.zeros(3).view(np.recarray),
        torch.zeros(3).to_sparse(),
        torch.zeros(3, device="meta"),
        torch.zeros(3, dtype=torch.complex64).conj().imag,
        torch.zeros(3, dtype=torch.complex64),
        torch.zeros(3, dtype=torch.complex128),
        None,
    ],
    ids=lambda odd: f"{type(odd).__name__} {getattr(odd, 'dtype', '')} {getattr(odd, 'layout', '')}",
)
def test_an_odd_tensor_is_looked_at_alone(odd):
    """Among others of its kind, it makes `memory_of` look, which knows what is wrong with it."""
    plain = np.zeros(3, np.float32) if isinstance(odd, np.ndarray) else torch.zeros(3)
    assert are_odd([plain, odd])
    assert not are_odd([plain, plain])


def test_weights_that_were_looked_at_are_not_looked_at_again(monkeypatch):
    """`LocalWeights` of `LocalWeights` share what is known."""
    local = LocalWeights.of({"a": np.zeros(3, np.float32), "b": torch.zeros(3)})
    monkeypatch.setattr("sparserl.weights.local.look_at", None)
    again = LocalWeights.of(local, local.table)
    assert again is not local
    assert again.lies_where(local)
