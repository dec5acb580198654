"""Dtypes, and tensors as the unsigned integers of their bits. Torch is never imported here."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

UIntArray = npt.NDArray[np.unsignedinteger[Any]]

_UINT: dict[int, np.dtype[Any]] = {w: np.dtype(f"<u{w}") for w in (1, 2, 4, 8)}


@dataclass(frozen=True, eq=False)
class DType:
    """The format of one element. There is one object for each dtype, so they are compared by identity.

    Attributes:
        name: The name that torch uses, such as `bfloat16`.
        code: The number that stands for it in the format.
        width: Bytes of an element.
        sign_magnitude: Whether its bits are a sign and a magnitude, as those of floats are. They are then mapped to an
            ordered integer before a step is taken; for integers the wrapped difference of the bits is the step.
        safetensors: Its name in safetensors files; None if it has none.

    Example:
        >>> from sparserl.weights.dtypes import BY_NAME
        >>> BY_NAME["bfloat16"], BY_NAME["bfloat16"].width
        (bfloat16, 2)
    """

    name: str
    code: int
    width: int
    sign_magnitude: bool
    safetensors: str | None

    @property
    def uint(self) -> np.dtype[Any]:
        """The unsigned integer dtype of the same width."""
        return _UINT[self.width]

    @property
    def signed(self) -> bool:
        """Whether it is a signed integer, in two's complement."""
        return self.name.startswith("int")

    def __repr__(self) -> str:
        return self.name

    def __reduce__(self) -> tuple[Any, ...]:
        return _named, (self.name,)


def _named(name: str) -> DType:
    """The one object of a name, for unpickling."""
    return BY_NAME[name]


DTYPES: tuple[DType, ...] = (
    DType("bool", 0, 1, False, "BOOL"),
    DType("uint8", 1, 1, False, "U8"),
    DType("int8", 2, 1, False, "I8"),
    DType("float8_e4m3fn", 3, 1, True, "F8_E4M3"),
    DType("float8_e5m2", 4, 1, True, "F8_E5M2"),
    DType("float8_e4m3fnuz", 5, 1, True, "F8_E4M3FNUZ"),
    DType("float8_e5m2fnuz", 6, 1, True, "F8_E5M2FNUZ"),
    DType("float8_e8m0fnu", 7, 1, False, "F8_E8M0"),
    DType("float4_e2m1fn_x2", 8, 1, False, None),
    DType("uint16", 16, 2, False, "U16"),
    DType("int16", 17, 2, False, "I16"),
    DType("float16", 18, 2, True, "F16"),
    DType("bfloat16", 19, 2, True, "BF16"),
    DType("uint32", 32, 4, False, "U32"),
    DType("int32", 33, 4, False, "I32"),
    DType("float32", 34, 4, True, "F32"),
    DType("complex32", 35, 4, False, None),
    DType("uint64", 48, 8, False, "U64"),
    DType("int64", 49, 8, False, "I64"),
    DType("float64", 50, 8, True, "F64"),
    DType("complex64", 51, 8, False, "C64"),
)

BY_NAME: dict[str, DType] = {d.name: d for d in DTYPES}
BY_CODE: dict[int, DType] = {d.code: d for d in DTYPES}
BY_SAFETENSORS: dict[str, DType] = {d.safetensors: d for d in DTYPES if d.safetensors}
TORCH_DTYPES: dict[Any, DType | None] = {}  # those that `dtype_of_torch` was asked for


def dtype_of_torch(dtype: Any) -> DType | None:
    """The dtype of the same name as a torch dtype; None if it is not supported."""
    if dtype not in TORCH_DTYPES:
        TORCH_DTYPES[dtype] = BY_NAME.get(str(dtype).removeprefix("torch."))
    return TORCH_DTYPES[dtype]


def dtype_of_numpy(dtype: np.dtype[Any]) -> DType | None:
    """The dtype of the same name as a NumPy dtype; None if it is not supported, or big-endian."""
    return None if is_big_endian(dtype) else BY_NAME.get(dtype.name)


def is_big_endian(dtype: np.dtype[Any]) -> bool:
    """Whether the bytes of an element are in the order that patches do not have."""
    return dtype.byteorder == ">" or (dtype.byteorder == "=" and sys.byteorder == "big")


@dataclass(frozen=True, eq=False)
class Bits:
    """A tensor as an array of bit patterns, for dtypes that NumPy does not have, such as bfloat16 and float8.

    Attributes:
        array: The bits, as unsigned integers of the dtype's width.
        dtype: The dtype that the bits stand for.

    Raises:
        ValueError: The array's dtype is not the unsigned integer of that width.

    Example:
        >>> Bits(np.zeros(3, np.uint16), BY_NAME["bfloat16"]).dtype
        bfloat16
    """

    array: UIntArray
    dtype: DType

    def __post_init__(self) -> None:
        if self.array.dtype != self.dtype.uint:
            raise ValueError(f"bits of {self.dtype} must be an array of {self.dtype.uint}, not {self.array.dtype}")
