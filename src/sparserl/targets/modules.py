"""Live weights in memory: a torch module's parameters, or any tensors. Changed in place, in O(changed)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from .. import sources
from ..errors import ChecksumMismatch, UnsupportedTensor, WrongBase
from ..patch import Application, diff, squash, stage_all
from ..weights.memory import Weights
from ..weights.table import TensorTable
from ..weights.tensors import memories, require_like, require_writable
from .target import Change, Undo


class ModuleTarget:
    """Weights that an engine is using. They are read while it serves, and written only inside a commit.

    weights: asked for whenever they are needed, if it is a function: a module's parameters may have been replaced.
    lock: held while they are written, or written back; whoever reads them under it sees one version or the other. A
        subscriber takes it on a thread of its own, so whoever calls `commit` must not have it.
    """

    profiles: frozenset[str] | None = None
    keeps_files = False

    def __init__(
        self,
        weights: Weights | Callable[[], Weights],
        threads: int | None = None,
        lock: AbstractContextManager[Any] | None = None,
    ) -> None:
        self._weights, self._threads = weights, threads
        self.lock = nullcontext() if lock is None else lock

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

    def written(self) -> None:
        """Called under the lock when the weights were written, or written back: for what is made of them."""

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
        landing = stage_all(patch.contents, weights, digest=patch.base, threads=self._threads)
        return PreparedModule(self, landing, _addresses(weights))


class PreparedModule:
    """Changes that are staged on live weights."""

    def __init__(self, target: ModuleTarget, landing: Application, addresses: dict[str, int]) -> None:
        self._target, self._landing, self._addresses = target, landing, addresses
        self.changed = landing.changed

    def commit(self) -> Undo:
        with self._target.lock:
            if _addresses(self._target.weights()) != self._addresses:
                raise WrongBase("some tensors of the target lie elsewhere than when the patch was staged on them")
            undo = self._landing.commit()

            def back() -> None:
                undo()
                self._target.written()

            try:
                self._target.written()
            except BaseException:
                back()
                raise

        def taken_back() -> None:
            with self._target.lock:
                back()

        return taken_back

    def finish(self) -> None:
        """Nothing is kept."""

    def discard(self) -> None:
        """Nothing was written."""


def _addresses(weights: Weights) -> dict[str, int]:
    return {name: memory.address for name, memory in memories(weights).items()}


def module(module: Any, threads: int | None = None, lock: AbstractContextManager[Any] | None = None) -> ModuleTarget:
    """The live parameters and persistent buffers of a torch module, or a mapping from names to tensors or arrays.

    lock: a `threading.Lock`, say, under which the model is used; commits take it, staging does not. Where several
        targets are to change under one lock, give it to the subscriber: `before=lock.acquire, after=lock.release`.
    """
    if callable(getattr(module, "state_dict", None)):
        return ModuleTarget(sources.module(module).weights, threads, lock)
    if not isinstance(module, Mapping):
        raise UnsupportedTensor(f"expected a torch module or a mapping to tensors, got {type(module).__name__}")
    return ModuleTarget(module, threads, lock)
