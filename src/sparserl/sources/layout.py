"""A layout says which regions of a rank's parameters are which regions of the checkpoint's tensors.

    parameter of one rank  ──►  Local: its shape, and its slices  ──►  parts in the coordinates of the checkpoint

A layout is data and copies nothing: the parts are views of the parameters. Most layouts are written with `split`,
`stack` and `flat`; `require_cover` checks that the layouts of all ranks together have every element once.
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
    """A region of a parameter that is a region of a tensor.

    Args:
        tensor: the name of the tensor in the checkpoint.
        region: the region of the tensor.
        local: the region of the parameter. It has as many elements, in the same order.
    """

    tensor: str
    region: Region
    local: Region


@dataclass(frozen=True, slots=True)
class Local:
    """A parameter of one rank. What is in no slice is not published: it is padding, or another rank publishes it.

    `convert` makes what is published of a slice's data, where the checkpoint does not have the parameter's own elements
    in their order.
    """

    shape: Shape
    slices: tuple[Slice, ...] = ()
    convert: Callable[[Any], Any] | None = None

    def owned(self, own: bool) -> Local:
        """The parameter as it is, if this rank publishes it; else without slices."""
        return self if own else Local(self.shape)


@dataclass(frozen=True, slots=True)
class Span:
    """Consecutive rows of a tensor, or consecutive elements in a flat buffer. Without a tensor they are padding."""

    tensor: str | None
    start: int
    count: int


class Layout:
    """The parameters of one rank by name, and the tensor table of the whole checkpoint.

    Args:
        table: the tensor table of the checkpoint.
        parameters: for each parameter of the rank, its shape and its slices.

    Raises:
        TensorMismatch: a slice does not fit its parameter or its tensor.

    >>> from sparserl import tensor_table
    >>> table = tensor_table({"gate": np.zeros((4, 2), np.float32), "up": np.zeros((4, 2), np.float32)})
    >>> layout = Layout(table, {"gate_up": stack(table, [Span("gate", 2, 2), Span("up", 2, 2)])})
    >>> for part in layout.shards({"gate_up": np.zeros((4, 2), np.float32)}).parts:
    ...     print(part.tensor, part.region)
    gate [2:4, 0:2]
    up [2:4, 0:2]
    """

    def __init__(self, table: TensorTable, parameters: Mapping[str, Local]) -> None:
        self.table = table
        self.parameters = dict(parameters)
        for name, local in self.parameters.items():
            for slice_ in local.slices:
                _require_fit(name, local, slice_, _spec(table, slice_.tensor))

    def require(self, tensors: Mapping[str, Any]) -> None:
        """Check that these are the parameters of the layout: their names and their shapes.

        Raises:
            TensorMismatch: parameters are missing, not in the layout, or of another shape; the message names them.
        """
        missing = self.parameters.keys() - tensors.keys()
        unknown = tensors.keys() - self.parameters.keys()
        if missing or unknown:
            raise TensorMismatch(
                f"the layout and the parameters differ: {sorted(missing)[:10]} are missing, "
                f"{sorted(unknown)[:10]} are not in the layout"
            )
        for name, local in self.parameters.items():
            if (shape := tuple(tensors[name].shape)) != local.shape:
                raise TensorMismatch(f"parameter {name!r} has shape {list(shape)}, in the layout {list(local.shape)}")

    def shards(self, tensors: Mapping[str, Any]) -> Shards:
        """The parts of the checkpoint that the parameters are: views, not copies, where nothing is converted."""
        self.require(tensors)
        parts = []
        for name, local in self.parameters.items():
            for slice_ in local.slices:
                data = tensors[name][slice_.local.slices]
                if local.convert is not None:
                    data = local.convert(data)
                parts.append(Part(slice_.tensor, slice_.region, _view(name, data, slice_.region.size)))
        return Shards(self.table, parts)


def split(table: TensorTable, tensor: str, dim: int, rank: int, size: int) -> Local:
    """One of `size` equal parts of a tensor, cut along a dimension."""
    shape = _spec(table, tensor).shape
    step, rest = divmod(shape[dim], size)
    if rest:
        raise TensorMismatch(f"{tensor!r}: dimension {dim} of {list(shape)} cannot be cut into {size} equal parts")
    start = [0] * len(shape)
    start[dim] = rank * step
    extent = list(shape)
    extent[dim] = step
    region = Region(tuple(start), tuple(extent))
    return Local(region.size, (Slice(tensor, region, whole(region.size)),))


def entire(table: TensorTable, tensor: str) -> Local:
    """All of a tensor."""
    shape = _spec(table, tensor).shape
    return Local(shape, (Slice(tensor, whole(shape), whole(shape)),))


def stack(table: TensorTable, spans: Iterable[Span], rank: int = 0, size: int = 1) -> Local:
    """Spans of rows, one below the other; of these, one of `size` equal parts."""
    spans = tuple(spans)
    row_shapes = {_spec(table, span.tensor).shape[1:] for span in spans if span.tensor is not None}
    if len(row_shapes) != 1:
        raise TensorMismatch(f"rows of {_names(spans)} cannot be stacked: they are not of one shape")
    (row_shape,) = row_shapes
    step, remainder = divmod(sum(span.count for span in spans), size)
    if remainder:
        raise TensorMismatch(f"the rows of {_names(spans)} cannot be cut into {size} equal parts")
    zeros = (0,) * len(row_shape)
    slices = []
    offset = -rank * step
    for span in spans:
        low = max(offset, 0)
        high = min(offset + span.count, step)
        if span.tensor is not None and low < high:
            extent = (high - low, *row_shape)
            region = Region((span.start + low - offset, *zeros), extent)
            slices.append(Slice(span.tensor, region, Region((low, *zeros), extent)))
        offset += span.count
    return Local((step, *row_shape), tuple(slices))


def flat(table: TensorTable, spans: Iterable[Span]) -> Local:
    """A buffer of one dimension that has spans of elements, one after the other, each in row-major order."""
    slices = []
    offset = 0
    for span in spans:
        stop = offset + span.count
        if span.tensor is not None:
            for box in boxes(_spec(table, span.tensor).shape, span.start, span.start + span.count):
                slices.append(Slice(span.tensor, box, Region((offset,), (box.numel,))))
                offset += box.numel
        offset = stop
    return Local((offset,), tuple(slices))


def boxes(shape: Shape, low: int, high: int) -> Iterator[Region]:
    """Elements `low` to `high` of a row-major tensor, as the fewest possible regions, in order.

    >>> [str(box) for box in boxes((4, 3), 2, 10)]
    ['[0:1, 2:3]', '[1:3, 0:3]', '[3:4, 0:1]']
    """
    if low >= high:
        return
    if not shape:
        yield Region((), ())
        return
    row_shape = shape[1:]
    row_size = math.prod(row_shape)
    first = -(-low // row_size)  # the first whole row
    last = high // row_size
    if first > last:  # both ends are in one row
        yield from _boxes_in_row(last, row_shape, low - last * row_size, high - last * row_size)
        return
    partial_end = row_size if low < first * row_size else 0
    yield from _boxes_in_row(first - 1, row_shape, low - (first - 1) * row_size, partial_end)
    if first < last:
        yield Region((first, *(0,) * len(row_shape)), (last - first, *row_shape))
    yield from _boxes_in_row(last, row_shape, 0, high - last * row_size)


def _boxes_in_row(row: int, row_shape: Shape, low: int, high: int) -> Iterator[Region]:
    for box in boxes(row_shape, low, high):
        yield Region((row, *box.start), (1, *box.size))


def require_cover(layouts: Sequence[Layout]) -> None:
    """Check that the layouts of all ranks together have every element of the checkpoint exactly once.

    It needs neither weights nor several processes: make the layouts of all ranks in one process.

    Args:
        layouts: the layout of each rank.

    Raises:
        TensorMismatch: elements are missing; the message names the tensors.
        RegionOverlap: two slices have the same elements.
    """
    table = layouts[0].table
    regions: dict[str, list[Region]] = {spec.name: [] for spec in table.specs}
    for rank, layout in enumerate(layouts):
        table.require(layout.table, "layout 0", f"layout {rank}")
        for local in layout.parameters.values():
            for slice_ in local.slices:
                regions[slice_.tensor].append(slice_.region)
    incomplete = []
    for spec in table.specs:
        refuse_overlap(spec.name, regions[spec.name])
        if (count := sum(region.numel for region in regions[spec.name])) != spec.numel:
            incomplete.append(f"{count} of {spec.numel} elements of {spec.name!r}")
    if incomplete:
        more = f"; and {len(incomplete) - 10} more" if len(incomplete) > 10 else ""
        raise TensorMismatch(f"the layouts together hold only {'; '.join(incomplete[:10])}{more}")


class LayoutSource:
    """The parameters of one rank, by a layout. Made by `mapped`."""

    def __init__(self, layout: Layout, tensors: Callable[[], Mapping[str, Any]]) -> None:
        self.layout = layout
        self._tensors = tensors

    def weights(self) -> Shards:
        """The parts of this rank."""
        return self.layout.shards(self._tensors())


class JoinedSource:
    """Several sources of one rank, as one. Made by `joined`."""

    def __init__(self, sources: Sequence[Source]) -> None:
        self.sources = tuple(sources)

    def weights(self) -> Shards:
        """The parts of all sources."""
        all_shards: list[Any] = [source.weights() for source in self.sources]
        table = all_shards[0].table
        for i, shards in enumerate(all_shards):
            table.require(shards.table, "source 0", f"source {i}")
        return Shards(table, [part for shards in all_shards for part in shards.parts])


def mapped(layout: Layout, parameters: Any) -> LayoutSource:
    """The weights of one rank, by a layout.

    Args:
        layout: the layout of the rank.
        parameters: a torch module whose `state_dict` has exactly the names of the layout; a mapping from these names to
            tensors; or a function that returns such a mapping, called at every publish.

    Returns:
        A source of the parts of this rank.

    Raises:
        UnsupportedTensor: `parameters` is none of these.

    >>> import sparserl
    >>> table = sparserl.tensor_table({"w": np.zeros((4, 2), np.float32)})
    >>> layout = Layout(table, {"w": split(table, "w", dim=0, rank=1, size=2)})
    >>> source = sparserl.sources.mapped(layout, {"w": np.ones((2, 2), np.float32)})
    >>> [str(part.region) for part in source.weights().parts]
    ['[2:4, 0:2]']
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
    """Several sources of one rank as one: the chunks of an interleaved pipeline, say.

    Args:
        sources: sources of shards with one tensor table.

    Returns:
        A source of the parts of all of them.

    >>> source = sparserl.sources.joined(*(sparserl.sources.mapped(*chunk) for chunk in chunks))   # doctest: +SKIP
    """
    return sources[0] if len(sources) == 1 else JoinedSource(sources)


def local_tensors(module: Any) -> dict[str, Any]:
    """The parameters and persistent buffers of a torch module, without a copy and without its extra state."""
    items = module.state_dict(keep_vars=True).items()
    return {name: tensor.detach() for name, tensor in items if not name.endswith("_extra_state")}


def _spec(table: TensorTable, name: str) -> TensorSpec:
    if (spec := table.get(name)) is None:
        raise TensorMismatch(f"{name!r} is not in the tensor table")
    return spec


def _names(spans: Iterable[Span]) -> str:
    return ", ".join(sorted({repr(span.tensor) for span in spans if span.tensor is not None}))


def _require_fit(name: str, local: Local, slice_: Slice, spec: TensorSpec) -> None:
    if slice_.region != whole(spec.shape) and not slice_.region.fits(spec.shape):
        raise TensorMismatch(f"parameter {name!r}: region {slice_.region} does not lie in {spec}")
    if slice_.local != whole(local.shape) and not slice_.local.fits(local.shape):
        raise TensorMismatch(f"parameter {name!r}: slice {slice_.local} does not lie in {list(local.shape)}")
    if slice_.local.numel != slice_.region.numel:
        raise TensorMismatch(f"parameter {name!r}: slice {slice_.local} cannot be {slice_.region} of {spec}")


def _view(name: str, data: Any, shape: Shape) -> Any:
    """The same memory in another shape."""
    if tuple(data.shape) == shape:
        return data
    if not isinstance(data, np.ndarray):
        try:
            return data.view(shape)
        except RuntimeError as error:
            raise UnsupportedTensor(f"parameter {name!r}: {error}") from error
    view = data.reshape(shape)
    if not np.may_share_memory(view, data):
        raise UnsupportedTensor(f"parameter {name!r}: {list(data.shape)} has no view of shape {list(shape)}; copy it")
    return view
