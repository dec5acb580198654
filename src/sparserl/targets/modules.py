"""Weights in memory as a target: the parameters of a torch module, or any tensors, changed in place."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, cast

from .. import sources
from ..errors import ChecksumMismatch, TensorMismatch, UnsupportedTensor, WrongBase
from ..patch import Application, Replacement, diff, squash, stage_all
from ..patch.warmup import warm_up
from ..sources.renaming import Renaming
from ..sources.tying import configs_of, tied_names
from ..weights.digest import Digest
from ..weights.local import LocalWeights
from ..weights.memory import Weights, tied_groups
from ..weights.table import TensorTable
from ..weights.tensors import memories
from .target import Change, Undo


class ModuleTarget:
    """Weights that are in use. They are written only during a commit. Made by `module`.

    Args:
        weights: the tensors by name, or a function that returns them; it is called whenever they are needed, as the
            parameters of a module may be replaced.
        threads: how many threads decode and write; by default as many as there are cores, up to 16.
        lock: held while weights are written or undone, so that readers under it see one version or the other. A
            subscriber takes it on a thread of its own, so that the caller of `commit` must not hold it.
        configs: those of a transformers model and of its language model, which say whether the output head is the
            embedding.
    """

    profiles: frozenset[str] | None = None
    keeps_files = False
    exchanges_fresh = True  # whether a commit may write to the fresh weights of a change; derived classes say so anew

    def __init__(
        self,
        weights: Weights | Callable[[], Weights],
        threads: int | None = None,
        lock: AbstractContextManager[Any] | None = None,
        configs: Sequence[Any] = (),
    ) -> None:
        self._weights = weights
        self._configs = configs
        self._threads = threads
        self.lock = nullcontext() if lock is None else lock
        self._local: LocalWeights | None = None  # the weights as they were last looked at, so that they are known
        self._tied_names: frozenset[str] = frozenset()  # tensors that the run has under another name only
        self._copies: dict[str, str] = {}  # those in memory of their own, and what the run calls them

    def weights(self) -> Weights:
        """The tensors as they are now, without those that the run has under another name."""
        weights = self._all_weights()
        if others := self._tied_names | self._copies.keys():
            weights = {name: tensor for name, tensor in weights.items() if name not in others}
        return weights

    def _all_weights(self) -> Weights:
        return self._weights() if callable(self._weights) else self._weights

    def weights_on_gpu(self) -> Weights | None:
        """The tensors as they are now, if they lie on GPUs."""
        weights = self.weights()
        return weights if LocalWeights.of(weights).gpu_streams else None

    @property
    def local_weights(self) -> LocalWeights | None:
        """The tensors as they were last looked at; None before a run is attached."""
        return self._local

    def attach(self, table: TensorTable) -> Weights | None:
        is_new = self._local is None
        self._tied_names = frozenset()
        self._copies = {}
        weights = all_weights = self.weights()
        if len(weights) > len(table):
            self._tied_names = _tied_names(weights, table)
            self._copies = _copies(self.weights(), table, self._configs)
            weights = self.weights()
        self._local = LocalWeights.of(weights, table, "the run", "the target")
        self._local.require_writable()
        if is_new:
            warm_up(self._local)
        if self._copies:
            from .pieces import has_bits

            if not all(has_bits(all_weights[name], weights[same]) for name, same in self._copies.items()):
                return None  # some have other bits than any version
        return weights

    def _require_tied(self, table: TensorTable) -> None:
        """Refuse tensors that the run does not have, and that share no memory any longer with one that it has."""
        if not self._tied_names:
            return
        if untied := self._tied_names - _tied_names(self._all_weights(), table):
            raise TensorMismatch(
                f"{min(untied)!r} was tied to a tensor of the run when it was attached, and is no longer: it would "
                "keep its old bits; tie it again, or publish it"
            )

    def renamed(self, renaming: Renaming) -> ModuleTarget:
        """The same target, whose tensors have other names."""
        target = copy.copy(self)
        target._weights = lambda: cast("Weights", renaming.rename(self.weights()))  # noqa: SLF001  # whole, not shards
        return target

    def close(self) -> None:
        """Nothing is held open."""
        self._local = None

    def remembered_version(self) -> None:
        """Memory does not outlive its process."""

    def written(self) -> None:
        """Called under the lock after weights were written or undone, for subclasses that derive data from them."""
        if self._copies:
            import torch

            weights = self._all_weights()
            for name, same in self._copies.items():
                weights[name].copy_(weights[same])
                if weights[name].is_cuda:
                    torch.cuda.synchronize(weights[name].device)  # the model may run in another stream

    def prepare(self, change: Change) -> PreparedModule:
        """Decode everything, and check that it leads to the digest of the version. Nothing is written."""
        weights = self.weights()
        self._local = LocalWeights.of(weights)
        self._require_tied(self._local.table)
        if (replacement := _replacement(self._local, change)) is not None:
            return PreparedModule(self, replacement, self._local)
        if change.fresh is not None:
            patch = diff(weights, change.fresh, profile="raw", threads=self._threads)
        elif len(change.patches) == 1:
            patch = change.patches[0]
        elif (application := _joined_on_gpu(self._local, weights, change, self._threads)) is not None:
            return PreparedModule(self, application, self._local)
        else:
            first, *others = change.patches
            patch = squash(first, *others, base=weights, digest=first.base, profile="raw", threads=self._threads)
        _require_digest(patch.result, change)
        application = stage_all(patch.contents, self._local, digest=patch.base, threads=self._threads)
        return PreparedModule(self, application, self._local)


class PreparedModule:
    """A change that is staged on weights in memory."""

    def __init__(self, target: ModuleTarget, application: Application | Replacement, local: LocalWeights) -> None:
        self._target = target
        self.application = application
        self._local = local
        self.changed = application.changed

    def commit(self) -> Undo:
        """Write the changes under the lock."""
        with self._target.lock:
            if not LocalWeights.of(self._target.weights()).lies_where(self._local):
                raise WrongBase("some tensors of the target have moved since the patch was staged; stage it again")
            undo_changes = self.application.commit()

            def undo() -> None:
                undo_changes()
                self._target.written()

            try:
                self._target.written()
            except BaseException:
                undo()
                raise

        def undo_locked() -> None:
            with self._target.lock:
                undo()

        return undo_locked

    def finish(self) -> None:
        """Nothing is kept."""

    def discard(self) -> None:
        """Nothing was written."""


def _tied_names(weights: Weights, table: TensorTable) -> frozenset[str]:
    """Tensors that the run does not have, and that are the same memory as one that it has."""
    groups = [group for group in tied_groups(memories(weights)) if not table.index.keys().isdisjoint(group)]
    return frozenset(name for group in groups for name in group if name not in table.index)


def _copies(weights: Weights, table: TensorTable, configs: Sequence[Any]) -> dict[str, str]:
    """Output heads in memory of their own, of which the configs say that they are the embeddings that the run has."""
    heads = tied_names(configs, table.index)
    forms = {name: (tensor.dtype, tensor.shape) for name, tensor in weights.items()} if heads else {}
    return {
        name: same
        for name, same in heads.items()
        if name in forms and name not in table.index and forms[name] == forms.get(same)
    }


def _require_digest(result: Digest, change: Change) -> None:
    if result != change.digest:
        raise ChecksumMismatch(f"the patches lead to digest {result}, but the version has {change.digest}")


def _joined_on_gpu(local: LocalWeights, weights: Weights, change: Change, threads: int | None) -> Application | None:
    """Several patches that follow one another, staged together: they are applied to a copy beside the weights.

    None where weights are not on GPUs, or there is no room for the copy.
    """
    if not local.gpu_streams:
        return None
    import torch

    if not all(isinstance(tensor, torch.Tensor) for tensor in weights.values()):
        return None
    base = change.patches[0].base
    _require_digest(change.patches[-1].result, change)
    try:
        clones = {name: tensor.detach().clone() for name, tensor in weights.items()}
        copy = LocalWeights.of(clones)  # kept, so that its tensors are known
        for patch in change.patches:
            patch.apply(clones, digest=patch.base, threads=threads)
        application = None
        if local.has_kernels:
            from ..patch.gpu_difference import stage_difference

            application = stage_difference(local, copy, base, change.digest)
        if application is None:
            joined = diff(weights, clones, profile="raw", base_digest=base, threads=threads)
            application = stage_all(joined.contents, weights, digest=base, threads=threads)
    except torch.cuda.OutOfMemoryError:
        return None
    return application


def _replacement(local: LocalWeights, change: Change) -> Replacement | None:
    """All weights of a change, which are known to have its digest, where most of them differ from those in memory."""
    if change.fresh is None:
        return None
    fresh = LocalWeights.of(change.fresh, local.table, "the target", "the version")
    return Replacement.of(local, fresh, exchange=change.owns_fresh)


def module(module: Any, threads: int | None = None, lock: AbstractContextManager[Any] | None = None) -> ModuleTarget:
    """The parameters and persistent buffers of a torch module, or a mapping from names to tensors, changed in place.

    A run may have a tied tensor under one of its names. An output head in memory of its own follows such a run if the
    config of the model says `tie_word_embeddings`: it becomes a copy of the embedding at every commit.

    Args:
        module: a torch module, or a mapping from names to torch tensors or NumPy arrays.
        threads: how many threads decode and write; by default as many as there are cores, up to 16.
        lock: a `threading.Lock`, say, under which the model is used; a commit takes it, staging does not. For several
            targets under one lock, give it to the subscriber instead: `before=lock.acquire, after=lock.release`.

    Returns:
        A target for a `Subscriber`.

    Raises:
        UnsupportedTensor: the object is neither a torch module nor a mapping.

    >>> lock = threading.Lock()                                                                    # doctest: +SKIP
    >>> target = sparserl.targets.module(model, lock=lock)                                         # doctest: +SKIP
    >>> subscriber = sparserl.Subscriber(url, target)                                              # doctest: +SKIP
    """
    if callable(getattr(module, "state_dict", None)):
        return ModuleTarget(sources.module(module).all_weights, threads, lock, configs_of(module))
    if not isinstance(module, Mapping):
        hint = f"; for a checkpoint on disk, targets.folder({str(module)!r})" if isinstance(module, str | Path) else ""
        raise UnsupportedTensor(f"expected a torch module or a mapping to tensors, got {type(module).__name__}{hint}")
    return ModuleTarget(module, threads, lock)


def renamed(target: Any, rules: Mapping[str, str]) -> ModuleTarget:
    """A target in memory whose tensors have other names than those of the run.

    Args:
        target: a torch module, a mapping from names to tensors, or a target of `module` or `lora`. Folders have the
            names of their run, and engines load names of checkpoints: rename the source for these.
        rules: from the names in the target to those in the run, as for `sparserl.sources.renamed`.

    Returns:
        A target for a `Subscriber`.

    Raises:
        TensorMismatch: a rule is none. The subscriber raises it where a rule matches nothing, or where two tensors that
            are not the same memory get one name.
        UnsupportedTensor: the target is not in memory.

    >>> target = sparserl.targets.renamed(model, {"language_model.model.": "model.language_model."})  # doctest: +SKIP
    """
    if callable(getattr(target, "prepare", None)):
        if not isinstance(target, ModuleTarget):
            raise UnsupportedTensor(f"the tensors of a {type(target).__name__} cannot be renamed; rename the source")
        return target.renamed(Renaming(rules))
    return module(target).renamed(Renaming(rules))
