"""The parts that steps write to, row by row: where they lie, their bits before a step, and what it changed.

Kernels take many rows at a time. What Python works out for each is kept in a plan, for as long as nothing moves.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..errors import TensorMismatch
from ..kernels import cpu
from ..patch.cpu_compare import scan
from ..weights.batches import PIECE_BYTES, Batch, batches
from ..weights.dtypes import UIntArray
from ..weights.geometry import Geometry, tensor_geometry
from ..weights.marks import Bitmap
from ..weights.memory import Memory, address_of
from ..weights.region import Numbers, Region, run_start, whole
from ..weights.shards import Place
from ..weights.staging import LazyBits, StagingBuffer, gpu_tensor
from ..weights.table import TensorTable
from ..weights.tensors import memory_of

Key = tuple[str, Region]
Mask = npt.NDArray[np.bool_]
Bits = tuple[Numbers, object]  # addresses of bits in row-major order, and what keeps them there


class Row(NamedTuple):
    """A part that is tracked."""

    part: int  # which one, of those that the source has
    key: Key
    weight: Any  # what its master is known by; None if it has none
    counted: bool  # whether torch's count of the writes to it tells of writes by others


class Cut(NamedTuple):
    """Rows that are worked on together: some small ones, or a piece of a large one."""

    batch: Batch
    rows: Numbers
    piece: Region | None  # in the coordinates of its part; None for all of it
    geometry: Geometry
    mastered: bool


class Copy(NamedTuple):
    """The old bits of some rows of a cut. Those of rows with masters are where they were: nothing is copied."""

    cut: Cut
    some: Numbers
    bits: Bits


class Step(NamedTuple):
    """A step that is not over. It holds on to the data, so that addresses stay good."""

    data: list[Any]
    watched: list[Any]  # tensors that move when data does
    places: list[int]
    due: Mask
    copies: list[Copy]
    there: dict[int, Any]  # old bits of rows without masters that are on a device, by row


class Found(NamedTuple):
    """What a step changed in a cut, in the rows that it changed: the new bits, and how the digests moved."""

    cut: Cut
    rows: Numbers
    counts: Numbers
    positions: npt.NDArray[np.uint32]
    bits: UIntArray
    moved: npt.NDArray[np.uint64]


class Handed(NamedTuple):
    """What is known of the changes of a part since some version."""

    marks: Bitmap
    moved: npt.NDArray[np.uint64]
    unknown: bool


class Plan:
    """What is tracked and how to get at it. A new one is made when a part or a parameter is not where it was.

    It holds on to no data: what a trainer frees between two steps must not stay in memory.
    """

    def __init__(self, look: tuple[Any, ...], table: TensorTable, rows: list[Row], roots: Numbers) -> None:
        """look: what it was made of. roots: the extents of what is written when a row changes."""
        self.look, self.rows, self._table, self._roots = look, rows, table, roots
        words = [-(-row.key[1].numel // 64) for row in rows]
        self.first = np.concatenate(([0], np.cumsum(words))).astype(np.int64)  # words of the bitmaps before each
        self.cuts = [*self._cut(mastered=False), *self._cut(mastered=True)]
        self.seen: list[int | None] = [None] * len(rows)  # how often each had been written to
        self.where: list[object] = []
        self._address = np.empty(0, np.int64)
        self.there: Mask = np.zeros(len(rows), bool)  # which ones can be marked on a device
        self.kept = self.there  # those of them without masters: their old bits are kept there during a step
        self.start = [0] * len(rows)  # where they begin in their tensors
        self._due: tuple[list[int], Mask] = [], np.zeros(len(rows), bool)

    def _cut(self, mastered: bool) -> Iterator[Cut]:
        table, found, large = self._table, dict[Place, int](), dict[Place, int]()
        for r, (_, (name, region), weight, _) in enumerate(self.rows):
            if (weight is not None) == mastered:
                spec = table.specs[table.index[name]]
                place = table.index[name], None if region == whole(spec.shape) else region
                (large if region.numel * spec.dtype.width > PIECE_BYTES else found)[place] = r
        for batch in batches(table, found):
            rows = [found[place] for place in zip(batch.tensor.tolist(), batch.region, strict=True)]
            yield Cut(batch, np.array(rows), None, tensor_geometry(table, batch.tensor, batch.region), mastered)
        for place, r in large.items():
            corner = self.rows[r].key[1].start
            for batch in batches(table, [place]):
                start, size = batch.region[0].start, batch.region[0].size  # type: ignore[union-attr]  # it was cut
                piece = Region(tuple(a - c for a, c in zip(start, corner, strict=True)), size)
                yield Cut(batch, np.array([r]), piece, tensor_geometry(table, batch.tensor, batch.region), mastered)

    def place(self, data: Sequence[Any]) -> None:
        """Learn where the data is. Rows whose bits cannot be read where they are have the address 0."""
        address = []
        for r, ((_, (name, region), _, _), d) in enumerate(zip(self.rows, data, strict=True)):
            memory, spec = memory_of(name, d), self._table.specs[self._table.index[name]]
            if memory.shape != region.size:
                raise TensorMismatch(f"{name!r}: region {region} cannot be {list(memory.shape)}")
            address.append(memory.address if memory.strides is None and memory.dtype is spec.dtype else 0)
            there = gpu_tensor(memory)
            start = None if there is None or not there.is_contiguous() else run_start(region, spec.shape)
            self.there[r], self.start[r] = start is not None, start or 0
        self._address, self.where = np.array(address, np.int64), [sign(d) for d in data]
        if self.there.any():
            self.there &= _alone(extents(data))
        self.kept = self.there & np.array([row.weight is None for row in self.rows], bool)

    def keys(self, rows: Sequence[int]) -> Any:
        """The keys of the rows' tensors, for digests."""
        return self._table.keys[[self._table.index[self.rows[r].key[0]] for r in rows]]

    def span(self, r: int) -> slice:
        """The words of a row."""
        return slice(self.first[r], self.first[r + 1])

    def due(self, params: list[Any]) -> Mask:
        """Which rows change when these parameters are written to."""
        ids = [id(p) for p in params]
        if ids != self._due[0]:
            self._due = ids, Spans(params).have(self._roots)
        return self._due[1]

    def read(self, cut: Cut, some: Numbers, data: Sequence[Any], keep: bool = False) -> Bits:
        """The bits of some rows of a cut: where they are if possible, else as `brought` makes them."""
        rows = cut.rows[some]
        address = self._address[rows]
        apart = np.flatnonzero(address == 0)
        address += cut.batch.offset * cut.batch.dtype.width
        if not apart.size:
            return address, None
        address[apart], owner = brought([data[r] for r in rows[apart].tolist()], cut, some[apart], keep)
        return address, owner

    def copied(self, cut: Cut, some: Numbers, data: Sequence[Any]) -> Copy:
        """The bits of some rows of a cut, in memory that nobody else writes to."""
        if cut.mastered:
            return Copy(cut, some, (some, None))
        address, owner = self.read(cut, some, data, keep=True)
        here = np.flatnonzero(self._address[cut.rows[some]])
        nbytes = cut.batch.numel[some[here]] * cut.batch.dtype.width
        copy = np.empty(nbytes.sum(), np.uint8)
        cpu.marks.collect(address[here], nbytes, address_of(copy))
        address[here] = address_of(copy) + np.cumsum(nbytes) - nbytes
        return Copy(cut, some, (address, (owner, copy)))

    def land(self, found: Found, data: Sequence[Any]) -> None:
        """Write the new bits over the old ones."""
        batch, address = found.cut.batch, self._address[found.rows]
        ends = np.cumsum(found.counts)
        for e in np.flatnonzero(address == 0).tolist():
            some = slice(ends[e] - found.counts[e], ends[e])
            _write(data[found.rows[e]], found.positions[some].astype(np.int64) + batch.offset, found.bits[some])
        here = address != 0
        first, ones = address[here] + batch.offset * batch.dtype.width, np.ones((here.sum(), 1), np.int64)
        tag, mine = np.empty(0, batch.dtype.uint), np.repeat(here, found.counts)
        positions, bits = found.positions[mine], found.bits[mine]
        cpu.changes.scatter(tag, found.counts[here], first, ones[:, 0].copy(), ones, ones, positions.ctypes.data, bits)


class Since:
    """What is known of the changes of all rows since some moment."""

    def __init__(self, plan: Plan, unknown: bool = False) -> None:
        self.words = np.zeros(plan.first[-1], np.uint64)  # the bitmaps, one behind the other
        self.moved = np.zeros((len(plan.rows), 2), np.uint64)
        self.unknown = np.full(len(plan.rows), unknown)
        self._there: dict[tuple[Any, ...], Any] = {}  # what is marked on devices, by rows and kind

    def mark(self, plan: Plan, pairs: dict[int, tuple[Any, Any]]) -> None:
        """What a step changed in rows on devices: their new bits and their old ones, which become the new ones."""
        from .tracked_gpu import Marked, grouped

        groups = {(*kind, *rows): rows for kind, rows in grouped(pairs).items()}
        if self._there.keys() != groups.keys():
            self.settle(plan)
        for key, rows in groups.items():
            if key not in self._there:
                keys, numel = plan.keys(rows), [plan.rows[r].key[1].numel for r in rows]
                self._there[key] = Marked(rows, pairs[rows[0]][1], numel, keys, [plan.start[r] for r in rows])
            self._there[key].add([pairs[r] for r in rows])

    def settle(self, plan: Plan) -> None:
        """Bring what is marked on devices to the host."""
        while self._there:
            self._there.popitem()[1].settle(plan.first, self.words, self.moved)

    def add(self, plan: Plan, found: Found) -> None:
        """What a step changed."""
        first = plan.first[found.rows]
        cpu.marks.mark_parts(found.counts, found.positions, found.cut.batch.offset, first, self.words)
        self.moved[found.rows] += found.moved

    def keep(self, plan: Plan, r: int, other: Since, theirs: Plan, old: int) -> None:
        """What is known of a row that was another one in another plan; nothing is, if it was elsewhere."""
        other.settle(theirs)
        self.words[plan.span(r)] = other.words[theirs.span(old)]
        self.moved[r] = other.moved[old]
        self.unknown[r] = other.unknown[old] or plan.where[r] != theirs.where[old]

    def handed(self, plan: Plan, r: int, earlier: Handed | None) -> Handed:
        """What is known of a row, and was earlier; it must not be written to any more."""
        self.settle(plan)
        marks, moved, unknown = Bitmap(0), self.moved[r], bool(self.unknown[r])
        marks.numel, marks.words = plan.rows[r].key[1].numel, self.words[plan.span(r)]
        if earlier is not None:
            marks.unite(earlier.marks)
            moved += earlier.moved
            unknown |= earlier.unknown
        return Handed(marks, moved, unknown)


class Spans:
    """The memory of some tensors."""

    def __init__(self, tensors: Iterable[Any]) -> None:
        here = [local(t) for t in tensors]
        found, full = extents(here), np.array([t.numel() * t.itemsize for t in here], np.int64)
        found = found[found[:, 1] - found[:, 0] == full]  # a tensor with holes in it says nothing about these
        found = found[np.argsort(found[:, 0], kind="stable")]
        low, high = found[:, 0], np.maximum.accumulate(found[:, 1])
        self._low = low[np.append(True, low[1:] > high[:-1])[: low.size]]
        self._high = high[np.append(low[1:] > high[:-1], True)[: low.size]]

    def have(self, extents: Numbers) -> Mask:
        """Which extents lie in this memory."""
        low, high = extents.T
        i = np.searchsorted(self._low, low, side="right")
        return np.asarray((low < high) & (high <= np.append(0, self._high)[i]))


def compared(cut: Cut, some: Numbers, old: Bits, new: Bits) -> Found:
    """What differs in some rows of a cut."""
    tag, g = np.empty(0, cut.batch.dtype.uint), cut.geometry
    positions, before, after, counts = scan(tag, old[0], new[0], cut.batch.numel[some])
    some, counts = some[counts > 0], counts[counts > 0]
    moved = np.empty((some.size, 2), np.uint64)
    where = g.start[some], g.dims[some], g.size[some], g.tensor_strides[some], g.keys[some]
    cpu.marks.digest_deltas(counts, *where, positions, before, after, moved)
    return Found(cut, cut.rows[some], counts, positions, after, moved)


def brought(data: Sequence[Any], cut: Cut, some: Numbers, keep: bool = False) -> Bits:
    """The bits of rows in the dtype of the cut, row-major, in a buffer that is used again, or to keep."""
    import torch

    sizes = cut.batch.numel[some]
    nbytes = sizes * cut.batch.dtype.width
    far = all(getattr(d, "is_cuda", False) for d in data)
    lent = None if keep else StagingBuffer(int(nbytes.sum()), far)
    array = np.empty(nbytes.sum(), np.uint8) if lent is None else lent.array
    here = torch.from_numpy(array).view(getattr(torch, cut.batch.dtype.name))
    if far:
        torch.cuda.synchronize(data[0].device)  # this thread has another stream than whoever wrote the tensors
    with torch.no_grad():
        there = torch.empty_like(here, device=data[0].device) if far and len(data) > 1 else here
        flat = [_flat(d, cut, n) for d, n in zip(data, sizes.tolist(), strict=True)]
        torch._foreach_copy_(torch.split(there, sizes.tolist()), flat)
        if there is not here:
            here.copy_(there)
    return address_of(array) + np.cumsum(nbytes) - nbytes, lent or array


def _flat(data: Any, cut: Cut, numel: int) -> Any:
    """The elements of a row as a torch tensor. It is contiguous: on that depends which NaN a NaN is cast to."""
    import torch

    if hasattr(data, "data_ptr"):
        return (data if cut.piece is None else data[cut.piece.slices]).reshape(-1)
    address, owner = memory_of("", data).read(cut.piece)
    bits = Memory(cut.batch.dtype, (numel,), address, None, True, owner).view()
    return torch.from_numpy(bits.view(np.uint8)).view(getattr(torch, cut.batch.dtype.name))


def _write(data: Any, positions: Numbers, bits: UIntArray) -> None:
    """Write bits to positions of a torch tensor that is not contiguous, or on a device."""
    import torch

    there = data.detach().view(getattr(torch, f"int{8 * bits.itemsize}"))
    where = tuple(torch.from_numpy(i).to(there.device) for i in np.unravel_index(positions, data.shape))
    there[where] = torch.from_numpy(bits.view(f"i{bits.itemsize}")).to(there.device)


def sign(data: Any) -> object:
    """Where and what a tensor is: as long as this is the same, it can be handled as before."""
    if hasattr(data, "data_ptr"):
        return data.data_ptr(), data.shape, data.is_contiguous(), data.dtype
    if isinstance(data, LazyBits):
        return data.dtype, sign(data.origin)
    return getattr(getattr(data, "array", data), "__array_interface__", None)


def _alone(extents: Numbers) -> Mask:
    """Which extents no other reaches into."""
    order = np.argsort(extents[:, 0], kind="stable")
    low, high = extents[order].T
    reach = np.maximum.accumulate(high)
    free = np.ones(order.size, bool)
    free[1:] &= low[1:] >= reach[:-1]
    free[:-1] &= low[1:] >= high[:-1]
    out = np.empty_like(free)
    out[order] = free
    return out


def places(tensors: Iterable[Any]) -> list[int]:
    """The addresses of tensors."""
    return [local(t).data_ptr() for t in tensors]


def writes(row: Row, data: Any) -> int | None:
    """How often torch has counted a write to a row; all views of a buffer are counted as one."""
    if isinstance(data, LazyBits):
        data = data.origin
    if not row.counted or not hasattr(data, "data_ptr") or data.is_inference():
        return None
    return int(data._version)  # noqa: SLF001


def extents(tensors: Iterable[Any]) -> Numbers:
    """The extent of every tensor, or of what it is made of."""
    found = [extent(t.origin if isinstance(t, LazyBits) else t) for t in tensors]
    return np.array(found, np.int64).reshape(-1, 2)


def extent(tensor: Any) -> tuple[int, int]:
    """Addresses of the first byte of a tensor and of the byte behind its last; nothing, where it is foreign."""
    if not hasattr(tensor, "data_ptr"):
        return (0, 0) if isinstance(tensor, LazyBits) else memory_of("", tensor).span()
    if not tensor.numel():
        return 0, 0
    reach = tensor.numel()
    if not tensor.is_contiguous():
        reach = sum(stride * (n - 1) for stride, n in zip(tensor.stride(), tensor.shape, strict=True)) + 1
    low = int(tensor.data_ptr())
    return low, low + reach * int(tensor.itemsize)


def local(tensor: Any) -> Any:
    """The shard of a DTensor that is here; another tensor as it is."""
    return tensor.detach().to_local() if hasattr(tensor, "device_mesh") else tensor
