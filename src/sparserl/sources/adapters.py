"""The weights of a peft model: its adapter alone, or the base weights with adapters merged in.

An adapter alone is dense and tiny: every element moves at every step, and there are few of them. Merged weights are
those of a plain checkpoint: most of their elements keep their bits, since a small addition is often rounded away.

What merging gives is left to peft. Its own `merge_and_unload` works on a copy of the model that shares every tensor
with the live one, except for those that adapters are added to. So the bits are peft's, whatever the kind of layer,
and the live weights are never written to.
"""

from __future__ import annotations

import copy
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, overload

from ..errors import UnsupportedTensor
from ..weights.memory import Weights

_CONFIG = "adapter_config.json"


class AdapterSource:
    """One adapter: the tensors of its `adapter_model.safetensors`, where they are.

    Without a name it is the one that is active when the weights are asked for.
    """

    def __init__(self, model: Any, adapter: str | None) -> None:
        self._model, self._adapter = model, adapter
        self._embeddings: dict[str, bool] = {}

    @property
    def adapter(self) -> str:
        """The name of the adapter."""
        active = list(self._model.active_adapters) if self._adapter is None else [self._adapter]
        if len(active) != 1:
            known = list(self._model.peft_config)
            raise UnsupportedTensor(f"an adapter alone is one of {known}; {active} are active, so say which")
        return str(active[0])

    def weights(self) -> Weights:
        adapter = self.adapter
        if adapter not in self._embeddings:
            # By default peft finds out whether embeddings were resized, which may ask the Hub. Once is enough.
            alone = self._tensors(adapter, False)
            self._embeddings[adapter] = self._tensors(adapter, "auto").keys() != alone.keys()
        return {name: tensor.detach() for name, tensor in self._tensors(adapter, self._embeddings[adapter]).items()}

    def files(self) -> dict[str, bytes]:
        """The `adapter_config.json` that peft writes, to hand to a `Publisher` as its files."""
        with tempfile.TemporaryDirectory(prefix="sparserl-") as folder:
            self._model.save_pretrained(folder, selected_adapters=[self.adapter])
            (path,) = Path(folder).rglob(_CONFIG)
            return {_CONFIG: path.read_bytes()}

    def _tensors(self, adapter: str, embeddings: bool | Literal["auto"]) -> dict[str, Any]:
        from peft import get_peft_model_state_dict

        found: dict[str, Any] = get_peft_model_state_dict(
            self._model, adapter_name=adapter, save_embedding_layers=embeddings
        )
        return found


class MergedSource:
    """The base weights with adapters merged in, under the names of the base checkpoint.

    Layers with adapters are merged in memory that is kept for the next time: one copy of them. What `weights` gave
    is overwritten by the next call. All other tensors are the live ones.
    """

    def __init__(self, model: Any, adapters: list[str] | None) -> None:
        self._model, self._adapters = model, adapters
        self._merged: dict[str, Any] = {}

    def weights(self) -> Weights:
        import torch

        with torch.no_grad():
            twin = copy.deepcopy(self._model, self._shared())
            try:
                merged = twin.merge_and_unload(adapter_names=self._adapters)
            except (ValueError, RuntimeError, NotImplementedError, AttributeError) as error:
                raise UnsupportedTensor(f"{_first_layer(twin)}: peft cannot merge it: {error}") from error
        return {name: tensor.detach() for name, tensor in merged.state_dict(keep_vars=True).items()}

    def _shared(self) -> dict[int, Any]:
        """What stands for each tensor in a copy of the model: itself, or a copy where an adapter may be added to it."""
        import torch

        modules = list(self._model.named_modules())  # once: some layers make new parameters whenever they are walked
        shared = {id(t): t for _, m in modules for t in (*m.parameters(recurse=False), *m.buffers(recurse=False))}
        for name, layer in adapter_layers(modules):
            for part, tensor in layer.get_base_layer().named_parameters():
                if not tensor.is_floating_point():
                    raise UnsupportedTensor(
                        f"{name}: its {part} is {tensor.dtype}, which an adapter cannot be merged into exactly; "
                        "publish the adapter alone"
                    )
                if shared[id(tensor)] is tensor:
                    kept = self._merged.get(f"{name}.{part}")
                    if kept is None or kept.shape != tensor.shape or kept.dtype is not tensor.dtype:
                        kept = self._merged[f"{name}.{part}"] = torch.empty_like(tensor)
                    shared[id(tensor)] = torch.nn.Parameter(kept.copy_(tensor), requires_grad=False)
        return shared


def adapter_layers(modules: Iterable[tuple[str, Any]]) -> list[tuple[str, Any]]:
    """The modules that have adapters, with their names."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    return [(name, layer) for name, layer in modules if isinstance(layer, BaseTunerLayer)]


def _first_layer(model: Any) -> str:
    """The first layer that still has adapters: merging goes from layer to layer, and takes them away."""
    layers = adapter_layers(model.named_modules())
    return layers[0][0] if layers else type(model).__name__


@overload
def lora(model: Any, merged: Literal[False] = False, adapter: str | None = None) -> AdapterSource: ...


@overload
def lora(model: Any, merged: Literal[True], adapter: str | Sequence[str] | None = None) -> MergedSource: ...


def lora(model: Any, merged: bool = False, adapter: str | Sequence[str] | None = None) -> AdapterSource | MergedSource:
    """The weights of a peft model.

    merged: False for the adapter alone, under the names that `adapter_model.safetensors` has. True for the base
        weights with it merged in, under the names of the base checkpoint: bit for bit what `merge_and_unload` gives.
    adapter: its name; by default the one that is active whenever the weights are asked for. Merged, it may be several:
        by default all that are active then.
    """
    peft = sys.modules.get("peft")
    if peft is None or not isinstance(model, peft.PeftModel):
        raise UnsupportedTensor(f"expected a peft model, got {type(model).__name__}; what wraps it must be taken off")
    known = list(model.peft_config)
    chosen = [adapter] if isinstance(adapter, str) else None if adapter is None else list(adapter)
    if strangers := [name for name in chosen or () if name not in known]:
        raise UnsupportedTensor(f"no adapter is called {strangers[0]!r}; there are {known}")
    if merged:
        if not hasattr(model.base_model, "merge_and_unload"):
            raise UnsupportedTensor(f"peft cannot merge {type(model).__name__}; publish the adapter alone")
        return MergedSource(model, chosen)
    if chosen is not None and len(chosen) != 1:
        raise UnsupportedTensor(f"an adapter alone is one of {known}, not {chosen}")
    source = AdapterSource(model, chosen[0] if chosen else None)
    source.adapter  # noqa: B018  # raises here, not at the first publish
    return source
