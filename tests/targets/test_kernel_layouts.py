"""Experts that a kernel permutes, packs or quantizes when they are loaded: followed bit for bit, or refused by name."""

from __future__ import annotations

import pytest
import torch

import sparserl
from sparserl.errors import UnsupportedTensor
from sparserl.targets import engine_layout, numbering
from sparserl.targets.engine import EngineTarget
from sparserl.targets.engine_layout import find_pieces
from sparserl.targets.pieces import parts_of
from tests.targets.engines import named

EXPERTS, INNER, HIDDEN = 2, 16, 32
TILE = torch.arange(16).view(2, 8).t().reshape(-1)  # the order of rows in a tile, as matrix units read them


def checkpoint(seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = {"gate": (INNER, HIDDEN), "up": (INNER, HIDDEN), "down": (HIDDEN, INNER)}
    return {
        f"layers.0.experts.{expert}.{name}.weight": torch.randn(shape, generator=generator).to(torch.bfloat16)
        for expert in range(EXPERTS)
        for name, shape in shapes.items()
    }


def shuffled(weight):
    """Rows of gate and up by turns, then in another order within tiles, in blocks of columns.

    As FlashInfer's `reorder_rows_for_gated_act_gemm`, `shuffle_matrix_a` (which moves bytes) and `BlockMajorK` do.
    """
    experts, rows, columns = weight.shape
    by_turns = weight.view(experts, 2, rows // 2, columns).transpose(1, 2).reshape(weight.shape)
    order = torch.arange(rows).view(-1, 16)[:, TILE].reshape(-1)
    tiles = by_turns.contiguous().view(torch.uint8)[:, order].view(weight.dtype)
    return tiles.view(experts, rows, columns // 8, 8).permute(0, 2, 1, 3).contiguous()


def vnni(weight):
    """Tiles of rows, in which pairs of columns are next to each other: the packed layout of a CPU's matrix units."""
    experts, rows, columns = weight.shape
    return weight.view(experts, rows // 16, 16, columns // 2, 2).transpose(2, 3).contiguous()


def padded(weight):
    return torch.nn.functional.pad(weight, (0, 8))[..., :-8]


def scaled(weight):
    return weight / weight.abs().amax()


def quantized(weight):
    return (weight.float() * 16).round().clamp(-127, 127).to(torch.int8)


class Experts(torch.nn.Module):
    """The experts of a layer as a checkpoint has them; then as a kernel wants them."""

    def __init__(self, permute):
        super().__init__()
        self.permute = permute
        for name, shape in (("w13", (EXPERTS, 2 * INNER, HIDDEN)), ("w2", (EXPERTS, HIDDEN, INNER))):
            parameter = torch.nn.Parameter(torch.empty(shape, dtype=torch.bfloat16), requires_grad=False)
            self.register_parameter(name, parameter)

    def load(self, weights):
        for name, tensor in weights:
            expert, part = name.split(".")[3:5]
            whole = (self.w2 if part == "down" else self.w13).data[int(expert)]
            (whole if part == "down" else whole.chunk(2)[part == "up"]).copy_(tensor)

    def process_weights_after_loading(self):
        for name in ("w13", "w2"):
            processed = self.permute(getattr(self, name).data)
            setattr(self, name, torch.nn.Parameter(processed, requires_grad=False))


def started(permute, weights):
    experts = Experts(permute)
    experts.load(weights.items())
    experts.process_weights_after_loading()
    return experts


def learnt(experts, weights):
    """Where an engine keeps these weights. As in vLLM, a reload is processed elsewhere and copied to where they are."""

    def load(some):
        other = Experts(experts.permute)
        other.load(some)
        other.process_weights_after_loading()
        experts.w13.data.copy_(other.w13.data)
        experts.w2.data.copy_(other.w2.data)

    return find_pieces(named(weights), parts_of(experts), load, lambda _: load(weights.items()))


def bits(tensor):
    return tensor.data.contiguous().view(torch.int16)


@pytest.mark.parametrize("permute", [shuffled, vnni, padded])
def test_permuted_experts_follow(tmp_path, permute):
    """After each of some sparse syncs, every bit is what the engine itself makes of the new checkpoint."""
    weights = checkpoint()
    experts = started(permute, weights)
    pieces = learnt(experts, weights)
    with sparserl.Publisher(f"file://{tmp_path}/run", weights) as publisher:
        publisher.publish()
        target = EngineTarget(pieces, lambda: parts_of(experts))
        with sparserl.Subscriber(f"file://{tmp_path}/run", target) as subscriber:
            subscriber.sync()
            for seed in range(1, 4):
                for name, new in checkpoint(seed).items():
                    chosen = torch.rand(new.shape, generator=torch.Generator().manual_seed(seed)) < 0.05
                    weights[name][chosen] = new[chosen]
                publisher.publish()
                report = subscriber.sync()
                assert report.kind == "patch"
                fresh = started(permute, weights)
                assert torch.equal(bits(experts.w13), bits(fresh.w13))
                assert torch.equal(bits(experts.w2), bits(fresh.w2))


@pytest.mark.parametrize("permute", [scaled, quantized])
def test_what_a_kernel_computes_is_refused(permute):
    """Scaled or quantized when it is loaded: the parameter is named, and nothing is learnt."""
    weights = checkpoint()
    with pytest.raises(UnsupportedTensor, match=r"^'w13' is not"):
        learnt(started(permute, weights), weights)


def test_too_many_pieces_are_refused(monkeypatch):
    """A layout that falls into too many boxes: the tensor and the parameter are named."""
    monkeypatch.setattr(numbering, "MAX_PIECES", 10)
    weights = checkpoint()
    with pytest.raises(UnsupportedTensor, match=r"experts\.0\.gate\.weight' is in \d+ pieces in 'w13'"):
        learnt(started(shuffled, weights), weights)


def test_copies_beside_the_weights_are_refused():
    """A kernel that has its own copy of a weight would go on with the old one: both parameters are named."""
    weights = checkpoint()
    experts = started(lambda weight: weight, weights)
    experts.packed = torch.nn.Parameter(experts.w2.data.clone(), requires_grad=False)

    def load(some):
        experts.load(some)
        experts.packed.data.copy_(experts.w2.data)

    with pytest.raises(UnsupportedTensor, match=r"'w2' and 'packed' both have .* of '.*down\.weight'"):
        find_pieces(named(weights), parts_of(experts), load, lambda _: load(weights.items()))


def test_views_of_weights_are_no_other_place(monkeypatch):
    """A parameter that is a view of another, as MLA's of `kv_b_proj`, wherever it begins and whichever comes first.

    Loaders copy such views onto themselves, which loses sight of nothing.
    """
    monkeypatch.setattr(engine_layout, "number_pieces", None)
    weights = checkpoint()
    experts = started(lambda weight: weight, weights)
    own = experts._parameters
    views = {"upper": own["w13"].data[:, :INNER], "lower": own["w13"].data[:, INNER // 2 :].mT}
    first = {name: torch.nn.Parameter(view, requires_grad=False) for name, view in views.items()}
    experts._parameters = first | own | {"turned": torch.nn.Parameter(own["w13"].data.mT, requires_grad=False)}
    assert [*parts_of(experts)] == ["w13", "w2"]

    def load(some):
        experts.load(some)
        experts.lower.data.copy_(experts.w13.data[:, INNER // 2 :].mT)

    pieces = find_pieces(named(weights), parts_of(experts), load, lambda _: load(weights.items()))
    assert {piece.live for piece in pieces} == {"w13", "w2"}
    assert len(pieces) == len(weights)


def test_interleaved_weights_are_no_views():
    """Memory between the elements of a tensor belongs to others."""
    both = torch.zeros(6, 2)
    model = torch.nn.Module()
    for name, tensor in (("even", both[:, 0]), ("odd", both[1:4, 1])):
        model.register_buffer(name, tensor)
    assert [*parts_of(model)] == ["even", "odd"]
