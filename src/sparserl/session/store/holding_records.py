"""What a receiver writes down of the parts that it has, and what a publisher reads of it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from ...errors import InvalidField, LimitExceeded, TensorMismatch
from ...targets import Target
from ...transport.stores.base import Store
from ...weights.region import Region
from ...weights.shards import Place, dump_places
from ...weights.table import TensorTable
from ...wire import encoded_table
from ..logs import log
from .fields import Fields, counted, parse, read_list, sha256, written
from .records import HOLDING, get_named, path

_TABLE_HASH = re.compile(r"[0-9a-f]{32}")
_NAME_DIGITS = 16
_MOST_TENSORS = 1 << 21
_MOST_INDEX = 1 << 40  # of an element along an axis


def holding_name(hash: str) -> str:
    """The name of a holding in manifests and indices. That two have the same one shows by digests."""
    return hash[:_NAME_DIGITS]


class HoldingRecord:
    """The parts of the weights that one receiver has.

    Args:
        table: The hash of the tensor table.
        places: The places of the parts.
    """

    def __init__(self, table: str, places: Sequence[Place]) -> None:
        self.table = table
        self.places = tuple(places)

    @classmethod
    def of(cls, table: TensorTable, places: Sequence[Place]) -> HoldingRecord:
        """The record of a receiver."""
        return cls(
            encoded_table(table).hash.hex(), sorted(places, key=lambda place: (place[0], place[1] or Region((), ())))
        )

    @cached_property
    def data(self) -> bytes:
        return written({"table": self.table, "places": dump_places(self.places)}, "a holding", HOLDING)

    @cached_property
    def hash(self) -> str:
        return sha256(self.data)

    @property
    def name(self) -> str:
        return holding_name(self.hash)

    def put(self, store: Store, run: str) -> None:
        """Write it to a store."""
        store.put(path(run, "holdings", self.hash), self.data)


class OwnHolding:
    """The parts that a subscriber has, if it has one target, and that has parts."""

    def __init__(self, targets: Sequence[Target]) -> None:
        self._targets = targets
        self._known: tuple[TensorTable, Sequence[Place], HoldingRecord | None] | None = None
        self._is_warned = False

    def record(self, table: TensorTable | None) -> HoldingRecord | None:
        """The record of the parts; None if all of the weights are here, or no tensors were accepted yet.

        None also for too many parts for a record: patches are not cut along them, and all of every patch is fetched.
        """
        is_sole = table is not None and len(self._targets) == 1
        places = getattr(self._targets[0], "places", None) if is_sole else None
        if table is None or places is None:
            return None
        if self._known is None or self._known[0] is not table or self._known[1] != places:
            self._known = table, places, self._made(table, places)
        return self._known[2]

    def _made(self, table: TensorTable, places: Sequence[Place]) -> HoldingRecord | None:
        record = HoldingRecord.of(table, places)
        try:
            len(record.data)
        except LimitExceeded as error:
            if not self._is_warned:
                log.warning("patches are not cut along the parts here, and each is fetched whole: %s", error)
            self._is_warned = True
            return None
        return record

    def name(self, table: TensorTable | None) -> str | None:
        """The name of the parts."""
        record = self.record(table)
        return None if record is None else record.name


def read_holding(store: Store, run: str, hash: str, table: TensorTable) -> tuple[Place, ...]:
    """The places of a receiver, which must be places of these tensors."""
    label = path(run, "holdings", hash)
    table_hash, places = parse_places(get_named(store, run, "holdings", hash), label)
    if table_hash != encoded_table(table).hash.hex():
        raise TensorMismatch(f"{label} is about other tensors")
    for tensor, region in places:
        if tensor >= len(table) or (region is not None and not region.fits(table[tensor].shape)):
            raise InvalidField(f"{label}: the tensor table has no region {region} of tensor {tensor}")
    return places


def parse_places(data: bytes, label: str) -> tuple[str, tuple[Place, ...]]:
    """The hash of the table, and the places, that a record has."""
    fields = Fields(parse(data, label, HOLDING), label)
    table_hash = fields.text("table", _TABLE_HASH)
    places = fields.take("places", read_list(_read_place))
    fields.finish()
    return table_hash, places


def _read_place(value: Any) -> Place:
    tensor, box = value
    number = counted(tensor, _MOST_TENSORS)
    if box is None:
        return number, None
    start, size = (read_list(lambda v: counted(v, _MOST_INDEX))(side) for side in box)
    return number, Region(start, size)
