"""The form of a map from Megatron-core's parameters to the tensors of a Hugging Face checkpoint.

A `Family` has a table of rows: for each parameter, the tensors that it consists of and how ranks cut it. Shapes and
conditions are expressions over the fields of the config, so that a map is data: strings that can be read, compared and
checked. The families that are known are in `megatron_families`.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal

from ..errors import TensorMismatch
from ..weights.dtypes import BY_NAME

Cut = Literal["whole", "duplicated", "rows", "columns", "vocabulary", "segments", "one", "transposed", "interleaved"]
CUTS: frozenset[str] = frozenset(Cut.__args__)  # type: ignore[attr-defined]


@dataclass(frozen=True)
class GroupRows:
    """Rows of a tensor whose rows are divided evenly among groups: the same of every group.

    Of each group these are `repeat` runs of `count` rows, by default all of the group's. The first begins at `start`,
    each of the others `step` rows after the one before. All but the tensor's name are expressions.

    Example:
        >>> from sparserl.sources import GroupRows
        >>> gates = GroupRows("q_proj.weight", start="head_dim", count="head_dim", repeat="4", step="2 * head_dim")
    """

    tensor: str
    start: str = "0"
    count: str = ""
    repeat: str = "1"
    step: str = "0"


@dataclass(frozen=True)
class Row:
    """One parameter of a Megatron-core model: which tensors it consists of, and how ranks cut it.

    Args:
        cut: how tensor-parallel ranks share the parameter.
            `whole`: every rank has all of it. `duplicated`: the same, or cut by rows or columns: the parameter's shape
            says which.
            `rows` and `columns`: each rank has an equal part. `vocabulary`: rows, with padding at the end.
            `segments`: the parameter consists of `segments`, and each rank has an equal part of each segment.
            `one`, `transposed` and `interleaved`: one expert of a tensor with all experts, which has it as it is; with
            columns as rows; or with columns as rows, among which gate and up take turns. The last is copied when it is
            published.
        tensors: the shapes of the tensors by name; a shape is expressions, separated by commas.
        when: an expression: whether models have this parameter; for layers, whether the layer `layer` has it.
        dtype: the dtype of the tensors, if it is not that of the config.
        groups: into how many groups the rows of the tensors of `segments` are divided.
        segments: for each segment, the rows that follow one another in every group.
        plus: what is added to the parameter to get the tensor. Such a parameter is copied when it is published.

    In the name of a parameter and its tensors, `{expert}` stands for the number of an expert.

    Example:
        >>> from sparserl.sources import GroupRows, Row
        >>> down = Row("columns", {"mlp.down_proj.weight": "hidden_size, intermediate_size"})
        >>> shapes = {"gate.weight": "width, hidden_size", "up.weight": "width, hidden_size"}
        >>> fused = Row("segments", shapes, segments=[[GroupRows("gate.weight")], [GroupRows("up.weight")]])
    """

    cut: Cut
    tensors: Mapping[str, str]
    when: str = "1"
    dtype: str = ""
    groups: str = "1"
    segments: Sequence[Sequence[GroupRows]] = field(default_factory=list)
    plus: float = 0.0

    def __post_init__(self) -> None:
        if self.cut not in CUTS:
            raise TensorMismatch(f"unknown cut {self.cut!r}; there are {', '.join(sorted(CUTS))}")
        if self.dtype and self.dtype not in BY_NAME:
            raise TensorMismatch(f"unknown dtype {self.dtype!r}; there are {', '.join(sorted(BY_NAME))}")
        if self.plus and self.cut != "whole":
            raise TensorMismatch(f"`plus` is for parameters that are whole, this one is {self.cut!r}")
        if self.cut != "segments":
            if len(self.tensors) != 1 or self.segments:
                raise TensorMismatch(f"a parameter that is {self.cut!r} is one tensor, without segments")
            return
        in_segments = {rows.tensor for segment in self.segments for rows in segment}
        if not in_segments or in_segments != self.tensors.keys():
            raise TensorMismatch(f"the segments have rows of {sorted(in_segments)}, not of {sorted(self.tensors)}")


@dataclass(frozen=True)
class Family:
    """A map from the parameters of Megatron-core to the checkpoints of a family of models.

    Args:
        layer: rows of the layers, by the parameter's name below `decoder.layers.N.`.
        model: rows of all else, by the parameter's name.
        sizes: names for expressions; each may use fields of the config and the names before it. `layers` and `experts`
            must be the numbers of layers and experts, `tied` whether the head is the embedding.
        prefix: what stands before the names of a layer's tensors; `{layer}` is its number.
        mtp: rows of the multi-token prediction layers, by the parameter's name below `mtp.layers.N.`. Their
            transformer layers have the rows of `layer`. The checkpoint numbers them after all others. Rows of the
            embedding and the head are further names of these.
        module: the module whose parameters are published, if not the whole model: the language model of a VLM.
        config: the field of the config that describes this module.
        outside: parameters outside of `module`, by the beginning of their names: the beginning of the names of their
            tensors, which are whole on every rank, or None if they are not published. Others are refused.

    Example:
        >>> from sparserl.sources import Family, Row
        >>> norm = Row("whole", {"norm.weight": "hidden_size"})
        >>> family = Family({"input_layernorm.weight": norm}, model={}, sizes={"layers": "2"}, prefix="h.{layer}.")
    """

    layer: Mapping[str, Row]
    model: Mapping[str, Row]
    sizes: Mapping[str, str] = field(default_factory=dict)
    prefix: str = "model.layers.{layer}."
    mtp: Mapping[str, Row] = field(default_factory=dict)
    module: str = ""
    config: str = ""
    outside: Mapping[str, str | None] = field(default_factory=dict)

    def tensor_outside(self, parameter: str) -> str | None:
        """The tensor of a parameter outside of `module`; None if it is not published."""
        for beginning, tensors in self.outside.items():
            if tensors is not None and parameter.startswith(beginning):
                return tensors + parameter.removeprefix(beginning)
        return None

    @classmethod
    def of(cls, data: Family | Mapping[str, Any]) -> Family:
        """A family from the dict of its fields, such as JSON has it: rows and their segments are dicts too.

        Raises:
            TensorMismatch: fields are missing or unknown.
        """
        if isinstance(data, Family):
            return data
        try:
            fields = dict(data)
            for table in ("layer", "model", "mtp"):
                rows = fields[table] if table != "mtp" else fields.get(table, {})
                fields[table] = {name: _row(row) for name, row in rows.items()}
            return cls(**fields)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise TensorMismatch(f"this is not the map of a family: {error}") from error


def _row(data: Row | Mapping[str, Any]) -> Row:
    if isinstance(data, Row):
        return data
    segments = [[GroupRows(**rows) for rows in segment] for segment in data.get("segments", ())]
    return Row(**{**data, "segments": segments})


def fields_of(config: Any, part: str = "") -> Callable[[str], Any]:
    """A function that reads fields of a config, which is an object or a dict; None for those that it does not have.

    Fields of `part` of the config come first, but for `tie_word_embeddings`, which only the whole says reliably.
    """
    read: Callable[[str], Any] = config.get if isinstance(config, Mapping) else lambda name: getattr(config, name, None)
    if not part or read(part) is None:
        return read
    of_part = fields_of(read(part))

    def both(name: str) -> Any:
        first, second = (read, of_part) if name == "tie_word_embeddings" else (of_part, read)
        value = first(name)
        return second(name) if value is None else value

    return both


class Sizes:
    """The values of a family's expressions for one config, whose fields `read` returns."""

    def __init__(self, read: Callable[[str], Any], sizes: Mapping[str, str]) -> None:
        self._config = read
        self._sizes = dict(sizes)
        self._names = tuple(sizes)

    def __call__(self, expression: str, **names: Any) -> Any:
        """The value of an expression. Fields that the config does not have are None.

        Raises:
            TensorMismatch: a number is needed and the config has none, or the expression is not understood.
        """
        try:
            return self._value(_parsed(expression), names, len(self._names))
        except (TypeError, ZeroDivisionError, IndexError, KeyError, SyntaxError) as error:
            raise TensorMismatch(f"the config gives no value for {expression!r}: {error}") from error

    def shape(self, expressions: str, **names: Any) -> tuple[int, ...]:
        """The values of expressions that are separated by commas, each of them a number of at least 1."""
        values = tuple(self(part.strip(), **names) for part in expressions.split(","))
        if not all(isinstance(value, int) and value > 0 for value in values):
            raise TensorMismatch(f"the config gives no shape for {expressions!r}: {list(values)}")
        return values

    def _value(self, node: ast.expr, names: Mapping[str, Any], known: int) -> Any:
        """The value of a node. A size may use only the `known` sizes before it: its own name is the config's field."""
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, ast.Name):
            if node.id in names:
                return names[node.id]
            if node.id in self._names[:known]:
                return self._value(_parsed(self._sizes[node.id]), names, self._names.index(node.id))
            return self._config(node.id)
        if isinstance(node, ast.BoolOp):
            stops = isinstance(node.op, ast.Or)
            for operand in node.values:
                value = self._value(operand, names, known)
                if bool(value) is stops:
                    break
            return value
        if isinstance(node, ast.List):
            return [self._value(element, names, known) for element in node.elts]
        if isinstance(node, ast.IfExp):
            chosen = node.body if self._value(node.test, names, known) else node.orelse
            return self._value(chosen, names, known)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            return not self._value(node.operand, names, known)
        operands = _operands(node)
        return operands[0](*(self._value(operand, names, known) for operand in operands[1]))


_OPERATORS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Eq: operator.eq,
    ast.GtE: operator.ge,
    ast.Lt: operator.lt,
    ast.In: lambda item, container: item in container,
    ast.NotIn: lambda item, container: item not in container,
}


def _operands(node: ast.expr) -> tuple[Callable[[Any, Any], Any], tuple[ast.expr, ast.expr]]:
    """The operator of a node and what it is applied to."""
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)], (node.left, node.right)
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in _OPERATORS:
        return _OPERATORS[type(node.ops[0])], (node.left, node.comparators[0])
    if isinstance(node, ast.Subscript):
        return operator.getitem, (node.value, node.slice)
    raise TensorMismatch(f"{ast.unparse(node)!r} is not an expression of a map")


@cache
def _parsed(expression: str) -> ast.expr:
    return ast.parse(expression, mode="eval").body
