"""Live weights in memory: a torch module's parameters, or any tensors. Changed in place, in O(changed)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from .. import sources
from ..errors import ChecksumMismatch, UnsupportedTensor, WrongBase
from ..memory import Weights, memories, require_like, require_writable
from ..patch import Landing, diff, squash, stage_all
from ..table import TensorTable
from .target import Change, Undo


class ModuleTarget:
    """Weights that an engine is using. They are read while it serves, and written only inside a commit.

    `weights` is asked for whenever they are needed: a module's parameters may have been replaced meanwhile.
    """

    profiles: frozenset[str] | None = None
    keeps_files = False

    def __init__(self, weights: Weights | Callable[[], Weights], threads: int | None = None) -> None:
        self._weights, self._threads = weights, threads

    def weights(self) -> Weights:
        """The tensors as they are now."""
        return self._weights() if callable(self._weights) else self._weights

    def attach(self, table: TensorTable) -> Weights:
        weights = self.weights()
        memory = memories(weights)
        require_like(table, memory, "the run", "the target")
        require_writable(memory.items())
        return weights

    def close(self) -> None:
        """Nothing is held open."""

    def held(self) -> None:
        """Memory does not outlive its process."""

    def prepare(self, change: Change) -> PreparedModule:
        """Decode everything, and see that it leads to the version's digest; nothing is written."""
        weights = self.weights()
        if change.fresh is not None:
            patch = diff(weights, change.fresh, profile="raw", threads=self._threads)
        elif len(change.patches) == 1:
            patch = change.patches[0]
        else:
            first, *others = change.patches
            patch = squash(first, *others, base=weights, digest=first.base, profile="raw", threads=self._threads)
        if patch.result != change.digest:
            raise ChecksumMismatch(f"what was fetched leads to {patch.result}, the version is {change.digest}")
        landing = stage_all(patch, weights, digest=patch.base, threads=self._threads)
        return PreparedModule(self, landing, _addresses(weights))


class PreparedModule:
    """Changes that are staged on live weights."""

    def __init__(self, target: ModuleTarget, landing: Landing, addresses: dict[str, int]) -> None:
        self._target, self._landing, self._addresses = target, landing, addresses
        self.changed = landing.changed

    def commit(self) -> Undo:
        if _addresses(self._target.weights()) != self._addresses:
            raise WrongBase("some tensors of the target lie elsewhere than when the patch was staged on them")
        return self._landing.commit()

    def finish(self) -> None:
        """Nothing is kept."""

    def discard(self) -> None:
        """Nothing was written."""


def _addresses(weights: Weights) -> dict[str, int]:
    return {name: memory.address for name, memory in memories(weights).items()}


def module(module: Any, threads: int | None = None) -> ModuleTarget:
    """The live parameters and persistent buffers of a torch module, or a mapping from names to tensors or arrays."""
    if callable(getattr(module, "state_dict", None)):
        return ModuleTarget(sources.module(module).weights, threads)
    if not isinstance(module, Mapping):
        raise UnsupportedTensor(f"expected a torch module or a mapping to tensors, got {type(module).__name__}")
    return ModuleTarget(module, threads)
