"""Patches from patches: squash a chain, undo one, join the patches of shards.

Which profiles need the base weights:

| operation | raw, gap, dense entries | ulp | ctx | a tensor with bits and steps |
| --- | --- | --- | --- | --- |
| `squash` | no: the last bits win | no: steps add up | yes | yes, unless the bits cover the steps |
| `invert` | yes: the old bits are in the base alone | no: the steps turn round | yes | yes |
| `merge` | no | no | no | no |

With the base, `squash` also drops elements that ended where they began, and may choose any profile. A chain with `ctx`
in it is squashed by applying it to a copy of the tensors it touches. `invert` writes no `ctx`: the bits that it would
be conditioned on are those of the result.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from .. import plan
from ..errors import ChainError, InvalidField, NeedsBase, WrongBase
from ..parallel import ordered
from ..plan import Changes, Dense, advance, steps_between
from ..weights.batches import PIECE_BYTES
from ..weights.boxes import Boxes, Places, elements, select
from ..weights.digest import Digest, table_digest
from ..weights.dtypes import Bits, DType, UIntArray
from ..weights.local import LocalWeights
from ..weights.memory import Weights
from ..weights.region import whole
from ..weights.shards import Part, Place, Shards
from ..weights.table import TensorTable
from ..wire.check import place_columns, refuse_overlapping_places
from .apply import apply
from .assemble import Encoding, PatchPath, collect
from .contents import Contents, Ends
from .decode import Decoded
from .located import ChangeLocator, among, by_window, touched
from .matching import digest_of
from .staging import stage

Flat = npt.NDArray[np.int64]
_STEPS = frozenset(("ulp", "ctx"))  # profiles that are written from steps


def squash(
    patches: Sequence[Contents],
    *,
    base: Weights | Shards | None = None,
    digest: Digest | None = None,
    profile: str = "auto",
    to: PatchPath | None = None,
    threads: int | None = None,
) -> Contents:
    """One patch that does what several do in turn; see `sparserl.squash`."""
    require_chain(patches)
    first = patches[0]
    weights = _base_weights(first, base, digest, threads)
    names = plan.candidates(profile)

    def routed() -> Iterator[Changes]:
        conditional = any(head.profile.conditional for patch in patches for head in patch.heads)
        replay = weights is not None and conditional
        for changes in _replayed(patches, weights) if replay else _windows(patches, weights):
            if not any((changes.steps if name in _STEPS else changes.after) is not None for name in names):
                raise NeedsBase(f"squashing these patches to {profile!r} needs the base weights")
            yield from plan.route(changes, names, first.table)

    def ends(changed: int) -> Ends:
        return Ends(first.base, patches[-1].result, changed, first.ends.covers)

    buckets = Encoding(names, threads=threads).buckets(first.table, plan.cut(routed()))
    return collect(first.table, buckets, ends, to)


def require_chain(patches: Sequence[Contents]) -> None:
    """Refuse patches that do not follow one another, counted from 1 in the message."""
    if not patches:
        raise ChainError("no patch was given")
    for i, (before, after) in enumerate(zip(patches, patches[1:], strict=False), 1):
        after.table.require(before.table, f"patch {i + 1}", f"patch {i}")
        if before.result != after.base:
            raise ChainError(f"patch {i} leads to {before.result}, but patch {i + 1} starts from {after.base}")
        if not _same_places(before, after):
            raise ChainError(f"patches {i} and {i + 1} cover different regions; merge the shards first")


def _same_places(first: Contents, second: Contents) -> bool:
    """Whether two patches of the same tensors cover the same regions."""
    if first.complete and second.complete:
        return True
    places, others = (np.stack(place_columns(patch.table, patch.covers)) for patch in (first, second))
    return np.array_equal(places[:, np.lexsort(places[::-1])], others[:, np.lexsort(others[::-1])])


def _base_weights(
    patch: Contents, base: Weights | Shards | None, digest: Digest | None, threads: int | None
) -> LocalWeights | None:
    """The base weights, once they are known to be the base."""
    if base is None:
        return None
    weights = LocalWeights.of(base, patch.table, "the patch", "the base")
    current = digest_of(patch, weights, threads) if digest is None else digest
    if current != patch.base:
        raise WrongBase(f"the weights have digest {current}, the patch starts from {patch.base}")
    return weights


class _WindowChanges:
    """What a chain of patches does to a window of a tensor: some positions get bits, others take steps.

    Positions and words are kept apart by whether the words are bits.
    """

    def __init__(self, dtype: DType) -> None:
        self.dtype = dtype
        self.positions = {True: np.empty(0, np.int64), False: np.empty(0, np.int64)}
        self.words = {True: np.empty(0, dtype.uint), False: np.empty(0, dtype.uint)}

    def add(self, positions: Flat, words: UIntArray, absolute: bool) -> None:
        """Put one patch's changes on top; each call brings distinct, rising positions."""
        if absolute:
            keep = ~among(self.positions[False], positions)
            self.positions[False] = self.positions[False][keep]
            self.words[False] = self.words[False][keep]
            self._merge(True, positions, words)
            return
        rest = self._step_bits(positions, words)
        positions = positions[rest]
        words = words[rest]
        _, before, after = np.intersect1d(self.positions[False], positions, assume_unique=True, return_indices=True)
        if after.size:
            words = words.copy()
            words[after] = add_steps(self.words[False][before], words[after])
        self._merge(False, positions, words)

    def _step_bits(self, positions: Flat, steps: UIntArray) -> npt.NDArray[np.bool_]:
        """Take steps from bits that are known; which steps remain."""
        _, bits, taken = np.intersect1d(self.positions[True], positions, assume_unique=True, return_indices=True)
        if taken.size:
            self.words[True] = self.words[True].copy()
            self.words[True][bits] = advance(self.dtype, self.words[True][bits], steps[taken])
        rest = np.ones(positions.size, bool)
        rest[taken] = False
        return rest

    def _merge(self, absolute: bool, positions: Flat, words: UIntArray) -> None:
        remaining = ~among(self.positions[absolute], positions)
        if remaining.any():
            positions = np.concatenate([self.positions[absolute][remaining], positions])
            words = np.concatenate([self.words[absolute][remaining], words])
            order = np.argsort(positions, kind="stable")
            positions = positions[order]
            words = words[order]
        self.positions[absolute] = positions
        self.words[absolute] = words


def add_steps(first: UIntArray, second: UIntArray) -> UIntArray:
    """The zigzag form of the sum of two zigzag steps, wrapped to their width."""
    return _to_zigzag(_from_zigzag(first) + _from_zigzag(second))


def negate_steps(steps: UIntArray) -> UIntArray:
    """The zigzag form of the opposite steps."""
    return _to_zigzag(-_from_zigzag(steps))


def _from_zigzag(zigzag: UIntArray) -> UIntArray:
    one = zigzag.dtype.type(1)
    return np.where(zigzag & one, ~(zigzag >> one), zigzag >> one).astype(zigzag.dtype)


def _to_zigzag(delta: UIntArray) -> UIntArray:
    one = delta.dtype.type(1)
    sign_bit = delta.dtype.type(8 * delta.dtype.itemsize - 1)
    doubled = delta << one
    return np.where(delta >> sign_bit, ~doubled, doubled).astype(delta.dtype)


def _windows(patches: Sequence[Contents], weights: LocalWeights | None) -> Iterator[Changes]:
    """The combined changes, window by window of every tensor that any patch touches."""
    table = patches[0].table
    locator = ChangeLocator(patches)
    for tensor, cover, rows in touched(patches):
        shape = whole(table[tensor].shape)
        outer = cover or shape
        most = PIECE_BYTES // table[tensor].dtype.width
        for number, users in by_window(locator, (tensor, cover), rows, outer, most):
            window, low = outer.piece(most, number)
            combined = _WindowChanges(table[tensor].dtype)
            for changes in locator.inside(users, (tensor, cover), low, window.numel):
                combined.add(*changes)
            place = (tensor, None if window == shape else window)
            yield _settle(table, place, window.numel, combined, weights)


def _replayed(patches: Sequence[Contents], weights: LocalWeights | None) -> Iterator[Changes]:
    """The combined changes, found by applying the patches to a copy."""
    assert weights is not None
    table = weights.table
    changed = {tensor for tensor, *_ in touched(patches)}
    parts = []
    for place, memory in weights.parts:
        spec = table[place[0]]
        bits = memory.view().copy() if place[0] in changed else memory.view()
        parts.append(Part(spec.name, place[1] or whole(spec.shape), Bits(bits, spec.dtype)))
    copy = Shards(table, parts)
    for patch in patches:
        apply(patch, copy, digest=patch.base)
    result = LocalWeights.of(copy)
    for tensor, cover, _ in touched(patches):
        spec = table[tensor]
        for window in (cover or whole(spec.shape)).split(PIECE_BYTES // spec.dtype.width):
            place = (tensor, None if window == whole(spec.shape) else window)
            yield _compared(weights, place, result.bits(*place))


def _settle(
    table: TensorTable, place: Place, numel: int, combined: _WindowChanges, weights: LocalWeights | None
) -> Changes:
    """Combined changes: with the base exactly those elements that differ, else what can be said without it."""
    dtype = combined.dtype
    bit_positions = combined.positions[True]
    bits = combined.words[True]
    step_positions = combined.positions[False]
    steps = combined.words[False]
    if weights is not None:
        old_bits = weights.bits(*place)
        new_bits = old_bits.copy()
        new_bits[bit_positions] = bits
        new_bits[step_positions] = advance(dtype, old_bits[step_positions], steps)
        return _compared(weights, place, new_bits)
    if not step_positions.size:
        all_bits = (lambda _: bits) if bit_positions.size == numel else None
        return _one_entry(dtype, place, numel, bit_positions, after=bits, steps=None, bits=all_bits)
    if not bit_positions.size:
        moved = steps != 0
        return _one_entry(dtype, place, numel, step_positions[moved], after=None, steps=steps[moved])
    raise NeedsBase(f"tensor {table[place[0]].name!r} has both bits and steps; squash needs the base weights")


def _compared(weights: LocalWeights, place: Place, new_bits: UIntArray) -> Changes:
    """The changes from the base to the bits that a region has in the end."""
    dtype = weights.table[place[0]].dtype
    old_bits = weights.bits(*place)
    positions = np.flatnonzero(new_bits != old_bits)
    before = old_bits[positions]
    after = new_bits[positions]
    columns = {"before": before, "base": weights, "bits": lambda _: new_bits}
    steps = steps_between(dtype, before, after)
    return _one_entry(dtype, place, new_bits.size, positions, after=after, steps=steps, **columns)


def _one_entry(
    dtype: DType, place: Place, numel: int, positions: Flat, *, after: Any, steps: Any, **columns: Any
) -> Changes:
    """Changes of one region, or of none where nothing changes."""
    entries = 1 if positions.size else 0
    tensor, region = place
    return Changes(
        dtype,
        np.array([tensor] * entries, np.int64),
        [region] * entries,
        np.array([numel] * entries, np.int64),
        np.array([positions.size] * entries, np.int64),
        positions.astype(np.uint32),
        after,
        steps,
        numel,
        **columns,
    )


def invert(
    patch: Contents,
    base: Weights | Shards | None = None,
    *,
    digest: Digest | None = None,
    profile: str = "auto",
    to: PatchPath | None = None,
    threads: int | None = None,
) -> Contents:
    """The patch from a result back to its base; see `Patch.invert`."""
    weights = _base_weights(patch, base, digest, threads)
    names = plan.candidates(profile)
    if weights is None and len(patch) and not _STEPS & set(names):
        raise NeedsBase(f"inverting this patch to {profile!r} needs the base weights")
    result = patch.base

    def turn(index: int) -> tuple[list[Changes], Digest]:
        routed: list[Changes] = []
        moved = Digest()
        parts = patch.decode(index, weights).parts()
        while parts:  # each is let go of as soon as it was turned round
            changes, delta = _turned(parts.pop(0)) if weights is None else _undo(weights, parts.pop(0))
            routed += plan.route(changes, names, patch.table)
            moved += delta
        return routed, moved

    def turned() -> Iterator[Changes]:
        nonlocal result
        for routed, moved in ordered(turn, range(len(patch)), threads):
            result += moved
            yield from routed

    def ends(changed: int) -> Ends:
        if weights is not None and result != patch.result:
            raise InvalidField(f"the changes lead to {result}, the patch promises {patch.result}")
        return Ends(patch.result, patch.base, changed, patch.ends.covers)

    buckets = Encoding(names, threads=threads).buckets(patch.table, plan.cut(turned()))
    return collect(patch.table, buckets, ends, to)


def _turned(decoded: Decoded) -> tuple[Changes, Digest]:
    """Steps turned round, for which no base is needed."""
    if decoded.head.profile.absolute or decoded.head.entries.dense.any():
        raise NeedsBase("bits that this patch overwrites are in its base alone: hand over the base weights")
    return _columns(decoded, None, negate_steps(decoded.words), []), Digest()


def _undo(weights: LocalWeights, decoded: Decoded) -> tuple[Changes, Digest]:
    """The bits of the base, put back."""
    decoded = decoded.in_order()
    staged = stage(weights, decoded)
    dense = [Dense(place, count, weights.bits(*place).copy()) for place, count, _ in decoded.dense_entries()]
    steps = steps_between(decoded.head.dtype, staged.new.bits, staged.old_bits)
    return _columns(decoded, staged.old_bits, steps, dense), staged.moved


def _columns(decoded: Decoded, after: UIntArray | None, steps: UIntArray | None, dense: list[Dense]) -> Changes:
    entries = decoded.head.entries
    return Changes(
        decoded.head.dtype,
        decoded.sparse_tensor,
        select(entries.region, entries.sparse),
        entries.numel[entries.sparse],
        decoded.sparse_count,
        decoded.positions,
        after,
        steps,
        int(entries.numel[entries.sparse].sum()),
        dense=dense,
    )


def merge(patches: Sequence[Contents], *, to: PatchPath | None = None) -> Contents:
    """The patches of shards as one patch, nothing recoded; see `sparserl.merge`."""
    first = patches[0]
    for i, patch in enumerate(patches[1:], 1):
        patch.table.require(first.table, f"patch {i}", "patch 0")
    covers = _joined_covers(first.table, patches)
    terms = table_digest(first.table)
    start = terms if covers is None else Digest()
    base = sum((p.base - terms if p.complete else p.base for p in patches), start)
    result = sum((p.result - terms if p.complete else p.result for p in patches), start)
    changed = sum(p.changed for p in patches)
    buckets = ((p.bucket(i), 0) for p in patches for i in range(len(p)))
    merged = collect(first.table, buckets, lambda _: Ends(base, result, changed, covers), to)
    len(merged.heads)  # what cannot be read back must not be handed out
    return merged


def _joined_covers(table: TensorTable, patches: Sequence[Contents]) -> Sequence[Place] | None:
    """The regions covered by all together, refused where two overlap; None where they are the whole table."""
    columns = np.concatenate([np.stack(place_columns(table, patch.covers)) for patch in patches], axis=1)
    tensor, first, last = columns
    refuse_overlapping_places(table, tensor, first, last, sum(patch.nbytes for patch in patches))
    tensor, first, last = np.unique(columns, axis=1)  # in order; a tensor without elements may be covered twice
    covered = int(elements(table, tensor, first, last).sum())
    if covered == table.elements and np.unique(tensor).size == len(table):
        return None
    whole_tensors = last - first + 1 == table.numel[tensor]
    return Places(Boxes(table, tensor, np.where(whole_tensors, -1, first), last - first))
