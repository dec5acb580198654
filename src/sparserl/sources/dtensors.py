"""Weights of a sharded module: DTensors (FSDP2, HSDP, tensor parallel, or several of these), FSDP1, ZeRO-3.

A rank publishes its own shard of each tensor. If several ranks hold the same shard, the one at coordinate 0 of every
replicated mesh dimension publishes it. Nothing is gathered.
"""

from __future__ import annotations

import itertools
from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Any

from ..errors import TensorMismatch, UnsupportedTensor
from ..weights.region import Region, Shape, whole
from ..weights.shards import Part, Shards
from ..weights.staging import lazy_bits
from ..weights.table import TensorTable
from ..weights.tensors import tensor_table
from .casting import Cast, buffers_among, cast_of
from .flat_shards import FlatShard, flattened_tensors, partition
from .layout import boxes
from .master_sample import ParameterState, state_of
from .tying import shared_names

Spans = list[tuple[int, int]]  # runs of indices: the first, and how many


class ShardedSource:
    """The shards of a module's parameters and persistent buffers that this rank publishes. Made by `fsdp`.

    Attributes:
        tied: The names that `weights` left out, each with that of the same tensor.
        buffers: The names of buffers, which are not cast.
    """

    def __init__(self, module: Any, group: Any, cast: Cast | None, table: TensorTable | None) -> None:
        self._module = module
        self._group = group
        self._cast = cast
        self._table = table
        self.tied: Mapping[str, str] = {}
        self.buffers: frozenset[str] = frozenset()

    def weights(self) -> Shards:
        """The parts of this rank, of each tensor under one name; under more names where the table has them."""
        tensors = flattened_tensors(self._module)
        if tensors is None:
            tensors = self._module.state_dict(keep_vars=True)  # makes FSDP2 reshard its parameters
        self.buffers = buffers_among(self._module, tensors)
        tied = shared_names(self._module, tensors)
        wanted = tensors.keys() - tied.keys() if self._table is None else self._table.index.keys()
        self.tied = {name: kept for name, kept in tied.items() if name not in wanted and kept in wanted}
        have_a_name = {tied.get(name, name) for name in wanted}
        tensors = {n: tensor for n, tensor in tensors.items() if n in wanted or tied.get(n, n) not in have_a_name}
        return shards_of(tensors, self._group, self._cast, self._table, self.buffers)

    def training_state(self) -> list[ParameterState]:
        """The parameters, with their gradients."""
        return [state_of(parameter) for parameter in self._module.parameters()]


def shards_of(
    tensors: Mapping[str, Any],
    group: Any = None,
    cast: Cast | None = None,
    table: TensorTable | None = None,
    buffers: Container[str] = (),
) -> Shards:
    """The parts that this rank publishes of tensors as a sharded module has them; see `fsdp`."""
    import torch

    tensors = {name: partition(name, tensor) for name, tensor in tensors.items()}
    dtypes: dict[str, Any] = dict.fromkeys(tensors)
    for name, tensor in tensors.items():
        if cast is not None and name not in buffers and hasattr(tensor, "dtype"):
            dtypes[name] = cast(name, tensor.dtype)
    published = {name: _published(tensor, dtypes[name], torch) for name, tensor in tensors.items()}
    published_table = tensor_table(published)  # refuses what is not a tensor
    parts = []
    first_rank, rank = _ranks(group)
    for name, tensor in tensors.items():
        for region, data in _owned(name, tensor, first_rank, rank):
            parts.append(Part(name, region, data if dtypes[name] is None else lazy_bits(data, dtypes[name])))
    return Shards(published_table if table is None else table, parts)


def _published(tensor: Any, dtype: Any, torch: Any) -> Any:
    """A tensor of the shape and the dtype that are published."""
    if dtype is None and not isinstance(tensor, FlatShard):
        return tensor
    return torch.empty(tensor.shape, dtype=dtype or tensor.dtype, device="meta")


def _owned(name: str, tensor: Any, first_rank: int, rank: int) -> Iterator[tuple[Region, Any]]:
    """The regions of a tensor that this rank publishes, and their memory."""
    if isinstance(tensor, FlatShard):
        if first_rank in tensor.ranks:
            yield from _flat_regions(tensor)
        return
    if not hasattr(tensor, "device_mesh") or not tensor.numel():
        if rank == first_rank:
            yield whole(tuple(tensor.shape)), tensor.detach() if tensor.numel() else _empty(tensor)
        return
    _require_placements(name, tensor)
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None or not bool((mesh.mesh == first_rank).any()):
        return  # this rank is not in the mesh, or the mesh holds a copy of what the first mesh holds
    if not is_replica(tensor.placements, coordinate):
        yield from _dtensor_regions(name, tensor, coordinate)


def regions_here(name: str, tensor: Any) -> Iterator[tuple[Region, Any]]:
    """The regions of a tensor that this rank has, replicas included, and views of their memory.

    >>> import torch
    >>> [(region.size, view.shape) for region, view in regions_here("w", torch.zeros(2, 3))]
    [((2, 3), torch.Size([2, 3]))]

    Raises:
        UnsupportedTensor: The tensor has a placement that is not supported.
    """
    if not hasattr(tensor, "device_mesh"):
        if tensor.numel():
            yield whole(tuple(tensor.shape)), tensor.detach()
        return
    _require_placements(name, tensor)
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is not None and tensor.numel():
        yield from _dtensor_regions(name, tensor, coordinate)


def _require_placements(name: str, tensor: Any) -> None:
    for placement in tensor.placements:
        if placement.is_partial():
            raise UnsupportedTensor(
                f"tensor {name!r} is {placement}: partial sums cannot be published; reduce them first"
            )
        if not placement.is_replicate() and not isinstance(getattr(placement, "dim", None), int):
            raise UnsupportedTensor(f"tensor {name!r}: placement {placement} is not supported")


def _flat_regions(shard: FlatShard) -> Iterator[tuple[Region, Any]]:
    """The regions of a parameter that a range of its flattened elements consists of, and their memory."""
    offset = 0
    for box in boxes(shard.shape, shard.start, shard.start + shard.data.numel()):
        yield box, shard.data[offset : offset + box.numel].view(box.size)
        offset += box.numel


def _ranks(group: Any) -> tuple[int, int]:
    """The first rank of the group, and this one."""
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        return 0, 0
    return dist.get_global_rank(group, 0) if group is not None else 0, dist.get_rank()


def _empty(tensor: Any) -> Any:
    import torch

    return torch.empty(tensor.shape, dtype=tensor.dtype)


def is_replica(placements: Sequence[Any], coordinate: Sequence[int]) -> bool:
    """Whether a shard is also that of a rank before this one, which publishes it."""
    return any(p.is_replicate() and index for p, index in zip(placements, coordinate, strict=True))


def _dtensor_regions(name: str, tensor: Any, coordinate: list[int]) -> Iterator[tuple[Region, Any]]:
    mesh_shape = tensor.device_mesh.shape
    return shard_regions(name, tensor.shape, tensor.detach().to_local(), tensor.placements, mesh_shape, coordinate)


def shard_regions(
    name: str, shape: Shape, shard: Any, placements: Sequence[Any], mesh_shape: Shape, coordinate: Sequence[int]
) -> Iterator[tuple[Region, Any]]:
    """The regions of a tensor that a rank's shard consists of, and their memory: one, unless shards are strided."""
    spans: list[Spans] = [[(0, n)] for n in shape]
    for placement, ranks, index in zip(placements, mesh_shape, coordinate, strict=True):
        if not placement.is_replicate():
            spans[placement.dim] = _shard(spans[placement.dim], ranks, index, getattr(placement, "split_factor", 1))
    size = tuple(sum(count for _, count in axis_spans) for axis_spans in spans)
    if tuple(shard.shape) != size:
        raise TensorMismatch(
            f"tensor {name!r}: the shard has shape {list(shard.shape)}; "
            f"by its placements {placements} it should have {list(size)}"
        )
    for box in itertools.product(*map(_with_offsets, spans)):
        region = Region(tuple(start for start, _, _ in box), tuple(count for _, count, _ in box))
        if region.numel or 0 in shape:
            yield region, shard[tuple(slice(offset, offset + count) for _, count, offset in box)]


def _shard(spans: Spans, size: int, rank: int, pieces: int) -> Spans:
    """The indices of one rank, if indices are cut into pieces first, and each piece among the ranks."""
    total = sum(count for _, count in spans)
    shard: Spans = []
    step = -(-total // pieces)
    for low in range(0, total, max(step, 1)):
        high = min(low + step, total)
        share = -(-(high - low) // size)
        start = min(low + rank * share, high)
        for first, count in _slice(spans, start, min(start + share, high)):
            if shard and sum(shard[-1]) == first:
                shard[-1] = (shard[-1][0], shard[-1][1] + count)
            else:
                shard.append((first, count))
    return shard


def _slice(spans: Spans, low: int, high: int) -> Iterator[tuple[int, int]]:
    """The `low`-th to `high`-th of the indices in the spans."""
    offset = 0
    for start, count in spans:
        first = max(low - offset, 0)
        stop = min(high - offset, count)
        if first < stop:
            yield start + first, stop - first
        offset += count


def _with_offsets(spans: Spans) -> Iterator[tuple[int, int, int]]:
    """Every span, and where it starts in the shard."""
    offset = 0
    for start, count in spans:
        yield start, count, offset
        offset += count


def fsdp(module: Any, *, group: Any = None, cast: Any = None, table: TensorTable | None = None) -> ShardedSource:
    """The shards that this rank publishes of a sharded module: DTensors with any placements on any mesh, FSDP1, ZeRO-3.

    Tensors that are not sharded must be the same on every rank: the first rank of the group publishes them. A tied
    tensor is published once, as by `module`; under all of its names that a `table` has.

    Args:
        module: the sharded module: FSDP2, HSDP, tensor parallel, or several of these; the outermost module of FSDP1,
            with `use_orig_params` or without; the module of a DeepSpeed engine with ZeRO-3.
        group: the process group of the ranks that hold the module; by default all ranks. A pipeline stage has its own.
        cast: the dtype to publish if training keeps wider parameters: a torch dtype for all floating-point parameters
            that are wider, or a function from a name to a dtype, or to None for a parameter that is published as it is.
            Buffers are never cast. fp32 on a GPU, with the baseline there, is cast by the kernels that compare it with
            bf16.
        table: the tensor table of the whole checkpoint, if the module is only a part of it.

    Returns:
        A source of the parts of this rank. Every rank publishes its own, with `writers`.

    Raises:
        UnsupportedTensor: the object is not a torch module, or `cast` is no dtype. Its `weights` raises it for shards
            that cannot be read.

    >>> model = fully_shard(model)                                                                 # doctest: +SKIP
    >>> source = sparserl.sources.fsdp(model, cast=torch.bfloat16)                                 # doctest: +SKIP
    >>> publisher = sparserl.Publisher(url, source, writers=dist.group.WORLD)                      # doctest: +SKIP
    """
    if not callable(getattr(module, "state_dict", None)):
        raise UnsupportedTensor(f"expected a torch module, got {type(module).__name__}")
    return ShardedSource(module, group, cast_of(cast), table)
