"""All weights replaced by others: what an anchor brings to a receiver whose weights have little in common with it."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator

import numpy as np

from ..parallel import ordered
from ..weights.digest import Digest, element_sums
from ..weights.dtypes import UIntArray
from ..weights.local import LocalWeights
from ..weights.region import whole
from ..weights.shards import Place
from .application import write_or_undo
from .overlay import write_regions

_PIECE_BYTES = 16 << 20  # that a thread copies at a time
_GPU_PIECE_BYTES = 256 << 20  # that a GPU copies at a time
_SAMPLE_ELEMENTS = 4096  # of each part that is looked at
_SAMPLED_PARTS = 64  # the largest ones
_SHARE = 0.25  # of the sample; where more differs, it takes longer to find the differences than to write everything


class Replacement:
    """All bits of some weights, staged: nothing is decoded or compared, and nothing written before the commit.

    Args:
        weights: The weights to write to.
        fresh: The same parts, with the new bits. They must not change before the commit.
        exchange: Whether a commit may write the old bits to `fresh`, which takes no memory; else it keeps a copy.
    """

    def __init__(self, weights: LocalWeights, fresh: LocalWeights, *, exchange: bool = False) -> None:
        self._weights = weights
        self._fresh = fresh
        self._exchange = exchange
        self.changed = weights.elements
        self._is_on_gpu = exchange and bool(weights.gpu_streams) and bool(fresh.gpu_streams)

    @classmethod
    def of(cls, weights: LocalWeights, fresh: LocalWeights, *, exchange: bool = False) -> Replacement | None:
        """A replacement, if most bits differ; None if it is better to find those that do, or if names share memory."""
        if weights.tied or not _mostly_differ(weights, fresh):
            return None
        return cls(weights, fresh, exchange=exchange)

    def sums(self, threads: int | None = None) -> tuple[Digest, Digest]:
        """The element sums of the parts, before and after."""
        places = self._weights.places
        return element_sums(self._weights, places, threads), element_sums(self._fresh, places, threads)

    def commit(self, threads: int | None = None) -> Callable[[], None]:
        """Write the new bits, and return a function that takes them back. If anything fails, they are taken back."""
        old_bits: dict[Place, UIntArray] = {}  # of pieces that were written, unless `fresh` has them
        exchanged: list[Place] = []
        swapped: list[Place] = []  # on a GPU

        def write(piece: Place) -> None:
            if self._is_on_gpu and self._swap(piece):
                swapped.append(piece)
                return
            old_bits[piece] = self._weights.bits(*piece).copy()
            write_regions(self._weights, [(piece, self._fresh.bits(*piece))])
            if self._exchange:
                write_regions(self._fresh, [(piece, old_bits[piece])])
                exchanged.append(piece)
                del old_bits[piece]

        def write_all() -> None:
            deque(ordered(write, self._pieces(), 1 if self._is_on_gpu else threads), maxlen=0)
            if self._is_on_gpu:
                self._finish_on_gpu()

        def undo() -> None:
            for piece in swapped:
                self._swap(piece)
            if swapped:
                self._finish_on_gpu()
            swapped.clear()
            write_regions(self._weights, old_bits.items())
            write_regions(self._weights, ((piece, self._fresh.bits(*piece)) for piece in exchanged))
            old_bits.clear()
            exchanged.clear()

        return write_or_undo(self._weights, write_all, undo)

    def _swap(self, piece: Place) -> bool:
        from ..weights import on_gpu

        return on_gpu.swap(self._weights, self._fresh, piece)

    def _finish_on_gpu(self) -> None:
        from ..weights import on_gpu

        on_gpu.finish(self._weights)

    def _pieces(self) -> Iterator[Place]:
        """The parts, cut so that few bytes are copied at a time."""
        for tensor, region in self._weights.places:
            spec = self._weights.table[tensor]
            box = region or whole(spec.shape)
            limit = (_GPU_PIECE_BYTES if self._is_on_gpu else _PIECE_BYTES) // spec.dtype.width
            if box.numel <= limit:
                yield tensor, region
            else:
                yield from ((tensor, piece) for piece in box.split(limit))


def _mostly_differ(weights: LocalWeights, fresh: LocalWeights) -> bool:
    """Whether more than some of a sample of the bits differ."""
    parts = sorted(weights.parts, key=lambda part: -math.prod(part[1].shape))
    elements = 0
    differing = 0
    for (tensor, region), _ in parts[:_SAMPLED_PARTS]:
        box = region or whole(weights.table[tensor].shape)
        sample = next(iter(box.split(_SAMPLE_ELEMENTS)), None) if box.numel else None
        if sample is not None:
            elements += sample.numel
            differing += int(np.count_nonzero(weights.bits(tensor, sample) != fresh.bits(tensor, sample)))
    return differing > _SHARE * elements
