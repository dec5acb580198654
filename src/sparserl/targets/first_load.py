"""An engine's own load of its checkpoint, watched: where that explains all of the engine, nothing is loaded again.

    a tensor of the checkpoint ──► the engine copies it ──► sums of what was copied ──► the next one
    ──► pieces ──► is every element a copy or a constant? ──► sums of the pieces, where they lie ──► compare

Bits that come to a GPU are summed up there at once, before anything else happens to them: that is faster than reading
the checkpoint again, which is done on other threads for all other copies. Whatever is not explained is no error here:
`engine_layout` then lets the engine load made-up tensors.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from ..errors import SparserlError, UnsupportedTensor
from ..kernels import gpu
from ..parallel import default_threads
from ..weights import memory
from ..weights.digest import Digest, place_sums
from ..weights.dtypes import dtype_of_torch
from ..weights.local import LocalWeights
from ..weights.region import Region, Shape, first_overlap, intersection, whole
from ..weights.shards import Part, Shards
from ..weights.table import TensorSpec, TensorTable
from .copies import ElementCopy, Untraceable
from .pieces import CheckpointTensor, Piece, by_tensor, has_bits, reach
from .watching import Fill, LoadWatch, arrived_pieces

_MOST_WAITING = 1 << 30  # bytes of tensors in host memory that wait for their sums, and would else be gone
_MOST_THREADS = 4  # one sums up more slowly than an engine reads from memory
Position = tuple[torch.device, int, Shape, Shape, torch.dtype]
_READS = {getattr(torch.Tensor, name) for name in ("__array__", "__dlpack__", "data_ptr", "numpy", "tolist")}
SumKey = tuple[str, Region, torch.dtype]
Sums = Future[Digest] | Digest


class NotExplained(Exception):
    """An engine has something of which the watched load does not show where it comes from."""


class _ReadWatch(TorchFunctionMode):
    """Notes which tensors are given away to NumPy, to kernels by their address, and to Python as numbers."""

    def __init__(self, watch: LoadWatch) -> None:
        super().__init__()
        self._watch = watch

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _READS:
            self._watch.read_unseen(args[0])
        return func(*args, **(kwargs or {}))


class _Loading(NamedTuple):
    """The tensor of the checkpoint that an engine was given last, as it was then.

    Its storage is kept, so that no other memory has its address.
    """

    name: str
    shape: Shape
    dtype: torch.dtype
    storage: torch.UntypedStorage

    def is_source(self, name: str, source: torch.Tensor) -> bool:
        """Whether a source of this name has the tensor's elements, in its dtype and in its memory."""
        is_same_memory = source.untyped_storage()._cdata == self.storage._cdata  # noqa: SLF001
        return is_same_memory and (name, source.dtype) == (self.name, self.dtype)


class GpuSums:
    """Sums of the bits that GPUs are given of the tensor which is being loaded."""

    def __init__(self) -> None:
        self.current: _Loading | None = None
        self._sums: dict[torch.device, dict[SumKey, torch.Tensor]] = {}

    @contextlib.contextmanager
    def loading(self, name: str, tensor: torch.Tensor) -> Iterator[None]:
        """The engine has this tensor, and has not asked for the next one."""
        self.current = _Loading(name, tuple(tensor.shape), tensor.dtype, tensor.untyped_storage())
        try:
            yield
        finally:
            self.current = None

    def add(self, name: str, copy: ElementCopy, tensor: torch.Tensor, source: torch.Tensor) -> None:
        """Sum up the bits that a tensor has just been given, if kernels can do it."""
        loading = self.current
        if loading is None or not loading.is_source(name, source) or not _is_run_on_gpu(copy, tensor):
            return
        dtype = dtype_of_torch(tensor.dtype)
        if dtype is None:
            return
        try:
            region, _ = copy.region(loading.shape)
        except Untraceable:
            return
        from ..weights.gpu_sums import tensor_sums

        sums = tensor_sums(TensorSpec(name, dtype, loading.shape), tensor, copy.source)
        self._sums.setdefault(tensor.device, {})[name, region, tensor.dtype] = sums

    def __contains__(self, key: SumKey) -> bool:
        return any(key in sums for sums in self._sums.values())

    def digests(self) -> dict[SumKey, Digest]:
        """All of them. It waits for the GPUs."""
        digests: dict[SumKey, Digest] = {}
        for device, sums in self._sums.items():
            if device.type == "cuda":
                torch.cuda.synchronize(device)  # a loader may have streams of its own
            pairs = torch.stack([*sums.values()]).cpu().numpy().view(np.uint64).tolist()
            digests |= {key: Digest(first, second) for key, (first, second) in zip(sums, pairs, strict=True)}
        return digests


class FirstLoad:
    """Watches an engine load its checkpoint while it is entered.

    Args:
        others: The tensors, by name, that the engine has before beside those that it loads. They are copied to host
            memory.

    Example:
        >>> live = {"w": torch.zeros(4)}
        >>> with FirstLoad({}) as load:
        ...     for _, tensor in load.watched([("v", torch.arange(4.0))]):
        ...         _ = live["w"].copy_(tensor)
        >>> load.ended_with(live)
        >>> [(piece.tensor, piece.live) for piece in load.find_pieces(live, {})]
        [('v', 'w')]
    """

    def __init__(self, others: Mapping[str, torch.Tensor]) -> None:
        self._gpu_sums = GpuSums()
        self._watch = LoadWatch(self._gpu_sums.add)
        self._reads = _ReadWatch(self._watch)
        self._modes = contextlib.ExitStack()
        self._others = {position(tensor): tensor.to("cpu", copy=True) for tensor in others.values()}
        self._tensors: dict[str, CheckpointTensor] = {}
        threads = min(_MOST_THREADS, max(1, default_threads() // 2))
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="sparserl-sums")
        self._sums: dict[SumKey, Sums] = {}
        self._waiting = deque[tuple[int, list[Future[Digest]]]]()
        self._waiting_bytes = 0
        self._positions: set[Position] = set()
        self._obstacle = ""

    def __enter__(self) -> FirstLoad:
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._watch)
            stack.enter_context(self._reads)
            self._modes = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._modes.close()

    def watched(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors of a checkpoint, for the engine to load."""
        for name, tensor in weights:
            self._register(name, tensor)
            try:
                with contextlib.nullcontext() if self._obstacle else self._gpu_sums.loading(name, tensor):
                    yield name, tensor
            finally:  # also where the engine asks for no other one
                self._add_sums(name, tensor)

    def ended_with(self, live: Mapping[str, torch.Tensor]) -> None:
        """Note which tensors the engine has when it has loaded: others may get the memory of tensors that are gone."""
        if self._gpu_sums.current is not None:
            self._obstacle = f"the load has not ended: the engine still has {self._gpu_sums.current.name!r}"
        self._positions = {position(tensor) for tensor in live.values()}
        self._pool.shutdown(wait=False)

    def find_pieces(self, live: Mapping[str, torch.Tensor], derived: Mapping[str, torch.Tensor]) -> list[Piece]:
        """Where the checkpoint is in an engine's tensors; all bits are compared with those that were copied.

        Args:
            live: The engine's tensors.
            derived: Tensors that it may have computed from them.

        Raises:
            NotExplained: A tensor of the engine may depend on the checkpoint in a way that was not seen.
        """
        if self._obstacle:
            raise NotExplained(self._obstacle)
        if (failure := self._watch.failure) is not None:
            raise NotExplained(f"an operation could not be followed: {failure!r}") from failure
        if moved := [name for name, tensor in live.items() if position(tensor) not in self._positions]:
            raise NotExplained(f"{moved[0]!r} has moved since it was loaded")
        pieces, unclear = arrived_pieces(self._watch, self._tensors, live)
        if unclear := unclear | self._watch.read:
            raise NotExplained(f"{min(unclear)!r} is more than copied")
        self._require_explained(pieces, live, derived)
        sums = self._sums | self._gpu_sums.digests()
        _require_kept(pieces, sums)
        self._compare(pieces, live, sums)
        return pieces

    def _register(self, name: str, tensor: torch.Tensor) -> None:
        if name in self._tensors:
            self._obstacle = f"{name!r} comes twice"
        elif type(tensor) not in (torch.Tensor, torch.nn.Parameter):
            self._obstacle = f"{name!r} is a {type(tensor).__name__}"
        elif not tensor.is_contiguous() or tensor.untyped_storage().nbytes() != tensor.nbytes:
            self._obstacle = f"{name!r} shares memory with other tensors of the checkpoint"
        elif dtype_of_torch(tensor.dtype) is None:
            self._obstacle = f"{name!r} is of {tensor.dtype}"
        else:
            self._watch.register(name, tensor)
        self._tensors[name] = CheckpointTensor(name, tuple(tensor.shape), tensor.dtype)

    def _add_sums(self, name: str, tensor: torch.Tensor) -> None:
        """Have what else was copied of a tensor summed, while the engine loads the next one."""
        futures = []
        for copy, dtype in () if self._obstacle else self._watch.taken.pop(name, ()):
            try:
                region, _ = copy.region(tuple(tensor.shape))
            except Untraceable:
                continue
            if (name, region, dtype) in self._gpu_sums:
                continue
            future = self._pool.submit(_region_sums, name, tensor, region, dtype)
            self._sums[name, region, dtype] = future
            futures.append(future)
        if not futures:
            return
        self._waiting.append((tensor.nbytes, futures))
        self._waiting_bytes += tensor.nbytes
        most = _MOST_WAITING if tensor.device.type == "cpu" else 0
        while self._waiting_bytes > most:
            nbytes, earlier = self._waiting.popleft()
            self._waiting_bytes -= nbytes
            wait(earlier)

    def _require_explained(
        self, pieces: Iterable[Piece], live: Mapping[str, torch.Tensor], derived: Mapping[str, torch.Tensor]
    ) -> None:
        """Refuse elements that are neither a copy nor a constant, and tensors that have changed unseen."""
        copied = dict.fromkeys(live, 0)
        for piece in pieces:
            copied[piece.live] += piece.region.numel
        for name, tensor in (*live.items(), *derived.items()):
            rest = reach(tensor) - copied.get(name, 0)
            if not rest or self._is_constant(tensor, rest):
                continue
            if rest < reach(tensor) or not self._is_as_before(tensor):
                raise NotExplained(f"{name!r} has {rest:,} elements that were not seen to be loaded")

    def _is_as_before(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor has the bits that it had, and was given nothing that may be the same by chance."""
        before = self._others.get(position(tensor))
        memory = self._watch.memory(tensor)
        return before is not None and not (memory and memory.names) and has_bits(tensor, before)

    def _is_constant(self, tensor: torch.Tensor, rest: int) -> bool:
        """Whether the elements of a tensor that are no copies are constants, and have these values."""
        memory = self._watch.memory(tensor)
        fills = [] if memory is None or memory.unclear else _fills_of(memory.fills, tensor)
        if any(before.place.end > after.place.at for before, after in pairwise(sorted(fills, key=_begin))):
            return False  # they may overlap, and then say less than they seem to
        return sum(fill.numel for fill in fills) == rest and all(_has_number(tensor, fill) for fill in fills)

    def _compare(self, pieces: Iterable[Piece], live: Mapping[str, torch.Tensor], sums: Mapping[SumKey, Sums]) -> None:
        """Compare the sums of all pieces, from their bits as they are now, with those of what was copied."""
        specs: dict[str, TensorSpec] = {}
        parts = []
        expected: list[tuple[Piece, Sums]] = []
        for piece in pieces:
            view = piece.view(live)
            dtype = dtype_of_torch(view.dtype)
            checkpoint_sums = sums.get((piece.tensor, piece.region, view.dtype))
            if dtype is None or checkpoint_sums is None:
                raise NotExplained(f"{piece.tensor!r} {piece.region} was not summed when it was loaded")
            spec = TensorSpec(piece.tensor, dtype, self._tensors[piece.tensor].shape)
            if specs.setdefault(piece.tensor, spec) != spec:
                raise NotExplained(f"{piece.tensor!r} is in several dtypes")
            parts.append(Part(piece.tensor, piece.region, view))
            expected.append((piece, checkpoint_sums))
        table = TensorTable(specs.values())
        own = {} if not parts else place_sums(LocalWeights.of(Shards(table, parts)))
        by_region = {(tensor, region or whole(table[tensor].shape)): part for (tensor, region), part in own.items()}
        for piece, checkpoint_sums in expected:
            if by_region[table.index[piece.tensor], piece.region] != _result(piece, checkpoint_sums):
                raise NotExplained(f"{piece.tensor!r} {piece.region} does not have the bits of the checkpoint")


def _require_kept(pieces: Iterable[Piece], summed: Iterable[SumKey]) -> None:
    """Refuse elements that were copied, but are in no tensor or in several: something may be made of them."""
    regions = {name: [piece.region for piece in own] for name, own in by_tensor(pieces).items()}
    for name, own in regions.items():
        if first_overlap(own) is not None:
            raise NotExplained(f"{name!r} is in several places")
    for name, region, _ in summed:
        shared = (intersection(region, kept) for kept in regions.get(name, ()))
        if sum(part.numel for part in shared if part is not None) < region.numel:
            raise NotExplained(f"{name!r} {region} was loaded, but is not there any longer")


def load_kernel(device: torch.device) -> Future[None]:
    """Load the kernel that sums up what comes to a GPU, on a thread, while an engine makes its model.

    Before its first kernel, Triton hashes its own files for 0.4 s, and leaves Python's lock to others meanwhile. A
    kernel that cannot be loaded is left to the load of the checkpoint.
    """
    pool = ThreadPoolExecutor(1, thread_name_prefix="sparserl-kernel")
    loaded = pool.submit(_load_kernel, device)
    pool.shutdown(wait=False)
    return loaded


def _load_kernel(device: torch.device) -> None:
    if gpu.support.obstacle(device) is None:
        from ..weights import gpu_sums

        gpu_sums.load_kernel(device)


def position(tensor: torch.Tensor) -> Position:
    """Where a tensor is in memory."""
    return tensor.device, tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype


def _is_run_on_gpu(copy: ElementCopy, tensor: torch.Tensor) -> bool:
    """Whether a copy brings consecutive elements to consecutive ones, on a GPU that kernels run on."""
    if not memory.is_on_gpu(tensor) or gpu.support.obstacle(tensor.device) is not None:
        return False
    return tensor.is_contiguous() and all(step.at == step.source == 1 for step in copy.dimensions)


def _region_sums(name: str, tensor: torch.Tensor, region: Region, dtype: torch.dtype) -> Digest:
    """The sums of a region of a checkpoint tensor as an engine has it, in a dtype of its own."""
    part = tensor[region.slices].to(dtype)
    element = dtype_of_torch(dtype)
    if element is None:
        raise UnsupportedTensor(f"{dtype} is not supported")
    table = TensorTable([TensorSpec(name, element, tuple(tensor.shape))])
    (sums,) = place_sums(LocalWeights.of(Shards(table, [Part(name, region, part)]))).values()
    return sums


def _result(piece: Piece, sums: Sums) -> Digest:
    try:
        return sums if isinstance(sums, Digest) else sums.result()
    except SparserlError as error:
        raise NotExplained(f"{piece.tensor!r} could not be summed: {error}") from error


def _begin(fill: Fill) -> int:
    return fill.place.at


def _fills_of(fills: Iterable[Fill], tensor: torch.Tensor) -> list[Fill]:
    """Those that lie in the memory of a tensor."""
    start = int(tensor.storage_offset())
    end = start + reach(tensor)
    return [fill for fill in fills if start <= fill.place.at and fill.place.end <= end]


def _has_number(tensor: torch.Tensor, fill: Fill) -> bool:
    """Whether a tensor still has the number that it was filled with."""
    dimensions = fill.place.dimensions
    size = [dimension.size for dimension in dimensions]
    place = tensor.as_strided(size, [dimension.at for dimension in dimensions], fill.place.at)
    return bool((place == fill.number).all())
