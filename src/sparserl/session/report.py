"""What a publish or a commit did."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass(frozen=True)
class SyncReport:
    """One version, published or committed: how much changed, what it took in bytes, and seconds per stage."""

    run: str
    version: int
    digest: str
    kind: str  # "patch", "anchor", or "none" where nothing was to be done
    changed: int
    elements: int
    bytes: int
    dense_bytes: int
    seconds: dict[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()  # what went wrong beside it, and will be tried again
    messages: int = 0  # broadcasts that it took, over a process group
    behind: int | None = None  # of a commit: how many versions of the run the targets were behind the newest one

    @property
    def density(self) -> float:
        return self.changed / max(1, self.elements)

    def __str__(self) -> str:
        took = ", ".join(f"{stage} {seconds * 1e3:.1f} ms" for stage, seconds in self.seconds.items())
        share = f"{self.changed:,} changed ({self.density:.3%})"
        return f"version {self.version}: {self.kind}, {share}, {self.bytes:,} bytes of {self.dense_bytes:,}; {took}"


class Watch:
    """Adds up seconds by stage; those of a stage inside another one count only there."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._inside = [0.0]

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        self._inside.append(0.0)
        try:
            yield
        finally:
            took = time.perf_counter() - started
            self.seconds[name] = self.seconds.get(name, 0.0) + took - self._inside.pop()
            self._inside[-1] += took
