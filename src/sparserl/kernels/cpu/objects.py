"""Fields of Python objects, read in one call for very many of them, in Numba."""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types

from .compiling import kernel
from .llvm import intrinsic, keep_alive, load

_I32, _I64 = (ir.IntType(n) for n in (32, 64))


@kernel
def read_words(address: Any, out: Any) -> None:
    """Write the 64-bit word at each address to `out`, an int64 array."""
    for i in range(address.size):
        out[i] = load(out, address[i])


def _calling(pointers: int) -> Any:
    """The signature and the code of a call of the C function at an address with so many pointers."""

    def codegen(ctx: Any, b: Any, sig: Any, args: Any) -> Any:
        kind = ir.FunctionType(_I32, [_I64] * pointers)
        return b.sext(b.call(b.inttoptr(args[0], kind.as_pointer()), args[1:]), _I64)

    return types.int64(*[types.int64] * (1 + pointers)), codegen


@intrinsic
def _call(_: Any, function: Any, first: Any, second: Any) -> Any:
    """Call the C function at an address with two pointers; it returns an int."""
    return _calling(2)


@intrinsic
def _call_with_four(_: Any, function: Any, first: Any, second: Any, third: Any, fourth: Any) -> Any:
    """Call the C function at an address with four pointers; it returns an int."""
    return _calling(4)


@intrinsic
def _call_without_arguments(_: Any, function: Any) -> Any:
    """Call the C function at an address, which takes and returns nothing."""

    def codegen(ctx: Any, b: Any, sig: Any, args: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [])
        b.call(b.inttoptr(args[0], kind.as_pointer()), [])
        return ctx.get_dummy_value()

    return types.void(types.int64), codegen


def _describe_tensors(
    describe: Any,
    clear_error: Any,
    objects: Any,
    dtypes: Any,
    codes: Any,
    forms: Any,
    addresses: Any,
    contiguous: Any,
    devices: Any,
    tensor_codes: Any,
) -> int:
    """What DLPack says of every tensor: how many words of `forms` were written, or -1 if it has no words for one.

    `describe` and `clear_error` are the addresses of C functions: DLPack's, which fills a `DLTensor` from a Python
    object, and `PyErr_Clear`. `objects` is the address of pointers to Python objects. `dtypes` are DLPack's numbers of
    dtypes, and `codes` ours. Of each tensor, `forms` gets a word with its dtype and its number of dimensions, followed
    by its sizes, and `devices` the kind and the number of its device.
    """
    dl_tensor = np.zeros(6, np.int64)
    view = dl_tensor.ctypes.data
    last = 0  # mostly, all tensors have the same dtype
    used = 0
    for i in range(addresses.size):
        if _call(describe, load(forms, objects + 8 * i), view) != 0:
            _call_without_arguments(clear_error)
            return -1
        kind = dl_tensor[2] >> 32
        rank = dl_tensor[2] & 0xFFFFFFFF
        if kind != dtypes[last]:
            last = 0
            while last < dtypes.size and kind != dtypes[last]:
                last += 1
        if last == dtypes.size or used + 1 + rank > forms.size:
            return -1
        addresses[i] = dl_tensor[0] + dl_tensor[5]
        devices[i] = dl_tensor[1]
        tensor_codes[i] = codes[last]
        forms[used] = codes[last] << 32 | rank
        reach = 1
        in_order = True
        for d in range(rank - 1, -1, -1):
            size = load(forms, dl_tensor[3] + 8 * d)
            forms[used + 1 + d] = size
            in_order &= size == 1 or load(forms, dl_tensor[4] + 8 * d) == reach
            reach *= size
        contiguous[i] = in_order or reach == 0
        used += 1 + rank
    return used


def _has_items(next_item: Any, mapping: Any, keys: Any, values: Any) -> bool:
    """Whether the dict at an address has these keys and values, in this order, and no others; they are addresses too.

    `next_item` is the address of the C function `PyDict_Next`.
    """
    item = np.zeros(3, np.int64)  # the position, which is the function's own, the key and the value
    at = item.ctypes.data
    for i in range(keys.size):
        if _call_with_four(next_item, mapping, at, at + 8, at + 16) == 0:
            return False
        if item[1] != keys[i] or item[2] != values[i]:
            return False
    is_last = _call_with_four(next_item, mapping, at, at + 8, at + 16) == 0
    keep_alive(item)
    return bool(is_last)


has_items: Any = kernel(_has_items, nogil=False)  # nobody changes the dict meanwhile
describe_tensors: Any = kernel(_describe_tensors, nogil=False)  # DLPack's functions need the interpreter's lock
