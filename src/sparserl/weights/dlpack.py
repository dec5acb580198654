"""Where very many torch tensors lie, as DLPack's C interface tells it: a call of C for each, and none of Python."""

from __future__ import annotations

import ctypes
import sys
from functools import cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..kernels import cpu
from .dtypes import BY_CODE, BY_NAME, DType
from .memory import address_of
from .objects import c_function
from .region import Numbers, Shape

_MAJOR_VERSION = 1
_DESCRIBE = 40  # where DLPack's table of C functions has `dltensor_from_py_object_no_sync`
_MOST_DIMENSIONS = 8  # of a tensor, on average
_DTYPES = {  # code, bits and lanes of an element
    "bool": (6, 8, 1),
    "uint8": (1, 8, 1),
    "int8": (0, 8, 1),
    "float8_e4m3fn": (10, 8, 1),
    "float8_e5m2": (12, 8, 1),
    "float8_e4m3fnuz": (11, 8, 1),
    "float8_e5m2fnuz": (13, 8, 1),
    "float8_e8m0fnu": (14, 8, 1),
    "float4_e2m1fn_x2": (17, 4, 2),
    "uint16": (1, 16, 1),
    "int16": (0, 16, 1),
    "float16": (2, 16, 1),
    "bfloat16": (4, 16, 1),
    "uint32": (1, 32, 1),
    "int32": (0, 32, 1),
    "float32": (2, 32, 1),
    "uint64": (1, 64, 1),
    "int64": (0, 64, 1),
    "float64": (2, 64, 1),
}
_NUMBERS = np.array([code | bits << 8 | lanes << 16 for code, bits, lanes in _DTYPES.values()], np.int64)
_CODES = np.array([BY_NAME[name].code for name in _DTYPES], np.int64)


class NumberedForms:
    """The dtypes and shapes of tensors, in numbers: very many are compared at once.

    Args:
        numbers: A word with the dtype and the number of dimensions of each tensor, followed by its sizes.
    """

    def __init__(self, numbers: Numbers) -> None:
        self._numbers = numbers

    def __eq__(self, other: object) -> bool:
        return isinstance(other, NumberedForms) and np.array_equal(self._numbers, other._numbers)

    def __hash__(self) -> int:
        return hash((self._numbers.size, int(self._numbers.sum())))

    @property
    def dtypes(self) -> tuple[DType, ...]:
        """The dtype of each tensor."""
        return tuple([BY_CODE[row[0] >> 32] for row in self._rows()])

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """The shape of each tensor."""
        return tuple([tuple(row[1:]) for row in self._rows()])

    def _rows(self) -> list[list[int]]:
        numbers = self._numbers.tolist()
        rows = []
        begin = 0
        while begin < len(numbers):
            end = begin + 1 + (numbers[begin] & 0xFFFFFFFF)
            rows.append(numbers[begin:end])
            begin = end
        return rows


class Description(NamedTuple):
    """What DLPack says of tensors.

    Attributes:
        forms: Their dtypes and shapes.
        addresses: The address of each one's first element.
        contiguous: Whether it is contiguous.
        devices: The kind and the number of its device.
        codes: The code of its dtype.
    """

    forms: NumberedForms
    addresses: Numbers
    contiguous: npt.NDArray[np.bool_]
    devices: Numbers
    codes: Numbers


def describe(pointers: Numbers) -> Description | None:
    """What DLPack says of the torch tensors with these `id`s; None if it has no words for one, or torch has no C
    interface yet.
    """
    function = _exchange_function()
    return _describe(function, pointers) if function else None


def warm_up() -> None:
    """Compile what describes tensors."""
    _describe(0, np.empty(0, np.int64))


def _describe(function: int, pointers: Numbers) -> Description | None:
    count = pointers.size
    forms = np.empty(count * (1 + _MOST_DIMENSIONS), np.int64)
    addresses = np.empty(count, np.int64)
    contiguous = np.empty(count, bool)
    devices = np.empty(count, np.int64)
    codes = np.empty(count, np.int64)
    columns = (addresses, contiguous, devices, codes)
    used = cpu.objects.describe_tensors(
        function, c_function("PyErr_Clear"), address_of(pointers), _NUMBERS, _CODES, forms, *columns
    )
    return None if used < 0 else Description(NumberedForms(forms[:used].copy()), *columns)


@cache
def _exchange_function() -> int:
    """The address of the C function by which torch describes a tensor; 0 if this version has none."""
    capsule = getattr(sys.modules["torch"].Tensor, "__dlpack_c_exchange_api__", None)
    if capsule is None:
        return 0
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype = ctypes.c_void_p
    pointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
    table = pointer(capsule, b"dlpack_exchange_api")
    if ctypes.c_uint32.from_address(table).value != _MAJOR_VERSION:
        return 0
    return ctypes.c_size_t.from_address(table + _DESCRIBE).value
