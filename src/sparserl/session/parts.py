"""Some parts of a run's weights, as one rank of several has them, built from an anchor and the patches after it.

A rank writes what an anchor or a patch has of its parts, and skips the rest. What was encoded with `ctx` depends on
old bits: where a bucket changes some of the parts, all regions of that bucket are built too, and dropped at the end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from functools import partial

from ..parallel import ordered
from ..patch import Patch
from ..patch.contents import Contents
from ..patch.decode import sparse
from ..patch.sliced import stage_slices
from ..patch.slicing import PatchSlicer, write_slices
from ..weights.dtypes import Bits
from ..weights.local import LocalWeights
from ..weights.region import Region, bounding, intersection, whole
from ..weights.shards import Part, Place, Shards
from ..weights.table import TensorTable

_Boxes = dict[int, list[Region]]  # of every tensor


def decodable_places(table: TensorTable, places: Iterable[Place], patches: Iterable[Patch]) -> list[Place]:
    """Places that contain the given ones, and with them all old bits that it takes to decode the patches there."""
    boxes: _Boxes = {}
    for tensor, region in places:
        boxes.setdefault(tensor, []).append(region or whole(table[tensor].shape))
    buckets = [bucket for patch in patches for bucket in _dependent_regions(table, patch)]
    has_grown = True
    while has_grown:
        has_grown = False
        for bucket in buckets:
            if any(_touches(boxes, tensor, region) for tensor, region in bucket):
                for tensor, region in bucket:
                    has_grown |= _include(boxes.setdefault(tensor, []), region)
    return [
        (tensor, None if box == whole(table[tensor].shape) else box)
        for tensor in sorted(boxes)
        for box in boxes[tensor]
    ]


def _dependent_regions(table: TensorTable, patch: Patch) -> list[list[tuple[int, Region]]]:
    """Of every bucket that takes old bits to decode, the regions that these are in."""
    buckets = []
    for head in patch.contents.heads:
        if head.profile.conditional:
            entries = sparse(head)
            rows = zip(entries.tensor.tolist(), entries.region, strict=True)
            buckets.append([(tensor, region or whole(table[tensor].shape)) for tensor, region in rows])
    return buckets


def _touches(boxes: _Boxes, tensor: int, region: Region) -> bool:
    return any(intersection(box, region) is not None for box in boxes.get(tensor, ()))


def _include(boxes: list[Region], region: Region) -> bool:
    """Let boxes, which stay disjoint, contain a region; whether they did not before."""
    if any(region.inside(box) for box in boxes):
        return False
    grown = region
    while overlapping := [box for box in boxes if intersection(box, grown) is not None]:
        for box in overlapping:
            boxes.remove(box)
            grown = bounding(grown, box)
    boxes.append(grown)
    return True


def apply_to_parts(weights: Shards, patches: Iterable[Patch], threads: int | None = None) -> None:
    """Apply patches of all weights to parts that nobody has seen yet. If it fails, they must not be used.

    weights: at the places that `decodable_places` gave.
    """
    local = LocalWeights.of(weights)
    slicer = PatchSlicer(local)

    def write(contents: Contents, index: int) -> None:
        head, _ = contents.open_bucket(index)
        if slicer.touches(head):
            write_slices(local, slicer, contents.decode(index, local))

    for patch in patches:
        if local.has_kernels and _applied_on_gpu(local, patch, threads):
            continue
        deque(ordered(partial(write, patch.contents), patch.contents.arrivals(), threads), maxlen=0)


def _applied_on_gpu(weights: LocalWeights, patch: Patch, threads: int | None) -> bool:
    """Apply a patch where weights lie on GPUs; False if there is no room for its changes."""
    import torch

    try:
        staged = stage_slices(patch.contents, weights, [weights], threads, only_touched=True)
    except torch.cuda.OutOfMemoryError:
        return False
    for application in staged:
        application.commit(threads)
    return True


def cut(weights: Shards, places: Sequence[Place]) -> Shards:
    """Parts at these places: those that the weights have as they are, others as copies of what contains them."""
    local = LocalWeights.of(weights)
    table = weights.table
    own = {(table.index[part.tensor], part.region): part for part in weights.parts}
    parts = []
    for tensor, region in places:
        spec = table[tensor]
        box = region or whole(spec.shape)
        part = own.get((tensor, box))
        if part is None:
            part = Part(spec.name, box, Bits(local.view(tensor, box).copy(), spec.dtype))
        parts.append(part)
    return Shards(table, parts)
