"""Other names for tensors: trainers and engines do not always call the same tensor the same.

"model.visual."  ──►  "visual."                        a prefix, which ends in a dot
"lm_head.weight" ──►  "model.embed_tokens.weight"      a name; here that of the tensor it is tied to
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from ..errors import TensorMismatch
from ..weights.memory import Weights
from ..weights.old_bits import OldBits
from ..weights.shards import Part, Shards
from ..weights.staging import LazyBits
from ..weights.table import TensorSpec, TensorTable
from ..weights.tensors import memory_of
from .casting import Cast
from .master_sample import ParameterState, TrainingSource
from .modules import ModuleSource, PublishedSource, Source, as_source, files_of, weights_of
from .tying import tied_of


class Renaming:
    """Rules from names to names. The longest rule that matches a name is the one that counts.

    Args:
        rules: from a prefix that ends in a dot (or is empty, for all names) to another one, or from a name to a name.

    Raises:
        TensorMismatch: A rule is none.

    >>> Renaming({"model.visual.": "visual.", "": "policy."}).new_names(["model.visual.patch", "head"])
    {'model.visual.patch': 'visual.patch', 'head': 'policy.head'}
    """

    def __init__(self, rules: Mapping[str, str]) -> None:
        if not isinstance(rules, Mapping) or not rules:
            raise TensorMismatch(f"rules are {rules!r}; they must be a mapping from names or prefixes to new ones")
        for old, new in rules.items():
            if not isinstance(old, str) or not isinstance(new, str):
                raise TensorMismatch(f"rule {old!r}: {new!r} is not from text to text")
            if _is_prefix(old) and not _is_prefix(new):
                raise TensorMismatch(f"rule {old!r}: {new!r} takes a prefix to {new!r}, which does not end in a dot")
            if not _is_prefix(old) and _is_prefix(new):
                raise TensorMismatch(f"rule {old!r}: {new!r} takes a name to a prefix; prefixes end in a dot")
        self._rules = dict(sorted(rules.items(), key=lambda rule: -len(rule[0])))
        self._last_names: list[str] = []
        self._new_names: dict[str, str] = {}

    def new_name(self, name: str) -> str:
        """The new name of one name."""
        rule = self._rule_of(name)
        return name if rule is None else self._rules[rule] + name[len(rule) :]

    def new_names(self, names: Iterable[str]) -> dict[str, str]:
        """The new name of every name.

        Raises:
            TensorMismatch: A rule matches none of the names, or only such as longer rules match.
        """
        names = [*names]
        if names != self._last_names:
            new_names = {name: self.new_name(name) for name in names}
            unused = self._rules.keys() - {self._rule_of(name) for name in names}
            if unused:
                some = ", ".join(map(repr, sorted(names)[:5]))
                raise TensorMismatch(f"rule {min(unused)!r} renames nothing; the names are {some}, …")
            self._last_names = names
            self._new_names = new_names
        return self._new_names

    def _rule_of(self, name: str) -> str | None:
        return next((rule for rule in self._rules if _matches(rule, name)), None)

    def rename(self, weights: Weights | Shards, others: Iterable[str] = ()) -> Weights | Shards:
        """The same weights under their new names. Of tensors that get one name, and are one memory, one is left.

        Args:
            weights: The weights.
            others: Further names, which rules may match.

        Raises:
            TensorMismatch: A rule matches nothing, or different tensors get one name.
        """
        if isinstance(weights, Shards):
            return self._rename_shards(weights, others)
        renamed: dict[str, Any] = {}
        old_names: dict[str, str] = {}
        new_names = self.new_names([*weights, *others])
        for name, new_name in ((name, new_names[name]) for name in weights):
            if new_name in renamed and not _is_same(renamed[new_name], weights[name]):
                raise _conflict(old_names[new_name], name, new_name)
            old_names.setdefault(new_name, name)
            renamed.setdefault(new_name, weights[name])
        return renamed

    def _rename_shards(self, shards: Shards, others: Iterable[str]) -> Shards:
        new_names = self.new_names([*shards.table.index, *others])
        parts: dict[str, list[Part]] = {name: [] for name in new_names}
        for part in shards.parts:
            if isinstance(part.marks, OldBits):
                raise TensorMismatch("rename what is tracked, not the tracker: track(optimizer, renamed(model, rules))")
            parts[part.tensor].append(part)
        specs: dict[str, TensorSpec] = {}
        chosen: dict[str, str] = {}
        for spec in shards.table.specs:
            new_name = new_names[spec.name]
            renamed = spec._replace(name=new_name)
            if specs.setdefault(new_name, renamed) != renamed:
                raise _conflict(chosen[new_name], spec.name, new_name)
            first = chosen.setdefault(new_name, spec.name)
            if first != spec.name and not _are_same(parts[first], parts[spec.name]):
                raise _conflict(first, spec.name, new_name)
        renamed_parts = [replace(part, tensor=new) for new, old in chosen.items() for part in parts[old]]
        return Shards(TensorTable(specs.values()), renamed_parts)


class RenamedSource:
    """A source whose tensors have other names. Made by `renamed`.

    Attributes:
        tied: The names that `weights` left out, each with that of the same tensor.
    """

    def __init__(self, source: Source | Weights | Shards, renaming: Renaming) -> None:
        self._source = source
        self._renaming = renaming
        self.tied: Mapping[str, str] = {}

    @property
    def buffers(self) -> frozenset[str]:
        """The names of buffers, which are not cast."""
        return frozenset(map(self._renaming.new_name, getattr(self._source, "buffers", ())))

    def weights(self) -> Weights | Shards:
        """The weights of the source, under their new names."""
        weights = weights_of(self._source)
        renamed = self._renaming.rename(weights, tied_of(self._source))
        names = renamed.table.index if isinstance(renamed, Shards) else renamed
        tied: dict[str, str] = {}
        for name, kept in tied_of(self._source).items():
            new_name, new_kept = map(self._renaming.new_name, (name, kept))
            if new_name != new_kept and (new_name in names or tied.setdefault(new_name, new_kept) != new_kept):
                raise TensorMismatch(
                    f"{name!r} would be called {new_name!r}, like a tensor that is not the same memory"
                )
        self.tied = tied
        return renamed

    def training_state(self) -> list[ParameterState]:
        """The parameters of the source, if it knows them."""
        return self._source.training_state() if isinstance(self._source, TrainingSource) else []

    def files(self) -> dict[str, bytes]:
        """The files that the source brings along."""
        return files_of(self._source)

    def published_as(self, cast: Cast) -> RenamedSource:
        """The same source, published in other dtypes, which `cast` gives by the new names."""
        if not isinstance(self._source, ModuleSource):
            return self
        by_old_name = self._source.published_as(lambda name, dtype: cast(self._renaming.new_name(name), dtype))
        return RenamedSource(by_old_name, self._renaming)


def renamed(source: PublishedSource, rules: Mapping[str, str]) -> RenamedSource:
    """A source whose tensors are published under other names.

    Args:
        source: what a `Publisher` takes: a torch module, a source, a mapping, a function. Of a tracked model, rename
            the model: `track(optimizer, renamed(model, rules))`. So it is with `quantized`.
        rules: from a prefix that ends in a dot to another one (either may be empty), or from one name to another. The
            longest rule that matches counts. Names of one tensor may be taken to one name.

    Returns:
        A source. Its `weights` raises `TensorMismatch` where a rule matches no tensor, or where two tensors that are
        not the same memory get one name.

    Raises:
        TensorMismatch: A rule is none, or the source is a tracker or a quantized one.
        WeightsError: The source is none.

    >>> import torch, sparserl
    >>> model = torch.nn.ModuleDict({"visual": torch.nn.Linear(2, 3), "head": torch.nn.Linear(2, 3, bias=False)})
    >>> source = sparserl.sources.renamed(model, {"visual.": "model.visual.", "head.weight": "lm_head.weight"})
    >>> sorted(source.weights())
    ['lm_head.weight', 'model.visual.bias', 'model.visual.weight']
    """
    if hasattr(source, "adapted"):
        raise TensorMismatch("rename what is quantized, not the result: quantized(renamed(model, rules), scheme)")
    if hasattr(source, "committed"):
        raise TensorMismatch("rename what is tracked, not the tracker: track(optimizer, renamed(model, rules))")
    return RenamedSource(as_source(source), Renaming(rules))


def _is_prefix(text: str) -> bool:
    return not text or text.endswith(".")


def _matches(rule: str, name: str) -> bool:
    return name.startswith(rule) if _is_prefix(rule) else name == rule


def _conflict(first: str, second: str, name: str) -> TensorMismatch:
    return TensorMismatch(f"{first!r} and {second!r} would both be called {name!r}, and are not the same memory")


def _are_same(parts: list[Part], others: list[Part]) -> bool:
    return len(parts) == len(others) and all(
        part.region == other.region and _is_same(part.data, other.data)
        for part, other in zip(parts, others, strict=True)
    )


def _is_same(tensor: Any, other: Any) -> bool:
    """Whether two tensors are the same memory, and are published in the same dtype."""
    if isinstance(tensor, LazyBits) and isinstance(other, LazyBits):
        return tensor.dtype is other.dtype and _is_same(tensor.origin, other.origin)
    mine = memory_of("", tensor)
    others = memory_of("", other)
    return bool(mine.address) and mine[:4] == others[:4]
