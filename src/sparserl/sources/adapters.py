"""The weights of a peft model: its adapter alone, or the base weights with adapters merged in.

An adapter alone is small and dense: every element changes at every step. Merged weights are those of a plain
checkpoint: most elements keep their bits, since a small addition is often rounded away.

peft does the merging. Its `merge_and_unload` runs on a copy of the model that shares all tensors with the live one but
those that adapters are added to. So the bits are peft's for every kind of layer, and live weights are never written.
"""

from __future__ import annotations

import copy
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, overload

from ..errors import UnsupportedTensor
from ..weights.memory import Weights
from ..weights.shards import Shards
from .dtensors import shards_of
from .flat_shards import is_partitioned, sharding_of
from .tying import shared_names

CONFIG = "adapter_config.json"
_ALONE = "publish the adapter alone, and merge it in the rollout with sparserl.targets.lora(model, merged=True)"


class AdapterSource:
    """One adapter: the tensors of its `adapter_model.safetensors`, without a copy. Made by `lora`.

    Without a name it is the one that is active when `weights` is called.
    """

    def __init__(self, model: Any, adapter: str | None, group: Any = None) -> None:
        self._model = model
        self._adapter = adapter
        self._group = group
        self._embeddings: dict[str, bool] = {}
        self._files: dict[str, bytes] = {}  # the config of each adapter

    @property
    def adapter(self) -> str:
        """The name of the adapter."""
        active = list(self._model.active_adapters) if self._adapter is None else [self._adapter]
        if len(active) != 1:
            names = list(self._model.peft_config)
            raise UnsupportedTensor(f"{active} are active; give `adapter`, one of {names}")
        return str(active[0])

    def weights(self) -> Weights | Shards:
        """The tensors of the adapter; the parts of this rank if they are sharded."""
        adapter = self.adapter
        if adapter not in self._embeddings:
            # With "auto" peft finds out whether embeddings were resized, and may ask the Hub for it. Once is enough.
            without = self._tensors(adapter, False)
            self._embeddings[adapter] = self._tensors(adapter, "auto").keys() != without.keys()
        tensors = self._tensors(adapter, self._embeddings[adapter])
        if _is_sharded(tensors):
            return shards_of(tensors, self._group)
        return {name: tensor.detach() for name, tensor in tensors.items()}

    def files(self) -> dict[str, bytes]:
        """The `adapter_config.json` that peft writes; a `Publisher` sends it along. Written once for each adapter."""
        adapter = self.adapter
        if adapter not in self._files:
            self._files[adapter] = self._written_config(adapter)
        return {CONFIG: self._files[adapter]}

    def _written_config(self, adapter: str) -> bytes:
        options = {}
        if _is_sharded(self._tensors(adapter, False)):
            options["state_dict"] = _placeholders(self._model)  # peft cannot write shards, and only the config is read
        with tempfile.TemporaryDirectory(prefix="sparserl-") as folder:
            self._model.save_pretrained(folder, selected_adapters=[adapter], save_embedding_layers=False, **options)
            (path,) = Path(folder).rglob(CONFIG)
            return path.read_bytes()

    def _tensors(self, adapter: str, embeddings: bool | Literal["auto"]) -> dict[str, Any]:
        from peft import get_peft_model_state_dict

        if sharding_of(self._model) == "FSDP1":
            raise UnsupportedTensor(f"{adapter}: adapters in modules of FSDP1 cannot be read; use FSDP2 (fully_shard)")
        # Only the parameters themselves say how ZeRO-3 has sharded them.
        tensors: dict[str, Any] = get_peft_model_state_dict(
            self._model,
            state_dict=self._model.state_dict(keep_vars=True),
            adapter_name=adapter,
            save_embedding_layers=embeddings,
        )
        return tensors


class MergedSource:
    """The base weights with adapters merged in, under the names of the base checkpoint. Made by `lora`.

    One copy of the layers with adapters is kept, and overwritten by the next call of `weights`. All other tensors are
    the live ones.

    Attributes:
        tied: The names that `weights` left out, each with that of the same tensor.
    """

    def __init__(self, model: Any, adapters: list[str] | None) -> None:
        self._model = model
        self._adapters = adapters
        self._merged: dict[str, Any] = {}
        self.tied: Mapping[str, str] = {}

    def weights(self) -> Weights:
        """All weights of the base checkpoint, merged."""
        import torch

        if (kind := sharding_of(self._model)) is not None:
            raise UnsupportedTensor(f"the base weights are sharded by {kind}: {_ALONE}")
        with torch.no_grad():
            model_copy = copy.deepcopy(self._model, self._shared())
            try:
                merged = model_copy.merge_and_unload(adapter_names=self._adapters)
            except (ValueError, RuntimeError, NotImplementedError, AttributeError) as error:
                raise UnsupportedTensor(f"{_first_layer(model_copy)}: peft cannot merge it: {error}") from error
        tensors = merged.state_dict(keep_vars=True)
        self.tied = shared_names(merged, tensors)
        return {name: tensor.detach() for name, tensor in tensors.items() if name not in self.tied}

    def _shared(self) -> dict[int, Any]:
        """What each tensor is in a copy of the model, by id: itself, or a copy if an adapter may be added to it."""
        import torch

        modules = list(self._model.named_modules())  # once: some layers make new parameters whenever they are listed
        shared = {id(t): t for _, m in modules for t in (*m.parameters(recurse=False), *m.buffers(recurse=False))}
        for name, layer in adapter_layers(modules):
            for part, tensor in layer.get_base_layer().named_parameters():
                if hasattr(tensor, "device_mesh"):
                    raise UnsupportedTensor(f"{name}: its {part} is a DTensor: {_ALONE}")
                if not tensor.is_floating_point():
                    raise UnsupportedTensor(
                        f"{name}: its {part} is {tensor.dtype}, which an adapter cannot be merged into exactly; "
                        "publish the adapter alone"
                    )
                if shared[id(tensor)] is tensor:
                    copied = self._merged.get(f"{name}.{part}")
                    if copied is None or copied.shape != tensor.shape or copied.dtype is not tensor.dtype:
                        copied = torch.empty_like(tensor)
                        self._merged[f"{name}.{part}"] = copied
                    shared[id(tensor)] = torch.nn.Parameter(copied.copy_(tensor), requires_grad=False)
        return shared


def adapter_layers(modules: Iterable[tuple[str, Any]]) -> list[tuple[str, Any]]:
    """The modules that have adapters, with their names."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    return [(name, layer) for name, layer in modules if isinstance(layer, BaseTunerLayer)]


def _is_sharded(tensors: Mapping[str, Any]) -> bool:
    return any(hasattr(tensor, "device_mesh") or is_partitioned(tensor) for tensor in tensors.values())


def _placeholders(model: Any) -> dict[str, Any]:
    """Small tensors under the names of a model's own."""
    import torch

    return {name: torch.zeros(1) for name in model.state_dict(keep_vars=True)}


def _first_layer(model: Any) -> str:
    """The first layer that still has adapters: merging removes them layer by layer."""
    layers = adapter_layers(model.named_modules())
    return layers[0][0] if layers else type(model).__name__


@overload
def lora(
    model: Any, merged: Literal[False] = False, adapter: str | None = None, group: Any = None
) -> AdapterSource: ...


@overload
def lora(model: Any, merged: Literal[True], adapter: str | Sequence[str] | None = None) -> MergedSource: ...


def lora(
    model: Any, merged: bool = False, adapter: str | Sequence[str] | None = None, group: Any = None
) -> AdapterSource | MergedSource:
    """The weights of a peft model: its adapter alone, or the base weights with adapters merged in.

    An adapter whose parameters are sharded, by FSDP2 or ZeRO-3, is published in parts: by every rank, with `writers`.

    Args:
        model: a peft model.
        merged: False for the adapter alone, under the names that `adapter_model.safetensors` has. True for the base
            weights with it merged in, under the names of the base checkpoint: the bits that `merge_and_unload` gives.
        adapter: the name of the adapter; by default the one that is active at each publish. With `merged` it may be a
            list of names; by default all that are active.
        group: without `merged`, the process group of the ranks that hold a sharded adapter; by default all ranks.

    Returns:
        A source that reads the model at every publish.

    Raises:
        UnsupportedTensor: the model is not a peft model, has no such adapter, or peft cannot merge it.

    >>> source = sparserl.sources.lora(peft_model)                                                 # doctest: +SKIP
    >>> publisher = sparserl.Publisher(url, source, files=source.files)                            # doctest: +SKIP
    """
    peft = sys.modules.get("peft")
    if peft is None or not isinstance(model, peft.PeftModel):
        raise UnsupportedTensor(f"expected a peft model, got {type(model).__name__}; unwrap the model first")
    names = list(model.peft_config)
    chosen = [adapter] if isinstance(adapter, str) else None if adapter is None else list(adapter)
    if unknown := [name for name in chosen or () if name not in names]:
        raise UnsupportedTensor(f"no adapter is called {unknown[0]!r}; there are {names}")
    if merged:
        if group is not None:
            raise UnsupportedTensor("`group` is for an adapter alone: sharded weights cannot be merged")
        if not hasattr(model.base_model, "merge_and_unload"):
            raise UnsupportedTensor(f"peft cannot merge {type(model).__name__}; publish the adapter alone")
        return MergedSource(model, chosen)
    if chosen is not None and len(chosen) != 1:
        raise UnsupportedTensor(f"without `merged`, `adapter` is one of {names}, not {chosen}")
    source = AdapterSource(model, chosen[0] if chosen else None, group)
    source.adapter  # noqa: B018  # raises here, not at the first publish
    return source
