"""The tensors of an engine as a target. The engine has checkpoint tensors fused, sharded or transposed.

    pieces (see `find_pieces`) ──► parts: views of the engine's memory in checkpoint coordinates ──► stage ──► commit

An engine of one rank has all of every tensor, and any patch can be applied to it. A rank of several has parts, and
applies the changes in these; parts that several ranks have are written by each of them. Before any of them commits, the
ranks must add up how their parts change the digest, and agree on those that several of them have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from ..errors import SessionError, TensorMismatch, WrongBase
from ..parallel import require_threads
from ..patch import Application, Patch, Replacement, diff, stage_all
from ..patch.sliced import stage_slices
from ..patch.slicing import PROFILES
from ..patch.warmup import warm_up, warm_up_cpu
from ..sources.tying import heads
from ..weights.digest import Digest, element_sums, place_sums
from ..weights.dtypes import Bits, UIntArray
from ..weights.local import LocalWeights
from ..weights.memory import Memory, Weights
from ..weights.region import Region, whole
from ..weights.shards import Part, Place, Shards
from ..weights.table import TensorTable
from ..weights.tensors import memories, memory_of
from .modules import ModuleTarget
from .pieces import Piece, by_tensor, moved_name
from .target import Change, Undo

Members = tuple[int, ...]  # ranks that have a part


class MovedSums(NamedTuple):
    """The element sums of some parts before and after a change; both count from zero where a patch is staged."""

    before: Digest
    after: Digest
    from_zero: bool

    def is_same(self, other: MovedSums) -> bool:
        """Whether both lead to the same bits, as far as can be known: a patch does not say what it does not change."""
        if self.from_zero == other.from_zero:
            return self.after == other.after
        return self.after - self.before == other.after - other.before


class EngineTarget:
    """The parts of a run's weights that one rank of an engine has.

    Args:
        pieces: where the regions of checkpoint tensors are in the engine.
        live: returns the engine's tensors by name. Their memory must not move between staging and commit.
        tied: checkpoint tensors that the engine does not load, since they are the same as others, by name.
        threads: how many threads decode and write; by default as many as there are cores, up to 16.
    """

    profiles: frozenset[str] | None = PROFILES  # None, for all, once it is known that this rank has all of every tensor
    keeps_files = False
    exchanges_fresh = True

    def __init__(
        self,
        pieces: Iterable[Piece],
        live: Callable[[], Mapping[str, Any]],
        tied: Mapping[str, str] | None = None,
        threads: int | None = None,
    ) -> None:
        require_threads(threads)
        self._pieces = by_tensor(pieces)
        self._live = live
        self._tied = tied or {}
        self._threads = threads
        self._local: LocalWeights | None = None
        self.tensors: Mapping[str, Any] = {}  # as they were attached
        self._members: Mapping[Place, Members] = {}
        self._parts_of: Mapping[Members, LocalWeights] | None = None  # the parts, by the ranks that have them

    @property
    def local_weights(self) -> LocalWeights:
        if self._local is None:
            raise SessionError("the engine's tensors were not attached to a run yet")
        return self._local

    @property
    def places(self) -> Sequence[Place] | None:
        """The parts of the weights that it has; None for all of every tensor."""
        return None if self.local_weights.complete else self.local_weights.places

    def weights_on_gpu(self) -> Weights | Shards | None:
        """The engine's tensors by the names of the checkpoint, or the parts that it has, if they lie on GPUs."""
        local = self.local_weights
        if not local.gpu_streams:
            return None
        return _tensors_by_name(local) if local.complete else _shards(local)

    def attach(self, table: TensorTable) -> Any:
        """The parts that this rank has of the tensors of a run."""
        is_new = self._local is None
        self.tensors = dict(self._live())
        self._require_no_other_head(table)
        shards = Shards(table, [part for spec in table.specs for part in self._parts(spec.name)])
        self._local = LocalWeights.of(shards)
        self._parts_of = None
        self.profiles = None if self._local.complete else PROFILES
        self._local.require_writable()
        if is_new:
            warm_up(self._local)
            warm_up_cpu({spec.dtype for spec in table.specs})
        return shards

    def _parts(self, name: str) -> Iterable[Part]:
        pieces = self._pieces.get(name) or self._pieces.get(self._tied.get(name, ""), [])
        return (Part(name, piece.region, piece.view(self.tensors)) for piece in pieces)

    def _require_no_other_head(self, table: TensorTable) -> None:
        """Refuse a run in which a head is the embedding, where the engine has memory of its own for it."""
        for name, same in heads(table.index).items():
            if name in table.index:
                continue
            own = {piece.live for piece in self._pieces.get(name, ())} or {name} & self.tensors.keys()
            memory = {self.tensors[piece.live].data_ptr() for piece in self._pieces.get(same, ())}
            if any(self.tensors[live].data_ptr() not in memory for live in own):
                raise TensorMismatch(
                    f"the engine has memory of its own for {name!r}, of which the run has only {same!r}: load a model "
                    "in which they are tied, as the trainer's are"
                )

    def require_in_place(self, tensors: Mapping[str, Any]) -> None:
        """Raise if the engine's tensors are not where these are any more."""
        if (name := moved_name(tensors, self._live())) is not None:
            raise WrongBase(f"{name!r} has moved since the engine's tensors were attached")

    def sums(self) -> dict[Place, Digest]:
        """The element sums of every part, from its bits as they are now."""
        return place_sums(self.local_weights, self._threads)

    def share(self, members: Mapping[Place, Members]) -> None:
        """Set which ranks have each of the parts; sums are then told apart by them."""
        self._members = members
        self._parts_of = None

    def remembered_version(self) -> None:
        """Memory does not outlive its process."""

    def close(self) -> None:
        """Nothing is held open."""

    def prepare(self, change: Change) -> PreparedEngine:
        """Decode everything; nothing is written."""
        local = self.local_weights
        if local.complete:
            prepared = ModuleTarget(_tensors_by_name(local), self._threads).prepare(change)
            return PreparedEngine(self, [prepared.commit], None, prepared.changed)
        sets = self._sets()
        for weights in sets.values():
            weights.follow_current_streams()
        is_given = change.fresh is not None or change.fresh_parts is not None
        is_patch = not is_given and len(change.patches) == 1
        if is_patch:
            patch = change.patches[0].contents
            staged = stage_slices(patch, local, [*sets.values()], self._threads)
            applications: list[Sequence[Application | Replacement]] = [[application] for application in staged]
        else:
            fresh = self._fresh(change, local)
            exchange = change.owns_fresh or not is_given
            applications = [self._rebuild(fresh, weights, exchange=exchange) for weights in sets.values()]
        sums = {members: self._sums(own, from_zero=is_patch) for members, own in zip(sets, applications, strict=True)}
        every = [application for own in applications for application in own]
        commits = [application.commit for application in every]
        return PreparedEngine(self, commits, sums, sum(application.changed for application in every))

    def _sets(self) -> Mapping[Members, LocalWeights]:
        """The parts, by the ranks that have them."""
        if self._parts_of is None:
            parts_of: dict[Members, list[tuple[Place, Memory]]] = {}
            for part in self.local_weights.parts:
                parts_of.setdefault(self._members.get(part[0], ()), []).append(part)
            table = self.local_weights.table
            self._parts_of = {members: LocalWeights(table, parts) for members, parts in parts_of.items()}
        return self._parts_of

    def _sums(self, applications: Sequence[Application | Replacement], *, from_zero: bool) -> MovedSums:
        """The sums of one set of parts, of which each application has some."""
        before = Digest()
        after = Digest()
        for application in applications:
            if isinstance(application, Replacement):
                base, result = application.sums(self._threads)
                before += base
                after += result
            else:
                before += application.base
                after += application.result
        return MovedSums(before, after, from_zero)

    def _fresh(self, change: Change, local: LocalWeights) -> Weights | Shards:
        """The new weights, or the parts of them that are here: as they were given, or built of copies."""
        fresh = change.fresh if change.fresh_parts is None else change.fresh_parts
        if fresh is not None:
            return fresh
        parts = _shards(local)
        copies = self._patched_on_gpu(parts, change.patches) if local.has_kernels else None
        if copies is None:
            copies = copy_shards(parts)
            self._apply_all(copies, change.patches)
        return copies

    def _patched_on_gpu(self, parts: Shards, patches: Sequence[Patch]) -> Shards | None:
        """Copies of parts beside them, to which patches were applied; None if they do not fit there."""
        import torch

        from ..weights.gpu_zeros import copies_like

        try:
            copies: Shards | None = copies_like(parts)
            if copies is not None:
                self._apply_all(copies, patches)
        except torch.cuda.OutOfMemoryError:
            return None
        return copies

    def _apply_all(self, copies: Shards, patches: Sequence[Patch]) -> None:
        """Apply patches of all weights to parts that nobody else uses."""
        base = LocalWeights.of(copies)
        for patch in patches:
            for application in stage_slices(patch.contents, base, [base], self._threads):
                application.commit(self._threads)

    def _rebuild(
        self, fresh: Weights | Shards, local: LocalWeights, *, exchange: bool
    ) -> Sequence[Application | Replacement]:
        """Stage fresh weights: exchange them where they are ours, or compare."""
        old = _shards(local)
        new = _parts_like(old, fresh)
        fresh_parts = LocalWeights.of(new)
        replacement = Replacement.of(local, fresh_parts, exchange=exchange)
        if replacement is not None:
            return [replacement]
        on_gpu = _difference_on_gpu(local, fresh_parts, self._threads)
        if on_gpu is not None:
            compared = {*on_gpu.weights.places}
            rest = [part for part in local.parts if part[0] not in compared]
            if not rest:
                return [on_gpu]
            old = _shards(LocalWeights(local.table, rest))
            new = _parts_like(old, fresh)
        patch = diff(old, new, profile="raw", threads=self._threads)
        application = stage_all(patch.contents, old, digest=patch.base)
        return [application] if on_gpu is None else [on_gpu, application]


class PreparedEngine:
    """Changes that are staged on an engine's tensors."""

    def __init__(
        self,
        target: EngineTarget,
        applications: Sequence[Callable[[], Undo]],
        sums: Mapping[Members, MovedSums] | None,
        changed: int,
    ) -> None:
        """sums: those of the parts, by the ranks that have them; None if all of every tensor is here."""
        self._target = target
        self._tensors = target.tensors  # they are written to, whatever is attached later
        self._applications = applications
        self.sums = sums
        self.changed = changed

    def commit(self) -> Undo:
        self._target.require_in_place(self._tensors)
        undo_steps: list[Undo] = []

        def undo() -> None:
            while undo_steps:
                undo_steps.pop()()

        try:
            for commit in self._applications:
                undo_steps.append(commit())  # noqa: PERF401  # if the next commit fails, these must be undone
        except BaseException:
            undo()
            raise
        return undo

    def finish(self) -> None:
        """Nothing is kept."""

    def discard(self) -> None:
        """Nothing was written."""


def _difference_on_gpu(local: LocalWeights, fresh: LocalWeights, threads: int | None) -> Application | None:
    """What must change in the parts that GPUs can compare with fresh ones there; None if there are none, or no room.

    Its digests do not count from zero: ranks may come to the bits of a part that they share from different ones.
    """
    if not local.has_kernels:
        return None
    import torch

    from ..patch.gpu_difference import stage_difference
    from ..weights.on_gpu import split_by_gpu

    _, all_runs = split_by_gpu(local.places, local, fresh, with_rows=True)
    places = {place for runs in all_runs for place in runs.places}
    if not places or local.tied:
        return None
    weights = LocalWeights(local.table, [part for part in local.parts if part[0] in places])
    try:
        return stage_difference(weights, fresh, element_sums(weights, weights.places, threads))
    except torch.cuda.OutOfMemoryError:
        return None


def _tensors_by_name(local: LocalWeights) -> dict[str, Any]:
    """The tensors of an engine that has all of every one."""
    return {local.table[tensor].name: memory.owner for (tensor, _), memory in local.parts}


def _shards(local: LocalWeights) -> Shards:
    table = local.table
    return Shards(table, [Part(table[t].name, _box(local, t, r), m.owner) for (t, r), m in local.parts])


def _box(local: LocalWeights, tensor: int, region: Region | None) -> Region:
    return region or whole(local.table[tensor].shape)


def _parts_like(parts: Shards, weights: Weights | Shards) -> Shards:
    """The same parts of other weights, which are all at hand, or some parts that these are among."""
    if isinstance(weights, Shards):
        by_place = {(part.tensor, part.region): part.data for part in weights.parts}
        return parts.map(lambda part: by_place[part.tensor, part.region])
    arrays = {name: memory.view() for name, memory in memories(weights).items()}
    dtypes = {spec.name: spec.dtype for spec in parts.table.specs}
    return parts.map(lambda part: Bits(_slice_region(arrays[part.tensor], part.region), dtypes[part.tensor]))


def _slice_region(bits: UIntArray, region: Region) -> UIntArray:
    return bits[region.slices] if region.size else bits  # indexing an array of no dimensions would copy it


def copy_shards(shards: Shards) -> Shards:
    """Copy parts to new host memory."""

    def copy(part: Part) -> Bits:
        memory = memory_of(part.tensor, part.data)
        return Bits(memory.copied(), memory.dtype)

    return shards.map(copy)
