"""Value coders: words as they are, as byte planes, or as small numbers."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..weights.dtypes import UIntArray
from . import numbers
from .profile import BucketLayout, empty
from .streams import Chunks, Reader, Stream


def write_words(layout: BucketLayout, words: UIntArray, stream: int) -> Chunks:
    """Each word in its own width, little-endian."""
    return {stream: layout.cut(np.ascontiguousarray(words))}


def read_words(layout: BucketLayout, reader: Reader, count: int, stream: int) -> UIntArray:
    """`count` words."""
    return reader.take_items(stream, np.dtype(layout.dtype.uint), layout.chunk_sizes(count), layout.lend)


def write_planes(layout: BucketLayout, words: UIntArray, stream: int) -> Chunks:
    """Byte planes, a stream each, from `stream` on: the high bytes of floats repeat, the low ones do not."""
    table = words.view(np.uint8).reshape(-1, layout.dtype.width)
    return {stream + plane: layout.cut(np.ascontiguousarray(table[:, plane])) for plane in range(layout.dtype.width)}


def read_planes(layout: BucketLayout, reader: Reader, count: int, stream: int) -> UIntArray:
    """`count` words from their byte planes."""
    words = empty(count, layout.dtype.uint)
    sizes = layout.chunk_sizes(count)
    planes = range(stream, stream + layout.dtype.width)
    reader.decode_ahead(dict.fromkeys(planes, sizes))
    highest, *lower = reversed(planes)
    words[...] = reader.take_all(highest, sizes)
    for plane in lower:
        words <<= 8
        words |= reader.take_all(plane, sizes)
    return words


def write_steps(layout: BucketLayout, words: UIntArray) -> Chunks:
    """Zigzag steps as numbers."""
    return numbers.write(layout, words, Stream.STEP_TOKENS, Stream.STEP_LOWS)


def read_steps(layout: BucketLayout, reader: Reader) -> Any:
    """Zigzag steps, none wider than an element."""
    steps = layout.allocate(layout.changes, layout.dtype.uint)
    numbers.read_into(layout, reader, steps, (1 << (8 * layout.dtype.width)) - 1, Stream.STEP_TOKENS, Stream.STEP_LOWS)
    return steps
