"""The shards of one rank: the parts that it has of some weights, in the coordinates of the checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import TensorMismatch
from .marks import Bitmap
from .memory import Memory, Weights
from .old_bits import OldBits
from .region import Region, refuse_overlap, whole
from .table import TensorTable
from .tensors import memory_of

Place = tuple[int, Region | None]  # a tensor by its index in the table, and a region of it or all of it


@dataclass(frozen=True)
class Part:
    """A region of a tensor in memory: a shard, a slice of a fused parameter, or the whole tensor.

    Attributes:
        tensor: The tensor's name in the checkpoint.
        region: Which box of the tensor it is.
        data: A torch tensor, NumPy array or `Bits` of the region's size, in any memory layout.
        marks: Where changes may be, from sources that know it; without marks, all elements are compared. Sources that
            track changes give the old bits too.

    Example:
        >>> import numpy as np
        >>> Part("w", Region((0, 2), (4, 2)), np.zeros((4, 2), np.float32)).region
        Region(start=(0, 2), size=(4, 2))
    """

    tensor: str
    region: Region
    data: Any
    marks: Bitmap | OldBits | None = None


class Shards:
    """The parts that one process has of some weights, and the tensor table of the whole.

    Parts of one process must not overlap; the parts of all processes together must cover every tensor once.

    Args:
        table: The table of the whole weights, from `tensor_table`.
        parts: The parts that this process has.

    Raises:
        TensorMismatch: A part belongs to a tensor that is not in the table.
        RegionOverlap: Two parts contain the same element.

    Example:
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
        self.table = table
        self.parts = tuple(parts)
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
        """One part of each tensor.

        Args:
            table: The table of the whole weights.
            weights: The tensors that this process has, by name.
            regions: Which region each tensor is; tensors that are not named here are whole.

        Raises:
            TensorMismatch: A tensor is not in the table, or a region is given for a tensor that is not in `weights`.
        """
        regions = regions or {}
        if unknown := sorted(regions.keys() - weights.keys()):
            raise TensorMismatch(f"regions are given for {unknown[:10]}, which are not among the weights")
        parts = []
        for name, data in weights.items():
            if (spec := table.get(name)) is None:
                raise TensorMismatch(f"{name!r} is not in the tensor table")
            parts.append(Part(name, regions.get(name, whole(spec.shape)), data))
        return cls(table, parts)

    def located(self) -> Iterator[tuple[Place, Memory]]:
        """Every part's place and memory; an error if a part does not fit the region that it names."""
        for part in self.parts:
            index = self.table.index[part.tensor]
            spec = self.table.specs[index]
            whole_tensor = whole(spec.shape)
            if not part.region.fits(spec.shape) and part.region != whole_tensor:
                raise TensorMismatch(f"{part.tensor!r}: region {part.region} does not lie in {spec}")
            memory = memory_of(part.tensor, part.data)
            if memory.dtype is not spec.dtype or memory.shape != part.region.size:
                raise TensorMismatch(
                    f"{part.tensor!r}: region {part.region} of {spec} cannot be {memory.dtype.name}{list(memory.shape)}"
                )
            yield (index, None if part.region == whole_tensor else part.region), memory

    def map(self, make: Callable[[Part], Any]) -> Shards:
        """The same parts with the data that `make` returns for each; without marks."""
        return Shards(self.table, [Part(part.tensor, part.region, make(part)) for part in self.parts])

    @property
    def dense_bytes(self) -> int:
        """The bytes of all parts."""
        width = {name: self.table.specs[i].dtype.width for name, i in self.table.index.items()}
        return sum(part.region.numel * width[part.tensor] for part in self.parts)

    def __repr__(self) -> str:
        return f"<Shards: {len(self.parts)} parts of {len(self.table)} tensors>"


def dump_places(places: Iterable[Place]) -> list[Any]:
    """Places as values for JSON."""
    return [[tensor, region and [region.start, region.size]] for tensor, region in places]


def load_places(rows: Iterable[Any]) -> list[Place]:
    """The places that `dump_places` wrote."""
    return [(tensor, box and Region(*map(tuple, box))) for tensor, box in rows]


def require_whole(table: TensorTable, ranks: Sequence[Sequence[Place]]) -> None:
    """Raise an error unless the places of all ranks together cover every element of every tensor exactly once."""
    regions: dict[int, list[Region]] = {}
    for places in ranks:
        for tensor, region in places:
            regions.setdefault(tensor, []).append(region or whole(table.specs[tensor].shape))
    for tensor, spec in enumerate(table.specs):
        covered = regions.get(tensor, [])
        if spec.numel:
            refuse_overlap(spec.name, covered)
        missing = spec.numel - sum(region.numel for region in covered)
        if missing or not covered:
            raise TensorMismatch(f"no rank has {missing} of the {spec.numel} elements of {spec.name!r}")
