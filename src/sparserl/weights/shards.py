"""Weights of which only some parts are at hand: the shards of one rank, in the coordinates of the checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import TensorMismatch
from .marks import Bitmap
from .memory import Memory, Weights
from .region import Region, refuse_overlap, whole
from .table import TensorTable
from .tensors import memory_of

Place = tuple[int, Region | None]  # a tensor by its index in the table, and a region of it or all of it


@dataclass(frozen=True)
class Part:
    """A box of a tensor that is at hand: a shard, a slice of a fused parameter, or all of it.

    tensor: its name in the checkpoint.
    region: which box of it.
    data: a torch tensor, NumPy array or `Bits` of the region's size, in any memory layout.
    marks: where changes can be, for sources that know; without them all of it is compared.
    moved: how the digest of this part moved with all the changes that were marked, for sources that track it too.
    """

    tensor: str
    region: Region
    data: Any
    marks: Bitmap | None = None
    moved: tuple[int, int] | None = None


class Shards:
    """The parts that one process has of some weights, and the tensor table of the whole.

    Parts of one process must not overlap; the parts of all processes together cover every tensor once.

    >>> import numpy as np
    >>> from sparserl import Part, Region, Shards, diff, tensor_table
    >>> table = tensor_table({"w": np.zeros((4, 4), np.float32)})
    >>> right = Region((0, 2), (4, 2))
    >>> old = Shards(table, [Part("w", right, np.zeros((4, 2), np.float32))])
    >>> new = Shards(table, [Part("w", right, np.eye(4, 2, dtype=np.float32))])
    >>> diff(old, new).changed
    2
    """

    def __init__(self, table: TensorTable, parts: Iterable[Part]) -> None:
        self.table, self.parts = table, tuple(parts)
        by_tensor: dict[str, list[Region]] = {}
        for part in self.parts:
            if part.tensor not in table.index:
                raise TensorMismatch(f"{part.tensor!r} is not in the tensor table")
            by_tensor.setdefault(part.tensor, []).append(part.region)
        for name, regions in by_tensor.items():
            if table.specs[table.index[name]].numel:
                refuse_overlap(name, regions)

    @classmethod
    def of(cls, table: TensorTable, weights: Weights, regions: Mapping[str, Region] | None = None) -> Shards:
        """One part of each tensor at hand: the region that is named for it, or all of it."""
        regions = regions or {}
        if strangers := sorted(regions.keys() - weights.keys()):
            raise TensorMismatch(f"regions are given for {strangers[:10]}, which are not among the weights")
        parts = []
        for name, data in weights.items():
            if (spec := table.get(name)) is None:
                raise TensorMismatch(f"{name!r} is not in the tensor table")
            parts.append(Part(name, regions.get(name, whole(spec.shape)), data))
        return cls(table, parts)

    def located(self) -> Iterator[tuple[Place, Memory]]:
        """Every part and where it lies, once it is known to be the region of its tensor that it claims to be."""
        for part in self.parts:
            index = self.table.index[part.tensor]
            spec = self.table.specs[index]
            every = whole(spec.shape)
            if not part.region.fits(spec.shape) and part.region != every:
                raise TensorMismatch(f"{part.tensor!r}: region {part.region} does not lie in {spec}")
            memory = memory_of(part.tensor, part.data)
            if memory.dtype is not spec.dtype or memory.shape != part.region.size:
                raise TensorMismatch(
                    f"{part.tensor!r}: region {part.region} of {spec} cannot be {memory.dtype.name}{list(memory.shape)}"
                )
            yield (index, None if part.region == every else part.region), memory

    def map(self, make: Callable[[Part], Any]) -> Shards:
        """The same parts with other data; without marks."""
        return Shards(self.table, [Part(part.tensor, part.region, make(part)) for part in self.parts])

    @property
    def dense_bytes(self) -> int:
        """Bytes of the parts at hand."""
        width = {name: self.table.specs[i].dtype.width for name, i in self.table.index.items()}
        return sum(part.region.numel * width[part.tensor] for part in self.parts)

    def __repr__(self) -> str:
        return f"<Shards: {len(self.parts)} parts of {len(self.table)} tensors>"


def dump_places(places: Iterable[Place]) -> list[Any]:
    """Places as JSON has them."""
    return [[tensor, region and [region.start, region.size]] for tensor, region in places]


def load_places(rows: Iterable[Any]) -> list[Place]:
    """Places as they were before `dump_places`."""
    return [(tensor, box and Region(*map(tuple, box))) for tensor, box in rows]


def require_whole(table: TensorTable, ranks: Sequence[Sequence[Place]]) -> None:
    """Refuse parts of several ranks, unless together they cover every element of every tensor just once."""
    regions: dict[int, list[Region]] = {}
    for places in ranks:
        for tensor, region in places:
            regions.setdefault(tensor, []).append(region or whole(table.specs[tensor].shape))
    for tensor, spec in enumerate(table.specs):
        found = regions.get(tensor, [])
        if spec.numel:
            refuse_overlap(spec.name, found)
        missing = spec.numel - sum(region.numel for region in found)
        if missing or not found:
            raise TensorMismatch(f"no rank has {missing} of the {spec.numel} elements of {spec.name!r}")
