"""What receivers write down of their parts is read in bounds, and used only where it fits the weights."""

from __future__ import annotations

import json
import time

import numpy as np
import pytest

import sparserl
from sparserl import Region
from sparserl.errors import InvalidField, TensorMismatch
from sparserl.session.store.fields import sha256
from sparserl.session.store.holding_records import HoldingRecord, read_holding
from sparserl.session.store.leases import Lease
from sparserl.session.store.records import path
from sparserl.session.store.retention import collect, faults
from sparserl.transport.stores.folder import FolderStore

WEIGHTS = {"a": np.zeros((4, 6), np.float32), "b": np.zeros(5, np.float32)}
RUN = "0" * 16


@pytest.fixture
def store(tmp_path):
    return FolderStore(str(tmp_path))


@pytest.fixture
def table():
    return sparserl.tensor_table(WEIGHTS)


def test_round_trip(store, table):
    """Whatever the order of the places, the record is the same."""
    places = [(1, None), (0, Region((0, 3), (4, 3)))]
    record, other = (HoldingRecord.of(table, order) for order in (places, places[::-1]))
    assert record.hash == other.hash
    record.put(store, RUN)
    assert read_holding(store, RUN, record.hash, table) == (places[1], places[0])
    with pytest.raises(TensorMismatch, match="other tensors"):
        read_holding(store, RUN, record.hash, sparserl.tensor_table({"a": WEIGHTS["a"]}))


@pytest.mark.parametrize(
    "places",
    [
        [[2, None]],
        [[-1, None]],
        [[True, None]],
        [[0, [[0, 0], [4, 7]]]],
        [[0, [[0], [4]]]],
        [[0, [[0, 0], [0, 6]]]],
        [[0, [[-1, 0], [2, 6]]]],
        [[0, [[0, 0]]]],
        [[0]],
        {"0": None},
        3,
    ],
)
def test_places_that_make_no_sense(store, table, places):
    good = json.loads(HoldingRecord.of(table, []).data)
    data = json.dumps(good | {"places": places}).encode()
    store.put(path(RUN, "holdings", sha256(data)), data)
    with pytest.raises(InvalidField):
        read_holding(store, RUN, sha256(data), table)


def test_they_stay_longer_than_leases(tmp_path):
    """Two days, though nothing refers to them; then they are garbage. So no lease names one that is gone."""
    now = time.time()
    store = FolderStore(str(tmp_path))
    with sparserl.Publisher(store, WEIGHTS) as publisher:
        run = publisher.publish().run
    record = HoldingRecord.of(sparserl.tensor_table(WEIGHTS), [(1, None)])
    record.put(store, run)
    store.put(path(run, "leases", "x"), Lease("x", 0, now, None, ("ulp",), record.hash).to_bytes())
    assert list(faults(store)) == []
    assert collect(store, 1.0, lambda: now + 86_000) == []
    assert collect(store, 1.0, lambda: now + 87_000) == [path(run, "leases", "x")]
    assert collect(store, 1.0, lambda: now + 172_000) == []
    assert collect(store, 1.0, lambda: now + 173_500) == [path(run, "holdings", record.hash)]
