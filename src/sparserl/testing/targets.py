"""What a session relies on in a target."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ..errors import CommitFailed, SparserlError, TensorMismatch
from ..patch import diff
from ..session import Publisher, Subscriber
from ..targets import Change, Prepared, Target
from ..transport.stores.folder import FolderStore
from ..weights.digest import digest
from ..weights.memory import Weights
from ..weights.tensors import tensor_table
from .weights import bits, versions


class TargetConformance:
    """Every target passes this.

    A subclass has a fixture `target`, which has nothing yet, or any weights with the tensors of `versions`, and a
    method `seen`. Where the tensors are not free to choose, it has a fixture `versions` too, with four that differ.
    """

    @pytest.fixture
    def versions(self) -> list[Weights]:
        """Weights after each of some steps."""
        return list(versions(4))

    @pytest.fixture
    def target(self, versions: list[Weights]) -> Target:
        """To be overridden."""
        raise NotImplementedError("a subclass of TargetConformance has a fixture `target`")

    def seen(self, target: Any) -> Weights | None:
        """To be overridden: the weights that whoever uses the target sees now; None if there are none yet."""
        raise NotImplementedError("a subclass of TargetConformance has a method `seen`")

    @pytest.fixture
    def holding(self, target: Target, versions: list[Weights]) -> Target:
        """The target, with the first version in it."""
        target.attach(tensor_table(versions[0]))
        prepared = target.prepare(_change(versions, 0, fresh=True))
        prepared.commit()
        prepared.finish()
        return target

    def test_other_tensors_are_refused(self, holding: Target, versions: list[Weights]) -> None:
        """Or it says that it holds nothing of them, and will be given all."""
        more = {**versions[0], "more": np.zeros(3, np.float32)}
        try:
            weights = holding.attach(tensor_table(more))
        except TensorMismatch:
            weights = None
        assert weights is None
        weights = holding.attach(tensor_table(versions[0]))
        assert weights is None or bits(weights) == bits(versions[0])

    @pytest.mark.parametrize("way", ["fresh", "a patch", "patches"])
    def test_nothing_is_seen_before_the_commit(self, holding: Target, versions: list[Weights], way: str) -> None:
        """Then all of it is; and it can be taken back, and done again."""
        end = 3 if way == "patches" else 1
        change = _change(versions, end, fresh=way == "fresh")
        prepared = holding.prepare(change)
        self._sees(holding, versions[0])
        undo = prepared.commit()
        self._sees(holding, versions[end])
        undo()
        self._sees(holding, versions[0])
        again = holding.prepare(change)
        again.commit()
        again.finish()
        self._sees(holding, versions[end])
        version = holding.remembered_version()
        assert version is None or version == (change.run, change.created, end)

    def test_what_is_discarded_leaves_no_trace(self, holding: Target, versions: list[Weights]) -> None:
        """The weights are as they were, and the next version can be committed."""
        holding.prepare(_change(versions, 1)).discard()
        self._sees(holding, versions[0])
        prepared = holding.prepare(_change(versions, 1))
        prepared.commit()
        prepared.finish()
        self._sees(holding, versions[1])

    def test_a_patch_of_other_weights_is_refused(self, holding: Target, versions: list[Weights]) -> None:
        """It is an error, at the latest when it is committed, and the weights are as they were."""
        with pytest.raises(SparserlError):
            holding.prepare(_change(versions, 3, base=2)).commit()
        self._sees(holding, versions[0])

    def test_it_follows_a_run(self, target: Target, versions: list[Weights], tmp_path: Path) -> None:
        """From nothing, step by step, back, and over several versions at once, with all bits audited."""
        with (
            _Published(tmp_path, versions) as run,
            Subscriber(FolderStore(tmp_path), target, audit_every=1) as subscriber,
        ):
            for version in (0, 1, 0, 3, 2):
                run.publish_up_to(version)
                subscriber.goto(version)
                assert subscriber.version == version
                self._sees(target, versions[version])
            subscriber.audit()

    def test_it_is_taken_back_with_others(self, target: Target, versions: list[Weights], tmp_path: Path) -> None:
        """Where another target of the same subscriber fails, before it or after it, neither changes."""
        other = _BreakableTarget()
        for place, several in enumerate(([target, other], [other, target])):
            store = FolderStore(tmp_path / str(place))
            with _Published(tmp_path / str(place), versions) as run, Subscriber(store, several) as subscriber:
                run.publish_up_to(0)
                subscriber.sync()
                run.publish_up_to(1)
                other.broken = True
                with pytest.raises(CommitFailed, match="broken on purpose"):
                    subscriber.sync()
                self._sees(target, versions[0])
                other.broken = False
                subscriber.sync()
                self._sees(target, versions[1])

    def _sees(self, target: Any, weights: Weights) -> None:
        visible = self.seen(target)
        assert visible is not None
        assert bits(visible) == bits(weights)


class _Published:
    """A run whose versions are published when they are wanted."""

    def __init__(self, folder: Path, versions: Sequence[Weights]) -> None:
        self._versions = versions
        self._publisher = Publisher(FolderStore(folder), self)

    def weights(self) -> Weights:
        version = self._publisher.version
        return self._versions[0 if version is None else version + 1]

    def publish_up_to(self, version: int) -> None:
        while self._publisher.version is None or self._publisher.version < version:
            self._publisher.publish()

    def __enter__(self) -> _Published:
        return self

    def __exit__(self, *_: object) -> None:
        self._publisher.close()


class _BreakableTarget:
    """A target that holds nothing, and fails when it is told to."""

    profiles: frozenset[str] | None = None
    keeps_files = False
    broken = False
    changed = 0

    def attach(self, table: Any) -> None:
        """It takes anything."""

    def remembered_version(self) -> None:
        """It remembers nothing."""

    def close(self) -> None:
        """Nothing is open."""

    def prepare(self, _change: Change) -> Prepared:
        return self

    def commit(self) -> Any:
        if self.broken:
            raise SparserlError("broken on purpose")
        return self.close

    def finish(self) -> None:
        """Nothing is kept."""

    def discard(self) -> None:
        """Nothing was written."""


def _change(versions: Sequence[Weights], end: int, base: int = 0, fresh: bool = False) -> Change:
    """What leads to a version: patches from an earlier one, or all weights."""
    patches = [diff(old, new) for old, new in zip(versions[base:end], versions[base + 1 :], strict=False)]
    all_of_it = versions[end] if fresh else None
    return Change("0123456789abcdef", _BEGUN, end, digest(versions[end]), [] if fresh else patches, all_of_it)


_BEGUN = time.time()
