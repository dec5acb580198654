"""Tied embeddings: output heads that are their models' embeddings under another name, and need not be loaded."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any


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
    if not any(getattr(config, "tie_word_embeddings", False) for config in configs):
        return {}
    embeddings = [name for name in dict.fromkeys(names) if name.endswith("embed_tokens.weight")]
    return {f"{owner}lm_head.weight": name for name in embeddings for owner in _owners(name)}


def _owners(name: str) -> Iterator[str]:
    """What the names of the modules around a tensor begin with, from none on.

    A language tower may be in another module than its head: `model.language_model.embed_tokens`, and `lm_head`.
    """
    parts = name.split(".")[:-2]
    for length in range(len(parts) + 1):
        yield "".join(f"{part}." for part in parts[:length])
