"""The header of a safetensors file. Nothing in it is used before it was checked against the size of the file.

    u64 length ──► JSON {name: {dtype, shape, data_offsets}, "__metadata__": {…}} ──► bits of the tensors

Bits need not be aligned, and need not fill the file.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

from ..errors import CheckpointError
from ..weights.dtypes import BY_NAME, BY_SAFETENSORS, Bits, DType
from ..weights.region import Shape
from ..weights.table import TensorTable
from ..wire import limits
from ..wire.patchfile import MAGIC

HEADER_BYTES = 100_000_000
_LENGTH = struct.Struct("<Q")
_METADATA = "__metadata__"
_MAX_DIGITS = 20  # of a number that can be meant; reading longer ones takes quadratic time
_PAIR = BY_NAME["float4_e2m1fn_x2"]
_PAIRS = "F4"  # the file counts half bytes; an element of ours is a byte


@dataclass(frozen=True, slots=True)
class Slot:
    """One tensor of a file: its bits are the bytes `start` to `stop` of the file."""

    name: str
    dtype: DType
    shape: Shape
    start: int
    stop: int


def read_header(file: BinaryIO, where: str) -> list[Slot]:
    """The tensors of an open safetensors file. `where` names the file in errors."""
    size = os.fstat(file.fileno()).st_size
    head = file.read(_LENGTH.size)
    if head == MAGIC:
        raise CheckpointError(f"{where} is a sparserl patch, not weights")
    if len(head) < _LENGTH.size:
        raise CheckpointError(f"{where} is not a safetensors file: {size} bytes are too few")
    (length,) = _LENGTH.unpack(head)
    if length > min(HEADER_BYTES, size - _LENGTH.size):
        raise CheckpointError(
            f"{where} is cut short or not a safetensors file: it announces a header of {length} bytes, "
            f"has {size}, and the limit is {HEADER_BYTES}"
        )
    header = parse_json(file.read(length), f"{where}: the header")
    _check_metadata(header.pop(_METADATA, {}), where)
    origin = _LENGTH.size + length
    slots = [_slot(name, entry, origin, size, f"{where}: tensor {name!r}") for name, entry in header.items()]
    _refuse_overlap(slots, where)
    return slots


def encode_header(tensors: Mapping[str, Bits], where: str) -> bytes:
    """The header of a file with these tensors, one after the other."""
    header: dict[str, Any] = {_METADATA: {"format": "pt"}}
    start = 0
    for name, bits in tensors.items():
        stop = start + bits.array.nbytes
        dtype, shape = _written_format(name, bits.dtype, bits.array.shape)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, stop]}
        start = stop
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > HEADER_BYTES:
        raise CheckpointError(f"{where}: {len(tensors)} tensors need a header of {len(text)} bytes, past the limit")
    return _LENGTH.pack(len(text)) + text


def require_savable(table: TensorTable) -> None:
    """Refuse tensors that no safetensors file can hold."""
    for spec in table.specs:
        _written_format(spec.name, spec.dtype, spec.shape)


def _written_format(name: str, dtype: DType, shape: Shape) -> tuple[str, Shape]:
    """The dtype and shape of a tensor as a file names them."""
    if name == _METADATA:
        raise CheckpointError(f"tensor {name!r}: safetensors reserves this name; rename the tensor")
    if dtype is _PAIR and shape:
        return _PAIRS, (*shape[:-1], 2 * shape[-1])
    if dtype.safetensors is None:
        raise CheckpointError(f"tensor {name!r}: safetensors has no {dtype.name} of shape {list(shape)}")
    return dtype.safetensors, shape


def parse_json(raw: bytes, label: str) -> dict[str, Any]:
    """Parse a JSON object in which no name occurs twice."""
    try:
        value = json.loads(raw.decode(), object_pairs_hook=_unique, parse_int=_number, parse_constant=_number)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{label} is not valid JSON: {str(error) or type(error).__name__}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{label} is a JSON {type(value).__name__}, not an object")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    items: dict[str, Any] = {}
    for name, value in pairs:
        if name in items:
            raise ValueError(f"{name!r} occurs twice")
        items[name] = value
    return items


def _number(text: str) -> int:
    if len(text) > _MAX_DIGITS:
        raise ValueError(f"a number of {len(text)} digits")
    return int(text)


def _check_metadata(metadata: Any, where: str) -> None:
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise CheckpointError(f"{where}: {_METADATA} is not a map from text to text")


def _slot(name: str, entry: Any, origin: int, size: int, label: str) -> Slot:
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
        raise CheckpointError(f"{label}: needs dtype, shape and data_offsets")
    try:
        too_long = len(name.encode()) > limits.NAME_BYTES
    except UnicodeEncodeError as error:
        raise CheckpointError(f"{label}: the name is not valid Unicode") from error
    if too_long:
        raise CheckpointError(f"{label}: the name is longer than {limits.NAME_BYTES} bytes")
    dtype, shape = _format(entry["dtype"], _numbers(entry["shape"], f"{label}: shape"), label)
    offsets = _numbers(entry["data_offsets"], f"{label}: data_offsets")
    if len(offsets) != 2 or not offsets[0] <= offsets[1] <= size - origin:
        raise CheckpointError(
            f"{label}: data_offsets {list(offsets)} do not lie in the {size - origin} bytes behind the header; "
            "the file is cut short or damaged"
        )
    start, stop = offsets
    needed = math.prod(shape) * dtype.width
    if stop - start != needed:
        raise CheckpointError(
            f"{label}: {stop - start} bytes of data, but {dtype.name}{list(shape)} takes {needed} bytes"
        )
    return Slot(name, dtype, shape, origin + start, origin + stop)


def _numbers(value: Any, label: str) -> Shape:
    if not isinstance(value, list) or not all(type(n) is int and n >= 0 for n in value):
        raise CheckpointError(f"{label} is not a list of whole numbers")
    return tuple(value)


def _format(name: Any, shape: Shape, label: str) -> tuple[DType, Shape]:
    dtype = BY_SAFETENSORS.get(name) if isinstance(name, str) else None
    if name == _PAIRS:
        if not shape or shape[-1] % 2:
            raise CheckpointError(f"{label}: F4 of shape {list(shape)} does not fill whole bytes")
        dtype = _PAIR
        shape = (*shape[:-1], shape[-1] // 2)
    if dtype is None:
        raise CheckpointError(
            f"{label}: dtype {name!r} is not supported; supported are {', '.join(BY_SAFETENSORS)}, {_PAIRS}"
        )
    if len(shape) > limits.RANK:
        raise CheckpointError(f"{label}: {len(shape)} dimensions, the limit is {limits.RANK}")
    if max((math.prod(shape), *shape)) > limits.TENSOR_ELEMENTS:
        raise CheckpointError(f"{label}: shape {list(shape)} is past the limit of {limits.TENSOR_ELEMENTS} elements")
    return dtype, shape


def _refuse_overlap(slots: Sequence[Slot], where: str) -> None:
    """Bytes with two names would be patched twice."""
    by_start = sorted((slot for slot in slots if slot.stop > slot.start), key=lambda slot: slot.start)
    for slot, following in zip(by_start, by_start[1:], strict=False):
        if following.start < slot.stop:
            raise CheckpointError(f"{where}: tensors {slot.name!r} and {following.name!r} overlap in the file")
