"""Weights of a module whose parameters are DTensors: FSDP2, HSDP, tensor parallel, or several of these at once.

A rank's part of a tensor is what its own shard is of it. Where ranks hold the same shard, the one at coordinate 0 of
every replicated mesh dimension owns it. Nothing is gathered.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

from ..errors import TensorMismatch, UnsupportedTensor
from ..weights.region import Region, whole
from ..weights.shards import Part, Shards
from ..weights.staging import lazy_bits
from ..weights.table import TensorTable
from ..weights.tensors import tensor_table

Spans = list[tuple[int, int]]  # where runs of indices start, and how many they are
Cast = Callable[[str], Any]


class ShardedSource:
    """The shards that this rank owns of a module's parameters and persistent buffers."""

    def __init__(self, module: Any, group: Any, cast: Cast | None, table: TensorTable | None) -> None:
        self._module, self._group, self._cast, self._table = module, group, cast, table

    def weights(self) -> Shards:
        import torch

        tensors = self._module.state_dict(keep_vars=True)  # FSDP2 goes back to its shards for it
        dtypes = {name: self._published(name, tensor) for name, tensor in tensors.items()}
        rows = {
            name: tensor if dtypes[name] is None else torch.empty(tensor.shape, dtype=dtypes[name], device="meta")
            for name, tensor in tensors.items()
        }
        known = tensor_table(rows)  # refuses what is no tensor
        parts = []
        first, rank = _ranks(self._group)
        for name, tensor in tensors.items():
            for region, data in _owned(name, tensor, first, rank):
                parts.append(Part(name, region, data if dtypes[name] is None else lazy_bits(data, dtypes[name])))
        return Shards(known if self._table is None else self._table, parts)

    def _published(self, name: str, tensor: Any) -> Any:
        """The dtype that a parameter is cast to; None where its bits are published as they are."""
        from torch.nn import Parameter

        if self._cast is None or not isinstance(tensor, Parameter) or not tensor.is_floating_point():
            return None
        dtype = self._cast(name)
        return None if dtype == tensor.dtype else dtype


def _owned(name: str, tensor: Any, first: int, rank: int) -> Iterator[tuple[Region, Any]]:
    """The boxes of a tensor that are this rank's to publish, and their memory. `first` is the group's first rank."""
    if not hasattr(tensor, "device_mesh") or not tensor.numel():
        if rank == first:
            yield whole(tuple(tensor.shape)), tensor.detach() if tensor.numel() else _empty(tensor)
        return
    for placement in tensor.placements:
        if placement.is_partial():
            raise UnsupportedTensor(f"tensor {name!r} is {placement}: a sum that was not made yet has no bits")
        if not placement.is_replicate() and not isinstance(getattr(placement, "dim", None), int):
            raise UnsupportedTensor(f"tensor {name!r}: placement {placement} is not supported")
    mesh = tensor.device_mesh
    here = mesh.get_coordinate()
    if here is None or not bool((mesh.mesh == first).any()):
        return  # not a holder, or a mesh that repeats what the first one has
    if any(p.is_replicate() and at for p, at in zip(tensor.placements, here, strict=True)):
        return
    yield from _boxes(name, tensor, here)


def _ranks(group: Any) -> tuple[int, int]:
    """The first rank of the group, and this one."""
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        return 0, 0
    return dist.get_global_rank(group, 0) if group is not None else 0, dist.get_rank()


def _empty(tensor: Any) -> Any:
    import torch

    return torch.empty(tensor.shape, dtype=tensor.dtype)


def _boxes(name: str, tensor: Any, here: list[int]) -> Iterator[tuple[Region, Any]]:
    """The boxes of a tensor that a rank's shard consists of: one, unless shards are strided."""
    spans: list[Spans] = [[(0, n)] for n in tensor.shape]
    for axis, placement in enumerate(tensor.placements):
        if not placement.is_replicate():
            dim, pieces = placement.dim, getattr(placement, "split_factor", 1)
            spans[dim] = _shard(spans[dim], tensor.device_mesh.size(axis), here[axis], pieces)
    local = tensor.detach().to_local()
    size = tuple(sum(n for _, n in runs) for runs in spans)
    if tuple(local.shape) != size:
        raise TensorMismatch(
            f"tensor {name!r}: the shard is {list(local.shape)}; placed as {tensor.placements}, it is {list(size)}"
        )
    for picked in itertools.product(*map(_placed, spans)):
        region = Region(tuple(start for start, _, _ in picked), tuple(n for _, n, _ in picked))
        if region.numel:
            yield region, local[tuple(slice(at, at + n) for _, n, at in picked)]


def _shard(spans: Spans, size: int, rank: int, pieces: int) -> Spans:
    """What is left to a rank of indices that are cut into pieces first, and each piece among the ranks."""
    total = sum(n for _, n in spans)
    out: Spans = []
    step = -(-total // pieces)
    for low in range(0, total, max(step, 1)):
        high = min(low + step, total)
        share = -(-(high - low) // size)
        start = min(low + rank * share, high)
        for a, n in _cut(spans, start, min(start + share, high)):
            if out and sum(out[-1]) == a:
                out[-1] = (out[-1][0], out[-1][1] + n)
            else:
                out.append((a, n))
    return out


def _cut(spans: Spans, low: int, high: int) -> Iterator[tuple[int, int]]:
    """Indices number `low` to `high` of those in the spans."""
    at = 0
    for start, n in spans:
        a, b = max(low - at, 0), min(high - at, n)
        if a < b:
            yield start + a, b - a
        at += n


def _placed(spans: Spans) -> Iterator[tuple[int, int, int]]:
    """Every span, and where it starts in the shard."""
    at = 0
    for start, n in spans:
        yield start, n, at
        at += n


def fsdp(module: Any, *, group: Any = None, cast: Any = None, table: TensorTable | None = None) -> ShardedSource:
    """What this rank owns of a module that is sharded with DTensors, of whatever placement on whatever mesh.

    Tensors that are no DTensors are taken to be the same on every rank: the first rank of the group owns them.
    Tied weights appear under every name they have.

    group: the ranks that hold the module together; all, unless it is one stage of a pipeline.
    cast: the dtype that is published, where training keeps wider parameters: a torch dtype for all floating-point
        parameters, or a function from a name to a dtype, or to None for one that is published as it is.
    table: the tensor table of the whole checkpoint, where the module is only some of it.
    """
    if not callable(getattr(module, "state_dict", None)):
        raise UnsupportedTensor(f"expected a torch module, got {type(module).__name__}")
    import torch

    by_name: Cast | None = (lambda _name: cast) if isinstance(cast, torch.dtype) else cast
    return ShardedSource(module, group, by_name, table)
