"""An adapter of a peft model as a target; on request it is merged into the base weights at every commit.

A merged adapter cannot be subtracted from the base weights exactly, since the sum was rounded. So a target that merges
keeps a copy of the base weights of all layers with adapters, and every merge begins with these.
"""

from __future__ import annotations

import re
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from .. import sources
from ..errors import UnsupportedTensor
from ..sources.adapters import AdapterSource, adapter_layers
from ..weights.memory import Weights
from ..weights.shards import Shards
from .modules import ModuleTarget, PreparedModule
from .target import Change

_WRAPPERS = re.compile(r"^base_model\.model\.|\.base_layer(?=\.)|\.token_adapter(?=\.)")  # of peft, in names of tensors


class AdapterTarget(ModuleTarget):
    """The tensors of one adapter, which is not merged. Made by `lora`."""

    def __init__(
        self, model: Any, source: AdapterSource, threads: int | None, lock: AbstractContextManager[Any] | None
    ) -> None:
        super().__init__(partial(_whole_weights, source), threads, lock)
        self._model = model

    def prepare(self, change: Change) -> PreparedModule:
        _refuse_merged(self._model)
        return super().prepare(change)


class MergedTarget(ModuleTarget):
    """The tensors of one adapter, and the base weights with it merged in, as peft merges them. Made by `lora`."""

    def __init__(
        self, model: Any, source: AdapterSource, threads: int | None, lock: AbstractContextManager[Any] | None
    ) -> None:
        super().__init__(partial(_whole_weights, source), threads, lock)
        _refuse_merged(model)
        self._adapter = source.adapter
        expected = sources.lora(model, merged=True, adapter=self._adapter).weights()  # refuses what peft cannot merge
        self._layers = [layer for _, layer in adapter_layers(model.named_modules())]
        base_weights = _base_weights(model)
        self._base = [(weight, weight.data, weight.detach().clone()) for weight in base_weights.values()]
        with self.lock:
            self.written()
        for name, weight in _base_weights(model).items():
            if weight is not base_weights.get(name) or not _equal(weight, expected.get(name)):
                raise UnsupportedTensor(
                    f"{name}: merging in place does not give what merge_and_unload() gives. Load the model again, "
                    "and publish merged weights to a plain model instead"
                )

    def written(self) -> None:
        """Merge the adapter into the base weights."""
        import torch

        with torch.no_grad():
            for weight, memory, base in self._base:
                weight.data = memory.copy_(base)
            for layer in self._layers:
                layer.merged_adapters.clear()
                layer.merge(adapter_names=[self._adapter])
            for weight, memory, _ in self._base:
                if weight.data_ptr() != memory.data_ptr():  # some layers merge into new memory
                    weight.data = memory.copy_(weight)
            for device in {memory.device for _, memory, _ in self._base if memory.is_cuda}:
                torch.cuda.synchronize(device)  # the model may run in another stream than the merge


def _base_weights(model: Any) -> dict[str, Any]:
    """The parameters that adapters are merged into, under the names of the base checkpoint."""
    layers = adapter_layers(model.named_modules())
    modules = [
        getattr(layer, name) for _, layer in layers for name in layer.adapter_layer_names if hasattr(layer, name)
    ]
    adapters = {id(p) for module in modules if hasattr(module, "parameters") for p in module.parameters()}
    return {
        _WRAPPERS.sub("", f"{name}.{part}"): weight
        for name, layer in layers
        for part, weight in layer.get_base_layer().named_parameters()
        if id(weight) not in adapters
    }


def _equal(tensor: Any, expected: Any) -> bool:
    import torch

    if expected is None:
        return False
    return torch.equal(*(t.detach().contiguous().view(torch.uint8) for t in (tensor, expected)))


def _whole_weights(source: AdapterSource) -> Weights:
    weights = source.weights()
    if isinstance(weights, Shards):
        raise UnsupportedTensor(f"adapter {source.adapter!r} is sharded; a target needs whole tensors")
    return weights


def _refuse_merged(model: Any) -> None:
    for name, layer in adapter_layers(model.named_modules()):
        if layer.merged:
            raise UnsupportedTensor(
                f"{name}: an adapter is merged into it already, and cannot be removed exactly. "
                "Give the model before anything is merged; merged=True merges it"
            )


def lora(
    model: Any,
    merged: bool = False,
    adapter: str | None = None,
    threads: int | None = None,
    lock: AbstractContextManager[Any] | None = None,
) -> AdapterTarget | MergedTarget:
    """One adapter of a peft model, for a run that publishes the adapter alone (`sparserl.sources.lora`).

    Args:
        model: a peft model.
        merged: whether to merge the adapter into the base weights, at once and at every commit. The model then computes
            what `merge_and_unload()` gives, at the speed of a plain model. This needs a copy of all layers with
            adapters, and a commit takes as long as the merge.
        adapter: the name of the adapter; by default the active one. With `merged`, the one that is active now.
        threads: how many threads decode and write; by default as many as there are cores, up to 16.
        lock: held during a commit; see `sparserl.targets.module`.

    Returns:
        A target for a `Subscriber`.

    Raises:
        UnsupportedTensor: the model is not a peft model, has no such adapter, or has one merged already.

    >>> subscriber = sparserl.Subscriber(url, sparserl.targets.lora(peft_model, merged=True))      # doctest: +SKIP
    """
    source = sources.lora(model, adapter=adapter)
    return (MergedTarget if merged else AdapterTarget)(model, source, threads, lock)
