"""One bucket and the weights it changes: read the old bits, compute the new ones, swap them, and put them back."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ..errors import TiedConflict, WrongBase
from ..kernels import cpu
from ..kernels.cpu.arguments import ChangeAddresses, WordKind
from ..plan import advance
from ..weights.batches import Batch
from ..weights.digest import Digest, sums
from ..weights.dtypes import UIntArray
from ..weights.geometry import Geometry
from ..weights.local import LocalWeights
from ..weights.staging import gpu_tensor
from ..wire import Head
from .decode import Decoded, flatten, sparse
from .overlay import Overlay

if TYPE_CHECKING:
    from ..weights.gpu_elements import GpuElements


@dataclass(frozen=True)
class Staged:
    """The changes of one bucket, located in weights and ready to be written."""

    decoded: Decoded
    new: Overlay
    old_bits: UIntArray
    moved: Digest


def stage(weights: LocalWeights, decoded: Decoded) -> Staged:
    """Read the old bits, compute the new ones, and see how the digest moves. Writes nothing."""
    geometry = entry_geometry(weights, decoded.head)
    old_bits = np.empty_like(decoded.words) if decoded.old is None else decoded.old
    old = replace(
        overlay(geometry, decoded, old_bits),
        dense=[(place, weights.bits(*place)) for place, _ in decoded.dense_bits],
        on_gpu=_gpu_elements(weights, decoded, geometry),
    )
    if decoded.old is None:
        old.gather(old_bits)
    absolute = decoded.head.profile.absolute
    new_bits = decoded.words if absolute else advance(decoded.head.dtype, old_bits, decoded.words)
    moved = _sparse_moved(old, new_bits) + _dense_moved(weights, old, decoded)
    return Staged(decoded, replace(old, bits=new_bits, dense=decoded.dense_bits), old_bits, moved)


def stage_parts(weights: LocalWeights, decoded: Decoded) -> list[Staged]:
    """Stage a bucket, part by part."""
    return [stage(weights, part) for part in decoded.parts()]


def entry_geometry(weights: LocalWeights, head: Head) -> Geometry:
    """Where the sparse entries of a bucket are."""
    entries = sparse(head)
    return weights.geometry(entries.tensor, entries.region)


def _gpu_elements(weights: LocalWeights, decoded: Decoded, geometry: Geometry) -> GpuElements | None:
    """Those of the changes that are on GPUs; None if none is."""
    if not weights.gpu_streams:
        return None
    tensors = [gpu_tensor(weights.locate(*place)[0]) for place in decoded.sparse_places]
    if all(tensor is None for tensor in tensors):
        return None
    from ..weights.gpu_elements import GpuElements

    return GpuElements(weights, tensors, geometry, decoded.sparse_count, decoded.positions)


def overlay(geometry: Geometry, decoded: Decoded, bits: UIntArray | None) -> Overlay:
    """Bits for the sparse changes of a bucket."""
    assert bits is not None
    tag = np.empty(0, decoded.head.dtype.uint)
    return Overlay(tag, geometry, decoded.sparse_count, decoded.positions, bits, [])


def exchange_bits(old: Overlay, new: UIntArray, words: WordKind) -> Digest:
    """Write new bits, or steps, where `old` says, and fill `old` with the bits that were there.

    Args:
        old: Where changes go; its bits are overwritten.
        new: The new bits, or steps.
        words: Which of the two `new` are.

    Returns:
        How the digest moves.
    """
    g = old.geometry
    addresses = ChangeAddresses(old.positions.ctypes.data, new.ctypes.data, old.bits.ctypes.data)
    first, second = cpu.changes.exchange(old.tag, old.count, g.in_memory, g.in_tensor, addresses, words)
    return Digest(int(first), int(second))


def write_dense_entries(
    weights: LocalWeights, old: Overlay, new: UIntArray, moved: Digest | None, decoded: Decoded
) -> tuple[Overlay, Digest]:
    """Write the dense entries of a bucket whose sparse changes have been written.

    Args:
        weights: The weights to write to.
        old: The old bits of the sparse changes.
        new: Their new bits.
        moved: How they moved the digest, if that is known already.
        decoded: The bucket.

    Returns:
        All bits that were there before, and how the digest moved.
    """
    if moved is not None and not decoded.dense.size:
        return old, moved
    try:
        old = replace(old, dense=[(place, weights.bits(*place).copy()) for place, _ in decoded.dense_bits])
        moved = (_sparse_moved(old, new) if moved is None else moved) + _dense_moved(weights, old, decoded)
        replace(old, dense=decoded.dense_bits).write_dense(weights)
    except BaseException:
        old.write(weights)
        raise
    return old, moved


def _sparse_moved(old: Overlay, new: UIntArray) -> Digest:
    """How the digest moves when old bits become new ones."""
    first, second = cpu.changes.digest_delta(old.count, old.geometry.in_tensor, old.positions, old.bits, new)
    return Digest(int(first), int(second))


def _dense_moved(weights: LocalWeights, old: Overlay, decoded: Decoded) -> Digest:
    """How the digest moves when old regions become new ones."""
    moved = Digest()
    for (place, old_bits), (_, new_bits) in zip(old.dense, decoded.dense_bits, strict=True):
        batch = Batch.of(weights.table, *place)
        before = sums(weights.table, batch, np.array([old_bits.ctypes.data], np.int64))
        after = sums(weights.table, batch, np.array([new_bits.ctypes.data], np.int64))
        moved += after - before
    return moved


def swap(weights: LocalWeights, part: Staged) -> tuple[Overlay, Digest]:
    """Write the new bits of a staged bucket; what was there before, and how the digest moved."""
    new = part.new
    old = replace(new, bits=np.empty_like(new.bits), dense=[])
    moved = None
    if new.on_gpu is None:
        moved = exchange_bits(old, new.bits, WordKind(True, part.decoded.head.dtype.sign_magnitude))
    else:
        new.swap(old.bits)
    return write_dense_entries(weights, old, new.bits, moved, part.decoded)


def require_old_bits(weights: LocalWeights, part: Staged) -> Overlay:
    """The old bits, if they are still those that were staged on. For names that share memory."""
    bits = np.empty_like(part.old_bits)
    part.new.gather(bits)
    if not np.array_equal(bits, part.old_bits):
        raise WrongBase("the weights were changed after the patch was staged on them; nothing was written")
    return replace(part.new, bits=bits, dense=[(place, weights.bits(*place).copy()) for place, _ in part.new.dense])


def refuse_conflicts(weights: LocalWeights, tied: list[list[int]], staged: list[Staged]) -> None:
    """Names that share memory must change alike, or writing one would silently change the other."""
    for first, *others in tied:
        expected = _changes_of(weights, first, staged)
        for other in others:
            changes = _changes_of(weights, other, staged)
            if not all(np.array_equal(a, b) for a, b in zip(expected, changes, strict=True)):
                names = f"{weights.table[first].name!r} and {weights.table[other].name!r}"
                raise TiedConflict(
                    f"tensors {names} share memory but the patch changes them differently; nothing was touched"
                )


def _changes_of(weights: LocalWeights, tensor: int, staged: list[Staged]) -> tuple[npt.NDArray[np.int64], UIntArray]:
    """All changes of one tensor as positions in it and new bits, with rising positions."""
    positions = [np.empty(0, np.int64)]
    bits = [np.empty(0, weights.table[tensor].dtype.uint)]
    for part in staged:
        for _, entry_positions, entry_bits in changes(weights, part, only=tensor):
            positions.append(entry_positions)
            bits.append(entry_bits)
    flat = np.concatenate(positions)
    order = np.argsort(flat, kind="stable")
    return flat[order], np.concatenate(bits)[order]


def changes(
    weights: LocalWeights, part: Staged, *, only: int | None = None
) -> Iterator[tuple[int, npt.NDArray[np.int64], UIntArray]]:
    """The changes of a bucket before it is committed, entry by entry: a tensor, positions in it, and new bits.

    Elements set to the bits that they have do not count.

    Args:
        weights: The weights that the bucket is staged on.
        part: The bucket.
        only: The one tensor whose changes are wanted; None for all.
    """
    offset = 0
    for place, count in zip(part.decoded.sparse_places, part.new.count.tolist(), strict=True):
        if only is None or place[0] == only:
            inside = slice(offset, offset + count)
            real = part.old_bits[inside] != part.new.bits[inside]
            yield place[0], flatten(weights.table, place, part.new.positions[inside][real]), part.new.bits[inside][real]
        offset += count
    for place, dense in part.new.dense:
        if only is None or place[0] == only:
            real = weights.bits(*place) != dense
            yield place[0], flatten(weights.table, place, np.flatnonzero(real).astype(np.uint32)), dense[real]
