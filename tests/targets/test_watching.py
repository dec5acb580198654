"""Copies are followed through everything that loaders do; what is no copy, or goes unseen, is found by numbers."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparserl.errors import UnsupportedTensor
from sparserl.targets import engine_layout, made_up, numbering, watching
from sparserl.targets.copies import ElementCopy, Untraceable
from sparserl.targets.numbering import number_pieces
from sparserl.targets.pieces import CheckpointTensor, Piece
from sparserl.weights.region import row_major, whole
from tests.targets.test_learn import find_pieces, watch_pieces

SHAPE = (6, 8)


def spec(name="w", shape=SHAPE, dtype=torch.float32):
    return CheckpointTensor(name, shape, dtype)


def require_found(pieces, live, load, **weights):
    """All elements of these weights are in the pieces, where a load puts them."""
    load(weights.items())
    assert sum(piece.region.numel for piece in pieces) == sum(tensor.numel() for tensor in weights.values())
    assert all(torch.equal(piece.view(live), weights[piece.tensor][piece.region.slices]) for piece in pieces)


def view_of_all(tensor):
    return tensor


def through_another(tensor):
    """As vLLM reloads: into new memory, processed there, and then copied to where the weights have always been."""
    other = torch.empty_strided((6, 8), (8, 1))
    other[:2].copy_(tensor[:2])
    other[2:].copy_(tensor[2:])
    return other.t().contiguous().t()


def joined(tensor):
    return torch.cat([tensor[3:], tensor[:3]])


def stacked(tensor):
    return torch.stack([tensor[:3], tensor[3:]]).view(6, 8)


def cast(tensor):
    return tensor.double().float()


def flattened(tensor):
    return tensor.clone().view(-1).clone().view(12, 4).t().contiguous().t().reshape(6, 8)


def copied_twice(tensor):
    other = torch.ones(6, 8)
    other.copy_(tensor.flip(0))
    other.zero_()
    other.copy_(tensor)
    return other


def partly_written_over(tensor):
    other = torch.ones(6, 8)
    other[:3].copy_(tensor[3:])
    other[:3].copy_(tensor[:3])
    other[3:].copy_(tensor[3:])
    return other


WAYS = [view_of_all, through_another, joined, stacked, cast, flattened, copied_twice, partly_written_over]


@pytest.mark.parametrize("way", WAYS)
def test_ways_of_loaders(way):
    """Whatever copies are made on the way, all elements are found without numbers."""
    live = {"w": torch.zeros(SHAPE)}

    def load(some):
        for _, tensor in some:
            live["w"].copy_(way(tensor))

    pieces = watch_pieces([spec()], live, load)
    require_found(pieces, live, load, w=torch.randn(SHAPE))


@pytest.mark.parametrize(
    "way",
    [
        lambda x: x.to(torch.bfloat16).float(),
        lambda x: x.int().float(),
        torch.abs,
        torch.relu,
        lambda x: x.clamp(-1000, 100),
        lambda x: torch.maximum(x, x.flip(0)),
    ],
)
def test_what_is_no_copy_of_all_weights_is_refused(way):
    """Rounded, clipped, or the larger of two: small whole numbers would not show it."""
    live = {"w": torch.zeros(SHAPE)}

    def load(some):
        for _, tensor in some:
            live["w"].copy_(way(tensor))

    with pytest.raises(UnsupportedTensor, match="'w' is not a copy"):
        find_pieces([spec()], live, load)


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
@pytest.mark.parametrize("find", [find_pieces, watch_pieces, number_pieces])
def test_single_elements(shape, find):
    """Of scales there is one in each tensor, and often one in all."""
    live = {f"scale.{i}": torch.zeros(shape) for i in range(3)}

    def load(some):
        for name, tensor in some:
            live[name].copy_(tensor)

    pieces = find([spec(name, shape) for name in live], live, load)
    require_found(pieces, live, load, **{name: torch.randn(shape) for name in live})


@pytest.mark.parametrize("number", [2, 3])
@pytest.mark.parametrize(
    "largest", [lambda scales: max(scale.item() for scale in scales), lambda scales: torch.stack(scales).max()]
)
def test_the_largest_scale_is_no_copy(number, largest):
    """Neither as a tensor nor as a Python number, whichever is the largest among those that were made up."""
    live = {"scale": torch.zeros(1)}

    def load(some):
        live["scale"].fill_(largest([tensor for _, tensor in some]))

    for first in range(12):
        with pytest.raises(UnsupportedTensor, match="'scale' is not a copy"):
            find_pieces([spec(f"scale.{first + i}", ()) for i in range(number)], live, load)


@pytest.mark.parametrize(
    ("dtype", "way"),
    [
        (torch.float32, lambda x: x.masked_fill(x == 0, 1)),
        (torch.float32, lambda x: x.where(x.abs() > 1e-30, 0)),
        (torch.bfloat16, lambda x: (x.float() * 256).round() / 256),
        (torch.bfloat16, torch.Tensor.half),
        (torch.bfloat16, lambda x: x.clamp(-1e6, 1e6)),
        (torch.float8_e4m3fn, lambda x: x.float().clamp(-400, 400)),
        (torch.int32, lambda x: x.clamp(-1000, 1000)),
    ],
)
@pytest.mark.parametrize("find", ["watched", "numbered"])
def test_what_numbers_do_not_show_is_refused(monkeypatch, find, dtype, way):
    """Small numbers, large ones and zeros: awkward bits show what becomes of them."""
    live = {name: torch.zeros(SHAPE, dtype=dtype) for name in ("plain", "w")}

    def load(some):
        for name, tensor in some:
            live[name].copy_(tensor)
            if name == "w":
                in_a_thread(live[name], way(tensor))

    if find == "watched":
        pieces = [Piece(name, whole(SHAPE), name, 0, row_major(SHAPE)) for name in live]
        monkeypatch.setattr(engine_layout, "watch_pieces", lambda *_: (pieces, set()))
    tensors = [spec(name, dtype=dtype) for name in live]
    with pytest.raises(UnsupportedTensor, match="'w' is not a copy in 'w': the engine computes it"):
        find_pieces(tensors, live, load)
    names = {}
    (piece,) = find_pieces(tensors, live, load, names)
    assert piece.tensor == "plain"
    assert names.keys() == {"w"}


@pytest.mark.parametrize("value", [0.0, 1e-38])
def test_single_elements_of_any_size(value):
    """Also a tensor with one element only is loaded as something small and as zero."""
    live = {"scale": torch.zeros(1)}

    def load(some):
        for _, tensor in some:
            live["scale"].copy_(tensor)
            in_a_thread(live["scale"], tensor.masked_fill(tensor.abs() <= value, 1))

    with pytest.raises(UnsupportedTensor, match="'scale' is not a copy in 'scale'"):
        engine_layout.find_pieces([spec("scale", (1,))], live, load, lambda _: None, restores_by_load=False)


@pytest.mark.parametrize(
    "dtype",
    [torch.bool, torch.int64, torch.uint64, torch.float32, torch.float64, torch.float8_e5m2, torch.float8_e8m0fnu],
)
def test_awkward_bits(dtype):
    """Of every dtype there are many, of which none is infinite or no number."""
    with made_up.MadeUp([spec(shape=(1 << 16,), dtype=dtype)], made_up.awkward) as made:
        ((_, tensor),) = made.load(lambda *_: None)
        assert bool(tensor.double().isfinite().all())
        assert len(set(tensor.double().tolist())) > min(1 << 8 * dtype.itemsize, 1 << 16) / 4 or dtype == torch.bool


@pytest.mark.parametrize(
    ("way", "follows"),
    [
        (lambda x: x.double().float(), True),
        (lambda x: x.bfloat16().float(), False),
        (lambda x: x.bfloat16().bfloat16().clone().float(), False),
        (lambda x: x.int().float(), False),
    ],
)
def test_casts_on_the_way(way, follows):
    """A dtype that has all numbers of the checkpoint's loses none; what goes through another one is no copy."""
    live = {"w": torch.zeros(SHAPE)}
    watch = watching.LoadWatch()
    tensor = torch.zeros(SHAPE)
    watch.register("w", tensor)
    with watch:
        live["w"].copy_(way(tensor))
    pieces, unclear = watching.arrived_pieces(watch, {"w": spec()}, live)
    assert (len(pieces), unclear) == ((1, set()) if follows else (0, {"w"}))


def test_numbers_that_were_lost_sight_of():
    """Read first and written later, or written as a constant that happens to be the same: found by numbers."""
    live = {"a": torch.zeros(1), "b": torch.zeros(1), "one": torch.zeros(1)}

    def load(some):
        first, second = (tensor.item() for _, tensor in some)
        live["a"].fill_(first)
        live["b"].fill_(second)
        live["one"].fill_(1.0)

    pieces = find_pieces([spec("a", ()), spec("b", ())], live, load)
    assert sorted((piece.tensor, piece.live) for piece in pieces) == [("a", "a"), ("b", "b")]


def test_loaders_may_keep_all_tensors():
    """Made-up tensors need no file descriptors, and no memory of their own."""
    tensors = [spec(f"layers.{i}.w", (256, 256)) for i in range(300)]
    with watching.MadeUp(tensors) as made:
        before = len([*Path("/dev/fd").iterdir()])
        kept = [*made.load(watching.LoadWatch().register)]
        assert len([*Path("/dev/fd").iterdir()]) < before + 100  # other tests of this process may open or close some
        assert len({tensor.data_ptr() for _, tensor in kept}) == 300


def test_a_number_that_was_read():
    """Scales are often read as a Python number and written as one: numbers tell that nothing else was written."""
    live = {"w": torch.zeros(3)}

    def load(some):
        for i, (_, tensor) in enumerate(some):
            live["w"][i].fill_(tensor.item())

    tensors = [spec(f"scale.{i}", ()) for i in range(3)]
    pieces = find_pieces(tensors, live, load)
    assert [(piece.tensor, piece.offset) for piece in pieces] == [("scale.0", 0), ("scale.1", 1), ("scale.2", 2)]
    with pytest.raises(AssertionError, match="numbers were loaded"):
        watch_pieces(tensors, live, load)


def test_tensors_that_share_memory():
    """Several tensors of the engine in one buffer have each its own pieces."""
    buffer = torch.zeros(20)
    live = {"a": buffer[2:8].view(2, 3), "b": buffer[10:16].view(3, 2)}
    tensors = [spec("a", (2, 3)), spec("b", (3, 2))]
    pieces = watch_pieces(tensors, live, lambda some: [live[name].copy_(t) for name, t in some])
    assert [(piece.tensor, piece.live, piece.offset) for piece in pieces] == [("a", "a", 0), ("b", "b", 0)]


def in_a_thread(live, tensor):
    thread = threading.Thread(target=lambda: live.copy_(tensor))
    thread.start()
    thread.join()


@pytest.mark.parametrize(
    "write",
    [in_a_thread, lambda live, tensor: np.copyto(live.numpy(), tensor.numpy())],
)
def test_what_goes_unseen_is_noticed(write):
    """Copies that PyTorch does not tell of on this thread: numbers find them all."""
    live = {"seen": torch.zeros(SHAPE), "unseen": torch.zeros(SHAPE)}

    def load(some):
        for name, tensor in some:
            live["seen"].copy_(tensor) if name == "seen" else write(live["unseen"], tensor)

    pieces = find_pieces([spec("seen"), spec("unseen")], live, load)
    assert sorted((piece.tensor, piece.live) for piece in pieces) == [("seen", "seen"), ("unseen", "unseen")]


def test_a_copy_that_is_changed_unseen_is_noticed():
    """Bits that are written over behind PyTorch's back are not where they were copied to."""
    live = {"w": torch.zeros(SHAPE)}

    def load(some):
        for _, tensor in some:
            live["w"].copy_(tensor)
            live["w"].numpy()[0] = tensor.numpy()[1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(watching, "_wrong", lambda *_: [])
        (piece,) = find_pieces([spec()], live, load)  # what would be believed
        assert piece.region == whole(SHAPE)
    with pytest.raises(UnsupportedTensor, match="'w' has some elements of 'w' twice"):
        find_pieces([spec()], live, load)


def test_numbers_are_loaded_for_few_layers(monkeypatch):
    """Where one layer scatters its elements, numbers are loaded for this layer, and for no other."""
    tensors = [spec(f"layers.{i}.w", (16,)) for i in range(3)]
    live = {tensor.name: torch.zeros(16) for tensor in tensors}
    order = torch.randperm(16, generator=torch.Generator().manual_seed(1))
    numbered = []
    original = numbering.number_pieces

    def number_pieces(tensors, *arguments, **options):
        numbered.append([tensor.name for tensor in tensors])
        return original(tensors, *arguments, **options)

    monkeypatch.setattr(engine_layout, "number_pieces", number_pieces)

    def load(some):
        for name, tensor in some:
            live[name].copy_(tensor[order] if "1" in name else tensor)

    pieces = find_pieces(tensors, live, load)
    assert numbered == [["layers.1.w"]]
    require_found(pieces, live, load, **{name: torch.randn(16) for name in live})


def test_blocks_of_a_kernel(monkeypatch):
    """Weights in blocks of 2 × 4, as kernels permute experts: found, or refused by name where they are too many."""

    def load(some):
        for _, tensor in some:
            live["w"].copy_(tensor.view(3, 2, 2, 4).permute(0, 2, 1, 3).reshape(6, 8))

    live = {"w": torch.zeros(SHAPE)}
    pieces = find_pieces([spec()], live, load)
    require_found(pieces, live, load, w=torch.randn(SHAPE))
    monkeypatch.setattr(numbering, "MAX_PIECES", 2)
    with pytest.raises(UnsupportedTensor, match=r"'w' is in \d+ pieces in 'w'"):
        find_pieces([spec()], live, load)


def test_made_up_tensors_differ():
    """Tensors of one shape have other numbers, at addresses of their own."""
    tensors = [spec(f"layers.{i}.w", (32, 32)) for i in range(4)]
    with watching.MadeUp(tensors) as made:
        loaded = dict(made.load(watching.LoadWatch().register))
        values = [*loaded.values()]
        assert len({tensor.data_ptr() for tensor in values}) == 4
        assert all((a == b).float().mean() < 0.1 for i, a in enumerate(values) for b in values[:i])
        assert all(torch.equal(made.on("cpu")(tensor), loaded[tensor.name]) for tensor in tensors)


def place(data, shape):
    """A view of a memory of 64 elements with this shape: an offset and strides."""
    axes = data.draw(st.permutations(range(len(shape))))
    step = data.draw(st.sampled_from([1, 2]))
    strides = [0] * len(shape)
    for axis in axes:
        strides[axis] = step
        step *= shape[axis] * data.draw(st.sampled_from([1, 1, 2]))
    return data.draw(st.integers(0, 8)), tuple(strides)


def elements(copy):
    """Which element of the source is at which place."""
    found = {copy.at: copy.source}
    for size, at, source in copy.dimensions:
        found = {a + i * at: s + i * source for a, s in found.items() for i in range(size)}
    return found


@given(st.data())
def test_copies_follow_one_another(data):
    """Two copies one after the other are what the memory has afterwards, or they are given up."""
    first_shape = tuple(data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    second_shape = tuple(data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    first = ElementCopy.of(first_shape, *place(data, first_shape), 0, row_major(first_shape))
    second = ElementCopy.of(second_shape, *place(data, second_shape), *place(data, second_shape))
    middle = elements(first)
    expected = {at: middle[source] for at, source in elements(second).items() if source in middle}
    try:
        both = second.through(first)
    except Untraceable:
        return
    assert ({} if both is None else elements(both)) == expected


@given(st.data())
def test_copies_over_copies(data):
    """A copy takes the place of another entirely or not at all, or is given up."""
    shapes = [tuple(data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))) for _ in range(2)]
    earlier, later = (ElementCopy.of(shape, *place(data, shape), 0, row_major(shape)) for shape in shapes)
    common = elements(earlier).keys() & elements(later).keys()
    try:
        overwritten = later.overwrites(earlier)
    except Untraceable:
        return
    assert common == (elements(earlier).keys() if overwritten else set())


@given(st.data())
def test_regions_of_copies(data):
    """A copy of a slice of a tensor is a region with strides: every element is where the copy has put it."""
    shape = tuple(data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)))
    start = [data.draw(st.integers(0, n - 1)) for n in shape]
    size = tuple(data.draw(st.integers(1, n - first)) for first, n in zip(start, shape, strict=True))
    offset = sum(first * stride for first, stride in zip(start, row_major(shape), strict=True))
    copy = ElementCopy.of(size, *place(data, size), offset, row_major(shape))
    region, strides = copy.region(shape)
    expected = elements(copy)
    for inner in np.ndindex(*region.size):
        at = copy.at + sum(i * stride for i, stride in zip(inner, strides, strict=True))
        flat = sum((a + i) * s for a, i, s in zip(region.start, inner, row_major(shape), strict=True))
        assert expected.pop(at) == flat
    assert not expected
