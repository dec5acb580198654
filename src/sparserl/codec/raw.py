"""`raw`: 32-bit positions and new bits, as they are. The fastest, and idempotent; needs nothing at the receiver."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ..weights.dtypes import UIntArray
from . import index, value
from .profile import BucketLayout, DecodedChanges, Positions
from .streams import Chunks, Reader, Stream


@dataclass(frozen=True)
class Raw:
    name: ClassVar[str] = "raw"
    id: ClassVar[int] = 0
    absolute: ClassVar[bool] = True
    tiled: ClassVar[bool] = False
    planar: ClassVar[bool] = False
    conditional: ClassVar[bool] = False

    def encode(self, layout: BucketLayout, positions: Sequence[Positions], words: Sequence[UIntArray]) -> Chunks:
        return {
            **index.write_positions(layout, np.concatenate(positions)),
            **value.write_words(layout, np.concatenate(words), Stream.WORDS),
        }

    def decode(self, layout: BucketLayout, reader: Reader) -> DecodedChanges:
        positions = index.read_positions(layout, reader)
        return DecodedChanges(positions, value.read_words(layout, reader, layout.changes, Stream.WORDS))
