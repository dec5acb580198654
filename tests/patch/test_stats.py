"""Figures of a patch: sums that add up, and the routing they make visible."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

import sparserl
from sparserl import Patch, Region, codec
from sparserl.kernels import reference
from sparserl.patch import stats as patch_stats
from sparserl.patch.contents import Contents
from sparserl.weights.dtypes import BY_NAME, Bits
from tests.boxed_shards import diff_shards

PROFILES = ("auto", "raw", "gap", "ulp", "ctx")
each_profile = pytest.mark.parametrize("profile", PROFILES)


def bf16(rng, *shape):
    """Normally distributed weights as bf16 patterns."""
    values = rng.standard_normal(shape).astype(np.float32)
    return (values.view(np.uint32) >> np.uint32(16)).astype(np.uint16)


def stepped(rng, bits, density):
    """The same patterns with some moved by one or two ulp."""
    steps = rng.integers(1, 4, bits.shape).astype(bits.dtype)
    return np.where(rng.random(bits.shape) < density, reference.advance(bits, steps, True), bits)


def model(seed=0):
    """Two versions of weights with sparse, dense, untouched and empty tensors of two dtypes."""
    rng = np.random.default_rng(seed)
    kind = BY_NAME["bfloat16"]
    old = {f"layer.{i}": bf16(rng, 80, 100) for i in range(6)}
    new = {n: stepped(rng, b, 0.02) for n, b in old.items()}
    new["layer.3"] = old["layer.3"].copy()
    old["lora"], new["lora"] = bf16(rng, 60, 8), bf16(rng, 60, 8)
    old = {n: Bits(b, kind) for n, b in old.items()}
    new = {n: Bits(b, kind) for n, b in new.items()}
    for weights, value in ((old, 0.5), (new, 0.25)):
        weights["router"] = np.full((16, 8), 0.5, np.float32)
        weights["router"][3, 3] = value
        weights["none"] = np.zeros((0, 3), np.float32)
    return old, new


@each_profile
def test_totals_are_sums(profile):
    """Elements, changes and bytes, added over tensors and over buckets, are the totals."""
    old, new = model()
    patch = sparserl.diff(old, new, profile=profile)
    stats = patch.stats()
    assert stats.elements == sum(t.elements for t in stats.tensors) == patch.table.elements
    assert stats.changed == sum(t.changed for t in stats.tensors) == sum(b.changed for b in stats.buckets)
    assert stats.changed == patch.changed
    assert stats.bytes == patch.nbytes == len(patch.to_bytes())
    assert [b.bytes for b in stats.buckets] == [len(patch.contents.bucket(i)) for i in range(patch.buckets)]
    assert stats.table_bytes == patch.table_nbytes
    assert stats.dense_bytes == 6 * 80 * 100 * 2 + 60 * 8 * 2 + 16 * 8 * 4
    assert sum(t.dense_entries for t in stats.tensors) == sum(b.dense_entries for b in stats.buckets)
    assert sum(b.entries for b in stats.buckets) == len(list(patch))
    assert (stats.base_digest, stats.result_digest) == (patch.base.hex, patch.result.hex)
    assert stats.untouched_tensors == 2
    assert stats.complete


@each_profile
def test_shares_add_up_to_the_buckets(profile):
    """What is attributed to tensors is what the buckets take, but for rounding to whole bytes."""
    old, new = model()
    stats = sparserl.diff(old, new, profile=profile).stats()
    attributed = sum(t.bytes for t in stats.tensors)
    assert abs(attributed - sum(b.bytes for b in stats.buckets)) <= len(stats.tensors) / 2
    assert all((t.bytes > 0) is (t.changed > 0) for t in stats.tensors)


def test_densities_are_exact():
    """Each figure is the quotient it says it is; nothing divides by zero."""
    old, new = model()
    stats = sparserl.diff(old, new).stats()
    assert stats.density == stats.changed / stats.elements
    assert stats.ratio == stats.dense_bytes / stats.bytes
    assert stats.bits_per_changed == 8 * (stats.bytes - stats.table_bytes) / stats.changed
    for t in stats.tensors:
        bits = [np.asarray(getattr(w[t.name], "array", w[t.name])) for w in (old, new)]
        changed = int((bits[0].view(f"u{bits[0].itemsize}") != bits[1].view(f"u{bits[1].itemsize}")).sum())
        assert (t.changed, t.elements) == (changed, bits[0].size)
        assert t.density == (changed / t.elements if t.elements else 0.0)
        assert (t.bits_per_changed == 0.0) is (changed == 0)


def test_of_a_patch_that_changes_nothing():
    """No buckets, no densities, no profile."""
    old, _ = model()
    stats = sparserl.diff(old, old).stats()
    assert (stats.changed, stats.density, stats.bits_per_changed, stats.profile) == (0, 0.0, 0.0, "none")
    assert stats.buckets == ()
    assert stats.untouched_tensors == len(stats.tensors)
    assert sparserl.diff({}, {}).stats().density == 0.0


@pytest.mark.parametrize("profile", ["raw", "gap", "ulp"])
def test_the_reason_for_a_profile_that_was_asked_for(profile):
    """It says so, and mentions dense entries."""
    old, new = model()
    stats = sparserl.diff(old, new, profile=profile).stats()
    assert stats.profile == profile
    by_dtype = {b.dtype: b.reason for b in stats.buckets}
    assert by_dtype["float32"] == "as asked"
    assert by_dtype["bfloat16"] == "as asked; 1 of 6 entries dense, where that is smaller"


def test_the_reason_for_a_profile_that_was_chosen():
    """The estimates of all candidates, the smallest first, which is the one taken."""
    old, new = model()
    for bucket in sparserl.diff(old, new).stats().buckets:
        ranking = bucket.reason.removeprefix("smallest estimate: ").split(";")[0].split(" < ")
        names, sizes = zip(*((r.split()[0], int(r.split()[1])) for r in ranking), strict=True)
        assert sorted(set(names) - {"ctx"}) == ["gap", "raw", "ulp"]  # `ctx` is left out where it became `ulp`
        assert names[0] == bucket.profile
        assert list(sizes) == sorted(sizes)


def test_the_reason_for_a_profile_that_another_estimate_beats():
    """`ctx` is chosen before its classes are; where these make it larger, the reason says what it was."""
    rng = np.random.default_rng(1)
    old = {"w": rng.standard_normal(20_000).astype(np.float32)}
    new = {"w": old["w"].copy()}
    new["w"].view(np.uint32)[rng.permutation(20_000)[:100]] += 1
    patch = sparserl.diff(old, new, profile="auto")
    (bucket,) = patch.stats().buckets
    head = patch.contents.heads[0]
    larger = replace(head, estimates=tuple((p, 10**6 if p == head.profile.id else b) for p, b in head.estimates))
    assert patch_stats._reason(larger).startswith(f"{bucket.profile} by a first estimate; now ")


def test_the_reason_where_all_is_dense():
    """A bucket without sparse entries was not chosen by an estimate of them."""
    rng = np.random.default_rng(1)
    old, new = ({"w": rng.standard_normal((50, 50)).astype(np.float32)} for _ in range(2))
    for profile in ("auto", "raw"):
        (bucket,) = sparserl.diff(old, new, profile=profile).stats().buckets
        assert bucket.reason == "the dense bits are smaller than any sparse form"


def test_as_plain_values():
    """The figures survive JSON."""
    old, new = model()
    stats = sparserl.diff(old, new).stats()
    assert json.loads(json.dumps(stats.as_dict()))["changed"] == stats.changed
    assert json.loads(json.dumps(stats.as_dict()))["tensors"][0]["name"] == stats.tensors[0].name


def test_of_shards():
    """A patch of some regions says that it is not complete."""
    old, new = np.zeros((8, 6), np.uint16), np.ones((8, 6), np.uint16)
    table = sparserl.tensor_table({"w": old})
    patch = diff_shards({"w": old[:4]}, {"w": new[:4]}, table=table, regions={"w": Region((0, 0), (4, 6))})
    stats = patch.stats()
    assert not stats.complete
    assert (stats.changed, stats.elements, stats.density) == (24, 48, 0.5)


def test_entries_are_listed_without_decoding(monkeypatch):
    """Iterating over a patch, and its figures, read the entry tables alone."""
    old, new = model()
    data = sparserl.diff(old, new).to_bytes()

    def refuse(*_):
        raise AssertionError("a bucket was decoded")

    monkeypatch.setattr(Contents, "decode", refuse)
    for profile in codec.PROFILES.values():
        monkeypatch.setattr(type(profile), "decode", refuse)
    patch = Patch.from_bytes(data)
    entries = list(patch)
    assert sum(e.changed for e in entries) == patch.stats().changed == patch.changed
    assert {e.tensor for e in entries} == {"lora", "router", *(f"layer.{i}" for i in (0, 1, 2, 4, 5))}
    by_name = {e.tensor: e for e in entries}
    assert by_name["lora"].dense
    assert by_name["lora"].elements == 480
    assert by_name["layer.0"].region == Region((0, 0), (80, 100))
    assert not by_name["layer.0"].dense


def test_a_lora_goes_dense_and_a_large_sparse_tensor_does_not():
    """What changed everywhere is sent whole; half a percent of a large tensor is not."""
    rng = np.random.default_rng(2)
    kind = BY_NAME["bfloat16"]
    big = bf16(rng, 1000, 1000)
    old = {"big": Bits(big, kind), "lora": Bits(bf16(rng, 1000, 16), kind)}
    new = {"big": Bits(stepped(rng, big, 0.005), kind), "lora": Bits(bf16(rng, 1000, 16), kind)}
    for profile in PROFILES:
        patch = sparserl.diff(old, new, profile=profile)
        assert {e.tensor: e.dense for e in patch} == {"big": False, "lora": True}
        lora = next(t for t in patch.stats().tensors if t.name == "lora")
        assert lora.bytes <= 32_000 * 1.01 + 1024


def drawn(rng, dtype, size, how):
    """Bits with all sorts of distributions."""
    random = rng.integers(0, 256, size * dtype.width, np.uint8).view(dtype.uint)
    if how == "few values":
        return rng.choice(random[:3], size)
    if how == "normal" and dtype.width > 1:
        values = rng.standard_normal(size)
        return {
            2: lambda: (values.astype(np.float32).view(np.uint32) >> np.uint32(16)).astype(np.uint16),
            4: lambda: values.astype(np.float32).view(np.uint32),
            8: lambda: values.view(np.uint64),
        }[dtype.width]()
    return random


@each_profile
@pytest.mark.parametrize(
    "name", ["bfloat16", "float32", *(pytest.param(name, marks=pytest.mark.long) for name in ("uint8", "float64"))]
)
def test_never_much_larger_than_the_dense_bits(name, profile):
    """Whatever changes and however much, a patch takes at most the dense bytes, 1% and a kilobyte."""
    rng = np.random.default_rng(3)
    dtype, size = BY_NAME[name], 30_000
    for how in ("random", "normal", "few values"):
        old = drawn(rng, dtype, size, how)
        other = {
            "bits": drawn(rng, dtype, size, how),
            "steps": reference.advance(old, rng.integers(1, 3, size).astype(dtype.uint), dtype.sign_magnitude),
            "far": reference.advance(old, rng.integers(1, 200, size).astype(dtype.uint), dtype.sign_magnitude),
        }
        for kind in other.values():
            for density in (0.02, 0.19, 0.21, 0.24, 0.3, 0.5, 0.7, 0.9, 0.97, 1.0):
                new = np.where(rng.random(size) < density, kind, old)
                patch = sparserl.diff({"w": Bits(old, dtype)}, {"w": Bits(new, dtype)}, profile=profile, threads=1)
                assert patch.nbytes <= 1.01 * old.nbytes + 1024, (how, density)
