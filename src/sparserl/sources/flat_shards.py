"""Parameters whose shards are ranges of their flattened elements: FSDP1's flat parameters, DeepSpeed's ZeRO-3.

Their modules have no tensors that could be published as they are. FSDP1 shows flat buffers, or pieces of one dimension
under the names of the parameters, and its `state_dict` gathers; the parameters of ZeRO-3 are empty.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

from ..errors import UnsupportedTensor
from ..weights.region import Shape

_FSDP1 = "torch.distributed.fsdp.fully_sharded_data_parallel"
_WRAPPERS = ("_fsdp_wrapped_module", "_checkpoint_wrapped_module")  # in the names of modules


class FlatShard(NamedTuple):
    """What this rank has of a parameter: some of its elements in row-major order, from the one at `start` on."""

    shape: Shape
    dtype: Any
    start: int
    data: Any
    ranks: list[int]  # the ranks that have the parameter together


def sharding_of(module: Any) -> str | None:
    """What has sharded a module so that it has no whole tensors: FSDP1 or ZeRO-3; None if neither has."""
    if next(_fsdp1_modules(module), None) is not None:
        return "FSDP1"
    for parameter in module.parameters() if hasattr(module, "parameters") else ():
        if _is_flattened(parameter):
            return "FSDP1"
        if is_partitioned(parameter):
            return "DeepSpeed ZeRO-3"
    return None


def refuse_flat_shards(module: Any) -> None:
    """Refuse a module that has no whole tensors; without this, its shards would pass for them.

    Raises:
        UnsupportedTensor: It is a module of FSDP1 or ZeRO-3, or a part of one.
    """
    if (kind := sharding_of(module)) is not None:
        raise UnsupportedTensor(
            f"{type(module).__name__} is sharded by {kind}, so that it has no whole tensors: publish "
            "sparserl.sources.fsdp(model) on every rank, where `model` is the outermost module"
        )


def flattened_tensors(module: Any) -> dict[str, Any] | None:
    """The parameters and persistent buffers of a module of FSDP1, by name; None for other modules.

    Sharded parameters are `FlatShard`s. Nothing is gathered, unlike by the `state_dict` of such a module.
    """
    if next(_fsdp1_modules(module), None) is None:
        return None
    shards: dict[str, FlatShard] = {}
    read = set()  # the flat parameters that shards are of
    for prefix, wrapper in _fsdp1_modules(module):
        handle = wrapper._handle  # noqa: SLF001  # FSDP1 has no other way to its shards
        if handle is not None:
            shards |= _shards_of_handle(prefix, handle)
            read.add(id(handle.flat_param))
    tensors: dict[str, Any] = {}
    for path, part in module.named_modules(remove_duplicate=False):
        prefix = _clean(path)
        for name, tensor in (*part._parameters.items(), *_persistent_buffers(part)):  # noqa: SLF001
            full_name = _join(prefix, name)
            if full_name in shards:
                tensors[full_name] = shards[full_name]
            elif tensor is not None and id(tensor) not in read:
                if _is_flattened(tensor):
                    raise _inside_fsdp1(full_name)
                tensors[full_name] = tensor
    return shards | tensors


def partition(name: str, parameter: Any) -> Any:
    """The `FlatShard` of a parameter that ZeRO-3 has partitioned; any other tensor as it is.

    Raises:
        UnsupportedTensor: The partition is not in memory, or a piece of FSDP1 has lost its module.
    """
    if _is_flattened(parameter):
        raise _inside_fsdp1(name)
    if not is_partitioned(parameter):
        return parameter
    import torch.distributed as dist

    data = parameter.ds_tensor
    if data is None or data.status.name != "AVAILABLE" or data.dtype != parameter.dtype:
        raise UnsupportedTensor(
            f"parameter {name!r}: its ZeRO-3 partition is not in memory as {parameter.dtype}: it is on NVMe, or "
            "quantized; offload parameters to the CPU instead"
        )
    ranks = dist.get_process_group_ranks(parameter.ds_process_group)
    start = ranks.index(dist.get_rank()) * data.ds_numel
    count = min(data.ds_numel, max(0, parameter.ds_numel - start))  # the rest is padding
    return FlatShard(tuple(parameter.ds_shape), parameter.dtype, start, data.detach()[:count], ranks)


def is_partitioned(tensor: Any) -> bool:
    """Whether a tensor is a parameter that ZeRO-3 has partitioned."""
    return hasattr(tensor, "ds_id") and hasattr(tensor, "ds_tensor")


def _is_flattened(tensor: Any) -> bool:
    """Whether a tensor is a flat parameter of FSDP1, or a piece of one."""
    return bool(getattr(tensor, "_fsdp_flattened", False))


def _inside_fsdp1(name: str) -> UnsupportedTensor:
    return UnsupportedTensor(
        f"parameter {name!r} is a flat shard of FSDP1; pass the outermost FullyShardedDataParallel module, not one "
        "inside it"
    )


def _fsdp1_modules(module: Any) -> Iterator[tuple[str, Any]]:
    """The modules that FSDP1 has wrapped, and their names without the wrappers'."""
    fsdp1 = sys.modules.get(_FSDP1)
    if fsdp1 is not None and hasattr(module, "named_modules"):
        for path, part in module.named_modules(remove_duplicate=False):
            if isinstance(part, fsdp1.FullyShardedDataParallel):
                yield _clean(path), part


def _shards_of_handle(prefix: str, handle: Any) -> dict[str, FlatShard]:
    """What this rank has of the parameters of one flat parameter."""
    import torch.distributed as dist

    flat = handle.flat_param
    if handle._training_state.name == "SUMMON_FULL_PARAMS":  # noqa: SLF001
        raise UnsupportedTensor(f"{_join(prefix, flat._fqns[0])!r}: publish outside of summon_full_params")  # noqa: SLF001
    local = getattr(flat, "_local_shard", flat).detach()  # there is none before the first forward
    # Without sharding every rank has everything, and any rank is the first of its own.
    ranks = dist.get_process_group_ranks(handle.process_group) if handle.uses_sharded_strategy else [dist.get_rank()]
    shards: dict[str, FlatShard] = {}
    by_module: dict[tuple[Any, str], FlatShard] = {}
    rows = zip(
        flat._fqns,  # noqa: SLF001
        flat._shapes,  # noqa: SLF001
        flat._contiguities,  # noqa: SLF001
        flat._param_extensions,  # noqa: SLF001
        flat._param_infos,  # noqa: SLF001
        flat._shard_param_infos,  # noqa: SLF001
        strict=True,
    )
    for fqn, shape, is_contiguous, extension, info, where in rows:
        name = _join(prefix, _clean(fqn))
        if not is_contiguous or extension is not None:
            raise UnsupportedTensor(f"parameter {name!r}: FSDP1 has flattened it in another order; use FSDP2")
        data = local[:0]
        if where.in_shard:
            data = local[where.offset_in_shard : where.offset_in_shard + where.numel_in_shard]
        shard = FlatShard(tuple(shape), local.dtype, where.intra_param_start_idx or 0, data, ranks)
        shards[name] = shard
        by_module[info.module, info.param_name] = shard
    for tied in flat._shared_param_infos:  # noqa: SLF001
        name = _join(prefix, _clean(_join(tied.module_name, tied.param_name)))
        shards[name] = by_module[tied.prim_module, tied.prim_param_name]
    return shards


def _persistent_buffers(module: Any) -> Iterator[tuple[str, Any]]:
    for name, buffer in module._buffers.items():  # noqa: SLF001  # torch has no public way to ask which are persistent
        if name not in module._non_persistent_buffers_set:  # noqa: SLF001
            yield name, buffer


def _clean(path: str) -> str:
    return ".".join(name for name in path.split(".") if name not in _WRAPPERS)


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name
