"""Notices sources that cannot be meant: copies that do not follow the model, and other weights after a restart."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .logs import log
from .report import SyncReport

_EMPTY_PUBLISHES = 2  # after which it is said
_UNLIKELY_DENSITY = 0.5  # of changes between two versions of one run
_OTHER_MODEL = (
    "%.1f%% of the elements have changed since version %d, the last one before the restart: is this the same model, "
    "and has the trainer loaded its last checkpoint?"
)
_ADVICE = (
    "nothing has changed in %d publishes, and nobody has written to the tensors of the mapping: a mapping of copies, "
    "such as {name: tensor.to(torch.bfloat16)}, does not follow the model. Pass the model itself, "
    "sparserl.sources.module(model, cast=torch.bfloat16), or a function that returns the mapping"
)


class SourceCheck:
    """Warns of what was published, once: of copies that nobody writes to, and of weights that hardly continue a run."""

    def __init__(self, source: Any, place: str) -> None:
        self._source = source
        self._place = place
        self._last: list[tuple[int, int]] | None = None
        self._empty = 0
        self._is_resumed = False

    def resume(self) -> None:
        """The next version will be the first one after a restart."""
        self._is_resumed = True

    def published(self, report: SyncReport) -> None:
        """One more version was published."""
        if self._is_resumed and report.kind == "patch" and report.density > _UNLIKELY_DENSITY:
            log.warning("%s: " + _OTHER_MODEL, self._place, 100 * report.density, report.version - 1)
        self._is_resumed = False
        self._check_copies(report)

    def _check_copies(self, report: SyncReport) -> None:
        if not isinstance(self._source, Mapping) or self._empty == _EMPTY_PUBLISHES:
            return
        if report.kind != "patch" or report.changed:
            self._empty = 0
            return
        writes = _writes(self._source)
        is_same = writes is not None and writes == self._last
        self._last = writes
        self._empty = self._empty + 1 if is_same else 1
        if self._empty == _EMPTY_PUBLISHES:
            log.warning("%s: " + _ADVICE, self._place, self._empty)


def _writes(tensors: Mapping[str, Any]) -> list[tuple[int, int]] | None:
    """Where tensors are in memory, and how often torch has counted a write to each; None if that cannot be told."""
    try:
        return [
            (tensor.data_ptr() if hasattr(tensor, "data_ptr") else id(tensor), getattr(tensor, "_version", 0))
            for tensor in tensors.values()
        ]
    except Exception:  # noqa: BLE001  # a version that is published does not depend on it
        return None
