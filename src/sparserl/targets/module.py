"""Live weights in memory: a torch module's parameters, or any tensors. Changed in place, in O(changed)."""

from __future__ import annotations

from typing import Any

from ..digest import Digest
from ..errors import UnsupportedTensor
from ..memory import Weights, memories, require_like, require_writable
from ..patch import Landing, diff, squash, stage_all
from ..table import TensorTable
from .target import Change, Undo


class ModuleTarget:
    """Weights that an engine is using. They are read while it serves, and written only inside a commit."""

    profiles: frozenset[str] | None = None

    def __init__(self, weights: Weights, threads: int | None = None) -> None:
        self._weights, self._threads = weights, threads

    def attach(self, table: TensorTable) -> Weights:
        memory = memories(self._weights)
        require_like(table, memory, "the run", "the target")
        require_writable(memory.items())
        return self._weights

    def held(self) -> None:
        """Memory does not outlive its process."""

    def prepare(self, change: Change) -> PreparedModule:
        """Decode everything, and see that it leads to the version's digest; nothing is written."""
        if change.fresh is not None:
            patch = diff(self._weights, change.fresh, profile="raw", threads=self._threads)
        elif len(change.patches) == 1:
            patch = change.patches[0]
        else:
            first, *others = change.patches
            patch = squash(first, *others, base=self._weights, digest=first.base, profile="raw", threads=self._threads)
        return PreparedModule(stage_all(patch, self._weights, digest=patch.base, threads=self._threads), change.digest)


class PreparedModule:
    """Changes that are staged on live weights."""

    def __init__(self, landing: Landing, digest: Digest) -> None:
        if landing.result != digest:
            raise AssertionError(f"staged {landing.result} for {digest}")
        self._landing = landing
        self.changed = landing.changed

    def commit(self) -> Undo:
        return self._landing.commit()

    def finish(self) -> None:
        """Nothing is kept."""

    def discard(self) -> None:
        """Nothing was written."""


def module(module: Any, threads: int | None = None) -> ModuleTarget:
    """The live parameters and persistent buffers of a torch module, or a mapping from names to tensors or arrays."""
    if callable(getattr(module, "state_dict", None)):
        weights = {name: tensor.detach() for name, tensor in module.state_dict(keep_vars=True).items()}
        return ModuleTarget(weights, threads)
    if not hasattr(module, "keys"):
        raise UnsupportedTensor(f"expected a torch module or a mapping to tensors, got {type(module).__name__}")
    return ModuleTarget(module, threads)
