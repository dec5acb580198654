"""The parts that optimizer steps write to: their addresses, their bits before a step, and what the step changed.

A tracked part is a row. Kernels take many rows at a time; what Python works out for each row is kept in a plan, which
is valid until a part or a parameter moves.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..errors import TensorMismatch
from ..kernels import cpu, gpu
from ..patch.cpu_compare import scan
from ..weights.batches import PIECE_BYTES, Batch, batches
from ..weights.dtypes import UIntArray
from ..weights.geometry import runs_at
from ..weights.memory import Memory, address_of
from ..weights.region import Numbers, Region, whole
from ..weights.shards import Place
from ..weights.staging import LazyBits, StagingBuffer, gpu_tensor
from ..weights.table import TensorTable
from ..weights.tensors import memory_of

GPU_CUT_BYTES = 512 << 20  # of rows that a GPU compares together: what it takes for that is a fraction of them
Key = tuple[str, Region]
Mask = npt.NDArray[np.bool_]
Bits = tuple[Numbers, object]  # addresses of bits in row-major order, and what keeps them there


class TrackedRow(NamedTuple):
    """A part that is tracked."""

    part: int  # its index among the parts of the source
    key: Key
    weight: Any  # the key of its master in `masters`; None if it has none
    counted: bool  # whether torch's count of the writes to it shows writes by others
    on_gpu: bool


class Cut(NamedTuple):
    """Rows that are compared together: several small ones, or a piece of a large one."""

    batch: Batch
    rows: Numbers
    piece: Region | None  # in the coordinates of its part; None for all of it
    mastered: bool  # whether the rows have masters


class RowPiece(NamedTuple):
    """Where consecutive elements of a row are: in which cut, and from which of its positions on."""

    number: int  # of the cut
    first: int
    begin: int  # in the row
    numel: int


class Copy(NamedTuple):
    """The old bits of some rows of a cut. Nothing is copied of rows with masters, which still have their old bits."""

    number: int  # of the cut
    cut: Cut
    some: Numbers  # rows that are compared in host memory
    bits: Bits
    on_gpu: Numbers  # rows that are compared on their GPU
    gpu_bits: list[Any]  # their bits, flat; nothing for rows with masters


class OpenStep(NamedTuple):
    """A step that has begun. It keeps a reference to the data, so that addresses stay valid."""

    data: list[Any]
    watched: list[Any]  # tensors that move when the data does
    addresses: list[int]  # of the watched tensors
    due: Mask  # which rows the step may change
    copies: list[Copy]


class RowChanges(NamedTuple):
    """What a step changed in some rows of a cut."""

    cut: Cut
    some: Numbers
    counts: Numbers
    positions: npt.NDArray[np.uint32]
    old_bits: UIntArray
    bits: UIntArray  # the new ones


class Plan:
    """The tracked rows and where they are. A new plan is made when a part or a parameter has moved.

    It keeps no reference to data: what a trainer frees between two steps must not stay in memory.

    Args:
        look: what the plan was made for: tables, keys and addresses.
        table: the tensor table of what is published.
        rows: the tracked parts.
        roots: the memory extents of what is written when a row changes: of the part, or of its master.
    """

    def __init__(self, look: tuple[Any, ...], table: TensorTable, rows: list[TrackedRow], roots: Numbers) -> None:
        self.look = look
        self.rows = rows
        self._table = table
        self._roots = roots
        kinds = [(mastered, on_gpu) for mastered in (False, True) for on_gpu in (False, True)]
        self.cuts = [cut for kind in kinds for cut in self._cut(*kind)]
        self.starts = [np.cumsum(cut.batch.numel) - cut.batch.numel for cut in self.cuts]  # of rows in each cut
        self.pieces = self._pieces()
        self.writes: list[int | None] = [None] * len(rows)  # how often each had been written to
        self.signatures: list[object] = []
        self._address = np.empty(0, np.int64)
        self.on_gpu: Mask = np.zeros(len(rows), bool)  # rows that can be compared on a GPU
        self._due_ids: list[int] = []
        self._due = np.zeros(len(rows), bool)

    def _cut(self, mastered: bool, on_gpu: bool) -> Iterator[Cut]:
        """Cut the rows with masters, or those without, on a GPU or in host memory, into pieces."""
        table = self._table
        limit = GPU_CUT_BYTES if on_gpu else PIECE_BYTES
        small: dict[Place, int] = {}
        large: dict[Place, int] = {}
        for r, row in enumerate(self.rows):
            if (row.weight is not None) == mastered and row.on_gpu == on_gpu:
                name, region = row.key
                spec = table.specs[table.index[name]]
                place = (table.index[name], None if region == whole(spec.shape) else region)
                (large if region.numel * spec.dtype.width > limit else small)[place] = r
        for batch in batches(table, small, limit):
            rows = [small[place] for place in zip(batch.tensor.tolist(), batch.region, strict=True)]
            yield Cut(batch, np.array(rows), None, mastered)
        for place, r in large.items():
            corner = self.rows[r].key[1].start
            for batch in batches(table, [place], limit):
                cut_region = batch.region[0]
                assert cut_region is not None  # since a large row is cut
                piece = Region(tuple(a - c for a, c in zip(cut_region.start, corner, strict=True)), cut_region.size)
                yield Cut(batch, np.array([r]), piece, mastered)

    def _pieces(self) -> list[list[RowPiece]]:
        """Of each row, where its elements are in the cuts."""
        pieces: list[list[RowPiece]] = [[] for _ in self.rows]
        for number, cut in enumerate(self.cuts):
            columns = (cut.rows.tolist(), self.starts[number].tolist(), cut.batch.numel.tolist())
            for r, first, numel in zip(*columns, strict=True):
                pieces[r].append(RowPiece(number, first, cut.batch.offset, numel))
        return pieces

    def locate(self, data: Sequence[Any]) -> None:
        """Note the addresses of the data. A row whose bits cannot be read in place has the address 0."""
        address = []
        for r, (row, tensor) in enumerate(zip(self.rows, data, strict=True)):
            name, region = row.key
            memory = memory_of(name, tensor)
            spec = self._table.specs[self._table.index[name]]
            if memory.shape != region.size:
                raise TensorMismatch(f"{name!r}: region {region} cannot be {list(memory.shape)}")
            address.append(memory.address if memory.strides is None and memory.dtype is spec.dtype else 0)
            tensor = gpu_tensor(memory)
            kernels = tensor is not None and gpu.support.obstacle(tensor.device) is None
            self.on_gpu[r] = kernels and tensor.is_contiguous()
        self._address = np.array(address, np.int64)
        self.signatures = [signature(tensor) for tensor in data]

    def due(self, params: list[Any]) -> Mask:
        """Which rows change when these parameters are written to."""
        ids = [id(param) for param in params]
        if ids != self._due_ids:
            self._due_ids = ids
            self._due = Extents(params).contain(self._roots)
        return self._due

    def read(self, cut: Cut, some: Numbers, data: Sequence[Any], keep: bool = False) -> Bits:
        """The bits of some rows of a cut: in place if possible, else in host memory as `gather` makes them."""
        rows = cut.rows[some]
        address = self._address[rows]
        elsewhere = np.flatnonzero(address == 0)
        address += cut.batch.offset * cut.batch.dtype.width
        if not elsewhere.size:
            return address, None
        address[elsewhere], owner = gather([data[r] for r in rows[elsewhere].tolist()], cut, some[elsewhere], keep)
        return address, owner

    def copy(self, cut: Cut, some: Numbers, data: Sequence[Any]) -> Bits:
        """Copy the bits of some rows of a cut; nothing of rows with masters."""
        if cut.mastered:
            return some, None
        address, owner = self.read(cut, some, data, keep=True)
        in_place = np.flatnonzero(self._address[cut.rows[some]])
        nbytes = cut.batch.numel[some[in_place]] * cut.batch.dtype.width
        copy = np.empty(nbytes.sum(), np.uint8)
        cpu.marks.collect(address[in_place], nbytes, address_of(copy))
        address[in_place] = address_of(copy) + np.cumsum(nbytes) - nbytes
        return address, (owner, copy)

    def all_bits(self, cut: Cut, data: Sequence[Any]) -> UIntArray:
        """A copy of the bits of all rows of a cut, one behind the other."""
        address, owner = self.read(cut, np.arange(cut.rows.size), data)
        bits = np.empty(cut.batch.elements, cut.batch.dtype.uint)
        cpu.marks.collect(address, cut.batch.numel * cut.batch.dtype.width, address_of(bits))
        del owner  # a copy may go only now
        return bits

    def write(self, changes: RowChanges, data: Sequence[Any]) -> None:
        """Write the new bits over the old ones."""
        batch = changes.cut.batch
        rows = changes.cut.rows[changes.some]
        address = self._address[rows]
        ends = np.cumsum(changes.counts)
        for i in np.flatnonzero(address == 0).tolist():
            some = slice(ends[i] - changes.counts[i], ends[i])
            positions = changes.positions[some].astype(np.int64) + batch.offset
            _write(data[rows[i]], positions, changes.bits[some])
        in_place = address != 0
        selected = np.repeat(in_place, changes.counts)
        first = address[in_place] + batch.offset * batch.dtype.width
        tag = np.empty(0, batch.dtype.uint)
        positions = changes.positions[selected]
        bits = changes.bits[selected]
        counts = changes.counts[in_place]
        cpu.changes.scatter(tag, counts, runs_at(first), positions.ctypes.data, bits)


class Extents:
    """The memory of some tensors."""

    def __init__(self, tensors: Iterable[Any]) -> None:
        shards = [local(tensor) for tensor in tensors]
        bounds = extents(shards)
        full = np.array([shard.numel() * shard.itemsize for shard in shards], np.int64)
        bounds = bounds[bounds[:, 1] - bounds[:, 0] == full]  # without tensors that do not fill their extent
        bounds = bounds[np.argsort(bounds[:, 0], kind="stable")]
        low = bounds[:, 0]
        high = np.maximum.accumulate(bounds[:, 1])
        self._low = low[np.append(True, low[1:] > high[:-1])[: low.size]]
        self._high = high[np.append(low[1:] > high[:-1], True)[: low.size]]

    def contain(self, extents: Numbers) -> Mask:
        """Which extents lie in this memory."""
        low, high = extents.T
        i = np.searchsorted(self._low, low, side="right")
        return np.asarray((low < high) & (high <= np.append(0, self._high)[i]))


def compare(cut: Cut, some: Numbers, old: Bits, new: Bits) -> RowChanges:
    """What differs in some rows of a cut."""
    tag = np.empty(0, cut.batch.dtype.uint)
    positions, old_bits, new_bits, counts = scan(tag, old[0], new[0], cut.batch.numel[some])
    return RowChanges(cut, some, counts, positions, old_bits, new_bits)


def gather(data: Sequence[Any], cut: Cut, some: Numbers, keep: bool = False) -> Bits:
    """Copy the bits of rows to host memory, in the dtype of the cut and row-major.

    `keep` says that the copy outlives this comparison; else it is in a buffer that is used again.
    """
    import torch

    sizes = cut.batch.numel[some]
    nbytes = sizes * cut.batch.dtype.width
    on_gpu = all(getattr(tensor, "is_cuda", False) for tensor in data)
    staging = None if keep else StagingBuffer(int(nbytes.sum()), on_gpu)
    array = np.empty(nbytes.sum(), np.uint8) if staging is None else staging.array
    host = torch.from_numpy(array).view(getattr(torch, cut.batch.dtype.name))
    if on_gpu:
        torch.cuda.synchronize(data[0].device)  # this thread has another stream than the one that wrote the tensors
    with torch.no_grad():
        joined = torch.empty_like(host, device=data[0].device) if on_gpu and len(data) > 1 else host
        flat = [flat_bits(tensor, cut, n) for tensor, n in zip(data, sizes.tolist(), strict=True)]
        torch._foreach_copy_(torch.split(joined, sizes.tolist()), flat)
        if joined is not host:
            host.copy_(joined)
    return address_of(array) + np.cumsum(nbytes) - nbytes, staging or array


def flat_bits(data: Any, cut: Cut, numel: int) -> Any:
    """The elements of a row as a contiguous torch tensor. (Which NaN a NaN is cast to depends on that.)"""
    import torch

    if hasattr(data, "data_ptr"):
        return (data if cut.piece is None else data[cut.piece.slices]).reshape(-1)
    address, owner = memory_of("", data).read(cut.piece)
    bits = Memory(cut.batch.dtype, (numel,), address, None, True, owner).view()
    return torch.from_numpy(bits.view(np.uint8)).view(getattr(torch, cut.batch.dtype.name))


def _write(data: Any, positions: Numbers, bits: UIntArray) -> None:
    """Write bits to positions of a torch tensor that is not contiguous, or on a GPU."""
    import torch

    tensor = data.detach().view(getattr(torch, f"int{8 * bits.itemsize}"))
    index = tuple(torch.from_numpy(i).to(tensor.device) for i in np.unravel_index(positions, data.shape))
    tensor[index] = torch.from_numpy(bits.view(f"i{bits.itemsize}")).to(tensor.device)


def signature(data: Any) -> object:
    """Address, shape and dtype of a tensor: while they are the same, a plan for it is valid."""
    if hasattr(data, "data_ptr"):
        return data.data_ptr(), data.shape, data.is_contiguous(), data.dtype
    if isinstance(data, LazyBits):
        return data.dtype, signature(data.origin)
    return getattr(getattr(data, "array", data), "__array_interface__", None)


def addresses(tensors: Iterable[Any]) -> list[int]:
    """The addresses of tensors."""
    return [local(tensor).data_ptr() for tensor in tensors]


def count_writes(row: TrackedRow, data: Any) -> int | None:
    """How many writes to a row torch has counted; all views of a buffer share one count."""
    if isinstance(data, LazyBits):
        data = data.origin
    if not row.counted or not hasattr(data, "data_ptr") or data.is_inference():
        return None
    return int(data._version)  # noqa: SLF001


def extents(tensors: Iterable[Any]) -> Numbers:
    """The extent of every tensor, or of the tensor that it is cast from."""
    bounds = [extent(t.origin if isinstance(t, LazyBits) else t) for t in tensors]
    return np.array(bounds, np.int64).reshape(-1, 2)


def extent(tensor: Any) -> tuple[int, int]:
    """The addresses of the first byte of a tensor and of the byte behind its last; zeros where they are not known."""
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
    """The local shard of a DTensor; another tensor as it is."""
    return tensor.detach().to_local() if hasattr(tensor, "device_mesh") else tensor
