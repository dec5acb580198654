"""Sequences of unsigned numbers as token bytes and a string of low bits, chunk by chunk.

A token says how large a number is (below 16 exactly, above in quarter octaves); the low bits say which one. Tokens
have a small, skewed alphabet for the entropy coder and the low bits are all but uniform, whatever the distribution:
there is nothing to tune. One byte of token suffices for any 64-bit number.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import InvalidField
from ..kernels import cpu
from .profile import Layout, empty
from .streams import Chunks, Reader

_MOST_LOW_BITS = 61


def write(layout: Layout, values: npt.NDArray[Any], tokens: int, lows: int) -> Chunks:
    """Chunks for the two streams named `tokens` and `lows`."""
    heads, spans = empty(values.size, np.uint8), np.empty((len(layout.chunk_sizes(values.size)), 2), np.int64)
    words = empty(values.nbytes // 8 + len(spans) + 1, np.uint64)
    cpu.changes.pack_chunks(values, layout.chunk_log, heads, words, spans)
    tails = words.view(np.uint8).data
    return {tokens: layout.cut(heads), lows: [tails[a:b] for a, b in spans.tolist()]}


def read(
    layout: Layout, reader: Reader, count: int, limit: int, dtype: Any, tokens: int, lows: int
) -> npt.NDArray[Any]:
    """`count` numbers, none above `limit`; anything else in the streams is an error."""
    values = empty(count, dtype)
    read_into(layout, reader, values, limit, tokens, lows)
    return values


def read_into(layout: Layout, reader: Reader, values: npt.NDArray[Any], limit: int, tokens: int, lows: int) -> None:
    """As many numbers as there is room for."""
    if not (sizes := layout.chunk_sizes(values.size)):
        return
    heads = reader.take_all(tokens, sizes)
    tails = reader.take_all_stored(lows, [(size * _MOST_LOW_BITS + 7) // 8 for size in sizes])
    bad = cpu.changes.unpack_chunks(heads, tails.at, tails.length, layout.chunk_log, np.uint64(limit), values)
    if bad >= 0:
        raise InvalidField(
            f"{reader.what}: stream {tokens}: number {bad} is past its limit or its low bits do not match"
        )
