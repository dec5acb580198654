"""Landing a patch: check the base, stage every change, check the result, then write.

    weights ──► digest = base? ──► decode, read old bits, sum up ──► digest = result? ──► scatter
                     └ result: nothing to do    (weights untouched so far)

Nothing is written before everything has been decoded and the tracked digest equals the patch's result, so a patch
is applied whole or not at all. An interrupt (Ctrl-C) comes before the first bit is written or after the last one;
only the end of the process can stop it in between, or memory that runs out while changes beyond 256 MiB are decoded
for the second time.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from ..bits import UIntArray
from ..codec.profile import Counts, Positions
from ..digest import Digest, element_sums, sums, table_digest
from ..errors import InvalidField, TiedConflict, WrongBase
from ..kernels import cpu
from ..memory import Weights, memories, require_like, require_writable, tied_groups
from ..parallel import Progress, ordered, uninterrupted
from ..pieces import Batch, Geometry, Held
from ..plan import advance
from ..region import whole
from .decode import Decoded, flatten
from .patch import Patch

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
    geometry: Geometry
    count: Counts
    positions: Positions
    old: UIntArray
    new: UIntArray
    moved: Digest

    @property
    def nbytes(self) -> int:
        return sum(a.nbytes for a in (self.positions, self.old, self.new, self.decoded.words, self.decoded.dense))

    def slim(self) -> Staged:
        """What is needed to write it: without the old bits, and without the steps that led to the new ones."""
        return replace(self, old=self.old[:0], decoded=replace(self.decoded, words=self.decoded.words[:0], old=None))


def apply(
    patch: Patch,
    weights: Weights,
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

    Memory: the decoded changes are held until the result is known to be right, four bytes and one element for each, up
    to 256 MiB. Of what is beyond that the buckets' own bytes are held, and decoded a second time to be written.
    """
    memory = memories(weights)
    require_like(patch.table, memory, "the patch", "the weights")
    held = Held(patch.table, memory)
    current = digest_of(patch, held, threads, progress) if digest is None else digest
    if current == patch.result:
        return Applied(patch.result, 0, already=True)
    if current != patch.base:
        raise WrongBase(
            f"the weights have digest {current}; the patch turns {patch.base} into {patch.result}. "
            "Nothing was touched: fetch the patch that starts from these weights, or a full copy"
        )
    touched = {patch.table[t].name for head in patch.heads for t in np.unique(head.entries.tensor).tolist()}
    require_writable((name, memory[name]) for name in touched)
    tied = tied_groups(memory)
    result = current
    staged: list[Staged | tuple[int, bytes]] = []
    room = KEEP_BYTES
    for index, data, part in ordered(lambda i: _staged(patch, held, i), range(patch.buckets), threads):
        result += part.moved
        slim = part if tied else part.slim()
        room -= slim.nbytes
        staged.append(slim if tied or room >= 0 else (index, bytes(data)))
    if result != patch.result:
        raise InvalidField(
            f"the changes lead to digest {result}, the patch promises {patch.result}; nothing was touched"
        )
    _refuse_conflicts(patch, held, tied, [part for part in staged if isinstance(part, Staged)])

    def land(part: Staged | tuple[int, bytes]) -> None:
        commit(held, part if isinstance(part, Staged) else stage(held, patch.parse(*part, held)))

    uninterrupted(lambda: deque(ordered(land, staged, threads), maxlen=0))
    return Applied(patch.result, patch.changed, already=False)


def _staged(patch: Patch, held: Held, index: int) -> tuple[int, bytes | memoryview, Staged]:
    data = patch.bucket(index)
    return index, data, stage(held, patch.parse(index, data, held))


def digest_of(patch: Patch, held: Held, threads: int | None = None, progress: Progress | None = None) -> Digest:
    """The digest of weights over what a patch covers: to be compared with its base and its result."""
    read = element_sums(held, patch.covers, threads, progress)
    return read + table_digest(patch.table) if patch.complete else read


def stage(held: Held, decoded: Decoded) -> Staged:
    """Read the old bits, compute the new ones, and see how the digest moves. Writes nothing."""
    dtype = decoded.head.dtype
    tag = np.empty(0, dtype.uint)
    count, positions = decoded.sparse_count, decoded.positions
    g = held.geometry(decoded.sparse_tensor, [r for _, r in decoded.sparse_places])
    if decoded.old is None:
        old = np.empty(positions.size, dtype.uint)
        cpu.gather(tag, count, g.first, g.dims, g.size, g.inside, positions, old)
    else:
        old = decoded.old
    new = decoded.words if decoded.head.profile.absolute else advance(dtype, old, decoded.words)
    first, second = cpu.digest_delta(count, g.start, g.dims, g.size, g.outside, g.keys, positions, old, new)
    moved = Digest(int(first), int(second))
    for (tensor, region), _, bits in decoded.dense_entries():
        batch = Batch.of(held.table, tensor, region)
        address, alive = held.read(batch)
        was = sums(held.table, batch, address)
        moved += sums(held.table, batch, np.array([bits.ctypes.data], np.int64)) - was
        del alive  # copies may go only now
    return Staged(decoded, g, count, positions, old, new, moved)


def commit(held: Held, part: Staged) -> None:
    """Write the new bits, and nothing but them."""
    g = part.geometry
    tag = np.empty(0, part.decoded.head.dtype.uint)
    cpu.scatter(tag, part.count, g.first, g.dims, g.size, g.inside, part.positions, part.new)
    for (tensor, region), _, bits in part.decoded.dense_entries():
        memory = held.memory[tensor]
        assert memory is not None
        region = region or whole(memory.shape)
        memory.view()[region.slices] = bits.reshape(region.size)


def _refuse_conflicts(patch: Patch, held: Held, tied: list[list[str]], staged: list[Staged]) -> None:
    """Names that share memory must change alike, or writing one would silently change the other."""
    for group in tied:
        first, *others = group
        expected = _flat(patch, held, first, staged)
        for other in others:
            if not all(np.array_equal(a, b) for a, b in zip(expected, _flat(patch, held, other, staged), strict=True)):
                raise TiedConflict(
                    f"tensors {first!r} and {other!r} share memory but the patch changes them differently; "
                    "nothing was touched"
                )


def _flat(patch: Patch, held: Held, name: str, staged: list[Staged]) -> tuple[npt.NDArray[np.int64], UIntArray]:
    """All changes of one tensor as positions in it and new bits; elements set to the bits they have do not count."""
    tensor = patch.table.index[name]
    where, bits = [np.empty(0, np.int64)], [np.empty(0, patch.table[tensor].dtype.uint)]
    for part in staged:
        at = 0
        for (t, region), count in zip(part.decoded.sparse_places, part.count.tolist(), strict=True):
            if t == tensor:
                inside = slice(at, at + count)
                real = part.old[inside] != part.new[inside]
                where.append(flatten(patch.table, (t, region), part.positions[inside][real]))
                bits.append(part.new[inside][real])
            at += count
        for (t, region), _, dense in part.decoded.dense_entries():
            if t == tensor:
                real = held.bits(t, region) != dense
                where.append(flatten(patch.table, (t, region), np.flatnonzero(real).astype(np.uint32)))
                bits.append(dense[real])
    flat, value = np.concatenate(where), np.concatenate(bits)
    order = np.argsort(flat, kind="stable")
    return flat[order], value[order]
