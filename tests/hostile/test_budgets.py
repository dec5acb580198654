"""Stores and records that ask for much; and what is legal, however much of it there is."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import sparserl
import sparserl.wire.limits
from sparserl import Digest, Patch
from sparserl.errors import InvalidField, LimitExceeded, NotRetained
from sparserl.session import anchors, arrival, memory_limit
from sparserl.session.store import records, routes
from sparserl.session.store.manifests import Manifest
from sparserl.session.store.records import Blob, Index, RouteStep
from sparserl.transport.stores.deadline import Transfers
from sparserl.weights.holdings import MOST_NAMES
from tests.hostile.bombs import I8, RAW, bucket, claims, patch, rows, table, varints
from tests.hostile.forged_patch import Columns, Stream, Table
from tests.hostile.store_bombs import PARSERS, RECORDS, STORES

MEMORY = 768 << 20
STORE_WAYS = ("in_memory", "in_a_folder", "fsck", "collect")
ENDS = {
    ("a_bucket_named_many_times", "in_memory"): "InvalidField: .*: a bucket stands in it twice",
    ("buckets_larger_than_any_patch", "in_memory"): "LimitExceeded: .*: 24 buckets of 6291456000 bytes; weights of 400",
    ("buckets_larger_than_any_patch", "fsck"): "1 faults",
    ("more_buckets_than_elements", "in_a_folder"): "LimitExceeded: .*: 10000 buckets",
    ("weights_of_terabytes", "in_memory"): "TensorMismatch: 4 tensor",
    ("weights_of_terabytes", "in_a_folder"): "LimitExceeded: the weights are said to be 4398046511104 bytes, and ",
    ("steps_one_behind_the_other", "fsck"): "0 faults",
    ("manifests_of_one_bucket", "fsck"): "200 faults",
}


@pytest.fixture(scope="module")
def watched(request):
    """What the chosen tests ask for."""
    items = [item for item in request.session.items if "watched" in getattr(item, "fixturenames", ())]
    chosen = {f"{item.callspec.params['name']}/{item.callspec.params['way']}" for item in items}
    environment = {**os.environ, "SPARSERL_THREADS": "1", "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    command = [sys.executable, "-m", "tests.hostile.store_bombs", *sorted(chosen)]
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout.splitlines()
    first, *found = map(json.loads, done)
    return first["slowness"], {(record["name"], record["way"]): record for record in found}


@pytest.mark.alone
@pytest.mark.parametrize(
    ("name", "way"), [*((s, w) for s in STORES for w in STORE_WAYS), *((r, p) for r in RECORDS for p in PARSERS)]
)
def test_a_store_is_bounded(watched, name, way):
    """Following, checking and collecting a store, and reading a record, take what their bytes are worth."""
    slowness, found = watched
    record = found[name, way]
    assert not record["ended"].startswith("died")
    assert record["seconds"] < slowness * (1 + 2e-6 * record["size"])
    assert record["grown"] < MEMORY


@pytest.mark.alone
@pytest.mark.parametrize(("name", "way"), ENDS)
def test_a_store_is_refused_for_what_is_wrong_with_it(watched, name, way):
    """Before anything is fetched or allocated."""
    ended = watched[1][name, way]["ended"]
    assert re.match(ENDS[name, way], ended), ended


def grid(tensors, side):
    """Boxes of one element that a writer may cut tensors of `side` × `side` elements into, and places for them."""
    i = np.arange(side * side)
    boxes = varints(np.stack([i // side, i % side, np.ones_like(i), np.ones_like(i)], axis=1).ravel())
    n = len(i)
    steps = bytes(n) + (b"\1" + bytes(n - 1)) * (tensors - 1)
    return steps, boxes * tensors, n * tensors


def test_many_tensors_in_grids_are_never_refused():
    """As many tensors as any model has, each in a grid of boxes, with bytes that tell nothing: all is read."""
    tensors = 100_000
    steps, boxes, n = grid(tensors, 2)
    its_table = Table([rows(tensors)], [I8] * tensors, [2] * tensors, [b"\2\2" * tensors], tensors, [b"\3" * tensors])
    streams = Stream(1, [bytes(4 * n)], 1), Stream(2, [bytes(n)], 1)
    columns = Columns([steps], [b"\5" * n], [boxes])
    data = patch(its_table, claims(bucket(RAW, I8, columns, *streams), n), changed=n)
    assert sum(len(head.entries) for head in Patch.from_bytes(data).contents.heads) == n


def test_columns_of_a_tensor_are_never_refused():
    """Shards along the last dimension of a tensor: no position is behind another's last."""
    n = 1 << 15
    boxes = varints(np.stack([np.zeros(n), np.arange(n), np.full(n, 3), np.ones(n)], axis=1).ravel())
    covers = Columns([bytes(n)], [b"\1" * n], [boxes])
    whole = Patch.from_bytes(patch(table((b"w", I8, [3, n])), changed=0, covers=covers, covered=n))
    assert len(whole.covers) == n
    assert sparserl.merge(whole).complete
    with pytest.raises(sparserl.errors.RegionOverlap, match=r"\[0:3, 0:1\] and \[0:3, 0:1\]"):
        sparserl.merge(whole, whole)


pairs = st.tuples(st.none() | st.integers(0, 6), st.integers(0, 6)).filter(lambda pair: pair[0] != pair[1])


def step(base, version):
    digests = {v: Digest(v + 1, 0) for v in (base, version) if v is not None}
    start = None if base is None else digests[base]
    return RouteStep(base, version, start, digests[version], 10, 0, ("raw",), f"{version:064x}", 0.0)


@given(st.lists(pairs, max_size=12))
def test_what_is_reached_is_what_a_way_leads_to(ends):
    """One search says of every version what a search for each would."""
    steps = [step(*pair) for pair in ends]
    reached = routes.reached(steps)
    for version, digest in routes.versions(steps).items():
        try:
            routes.route(steps, None, version)
        except NotRetained:
            assert (version, digest) not in reached
        else:
            assert (version, digest) in reached


def manifest(*hashes):
    return Manifest("0" * 16, "0" * 16, Digest(), Digest(), 0, tuple(Blob(hash * 64, 5) for hash in hashes))


def test_a_manifest_names_no_bucket_twice():
    """Neither is one written, nor read."""
    good = manifest("a", "b")
    assert Manifest.parse(good.to_bytes(), "it") == good
    with pytest.raises(InvalidField, match="twice"):
        manifest("a", "b", "a").to_bytes()
    with pytest.raises(InvalidField, match="twice"):
        Manifest.parse(good.to_bytes().replace(b"b" * 64, b"a" * 64), "it")


def test_writers_keep_the_bounds_of_readers(monkeypatch):
    """What nobody would read is not written: the head never leads to it."""
    index = Index("0" * 16, tuple(step(i - 1 if i else None, i) for i in range(4)))
    assert Index.parse(index.to_bytes(), "it") == index
    monkeypatch.setattr(records, "MOST_STEPS", 3)
    with pytest.raises(LimitExceeded, match="4 steps, the limit is 3"):
        index.to_bytes()
    for bound in ({"size": 100}, {"values": 10}, {"names": 10}):
        monkeypatch.setattr(records, "INDEX", records.INDEX._replace(**bound))
        with pytest.raises(LimitExceeded):
            replace(index, steps=index.steps[:3]).to_bytes()
        monkeypatch.undo()


def test_the_largest_records_are_within_their_bounds():
    """As many steps and buckets as there may be, with the longest numbers, fit."""
    most, profiles = 2**53, ("ctx", "gap", "raw", "ulp")
    far = RouteStep(most, most - 1, Digest(1, 2), Digest(3, 4), most, most, profiles, "f" * 64, 1.7e9 / 3)
    one, two = (len(Index("0" * 16, (far,) * n).to_bytes()) for n in (1, 2))
    assert one + records.MOST_STEPS * (two - one) <= records.INDEX.size
    blobs = [Blob(f"{i:064x}", 1 << 28) for i in range(2)]
    one, two = (len(replace(manifest(), buckets=tuple(blobs[:n])).to_bytes()) for n in (1, 2))
    assert one + sparserl.wire.limits.BUCKETS * (two - one) <= records.MANIFEST.size
    names = tuple(f"{i:016x}" for i in range(MOST_NAMES))
    marked = [replace(manifest(), buckets=tuple(blobs[:n]), holdings=names, touched=(2**64 - 1,) * n) for n in (1, 2)]
    one, two = (len(record.to_bytes()) for record in marked)
    assert one + sparserl.wire.limits.BUCKETS * (two - one) <= records.MANIFEST.size


def test_transfers_in_flight_are_bounded_in_bytes():
    """However many items there are: no more bytes are on their way than there should be, but for one that is larger."""
    lock = threading.Lock()
    flying = 0
    most = 0

    def work(size):
        nonlocal flying, most
        with lock:
            flying += size
            most = max(most, flying)
        return size

    sizes = [30, 60, 300, 10, 10, 90, 40] * 5
    results = []
    with Transfers(4, "the test") as transfers:
        for size in transfers.ahead(work, sizes, lambda size: size, 100):
            results.append(size)
            with lock:
                flying -= size
    assert results == sizes
    assert most == 300


def test_memory_is_asked_for_before_it_is_taken(tmp_path, monkeypatch):
    """The system's memory and swap count, and the limit of the control group; where neither is known, nothing does."""
    monkeypatch.setattr(memory_limit, "_PROC", tmp_path)
    monkeypatch.setattr(memory_limit, "_GROUPS", tmp_path / "groups")
    assert memory_limit.available_memory() is None
    memory_limit.require_memory(1 << 60)
    (tmp_path / "meminfo").write_text("MemTotal: 100 kB\nMemAvailable:  50 kB\nSwapFree: 10 kB\nHugePages: 0\n")
    assert memory_limit.available_memory() == 60 << 10
    with pytest.raises(LimitExceeded, match="61441 bytes, and 61440 bytes of memory"):
        memory_limit.require_memory((60 << 10) + 1)
    memory_limit.require_memory(60 << 10)
    group = tmp_path / "groups/a/b"
    group.mkdir(parents=True)
    (tmp_path / "self").mkdir()
    (tmp_path / "self/cgroup").write_text("0::/a/b\n")
    (group / "memory.max").write_text("30000\n")
    (group / "memory.current").write_text("20000\n")
    (group / "memory.stat").write_text("anon 15000\nfile 5000\n")
    assert memory_limit.available_memory() == 15000
    (group / "memory.max").write_text("max\n")
    assert memory_limit.available_memory() == 60 << 10


def test_weights_that_do_not_fit_are_refused_before_they_are_made(monkeypatch):
    """Nothing is allocated for a table that memory has no room for."""
    monkeypatch.setattr(memory_limit, "available_memory", lambda: 1000)
    made = []
    monkeypatch.setattr(anchors, "zeros", made.append)
    anchor = sparserl.diff({"w": np.zeros(1001, np.uint8)}, {"w": np.ones(1001, np.uint8)})
    with pytest.raises(LimitExceeded, match="1001 bytes, and 1000 bytes of memory are available"):
        anchors.restored(anchor)
    arriving = arrival.ArrivingPatch(anchor.table, anchor.contents.ends, anchor.buckets, restores=True)
    with pytest.raises(LimitExceeded, match="1001 bytes, and 1000 bytes of memory are available"):
        arriving.restored()
    assert not made
