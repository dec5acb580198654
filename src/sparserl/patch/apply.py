"""Landing a patch: check the base, write every change, check the result; all of it or nothing.

    weights ──► digest = base? ──► decode, swap old bits for new, sum up ──► digest = result? ──► done
                     └ result: nothing to do                                      └ no: put the old bits back

Each touched line of memory is fetched once, and the old bits are held until the tracked digest equals the patch's
result. Where they would take more than 256 MiB, or tensors share memory, everything is decoded and summed up before the
first bit is written, and what does not fit is decoded twice. Either way a patch is applied whole or not at all, and an
interrupt (Ctrl-C) comes before the first bit is written or after the last one; only the end of the process can stop it
in between, or memory that runs out while changes are decoded for the second time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ..codec.profile import Room, empty
from ..errors import InvalidField, TensorMismatch, TiedConflict, WrongBase
from ..kernels import cpu
from ..parallel import Progress, ordered, uninterrupted
from ..plan import advance
from ..weights.batches import Batch
from ..weights.digest import Digest, element_sums, sums, table_digest
from ..weights.dtypes import DType, UIntArray
from ..weights.geometry import Geometry
from ..weights.local import LocalWeights
from ..weights.memory import Weights, tied_groups
from ..weights.shards import Shards
from ..weights.staging import gpu_tensor
from ..weights.tensors import require_writable
from ..wire import Head
from .decode import Decoded, flatten, sparse
from .overlay import Overlay
from .patch import Patch

if TYPE_CHECKING:
    from ..weights.on_gpu import GpuElements
    from .gpu_apply import Resident

_LINE = 64  # bytes
KEEP_BYTES = 256 << 20  # of decoded changes, while the result is not known yet


@dataclass(frozen=True)
class Applied:
    """What became of an `apply`: `already` where the weights were the result before."""

    digest: Digest
    changed: int
    already: bool


@dataclass(frozen=True)
class Staged:
    """The changes of one bucket, located in the weights at hand and ready to be written."""

    decoded: Decoded
    new: Overlay
    old: UIntArray
    moved: Digest


def apply(
    patch: Patch,
    weights: Weights | Shards,
    *,
    digest: Digest | None = None,
    threads: int | None = None,
    progress: Progress | None = None,
) -> Applied:
    """Turn the base into the result, in place, and say what was done.

    The weights' digest must be the patch's base; anything else is refused with `WrongBase` before a bit is touched.
    Weights that are the result already are left alone. With `digest`, the caller vouches for the digest of the
    weights and no full read is needed; without it, the weights are read once (`progress` counts those bytes).

    The weights must be memory that can be written: torch does not say so of tensors over a read-only file mapping.

    Memory: positions and old bits of the changes are held until the result is known to be right, up to 256 MiB. Beyond
    that, and where tensors share memory, nothing is written before the result is known: decoded changes are held up to
    256 MiB, of the others the buckets' own bytes.
    """
    held = _held(patch, weights)
    current = digest_of(patch, held, threads, progress) if digest is None else digest
    if current == patch.result:
        return Applied(patch.result, 0, already=True)
    _require_base(patch, current)
    tied = shared_memory(held)
    if held.gpu_streams:
        _landing(patch, held, current, tied, threads).commit(threads)
        return Applied(patch.result, patch.changed, already=False)
    patch.read_heads(threads)
    _require_writable(patch, held)
    if tied or _undo_bytes(patch) > KEEP_BYTES:
        _stage_then_commit(patch, held, current, tied, threads)
    else:
        _exchange_or_undo(patch, held, current, threads)
    return Applied(patch.result, patch.changed, already=False)


def _held(patch: Patch, weights: Weights | Shards) -> LocalWeights:
    """The weights, once they are known to be those that the patch speaks of."""
    held = LocalWeights.of(weights, patch.table, "the patch", "the weights")
    if not held.complete and (len(held.places) != len(patch.covers) or set(held.places) != set(patch.covers)):
        raise TensorMismatch("the patch covers other regions than the shards at hand")
    return held


def shared_memory(held: LocalWeights) -> list[list[int]]:
    """Tensors that share memory, by their numbers."""
    named = held.memory_by_name()
    number = {name: t for name, ((t, _), _) in zip(named, held.parts, strict=True)}
    return [[number[name] for name in group] for group in tied_groups(named)]


def _require_writable(patch: Patch, held: LocalWeights) -> None:
    """Refuse weights that the patch changes and that cannot be written."""
    touched = {t for head in patch.heads for t in head.entries.tensor.tolist()}
    require_writable((patch.table[t].name, memory) for (t, _), memory in held.parts if t in touched)


def _undo_bytes(patch: Patch) -> int:
    """What it takes to remember where changes were and what was there."""
    return sum(_sparse_bytes(h) + h.dense_elements * h.dtype.width for h in patch.heads)


def _sparse_bytes(head: Head) -> int:
    """The positions and old bits of the sparse changes of a bucket, each from a new line of memory on."""
    return sum(_lines(head.layout.changes * width) for width in (4, head.dtype.width))


def _lines(nbytes: int) -> int:
    return nbytes + -nbytes % _LINE


class _Memory:
    """Memory to be handed out: one large piece costs less than many, and is there before a bit is written."""

    def __init__(self, memory: npt.NDArray[np.uint8]) -> None:
        self.left = memory

    def take(self, count: int, dtype: Any) -> npt.NDArray[Any]:
        nbytes = count * np.dtype(dtype).itemsize
        if nbytes > self.left.size:
            return empty(count, dtype)
        taken, self.left = self.left[:nbytes], self.left[_lines(nbytes) :]
        return taken.view(dtype)


def _exchange_or_undo(patch: Patch, held: LocalWeights, base: Digest, threads: int | None) -> None:
    log: list[tuple[Overlay, Digest]] = []
    ends = [0, *accumulate(_sparse_bytes(head) for head in patch.heads)]
    memory = empty(ends[-1], np.uint8)

    def land(index: int) -> None:
        for done in exchange(held, patch, index, _Memory(memory[ends[index] : ends[index + 1]]).take):
            log.append(done)  # noqa: PERF402  # one by one: what was done must be known when the next one fails

    def work() -> None:
        try:
            deque(ordered(land, range(patch.buckets), threads), maxlen=0)
            _require_result(patch, sum((moved for _, moved in log), base))
        except BaseException:
            for old, _ in log:
                old.write(held)
            raise

    for dtype in {head.dtype for head in patch.heads}:
        _load_undo(dtype)
    uninterrupted(work)


@cache
def _load_undo(dtype: DType) -> None:
    """Have the kernel that undoes changes compiled and at hand before there are any."""
    none, box, bits = np.empty(0, np.int64), np.empty((0, 1), np.int64), np.empty(0, dtype.uint)
    cpu.changes.scatter(bits, none, none, none, box, box, 0, bits)


def _stage_then_commit(
    patch: Patch, held: LocalWeights, base: Digest, tied: list[list[int]], threads: int | None
) -> None:
    result, room = base, KEEP_BYTES
    kept: list[Staged] = []
    landing: list[Overlay | tuple[int, bytes]] = []
    for index, data, parts in ordered(lambda i: _staged(patch, held, i), range(patch.buckets), threads):
        result += sum((part.moved for part in parts), Digest())
        room -= sum(part.new.nbytes for part in parts)
        landing += [part.new for part in parts] if tied or room >= 0 else [(index, bytes(data))]
        if tied:
            kept += parts
    _require_result(patch, result)
    refuse_conflicts(patch, held, tied, kept)

    def land(part: Overlay | tuple[int, bytes]) -> None:
        for new in (
            [part] if isinstance(part, Overlay) else [p.new for p in stage_parts(held, patch.parse(*part, held))]
        ):
            new.write(held)

    uninterrupted(lambda: deque(ordered(land, landing, threads), maxlen=0))


def _require_base(patch: Patch, current: Digest) -> None:
    if current != patch.base:
        raise WrongBase(
            f"the weights have digest {current}; the patch turns {patch.base} into {patch.result}. "
            "Nothing was touched: fetch the patch that starts from these weights, or a full copy"
        )


def _require_result(patch: Patch, result: Digest) -> None:
    if result != patch.result:
        raise InvalidField(
            f"the changes lead to digest {result}, the patch promises {patch.result}; the weights are as they were"
        )


def _staged(patch: Patch, held: LocalWeights, index: int) -> tuple[int, bytes | memoryview, list[Staged]]:
    data = patch.bucket(index)
    return index, data, stage_parts(held, patch.parse(index, data, held))


def stage_parts(held: LocalWeights, decoded: Decoded) -> list[Staged]:
    """A bucket, part by part."""
    return [stage(held, part) for part in decoded.parts()]


def digest_of(patch: Patch, held: LocalWeights, threads: int | None = None, progress: Progress | None = None) -> Digest:
    """The digest of weights over what a patch covers: to be compared with its base and its result."""
    read = element_sums(held, patch.covers, threads, progress)
    return read + table_digest(patch.table) if patch.complete else read


def exchange(held: LocalWeights, patch: Patch, index: int, room: Room = empty) -> Iterator[tuple[Overlay, Digest]]:
    """Write the new bits of a bucket; what was there before, in this room, and how the digest moved, part by part."""
    geometry = _geometry(held, patch.heads[index])  # from here on nothing may fail before it is known what was where
    decoded = patch.decode(index, held, land=True, room=room)
    for part in decoded.parts():
        if part.positions is not decoded.positions:
            geometry = _geometry(held, part.head)
        dtype, new, absolute = part.head.dtype, part.words, part.head.profile.absolute
        if part.landed:
            old, moved = _overlay(geometry, part, part.old), None
        else:  # old bits take the place of steps
            old = _overlay(geometry, part, room(new.size, new.dtype) if absolute else new)
            moved = _exchanged(old, new, (absolute, dtype.sign_magnitude))
        yield _with_dense(held, old, new, moved, part)


def _exchanged(old: Overlay, new: UIntArray, order: tuple[bool, bool]) -> Digest:
    """Swap the new bits, or steps, for the old ones; how the digest moves. `order` says what the new ones are."""
    g = old.geometry
    places = g.address, g.start, g.dims, g.size, g.memory_strides, g.tensor_strides, g.keys
    at = old.positions.ctypes.data, new.ctypes.data
    first, second = cpu.changes.exchange(old.tag, old.count, *places, *at, *order, old.bits.ctypes.data)
    return Digest(int(first), int(second))


def _with_dense(
    held: LocalWeights, old: Overlay, new: UIntArray, moved: Digest | None, decoded: Decoded
) -> tuple[Overlay, Digest]:
    """Write the dense entries behind the sparse ones. Returns what was there before, and how the digest moved.

    `moved` is what the sparse ones did to it, where that is known already.
    """
    if moved is not None and not decoded.dense.size:
        return old, moved
    try:
        old = replace(old, dense=[(place, held.bits(*place).copy()) for place, _ in decoded.dense_bits])
        moved = (_sparse_moved(old, new) if moved is None else moved) + _dense_moved(held, old, decoded)
        replace(old, dense=decoded.dense_bits).write_dense(held)
    except BaseException:
        old.write(held)
        raise
    return old, moved


def stage(held: LocalWeights, decoded: Decoded) -> Staged:
    """Read the old bits, compute the new ones, and see how the digest moves. Writes nothing."""
    geometry = _geometry(held, decoded.head)
    old = _overlay(geometry, decoded, np.empty_like(decoded.words) if decoded.old is None else decoded.old)
    dense = [(place, held.bits(*place)) for place, _ in decoded.dense_bits]
    old = replace(old, dense=dense, far=_far(held, decoded, geometry))
    if decoded.old is None:
        old.gather(old.bits)
    absolute = decoded.head.profile.absolute
    new = decoded.words if absolute else advance(decoded.head.dtype, old.bits, decoded.words)
    moved = _sparse_moved(old, new) + _dense_moved(held, old, decoded)
    return Staged(decoded, replace(old, bits=new, dense=decoded.dense_bits), old.bits, moved)


def _geometry(held: LocalWeights, head: Head) -> Geometry:
    entries = sparse(head)
    return held.geometry(entries.tensor, entries.region)


def _far(held: LocalWeights, decoded: Decoded, geometry: Geometry) -> GpuElements | None:
    """Those of the changes that are on devices; None where none is."""
    homes = [gpu_tensor(held.locate(*place)[0]) for place in decoded.sparse_places] if held.gpu_streams else []
    if all(there is None for there in homes):
        return None
    from ..weights.on_gpu import GpuElements

    return GpuElements(held, homes, geometry, decoded.sparse_count, decoded.positions)


def _overlay(geometry: Geometry, decoded: Decoded, bits: UIntArray | None) -> Overlay:
    assert bits is not None
    tag = np.empty(0, decoded.head.dtype.uint)
    return Overlay(tag, geometry, decoded.sparse_count, decoded.positions, bits, [])


def _sparse_moved(old: Overlay, new: UIntArray) -> Digest:
    """How the digest moves when old bits become new ones."""
    g = old.geometry
    first, second = cpu.changes.digest_delta(
        old.count, g.start, g.dims, g.size, g.tensor_strides, g.keys, old.positions, old.bits, new
    )
    return Digest(int(first), int(second))


def _dense_moved(held: LocalWeights, old: Overlay, decoded: Decoded) -> Digest:
    """How the digest moves when old regions become new ones."""
    moved = Digest()
    for (place, was), (_, now) in zip(old.dense, decoded.dense_bits, strict=True):
        batch = Batch.of(held.table, *place)
        at = (np.array([bits.ctypes.data], np.int64) for bits in (was, now))
        before, after = (sums(held.table, batch, address) for address in at)
        moved += after - before
    return moved


@dataclass(frozen=True)
class Landing:
    """A patch staged on weights: everything is decoded and summed up, and nothing is written yet."""

    held: LocalWeights
    base: Digest
    result: Digest
    parts: tuple[Staged | Resident, ...]
    tied: bool  # whether some tensors share memory: what one name writes, the other finds written
    changed: int

    def commit(self, threads: int | None = None) -> Callable[[], None]:
        """Write the new bits, in O(changed), and return what takes them back.

        The bits that are there must still be those that were staged on: the digest is tracked while they are swapped.
        If it does not come out right, or anything else fails, everything is put back.
        """
        log: list[tuple[Overlay | Resident, Digest]] = []
        near = [part for part in self.parts if isinstance(part, Staged)]
        far = [part for part in self.parts if not isinstance(part, Staged)]
        self.held.follow_current_streams()

        def undo() -> None:
            while log:
                log.pop()[0].write(self.held)

        def work() -> None:
            try:
                if far:
                    from .gpu_apply import swap_all

                    log.extend((part, part.moved) for part in far)
                    swap_all(far)
                if self.tied:
                    log.extend((_require_old(self.held, part), part.moved) for part in near)
                    deque(ordered(lambda part: part.new.write(self.held), near, threads), maxlen=0)
                else:
                    deque(ordered(lambda part: log.append(_swap(self.held, part)), near, threads), maxlen=0)
                self._require_tracked(sum((moved for _, moved in log), self.base))
            except BaseException:
                undo()
                raise

        try:
            uninterrupted(work)
        except BaseException:
            uninterrupted(undo)  # where an interrupt came while all was written; else there is nothing to undo
            raise
        return lambda: uninterrupted(undo)

    def _require_tracked(self, found: Digest) -> None:
        if found != self.result:
            raise WrongBase(
                f"the weights were changed after the patch was staged on them: they lead to {found}, not to "
                f"{self.result}. They are as they were before the commit"
            )


def stage_all(
    patch: Patch, weights: Weights | Shards, *, digest: Digest | None = None, threads: int | None = None
) -> Landing:
    """Decode a patch on the weights it shall land on, while they are in use, and see that it leads where it should.

    Memory: all decoded changes with their old bits, until the commit.
    """
    held = _held(patch, weights)
    current = digest_of(patch, held, threads) if digest is None else digest
    _require_base(patch, current)
    require_writable((patch.table[t].name, memory) for (t, _), memory in held.parts)
    return _landing(patch, held, current, shared_memory(held), threads)


def _landing(patch: Patch, held: LocalWeights, base: Digest, tied: list[list[int]], threads: int | None) -> Landing:
    """All buckets, staged. Those that can be are decoded where the weights are, together, behind the others."""
    if held.gpu_streams:
        staged, far = _with_devices(patch, held, tied, threads)
    else:
        found = ordered(lambda i: stage_parts(held, patch.decode(i, held)), patch.ready(), threads)
        far, staged = [], [part for parts in found for part in parts]
    patch.heads  # noqa: B018  # reading them checks that no entries overlap, which nothing on a device would notice
    parts: tuple[Staged | Resident, ...] = (*far, *staged)
    _require_result(patch, sum((part.moved for part in parts), base))
    refuse_conflicts(patch, held, tied, staged)
    return Landing(held, patch.base, patch.result, parts, bool(tied), patch.changed)


def _with_devices(
    patch: Patch, held: LocalWeights, tied: list[list[int]], threads: int | None
) -> tuple[list[Staged], list[Resident]]:
    """All buckets, staged here or located on a device; those with tensors that share memory are staged here."""
    from . import gpu_apply as device_apply

    shared = {tensor for group in tied for tensor in group}
    groups = device_apply.Groups(patch)
    far: list[Resident] = []

    def near() -> Iterator[int]:
        for index, head, reader in patch.opening(threads):
            found = None
            if not shared.intersection(head.entries.tensor.tolist()):
                found = device_apply.bucket(held, index, head, reader)
            if found is None:
                yield index
            else:
                far.extend(device_apply.located(patch, held, group) for group in groups.add(found))
        if not far and groups.few:
            yield from groups.indices
        else:
            far.extend(device_apply.located(patch, held, group) for group in groups.rest)

    staged = [*ordered(lambda i: stage(held, patch.decode(i, held)), near(), threads)]
    _require_writable(patch, held)  # while the devices are at work
    device_apply.require_right(patch, held, far)
    return staged + [stage(held, decoded) for part in far for decoded in part.dense], far


def _require_old(held: LocalWeights, part: Staged) -> Overlay:
    """The old bits, if they are still those that were staged on. For names that share memory."""
    found = np.empty_like(part.old)
    part.new.gather(found)
    if not np.array_equal(found, part.old):
        raise WrongBase("the weights were changed after the patch was staged on them; nothing was written")
    return replace(part.new, bits=found, dense=[(place, held.bits(*place).copy()) for place, _ in part.new.dense])


def _swap(held: LocalWeights, part: Staged) -> tuple[Overlay, Digest]:
    """Write the new bits of a staged bucket, and return what was there and how the digest moved."""
    dtype, new = part.decoded.head.dtype, part.new
    old = replace(new, bits=np.empty_like(new.bits), dense=[])
    moved = None
    if new.far is None:
        moved = _exchanged(old, new.bits, (True, dtype.sign_magnitude))
    else:
        new.swap(old.bits)
    return _with_dense(held, old, new.bits, moved, part.decoded)


def refuse_conflicts(patch: Patch, held: LocalWeights, tied: list[list[int]], staged: list[Staged]) -> None:
    """Names that share memory must change alike, or writing one would silently change the other."""
    for group in tied:
        first, *others = group
        expected = _flat(patch, held, first, staged)
        for other in others:
            if not all(np.array_equal(a, b) for a, b in zip(expected, _flat(patch, held, other, staged), strict=True)):
                raise TiedConflict(
                    f"tensors {patch.table[first].name!r} and {patch.table[other].name!r} share memory but the patch "
                    "changes them differently; nothing was touched"
                )


def _flat(
    patch: Patch, held: LocalWeights, tensor: int, staged: list[Staged]
) -> tuple[npt.NDArray[np.int64], UIntArray]:
    """All changes of one tensor as positions in it and new bits; elements set to the bits they have do not count."""
    where, bits = [np.empty(0, np.int64)], [np.empty(0, patch.table[tensor].dtype.uint)]
    for part in staged:
        at = 0
        for (t, region), count in zip(part.decoded.sparse_places, part.new.count.tolist(), strict=True):
            if t == tensor:
                inside = slice(at, at + count)
                real = part.old[inside] != part.new.bits[inside]
                where.append(flatten(patch.table, (t, region), part.new.positions[inside][real]))
                bits.append(part.new.bits[inside][real])
            at += count
        for (t, region), dense in part.new.dense:
            if t == tensor:
                real = held.bits(t, region) != dense
                where.append(flatten(patch.table, (t, region), np.flatnonzero(real).astype(np.uint32)))
                bits.append(dense[real])
    flat, value = np.concatenate(where), np.concatenate(bits)
    order = np.argsort(flat, kind="stable")
    return flat[order], value[order]
