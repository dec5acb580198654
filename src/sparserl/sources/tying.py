"""Tied tensors: parameters that a module has under several names, such as an output head that is the embedding."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from ..weights.memory import Weights
from ..weights.shards import Shards
from ..weights.table import TensorTable
from .flat_shards import FlatShard, is_partitioned


def shared_names(module: Any, tensors: Mapping[str, Any]) -> dict[str, str]:
    """Names of parameters that a module also has under another name, which checkpoints have, with that name.

    Of a transformers model it is the name that `save_pretrained` keeps; of others the first one. If the config of a
    model says that nothing is tied, receivers would not tie it either: then all names are left.

    Args:
        module: The module.
        tensors: Its state dict, in which parameters are as they are, not detached.

    Example:
        >>> import torch
        >>> model = torch.nn.ModuleDict({"embed": torch.nn.Embedding(3, 2), "head": torch.nn.Linear(2, 3, bias=False)})
        >>> model["head"].weight = model["embed"].weight
        >>> shared_names(model, model.state_dict(keep_vars=True))
        {'head.weight': 'embed.weight'}
    """
    import torch

    names_of: dict[object, list[str]] = {}
    for name, tensor in tensors.items():
        if isinstance(tensor, torch.nn.Parameter | FlatShard):
            names_of.setdefault(_identity(tensor), []).append(name)
    groups = [names for names in names_of.values() if len(names) > 1]
    says_tied = [config.tie_word_embeddings for config in configs_of(module) if hasattr(config, "tie_word_embeddings")]
    if not groups or (says_tied and not any(says_tied)):
        return {}
    parts: Iterable[Any] = getattr(module, "modules", tuple)()
    dropped = [pattern for part in parts for pattern in getattr(part, "_tied_weights_keys", None) or ()]
    tied: dict[str, str] = {}
    for names in groups:
        kept = [name for name in names if not any(re.search(pattern, name) for pattern in dropped)] or names
        tied |= {name: kept[0] for name in names if name != kept[0]}
    return tied


def _identity(tensor: Any) -> object:
    """What is equal for parameters that are the same memory. A rank may have no memory of sharded ones."""
    is_sharded = isinstance(tensor, FlatShard) or hasattr(tensor, "device_mesh") or is_partitioned(tensor)
    if is_sharded or not tensor.data_ptr():
        return id(tensor)
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def tied_of(source: Any) -> Mapping[str, str]:
    """The names that a source left out when its weights were last asked for, each with that of the same tensor."""
    tied: Mapping[str, str] = getattr(source, "tied", {})
    return tied


def named_as_in(weights: Weights | Shards, tied: Mapping[str, str], table: TensorTable) -> Weights | Shards:
    """The same weights, in which tied tensors have those of their names that a table has.

    Args:
        weights: The weights.
        tied: Names that they do not have, each with the name of the same tensor.
        table: The table.
    """
    names = weights.table.index if isinstance(weights, Shards) else weights
    added = {name: kept for name, kept in tied.items() if name in table.index and name not in names}
    if not added:
        return weights
    gone = {kept for kept in added.values() if kept not in table.index}
    if not isinstance(weights, Shards):
        named = {name: tensor for name, tensor in weights.items() if name not in gone}
        return named | {name: weights[kept] for name, kept in added.items()}
    specs = {spec.name: spec for spec in weights.table.specs}
    specs |= {name: specs[kept]._replace(name=name) for name, kept in added.items()}
    new_table = TensorTable(spec for name, spec in specs.items() if name not in gone)
    again = [replace(p, tensor=name) for name, kept in added.items() for p in weights.parts if p.tensor == kept]
    parts = [*(part for part in weights.parts if part.tensor not in gone), *again]
    return Shards(table if new_table == table else new_table, parts)


def configs_of(model: Any) -> list[Any]:
    """The configuration of a transformers model, and that of its language model."""
    config: Any = getattr(model, "config", None)
    language = config.get_text_config() if hasattr(config, "get_text_config") else None
    return [config, language]


def tied_names(configs: Iterable[Any], names: Iterable[str]) -> dict[str, str]:
    """Checkpoint tensors that a model need not load, and the tensors, among some names, that they are equal to.

    Args:
        configs: The model's configuration as transformers has it, and that of its language model.
        names: Names of checkpoint tensors.

    Example:
        >>> from types import SimpleNamespace
        >>> tied_names([SimpleNamespace(tie_word_embeddings=True)], ["model.embed_tokens.weight"])
        {'lm_head.weight': 'model.embed_tokens.weight', 'model.lm_head.weight': 'model.embed_tokens.weight'}
    """
    return heads(names) if any(getattr(config, "tie_word_embeddings", False) for config in configs) else {}


def heads(names: Iterable[str]) -> dict[str, str]:
    """What the output heads of a model are called, each with its embedding among some names of checkpoint tensors."""
    embeddings = [name for name in dict.fromkeys(names) if name.endswith("embed_tokens.weight")]
    return {f"{owner}lm_head.weight": name for name in embeddings for owner in _owners(name)}


def _owners(name: str) -> Iterator[str]:
    """What the names of the modules around a tensor begin with, from none on.

    A language tower may be in another module than its head: `model.language_model.embed_tokens`, and `lm_head`.
    """
    parts = name.split(".")[:-2]
    for length in range(len(parts) + 1):
        yield "".join(f"{part}." for part in parts[:length])
