"""Numbers are made where the engine is, for the layers that were lost sight of and for no others."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sparserl.errors import UnsupportedTensor
from sparserl.targets import engine_layout, numbering
from sparserl.targets.numbering import number_pieces
from sparserl.targets.pieces import CheckpointTensor, span
from tests.targets.test_kernel_layouts import checkpoint, learnt, padded, shuffled, started, vnni
from tests.targets.test_learn import find_pieces
from tests.targets.test_watching import in_a_thread, require_found

SHAPE = (16, 32)
ORDER = torch.randperm(16, generator=torch.Generator().manual_seed(1))


def specs(names, shape=SHAPE, dtype=torch.float32):
    return [CheckpointTensor(name, shape, dtype) for name in names]


def scattered(tensor):
    """In an order that no copy is followed through."""
    return tensor[ORDER]


class Loader:
    """An engine with a tensor for each of the checkpoint; some are put in another order. It keeps what it was given."""

    def __init__(self, tensors, scattered_names):
        self.live = {tensor.name: torch.zeros(tensor.shape, dtype=tensor.dtype) for tensor in tensors}
        self.loads = []
        self._scattered_names = scattered_names

    def load(self, some):
        given = dict(some)
        self.loads.append({name: tensor.clone() for name, tensor in given.items()})
        for name, tensor in given.items():
            self.live[name].copy_(scattered(tensor) if name in self._scattered_names else tensor)


def numbered_names(loads):
    """The tensors that were not the same in all loads."""
    return {name for name in loads[0] if any(not torch.equal(load[name], loads[0][name]) for load in loads[1:])}


def test_digits_are_made_for_what_cannot_be_watched():
    """Of three layers one has a tensor that is scattered: digits are made for that layer alone."""
    tensors = specs([f"layers.{layer}.{name}.weight" for layer in range(3) for name in range(10)])
    engine = Loader(tensors, {"layers.1.7.weight"})
    pieces = find_pieces(tensors, engine.live, engine.load)
    _, _, *passes, _ = engine.loads  # after the weights and what is watched, before awkward bits
    layer = {f"layers.1.{name}.weight" for name in range(10)}
    assert all(load.keys() == layer for load in passes)
    assert numbered_names(passes) == layer
    assert len(passes) == 2 + 1 + 4  # digits of 5120 numbers, the opposite of the last, and mixed ones
    require_found(pieces, engine.live, engine.load, **{name: torch.randn(SHAPE) for name in engine.live})


def swapped(live, given):
    """Two tensors change places, by the value of a third."""
    live["layers.0.c"].copy_(given["layers.0.c"])
    first, second = "layers.0.a", "layers.0.b"
    if (given["layers.0.c"][0, 0] > given["layers.0.c"][0, 1]).item():
        first, second = second, first
    live["layers.0.a"].copy_(given[first])
    live["layers.0.b"].copy_(given[second])


def sorted_unseen(live, given):
    """Rows are in the order of another tensor, which nobody sees."""
    live["layers.0.c"].copy_(given["layers.0.c"])
    live["layers.0.b"].copy_(given["layers.0.b"])
    in_a_thread(live["layers.0.a"], given["layers.0.a"][given["layers.0.c"][:, 0].argsort()])


def smaller_unseen(live, given):
    """One tensor limits another, which nobody sees."""
    live["layers.0.c"].copy_(given["layers.0.c"])
    live["layers.0.b"].copy_(given["layers.0.b"])
    in_a_thread(live["layers.0.a"], torch.minimum(given["layers.0.a"], given["layers.0.c"]))


@pytest.mark.parametrize("way", [swapped, sorted_unseen, smaller_unseen])
def test_what_depends_on_other_values_is_no_copy(way):
    """The values of a tensor may decide what becomes of others of its layer: then these are refused."""
    tensors = specs([f"layers.0.{name}" for name in "abc"])
    live = {tensor.name: torch.zeros(SHAPE) for tensor in tensors}
    with pytest.raises(UnsupportedTensor):
        find_pieces(tensors, live, lambda some: way(live, dict(some)))


@pytest.mark.parametrize(
    ("shape", "factor"),
    [((), torch.clone), (SHAPE, torch.clone), (SHAPE, lambda scale: scale / scale.abs().amax())],
)
def test_a_factor_that_goes_unseen_is_noticed(factor, shape):
    """A tensor that is multiplied unseen by one that was followed is no copy."""
    tensors = specs(["layers.0.w"], dtype=torch.bfloat16) + specs(["layers.0.scale"], shape, torch.bfloat16)
    live = {tensor.name: torch.zeros(tensor.shape, dtype=tensor.dtype) for tensor in tensors}

    def load(some):
        given = dict(some)
        live["layers.0.scale"].copy_(given["layers.0.scale"])
        in_a_thread(live["layers.0.w"], given["layers.0.w"] * factor(given["layers.0.scale"]))

    with pytest.raises(UnsupportedTensor, match=r"'layers.0.w' is not a copy"):
        find_pieces(tensors, live, load)


def written_as_a_number(function):
    """A function of Python numbers."""
    return lambda live, tensor: live.fill_(function(float(tensor)))


def written_unseen(function):
    return lambda live, tensor: in_a_thread(live, function(tensor))


COMPUTED = {
    "plus a little": lambda live, tensor: live.copy_(
        tensor + 1e-7 if tensor.dtype == torch.float32 else tensor + 0.006
    ),
    "rounded": lambda live, tensor: live.copy_(tensor.round()),
    "whole": lambda live, tensor: live.copy_(tensor.int()),
    "clamped": lambda live, tensor: live.copy_(tensor.clamp(-1, 1)),
    "sign": lambda live, tensor: live.copy_(tensor.sign()),
    "reciprocal": lambda live, tensor: live.copy_(1 / tensor),
    "reciprocal in place": lambda live, tensor: live.copy_(tensor).reciprocal_(),
    "square": lambda live, tensor: live.copy_(tensor * tensor),
    "root": lambda live, tensor: live.copy_(tensor.sqrt()),
    "magnitude": lambda live, tensor: live.copy_(tensor.abs()),
    "reciprocal as a number": written_as_a_number(lambda value: 1 / value),
    "square as a number": written_as_a_number(lambda value: value * value),
    "reciprocal unseen": written_unseen(torch.reciprocal),
    "square unseen": written_unseen(torch.square),
    "magnitude unseen": written_unseen(torch.abs),
}


@pytest.mark.parametrize("value", [1.0, 2.0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("way", COMPUTED)
def test_a_scale_of_which_something_is_computed(way, dtype, value):
    """A scale that is kept as its reciprocal, say, is no copy and no constant, though one is its own."""
    scale = torch.full((1,), value, dtype=dtype)
    live = {"layers.0.scale": torch.zeros(1, dtype=dtype)}

    def load(some):
        for name, tensor in some:
            COMPUTED[way](live[name], tensor)

    with pytest.raises(UnsupportedTensor, match=r"'layers\.0\.scale' is not a copy"):
        engine_layout.find_pieces(specs(live, (1,), dtype), live, load, lambda _: load([("layers.0.scale", scale)]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("way", [way for way in COMPUTED if "number" not in way])  # which is of one element alone
def test_digits_are_not_what_is_computed_of_them(way, dtype):
    """Numbers that stand for digits show by themselves what is computed, before awkward bits are loaded."""
    tensors = specs(["layers.0.w"], dtype=dtype)
    live = {"layers.0.w": torch.zeros(SHAPE, dtype=dtype)}
    with pytest.raises(UnsupportedTensor, match=r"'layers\.0\.w' is not a copy"):
        number_pieces(tensors, live, lambda some: COMPUTED[way](live["layers.0.w"], dict(some)["layers.0.w"]))


@pytest.mark.parametrize("largest", [torch.maximum, torch.minimum])
def test_the_larger_of_two_scales(largest):
    """It is no copy of either, also of two that have the same mixed digits."""
    names = [f"layers.0.{number}.scale" for number in range(40)]
    tensors = specs(["layers.0.w"], (40, 3), torch.float8_e4m3fn) + specs(names, (1,))
    group = numbering._Group(tensors)
    mixed = torch.stack([group.digit(torch.arange(40), turn) for turn in range(group.mixed_from, group.passes)])
    alike = [(i, j) for i, j in itertools.combinations(range(40), 2) if torch.equal(mixed[:, i], mixed[:, j])]
    assert len(alike) > 1
    for i, j in (*alike[:5], (0, 1), (3, 39)):
        live = {"scale": torch.zeros(1), "layers.0.w": torch.zeros(40, 3).to(torch.float8_e4m3fn)}

        def load(some, live=live, i=i, j=j):
            given = dict(some)
            live["layers.0.w"].copy_(given["layers.0.w"])
            live["scale"].copy_(largest(given[names[i]], given[names[j]]))

        with pytest.raises(UnsupportedTensor, match="'scale' is not a copy"):
            number_pieces(tensors, live, load)


@pytest.mark.parametrize("shape", [(), (1,)])
def test_a_number_that_is_there_twice(shape):
    """A single element in several places is refused by its name, whether or not it has a dimension."""
    tensors = specs(["layers.0.scale"], shape)
    live = {"scales": torch.zeros(2)}

    def load(some):
        for _, tensor in some:
            in_a_thread(live["scales"], tensor.reshape(1).expand(2))

    with pytest.raises(UnsupportedTensor, match=r"'scales' has some elements of 'layers.0.scale' twice"):
        find_pieces(tensors, live, load)


def test_what_goes_unseen_beside_other_copies_is_refused():
    """A second copy that nobody saw is noticed where digits are made for another layer only."""
    tensors = specs(["layers.0.w", "layers.1.w"])
    live = {name: torch.zeros(SHAPE) for name in ("layers.0.w", "layers.1.w", "packed")}

    def load(some):
        for name, tensor in some:
            if name == "layers.0.w":
                live[name].copy_(tensor)
                in_a_thread(live["packed"], tensor)
            else:
                in_a_thread(live[name], tensor)

    with pytest.raises(UnsupportedTensor, match=r"'packed' both have some elements of 'layers.0.w'"):
        find_pieces(tensors, live, load)


class HostElements(TorchDispatchMode):
    """Counts the elements of the largest tensor in host memory that an operation has to do with."""

    def __init__(self):
        super().__init__()
        self.most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for value in tree_leaves((args, kwargs, out)):
            if isinstance(value, torch.Tensor) and value.device.type == "cpu":
                self.most = max(self.most, value.numel())
        return out


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.float64])
def test_digits_are_made_on_the_device(monkeypatch, dtype):
    """On a device that cannot be read from, digits are made all the same: the host has letters, and no elements.

    Arrays of NumPy could not get there either, since nothing of their size passes through the host.
    """
    device = torch.device("meta")
    tensors = specs(["layers.0.a", "layers.0.b"], (300, 1000), dtype)
    group = numbering._Group(tensors)
    monkeypatch.setattr(numbering, "np", None)
    with HostElements() as host:
        for turn in range(group.places + numbering._MIXED_PASSES):
            made = dict(group._numbered(turn, device))
            assert made.keys() == {"layers.0.a", "layers.0.b"}
            assert all((t.device, t.shape, t.dtype) == (device, (300, 1000), dtype) for t in made.values())
    assert 0 < host.most <= 256


def test_heads_of_rows_come_to_the_host(monkeypatch):
    """Numbers are put together where they were read; of whole rows, the host gets the first one."""
    elements = []
    cpu = torch.Tensor.cpu

    def counted(tensor):
        elements.append(tensor.numel())
        return cpu(tensor)

    tensors = specs(["layers.0.w"])
    engine = Loader(tensors, {"layers.0.w"})
    monkeypatch.setattr(torch.Tensor, "cpu", counted)
    pieces = number_pieces(tensors, engine.live, engine.load)
    assert elements == [SHAPE[0]]
    require_found(pieces, engine.live, engine.load, **{"layers.0.w": torch.randn(SHAPE)})


@pytest.fixture
def read_tensors(monkeypatch):
    """The engine's tensors that are read after passes of digits, one after the other."""
    read = []

    def noted_span(tensor):
        read.append(tensor)
        return span(tensor)

    monkeypatch.setattr(numbering, "span", noted_span)
    return read


def test_one_group_is_read_at_a_time(monkeypatch, read_tensors):
    """Where there is no room for all layers, a pass of digits has one, and what it is loaded into is read."""
    monkeypatch.setattr(numbering, "GROUP_ELEMENTS", 512)
    tensors = specs([f"layers.{i}.w" for i in range(3)])
    engine = Loader(tensors, {tensor.name for tensor in tensors})
    pieces = find_pieces(tensors, engine.live, engine.load)
    passes = engine.loads[2:-1]
    assert all(len(load) == 1 for load in passes)
    assert len(read_tensors) == len(passes) - 2 * 3  # two passes a layer tell what is read
    require_found(pieces, engine.live, engine.load, **{name: torch.randn(SHAPE) for name in engine.live})


@pytest.mark.parametrize(("permute", "number"), [(shuffled, 368), (vnni, 96), (padded, 6)])
def test_layouts_of_kernels(permute, number):
    """Layouts of kernels fall into as few pieces as ever, which have every element."""
    weights = checkpoint()
    pieces = learnt(started(permute, weights), weights)
    assert len(pieces) == number
    assert sum(piece.region.numel for piece in pieces) == sum(tensor.numel() for tensor in weights.values())
