"""The protocol of a target: it prepares a change and commits it later, so that several targets change together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from ..patch import Patch
from ..weights.digest import Digest
from ..weights.memory import Weights
from ..weights.shards import Shards
from ..weights.table import TensorTable

Undo = Callable[[], None]


@dataclass(frozen=True)
class Change:
    """A new version for a target: patches from the version that it has, or all weights (`fresh`).

    `files` are config, tokenizer and the like, for targets that keep them; None if they are those of the version that
    the target has. `owns_fresh` says whether the target may write to `fresh` when it commits. A target that has parts
    of the weights, and says which (`places`), gets `fresh_parts` instead of `fresh`.
    """

    run: str
    created: float  # when the run began
    version: int
    digest: Digest
    patches: Sequence[Patch]
    fresh: Weights | None = None
    files: Mapping[str, bytes] | None = None
    owns_fresh: bool = False
    fresh_parts: Shards | None = None


class Prepared(Protocol):
    """A change that is ready to be committed, and not visible yet."""

    changed: int

    def commit(self) -> Undo:
        """Make the change visible. Returns a function that undoes it. If this raises, nothing is visible."""
        ...

    def finish(self) -> None:
        """All targets have committed: release what undoing would need.

        It does not raise on errors of the disk, since the version is committed. The next change, or the next process
        that attaches, cleans up the rest.
        """
        ...

    def discard(self) -> None:
        """Drop the change."""
        ...


class Target(Protocol):
    """A place where weights live."""

    profiles: frozenset[str] | None
    """Profiles that it can apply; None for all. `ctx` needs all old bits, `ulp` those that change."""

    keeps_files: bool
    """Whether it keeps the files that are published with the weights."""

    def attach(self, table: TensorTable) -> Weights | None:
        """Accept the tensors of a run.

        Returns:
            The weights that it has; None if it has none.

        Raises:
            TensorMismatch: it has other tensors.
            CheckpointError: it cannot store such tensors.
        """
        ...

    def remembered_version(self) -> tuple[str, float, int] | None:
        """The run, when it began, and the version that it remembers across restarts; None if it remembers none."""
        ...

    def close(self) -> None:
        """Release open files."""
        ...

    def prepare(self, change: Change) -> Prepared:
        """Prepare a change while the current weights are in use."""
        ...
