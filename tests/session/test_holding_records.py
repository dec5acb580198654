"""What receivers write down of their parts is read in bounds, and used only where it fits the weights."""

from __future__ import annotations

import json
import time
from collections import Counter

import numpy as np
import pytest

import sparserl
from sparserl import Region
from sparserl.errors import InvalidField, TensorMismatch
from sparserl.session.store import receivers
from sparserl.session.store.fields import sha256
from sparserl.session.store.holding_records import HoldingRecord, read_holding
from sparserl.session.store.leases import Lease
from sparserl.session.store.manifests import Manifest
from sparserl.session.store.records import get_named, path
from sparserl.session.store.retention import collect, faults
from sparserl.transport.stores.folder import FolderStore
from sparserl.weights.holdings import MOST_HOLDINGS, Holdings

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
    store.put(path(run, "leases", "x"), Lease("x", 0, now, ("ulp",), record.hash).to_bytes())
    assert list(faults(store)) == []
    assert collect(store, 1.0, lambda: now + 86_000) == []
    assert collect(store, 1.0, lambda: now + 87_000) == [path(run, "leases", "x")]
    assert collect(store, 1.0, lambda: now + 172_000) == []
    assert collect(store, 1.0, lambda: now + 173_500) == [path(run, "holdings", record.hash)]


class Counting(FolderStore):
    """A store that counts which records of parts are read."""

    def __init__(self, root):
        super().__init__(root)
        self.read = Counter()

    def get(self, name, most):
        if "/holdings/" in name:
            self.read[name] += 1
        return super().get(name, most)


def rows_of(table, first, last):
    return HoldingRecord.of(table, [(0, Region((row, 0), (1, 2))) for row in range(first, last)])


def last_manifest(publisher):
    index = publisher._committed.index
    run = publisher.run
    return Manifest.parse(get_named(publisher.store, run, "manifests", index.steps[-1].manifest), "it")


def test_what_many_receivers_cost(tmp_path, monkeypatch):
    """Each record is read once and one cut is made, however many versions follow; each receiver gets its share of them.

    A receiver that joins costs one more read and one more cut. One whose record is damaged is passed over, and the
    others keep their cut.
    """
    cuts = []
    monkeypatch.setattr(receivers, "Holdings", lambda *args, **options: cuts.append(args) or Holdings(*args, **options))
    store = Counting(str(tmp_path))
    weights = {"w": np.zeros((2 * MOST_HOLDINGS, 2), np.float32)}
    table = sparserl.tensor_table(weights)
    joining, damaged = rows_of(table, 254, 256), rows_of(table, 3, 9)
    ranks = sorted((rows_of(table, 2 * i, 2 * i + 2) for i in range(MOST_HOLDINGS - 1)), key=lambda r: r.hash)

    def publish():
        weights["w"][:16] += 1  # of eight receivers
        publisher.publish()

    with sparserl.Publisher(store, weights, profile="ulp", anchor_after=1000, ladder=None) as publisher:
        publish()
        folder = tmp_path / path(publisher.run, "holdings", "")
        folder.mkdir()
        for record in ranks:
            (folder / record.hash).write_bytes(record.data)
        for _ in range(4):
            publisher._maintenance.receivers.look()
            publish()
        assert len(store.read) == len(ranks)
        assert set(store.read.values()) == {1}
        assert len(cuts) == 1
        joining.put(store, publisher.run)
        publisher._maintenance.receivers.look()
        publish()
        publish()
        assert len(store.read) == MOST_HOLDINGS
        assert set(store.read.values()) == {1}
        assert len(cuts) == 2
        store.put(path(publisher.run, "holdings", damaged.hash), b"{}")
        publisher._maintenance.receivers.look()
        for _ in range(3):
            publish()
            manifest = last_manifest(publisher)
            shares = [len(manifest.for_holding(rank.name)) for rank in (*ranks, joining)]
            assert max(shares) <= 2 < len(manifest.buckets)
            assert sum(share > 0 for share in shares) >= 8
            assert manifest.for_holding(damaged.name) == manifest.buckets
        assert set(store.read.values()) == {1}
        assert len(cuts) == 3
        got = {"w": np.zeros_like(weights["w"])}
        with sparserl.Subscriber(store, got) as subscriber:
            subscriber.sync()
        assert (got["w"] == weights["w"]).all()


def test_parts_that_are_too_many_harm_nobody_else(tmp_path, monkeypatch):
    """Patches are cut along those of others. What there is no room for is not read again, until somebody leaves."""
    monkeypatch.setattr(receivers, "MOST_PLACES", 6)
    store = Counting(str(tmp_path))
    weights = {"w": np.zeros((64, 2), np.float32)}
    table = sparserl.tensor_table(weights)
    few, many = sorted((rows_of(table, 0, 4), rows_of(table, 4, 8)), key=lambda record: record.hash)
    with sparserl.Publisher(store, weights, profile="ulp", anchor_after=1000, ladder=None) as publisher:
        publisher.publish()
        few.put(store, publisher.run)
        many.put(store, publisher.run)
        for _ in range(3):
            weights["w"] += 1
            publisher._maintenance.receivers.look()
            publisher.publish()
            assert last_manifest(publisher).holdings == (few.name,)
        assert set(store.read.values()) == {1}
        (tmp_path / path(publisher.run, "holdings", few.hash)).unlink()
        for _ in range(receivers._LOOKS_TO_FORGET):
            publisher._maintenance.receivers.look()
        weights["w"] += 1
        publisher.publish()
        assert last_manifest(publisher).holdings == (many.name,)
