"""What a session relies on in a source."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ..errors import StoreError
from ..session import Publisher, Subscriber
from ..sources import Source
from ..transport.stores.folder import FolderStore
from ..weights.digest import digest
from ..weights.shards import Shards
from ..weights.table import TensorTable
from ..weights.tensors import tensor_table
from .weights import blank


class SourceConformance:
    """Every source passes this. Where it has parts of the weights, they must be all of them: one process is enough.

    A subclass has a fixture `source`, and a method `step` that changes its weights as the trainer would.
    """

    @pytest.fixture
    def source(self) -> Source:
        """To be overridden."""
        raise NotImplementedError("a subclass of SourceConformance has a fixture `source`")

    def step(self, source: Any) -> None:
        """To be overridden: change some of the weights."""
        raise NotImplementedError("a subclass of SourceConformance has a method `step`")

    def test_its_tensors_stay_the_same(self, source: Source) -> None:
        """Names, dtypes and shapes are those of the first time, whatever was trained."""
        first = _table(source)
        assert len(first) > 0
        self.step(source)
        assert _table(source) == first

    def test_asking_changes_nothing(self, source: Source) -> None:
        """The same bits as often as they are asked for."""
        assert len({digest(source.weights()).hex for _ in range(3)}) == 1

    def test_steps_are_seen(self, source: Source) -> None:
        """After a step there are other bits."""
        digests = [digest(source.weights()).hex]
        for _ in range(3):
            self.step(source)
            digests.append(digest(source.weights()).hex)
        assert len(set(digests)) == 4

    @pytest.mark.parametrize("baseline", ["host", "none"])
    def test_versions_arrive_bit_for_bit(self, source: Source, baseline: str, tmp_path: Path) -> None:
        """With a copy of the last version to compare with; and without one, if the source tracks changes itself."""
        if baseline == "none" and not hasattr(source, "committed"):
            pytest.skip("it does not track changes")
        rollout = blank(_table(source))
        with (
            Publisher(FolderStore(tmp_path), source, baseline=baseline) as publisher,
            Subscriber(FolderStore(tmp_path), rollout) as subscriber,
        ):
            for version in range(4):
                if version:
                    self.step(source)
                report = publisher.publish()
                assert (report.kind, report.changed > 0) == ("patch" if version else "anchor", True)
                subscriber.sync()
                assert subscriber.version == version
                assert digest(rollout) == digest(source.weights())

    def test_a_failed_publish_loses_nothing(self, source: Source, tmp_path: Path) -> None:
        """What it would have sent goes with the next one."""
        rollout = blank(_table(source))
        store = _BreakableStore(tmp_path)
        with Publisher(store, source) as publisher, Subscriber(FolderStore(tmp_path), rollout) as subscriber:
            publisher.publish()
            self.step(source)
            store.broken = True
            with pytest.raises(StoreError, match="broken on purpose"):
                publisher.publish()
            store.broken = False
            self.step(source)
            publisher.publish()
            subscriber.sync()
            assert subscriber.version == 1
            assert digest(rollout) == digest(source.weights())


class _BreakableStore(FolderStore):
    """A folder that cannot be written to for a while."""

    broken = False

    def put(self, name: str, data: bytes | memoryview) -> None:
        if self.broken:
            raise StoreError("broken on purpose")
        super().put(name, data)


def _table(source: Source) -> TensorTable:
    weights = source.weights()
    return weights.table if isinstance(weights, Shards) else tensor_table(weights)
