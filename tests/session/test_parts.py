"""Parts of weights that are built from an anchor and patches: bit for bit, and without memory for the rest."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import numpy as np
import pytest

import sparserl
from sparserl import Part, Region, Shards
from sparserl.errors import ChecksumMismatch, Unavailable, WrongBase
from sparserl.patch import slicing
from sparserl.patch.snapshot import snapshot
from sparserl.session import arrival
from sparserl.session.anchors import restored_parts
from sparserl.session.arrival import arriving_parts
from sparserl.session.parts import apply_to_parts, cut, decodable_places
from sparserl.session.store import transfer
from sparserl.session.store.stored_run import StoredRun
from sparserl.transport.stores.folder import FolderStore
from sparserl.weights.dtypes import BY_NAME, Bits
from sparserl.weights.shards import Place
from tests.checkpoints import random_weights, stepped

MIB = 1 << 20


def places_of(weights: dict[str, Bits], rng: np.random.Generator) -> list[Place]:
    """A drawn box of every tensor, or all of it, or nothing."""
    places: list[Place] = []
    for tensor, bits in enumerate(weights.values()):
        shape = bits.array.shape
        kind = rng.random()
        if kind < 0.2 or not bits.array.size:
            continue
        if kind < 0.4 or not shape:
            places.append((tensor, None))
            continue
        start = [int(rng.integers(0, n)) for n in shape]
        size = [int(rng.integers(1, n - a + 1)) for n, a in zip(shape, start, strict=True)]
        places.append((tensor, Region(tuple(start), tuple(size))))
    return places


def expected(weights: dict[str, Bits], places: list[Place]) -> list[np.ndarray]:
    arrays = [bits.array for bits in weights.values()]
    return [arrays[tensor] if region is None else arrays[tensor][region.slices] for tensor, region in places]


def same(shards: Shards, weights: dict[str, Bits], places: list[Place]) -> bool:
    return all(
        np.array_equal(part.data.array, array)
        for part, array in zip(shards.parts, expected(weights, places), strict=True)
    )


@pytest.mark.parametrize("coded", [True, False])
@pytest.mark.parametrize("seed", range(4))
def test_parts_of_an_anchor(coded: bool, seed: int) -> None:
    weights = random_weights(1)
    places = places_of(weights, np.random.default_rng(seed))
    anchor = sparserl.Patch(snapshot(weights, coded=coded))
    assert same(restored_parts(anchor, places), weights, places)


@pytest.mark.parametrize("profile", ["raw", "gap", "ulp", "ctx"])
def test_parts_of_an_anchor_that_was_compared_with_zeros(profile: str) -> None:
    """As an earlier release wrote anchors: changes of zeros, few of them here."""
    rng = np.random.default_rng(3)
    dtype = BY_NAME["bfloat16"]
    few = (rng.random((300, 200)) < 0.02) * rng.integers(1, 2**15, (300, 200))
    weights = {"w": Bits(few.astype(np.uint16), dtype)}
    anchor = sparserl.diff({"w": Bits(np.zeros((300, 200), np.uint16), dtype)}, weights, profile=profile)
    places: list[Place] = [(0, Region((20, 30), (100, 150)))]
    assert same(restored_parts(anchor, places), weights, places)


def trained(steps: int) -> list[dict[str, Bits]]:
    """Versions in which small weights change, so that `ctx` is worth its while."""
    rng = np.random.default_rng(5)
    dtype = BY_NAME["bfloat16"]
    array = (rng.standard_normal((700, 130)).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    versions = [{"a": Bits(array, dtype), "b": Bits(array[::-1].copy(), dtype)}]
    for _ in range(steps):
        last = versions[-1]
        changed = {
            name: bits.array + ((rng.random(array.shape) < 0.2) & ((bits.array & 0x7FFF) < 0x3F00)).astype(np.uint16)
            for name, bits in last.items()
        }
        versions.append({name: Bits(bits, dtype) for name, bits in changed.items()})
    return versions


def rows(table: sparserl.TensorTable, weights: dict[str, Bits], box: Region) -> Shards:
    parts = [Part(name, box, Bits(bits.array[box.slices], bits.dtype)) for name, bits in weights.items()]
    return Shards(table, parts)


@pytest.mark.parametrize("profile", ["gap", "ulp", "ctx"])
def test_patches_of_ranks_that_cut_otherwise(profile: str) -> None:
    """Two ranks have published by rows; a rank that has some columns of one tensor takes what it needs to decode."""
    versions = trained(3)
    table = sparserl.tensor_table(versions[0])
    patches = []
    for old, new in zip(versions, versions[1:], strict=False):
        for first, last in ((0, 300), (300, 700)):
            box = Region((first, 0), (last - first, 130))
            patches.append(sparserl.diff(rows(table, old, box), rows(table, new, box), profile=profile))
    assert all(profile in {head.profile.name for head in patch.contents.heads} for patch in patches)
    places: list[Place] = [(0, Region((310, 20), (100, 50)))]
    wider = decodable_places(table, places, patches)
    if profile == "ctx":
        assert wider == [(0, Region((300, 0), (400, 130))), (1, Region((300, 0), (400, 130)))]
    else:
        assert wider == places
    anchor = sparserl.Patch(snapshot(versions[0]))
    shards = restored_parts(anchor, wider)
    apply_to_parts(shards, patches)
    assert same(cut(shards, places), versions[-1], places)


def test_a_random_walk_of_all_dtypes() -> None:
    rng = np.random.default_rng(7)
    versions = [random_weights(1)]
    for seed in range(3):
        versions.append(stepped(versions[-1], seed))
    patches = [sparserl.diff(old, new) for old, new in zip(versions, versions[1:], strict=False)]
    table = sparserl.tensor_table(versions[0])
    for _ in range(5):
        places = places_of(versions[0], rng)
        shards = restored_parts(sparserl.Patch(snapshot(versions[0])), decodable_places(table, places, patches))
        apply_to_parts(shards, patches)
        assert same(cut(shards, places), versions[-1], places)


def published(path: Path, versions: list[dict[str, Bits]]) -> StoredRun:
    publisher = sparserl.Publisher(path, lambda: versions[0], profile="gap", anchor_after=100.0, ladder=None)
    while len(versions) > 1:
        publisher.publish()
        versions.pop(0)
    publisher.publish()
    publisher.close()
    return StoredRun.read(FolderStore(path))


def test_memory_for_the_parts_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that has an eighth of 96 MiB takes little more than that eighth, and what is on its way."""
    monkeypatch.setattr(transfer, "FLIGHT_BYTES", 8 * MIB)
    monkeypatch.setattr(arrival, "_TRANSIENT_BYTES", 8 * MIB)
    rng = np.random.default_rng(1)
    array = rng.integers(0, 2**16, (3, 4096, 4096), np.uint16)
    weights = {"w": Bits(array, BY_NAME["bfloat16"])}
    stored = published(tmp_path / "store", [weights])
    places: list[Place] = [(0, Region((0, 0, 512), (3, 4096, 512)))]
    own_bytes = array.nbytes // 8
    fetch = stored.fetch(stored.steps(None, 0))
    fetch.run(lambda: arriving_parts(fetch.arriving, places, stored.head.digest, 1))  # kernels are loaded
    fetch = stored.fetch(stored.steps(None, 0))
    tracemalloc.start()
    try:
        parts = fetch.run(lambda: arriving_parts(fetch.arriving, places, stored.head.digest, 1))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert same(parts, weights, places)
    assert peak < 1.1 * own_bytes + 48 * MIB < array.nbytes


def test_a_patch_that_failed_half_way_is_not_applied_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps would be added twice: the parts are built anew."""
    stored = published(tmp_path / "store", trained(2))
    steps = stored.steps(None, 2)
    places: list[Place] = [(0, None)]
    fetch = stored.fetch(steps)
    apply = arrival.apply_to_parts

    def fail(*args: object) -> None:
        apply(*args)
        raise Unavailable("out of reach")

    with monkeypatch.context() as patched:
        patched.setattr(arrival, "apply_to_parts", fail)
        with pytest.raises(Unavailable):
            fetch.run(lambda: arriving_parts(fetch.arriving, places, stored.head.digest, 1))
    route = [(step, stored.run.layout) for step in steps]
    again = transfer.Fetch(stored.store, stored.run.run, route, begun=fetch)
    assert again.arriving[0] is not fetch.arriving[0]
    parts = again.run(lambda: arriving_parts(again.arriving, places, stored.head.digest, 1))
    assert same(parts, trained(2)[2], places)


def test_parts_of_very_many_elements_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """Positions in a part are of 32 bits."""
    monkeypatch.setattr(slicing, "_MOST_ELEMENTS", 1000)
    versions = trained(1)
    patch = sparserl.diff(*versions, profile="ulp")
    places: list[Place] = [(0, None), (1, Region((10, 0), (600, 130)))]
    shards = restored_parts(sparserl.Patch(snapshot(versions[0])), places)
    apply_to_parts(shards, [patch])
    assert same(shards, versions[1], places)


def test_patches_after_the_anchor_must_lead_on(tmp_path: Path) -> None:
    """A store whose steps do not follow one another, or lead elsewhere, is refused."""
    stored = published(tmp_path / "store", trained(2))
    steps = stored.steps(None, 2)
    places: list[Place] = [(0, None)]
    for wrong, digest, error in (
        ([steps[0], steps[2]], stored.head.digest, WrongBase),
        (steps[:2], stored.head.digest, ChecksumMismatch),
    ):
        fetch = stored.fetch(wrong)
        with pytest.raises(error):
            fetch.run(lambda fetch=fetch, digest=digest: arriving_parts(fetch.arriving, places, digest, 1))
