"""What a mutant is: one named way to be wrong, and the tests that must notice it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Tests:
    """A test file (under tests), and which of its tests, as pytest's `-k` takes them."""

    file: str
    words: str = ""

    @property
    def keywords(self) -> str:
        stem = Path(self.file).stem
        return f"({stem} and ({self.words}))" if self.words else stem


@dataclass(frozen=True)
class Mutant:
    """In `file` (under src/sparserl), the code `old` becomes `new`, and the tests must notice.

    `old` stands exactly once in the file, whatever its white space, line breaks and comments are. A mutant of code that
    only some processors run names the feature they have, as /proc/cpuinfo does; elsewhere it is left out.
    """

    name: str
    file: str
    old: str
    new: str
    tests: Tests
    feature: str = ""

    @property
    def runs_here(self) -> bool:
        info = Path("/proc/cpuinfo")
        return not self.feature or (info.exists() and self.feature in info.read_text().split())

    @property
    def compiled(self) -> bool:
        return self.file.startswith("kernels/")
