"""A live peft model that follows the run of an adapter: its tensors are written, and merged anew where that is wanted.

A merged adapter cannot be taken out of the base weights exactly: what was added to them was rounded. So a target that
merges keeps the base weights of the layers that have adapters, and every merge begins with them.
"""

from __future__ import annotations

import re
from contextlib import AbstractContextManager
from typing import Any

from .. import sources
from ..errors import UnsupportedTensor
from ..sources.adapters import AdapterSource, adapter_layers
from .modules import ModuleTarget, PreparedModule
from .target import Change

_WRAPPERS = re.compile(r"^base_model\.model\.|\.base_layer(?=\.)|\.token_adapter(?=\.)")  # of peft, in names of tensors


class AdapterTarget(ModuleTarget):
    """The tensors of one adapter, which its layers use beside the base weights."""

    def __init__(
        self, model: Any, source: AdapterSource, threads: int | None, lock: AbstractContextManager[Any] | None
    ) -> None:
        super().__init__(source.weights, threads, lock)
        self._model = model

    def prepare(self, change: Change) -> PreparedModule:
        _refuse_merged(self._model)
        return super().prepare(change)


class MergedTarget(ModuleTarget):
    """The tensors of one adapter, and the base weights with them merged in: bit for bit what peft merges."""

    def __init__(
        self, model: Any, source: AdapterSource, threads: int | None, lock: AbstractContextManager[Any] | None
    ) -> None:
        super().__init__(source.weights, threads, lock)
        _refuse_merged(model)
        self._adapter = source.adapter
        expected = sources.lora(model, merged=True, adapter=self._adapter).weights()  # refuses what peft cannot merge
        self._layers = [layer for _, layer in adapter_layers(model.named_modules())]
        found = _base_weights(model)
        self._base = [(weight, weight.data, weight.detach().clone()) for weight in found.values()]
        with self.lock:
            self.written()
        for name, weight in _base_weights(model).items():
            if weight is not found.get(name) or not _same(weight, expected.get(name)):
                raise UnsupportedTensor(
                    f"{name}: merged where it is, it is not what merge_and_unload() gives. Load the model anew, and "
                    "let a plain one follow a run of merged weights"
                )

    def written(self) -> None:
        """Merge the adapter as it is now into the base weights as they were."""
        import torch

        with torch.no_grad():
            for weight, memory, base in self._base:
                weight.data = memory.copy_(base)
            for layer in self._layers:
                layer.merged_adapters.clear()
                layer.merge(adapter_names=[self._adapter])
            for weight, memory, _ in self._base:
                if weight.data_ptr() != memory.data_ptr():  # some layers merge into other memory than engines know
                    weight.data = memory.copy_(weight)
            for device in {memory.device for _, memory, _ in self._base if memory.is_cuda}:
                torch.cuda.synchronize(device)  # the model may run in another stream than the merge


def _base_weights(model: Any) -> dict[str, Any]:
    """The parameters that adapters are merged into, under the names of the base checkpoint."""
    layers = adapter_layers(model.named_modules())
    kinds = [getattr(layer, kind) for _, layer in layers for kind in layer.adapter_layer_names if hasattr(layer, kind)]
    adapters = {id(p) for several in kinds if hasattr(several, "parameters") for p in several.parameters()}
    return {
        _WRAPPERS.sub("", f"{name}.{part}"): weight
        for name, layer in layers
        for part, weight in layer.get_base_layer().named_parameters()
        if id(weight) not in adapters
    }


def _same(one: Any, other: Any) -> bool:
    import torch

    return other is not None and torch.equal(*(t.detach().contiguous().view(torch.uint8) for t in (one, other)))


def _refuse_merged(model: Any) -> None:
    for name, layer in adapter_layers(model.named_modules()):
        if layer.merged:
            raise UnsupportedTensor(
                f"{name}: an adapter is merged into it already, and cannot be taken out exactly. "
                "Hand over the model before anything is merged; merged=True merges it"
            )


def lora(
    model: Any,
    merged: bool = False,
    adapter: str | None = None,
    threads: int | None = None,
    lock: AbstractContextManager[Any] | None = None,
) -> AdapterTarget | MergedTarget:
    """One adapter of a live peft model, for a run that has the adapter alone (`sparserl.sources.lora`).

    merged: True to have it merged into the base weights, at once and at every commit. The model then computes what
        `merge_and_unload()` gives, at the speed of a plain one. It takes a copy of the layers that have adapters, and
        a commit takes as long as the merge.
    adapter: its name; by default the one that is active. Merged, it stays the one that was active first.
    lock: as for `sparserl.targets.module`.
    """
    source = sources.lora(model, adapter=adapter)
    return (MergedTarget if merged else AdapterTarget)(model, source, threads, lock)
