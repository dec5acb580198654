"""vLLM, worker side: weights are loaded once more as at the start, with all processing, into the memory that they have.

    the model's loader ──► weight loaders ──► vLLM loads a layer when all of it has come, and processes it
                      └──► parameters ──────► vLLM would lose it: the layer gets memory, and it is written there

While vLLM reloads, parameters are on the meta device. Most models load them through weight loaders, which vLLM has
exchanged; gpt-oss writes straight to some.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any, cast

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from vllm.model_executor.model_loader.reload import layerwise

from ..errors import UnsupportedTensor


def reload_weights(model: torch.nn.Module, model_config: Any, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Load checkpoint tensors into a model.

    Raises:
        UnsupportedTensor: a parameter is written to when vLLM has already processed its layer.
    """
    with _rebuilt_kernels(model):
        layerwise.initialize_layerwise_reload(model)
        with _straight_writes(model):
            cast("Any", model).load_weights(tensors)
        layerwise.finalize_layerwise_reload(model, model_config)


@contextlib.contextmanager
def _rebuilt_kernels(model: torch.nn.Module) -> Iterator[None]:
    """Let vLLM process experts as at the first load; on the CPU it would otherwise not pack them again.

    The kernels that it makes for this are dropped, since they refer to tensors of the reload, such as biases.
    """
    kernels = []
    for module in model.modules():
        method: Any = getattr(module, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None and next(module.parameters()).device.type == "cpu":
            kernels.append((method, method.moe_kernel, method.moe_quant_config))
            method.moe_kernel = None
    try:
        yield
    finally:
        for method, kernel, config in kernels:
            method.moe_kernel = kernel
            method.moe_quant_config = config


@contextlib.contextmanager
def _straight_writes(model: torch.nn.Module) -> Iterator[None]:
    """Have writes to parameters on the meta device made, but for those that vLLM makes to count elements."""
    writes = _StraightWrites(model)
    count = layerwise.get_numel_loaded

    def get_numel_loaded(*args: Any, **kwargs: Any) -> Any:
        writes.is_counting = True
        try:
            return count(*args, **kwargs)
        finally:
            writes.is_counting = False

    layerwise.get_numel_loaded = get_numel_loaded
    try:
        with writes:
            yield
    finally:
        layerwise.get_numel_loaded = count


class _StraightWrites(TorchDispatchMode):  # type: ignore[misc]  # PyTorch has no types for it
    """Gives a layer memory when a loader writes to one of its parameters, and lets it write there."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.is_counting = False
        self._parameters: dict[int, tuple[str, torch.nn.Module, str]] = {}  # by their storage
        for label, layer in model.named_modules():
            for name, parameter in layer.named_parameters(prefix="", recurse=False):
                if parameter.is_meta:
                    self._parameters[_storage(parameter)] = f"{label}.{name}", layer, name

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func._schema.is_mutable and not self.is_counting:  # noqa: SLF001
            args, kwargs = tree_map_only(torch.Tensor, self._in_memory, (args, kwargs))
        return func(*args, **kwargs)

    def _in_memory(self, tensor: torch.Tensor) -> torch.Tensor:
        """A view of a parameter on the meta device, in the memory that the parameter has now; others as they are."""
        if not tensor.is_meta or (parameter := self._parameters.get(_storage(tensor))) is None:
            return tensor
        label, layer, name = parameter
        info = layerwise.get_layerwise_info(layer)
        if not info.can_load():
            raise UnsupportedTensor(f"{label!r} is written to after vLLM has processed its layer")
        if getattr(layer, name).is_meta:
            layerwise.materialize_layer(layer, info)
            info.load_numel = max(info.load_numel, 1)  # vLLM processes layers that have loaded something
        memory: torch.Tensor = getattr(layer, name).data
        return memory.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def _storage(tensor: torch.Tensor) -> int:
    """Tells storages on the meta device apart, which have no address."""
    return cast("int", tensor.untyped_storage()._cdata)  # noqa: SLF001
