"""Weights on a device, as its kernels want them: which places lie there in one run, groups of them, single elements.

A run is a place whose elements follow each other in memory and in their tensor. What is on a device and is no run, like
a slice of columns, is read through host memory, as what is cast is, and written element by element.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch

from .bits import BY_NAME, DType, UIntArray
from .kernels import cpu, gpu, gpu_cells, gpu_sums
from .memory import Memory, far_tensor, leading
from .pieces import PIECE_BYTES, Geometry, Held, Numbers
from .region import whole
from .shards import Place
from .table import TensorTable

LARGE_BYTES = 128 << 20  # of a piece: kernels look at all of them in one launch, and each takes the host a while
GROUP_BYTES = 8 << 30  # of weights that kernels look at together; what they make of them takes up to a fifth of that
_SMALL = 1 << 20  # bytes that are not worth a stream of their own


@contextmanager
def working(held: Held, device: Any) -> Iterator[None]:
    """What is done inside goes to the device, on the stream of the weights at hand."""
    if (stream := held.devices[device]) is None:
        yield
        return
    with torch.cuda.stream(stream):
        stream.query()  # a thread has a context from its first call of the runtime on; Triton makes none
        yield


class Run(NamedTuple):
    """A place that is a run in all versions: where it begins in its tensor; the memory and the address of each."""

    place: Place
    dtype: DType
    numel: int
    start: int
    homes: list[torch.Tensor]
    address: list[int]


def run(place: Place, *versions: Held) -> Run | None:
    """A place as a run; None where it is none, or not on the same device in all versions."""
    tensor, region = place
    spec = versions[0].table.specs[tensor]
    start = 0 if region is None else leading(region, spec.shape)
    homes, address = list[torch.Tensor](), list[int]()
    for held in versions:
        memory, local = held.local(tensor, region)
        there = far_tensor(memory)
        lead = 0 if local is None else leading(local, memory.shape)
        if there is None or start is None or lead is None or not there.is_contiguous():
            return None
        if homes and there.device != homes[0].device:
            return None
        homes.append(there)
        address.append(memory.address + lead * spec.dtype.width)
    return Run(place, spec.dtype, spec.numel if region is None else region.numel, start or 0, homes, address)


@dataclass(frozen=True)
class Runs:
    """Runs of one dtype on one device, column by column, with where they are in one version or more."""

    dtype: DType
    device: Any
    places: list[Place]
    numel: Numbers
    start: Numbers
    address: Numbers  # versions × runs
    alive: list[torch.Tensor]

    @classmethod
    def of(cls, runs: Sequence[Run]) -> Runs:
        """Runs that were found one by one."""
        places, _, numel, start, homes, address = zip(*runs, strict=True)
        columns = np.array(numel, np.int64), np.array(start, np.int64), np.array(address, np.int64).T
        return cls(runs[0].dtype, homes[0][0].device, list(places), *columns, [t for row in homes for t in row])

    @property
    def nbytes(self) -> int:
        return int(self.numel.sum()) * self.dtype.width

    @cached_property
    def tensor(self) -> Numbers:
        return np.array([tensor for tensor, _ in self.places], np.int64)

    def some(self, which: Numbers) -> Runs:
        """Some of the runs."""
        places = [self.places[i] for i in which.tolist()]
        columns = self.numel[which], self.start[which], self.address[:, which]
        return Runs(self.dtype, self.device, places, *columns, self.alive)

    def blocks(self, keys: np.ndarray[Any, Any]) -> tuple[gpu.Blocks, list[gpu.Side]]:
        """As kernels want them; `keys` are those of all tensors, for digests."""
        made = gpu.Blocks(self.dtype.width, self.numel, self.device, keys[self.tensor], self.start)
        return made, [made.side_at(address, self.alive) for address in self.address]


def near_and_far(places: Iterable[Place], *versions: Held) -> tuple[list[Place], list[Run]]:
    """Places for the CPU, and those that are runs on the same device in all versions."""
    if not all(held.devices for held in versions):
        return [*places], []
    found = [(place, run(place, *versions)) for place in places]
    return [place for place, one in found if one is None], [one for _, one in found if one is not None]


def groups(runs: Iterable[Run], table: TensorTable, piece_bytes: int | None = None) -> Iterator[Runs]:
    """Runs in pieces, in groups of at most 8 GiB, in order of tensor and region.

    What does not begin at a 16-byte boundary has groups of its own: kernels are faster without it.
    """
    most = LARGE_BYTES if piece_bytes is None else piece_bytes
    drafts: dict[tuple[DType, Any, bool], list[Run]] = {}
    room: dict[tuple[DType, Any, bool], int] = {}
    for one in sorted(runs, key=lambda r: (r.place[0], () if r.place[1] is None else r.place[1].start)):
        for piece in _pieces(one, table, most // one.dtype.width):
            key = piece.dtype, piece.homes[0].device, not any(at % 16 for at in piece.address)
            nbytes = piece.numel * piece.dtype.width
            if room.get(key, 0) < nbytes:
                if key in drafts:
                    yield Runs.of(drafts[key])
                drafts[key], room[key] = [], GROUP_BYTES
            drafts[key].append(piece)
            room[key] -= nbytes
    for pieces in drafts.values():
        yield Runs.of(pieces)


def _pieces(one: Run, table: TensorTable, most: int) -> Iterator[Run]:
    """A run in parts of at most so many elements, which follow each other."""
    if 0 < one.numel <= most:
        yield one
    elif one.numel:
        (tensor, region), passed = one.place, 0
        for part in (region or whole(table.specs[tensor].shape)).split(most):
            address = [at + passed * one.dtype.width for at in one.address]
            yield Run((tensor, part), one.dtype, part.numel, one.start + passed, one.homes, address)
            passed += part.numel


def sums(held: Held, found: Iterable[Run]) -> Iterator[tuple[int, int, int]]:
    """Both element sums of the digest over runs, group by group, and the bytes that were read."""
    for runs in groups(found, held.table):
        with working(held, runs.device):
            blocks, (side,) = runs.blocks(held.table.keys)
            yield *pair(gpu.digest(blocks, side)), runs.nbytes


def part_sums(held: Held, found: Iterable[Run]) -> Iterator[tuple[Place, int, int, int]]:
    """Both element sums of every piece of some runs, and its bytes; pieces are those of batches."""
    for runs in groups(found, held.table, PIECE_BYTES):
        with working(held, runs.device):
            blocks, (side,) = runs.blocks(held.table.keys)
            both = fetch(gpu_sums.part_sums(blocks, side))().view(np.uint64).tolist()
        for place, numel, (first, second) in zip(runs.places, runs.numel.tolist(), both, strict=True):
            yield place, first, second, numel * runs.dtype.width


def pair(both: torch.Tensor) -> tuple[int, int]:
    """Two sums on a device as numbers."""
    first, second = both.cpu().numpy().view(np.uint64).tolist()
    return first, second


def upload(array: np.ndarray[Any, Any], device: Any) -> torch.Tensor:
    """An array on a device, as signed integers where it has more than a byte an element; through page-locked memory."""
    host = torch.empty(array.nbytes, dtype=torch.uint8, pin_memory=device.type == "cuda")  # which torch uses again
    host.numpy()[...] = array.reshape(-1).view(np.uint8)
    return host.to(device, non_blocking=True).view(gpu.INTS[array.itemsize])


def send(parts: Sequence[bytes | memoryview], device: Any) -> torch.Tensor:
    """Begin to bring bytes to the device, one part behind the other; they must stay as they are until it is done.

    What lies in page-locked memory is copied from there, and anything else by way of the driver's own.
    """
    out = torch.empty(sum(map(len, parts)), dtype=torch.uint8, device=device)
    at = 0
    for part in parts:
        if len(part):
            out[at : at + len(part)].copy_(_as_tensor(part), non_blocking=True)
        at += len(part)
    return out


def _as_tensor(buffer: bytes | memoryview) -> torch.Tensor:
    """A buffer as a tensor, of which torch need not know that it is read-only."""
    array = np.frombuffer(buffer, np.uint8)
    return torch.from_numpy(Memory(BY_NAME["uint8"], array.shape, array.ctypes.data, None, True, buffer).view())


def fetch(tensor: torch.Tensor) -> Callable[[], np.ndarray[Any, Any]]:
    """Begin to bring a tensor to page-locked memory. What it returns waits for it."""
    if tensor.device.type != "cuda":
        return tensor.numpy
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    wait = _coming(tensor.device, [tensor], lambda: host.copy_(tensor, non_blocking=True))

    def found() -> np.ndarray[Any, Any]:
        wait()
        array: np.ndarray[Any, Any] = host.numpy()
        return array

    return found


def fetch_apart(
    bodies: Sequence[Sequence[torch.Tensor]], before: Sequence[int], behind: int
) -> Callable[[], list[tuple[memoryview, int, int]]]:
    """Begin to bring bodies, of some tensors each, to page-locked memory, with bytes to spare before and behind them.

    What it returns waits for all: the memory of each, and where the body begins and ends in it.
    """
    tensors = [tensor for body in bodies for tensor in body]
    ends = np.cumsum([n + sum(t.nbytes for t in body) + behind for n, body in zip(before, bodies, strict=True)])
    device = tensors[0].device
    host = torch.empty(int(ends[-1]), dtype=torch.uint8, pin_memory=device.type == "cuda")
    spans = list[tuple[memoryview, int, int]]()

    def copy() -> None:
        view, at = host.numpy().data, 0
        for room, body, end in zip(before, bodies, ends.tolist(), strict=True):
            high = at + room
            for tensor in body:
                host[high : high + tensor.nbytes].copy_(tensor.view(torch.uint8), non_blocking=True)
                high += tensor.nbytes
            spans.append((view[at:end], room, high - at))
            at = end

    wait = _coming(device, tensors, copy)

    def found() -> list[tuple[memoryview, int, int]]:
        wait()
        return spans

    return found


def _coming(device: Any, tensors: Sequence[torch.Tensor], copy: Callable[[], object]) -> Callable[[], object]:
    """Begin to copy some tensors. What it returns waits for it.

    Large ones are copied on a stream of their own, beside whatever comes next.
    """
    if device.type != "cuda":
        copy()
        return lambda: None
    here = torch.cuda.current_stream(device)
    stream = here
    if sum(tensor.nbytes for tensor in tensors) >= _SMALL:
        stream = _aside.get(device) or _aside.setdefault(device, torch.cuda.Stream(device))  # type: ignore[no-untyped-call]
        stream.wait_stream(here)
    with torch.cuda.stream(stream):
        copy()
        done: torch.cuda.Event = stream.record_event()
    for tensor in tensors if stream is not here else ():
        tensor.record_stream(stream)
    return lambda: done.synchronize()  # noqa: PLW0108  # whose type is not known


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
