"""Observing: statistics of what a publisher found to have changed, from its patches and its baseline."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from ..errors import SessionError
from ..patch import Patch
from ..sources.master_sample import MasterSample, MasterSampler, MasterUpdate
from ..weights.memory import Weights
from ..weights.shards import Shards
from .baseline import Baseline
from .logs import log
from .report import Watch


@runtime_checkable
class PatchObserver(Protocol):
    """What looks at patches before the baseline goes on, such as a `sparserl.record.Recorder`."""

    def observe_patch(
        self, patch: Patch, old: Weights | Shards | None, *, version: int, threads: int | None = None
    ) -> Any:
        """Look at a patch that was committed, and at the version it applies to; None where its bits are not kept."""
        ...


@runtime_checkable
class MasterObserver(Protocol):
    """An observer that looks at a sample of masters and gradients, too."""

    def master_sampler(self) -> MasterSampler | None:
        """What takes the samples; None where none are to be taken."""
        ...

    def observe_patch(
        self,
        patch: Patch,
        old: Weights | Shards | None,
        *,
        version: int,
        threads: int | None = None,
        masters: MasterUpdate | None = None,
    ) -> Any:
        """As a `PatchObserver` does."""
        ...


def require_observer(name: str, value: Any) -> None:
    """Refuse what cannot observe patches."""
    if isinstance(value, type) or not isinstance(value, PatchObserver):
        raise SessionError(f"{name} is {value!r}; it must be a sparserl.record.Recorder")


class Observing:
    """An observer that a publish does not depend on: what it raises is logged, once.

    Args:
        observer: The observer; None for none.
        source: What is published.

    Raises:
        SessionError: The observer is none.
    """

    def __init__(self, observer: PatchObserver | None, source: Any) -> None:
        if observer is not None:
            require_observer("observe", observer)
        self._observer = observer
        self._source = source
        self._is_logged = False
        self._captured_sample: MasterSample | None = None
        self._committed_sample: MasterSample | None = None
        self._sampler = observer.master_sampler() if isinstance(observer, MasterObserver) else None
        if self._sampler is not None:
            self._sampler.watch(source)

    @property
    def is_active(self) -> bool:
        """Whether there is an observer."""
        return self._observer is not None

    def captured(self, weights: Weights | Shards, watch: Watch) -> Weights | Shards:
        """Sample what the trainer has beside weights that are being captured, before it goes on; returns these."""
        self._captured_sample = None
        if self._sampler is not None:
            try:
                with watch.stage("observe"):
                    self._captured_sample = self._sampler.take(self._source, weights)
            except Exception:  # noqa: BLE001  # whatever it is, a version does not depend on it
                self._log("masters and gradients were not sampled")
        return weights

    def begun(self) -> None:
        """What was captured is committed, and is no patch to the version before."""
        self._committed_sample = self._captured_sample

    def committed(self, version: int, patch: Patch, baseline: Baseline, threads: int | None, watch: Watch) -> None:
        """What was captured is committed, and the baseline is still the one before."""
        sample = self._captured_sample
        update = None if sample is None else MasterUpdate(self._committed_sample, sample)
        self._committed_sample = sample
        if self._observer is None:
            return
        try:
            with watch.stage("observe"):
                options = {} if update is None else {"masters": update}
                self._observer.observe_patch(patch, baseline.weights, version=version, threads=threads, **options)
        except Exception:  # noqa: BLE001  # whatever it is, a version does not depend on it
            self._log(f"version {version} was not observed")

    def _log(self, trouble: str) -> None:
        if not self._is_logged:
            self._is_logged = True
            log.exception("%s; later failures are not logged", trouble)
