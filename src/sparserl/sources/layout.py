"""A layout: which boxes of a rank's parameters are which boxes of the tensors of the checkpoint.

    parameter of one rank  ──►  Local: its shape, and its slices  ──►  parts in the coordinates of the checkpoint

A layout is data. It says nothing about who trains, and moves nothing: the parts are views of the parameters' memory.
Most are written with `split`, `stack` and `flat`; `require_cover` tells, before anything runs, whether the layouts of
all ranks together hold every element once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import TensorMismatch, UnsupportedTensor
from ..weights.region import Region, Shape, refuse_overlap, whole
from ..weights.shards import Part, Shards
from ..weights.table import TensorSpec, TensorTable
from .modules import Source


@dataclass(frozen=True, slots=True)
class Slice:
    """A box of a parameter that is a box of a tensor.

    tensor: its name in the checkpoint.
    region: which box of it.
    local: which box of the parameter. It has as many elements, in the same order.
    """

    tensor: str
    region: Region
    local: Region


@dataclass(frozen=True, slots=True)
class Local:
    """A parameter as one rank holds it. What no slice names is not published: padding, or another rank's to publish."""

    shape: Shape
    slices: tuple[Slice, ...] = ()

    def owned(self, own: bool) -> Local:
        """The parameter as it is, if the rank is to publish it; without slices, if not."""
        return self if own else Local(self.shape)


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive rows of a tensor, or consecutive elements in a flat buffer; of no tensor, if they are padding."""

    tensor: str | None
    start: int
    count: int


class Layout:
    """The parameters of one rank by name, and the tensor table of the whole.

    >>> from sparserl import tensor_table
    >>> table = tensor_table({"gate": np.zeros((4, 2), np.float32), "up": np.zeros((4, 2), np.float32)})
    >>> layout = Layout(table, {"gate_up": stack(table, [Run("gate", 2, 2), Run("up", 2, 2)])})
    >>> for part in layout.shards({"gate_up": np.zeros((4, 2), np.float32)}).parts:
    ...     print(part.tensor, part.region)
    gate [2:4, 0:2]
    up [2:4, 0:2]
    """

    def __init__(self, table: TensorTable, parameters: Mapping[str, Local]) -> None:
        self.table, self.parameters = table, dict(parameters)
        for name, local in self.parameters.items():
            for piece in local.slices:
                _require_fit(name, local, piece, _spec(table, piece.tensor))

    def shards(self, tensors: Mapping[str, Any]) -> Shards:
        """What the parameters, handed over by name, are of the checkpoint. They are viewed, not copied."""
        missing, strange = self.parameters.keys() - tensors.keys(), tensors.keys() - self.parameters.keys()
        if missing or strange:
            raise TensorMismatch(
                f"the layout and the parameters differ: {sorted(missing)[:10]} are missing, "
                f"{sorted(strange)[:10]} are not in the layout"
            )
        parts = []
        for name, local in self.parameters.items():
            if (shape := tuple(tensors[name].shape)) != local.shape:
                raise TensorMismatch(f"parameter {name!r} is {list(shape)}, the layout says {list(local.shape)}")
            for piece in local.slices:
                data = _view(name, tensors[name][piece.local.slices], piece.region.size)
                parts.append(Part(piece.tensor, piece.region, data))
        return Shards(self.table, parts)


def split(table: TensorTable, tensor: str, dim: int, rank: int, size: int) -> Local:
    """One of `size` equal parts of a tensor, cut along a dimension."""
    shape = _spec(table, tensor).shape
    step, rest = divmod(shape[dim], size)
    if rest:
        raise TensorMismatch(f"{tensor!r}: dimension {dim} of {list(shape)} cannot be cut into {size} equal parts")
    start, extent = [0] * len(shape), list(shape)
    start[dim], extent[dim] = rank * step, step
    region = Region(tuple(start), tuple(extent))
    return Local(region.size, (Slice(tensor, region, whole(region.size)),))


def stack(table: TensorTable, runs: Iterable[Run], rank: int = 0, size: int = 1) -> Local:
    """Runs of rows, one below the other; of these, one of `size` equal parts."""
    runs = tuple(runs)
    rests = {_spec(table, run.tensor).shape[1:] for run in runs if run.tensor is not None}
    if len(rests) != 1:
        raise TensorMismatch(f"rows of {_names(runs)} cannot be stacked: they are not of one shape")
    (rest,) = rests
    step, over = divmod(sum(run.count for run in runs), size)
    if over:
        raise TensorMismatch(f"the rows of {_names(runs)} cannot be cut into {size} equal parts")
    slices, at = [], -rank * step
    for run in runs:
        low, high = max(at, 0), min(at + run.count, step)
        if run.tensor is not None and low < high:
            lead, extent, zeros = run.start + low - at, (high - low, *rest), (0,) * len(rest)
            slices.append(Slice(run.tensor, Region((lead, *zeros), extent), Region((low, *zeros), extent)))
        at += run.count
    return Local((step, *rest), tuple(slices))


def flat(table: TensorTable, runs: Iterable[Run]) -> Local:
    """A buffer of one dimension that holds runs of elements, one after the other, each in row-major order."""
    slices, at = [], 0
    for run in runs:
        stop = at + run.count
        if run.tensor is not None:
            for box in boxes(_spec(table, run.tensor).shape, run.start, run.start + run.count):
                slices.append(Slice(run.tensor, box, Region((at,), (box.numel,))))
                at += box.numel
        at = stop
    return Local((at,), tuple(slices))


def boxes(shape: Shape, low: int, high: int) -> Iterator[Region]:
    """Elements `low` to `high` of a row-major tensor, as few boxes as possible, in order.

    >>> [str(box) for box in boxes((4, 3), 2, 10)]
    ['[0:1, 2:3]', '[1:3, 0:3]', '[3:4, 0:1]']
    """
    if low >= high:
        return
    if not shape:
        yield Region((), ())
        return
    rest = shape[1:]
    inner = math.prod(rest)
    first, last = -(-low // inner), high // inner
    if first > last:  # both ends lie in one row
        yield from _in_row(last, rest, low - last * inner, high - last * inner)
        return
    yield from _in_row(first - 1, rest, low - (first - 1) * inner, inner if low < first * inner else 0)
    if first < last:
        yield Region((first, *(0,) * len(rest)), (last - first, *rest))
    yield from _in_row(last, rest, 0, high - last * inner)


def _in_row(row: int, rest: Shape, low: int, high: int) -> Iterator[Region]:
    for box in boxes(rest, low, high):
        yield Region((row, *box.start), (1, *box.size))


def require_cover(layouts: Sequence[Layout]) -> None:
    """Raise unless the layouts of all ranks together hold every element of the checkpoint exactly once.

    It takes no weights and no processes: make the layouts of all ranks in one and look.
    """
    table = layouts[0].table
    regions: dict[str, list[Region]] = {spec.name: [] for spec in table.specs}
    for rank, layout in enumerate(layouts):
        table.require(layout.table, "layout 0", f"layout {rank}")
        for local in layout.parameters.values():
            for piece in local.slices:
                regions[piece.tensor].append(piece.region)
    holes = []
    for spec in table.specs:
        refuse_overlap(spec.name, regions[spec.name])
        if (held := sum(region.numel for region in regions[spec.name])) != spec.numel:
            holes.append(f"{held} of {spec.numel} elements of {spec.name!r}")
    if holes:
        more = f"; and {len(holes) - 10} more" if len(holes) > 10 else ""
        raise TensorMismatch(f"the layouts together hold only {'; '.join(holes[:10])}{more}")


class LayoutSource:
    """Parameters of one rank, seen through a layout."""

    def __init__(self, layout: Layout, tensors: Callable[[], Mapping[str, Any]]) -> None:
        self.layout, self._tensors = layout, tensors

    def weights(self) -> Shards:
        return self.layout.shards(self._tensors())


class Joined:
    """Several sources of one rank, as one."""

    def __init__(self, sources: Sequence[Source]) -> None:
        self.sources = tuple(sources)

    def weights(self) -> Shards:
        held: list[Any] = [source.weights() for source in self.sources]
        for i, shards in enumerate(held):
            held[0].table.require(shards.table, "source 0", f"source {i}")
        return Shards(held[0].table, [part for shards in held for part in shards.parts])


def mapped(layout: Layout, parameters: Any) -> LayoutSource:
    """The weights of one rank, by a layout.

    Args:
        layout: Which boxes of which tensors the parameters of this rank are.
        parameters: A torch module, whose `state_dict` has just the names of the layout; a mapping from these names to
            tensors; or a function that returns such a mapping, asked at every publish.

    Returns:
        A source whose parts are views of the parameters.
    """
    if callable(getattr(parameters, "state_dict", None)):
        return LayoutSource(layout, lambda: local_tensors(parameters))
    if isinstance(parameters, Mapping):
        return LayoutSource(layout, lambda: parameters)
    if callable(parameters):
        return LayoutSource(layout, parameters)
    kind = type(parameters).__name__
    raise UnsupportedTensor(f"expected a torch module, a mapping or a function that returns one, got {kind}")


def joined(*sources: Source) -> Source:
    """The shards of several sources of one rank together: the chunks of an interleaved pipeline, say."""
    return sources[0] if len(sources) == 1 else Joined(sources)


def local_tensors(module: Any) -> dict[str, Any]:
    """The parameters and persistent buffers of a torch module where they are; what it says beside them is left out."""
    found = module.state_dict(keep_vars=True).items()
    return {name: tensor.detach() for name, tensor in found if not name.endswith("_extra_state")}


def _spec(table: TensorTable, name: str) -> TensorSpec:
    if (spec := table.get(name)) is None:
        raise TensorMismatch(f"{name!r} is not in the tensor table")
    return spec


def _names(runs: Iterable[Run]) -> str:
    return ", ".join(sorted({repr(run.tensor) for run in runs if run.tensor is not None}))


def _require_fit(name: str, local: Local, piece: Slice, spec: TensorSpec) -> None:
    if piece.region != whole(spec.shape) and not piece.region.fits(spec.shape):
        raise TensorMismatch(f"parameter {name!r}: region {piece.region} does not lie in {spec}")
    if piece.local != whole(local.shape) and not piece.local.fits(local.shape):
        raise TensorMismatch(f"parameter {name!r}: slice {piece.local} does not lie in {list(local.shape)}")
    if piece.local.numel != piece.region.numel:
        raise TensorMismatch(f"parameter {name!r}: slice {piece.local} cannot be {piece.region} of {spec}")


def _view(name: str, data: Any, shape: Shape) -> Any:
    """The same memory in another shape."""
    if tuple(data.shape) == shape:
        return data
    if not isinstance(data, np.ndarray):
        try:
            return data.view(shape)
        except RuntimeError as error:
            raise UnsupportedTensor(f"parameter {name!r}: {error}") from error
    seen = data.reshape(shape)
    if not np.may_share_memory(seen, data):
        raise UnsupportedTensor(f"parameter {name!r}: {list(data.shape)} cannot be seen as {list(shape)} where it lies")
    return seen
