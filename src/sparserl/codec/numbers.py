"""Sequences of unsigned numbers as token bytes and a string of low bits, chunk by chunk.

A token gives the size of a number (exactly below 16, in quarter octaves above); the low bits give the rest. Tokens
have a small, skewed alphabet for the entropy coder, and the low bits are almost uniform for any distribution, so there
is nothing to tune. A token of one byte is enough for any 64-bit number.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import InvalidField
from ..kernels import cpu
from .profile import BucketLayout, empty
from .streams import Chunks, Reader

_MAX_LOW_BITS = 61


def write(layout: BucketLayout, values: npt.NDArray[Any], tokens: int, lows: int) -> Chunks:
    """Chunks for the two streams named `tokens` and `lows`."""
    token_bytes = empty(values.size, np.uint8)
    spans = np.empty((len(layout.chunk_sizes(values.size)), 2), np.int64)
    low_words = empty(values.nbytes // 8 + len(spans) + 1, np.uint64)
    cpu.changes.pack_chunks(values, layout.chunk_log, token_bytes, low_words, spans)
    low_bytes = low_words.view(np.uint8).data
    return {tokens: layout.cut(token_bytes), lows: [low_bytes[a:b] for a, b in spans.tolist()]}


def read(
    layout: BucketLayout, reader: Reader, count: int, limit: int, dtype: Any, tokens: int, lows: int
) -> npt.NDArray[Any]:
    """`count` numbers, none above `limit`; anything else in the streams is an error."""
    values = empty(count, dtype)
    read_into(layout, reader, values, limit, tokens, lows)
    return values


def read_into(
    layout: BucketLayout, reader: Reader, values: npt.NDArray[Any], limit: int, tokens: int, lows: int
) -> None:
    """Fill an array with numbers, none above `limit`."""
    sizes = layout.chunk_sizes(values.size)
    if not sizes:
        return
    token_bytes = reader.take_all(tokens, sizes)
    low_bits = reader.take_all_stored(lows, [(size * _MAX_LOW_BITS + 7) // 8 for size in sizes])
    bad = cpu.changes.unpack_chunks(
        token_bytes, low_bits.address, low_bits.length, layout.chunk_log, np.uint64(limit), values
    )
    if bad >= 0:
        raise InvalidField(
            f"{reader.label}: stream {tokens}: number {bad} is past its limit or its low bits do not match"
        )
