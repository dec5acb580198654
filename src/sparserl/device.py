"""Weights on a device, as its kernels want them: which places lie there in one run, groups of them, single elements.

A run is a place whose elements follow each other in memory and in their tensor. What is on a device and is no run, like
a slice of columns, is read through host memory, as what is cast is, and written element by element.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from .bits import DType, UIntArray
from .kernels import cpu, gpu, gpu_cells, gpu_sums
from .memory import far_tensor, leading
from .pieces import PIECE_BYTES, Geometry, Held, Numbers
from .region import whole
from .shards import Place

LARGE_BYTES = 64 << 20  # of a piece: kernels look at all of them in one launch, and each takes the host a while
GROUP_BYTES = 8 << 30  # of weights that kernels look at together; what they make of them takes up to a fifth of that


@contextmanager
def working(held: Held, device: Any) -> Iterator[None]:
    """What is done inside goes to the device, on the stream of the weights at hand."""
    if (stream := held.devices[device]) is None:
        yield
        return
    with torch.cuda.stream(stream):
        stream.query()  # a thread has a context from its first call of the runtime on; Triton makes none
        yield


def _lies(held: Held, place: Place) -> tuple[torch.Tensor, int, int, int] | None:
    """The device's tensor that a run is in, where it begins and ends there, and where it begins in its own tensor."""
    memory, local = held.local(*place)
    there, (tensor, region) = far_tensor(memory), place
    if there is None or not there.is_contiguous():
        return None
    start = 0 if region is None else leading(region, held.table.specs[tensor].shape)
    lead = 0 if local is None else leading(local, memory.shape)
    if start is None or lead is None:
        return None
    return there, lead, lead + (there.numel() if local is None else local.numel), start


def run(held: Held, place: Place) -> tuple[torch.Tensor, int] | None:
    """The bits of a place on a device, flat, and where it begins in its tensor; None where it is no run there."""
    if (found := _lies(held, place)) is None:
        return None
    there, low, high, start = found
    bits = gpu.as_ints(there)
    return (bits if high - low == bits.numel() else bits[low:high]), start


class _Piece(NamedTuple):
    """A run in all versions: the bits, and where they begin in their tensor."""

    place: Place
    sides: list[tuple[torch.Tensor, int]]


@dataclass(frozen=True)
class Runs:
    """Runs of one dtype on one device, column by column, with their bits in one version or more."""

    dtype: DType
    device: Any
    places: list[Place]
    numel: Numbers
    start: Numbers
    sides: list[list[torch.Tensor]]

    @classmethod
    def of(cls, dtype: DType, device: Any, pieces: Sequence[_Piece]) -> Runs:
        """Runs that were found one by one."""
        places = [piece.place for piece in pieces]
        sides = [[bits for bits, _ in side] for side in zip(*(piece.sides for piece in pieces), strict=True)]
        numel, start = ([piece.sides[0][0].numel() for piece in pieces], [piece.sides[0][1] for piece in pieces])
        return cls(dtype, device, places, np.array(numel, np.int64), np.array(start, np.int64), sides)

    @property
    def nbytes(self) -> int:
        return int(self.numel.sum()) * self.dtype.width

    @property
    def tensor(self) -> Numbers:
        return np.array([tensor for tensor, _ in self.places], np.int64)

    def some(self, which: Sequence[int]) -> Runs:
        """Some of the runs."""
        sides = [[side[i] for i in which] for side in self.sides]
        return Runs(
            self.dtype, self.device, [self.places[i] for i in which], self.numel[which], self.start[which], sides
        )

    def blocks(self, keys: np.ndarray[Any, Any]) -> tuple[gpu.Blocks, list[gpu.Side]]:
        """As kernels want them; `keys` are those of all tensors, for digests."""
        made = gpu.Blocks(self.dtype.width, self.numel.tolist(), self.device, keys[self.tensor], self.start.tolist())
        return made, [made.side(side) for side in self.sides]


def near_and_far(places: Iterable[Place], *versions: Held) -> tuple[list[Place], list[Place]]:
    """Places for the CPU, and those that are runs on the same device in all versions."""
    near: list[Place] = []
    far: list[Place] = []
    if not all(held.devices for held in versions):
        return [*places], far
    for place in places:
        found = [_lies(held, place) for held in versions]
        there = {None if one is None else one[0].device for one in found}
        (near if None in there or len(there) > 1 else far).append(place)
    return near, far


def groups(places: Iterable[Place], *versions: Held, piece_bytes: int | None = None) -> Iterator[Runs]:
    """Runs in pieces, in groups of at most 8 GiB, in order of tensor and region.

    What does not begin at a 16-byte boundary has groups of its own: kernels are faster without it.
    """
    table, most = versions[0].table, LARGE_BYTES if piece_bytes is None else piece_bytes
    drafts: dict[tuple[DType, Any, bool], list[_Piece]] = {}
    room: dict[tuple[DType, Any, bool], int] = {}
    for place in sorted(places, key=lambda p: (p[0], () if p[1] is None else p[1].start)):
        spec = table.specs[place[0]]
        every = place[1] or whole(spec.shape)
        small = every.numel * spec.dtype.width <= most
        regions = [place[1]] if small else every.split(most // spec.dtype.width)
        for region in regions if every.numel else ():
            found = [run(held, (place[0], region)) for held in versions]
            piece = _Piece((place[0], region), [f for f in found if f is not None])
            key = spec.dtype, piece.sides[0][0].device, not any(bits.data_ptr() % 16 for bits, _ in piece.sides)
            nbytes = piece.sides[0][0].nbytes
            if room.get(key, 0) < nbytes:
                if key in drafts:
                    yield Runs.of(*key[:2], drafts[key])
                drafts[key], room[key] = [], GROUP_BYTES
            drafts[key].append(piece)
            room[key] -= nbytes
    for key, pieces in drafts.items():
        yield Runs.of(*key[:2], pieces)


def sums(held: Held, places: Iterable[Place]) -> Iterator[tuple[int, int, int]]:
    """Both element sums of the digest over runs, group by group, and the bytes that were read."""
    for runs in groups(places, held):
        with working(held, runs.device):
            blocks, (side,) = runs.blocks(held.table.keys)
            yield *pair(gpu.digest(blocks, side)), runs.nbytes


def part_sums(held: Held, places: Iterable[Place]) -> Iterator[tuple[Place, int, int, int]]:
    """Both element sums of every piece of some runs, and its bytes; pieces are those of batches."""
    for runs in groups(places, held, piece_bytes=PIECE_BYTES):
        with working(held, runs.device):
            blocks, (side,) = runs.blocks(held.table.keys)
            found = fetch(gpu_sums.part_sums(blocks, side))().view(np.uint64).tolist()
        for place, numel, (first, second) in zip(runs.places, runs.numel.tolist(), found, strict=True):
            yield place, first, second, numel * runs.dtype.width


def pair(both: torch.Tensor) -> tuple[int, int]:
    """Two sums on a device as numbers."""
    first, second = both.cpu().numpy().view(np.uint64).tolist()
    return first, second


def upload(array: np.ndarray[Any, Any], device: Any) -> torch.Tensor:
    """An array on a device, as signed integers where it has more than a byte an element; through page-locked memory."""
    dtype = gpu.INTS[array.itemsize]
    if device.type != "cuda":
        return torch.from_numpy(array.copy().view(np.uint8)).view(dtype)
    host = torch.empty(array.size, dtype=dtype, pin_memory=True)  # torch uses such memory again
    host.view(torch.uint8).numpy()[...] = array.view(np.uint8)
    return host.to(device, non_blocking=True)


def fetch(tensor: torch.Tensor) -> Callable[[], np.ndarray[Any, Any]]:
    """Begin to bring a tensor to page-locked memory, beside whatever comes next. What it returns waits for it."""
    if tensor.device.type != "cuda":
        return tensor.numpy
    aside = _aside.setdefault(tensor.device, torch.cuda.Stream(tensor.device))  # type: ignore[no-untyped-call]
    aside.wait_stream(torch.cuda.current_stream(tensor.device))
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    with torch.cuda.stream(aside):
        host.copy_(tensor, non_blocking=True)
        copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        copied.record(aside)
    tensor.record_stream(aside)

    def wait() -> np.ndarray[Any, Any]:
        copied.synchronize()
        found: np.ndarray[Any, Any] = host.numpy()
        return found

    return wait


_aside: dict[Any, torch.cuda.Stream] = {}


class Cells:
    """Those of some changes that are on devices: which ones, and where they are, in any memory layout."""

    def __init__(self, held: Held, homes: Sequence[Any], geometry: Geometry, count: Numbers, positions: Any) -> None:
        """homes: the tensor on a device that each entry is in; None for the others."""
        self._held, self._parts = held, list[tuple[torch.Tensor, torch.Tensor, Any]]()
        owner = np.repeat(np.arange(count.size), count)
        for device in {there.device for there in homes if there is not None}:
            mine = np.array([there is not None and there.device == device for there in homes], bool)
            base = next(there for there in homes if there is not None and there.device == device)
            which = np.flatnonzero(mine[owner])
            width, where = base.element_size(), np.empty(which.size, np.int64)
            first, g = (geometry.first[mine] - base.data_ptr()) // width, geometry
            cpu.locate(count[mine], first, g.dims[mine], g.size[mine], g.inside[mine], positions[which], where)
            with working(held, device):
                self._parts.append((base.detach().view(gpu.INTS[width]), upload(where, device), which))
        self.near = np.array([there is None for there in homes], bool)  # entries for the CPU
        self.here = self.near[owner]  # changes for the CPU

    def take(self, out: UIntArray) -> None:
        """Read the bits that are there, each to the place of its change."""
        for base, where, which in self._parts:
            with working(self._held, base.device):
                out[which] = fetch(gpu_cells.take(base, where))().view(out.dtype)

    def put(self, bits: UIntArray) -> None:
        """Write bits, of those of all changes."""
        for base, where, which in self._parts:
            with working(self._held, base.device):
                gpu_cells.put(base, where, upload(bits[which], base.device))
        self.finish()

    def finish(self) -> None:
        """Wait until what was written is there for all to see."""
        for base, _, _ in self._parts:
            if (stream := self._held.devices[base.device]) is not None:
                stream.synchronize()


def write(held: Held, place: Place, bits: UIntArray) -> bool:
    """Write all bits of a place that is on a device; False where it is not on one."""
    memory, local = held.local(*place)
    if (there := far_tensor(memory)) is None:
        return False
    with working(held, there.device), torch.no_grad():
        target = there.detach().view(gpu.INTS[memory.dtype.width])
        target = target if local is None else target[local.slices]
        target.copy_(upload(bits, there.device).view(target.shape))
        if (stream := held.devices[there.device]) is not None:
            stream.synchronize()
    return True
