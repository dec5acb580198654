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

    Attributes:
        run: The id of the run.
        created: When the run began, in seconds since 1970.
        version: The version.
        digest: The digest of its weights.
        patches: What leads from the version that the target has to this one, in order; none where `fresh` is given.
        fresh: All weights by name, which have the digest: a `sparserl.Bits` each, whatever the dtype, or tensors on
            GPUs for a target that says that its own lie there (`weights_on_gpu`). None where there are patches.
        files: Config, tokenizer and the like, for a target that keeps them; None if they are those of the version that
            it has.
        owns_fresh: Whether the target may keep `fresh`, and write to it when it commits.
        fresh_parts: What a target that has parts of the weights, and says which (`places`), gets instead of `fresh`.
    """

    run: str
    created: float
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
    """How many elements it changes, for the report."""

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
