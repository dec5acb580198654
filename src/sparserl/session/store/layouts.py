"""Tensors that are added, removed or reshaped within a run: each layout is a table of its own, from a version on."""

from __future__ import annotations

import secrets
from dataclasses import replace

from ...errors import TensorMismatch
from ...transport.stores.base import Store
from ...weights.local import LocalWeights
from ...weights.memory import Weights
from ...weights.shards import Shards
from ...weights.table import TensorTable
from ..logs import log
from .fields import sha256
from .records import RUN, Index, LayoutChange, PlacedFile, RunRecord, layout_to_bytes, parse_layout, require_hash

_MOST_CACHED = 16
_tables: dict[str, TensorTable] = {}  # by the hash of their object


def run_at(store: Store, run: RunRecord, index: Index, version: int) -> RunRecord:
    """A run, with the tensor table of a version."""
    layout = index.layout_of(version)
    return replace(run, later_table=None if layout is None else _read(store, run.run, layout.table))


def _read(store: Store, run: str, file: PlacedFile) -> TensorTable:
    table = _tables.get(file.hash)
    if table is None:
        name = file.name(run)
        data = store.get(name, RUN.size).data
        require_hash(data, file.hash, name)
        table = parse_layout(data, name)
        if len(_tables) >= _MOST_CACHED:
            _tables.clear()
        _tables[file.hash] = table
    return table


def write_layout(store: Store, run: str, version: int, table: TensorTable) -> LayoutChange:
    """Put the table of a version, and of those after it, into the store."""
    data = layout_to_bytes(table)
    file = PlacedFile(sha256(data), len(data), secrets.token_hex(8))
    store.put(file.name(run), data)
    return LayoutChange(version, file)


def has_new_layout(store: Store, run: RunRecord, weights: Weights | Shards) -> bool:
    """Whether tensors of a model were added, removed or reshaped since its last version, which is then logged.

    Where dtypes differ, or most names do, these are the weights of something else.
    """
    old = run.layout
    new = LocalWeights.of(weights).table
    try:
        old.require(new, "the last version", "the weights")
    except TensorMismatch as error:
        common = [name for name in old.index if name in new.index]
        same_dtypes = all(old[old.index[name]].dtype == new[new.index[name]].dtype for name in common)
        is_same_model = same_dtypes and 2 * len(common) >= max(len(old), len(new))
        if is_same_model:
            log.warning("%s: run %s goes on with other tensors: %s", store.url, run.run, error)
        return is_same_model
    return False
