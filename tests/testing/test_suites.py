"""The public suites notice what is wrong: each of these breaks one promise, and the test that is about it fails."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest

from sparserl import targets, tensor_table
from sparserl.errors import SparserlError
from sparserl.testing import SourceConformance, StoreConformance, TargetConformance
from sparserl.testing.weights import bits, blank, versions
from sparserl.transport.stores.folder import FolderStore

FAILS = (AssertionError, pytest.fail.Exception, SparserlError)


class Careless(FolderStore):
    """Takes conditions for advice."""

    def swap(self, name, data, tag):
        self.put(name, data)
        return self.get(name, 1 << 20).tag


class Forgetful(FolderStore):
    """Is done before it has written all of it."""

    def put(self, name, data):
        super().put(name, bytes(data)[:1000])


class Deaf(FolderStore):
    """Never notices that the head has moved."""

    def changed(self, name, tag, timeout):
        time.sleep(min(timeout, 0.5))


class Lenient(FolderStore):
    """Gives as many bytes as there are."""

    def read(self, name, start, size):
        return super().get(name, 1 << 30).data[start : start + size]


@pytest.mark.parametrize(
    ("store", "test"),
    [
        (Careless, "test_swaps_hold_their_condition"),
        (Forgetful, "test_what_was_put_is_there"),
        (Lenient, "test_bounds"),
        (FolderStore, None),
    ],
)
def test_bad_stores_fail(store, test, tmp_path: Path) -> None:
    """One that does what it should passes all of them."""
    suite = StoreConformance()
    tests = [test] if test else ["test_swaps_hold_their_condition", "test_what_was_put_is_there", "test_bounds"]
    for number, name in enumerate(tests):
        made = store(tmp_path / str(number))
        if test is None:
            getattr(suite, name)(made)
        else:
            with pytest.raises(FAILS):
                getattr(suite, name)(made)


def test_bad_stores_fail_between_two(tmp_path: Path) -> None:
    """Two that write at once, and one that waits for the other."""
    suite = StoreConformance()
    for store, test in ((Careless, suite.test_one_of_many_wins), (Deaf, suite.test_changes_are_noticed)):
        with pytest.raises(FAILS):
            test(lambda place, store=store: store(tmp_path / place), store.__name__)
    with pytest.raises(FAILS):
        suite.test_a_run_goes_through_it(lambda place: Careless(tmp_path / place), "run")


class Frozen:
    """Shows what the weights were when it was made."""

    def __init__(self, weights):
        self.live, self.old = weights, {name: array.copy() for name, array in weights.items()}

    def weights(self):
        return self.old


class Restless(Frozen):
    """Shows other bits each time."""

    def weights(self):
        self.old["w"] += 1
        return self.old


class Growing(Frozen):
    """Has one tensor more each time."""

    def weights(self):
        self.old[f"w{len(self.old)}"] = self.live["w"]
        return self.old


class Steps(SourceConformance):
    """Steps of a live array."""

    def step(self, source):
        source.live["w"] += 1


@pytest.mark.parametrize(
    ("source", "test"),
    [
        (Frozen, "test_steps_are_seen"),
        (Restless, "test_asking_changes_nothing"),
        (Growing, "test_its_tensors_stay_the_same"),
    ],
)
def test_bad_sources_fail(source, test) -> None:
    """What one of them gets wrong is what its test is about."""
    with pytest.raises(FAILS):
        getattr(Steps(), test)(source({"w": np.zeros(10, np.float32)}))


def test_a_source_without_changes_fails(tmp_path: Path) -> None:
    """Versions must have something in them."""
    with pytest.raises(FAILS):
        Steps().test_versions_arrive_bit_for_bit(Frozen({"w": np.zeros(10, np.float32)}), "host", tmp_path)


class Sees(TargetConformance):
    """Arrays that are seen as they are."""

    def seen(self, target):
        return target.weights()


class Hasty(targets.ModuleTarget):
    """Writes while it prepares."""

    def prepare(self, change):
        prepared = super().prepare(change)
        undo = prepared.commit()
        prepared.commit = lambda: undo
        return prepared


class Stubborn(targets.ModuleTarget):
    """Takes nothing back."""

    def prepare(self, change):
        prepared = super().prepare(change)
        commit = prepared.commit
        prepared.commit = lambda: commit() and (lambda: None)
        return prepared


class Idle(targets.ModuleTarget):
    """Prepares, and does nothing then."""

    def prepare(self, change):
        prepared = super().prepare(change)
        prepared.commit = lambda: lambda: None
        return prepared


@pytest.mark.parametrize("target", [Hasty, Stubborn, Idle, targets.ModuleTarget])
def test_bad_targets_fail(target) -> None:
    """One that does what it should passes."""
    some = versions(4)
    made = target({name: array.copy() for name, array in some[0].items()})
    if target is targets.ModuleTarget:
        Sees().test_nothing_is_seen_before_the_commit(made, some, "a patch")
    else:
        with pytest.raises(FAILS):
            Sees().test_nothing_is_seen_before_the_commit(made, some, "a patch")


def test_weights_of_the_suites_differ_in_bits_alone() -> None:
    """Every version has other bits than the one before, NaNs and zeros among them; blank ones have none."""
    some = versions(3)
    for old, new in zip(some, some[1:], strict=False):
        assert bits(old) != bits(new)
        assert np.array_equal(old["norm.weight"][[3, 5]], new["norm.weight"][[3, 5]], equal_nan=True)
        assert old["norm.weight"][[3, 5]].tobytes() != new["norm.weight"][[3, 5]].tobytes()
    empty = blank(tensor_table(some[0]))
    assert tensor_table(empty) == tensor_table(some[0])
    assert not any(w.array.any() for w in empty.values())
