"""Observing: statistics of what a publisher found to have changed, from its patches and its baseline."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from ..errors import SessionError
from ..patch import Patch
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


def require_observer(name: str, value: Any) -> None:
    """Refuse what cannot observe patches."""
    if isinstance(value, type) or not isinstance(value, PatchObserver):
        raise SessionError(f"{name} is {value!r}; it must be a sparserl.record.Recorder")


class Observing:
    """An observer that a publish does not depend on: what it raises is logged, once.

    Raises:
        SessionError: The observer is none.
    """

    def __init__(self, observer: PatchObserver | None) -> None:
        if observer is not None:
            require_observer("observe", observer)
        self._observer = observer
        self._is_logged = False

    @property
    def is_active(self) -> bool:
        """Whether there is an observer."""
        return self._observer is not None

    def committed(self, version: int, patch: Patch, baseline: Baseline, threads: int | None, watch: Watch) -> None:
        """A version is committed, and the baseline is still the one before."""
        if self._observer is None:
            return
        try:
            with watch.stage("observe"):
                self._observer.observe_patch(patch, baseline.weights, version=version, threads=threads)
        except Exception:  # noqa: BLE001  # whatever it is, a version does not depend on it
            if not self._is_logged:
                self._is_logged = True
                log.exception("version %d was not observed; later failures are not logged", version)
