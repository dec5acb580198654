"""Megatron-core's optimizers: when they write parameters, and which elements of them.

A distributed optimizer keeps the parameters of a model in buffers, cut into buckets. Each data-parallel rank updates an
equal part of every bucket, which respects no parameter, and gathers the rest from the others: after the step or, with
`overlap_param_gather`, in the next forward pass. So a rank publishes the elements that its own optimizer writes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import wraps
from typing import Any

from ..errors import UnsupportedTensor
from ..weights.region import Region, intersection
from .layout import Local, Slice, boxes
from .megatron_core import interleaved, transposed


class OptimizerSteps:
    """The steps of one of Megatron-core's optimizers, with the hooks of torch's.

    Args:
        optimizer: what `get_megatron_optimizer` returned.
        params: the parameters of the model, which a step writes.
        ranges: which elements of them the optimizer of this rank writes, as `owned_ranges` says.
    """

    def __init__(self, optimizer: Any, params: Sequence[Any], ranges: Mapping[int, range]) -> None:
        self.param_groups = [{"params": list(params)}]
        self._optimizer = optimizer
        self._ranges = ranges

    def master_of(self, parameter: Any) -> tuple[Any, int]:
        """The fp32 master of a parameter, or the range of it that this rank updates, and where that begins."""
        elements = self._ranges.get(id(parameter))
        return getattr(parameter, "main_param", None), 0 if elements is None else elements.start

    def register_step_pre_hook(self, hook: Callable[[Any, Any, Any], Any]) -> MethodHook:
        """Call a function before every step."""
        return MethodHook(self._optimizer, "step", before=lambda: hook(self, (), {}))

    def register_step_post_hook(self, hook: Callable[[Any, Any, Any], Any]) -> MethodHook:
        """Call a function after every step."""
        return MethodHook(self._optimizer, "step", after=lambda: hook(self, (), {}))


class MethodHook:
    """Functions that are called around a method of one object, until the hook is removed."""

    def __init__(
        self,
        owner: Any,
        name: str,
        before: Callable[[], Any] = lambda: None,
        after: Callable[[], Any] = lambda: None,
    ) -> None:
        self._active = True
        method = getattr(owner, name)

        @wraps(method)
        def hooked(*args: Any, **kwargs: Any) -> Any:
            if not self._active:
                return method(*args, **kwargs)
            before()
            result = method(*args, **kwargs)
            after()
            return result

        setattr(owner, name, hooked)

    def remove(self) -> None:
        """Call the functions no more."""
        self._active = False


def owned_ranges(optimizer: Any) -> dict[int, range]:
    """Which elements of its parameters the optimizer of this rank writes, by the parameter's id.

    It has all parameters of distributed optimizers, and no others.

    Raises:
        UnsupportedTensor: this is no optimizer of Megatron-core, or one whose parameters are not in buffers.
    """
    ranges: dict[int, range] = {}
    for one in _leaves(optimizer):
        if not callable(getattr(one, "step_with_ready_grads", None)):
            raise UnsupportedTensor(f"{type(one).__name__} is no optimizer of Megatron-core, nor one of torch")
        if not _is_distributed(one):
            continue
        if one.ddp_config.use_megatron_fsdp:
            raise UnsupportedTensor("Megatron-FSDP has DTensors, not buffers: track(optimizer, sources.fsdp(model))")
        if one.config.reuse_grad_buf_for_mxfp8_param_ag:
            raise UnsupportedTensor("parameters in MXFP8 are no bits of a checkpoint and cannot be tracked")
        for buffer in one.buffers:
            ranges.update((id(parameter), range(0)) for parameter in buffer.params)
        if one.distributed_optimizer_instance_id:  # a replica of what the first instance publishes
            continue
        for parameter, (buffer_index, dtypes, bucket) in one.model_param_gbuf_map.items():
            elements = one.gbuf_ranges[buffer_index][dtypes][bucket]["param_map"][parameter]["param"]
            ranges[id(parameter)] = range(elements.start, elements.end)
    return ranges


def gathers_late(optimizer: Any) -> bool:
    """Whether ranks get what others wrote only in the next forward pass."""
    return any(_is_distributed(one) and one.ddp_config.overlap_param_gather for one in _leaves(optimizer))


def within(local: Local, elements: range) -> Local | None:
    """Of a parameter, what is in a range of its elements. None if that is not made of boxes of tensors."""
    if len(elements) == math.prod(local.shape):
        return local
    if local.convert is interleaved:
        return None
    reverse = local.convert is transposed
    in_both = [
        (slice_, intersection(box, slice_.local))
        for box in boxes(local.shape, elements.start, elements.stop)
        for slice_ in local.slices
    ]
    slices = tuple(_part(slice_, box, reverse) for slice_, box in in_both if box is not None)
    return Local(local.shape, slices, local.convert)


def _part(slice_: Slice, box: Region, reverse: bool) -> Slice:
    """The part of a slice that is a box of the parameter. Dimensions of the tensor may have the reverse order."""
    steps = [start - first for start, first in zip(box.start, slice_.local.start, strict=True)]
    sizes = [*box.size]
    if reverse:
        steps.reverse()
        sizes.reverse()
    leading = len(slice_.region.size) - len(sizes)  # of size 1: the tensor has other experts too
    start = [first + step for first, step in zip(slice_.region.start, [0] * leading + steps, strict=True)]
    return Slice(slice_.tensor, Region(tuple(start), (1,) * leading + tuple(sizes)), box)


def _leaves(optimizer: Any) -> Iterator[Any]:
    """The optimizers in a chain of optimizers."""
    if (chain := getattr(optimizer, "chained_optimizers", None)) is None:
        yield optimizer
        return
    for one in chain:
        yield from _leaves(one)


def _is_distributed(optimizer: Any) -> bool:
    """Whether an optimizer updates part of its parameters; one without parameters does not."""
    return hasattr(optimizer, "ddp_config") and not optimizer.is_stub_optimizer
