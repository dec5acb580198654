"""What a subscriber needs of the place where weights live: two phases, so that several targets change together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from ..patch import Patch
from ..weights.digest import Digest
from ..weights.memory import Weights
from ..weights.table import TensorTable

Undo = Callable[[], None]


@dataclass(frozen=True)
class Change:
    """A new version for a target: patches from the version that it holds, or all weights anew (`fresh`).

    files: config, tokenizer and the like, for targets that keep them; they come with fresh weights.
    """

    run: str
    created: float  # when the run began
    version: int
    digest: Digest
    patches: Sequence[Patch]
    fresh: Weights | None = None
    files: Mapping[str, bytes] | None = None


class Prepared(Protocol):
    """A change that is ready: nothing of it can be seen yet."""

    changed: int

    def commit(self) -> Undo:
        """Make it seen, and return what takes it back. If it raises, nothing can be seen of it."""
        ...

    def finish(self) -> None:
        """All targets have committed: what was kept for taking it back may go.

        It raises nothing because of trouble with the disk: the version is committed, and what is left to be tidied up
        is left to the next change, or to whoever attaches next.
        """
        ...

    def discard(self) -> None:
        """It will not be committed."""
        ...


class Target(Protocol):
    """A place where weights live."""

    profiles: frozenset[str] | None
    """Profiles that it can take; None for all. `ctx` needs all old bits, `ulp` those that change."""

    keeps_files: bool
    """Whether it wants the files that travel with the weights."""

    def attach(self, table: TensorTable) -> Weights | None:
        """Accept the tensors of a run, or raise `TensorMismatch`; `CheckpointError` where it can hold no such tensors.

        Returns the bits it holds; None if it holds none.
        """
        ...

    def held(self) -> tuple[str, float, int] | None:
        """Run, its beginning and version that it remembers to hold, also over a restart; None if it remembers none."""
        ...

    def close(self) -> None:
        """Let go of what is held open."""
        ...

    def prepare(self, change: Change) -> Prepared:
        """Get ready for a change, while the weights it has are in use."""
        ...
