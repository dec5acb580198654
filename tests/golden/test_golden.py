"""Patches written once and read for ever: every later release must turn these bases into these results."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import sparserl
from sparserl import Patch, codec
from sparserl.codec.coders import CODERS
from sparserl.weights.dtypes import DTYPES
from tests.dtypes import long_if_rare
from tests.golden.recipe import fingerprint, weights
from tests.hostile.forged_patch import Scan

HERE = Path(__file__).parent
INDEX = json.loads((HERE / "index.json").read_text())


@pytest.mark.parametrize(
    "record", [pytest.param(r, marks=long_if_rare(r["file"]), id=r["file"].removesuffix(".srl")) for r in INDEX]
)
def test_a_patch_of_old_does_what_it_did(record):
    """The base is the recipe's, the result is what it was on the day of writing, bit for bit."""
    held = weights(record["tensors"])
    assert fingerprint(held) == record["base"]
    patch = Patch.open(HERE / record["file"])
    digests = patch.base.hex, patch.result.hex
    assert (*digests, patch.changed) == (record["base_digest"], record["result_digest"], record["changed"])
    if patch.complete:
        assert sparserl.digest(held).hex == record["base_digest"]
    assert patch.apply(held).already is (record["base_digest"] == record["result_digest"])
    assert fingerprint(held) == record["result"]
    assert patch.apply(held).already
    patch.invert(weights(record["tensors"])).apply(held)
    assert fingerprint(held) == record["base"]


def test_the_shelf_is_complete():
    """Every file is in the index, and every profile, coder, stream and dtype of the format is in some file."""
    assert {r["file"] for r in INDEX} == {p.name for p in HERE.glob("*.srl")}
    profiles, coders, dtypes = set(), set(), set()
    for record in INDEX:
        patch = Patch.open(HERE / record["file"])
        for index, head in enumerate(patch.contents.heads):
            profiles.add(head.profile.name)
            dtypes.add((head.profile.name, head.dtype.name))
            coders |= set(coders_of(bytes(patch.contents.bucket(index))))
    assert profiles == {"raw", "gap", "ulp", "ctx"} == set(codec.PROFILES)
    assert coders == {"stored", "zstd", "rans"} == {c.name for c in CODERS.values()}
    assert {(p, d.name) for p in profiles for d in DTYPES} == dtypes


def coders_of(bucket):
    """The coders in the directory of a bucket."""
    scan = Scan(bucket[24:-16])
    scan.numbers(2)
    scan.take(2)
    scan.numbers(2 * scan.number())
    for _ in range(scan.number()):
        _, coder = scan.take(2)
        scan.numbers(scan.number())
        yield CODERS[coder].name


def test_the_shelf_is_small():
    """Golden files live in the repository."""
    assert sum(p.stat().st_size for p in HERE.iterdir() if p.is_file()) < 300_000
