"""Weights on a device, as its kernels want them: which places lie there in one run, groups of them, single elements.

A run is a place whose elements follow each other in memory and in their tensor. What is on a device and is no run, like
a slice of columns, is read through host memory, as what is cast is, and written element by element.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ..kernels import cpu, gpu
from .dtypes import BY_NAME, DType, UIntArray
from .memory import Memory, far_tensor, leading
from .pieces import PIECE_BYTES, Batch, Geometry, Held, Numbers
from .region import Region, whole
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


@dataclass(frozen=True)
class Runs:
    """Runs of one dtype on one device, column by column, with where they are in one version or more."""

    dtype: DType
    device: Any
    places: list[Place]
    tensor: Numbers
    numel: Numbers
    start: Numbers  # where each begins in its tensor
    address: Numbers  # versions × runs
    base: torch.Tensor  # on the device, of the same width
    alive: Sequence[Held]

    @property
    def nbytes(self) -> int:
        return int(self.numel.sum()) * self.dtype.width

    @property
    def aligned(self) -> npt.NDArray[np.bool_]:
        """Which begin at a 16-byte boundary in all versions."""
        found: npt.NDArray[np.bool_] = (self.address % 16 == 0).all(0)
        return found

    def some(self, which: Numbers) -> Runs:
        """Some of the runs."""
        places = [self.places[i] for i in which.tolist()]
        columns = self.tensor[which], self.numel[which], self.start[which], self.address[:, which]
        return Runs(self.dtype, self.device, places, *columns, self.base, self.alive)

    @classmethod
    def joined(cls, parts: Sequence[Runs]) -> Runs:
        """Runs of the same kind, one behind the other."""
        one = parts[0]
        places = [place for part in parts for place in part.places]
        rows = zip(*((p.tensor, p.numel, p.start, p.address) for p in parts), strict=True)
        tensor, numel, start, address = (np.concatenate(row, axis=-1) for row in rows)
        return cls(one.dtype, one.device, places, tensor, numel, start, address, one.base, one.alive)

    def pieces(self, table: TensorTable, most: int) -> Runs:
        """In order of tensor and region, in parts of at most so many elements, which follow each other."""
        if (np.diff(self.tensor) <= 0).any():
            key = [(tensor, () if region is None else region.start) for tensor, region in self.places]
            order = sorted(range(len(key)), key=key.__getitem__)
            if order != [*range(len(key))]:
                return self.some(np.array(order, np.int64)).pieces(table, most)
        if ((self.numel > 0) & (self.numel <= most)).all():
            return self
        cut: dict[int, list[Region]] = {}
        for i in np.flatnonzero(self.numel > most).tolist():
            tensor, region = self.places[i]
            cut[i] = [*(region or whole(table.specs[tensor].shape)).split(most)]
        many = (self.numel > 0).astype(np.int64)
        many[[*cut]] = [*map(len, cut.values())]
        which, last = np.repeat(np.arange(many.size), many), np.cumsum(many)
        made, numel = self.some(which), self.numel[which]
        for i, regions in cut.items():
            mine = slice(int(last[i]) - len(regions), int(last[i]))
            made.places[mine] = [(self.places[i][0], region) for region in regions]
            numel[mine] = [region.numel for region in regions]
        ahead = np.cumsum(numel) - numel
        passed = ahead - ahead[(last - many)[which]]  # elements of its run that stand before a piece
        return replace(made, numel=numel, start=made.start + passed, address=made.address + passed * self.dtype.width)

    def blocks(self, keys: np.ndarray[Any, Any]) -> tuple[gpu.changes.Blocks, list[gpu.changes.Side]]:
        """As kernels want them; `keys` are those of all tensors, for digests."""
        stream = torch.cuda.current_stream(self.device).cuda_stream if self.device.type == "cuda" else 0
        columns = self.numel.tobytes(), self.start.tobytes(), keys[self.tensor].tobytes()
        made = _blocks(self.dtype.width, self.device, stream, *columns)
        return made, [made.side_at(address, self.base, self.alive) for address in self.address]


@lru_cache(maxsize=8)
def _blocks(width: int, device: Any, _stream: int, numel: bytes, start: bytes, keys: bytes) -> gpu.changes.Blocks:
    """Blocks are made of these numbers alone, so those of the last sync will do; on their own stream, which made them.

    Addresses are no part of them, and nothing of a tensor is kept.
    """
    rows = np.frombuffer(numel, np.int64), device, np.frombuffer(keys, np.uint64).reshape(-1, 2)
    return gpu.changes.Blocks(width, *rows, np.frombuffer(start, np.int64))


def near_and_far(places: Iterable[Place], *versions: Held) -> tuple[list[Place], list[Runs]]:
    """Places for the CPU, and those that are runs on the same device in all versions, by dtype and device."""
    rest, devices = [*places], [*versions[0].devices]
    if not rest or not all(held.devices for held in versions):
        return rest, []
    table, tensor = versions[0].table, np.array([tensor for tensor, _ in rest], np.int64)
    start, numel = np.zeros(tensor.size, np.int64), table.numel[tensor]
    home, address = map(np.stack, zip(*(held.on_devices(tensor, devices) for held in versions), strict=True))
    for i in np.flatnonzero((home != home[0]).any(0) | (home[0] < 0) | [r is not None for _, r in rest]).tolist():
        one = _run(rest[i], versions)
        home[:, i] = -1
        if one is not None and one[0] in devices:
            home[:, i], numel[i], start[i], address[:, i] = devices.index(one[0]), *one[1:]
    kind = np.where(home[0] < 0, -1, home[0] * 256 + table.codes[tensor])
    far = []
    for its in np.unique(kind[kind >= 0]).tolist():
        mine = np.flatnonzero(kind == its)
        first = int(mine[np.argmax(numel[mine] > 0)])  # an empty tensor has no address
        base = far_tensor(versions[0].local(*rest[first])[0])
        every = [rest[i] for i in mine.tolist()], tensor[mine], numel[mine], start[mine], address[:, mine]
        far.append(Runs(table.specs[int(tensor[first])].dtype, devices[its >> 8], *every, base, versions))
    return [rest[i] for i in np.flatnonzero(kind < 0).tolist()], far


def runs_of(batch: Batch, held: Held) -> Runs | None:
    """The entries of a batch as runs on one device; None where they are not."""
    devices = [*held.devices]
    home, address = held.on_devices(batch.tensor, devices)
    places = [*zip(batch.tensor.tolist(), batch.region, strict=True)]
    if (home != home[0]).any() or home[0] < 0 or batch.region.count(None) < len(places):
        near, far = near_and_far(places, held)
        return far[0] if not near and len(far) == 1 else None
    columns = batch.tensor, batch.numel, np.zeros(home.size, np.int64), address[None]
    base = far_tensor(held.local(*places[0])[0])
    return Runs(batch.dtype, devices[int(home[0])], places, *columns, base, (held,))


def _run(place: Place, versions: Sequence[Held]) -> tuple[Any, int, int, list[int]] | None:
    """Device, elements, start in the tensor, and addresses of a place that is a run in all versions; else None."""
    tensor, region = place
    spec = versions[0].table.specs[tensor]
    start = 0 if region is None else leading(region, spec.shape)
    devices, address = set[Any](), list[int]()
    for held in versions:
        memory, local = held.local(tensor, region)
        there = far_tensor(memory)
        lead = 0 if local is None else leading(local, memory.shape)
        if there is None or start is None or lead is None or not there.is_contiguous():
            return None
        devices.add(there.device)
        address.append(memory.address + lead * spec.dtype.width)
    if len(devices) > 1:
        return None
    return devices.pop(), spec.numel if region is None else region.numel, start or 0, address


def groups(far: Iterable[Runs], table: TensorTable, piece_bytes: int | None = None) -> Iterator[Runs]:
    """Runs in pieces, in groups of about 8 GiB at most, all alike, in order of tensor and region.

    What does not begin at a 16-byte boundary has groups of its own: kernels are faster without it.
    """
    most = LARGE_BYTES if piece_bytes is None else piece_bytes
    for runs in far:
        pieces = runs.pieces(table, most // runs.dtype.width)
        for mine in (pieces.aligned, ~pieces.aligned):
            which = np.flatnonzero(mine)
            size = pieces.numel[which] * pieces.dtype.width
            total = int(size.sum())
            share = (np.cumsum(size) - size) * -(-total // GROUP_BYTES) // max(total, 1)
            for group in np.split(which, np.flatnonzero(np.diff(share)) + 1) if which.size else ():
                yield pieces.some(group)


def sums(held: Held, found: Iterable[Runs]) -> Iterator[tuple[int, int, int]]:
    """Both element sums of the digest over runs, group by group, and the bytes that were read."""
    for runs in groups(found, held.table):
        with working(held, runs.device):
            blocks, (side,) = runs.blocks(held.table.keys)
            yield *pair(gpu.changes.digest(blocks, side)), runs.nbytes


def part_sums(held: Held, found: Iterable[Runs]) -> Iterator[tuple[Place, int, int, int]]:
    """Both element sums of every piece of some runs, and its bytes; pieces are those of batches."""
    for runs in groups(found, held.table, PIECE_BYTES):
        with working(held, runs.device):
            blocks, (side,) = runs.blocks(held.table.keys)
            both = fetch(gpu.sums.part_sums(blocks, side))().view(np.uint64).tolist()
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
    return host.to(device, non_blocking=True).view(gpu.changes.INTS[array.itemsize])


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
            cpu.changes.locate(count[mine], first, g.dims[mine], g.size[mine], g.inside[mine], positions[which], where)
            with working(held, device):
                self._parts.append((base.detach().view(gpu.changes.INTS[width]), upload(where, device), which))
        self.near = np.array([there is None for there in homes], bool)  # entries for the CPU
        self.here = self.near[owner]  # changes for the CPU

    def take(self, out: UIntArray) -> None:
        """Read the bits that are there, each to the place of its change."""
        for base, where, which in self._parts:
            with working(self._held, base.device):
                out[which] = fetch(gpu.cells.take(base, where))().view(out.dtype)

    def put(self, bits: UIntArray) -> None:
        """Write bits, of those of all changes."""
        for base, where, which in self._parts:
            with working(self._held, base.device):
                gpu.cells.put(base, where, upload(bits[which], base.device))
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
        target = there.detach().view(gpu.changes.INTS[memory.dtype.width])
        target = target if local is None else target[local.slices]
        target.copy_(upload(bits, there.device).view(target.shape))
        if (stream := held.devices[there.device]) is not None:
            stream.synchronize()
    return True
