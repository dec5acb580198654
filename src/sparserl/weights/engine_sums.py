"""The digests of an engine's weights, tensor by tensor of a checkpoint, from those of the parts that its ranks have."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import RegionOverlap
from .digest import Digest
from .dtypes import BY_NAME
from .region import Region, refuse_overlap, whole
from .shards import Place, dump_places, load_places
from .table import TensorTable


@dataclass(frozen=True)
class RankSums:
    """What one rank of an engine has of the tensors of a table.

    Attributes:
        sums: The element sums of every part that it has.
        dtypes: The names of the dtypes that tensors have in the engine, where these are not those of the table.
        uncompared: Tensors of the table or of the engine that cannot be compared, and why.
    """

    sums: Mapping[Place, Digest]
    dtypes: Mapping[str, str]
    uncompared: Mapping[str, str]

    def record(self) -> dict[str, Any]:
        """It as values for JSON."""
        sums = [part.hex for part in self.sums.values()]
        return {
            "places": dump_places(self.sums),
            "sums": sums,
            "dtypes": dict(self.dtypes),
            "uncompared": dict(self.uncompared),
        }

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> RankSums:
        """What `record` returned."""
        sums = dict(zip(load_places(record["places"]), map(Digest.from_hex, record["sums"]), strict=True))
        return cls(sums, record["dtypes"], record["uncompared"])


@dataclass(frozen=True)
class EngineSums:
    """What all ranks of an engine have of the tensors of a table.

    Attributes:
        sums: The element sums of every tensor that the ranks have all of.
        dtypes: As for a rank.
        uncompared: As for a rank, and tensors of which no rank has some elements.
        inconsistent: Tensors of which two ranks have other copies of the same elements.
    """

    sums: Mapping[str, Digest]
    dtypes: Mapping[str, str]
    uncompared: Mapping[str, str]
    inconsistent: Sequence[str] = ()

    @classmethod
    def combine(cls, table: TensorTable, ranks: Iterable[RankSums]) -> EngineSums:
        """Add up the parts of all ranks; parts that several ranks have count once."""
        sums: dict[Place, Digest] = {}
        dtypes: dict[str, str] = {}
        uncompared: dict[str, str] = {}
        inconsistent = set()
        for rank in ranks:
            uncompared |= rank.uncompared
            dtypes |= rank.dtypes
            for place, part in rank.sums.items():
                if sums.setdefault(place, part) != part:
                    inconsistent.add(table[place[0]].name)
        parts: dict[int, dict[Region, Digest]] = {}
        for (tensor, region), part in sums.items():
            parts.setdefault(tensor, {})[region or whole(table[tensor].shape)] = part
        totals = {}
        for index, spec in enumerate(table.specs):
            if spec.name in uncompared:
                continue
            own = parts.get(index, {})
            try:
                missing = _missing(spec.name, spec.numel, [*own])
            except RegionOverlap as error:
                uncompared[spec.name] = f"ranks have parts of it that overlap: {error}"
                continue
            if missing:
                uncompared[spec.name] = f"the engine has no plain copy of {missing:,} of its {spec.numel:,} elements"
                continue
            totals[spec.name] = sum(own.values(), Digest())
        return cls(totals, dtypes, uncompared, sorted(inconsistent - uncompared.keys()))

    def engine_table(self, table: TensorTable) -> TensorTable:
        """A table with the dtypes of the engine."""
        if not self.dtypes:
            return table
        return TensorTable(
            spec._replace(dtype=BY_NAME[self.dtypes.get(spec.name, spec.dtype.name)]) for spec in table.specs
        )

    def record(self, table: TensorTable) -> dict[str, Any]:
        """It as values for JSON."""
        sums = "".join(self.sums.get(spec.name, Digest()).hex for spec in table.specs)
        return {
            "sums": sums,
            "dtypes": dict(self.dtypes),
            "uncompared": dict(self.uncompared),
            "inconsistent": list(self.inconsistent),
        }

    @classmethod
    def of(cls, table: TensorTable, record: Mapping[str, Any]) -> EngineSums:
        """What `record` returned."""
        uncompared = record["uncompared"]
        names = [spec.name for spec in table.specs]
        sums = {
            name: Digest.from_hex(record["sums"][32 * i : 32 * i + 32])
            for i, name in enumerate(names)
            if name not in uncompared
        }
        return cls(sums, record["dtypes"], uncompared, record["inconsistent"])


def _missing(name: str, numel: int, regions: Sequence[Region]) -> int:
    """How many elements of a tensor are in none of the regions."""
    if numel:
        refuse_overlap(name, regions)
    return numel - sum(region.numel for region in regions)
