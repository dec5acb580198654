"""Notices a mapping of tensors that was made once, and does not follow the model that it was made of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .logs import log
from .report import SyncReport

_EMPTY_PUBLISHES = 2  # after which it is said
_ADVICE = (
    "nothing has changed in %d publishes, and nobody has written to the tensors of the mapping: a mapping of copies, "
    "such as {name: tensor.to(torch.bfloat16)}, does not follow the model. Pass the model itself, "
    "sparserl.sources.module(model, cast=torch.bfloat16), or a function that returns the mapping"
)


class StaleSourceCheck:
    """Warns once, after publishes without a change of a mapping that nobody has written to."""

    def __init__(self, source: Any, place: str) -> None:
        self._source = source
        self._place = place
        self._last: list[tuple[int, int]] | None = None
        self._empty = 0

    def published(self, report: SyncReport) -> None:
        """One more version was published."""
        if not isinstance(self._source, Mapping) or self._empty == _EMPTY_PUBLISHES:
            return
        writes = [_writes(tensor) for tensor in self._source.values()]
        is_empty = report.kind == "patch" and not report.changed and writes == self._last
        self._last = writes
        self._empty = self._empty + 1 if is_empty else 0
        if self._empty == _EMPTY_PUBLISHES:
            log.warning("%s: " + _ADVICE, self._place, self._empty)


def _writes(tensor: Any) -> tuple[int, int]:
    """Where a tensor is in memory, and how often torch has counted a write to it."""
    address = tensor.data_ptr() if hasattr(tensor, "data_ptr") else id(tensor)
    return address, getattr(tensor, "_version", 0)
