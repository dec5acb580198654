"""Tracking at the optimizer step: every publish against a full comparison, bit by bit."""

from __future__ import annotations

import numpy as np
import pytest

import sparserl
from sparserl import errors
from sparserl.session.baseline import HostBaseline, NoBaseline
from sparserl.sources import track
from sparserl.sources import tracked_rows as rows
from sparserl.weights import batches
from tests.sources.small_trainer import BF16, SHAPES, Both, Fixed, Line, Trainer, adam, bits, changed, sgd

torch = pytest.importorskip("torch")


@pytest.mark.parametrize("make", [pytest.param(sgd, marks=pytest.mark.long), adam])
@pytest.mark.parametrize("shape", SHAPES)
def test_every_publish_is_exact(shape, make):
    """Several steps a publish, accumulated gradients, skipped steps, buffers that change outside: nothing is missed."""
    rng = np.random.default_rng([SHAPES.index(shape), make is sgd])
    trainer = Trainer(shape, make)
    both = Both(trainer)
    sparse = 0
    for round in range(10):
        for step in range(rng.integers(0, 4)):
            for micro in range(rng.integers(1, 3)):
                trainer.backward(100 * round + 10 * step + micro)
            if rng.random() < 0.2:  # an overflow: the step is not taken
                trainer.optimizer.zero_grad()
            else:
                trainer.step()
        if rng.random() < 0.5:
            trainer.model.router_bias.data[int(rng.integers(8))] += 0.5
        shards, (kept, none) = both.publish()
        tracked = {part.tensor: part.marks is not None for part in shards.parts}
        assert {name for name, known in tracked.items() if not known} == {
            *("norm.running_mean", "norm.running_var", "norm.num_batches_tracked", "router_bias")
        }
        sparse += sum(not entry.dense for entry in none)
        assert kept.changed <= none.changed
    assert sparse > 10


@pytest.mark.parametrize("shape", SHAPES)
def test_marks_of_one_step_are_just_the_changes(shape):
    """After one step exactly the elements whose published bits differ are marked; a step that moves none marks none."""
    trainer = Trainer(shape, adam)
    both = Both(trainer)
    for lr in (2e-4, 0.0):
        trainer.optimizer.param_groups[0]["lr"] = lr
        before = trainer.published()
        trainer.backward(1)
        trainer.step()
        shards, _ = both.publish()
        for part in shards.parts:
            if part.marks is not None:
                differ = sparserl.diff({"x": before[part.tensor]}, {"x": trainer.published()[part.tensor]}).changed
                assert changed(part).size == differ
                assert (differ == 0) == (lr == 0.0)


def test_marks_add_up_over_steps():
    """What an early step changed is marked although the last step left it alone, and no optimizer state tells of it."""
    weight = torch.nn.Parameter(torch.zeros(1000, dtype=BF16))
    optimizer = torch.optim.SGD([weight], lr=1.0)  # without any state
    source = track(optimizer, Fixed({"w": weight.detach()}))
    source.weights()
    source.committed()
    for at in (3, 700, 3):
        weight.grad = torch.zeros_like(weight)
        weight.grad[at] = 1.0
        optimizer.step()
    part = source.weights().parts[0]
    assert part.marks.between(0, 1000).tolist() == [3, 700]
    assert part.marks.run(0, 1000)[1].tolist() == [0, 0]  # what they had before the first step


@pytest.mark.parametrize("shape", SHAPES)
def test_frozen_and_unfrozen(shape):
    """A frozen parameter has no marks, even if something else writes to it; unfrozen, it is compared in full once."""
    trainer = Trainer(shape, adam)
    both = Both(trainer)
    weight = trainer.model.down.weight
    written = trainer.masters.get(weight, weight)

    def marked(shards):
        return {part.tensor: part.marks is not None for part in shards.parts}["down.weight"]

    def train():
        trainer.backward(5)
        trainer.step()
        return both.publish()[0]

    assert marked(train())
    written.requires_grad_(False)
    weight.data[0] *= 2
    written.data[0] = weight.data[0]
    written.grad = None
    assert not marked(train())
    weight.data[1] *= 2
    written.data[1] = weight.data[1]
    written.requires_grad_(True)
    assert not marked(train())  # what happened since the last version is only known in part
    assert marked(train())


def test_parameters_that_come_later():
    """`add_param_group`: compared in full until it has been tracked from one publish to the next."""
    trainer = Trainer("pure", lambda params: sgd([p for p in params if p.ndim > 1]))
    both = Both(trainer)
    bias = trainer.model.gate_up.bias
    known = []
    for round in range(4):
        if round == 1:
            trainer.optimizer.add_param_group({"params": [bias]})
        trainer.backward(round)
        trainer.step()
        shards, _ = both.publish()
        known.append({part.tensor: part.marks is not None for part in shards.parts}["gate_up.bias"])
    assert known == [False, False, True, True]


def test_bit_patterns():
    """Signs of zeros and NaNs count as changes; a NaN that stays does not."""
    for shape in ("pure", "cast"):
        start = torch.tensor([0.0, -0.0, float("nan"), 1.0] * 3, dtype=BF16 if shape == "pure" else torch.float32)
        weight = torch.nn.Parameter(start.clone())
        source = track(None, Fixed({"w": weight.detach()}), params=[weight], cast=BF16)
        first = source.weights()
        assert first.parts[0].marks is None
        line = Line(HostBaseline(first), {"w": start.to(BF16)})
        source.committed()
        with source.step():
            weight.data[0], weight.data[1], weight.data[3] = -0.0, 0.0, float("nan")
        shards = source.weights()
        assert shards.parts[0].marks.between(0, 12).tolist() == [0, 1, 3]
        assert line.publish(shards, {"w": weight.detach().to(BF16)}).changed == 3


def test_several_optimizers_and_closures():
    """Two optimizers over one module; LBFGS, which makes gradients inside its step; a parameter without a gradient."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)).to(BF16)
    x = torch.randn(4, 8, dtype=BF16)
    first = torch.optim.LBFGS(model[0].parameters(), lr=1.0, max_iter=2)
    second = sgd([*model[1].parameters(), *model[2].parameters()])
    source = track([first, second], model)
    line = Line(HostBaseline(source.weights()), {n: t.clone() for n, t in model.state_dict().items()})
    source.committed()

    def closure():
        first.zero_grad()
        value = model[1](model[0](x)).float().square().sum()
        value.backward()
        return value

    for _ in range(3):
        first.step(closure)
        second.step()
        shards = source.weights()
        assert all(part.marks is not None for part in shards.parts)
        assert line.publish(shards, model.state_dict()).changed
        assert {part.tensor for part in shards.parts if not changed(part).size} == {"2.weight", "2.bias"}
        source.committed()
    source.close()
    first.step(closure)
    assert not any(part.marks is not None and changed(part).size for part in source.weights().parts)


def test_masters_of_slices():
    """A fused weight that is published as two tensors, one of its masters known by a name."""
    fused = torch.randn(6, 4).to(BF16)
    norm = torch.randn(4).to(BF16)
    masters = [torch.nn.Parameter(t.float()) for t in (fused, norm)]
    optimizer = sgd(masters)
    weights = {"gate": fused[:4], "up": fused[4:], "norm": norm}
    source = track(optimizer, Fixed(weights), masters={fused: masters[0], "norm": masters[1]})
    line = Line(NoBaseline(source.weights()), {n: t.clone() for n, t in weights.items()})
    source.committed()
    for master in masters:
        master.grad = torch.randn_like(master)
    optimizer.step()
    assert bits(fused) == bits(masters[0].to(BF16))
    assert all(changed(part).size for part in source.weights().parts)
    line.publish(source.weights(), weights)
    with pytest.raises(errors.TensorMismatch, match="master"):
        track(optimizer, Fixed(weights), masters={"gate": masters[0]}).weights()


@pytest.fixture
def small_pieces(monkeypatch):
    """Tensors of a thousand bytes count as large: they are cut, as those of many megabytes are."""
    for where in (batches, rows):
        monkeypatch.setattr(where, "PIECE_BYTES", 1000)


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("shape", SHAPES)
def test_large_parameters(shape, threads):
    """Parts that are cut into pieces are marked in full."""
    trainer = Trainer(shape, adam, threads)
    assert trainer.model.embed.weight.nbytes > 3000
    both = Both(trainer)
    for round in range(3):
        trainer.backward(round)
        trainer.step()
        shards, (kept, none) = both.publish()
        counts = {part.tensor: changed(part).size for part in shards.parts if part.marks is not None}
        assert counts["embed.weight"] > 0
        assert kept.changed
        assert "embed.weight" not in {entry.tensor for entry in none if entry.dense}


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("mastered", [False, True])
def test_a_mapping_may_have_a_tensor_twice(mastered):
    """It is tracked under both names, and a master is copied to it when both were compared."""
    weight = torch.nn.Parameter(torch.randn(50, 32).to(BF16))
    master = torch.nn.Parameter(weight.detach().float())
    optimizer = torch.optim.SGD([master if mastered else weight], lr=1.0)
    weights = {name: weight.detach() for name in ("embed", "head")}
    source = track(optimizer, Fixed(weights), masters={weight: master} if mastered else None)
    line = Line(NoBaseline(source.weights()), {name: tensor.clone() for name, tensor in weights.items()})
    source.committed()
    for row in range(3):
        written = optimizer.param_groups[0]["params"][0]
        written.grad = torch.zeros_like(written)
        written.grad[row] = 1.0
        optimizer.step()
        shards = source.weights()
        counts = [changed(part).size for part in shards.parts]
        assert counts[0] == counts[1] > 0
        assert not any(entry.dense for entry in line.publish(shards, weights))
        source.committed()


def test_masters_by_either_name_of_a_tied_tensor():
    """The name that a source leaves out names the tensor, too."""
    trainer = Trainer("pure", adam)
    model = trainer.model
    masters = {name: torch.nn.Parameter(model.embed.weight.detach().float()) for name in ("head.weight",)}
    optimizer = torch.optim.SGD(masters.values(), lr=1.0)
    source = track(optimizer, model, masters=masters)
    source.weights()
    source.committed()
    (master,) = masters.values()
    master.grad = torch.ones_like(master)
    optimizer.step()
    (part,) = (part for part in source.weights().parts if part.marks is not None)
    assert part.tensor == "embed.weight"
    assert bits(model.head.weight) == bits(master.to(BF16))


def test_masters_of_strided_weights(small_pieces):
    """New bits land in weights that are not contiguous, and nowhere else."""
    wide = torch.zeros(50, 60, dtype=BF16)
    weights = {"t": wide[:, :20].t(), "u": wide[:, 20:40]}
    masters = {name: torch.nn.Parameter(w.float()) for name, w in weights.items()}
    optimizer = torch.optim.SGD(masters.values(), lr=1.0)
    source = track(optimizer, Fixed(weights), masters=masters)
    line = Line(NoBaseline(source.weights()), {n: t.clone() for n, t in weights.items()})
    source.committed()
    for _ in range(2):
        for master in masters.values():
            master.grad = torch.randn(master.shape) * (torch.rand(master.shape) < 0.1)
        optimizer.step()
        for name, master in masters.items():
            assert bits(weights[name]) == bits(master.to(BF16))
        assert bits(wide[:, 40:]) == bytes(2 * 50 * 20)
        assert not any(entry.dense for entry in line.publish(source.weights(), weights))
        source.committed()


def test_what_is_refused():
    """No optimizer and nothing that says what is written; the two the other way around."""
    layer = torch.nn.Linear(2, 2)
    with pytest.raises(errors.TensorMismatch, match="params"):
        track(None, layer)
    with pytest.raises(errors.UnsupportedTensor, match=r"Linear is no optimizer of torch: track\(optimizer, model\)"):
        track(layer, torch.optim.SGD(layer.parameters()))


def test_an_optimizer_of_other_weights_is_told(caplog):
    """Nothing is lost, and nothing is saved either."""
    model, other = (torch.nn.Linear(4, 4) for _ in range(2))
    source = track(torch.optim.SGD(other.parameters(), lr=1.0), model)
    source.weights()
    assert "nothing is tracked" in caplog.text


def test_masters_of_unknown_names_are_refused():
    """Else the weights would never follow their masters."""
    model = torch.nn.Linear(4, 4, bias=False, dtype=torch.bfloat16)
    master = torch.zeros(4, 4, requires_grad=True)
    source = track(torch.optim.SGD([master], lr=1.0), model, masters={"wieght": master})
    with pytest.raises(errors.TensorMismatch, match="'wieght', and the source no tensor"):
        source.weights()
