"""A sample of what a trainer keeps beside the weights that it publishes: fp32 masters and gradients.

An update of a master may be too small to change the published number, so that a patch says nothing of it. To record
such updates, a sample of the masters is kept from one version to the next: at positions that depend on the seed, the
names and the shapes of the whole tensors alone. So ranks that have parts take together what one process with the whole
would take.

A master or a gradient is found by the memory that a published part lies in: a trainer's parameter, by `training_state`
of the source, or the wider tensor that a part is cast from.
"""

from __future__ import annotations

import hashlib
import logging
from bisect import bisect_right
from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from ..weights.memory import Weights
from ..weights.region import Numbers, Region, whole
from ..weights.shards import Shards
from ..weights.staging import LazyBits
from .tracked_rows import extent, local

_log = logging.getLogger("sparserl.sources")

Floats = npt.NDArray[np.float32]
Key = tuple[str, Region]


class ParameterState(NamedTuple):
    """A parameter of a trainer, and what is kept beside it.

    Attributes:
        weight: The parameter; of a sharded one the memory of this process.
        gradient: A tensor of its shape; None where there is none.
        master: Its fp32 master, or a range of the flattened elements of it; None where there is none, or where the
            parameter itself is in fp32.
        master_start: Where that range begins.
    """

    weight: Any
    gradient: Any = None
    master: Any = None
    master_start: int = 0


@runtime_checkable
class TrainingSource(Protocol):
    """A source that knows the parameters of the trainer."""

    def training_state(self) -> list[ParameterState]:
        """The parameters as they are now. Published parts lie in their memory."""
        ...


class PartSample(NamedTuple):
    """The sampled elements of one part.

    Attributes:
        elements: How many elements the part has.
        published: The published values, as a torch tensor in host memory.
        masters: The fp32 values that they are cast from; None where there are none.
        gradients: None where there are none.
    """

    elements: int
    published: Any
    masters: Floats | None
    gradients: Floats | None


MasterSample = dict[Key, PartSample]


class MasterUpdate(NamedTuple):
    """A sample of the version before, None where nobody took it, and of this version."""

    before: MasterSample | None
    after: MasterSample


def state_of(parameter: Any, master: Any = None, master_start: int = 0) -> ParameterState:
    """The state of a torch parameter. Megatron-core has its gradients in `main_grad`."""
    gradient = getattr(parameter, "main_grad", None)
    if gradient is None:
        gradient = parameter.grad
    weight = local(parameter).detach()
    return ParameterState(weight, None if gradient is None else local(gradient).detach(), master, master_start)


class MasterSampler:
    """Takes samples of a source, always at the same positions.

    Args:
        elements: How many elements of the whole weights to take; every tensor adds its share, rounded up. None for all.
        seed: What the positions depend on, beside names and shapes.
    """

    def __init__(self, elements: int | None, seed: int) -> None:
        self._limit = elements
        self._seed = seed
        self._positions: dict[tuple[str, Region, int], Numbers] = {}
        self._step_gradients: dict[Key, Floats] = {}
        self._has_failed = False

    def watch(self, source: Any) -> None:
        """Take gradients at every step of a source that tracks steps; of others they are taken with the sample.

        A step does not depend on it: what goes wrong is logged, once.
        """

        def before_step(weights: Weights | Shards) -> None:
            try:
                self._step_gradients.update(self._gradients(source, weights))
            except Exception:  # noqa: BLE001  # whatever it is, the trainer goes on
                if not self._has_failed:
                    self._has_failed = True
                    _log.exception("gradients were not sampled; later failures are not logged")

        if callable(before_steps := getattr(source, "before_steps", None)):
            before_steps(before_step)

    def take(self, source: Any, weights: Weights | Shards) -> MasterSample:
        """A sample of the weights that a source has just returned; of parts without masters and gradients nothing."""
        step_gradients = self._step_gradients
        self._step_gradients = {}
        sample: MasterSample = {}
        for key, data, positions, state in self._found(source, weights):
            offsets = _offsets(data, state, positions)
            published = _values(state.weight, offsets).to(_published_dtype(data))
            gradients = _floats(_gathered(state.gradient, offsets), step_gradients.get(key))
            masters = _masters(state, published.dtype, offsets)
            if masters is not None or gradients is not None:
                sample[key] = PartSample(key[1].numel, published, masters, gradients)
        return sample

    def _gradients(self, source: Any, weights: Weights | Shards) -> dict[Key, Floats]:
        gradients = {}
        for key, data, positions, state in self._found(source, weights):
            if state.gradient is not None:
                gradients[key] = _gathered(state.gradient, _offsets(data, state, positions)).float().numpy()
        return gradients

    def _found(self, source: Any, weights: Weights | Shards) -> Iterator[tuple[Key, Any, Numbers, ParameterState]]:
        """Every part in the memory of a parameter, or cast from a wider tensor, with the positions to take of it."""
        states = source.training_state() if isinstance(source, TrainingSource) else []
        rows = sorted(((*extent(state.weight), state) for state in states), key=lambda row: row[:2])
        shapes, parts = _parts(weights)
        share = 1.0
        if self._limit is not None:
            share = min(1.0, self._limit / max(1, sum(whole(shape).numel for shape in shapes.values())))
        for name, region, data in parts:
            tensor = data.origin if isinstance(data, LazyBits) else data
            if not hasattr(tensor, "data_ptr") or not tensor.numel():
                continue
            low, high = extent(tensor)
            index = bisect_right(rows, low, key=lambda row: row[0]) - 1
            state = ParameterState(tensor) if isinstance(data, LazyBits) else None
            if index >= 0 and high <= rows[index][1]:
                state = rows[index][2]
            if state is None or not state.weight.is_contiguous() or state.weight.dtype != tensor.dtype:
                continue
            yield (name, region), data, self._positions_of(name, region, shapes[name], share), state

    def _positions_of(self, name: str, region: Region, shape: tuple[int, ...], share: float) -> Numbers:
        """The positions to take of a part, counted in it."""
        numel = whole(shape).numel
        count = min(numel, int(np.ceil(share * numel)))
        if count == numel:
            return np.arange(region.numel)
        key = (name, region, count)
        if key not in self._positions:
            self._positions[key] = _inside(_sampled(name, numel, count, self._seed), shape, region)
        return self._positions[key]


def _sampled(name: str, numel: int, count: int, seed: int) -> Numbers:
    """Positions in a whole tensor, in rising order: one in each of `count` equal ranges, at random there."""
    word = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")
    draws = np.random.default_rng([seed, word]).random(count)
    first = np.arange(count + 1) * numel // count
    return first[:-1] + (draws * np.diff(first)).astype(np.int64)


def _inside(positions: Numbers, shape: tuple[int, ...], region: Region) -> Numbers:
    """Of positions in a tensor those in a region of it, counted in the region."""
    where = np.unravel_index(positions, shape)
    inside = np.ones(positions.size, bool)
    for axis, first, size in zip(where, region.start, region.size, strict=True):
        inside &= (axis >= first) & (axis < first + size)
    corner = tuple(axis[inside] - first for axis, first in zip(where, region.start, strict=True))
    return np.ravel_multi_index(corner, region.size)


def _parts(weights: Weights | Shards) -> tuple[dict[str, tuple[int, ...]], list[tuple[str, Region, Any]]]:
    """The shapes of the whole tensors, and the parts that are here."""
    if isinstance(weights, Shards):
        shapes = {spec.name: spec.shape for spec in weights.table.specs}
        return shapes, [(part.tensor, part.region, part.data) for part in weights.parts]
    shapes = {name: tuple(data.shape) for name, data in weights.items()}
    return shapes, [(name, whole(shapes[name]), data) for name, data in weights.items()]


def _published_dtype(data: Any) -> Any:
    import torch

    return getattr(torch, data.dtype.name) if isinstance(data, LazyBits) else data.dtype


def _offsets(data: Any, state: ParameterState, positions: Numbers) -> Numbers:
    """Where elements of a part are in the flattened parameter."""
    tensor = data.origin if isinstance(data, LazyBits) else data
    offset = int(tensor.data_ptr() - state.weight.data_ptr()) // int(tensor.itemsize)
    if tensor.is_contiguous():
        return positions + offset
    offsets = np.full(positions.size, offset)
    for axis, stride in zip(np.unravel_index(positions, tuple(tensor.shape)), tensor.stride(), strict=True):
        offsets += axis * int(stride)
    return offsets


def _values(tensor: Any, offsets: Numbers) -> Any:
    """Elements of a flattened tensor, copied to host memory."""
    import torch

    index = torch.from_numpy(offsets).to(tensor.device)
    if tensor.is_contiguous():
        return tensor.view(-1)[index].cpu()
    where = np.unravel_index(offsets, tuple(tensor.shape))
    return tensor[tuple(torch.from_numpy(axis).to(tensor.device) for axis in where)].cpu()


def _gathered(gradient: Any, offsets: Numbers) -> Any:
    return None if gradient is None else _values(gradient, offsets)


def _floats(now: Any, at_step: Floats | None) -> Floats | None:
    """The gradients of the last step; else those that are here now."""
    if at_step is not None or now is None:
        return at_step
    gradients: Floats = now.float().numpy()
    return gradients


def _masters(state: ParameterState, published: Any, offsets: Numbers) -> Floats | None:
    """The fp32 values that narrower ones are cast from."""
    import torch

    master = state.weight if state.master is None else local(state.master).detach()
    if master.dtype != torch.float32 or published == torch.float32:
        return None
    inside = offsets - state.master_start
    if inside.size and (inside.min() < 0 or inside.max() >= master.numel()):
        return None
    masters: Floats = _values(master, inside).numpy()
    return masters
