"""Whole weights in memory: copies, weights built from patches, and anchors, which are patches of nothing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from ..errors import ChecksumMismatch, LimitExceeded
from ..parallel import ordered, thread_count
from ..patch import Patch
from ..patch.contents import BucketList, Contents
from ..patch.snapshot import Restoration, snapshot
from ..plan import Link, Speeds, best, predict_anchor
from ..weights.digest import Digest
from ..weights.dtypes import Bits, DType
from ..weights.holdings import Holdings
from ..weights.local import LocalWeights
from ..weights.memory import Memory, Weights
from ..weights.region import Shape, whole
from ..weights.shards import Part, Place, Shards
from ..weights.staging import LazyBits, cast_origin, gpu_tensor
from ..weights.table import TensorTable
from ..weights.tensors import memories, memory_of
from .memory_limit import require_memory
from .options import EncodingOptions

SPOOL_BYTES = 256 << 20  # patches that may be larger than this lie on disk


def zeros(table: TensorTable) -> dict[str, Bits]:
    """Weights in which every bit is zero: what an anchor is a patch of. Pages not written to take no memory."""
    return {spec.name: _zeros(spec.shape, spec.dtype, table) for spec in table.specs}


def _zeros(shape: Shape, dtype: DType, table: TensorTable) -> Bits:
    try:
        return Bits(np.zeros(shape, dtype.uint), dtype)
    except (MemoryError, ValueError) as error:
        raise LimitExceeded(f"there is no memory for {table.dense_bytes} bytes of weights: {error}") from error


def copy_weights(weights: Weights | Shards, threads: int | None = None, *, on_gpu: bool = False) -> Any:
    """A copy that nobody else writes to; several tensors at a time, so that copies from a GPU overlap.

    on_gpu: whether what is on a GPU is copied to the same GPU, not to host memory.
    """

    def copy(memory: Memory) -> Any:
        if on_gpu and (tensor := gpu_tensor(memory)) is not None:
            return tensor.new_empty(tensor.shape).copy_(tensor.detach())
        if on_gpu and cast_origin(memory) is not None and isinstance(memory.owner, LazyBits):
            return memory.owner.tensor()
        return Bits(memory.copied(), memory.dtype)

    threads = 1 if on_gpu else threads  # a GPU copies in the order of this thread
    if isinstance(weights, Shards):
        copies = ordered(copy, [memory_of(part.tensor, part.data) for part in weights.parts], threads)
        parts = zip(weights.parts, copies, strict=True)
        return Shards(weights.table, [Part(part.tensor, part.region, bits) for part, bits in parts])
    named = memories(weights)
    return dict(zip(named, ordered(copy, named.values(), threads), strict=True))


def _zero_parts(table: TensorTable, places: Sequence[Place]) -> Shards:
    """Parts in which every bit is zero, if there is memory for them."""
    boxes = [(table[tensor], region or whole(table[tensor].shape)) for tensor, region in places]
    require_memory(sum(box.numel * spec.dtype.width for spec, box in boxes))
    return Shards(table, [Part(spec.name, box, _zeros(box.size, spec.dtype, table)) for spec, box in boxes])


def begin_restoration(anchor: Contents, beside: Weights | None = None) -> Restoration[dict[str, Any]]:
    """Zeros, if there is memory for them, that an anchor is about to turn into weights.

    beside: weights on GPUs; the zeros are there too, if there is room.
    """
    if beside is not None:
        from ..weights.gpu_zeros import zeros_like

        on_gpu = zeros_like(beside)
        if on_gpu is not None:
            return Restoration(anchor, on_gpu)
    require_memory(anchor.table.dense_bytes)
    return Restoration(anchor, zeros(anchor.table))


def begin_parts(anchor: Contents, places: Sequence[Place], beside: Shards | None = None) -> Restoration[Shards]:
    """Zeros, if there is memory for them, that an anchor is about to turn into some parts of its weights.

    beside: the same parts on GPUs; the zeros are there too, if there is room.
    """
    if beside is not None:
        from ..weights.gpu_zeros import zero_parts_like

        on_gpu = zero_parts_like(beside)
        if on_gpu is not None:
            return Restoration(anchor, on_gpu)
    return Restoration(anchor, _zero_parts(anchor.table, places))


def restored_parts(anchor: Patch, places: Sequence[Place], threads: int | None = None) -> Shards:
    """Some parts of the weights of an anchor."""
    restoration = begin_parts(anchor.contents, places)
    restoration.run(threads)
    return restoration.weights


def restored(anchor: Patch, threads: int | None = None) -> dict[str, Bits]:
    """The weights of an anchor."""
    restoration = begin_restoration(anchor.contents)
    restoration.run(threads)
    return restoration.weights


def apply_all(
    weights: dict[str, Bits], digest: Digest, patches: Iterable[Patch], result: Digest, threads: int | None = None
) -> dict[str, Bits]:
    """Apply patches, one after the other, to weights that have one digest, and must have another one then."""
    for patch in patches:
        patch.apply(weights, digest=digest, threads=threads)
        digest = patch.result
    if digest != result:
        raise ChecksumMismatch(f"the patches lead to {digest}, not to {result}")
    return weights


def anchor_of(
    weights: Weights | Shards,
    encoding: EncodingOptions,
    to: BucketList | None = None,
    holdings: Holdings | None = None,
) -> Patch:
    """All weights (of shards: those at hand), as the patch that makes them of nothing.

    to: a list for its buckets; None for memory, or for a file without a name where there are too many.
    holdings: the parts that receivers have, along which it is cut.
    """
    nbytes = LocalWeights.of(weights).nbytes
    coded = anchor_is_coded(encoding, nbytes)
    buckets = bucket_list(nbytes) if to is None else to
    return Patch(snapshot(weights, coded=coded, holdings=holdings, to=buckets, threads=encoding.threads))


def anchor_is_coded(encoding: EncodingOptions, nbytes: int) -> bool:
    """Whether an anchor of so many bytes is coded: as the profile says or, where there is a link, if that is faster."""
    if encoding.profile != "auto" or encoding.link is None:
        return encoding.profile != "raw"
    link = Link.parse(encoding.link) if isinstance(encoding.link, str) else encoding.link
    speeds = Speeds.load_or_built_in(thread_count(encoding.threads))
    return best(predict_anchor(nbytes, link, speeds)).name == "coded"


def bucket_list(size: int, count: int | None = None) -> BucketList:
    """Buckets of a patch that may have this size: in memory, or on disk if that would take too much."""
    return BucketList(count, memory_bytes=SPOOL_BYTES if size <= SPOOL_BYTES else 0)
