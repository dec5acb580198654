"""Very many tensors, looked at column by column: what one look at each of them gives."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sparserl import Bits
from sparserl.kernels import cpu
from sparserl.weights import columns, dlpack, dtypes, memory
from sparserl.weights.columns import find_gpus, look_at
from sparserl.weights.dtypes import BY_NAME
from sparserl.weights.local import LocalWeights
from sparserl.weights.objects import array_addresses, identities
from sparserl.weights.staging import StagedMemory
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
    for (name, tensor), (_, part) in zip(sorted(contiguous.items()), local.parts, strict=True):
        assert part == memory_of(name, tensor)
        assert part.owner is (tensor.array if isinstance(tensor, Bits) else tensor)


def test_addresses_of_arrays():
    """NumPy keeps the address of an array where its C interface says."""
    arrays = [np.zeros(7)[i:] for i in range(8)] + ARRAYS
    assert array_addresses(arrays).tolist() == [array.ctypes.data for array in arrays]


def test_addresses_of_arrays_with_another_interface(monkeypatch):
    """A NumPy that keeps it elsewhere is asked for every address."""
    arrays = [np.zeros(7)[i:] for i in range(8)]
    monkeypatch.setattr(cpu.objects, "read_words", lambda _, out: out.fill(1))
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
        torch._neg_view(torch.zeros(3)),
        torch._neg_view(torch.zeros(3, dtype=torch.bfloat16)),
        torch.zeros(3, dtype=torch.complex64),
        torch.zeros(3, dtype=torch.complex128),
        torch.zeros(3, dtype=torch.uint8).view(torch.uint4),
        None,
    ],
    ids=lambda odd: f"{type(odd).__name__} {getattr(odd, 'dtype', '')} {getattr(odd, 'forms', '')}",
)
def test_an_odd_tensor_is_looked_at_alone(odd):
    """Among others of its kind, it makes `memory_of` look, which knows what is wrong with it."""
    plain = np.zeros(3, np.float32) if isinstance(odd, np.ndarray) else torch.zeros(3)
    assert are_odd([plain, odd])
    assert not are_odd([plain, plain])


ODD_SHAPES = {
    "a number": torch.zeros(()),
    "empty": torch.zeros(0, 3),
    "one row of many": torch.zeros(4, 5)[1:2],
    "one column of many": torch.zeros(4, 5)[:, 1:2],
    "one column, read as a row": torch.zeros(4, 1).t(),
    "transposed": torch.zeros(4, 5).t(),
    "expanded": torch.zeros(1, 5).expand(4, 5),
    "every other": torch.zeros(8)[::2],
    "a part": torch.zeros(8)[3:],
    "nine dimensions": torch.zeros(1, 1, 2, 1, 1, 1, 2, 1, 1),
}


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("name", dtypes.BY_NAME)
def test_dlpack_tells_what_torch_tells(name):
    """Of every dtype: dtype, shape, address and whether it is contiguous."""
    if not hasattr(torch, name):
        pytest.skip(f"this torch has no {name}")
    plain = torch.empty(4, dtype=getattr(torch, name))
    tensors = [plain, plain[1:], plain[::2], plain.view(2, 2).t()]
    described = dlpack.describe(identities(tensors))
    asked = columns._ask_each(tensors, torch.Tensor)
    assert (described is None) == (asked is None) == (name in columns.COMPLEX)
    if described is not None and asked is not None:
        assert (described.forms.dtypes, described.forms.shapes) == asked.forms
        assert described.addresses.tolist() == asked.addresses.tolist()
        assert described.codes.tolist() == [dtype.code for dtype in asked.forms.dtypes]
        assert described.contiguous.tolist() == [strides is None for strides in asked.strides]


def test_shapes_that_dlpack_describes():
    tensors = [*ODD_SHAPES.values()]
    described = dlpack.describe(identities(tensors))
    assert described.forms.shapes == tuple(tuple(tensor.shape) for tensor in tensors)
    assert described.contiguous.tolist() == [tensor.is_contiguous() for tensor in tensors]


def test_very_many_dimensions_are_asked_for_one_by_one():
    tensors = [torch.zeros((1,) * 12 + (3,)), torch.zeros((2,) + (1,) * 12)]
    assert dlpack.describe(identities(tensors)) is None
    assert look_at(tensors).forms.shapes == tuple(tuple(tensor.shape) for tensor in tensors)


def test_a_tensor_that_dlpack_cannot_describe_leaves_no_error_behind():
    assert dlpack.describe(identities([torch.zeros(3), torch.zeros(3).to_sparse()])) is None
    assert dlpack.describe(identities([torch.zeros(3), torch.zeros(3, device="meta")])) is None
    assert dlpack.describe(identities([torch.zeros(3)])) is not None


def test_a_torch_without_the_c_interface_is_asked_for_each_tensor(monkeypatch):
    weights = {f"w{i}": tensor for i, tensor in enumerate(TENSORS["torch"])}
    described = [memory[:5] for memory in memories(weights).values()]
    monkeypatch.setattr(dlpack, "_exchange_function", lambda: 0)
    assert [memory[:5] for memory in memories(weights).values()] == described
    assert are_odd([torch.zeros(3), torch.zeros(3).to_sparse()])


@pytest.mark.parametrize("left", [0, 16])
@pytest.mark.parametrize("begin", [0, 2])
def test_memory_that_was_freed_or_made_smaller_is_noticed(begin, left):
    """An address says nothing of how much memory there is behind it."""
    tensors = [torch.zeros(6)[2:], torch.zeros(6)[begin:]]
    assert not are_odd(tensors)
    tensors[1].untyped_storage().resize_(left)
    is_noticed = are_odd(tensors)
    assert is_noticed  # nothing that pytest would print for the tensor: it has no memory


def test_tensors_on_several_devices(monkeypatch):
    """Each is read where it lies; those that lie on neither GPU nor host are refused."""
    tensors = [torch.zeros(3), torch.ones(4), torch.zeros(3)]
    looked_at = look_at(tensors)
    assert find_gpus(tensors, looked_at)[0].tolist() == [-1, -1, -1]
    looked_at.devices[:] = [1, 2, 1]
    monkeypatch.setattr(memory, "is_on_gpu", lambda tensor: tensor.numel() == 4)
    numbers, gpus = find_gpus(tensors, looked_at)
    assert numbers.tolist() == [-1, 0, -1]
    assert gpus == [tensors[1].device]
    local = LocalWeights.of({"a": tensors[1], "b": tensors[1].clone()})
    (_, first), (_, second) = local.parts
    assert isinstance(first, StagedMemory)
    assert isinstance(second, StagedMemory)
    assert first.address == tensors[1].data_ptr()


def test_weights_that_were_looked_at_are_not_looked_at_again(monkeypatch):
    """`LocalWeights` of `LocalWeights` share what is known."""
    local = LocalWeights.of({"a": np.zeros(3, np.float32), "b": torch.zeros(3)})
    monkeypatch.setattr("sparserl.weights.local.look_at", None)
    again = LocalWeights.of(local, local.table)
    assert again is not local
    assert again.lies_where(local)
