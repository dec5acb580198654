"""Planning: where buckets end, what they hold, which profile they take, and that nothing is lost on the way."""

from __future__ import annotations

import importlib
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import sparserl
from sparserl import codec, plan
from sparserl.errors import UnsupportedFormat
from sparserl.kernels import reference
from sparserl.patch.decode import flatten
from sparserl.plan import Changes, buckets
from sparserl.plan.estimates import index_bits
from sparserl.weights.dtypes import BY_NAME, Bits
from tests.effort import examples

PROFILES = ("auto", "raw", "gap", "ulp", "ctx")
HOMES = {
    "PIECE_BYTES": ("sparserl.weights.batches", "sparserl.patch.compose"),
    "BUCKET_PAYLOAD_BYTES": ("sparserl.plan.routing", "sparserl.plan.buckets"),
    "BUCKET_CHANGES": ("sparserl.plan.routing", "sparserl.plan.buckets"),
    "BUCKET_COVER_BYTES": ("sparserl.plan.buckets",),
}

each_profile = pytest.mark.parametrize("profile", PROFILES)


def limit(patcher, **values):
    """Set planning constants in every module that holds them."""
    for name, value in values.items():
        for module in HOMES[name]:
            patcher.setattr(importlib.import_module(module), name, value)


def runs_one_by_one(covered, changes, payload, capacity):
    """The specification of `cut_runs`: a run begins a new bucket if the one before may not hold it as well."""
    begin = 0
    for i in range(1, len(changes)):
        inside = slice(begin, i + 1)
        if not capacity.holds(sum(covered[inside]), sum(changes[inside]), sum(payload[inside])):
            yield slice(begin, i)
            begin = i
    yield slice(begin, len(changes))


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(1, 9), st.integers(0, 9)), min_size=1, max_size=30),
    st.integers(1, 40),
    st.integers(1, 20),
)
def test_runs_are_cut_where_a_bucket_is_full(runs, cover, enough):
    """By weights, changes and payload, and with many changes by fewer weights; a run that is too large is alone."""
    with pytest.MonkeyPatch.context() as patcher:
        limit(patcher, BUCKET_CHANGES=24, BUCKET_PAYLOAD_BYTES=25)
        patcher.setattr(buckets, "ENOUGH_CHANGES", 10)
        columns = [np.array(column) for column in zip(*runs, strict=True)]
        capacity = buckets.Capacity(cover, min(enough, cover))
        parts = [*buckets.cut_runs(*columns[:2], columns[2].astype(float), capacity)]
        assert parts == [*runs_one_by_one(*(column.tolist() for column in columns), capacity)]


def test_the_bounds_are_those_of_the_design():
    """256 MiB of weights covered, 4 MiB of payload, 2^22 changes."""
    buckets = importlib.import_module("sparserl.plan.buckets")
    assert buckets.BUCKET_COVER_BYTES == 256 << 20
    assert buckets.BUCKET_PAYLOAD_BYTES == 4 << 20
    assert buckets.BUCKET_CHANGES == 1 << 22


def scattered(seed=0, density=0.05):
    """Two versions of some tensors of three dtypes, none without a change."""
    rng = np.random.default_rng(seed)
    old, new = {}, {}
    for i, shape in enumerate([(40, 30), (7,), (3, 500), (90, 11), (1,), (25, 4, 6), (600,), (13, 13)]):
        uint = (np.uint16, np.uint8, np.uint32)[i % 3]
        old[f"t{i}"] = rng.integers(0, np.iinfo(uint).max, shape, uint)
        hit = rng.random(shape) < density
        hit.reshape(-1)[-1] = True
        new[f"t{i}"] = np.where(hit, old[f"t{i}"] + uint(1), old[f"t{i}"])
    return old, new


def by_bucket(patch):
    out = {}
    for entry in patch:
        out.setdefault(entry.bucket, []).append(entry)
    return [out[i] for i in sorted(out)]


def assert_exact(patch, old, new):
    weights = {n: b.copy() for n, b in old.items()}
    assert patch.changed == sum(int((old[n] != new[n]).sum()) for n in old)
    patch.apply(weights)
    assert all((weights[n] == new[n]).all() for n in new)


@each_profile
def test_cut_by_what_is_covered(profile, monkeypatch):
    """No bucket speaks for more weights than the bound, and no more buckets than that takes, twice over."""
    limit(monkeypatch, PIECE_BYTES=1000, BUCKET_COVER_BYTES=3000)
    old, new = scattered()
    patch = sparserl.diff(old, new, profile=profile)
    covered = [sum(e.elements * old[e.tensor].itemsize for e in entries) for entries in by_bucket(patch)]
    assert max(covered) <= 3000
    assert len(covered) <= 2 * math.ceil(sum(covered) / 3000) + 3
    assert_exact(patch, old, new)


@each_profile
@pytest.mark.parametrize("bound", [pytest.param(4, marks=pytest.mark.long), 37])
@pytest.mark.parametrize("where", ["spread", "clustered"])
def test_cut_by_changes(profile, bound, where, monkeypatch):
    """No bucket holds more sparse changes than the bound, however unevenly they lie."""
    limit(monkeypatch, BUCKET_CHANGES=bound)
    old, new = scattered()
    if where == "clustered":
        new["t0"] = old["t0"].copy()
        new["t0"][3:6] += np.uint16(1)
    patch = sparserl.diff(old, new, profile=profile)
    counts = [sum(e.changed for e in entries if not e.dense) for entries in by_bucket(patch)]
    assert max(counts) <= bound
    assert_exact(patch, old, new)
    for other in (patch.invert(old, profile=profile), sparserl.squash(patch, base=old, profile=profile)):
        assert max(sum(e.changed for e in entries if not e.dense) for entries in by_bucket(other)) <= bound
    assert_exact(patch.invert(old, profile=profile), new, old)


@pytest.mark.parametrize("bound", [64, 300, 2000])
@pytest.mark.parametrize("density", [0.03, 0.2, 1.0])
def test_cut_by_payload(bound, density, monkeypatch):
    """In `raw`, where the payload is known to the byte, no bucket holds more than the bound."""
    limit(monkeypatch, BUCKET_PAYLOAD_BYTES=bound)
    old, new = scattered(density=density)
    patch = sparserl.diff(old, new, profile="raw")
    for entries in by_bucket(patch):
        width = old[entries[0].tensor].itemsize
        assert sum(e.elements * width if e.dense else e.changed * (4 + width) for e in entries) <= bound
    assert_exact(patch, old, new)


@each_profile
def test_payload_stays_near_its_bound(profile, monkeypatch):
    """Estimated payloads are good enough that no bucket is much larger than it should be."""
    limit(monkeypatch, BUCKET_PAYLOAD_BYTES=20_000, PIECE_BYTES=1 << 20)
    rng = np.random.default_rng(1)
    for density in (0.01, 0.1, 0.3, 1.0):
        old = {"w": rng.integers(0, 2**16, (700, 600), np.uint16)}
        new = {"w": np.where(rng.random((700, 600)) < density, rng.integers(0, 2**16, (700, 600), np.uint16), old["w"])}
        patch = sparserl.diff(old, new, profile=profile)
        sizes = [b.bytes for b in patch.stats().buckets]
        assert max(sizes) <= 1.1 * 20_000 + 200
        assert_exact(patch, old, new)


@each_profile
def test_one_dtype_and_one_profile_per_bucket(profile, monkeypatch):
    """Entries of a bucket share both; dtypes never mix, also not those of one width."""
    limit(monkeypatch, BUCKET_CHANGES=25)
    old, new = scattered()
    for weights in (old, new):
        weights["i"] = weights["t0"].view(np.int16)
        weights["f"] = weights["t0"].view(np.float16)
    patch = sparserl.diff(old, new, profile=profile)
    for entries in by_bucket(patch):
        assert len({e.profile for e in entries}) == 1
        assert len({old[e.tensor].dtype for e in entries}) == 1
        assert profile in ("auto", entries[0].profile) or (profile, entries[0].profile) == ("ctx", "ulp")


@each_profile
@pytest.mark.parametrize("known", [False, True], ids=["compared", "known"])
@pytest.mark.parametrize("threads", [1, 3])
def test_large_and_small_tensors_share_buckets_in_order(profile, known, threads, monkeypatch):
    """Large tensors are cut and found first, small ones batched: their entries still stand in order, each its own."""
    limit(monkeypatch, PIECE_BYTES=512)
    rng = np.random.default_rng(4)
    old = {f"t{i:02}": rng.integers(0, 2**16, (9, 10 * (1 + 9 * (i % 5 == 3))), np.uint16) for i in range(30)}
    new = {n: np.where(rng.random(b.shape) < 0.03, b + np.uint16(1), b) for n, b in old.items()}
    new["t07"] = rng.integers(0, 2**16, old["t07"].shape, np.uint16)
    new["t08"] = rng.integers(0, 2**16, old["t08"].shape, np.uint16)
    places = {n: np.flatnonzero(old[n].ravel() != new[n].ravel()) for n in list(old)[::2]} if known else None
    patch = sparserl.diff(old, new, profile=profile, positions=places, threads=threads)
    for entries in by_bucket(patch):
        keys = [(e.tensor, e.region.start) for e in entries]
        assert keys == sorted(keys)
    assert any(len({e.dense for e in entries}) == 2 for entries in by_bucket(patch))
    assert_exact(patch, old, new)
    assert_exact(patch.invert(old, profile=profile, threads=threads), new, old)
    assert_exact(sparserl.squash(patch, base=old, profile=profile, threads=threads), old, new)


def bf16(values):
    return (values.astype(np.float32).view(np.uint32) >> np.uint32(16)).astype(np.uint16)


def kinds():
    """Data for which different profiles are smallest."""
    rng = np.random.default_rng(2)
    size = 60_000
    kind = BY_NAME["bfloat16"]
    normal = bf16(rng.standard_normal(size))
    random = rng.integers(0, 2**16, size, np.uint16)

    def some(density, new, old):
        return np.where(rng.random(size) < density, new, old)

    near = reference.advance(normal, rng.integers(1, 3, size).astype(np.uint16), True)
    small = (normal & np.uint16(0x7FFF)) < 0x3D80
    zeros = np.zeros(size, np.uint16)
    return {
        "steps": (Bits(normal, kind), Bits(some(0.01, near, normal), kind)),
        "many steps": (Bits(normal, kind), Bits(some(0.2, near, normal), kind)),
        "small ones step": (Bits(normal, kind), Bits(np.where(small, some(0.1, near, normal), normal), kind)),
        "to one value": (random, some(0.02, np.full(size, 0x3F80, np.uint16), random)),
        "fresh bits": (random, some(0.03, rng.integers(0, 2**16, size, np.uint16), random)),
        "from zero": (zeros, some(0.05, bf16(rng.standard_normal(size)), zeros)),
        "a handful": (Bits(normal, kind), Bits(np.where(np.arange(size) == 777, near, normal), kind)),
        "floats": (normal.astype(np.float32), some(0.02, normal + 1, normal).astype(np.float32)),
        "bytes": (random.astype(np.uint8), some(0.01, random + np.uint16(1), random).astype(np.uint8)),
    }


@pytest.mark.parametrize("kind", kinds())
def test_auto_takes_the_smallest(kind):
    """Within 2% (and what the estimates take on the wire) of the best of all profiles."""
    old, new = kinds()[kind]
    sizes = {p: sparserl.diff({"w": old}, {"w": new}, profile=p).nbytes for p in PROFILES}
    assert sizes["auto"] <= 1.02 * min(sizes.values()) + 32


def test_auto_takes_different_profiles_for_different_data():
    """Steps of weights that are all alike go as `ulp`, of small ones as `ctx`, a value that many take as `gap`."""
    taken = {k: sparserl.diff({"w": a}, {"w": b}).stats().profile for k, (a, b) in kinds().items()}
    assert taken["steps"] == "ulp"
    assert taken["small ones step"] == "ctx"
    assert taken["to one value"] == "gap"


def test_index_bits():
    """Nothing to say where nothing or everything changed; otherwise the entropy, and never under a bit per gap."""
    numel, count = np.array([100, 100, 100, 100]), np.array([0, 100, 50, 99])
    assert index_bits(numel, count).tolist() == [0.0, 0.0, 100.0, 99.0]
    assert index_bits(np.array([10_000]), np.array([1]))[0] > math.log2(10_000)


def test_candidates():
    """`auto` weighs all profiles, a name stands for itself, anything else is an error."""
    assert set(plan.candidates("auto")) == {"raw", "gap", "ulp", "ctx"}
    assert plan.candidates("gap") == ("gap",)
    with pytest.raises(UnsupportedFormat, match="zip"):
        plan.candidates("zip")


def claims(table, parts):
    """All that some changes say: sparse (tensor, position, word, step), dense (tensor, position, bits)."""
    sparse, dense = [], []
    for part in parts:
        at = 0
        for tensor, region, count in zip(part.tensor.tolist(), part.region, part.count.tolist(), strict=True):
            where = flatten(table, (tensor, region), part.positions[at : at + count])
            columns = [part.after, part.steps]
            words = [c[at : at + count].tolist() if c is not None else [None] * count for c in columns]
            sparse += zip([tensor] * count, where.tolist(), *words, strict=True)
            at += count
        assert at == part.positions.size
        for entry in part.dense:
            tensor, region = entry.place
            where = flatten(table, (tensor, region), np.arange(entry.bits.size, dtype=np.uint32))
            dense += zip([tensor] * where.size, where.tolist(), entry.bits.tolist(), strict=True)
    return sparse, dense


@given(
    st.integers(0, 2**32),
    st.lists(st.tuples(st.integers(1, 12), st.integers(1, 12)), min_size=1, max_size=5),
    st.sampled_from([0.05, 0.5, 1.0]),
    st.sampled_from([1, 7, 1000]),
    st.sampled_from([8, 64, 100_000]),
    st.sampled_from([("ulp", "gap", "raw"), ("raw",), ("gap",), ("ulp",)]),
    st.booleans(),
)
@settings(deadline=None, max_examples=examples(150))
def test_routing_loses_nothing(seed, shapes, density, changes, payload, names, can_be_dense):
    """Split, routed dense or left alone: every change comes out exactly once, with its word and its step."""
    rng = np.random.default_rng(seed)
    dtype = BY_NAME["uint16"]
    old = {f"t{i}": rng.integers(0, 2**16, shape, np.uint16) for i, shape in enumerate(shapes)}
    table = sparserl.tensor_table(old)
    old = [old[s.name].ravel() for s in table.specs]
    new = [np.where(rng.random(b.size) < density, b + rng.integers(1, 999, b.size).astype(np.uint16), b) for b in old]
    where = [np.flatnonzero(a != b) for a, b in zip(old, new, strict=True)]
    live = [i for i, w in enumerate(where) if w.size]
    empty = np.empty(0, np.uint16)
    before = np.concatenate([empty, *(old[i][where[i]] for i in live)])
    after = np.concatenate([empty, *(new[i][where[i]] for i in live)])
    found = Changes(
        dtype,
        np.array(live, np.int64),
        [None] * len(live),
        np.array([old[i].size for i in live], np.int64),
        np.array([where[i].size for i in live], np.int64),
        np.concatenate([empty, *(where[i] for i in live)]).astype(np.uint32),
        after,
        plan.steps_between(dtype, before, after),
        sum(b.size for b in old),
        (lambda e: new[live[e]]) if can_be_dense else None,
    )
    expected, _ = claims(table, [found])
    with pytest.MonkeyPatch.context() as patcher:
        limit(patcher, BUCKET_CHANGES=changes, BUCKET_PAYLOAD_BYTES=payload)
        parts = list(plan.route(found, names, table))
        drafts = list(plan.cut(parts))
    sparse, dense = claims(table, parts)
    assert len(set(dense)) == len(dense)
    covered = {(t, p): bits for t, p, bits in dense}
    assert sorted(sparse) == sorted(c for c in expected if (c[0], c[1]) not in covered)
    assert all(bits == new[t][p] for (t, p), bits in covered.items())
    assert sum(d.count for p in parts for d in p.dense) == len(expected) - len(sparse)
    assert sum(p.covered for p in parts) <= found.covered
    assert can_be_dense or not dense
    again = claims(table, [p for d in drafts for p in d.parts])
    assert (sorted(again[0]), sorted(again[1])) == (sorted(sparse), sorted(dense))
    assert all(d.count <= changes for d in drafts)


def test_changes_know_what_they_can_be_written_as():
    """Bits alone cannot be written as steps, nor steps as bits; the error names the profile."""
    none = np.empty(0, np.int64)
    bits = Changes(BY_NAME["uint8"], none, [], none, none, none.astype(np.uint32), np.empty(0, np.uint8), None, 0)
    with pytest.raises(ValueError, match="ulp"):
        bits.words(codec.profile_by_name("ulp"))
    assert bits.words(codec.profile_by_name("gap")).size == 0
