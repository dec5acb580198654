"""Tensors that are added, removed or reshaped within a run: who can take them does, others refuse them by name."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import sparserl
from sparserl import Publisher, Subscriber, targets
from sparserl.errors import InvalidField, TensorMismatch
from sparserl.session.store.records import Index
from sparserl.session.store.retention import collect, faults, read_head, read_index
from sparserl.session.store.stored_run import StoredRun
from sparserl.sources import open_checkpoint
from sparserl.transport import open_store

Weights = dict[str, Any]


def small_model() -> Weights:
    rng = np.random.default_rng(0)
    return {
        "embed": rng.normal(size=(50, 8)).astype(np.float32),
        "body": rng.normal(size=(40, 8)).astype(np.float32),
        "norm": rng.normal(size=8).astype(np.float32),
        "head": rng.normal(size=(50, 8)).astype(np.float32),
    }


def grow(weights: Weights) -> None:
    """Three new tokens, a value head, and no norm any more."""
    rows = np.ones((3, 8), np.float32)
    for name in ("embed", "head"):
        weights[name] = np.concatenate([weights[name], rows])
    weights["value"] = np.full(8, 0.5, np.float32)
    del weights["norm"]


def step(weights: Weights, number: int) -> None:
    weights["body"].reshape(-1).view(np.uint32)[number::11] += 1


def same(left: Any, right: Weights) -> bool:
    arrays = {name: np.asarray(getattr(value, "array", value)) for name, value in dict(left).items()}
    return arrays.keys() == right.keys() and all(
        arrays[name].tobytes() == right[name].tobytes() and arrays[name].shape == right[name].shape for name in right
    )


def frozen(weights: Weights) -> Weights:
    return {name: value.copy() for name, value in weights.items()}


def publish_all(publisher: Publisher, weights: Weights) -> list[Weights]:
    """Versions 0 and 1 with the first tensors, 2 to 4 with others."""
    versions = []
    for number in range(5):
        if number == 2:
            grow(weights)
        step(weights, number)
        report = publisher.publish(step=number)
        assert report.version == number
        assert report.kind == ("anchor" if number in (0, 2) else "patch")
        versions.append(frozen(weights))
    return versions


def test_a_folder_takes_them(url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Version by version, and later back and forth; the run stays the same, and it is said what changed."""
    weights = small_model()
    folder = targets.folder(tmp_path / "model", keep=9)
    versions = []
    with Publisher(url, weights, files={"config.json": b"1"}) as publisher, Subscriber(url, folder) as subscriber:
        for number in range(5):
            if number == 2:
                run = publisher.run
                grow(weights)
            step(weights, number)
            publisher.publish()
            versions.append(frozen(weights))
            report = subscriber.sync()
            assert report is not None
            assert (report.version, report.kind) == (number, "anchor" if number in (0, 2) else "patch")
            assert same(open_checkpoint(folder.current), weights)
            assert (folder.current / "config.json").read_bytes() == b"1"
        assert publisher.run == run
        for number in (1, 4, 0, 2, 3):
            subscriber.goto(number)
            assert same(open_checkpoint(folder.current), versions[number])
    told = [record.getMessage() for record in caplog.records if "goes on with other tensors" in record.getMessage()]
    assert len(told) == 1
    for name in ("embed", "head", "norm", "value"):
        assert repr(name) in told[0]


def test_memory_of_other_tensors_refuses_them_by_name(url: str) -> None:
    """It keeps the version that it has; memory of the new tensors takes them."""
    weights = small_model()
    old = {name: np.zeros_like(value) for name, value in weights.items()}
    with Publisher(url, weights) as publisher, Subscriber(url, old) as subscriber:
        publisher.publish()
        subscriber.sync()
        before = frozen(old)
        grow(weights)
        publisher.publish()
        for _ in range(2):
            with pytest.raises(TensorMismatch, match="'value' is in the run but not in the target"):
                subscriber.sync()
        assert subscriber.version == 0
        assert same(old, before)
        new = {name: np.zeros_like(value) for name, value in weights.items()}
        with Subscriber(url, new) as other:
            other.sync()
            step(weights, 3)
            publisher.publish()
            report = other.sync()
            assert report is not None
            assert (report.version, report.kind) == (2, "patch")
            assert same(new, weights)
            with pytest.raises(TensorMismatch, match="norm"):
                other.goto(0)
            assert same(new, weights)
        with Subscriber(url, old) as third:  # the older version is still there for who asks for it
            third.sync(0)
            assert same(old, before)


def test_a_model_that_grows_with_the_run(url: str) -> None:
    """Where the target is a function, it may give the tensors of the next version once it has made them."""
    weights = small_model()
    mine = {name: np.zeros_like(value) for name, value in weights.items()}
    target = targets.modules.ModuleTarget(lambda: mine)
    with Publisher(url, weights) as publisher, Subscriber(url, target) as subscriber:
        publisher.publish()
        subscriber.sync()
        grow(weights)
        publisher.publish()
        with pytest.raises(TensorMismatch):
            subscriber.sync()
        mine = {name: np.zeros_like(value) for name, value in weights.items()}
        subscriber.sync()
        assert same(mine, weights)
        assert subscriber.version == 1


@pytest.mark.parametrize("with_state", [False, True])
def test_a_restart_goes_on(url: str, tmp_path: Path, with_state: bool) -> None:
    """From the version with the new tensors, or with other tensors than the version that the store has."""
    state = {"state": tmp_path / "state"} if with_state else {}
    weights = small_model()
    with Publisher(url, weights, **state) as publisher:
        run = publish_all(publisher, weights) and publisher.run
    step(weights, 7)
    with Publisher(url, weights, **state) as publisher:
        assert publisher.publish().kind == "patch"
    weights["more"] = np.ones(5, np.float32)
    with Publisher(url, weights, **state) as publisher:
        report = publisher.publish()
        assert (report.version, report.kind, report.run) == (6, "anchor", run)
    mine = {name: np.zeros_like(value) for name, value in weights.items()}
    with Subscriber(url, mine) as subscriber:
        subscriber.sync()
    assert same(mine, weights)


def test_nothing_else_of_the_run_is_lost(url: str) -> None:
    """Every version can be had, the store is sound, and collecting removes nothing that is needed."""
    weights = small_model()
    with Publisher(url, weights, grace=0) as publisher:
        versions = publish_all(publisher, weights)
    store = open_store(url)
    assert list(faults(store)) == []
    collect(store, 0)
    assert list(faults(store)) == []
    run = StoredRun.read(store)
    for number, expected in enumerate(versions):
        assert same(run.weights(number), expected)
    assert run.patch(2, 4).result == sparserl.digest(versions[4])
    with pytest.raises(TensorMismatch, match="'norm' is in version 1 but not in version 3"):
        run.patch(1, 3)


def test_layouts_that_ended_are_forgotten(url: str) -> None:
    """With the versions that had them; what is left is sound."""
    weights = small_model()
    with Publisher(url, weights, grace=0, keep_anchors=1, anchor_after=0) as publisher:
        for size in range(1, 6):
            weights["value"] = np.zeros(size, np.float32)
            publisher.publish()
            step(weights, size)
            publisher.publish()
    store = open_store(url)
    head, _ = read_head(store)
    index = read_index(store, head)
    assert [layout.version for layout in index.layouts] == [8]
    assert list(faults(store)) == []


def test_anchors_of_layouts_are_retained_as_others(url: str) -> None:
    """Where every version has other tensors, no more anchors stay than are to be kept."""
    weights = small_model()
    with Publisher(url, weights, grace=0, keep_anchors=2) as publisher:
        for size in range(1, 8):
            weights["value"] = np.zeros(size, np.float32)
            publisher.publish()
    store = open_store(url)
    head, _ = read_head(store)
    index = read_index(store, head)
    assert sorted(step.version for step in index.steps) == [5, 6]
    assert [layout.version for layout in index.layouts] == [5, 6]
    assert list(faults(store)) == []


def test_shards_of_other_tensors_must_be_whole(url: str) -> None:
    """As those of a first version: what no rank has would be lost."""
    whole = {"v": np.ones(4, np.float32), "w": np.ones(4, np.float32), "u": np.ones(4, np.float32)}

    def shards(table: Weights, names: str) -> sparserl.Shards:
        region = sparserl.Region((0,), (4,))
        return sparserl.Shards(sparserl.tensor_table(table), [sparserl.Part(n, region, table[n]) for n in names])

    given = shards(whole, "vwu")
    with Publisher(url, lambda: given) as publisher:
        publisher.publish()
        more = {**whole, "x": np.ones(4, np.float32)}
        given = shards(more, "vwu")
        with pytest.raises(sparserl.SparserlError, match="x"):
            publisher.publish()
        given = shards(more, "vwux")
        assert publisher.publish().version == 1


def test_an_audit_of_what_is_held_while_other_tensors_are_staged(url: str, tmp_path: Path) -> None:
    """The targets hold the version before until the commit."""
    weights = small_model()
    with Publisher(url, weights) as publisher, Subscriber(url, targets.folder(tmp_path / "model")) as subscriber:
        publisher.publish()
        subscriber.sync()
        grow(weights)
        publisher.publish()
        subscriber.stage()
        subscriber.audit()
        assert subscriber.version == 0
        subscriber.commit()
        subscriber.audit()
        assert subscriber.version == 1


@pytest.mark.parametrize("change", ["dtype", "names"])
def test_another_model_is_refused(url: str, change: str) -> None:
    """Other dtypes, or mostly other names: that takes a new run, and the publisher goes on as before."""
    weights = small_model()
    with Publisher(url, weights) as publisher:
        publisher.publish()
        kept = frozen(weights)
        weights.clear()
        weights.update(
            {name: value.astype(np.float16) for name, value in kept.items()}
            if change == "dtype"
            else {f"model.{name}": value for name, value in kept.items()}
        )
        with pytest.raises(TensorMismatch, match="new_run=True"):
            publisher.publish()
        weights.clear()
        weights.update(kept)
        step(weights, 1)
        assert publisher.publish().version == 1


def test_a_patch_to_other_tensors_is_refused(url: str) -> None:
    """An index that claims one is damaged, as is one whose layouts do not rise."""
    weights = small_model()
    with Publisher(url, weights) as publisher:
        publish_all(publisher, weights)
    store = open_store(url)
    head, _ = read_head(store)
    index = read_index(store, head)
    (layout,) = index.layouts
    for layouts, told in (
        ((layout._replace(version=3),), "patch 2 → 3 leads to other tensors"),
        ((layout, layout), "do not rise"),
    ):
        damaged = Index(index.run, index.steps, index.files, layouts)
        with pytest.raises(InvalidField, match=told):
            damaged.to_bytes()


def test_the_log_says_so(url: str, caplog: pytest.LogCaptureFixture) -> None:
    from tests.cli.session_commands import said, values

    caplog.set_level(logging.ERROR)
    weights = small_model()
    with Publisher(url, weights) as publisher:
        publish_all(publisher, weights)
    assert "version 2: other tensors" in said("log", url)
    table = values("log", url)
    assert table["layouts"] == [2]
    elements = {1: 50 * 8 * 2 + 40 * 8 + 8, 3: 53 * 8 * 2 + 40 * 8 + 8}
    for step in table["steps"]:
        if step["version"] in elements and step["kind"] == "patch":
            assert step["density"] == step["changed"] / elements[step["version"]]
