"""Tracking while steps fail, others write, and parameters move in memory."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest

import sparserl
import sparserl.weights.memory
from sparserl import Part, Region, Shards
from sparserl.session.baseline import HostBaseline, NoBaseline
from sparserl.sources import track
from sparserl.sources import tracked_rows as rows
from tests.sources.small_trainer import BF16, SHAPES, Both, Fixed, Line, Trainer, adam, changed, known, sgd

torch = pytest.importorskip("torch")


@pytest.mark.parametrize("shape", SHAPES)
def test_steps_that_raise(shape):
    """A step that fails half way has changed some parameters; these changes are published, now or with the next."""
    trainer = Trainer(shape, sgd)
    both = Both(trainer)
    trainer.backward(0)
    trainer.step()
    for then in ("publish", "step"):
        trainer.backward(1)
        last = trainer.optimizer.param_groups[0]["params"][-1]
        momentum = trainer.optimizer.state[last]["momentum_buffer"]
        trainer.optimizer.state[last]["momentum_buffer"] = torch.zeros(3, 3, 3)
        with pytest.raises(RuntimeError):
            trainer.optimizer.step()
        trainer.optimizer.state[last]["momentum_buffer"] = momentum
        if then == "step":
            trainer.step()
        shards, (kept, _) = both.publish()
        assert all(part.marks is not None for part in shards.parts if part.tensor == "embed.weight")
        assert kept.changed


@pytest.mark.parametrize("shape", SHAPES)
def test_writes_of_others_are_noticed(shape):
    """A checkpoint that is loaded between steps: torch counts these writes, and the parts are compared in full."""
    trainer = Trainer(shape, adam)
    both = Both(trainer)
    with torch.no_grad():
        trainer.model.down.weight[3] = 7
        for weight, master in trainer.masters.items():
            master.copy_(weight)
    shards, (kept, none) = both.publish()
    assert 0 < kept.changed <= 48
    assert [entry.dense for entry in none] == [True]
    with torch.no_grad():
        trainer.model.down.weight[2] = 7
        for weight, master in trainer.masters.items():
            master.copy_(weight)
    trainer.backward(1)
    trainer.step()
    both.publish()
    trainer.backward(2)
    trainer.step()
    shards, _ = both.publish()
    assert sum(part.marks is not None for part in shards.parts) == 6


def test_uncounted_writes_are_found_by_the_sums():
    """Without a baseline, what was written through `.data` shows in the digest read, and the part is sent whole."""
    trainer = Trainer("pure", adam)
    source = trainer.source
    line = Line(NoBaseline(source.weights()), trainer.published())
    source.committed()
    trainer.backward(0)
    trainer.step()
    trainer.model.down.weight.data[3] = 7
    shards = source.weights()
    assert all(part.marks is not None for part in shards.parts if part.tensor == "down.weight")
    patch = line.publish(shards, trainer.published())
    assert {entry.tensor for entry in patch if entry.dense} >= {"down.weight"}


def test_failed_publishes_and_steps_in_flight():
    """Marks stay until a version is committed; steps during a flight count for the next, and leave this one alone."""
    weight = torch.nn.Parameter(torch.zeros(100, dtype=BF16))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    source = track(optimizer, Fixed({"w": weight.detach()}))
    source.weights()
    source.committed()

    def step(at):
        weight.grad = torch.zeros_like(weight)
        weight.grad[at] = 1.0
        optimizer.step()

    def seen(shards):
        return shards.parts[0].marks.between(0, 100).tolist()

    step(1)
    failed = source.weights()
    step(2)
    again = source.weights()
    assert seen(failed) == [1]
    assert seen(again) == [1, 2]
    assert again.parts[0].marks.run(0, 100)[1].tolist() == [0, 0]
    step(3)
    assert seen(again) == [1, 2]
    source.committed()
    assert seen(source.weights()) == [3]


class Experts:
    """Many small tensors of several dtypes, boxes of larger tensors, some of them strided: a source of shards."""

    def __init__(self, count):
        torch.manual_seed(0)
        kinds = (BF16, torch.float32, torch.float16)
        self.params = [torch.nn.Parameter(torch.randn(3 + i % 5, 4 + i % 3).to(kinds[i % 3])) for i in range(count)]
        self.table = sparserl.tensor_table(
            {f"w{i}": torch.empty(2 * p.shape[0], p.shape[1], dtype=p.dtype) for i, p in enumerate(self.params)}
        )

    def weights(self):
        parts = []
        for i, p in enumerate(self.params):
            data = p.detach()
            for low, high in ((0, 2), (2, p.shape[1])) if i % 4 == 0 else ((0, p.shape[1]),):
                region = Region((p.shape[0], low), (p.shape[0], high - low))
                parts.append(Part(f"w{i}", region, data[:, low:high]))
        return Shards(self.table, parts)


def test_many_parts_and_gradients_that_come_and_go():
    """Any subset of parameters has gradients; the old bits of every part are those of its own changes."""
    rng = np.random.default_rng(0)
    experts = Experts(60)
    optimizer = torch.optim.SGD(experts.params, lr=0.05)
    source = track(optimizer, experts)
    source.weights()
    source.committed()
    for round in range(6):
        before = [part.data.clone() for part in experts.weights().parts]
        for p in experts.params:
            p.grad = None
            if round == 1 or (round and rng.random() < 0.5):
                p.grad = torch.randn(p.shape).to(p.dtype) * (torch.rand(p.shape) < 0.3)
        optimizer.step()
        shards = source.weights()
        assert all(known(shards))
        for part, was in zip(shards.parts, before, strict=True):
            old, new = (Shards(experts.table, [Part(part.tensor, part.region, data)]) for data in (was, part.data))
            patch = sparserl.diff(old, new)
            assert changed(part).size == patch.changed
        source.committed()


def test_plans_are_kept_while_nothing_moves(monkeypatch):
    """Steps look up no part's memory one by one, until something has moved; then all are, once."""
    calls = []
    monkeypatch.setattr(
        rows, "memory_of", lambda name, data: calls.append(name) or sparserl.weights.tensors.memory_of(name, data)
    )
    model = torch.nn.Sequential(*(torch.nn.Linear(4, 4, dtype=BF16) for _ in range(20)))
    optimizer = sgd(model.parameters())
    source = track(optimizer, model)

    def steps(count):
        for _ in range(count):
            for p in model.parameters():
                p.grad = torch.ones_like(p)
            optimizer.step()
        seen = len(calls)
        calls.clear()
        return seen

    source.weights()
    assert steps(0) == 40
    assert steps(3) == 0
    model[3].weight.data = model[3].weight.data.clone()
    assert steps(3) == 40
    assert steps(3) == 0


@pytest.mark.parametrize("shape", SHAPES)
def test_parameters_that_move_between_steps(shape):
    """Moved, replaced, or given another layout: exact, and known again after one publish."""
    trainer = Trainer(shape, sgd)
    both = Both(trainer)
    model, optimizer = trainer.model, trainer.optimizer

    def move():
        model.down.weight.data = model.down.weight.data.clone()

    def turn():
        model.down.weight.data = model.down.weight.data.t().clone(memory_format=torch.contiguous_format).t()

    def replace():
        old = model.gate_up.weight
        model.gate_up.weight = torch.nn.Parameter(old.detach() + 1)
        swap = {old: model.gate_up.weight}
        if trainer.masters:
            swap = {trainer.masters.pop(old): torch.nn.Parameter(model.gate_up.weight.detach().float())}
            trainer.masters[model.gate_up.weight] = next(iter(swap.values()))
        for group in optimizer.param_groups:
            group["params"] = [swap.get(p, p) for p in group["params"]]

    for change, name in ((move, "down.weight"), (turn, "down.weight"), (replace, "gate_up.weight")):
        for at in (0, 1):  # before the first step after a publish, or the second
            for step in range(3):
                if step == at:
                    change()
                trainer.backward(step)
                trainer.step()
            shards, (kept, _) = both.publish()
            assert {part.tensor for part in shards.parts if part.marks is None} >= {name}
            assert kept.changed
            trainer.backward(9)
            trainer.step()
            shards, _ = both.publish()
            assert sum(known(shards)) == 6


def test_steps_that_move_parameters():
    """A step that writes new bits elsewhere and makes that the parameter: its changes are marked."""
    model = torch.nn.Sequential(torch.nn.Linear(8, 8, dtype=BF16), torch.nn.Linear(8, 8, dtype=BF16))
    source = track(None, model, params=model.parameters())
    lines = [
        Line(kind(source.weights()), {n: t.clone() for n, t in model.state_dict().items()})
        for kind in (HostBaseline, NoBaseline)
    ]
    source.committed()
    for at in range(3):
        with source.step():
            new = model[1].weight.detach().clone()
            new[at] *= 2
            model[1].weight.data = new
        shards = source.weights()
        assert all(known(shards))
        assert [n for part in shards.parts if (n := changed(part).size)] == [8]
        for line in lines:
            assert not any(entry.dense for entry in line.publish(shards, model.state_dict()))
        source.committed()
    with source.step():
        model[0].weight.data = model[0].weight.data.clone()
        model[1] = torch.nn.Linear(8, 8, bias=False, dtype=BF16)  # another tensor table: for the publisher to refuse
    assert not any(known(source.weights()))


def test_nothing_is_held_between_steps():
    """What a trainer frees between two steps is free, although it was tracked."""
    memory = np.zeros(1000, np.float32)
    weight = torch.nn.Parameter(torch.from_numpy(memory))
    source = track(None, Fixed({"w": weight}), params=[weight])
    source.weights()
    source.committed()
    with source.step():
        weight.data[3] = 1
    assert source.weights().parts[0].marks.count == 1
    alive = weakref.ref(memory)
    weight.data = torch.zeros(1000)
    del memory
    gc.collect()
    assert alive() is None
