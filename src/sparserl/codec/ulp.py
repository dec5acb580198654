"""`ulp`: gaps and steps in the integer order of the format. Needs the old bits at the changed positions."""

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
class Ulp:
    name: ClassVar[str] = "ulp"
    id: ClassVar[int] = 2
    absolute: ClassVar[bool] = False
    tiled: ClassVar[bool] = True
    planar: ClassVar[bool] = True
    conditional: ClassVar[bool] = False

    def encode(self, layout: BucketLayout, positions: Sequence[Positions], words: Sequence[UIntArray]) -> Chunks:
        return {**index.write_gaps(layout, positions), **value.write_steps(layout, np.concatenate(words))}

    def decode(self, layout: BucketLayout, reader: Reader) -> DecodedChanges:
        sizes = layout.chunk_sizes(layout.changes)
        reader.decode_ahead({Stream.GAP_TOKENS: sizes, Stream.STEP_TOKENS: sizes})
        positions = index.read_gaps(layout, reader)
        return DecodedChanges(positions, value.read_steps(layout, reader))
