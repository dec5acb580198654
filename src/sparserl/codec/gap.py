"""`gap`: gaps and the new bits in byte planes. Idempotent; needs nothing at the receiver."""

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
class Gap:
    name: ClassVar[str] = "gap"
    id: ClassVar[int] = 1
    absolute: ClassVar[bool] = True
    tiled: ClassVar[bool] = True
    planar: ClassVar[bool] = True
    conditional: ClassVar[bool] = False

    def encode(self, layout: BucketLayout, positions: Sequence[Positions], words: Sequence[UIntArray]) -> Chunks:
        return {
            **index.write_gaps(layout, positions),
            **value.write_planes(layout, np.concatenate(words), Stream.WORD_PLANE),
        }

    def decode(self, layout: BucketLayout, reader: Reader) -> DecodedChanges:
        positions = index.read_gaps(layout, reader)
        return DecodedChanges(positions, value.read_planes(layout, reader, layout.changes, Stream.WORD_PLANE))
