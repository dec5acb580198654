"""What a publish or a commit did."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class SyncReport:
    """One version, published, staged or committed: how much changed, its bytes, and the seconds of each stage.

    >>> import numpy as np, sparserl, tempfile
    >>> weights = {"w": np.zeros(1000, np.float32)}
    >>> report = sparserl.Publisher(f"file://{tempfile.mkdtemp()}", weights).publish()
    >>> (report.version, report.kind, report.elements, report.dense_bytes)
    (0, 'anchor', 1000, 4000)

    Attributes:
        run: The id of the run.
        version: The version.
        digest: The digest of its weights, in hexadecimal.
        kind: What was sent: `patch`, `anchor`, or `none` where nothing had to be.
        changed: How many elements changed.
        elements: How many elements the weights have.
        bytes: How many bytes were written, sent or fetched.
        dense_bytes: How many bytes all weights have.
        seconds: How long each stage took.
        notes: What went wrong beside it, and will be tried again.
        messages: How many broadcasts it took, over a process group.
        behind: How many versions the targets were behind the newest one; None for a publish, or where they held none.
        also: By their URLs, the reports of the quantized runs that were published with it.
        profile: What a patch in a store is encoded in and, where it is published, why: `ctx (smallest)`.
    """

    run: str
    version: int
    digest: str
    kind: str
    changed: int
    elements: int
    bytes: int
    dense_bytes: int
    seconds: dict[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    messages: int = 0
    behind: int | None = None
    also: dict[str, SyncReport] = field(default_factory=dict)
    profile: str = ""

    @property
    def density(self) -> float:
        """The share of the elements that changed."""
        return self.changed / max(1, self.elements)

    @property
    def summary(self) -> str:
        """The version, its profile, how much changed, its bytes, and the seconds of each stage, in a line."""
        stages = ", ".join(f"{stage} {seconds * 1e3:.1f} ms" for stage, seconds in self.seconds.items())
        share = f"{self.changed:,} changed ({self.density:.3%})"
        kind = f"{self.kind} in {self.profile}" if self.profile else self.kind
        return f"version {self.version}: {kind}, {share}, {self.bytes:,} bytes of {self.dense_bytes:,}; {stages}"

    def __str__(self) -> str:
        return "\n".join((self.summary, *(f"note: {note}" for note in self.notes)))


class Watch:
    """Adds up seconds by stage; those of a stage inside another one count only there."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._inside = [0.0]  # of stages that began and ended inside each stage that is open

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        self.seconds.setdefault(name, 0.0)  # stages are listed in the order in which they begin
        self._inside.append(0.0)
        try:
            yield
        finally:
            seconds = time.perf_counter() - started
            self.seconds[name] = self.seconds.get(name, 0.0) + seconds - self._inside.pop()
            self._inside[-1] += seconds

    def timed(self, name: str, items: Iterator[T]) -> Iterator[T]:
        """The items of an iterator; what it takes to make them counts as a stage."""
        while True:
            with self.stage(name):
                try:
                    item = next(items)
                except StopIteration:
                    return
            yield item
