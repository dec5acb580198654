"""Where checkpoint elements lie in an engine's tensors is found out, whatever its loader does with them, or refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparserl.errors import UnsupportedTensor
from sparserl.targets import engine_layout, numbering
from sparserl.targets.numbering import number_pieces
from sparserl.targets.pieces import CheckpointTensor, Piece
from sparserl.targets.strides import StridedBoxes, join_all
from sparserl.weights.region import row_major, whole
from tests.targets.engines import Engine, checkpoint, named


def find_pieces(tensors, live, load, unclear_names=None):
    """What both ways find out together in an engine that has loaded a checkpoint."""
    load((tensor.name, torch.ones(tensor.shape).to(tensor.dtype)) for tensor in tensors)
    weights = {name: tensor.clone() for name, tensor in live.items()}

    def restore(_):
        for name, tensor in live.items():
            tensor.copy_(weights[name])

    pieces = engine_layout.find_pieces(tensors, live, load, restore, unclear_names)
    assert all(torch.equal(tensor, weights[name]) for name, tensor in live.items())
    return pieces


def watch_pieces(tensors, live, load):
    """What a watched load finds out, without any numbers."""

    def refuse(*_, **__):
        raise AssertionError("numbers were loaded")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_layout, "number_pieces", refuse)
        return find_pieces(tensors, live, load)


WAYS = pytest.mark.parametrize("find", [watch_pieces, number_pieces])


def require_learnt(pieces, engine, weights):
    """What lies in each piece is that box of its tensor."""
    engine.load(weights.items())
    for piece in pieces:
        assert torch.equal(piece.view(engine.live).cpu(), weights[piece.tensor][piece.region.slices]), piece


@WAYS
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn])
def test_every_element_is_found(ranks, dtype, find):
    """Fused, sharded, padded, stacked, transposed and replicated: all ranks together have every element."""
    weights = checkpoint(dtype)
    there = {name: np.zeros(tensor.shape, int) for name, tensor in weights.items()}
    for rank in range(ranks):
        engine = Engine(rank, ranks, dtype)
        pieces = find(named(weights), engine.live, engine.load)
        require_learnt(pieces, engine, weights)
        for piece in pieces:
            there[piece.tensor][piece.region.slices] += 1
        assert not any(piece.live == "table" for piece in pieces)
    assert all((found >= 1).all() for found in there.values())
    assert there["model.layers.0.q.weight"].max() == 1
    assert there["model.layers.0.k.weight"].max() == max(1, ranks // 2)


@WAYS
def test_few_pieces(find):
    """A box of a tensor is one piece, wherever it lies and however its axes turned."""
    engine = Engine()
    pieces = find(named(checkpoint()), engine.live, engine.load)
    assert len(pieces) == len(checkpoint())
    (down,) = [piece for piece in pieces if piece.tensor == "model.layers.1.experts.1.down.weight"]
    assert down.strides == engine.live["w2"].stride()[1:]
    assert down.region == whole((12, 8))


def test_layers_in_groups(monkeypatch):
    """Where there is no room for all layers at once, they are learnt one after the other, to the same end."""
    engine, weights = Engine(1, 2), checkpoint()
    expected = number_pieces(named(weights), engine.live, engine.load)
    monkeypatch.setattr(numbering, "GROUP_ELEMENTS", 300)
    assert len([*numbering._groups(named(weights))]) == 3
    assert sorted(map(repr, number_pieces(named(weights), engine.live, engine.load))) == sorted(map(repr, expected))


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x * 0.5,
        lambda x: x + 1,
        lambda x: -x,
        lambda x: x.flip(0) + x,
        lambda x: (x / x.abs().max() * 100).round(),
        lambda x: x.clamp(max=100),
        lambda x: x.abs().amax().expand(x.shape),
    ],
)
def test_what_is_no_copy_is_refused(change):
    """Scaled, shifted, summed, quantized, clipped or reduced: the engine's tensor is named."""
    engine, weights = Engine(), checkpoint()

    def load(some):
        engine.load((name, change(tensor) if name.endswith("v.weight") else tensor) for name, tensor in some)

    with pytest.raises(UnsupportedTensor, match="'qkv' is not a copy"):
        find_pieces(named(weights), engine.live, load)


def test_what_is_no_copy_is_named_and_the_rest_is_found():
    """Of two layers that are not plain copies throughout, and a tensor outside layers, only those two are given up."""
    engine, weights = Engine(), checkpoint()

    def load(some):
        for name, tensor in some:
            engine.load_one(name, tensor * 2 if name.endswith(("v.weight", "1.gate.weight")) else tensor)

    names = {}
    pieces = find_pieces(named(weights), engine.live, load, names)
    unclear = {name for name in weights if ".layers." in name}
    assert {"qkv", "o", "o.bias", "w13", "w2"} | unclear == names.keys()
    assert "'qkv' is not a copy" in names["model.layers.0.q.weight"]
    assert "'w13' is not a copy" in names["model.layers.1.experts.0.down.weight"]
    assert {piece.tensor for piece in pieces} == weights.keys() - unclear
    require_learnt(pieces, engine, weights)


def test_padding_that_was_never_loaded():
    """What every load writes as a constant comes from no checkpoint, also where other bits are copied back."""
    engine, weights = Engine(), checkpoint()
    before = {name: tensor.clone() for name, tensor in engine.live.items()}

    def restore(_):
        for name, tensor in engine.live.items():
            tensor.copy_(before[name])

    pieces = engine_layout.find_pieces(named(weights), engine.live, engine.load, restore, restores_by_load=False)
    assert all(torch.equal(tensor, before[name]) for name, tensor in engine.live.items())
    require_learnt(pieces, engine, weights)
    assert {piece.tensor for piece in pieces} == weights.keys()
    assert not engine.live["embed"].equal(before["embed"])


def test_a_value_made_of_weights_is_refused():
    """A scale, say, beside weights that are copies: also where it is the same for each digit of all numbers."""
    live = {"w": torch.ones(256, 256), "scale": torch.ones(1)}

    def load(some):
        for _, tensor in some:
            live["w"].copy_(tensor)
            live["scale"].fill_(tensor.max() / 448)

    with pytest.raises(UnsupportedTensor, match="'scale' is not a copy"):
        find_pieces([CheckpointTensor("w", (256, 256), torch.float32)], live, load)


def test_what_is_scattered_is_refused(monkeypatch):
    """A permutation that does not fold is not worth following; the message says which tensor lies in how many."""
    monkeypatch.setattr(numbering, "MAX_PIECES", 40)
    live = {"w": torch.zeros(100)}
    order = torch.randperm(100, generator=torch.Generator().manual_seed(1))
    with pytest.raises(UnsupportedTensor, match=r"'w' is in \d+ pieces in 'w'"):
        find_pieces(
            [CheckpointTensor("w", (100,), torch.float32)],
            live,
            lambda some: [live["w"].copy_(t[order]) for _, t in some],
        )


@WAYS
def test_buffers_of_any_dtype(find):
    """What is not loaded may have a dtype that no weights have."""
    live = {"w": torch.zeros(64), "mask": torch.ones(3, dtype=torch.bool), "steps": torch.zeros(2, dtype=torch.int64)}
    (piece,) = find(
        [CheckpointTensor("w", (64,), torch.float32)], live, lambda some: [live["w"].copy_(t) for _, t in some]
    )
    assert piece.live == "w"


@WAYS
def test_memory_with_gaps(find):
    """A tensor whose rows are padded in memory: what lies between them is left alone."""
    padded = torch.full((4, 8), 3.0)
    live = {"w": padded[:, :5]}
    (piece,) = find(
        [CheckpointTensor("w", (4, 5), torch.float32)], live, lambda some: [live["w"].copy_(t) for _, t in some]
    )
    assert piece == Piece("w", whole((4, 5)), "w", 0, (8, 1))
    assert bool((padded[:, 5:] == 3).all())


@given(st.data())
def test_folding_loses_nothing(data):
    """Elements in any order in memory, with gaps: the boxes have just these elements, each where it lies."""
    shape = tuple(data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)))
    numel = int(np.prod(shape))
    axes = data.draw(st.permutations(range(len(shape))))
    index = np.arange(numel).reshape(shape).transpose(axes).reshape(-1)
    kept = np.array(data.draw(st.lists(st.booleans(), min_size=numel, max_size=numel)))
    at = np.cumsum(np.array(data.draw(st.lists(st.sampled_from([1, 1, 1, 2]), min_size=numel, max_size=numel))))
    found = {}
    boxes = join_all(StridedBoxes.of(at[kept], index[kept], shape)) if kept.any() else None
    for region, offset, strides in boxes.each() if boxes is not None else ():
        for inner in np.ndindex(*region.size):
            flat = sum((a + i) * s for a, i, s in zip(region.start, inner, row_major(shape), strict=True))
            assert flat not in found
            found[flat] = offset + sum(i * s for i, s in zip(inner, strides, strict=True))
    assert found == dict(zip(index[kept].tolist(), at[kept].tolist(), strict=True))
