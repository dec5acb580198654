"""Tracking at the optimizer step: every publish against a full comparison, bit by bit."""

from __future__ import annotations

import gc
import os
import traceback
import warnings
import weakref

import numpy as np
import pytest

import sparserl
from sparserl import Part, Patch, Region, Shards, errors
from sparserl.session.baseline import HostBaseline, NoBaseline
from sparserl.sources import track
from sparserl.sources import tracked_rows as rows
from sparserl.sources.layout import boxes
from sparserl.weights import pieces
from tests.session.ranks import CONTEXT

torch = pytest.importorskip("torch")
BF16 = torch.bfloat16


class Model(torch.nn.Module):
    """An embedding tied to the head, a fused projection, running statistics, a router whose bias no optimizer sees."""

    def __init__(self, dtype):
        super().__init__()
        self.embed = torch.nn.Embedding(50, 32, dtype=dtype)
        self.gate_up = torch.nn.Linear(32, 96, dtype=dtype)
        self.down = torch.nn.Linear(48, 32, bias=False, dtype=dtype)
        self.norm = torch.nn.BatchNorm1d(32)  # float32 in every shape
        self.head = torch.nn.Linear(32, 50, bias=False, dtype=dtype)
        self.head.weight = self.embed.weight
        self.register_buffer("router_bias", torch.zeros(8))

    def forward(self, tokens):
        x = self.embed(tokens).mean(1)
        gate, up = self.gate_up(x).chunk(2, -1)
        x = x + self.down(torch.nn.functional.silu(gate) * up)
        return self.head(self.norm(x.float()).to(x.dtype))


def loss(model, seed):
    tokens = torch.randint(0, 50, (16, 5), generator=torch.Generator().manual_seed(seed))
    return torch.nn.functional.cross_entropy(model(tokens).float(), tokens[:, 0])


def narrow(name):
    """What is published in bf16, of a module in float32."""
    return None if "norm" in name or "router" in name else BF16


def bits(tensor):
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().tobytes()


class Trainer:
    """A module, its optimizer and its tracker, in one of the shapes that trainers have."""

    def __init__(self, shape, make, threads=None):
        torch.manual_seed(0)
        self.shape = shape
        self.model = Model(torch.float32 if shape == "cast" else BF16)
        self.masters = {}
        if shape == "masters":
            weights = [p for p in self.model.parameters() if p.dtype is BF16]
            self.masters = {p: torch.nn.Parameter(p.detach().float()) for p in weights}
        self.optimizer = make([self.masters.get(p, p) for p in self.model.parameters()])
        cast = narrow if shape == "cast" else None
        self.source = track(self.optimizer, self.model, masters=self.masters, cast=cast, threads=threads)

    def backward(self, seed):
        loss(self.model, seed).backward()
        for weight, master in self.masters.items():
            if weight.grad is not None:
                master.grad = weight.grad.float() if master.grad is None else master.grad + weight.grad.float()
                weight.grad = None

    def step(self):
        self.optimizer.step()
        self.optimizer.zero_grad()

    def published(self):
        """The bits that are to arrive, made the plain way."""
        found = self.model.state_dict()
        if self.shape == "cast":
            return {name: t.to(narrow(name) or t.dtype, copy=True) for name, t in found.items()}
        return {name: t.clone() for name, t in found.items()}


class Line:
    """A publisher without a store: a baseline, and what a receiver has."""

    def __init__(self, baseline, start):
        self.baseline, self.there = baseline, start

    def publish(self, shards, wanted):
        found = self.baseline.capture(shards)
        patch = found.encode()
        patch.apply(self.there)
        self.baseline.advance(patch, found)
        assert patch.result == sparserl.digest(wanted) == self.baseline.digest
        assert {name: bits(t) for name, t in self.there.items()} == {name: bits(t) for name, t in wanted.items()}
        return patch


class Both:
    """Publishes with a baseline and without one, and compares each with what was to arrive."""

    def __init__(self, trainer):
        self.trainer = trainer
        shards = trainer.source.weights()
        assert all(part.marks is None for part in shards.parts), "nothing is known before the first version"
        self.lines = [Line(kind(shards), trainer.published()) for kind in (HostBaseline, NoBaseline)]
        trainer.source.committed()

    def publish(self):
        shards, wanted = self.trainer.source.weights(), self.trainer.published()
        patches = [line.publish(shards, wanted) for line in self.lines]
        self.trainer.source.committed()
        return shards, patches


class Fixed:
    """Weights that stay where they are."""

    def __init__(self, weights):
        self.weights = lambda: weights


def sgd(params):
    return torch.optim.SGD(params, lr=0.01, momentum=0.9, foreach=False)


def adam(params):
    return torch.optim.AdamW(params, lr=2e-4, weight_decay=0.1)


SHAPES = ("pure", "masters", "cast")


@pytest.mark.parametrize("make", [sgd, adam])
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
                assert part.marks.count == differ
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
    moved = sparserl.digest({"w": weight.detach()}) - sparserl.digest({"w": torch.zeros(1000, dtype=BF16)})
    assert part.moved == (moved.first, moved.second)


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
    assert sum(part.marks is not None for part in shards.parts) == 7


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
    moved = sparserl.digest({"w": weight.detach()}) - sparserl.digest({"w": torch.zeros(100, dtype=BF16)})
    assert again.parts[0].moved == (moved.first, moved.second)
    step(3)
    assert seen(again) == [1, 2]
    source.committed()
    assert seen(source.weights()) == [3]


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
        assert {part.tensor for part in shards.parts if not part.marks.count} == {"2.weight", "2.bias"}
        source.committed()
    source.close()
    first.step(closure)
    assert not any(part.marks is not None and part.marks.count for part in source.weights().parts)


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
    assert all(part.marks.count for part in source.weights().parts)
    line.publish(source.weights(), weights)
    with pytest.raises(errors.TensorMismatch, match="master"):
        track(optimizer, Fixed(weights), masters={"gate": masters[0]}).weights()


@pytest.fixture
def small_pieces(monkeypatch):
    """Tensors of a thousand bytes count as large: they are cut, as those of many megabytes are."""
    for where in (pieces, rows):
        monkeypatch.setattr(where, "PIECE_BYTES", 1000)


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("shape", SHAPES)
def test_large_parameters(shape, threads):
    """Parts that are cut into pieces are marked in full, tied weights under both names."""
    trainer = Trainer(shape, adam, threads)
    assert trainer.model.embed.weight.nbytes > 3000
    both = Both(trainer)
    for round in range(3):
        trainer.backward(round)
        trainer.step()
        shards, (kept, none) = both.publish()
        counts = {part.tensor: part.marks.count for part in shards.parts if part.marks is not None}
        assert counts["embed.weight"] == counts["head.weight"] > 0
        assert kept.changed
        assert not {entry.tensor for entry in none if entry.dense} & {"embed.weight", "head.weight"}


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


def known(shards):
    return [part.marks is not None for part in shards.parts]


def test_many_parts_and_gradients_that_come_and_go():
    """Any subset of parameters has gradients; marks and sums of every part are those of its own changes."""
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
            moved = patch.result - patch.base
            assert part.moved == (moved.first, moved.second)
            assert part.marks.count == patch.changed
        source.committed()


def test_plans_are_kept_while_nothing_moves(monkeypatch):
    """Steps look up no part's memory one by one, until something has moved; then all are, once."""
    calls = []
    monkeypatch.setattr(
        rows, "memory_of", lambda name, data: calls.append(name) or sparserl.weights.memory.memory_of(name, data)
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
            assert sum(known(shards)) == 7


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
        assert [part.marks.count for part in shards.parts if part.marks.count] == [8]
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
    """No optimizer and nothing that says what is written."""
    with pytest.raises(errors.TensorMismatch, match="params"):
        track(None, torch.nn.Linear(2, 2))


# -- several processes -------------------------------------------------------------------------------------------------


def joined(patch):
    """The patches of all ranks as one, on rank 0."""
    found = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(found, patch.to_bytes())
    return sparserl.merge(*map(Patch.from_bytes, found))


def sharded_steps(make, wanted, train, rank):
    """Several publishes of a sharded tracker, with both baselines; every merged patch against a full comparison."""
    source = make()
    shards = source.weights()
    baselines = [HostBaseline(shards), NoBaseline(shards)]
    source.committed()
    before = wanted()
    for round in range(4):
        for step in range(round):
            train(10 * round + step)
        shards, now = source.weights(), wanted()
        for baseline in baselines:
            found = baseline.capture(shards)
            patch = found.encode()
            baseline.advance(patch, found)
            whole = joined(patch)
            full = sparserl.diff(before, now)
            assert (whole.base, whole.result) == (full.base, full.result)
            there = {name: t.clone() for name, t in before.items()}
            whole.apply(there)
            assert {n: bits(t) for n, t in there.items()} == {n: bits(t) for n, t in now.items()}
            assert whole.changed >= full.changed
            assert (full.changed > 0) == (round > 0)
        assert all(part.marks is not None for part in shards.parts)
        assert sum(part.marks.count for part in shards.parts) < 0.7 * sum(part.marks.numel for part in shards.parts)
        source.committed()
        before = now


def fsdp2(rank):
    """Parameters in float32, sharded; their bf16 casts are published."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(30, 50), torch.nn.ReLU(), torch.nn.Linear(50, 7))
    policy = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=torch.float32)
    for layer in (model[0], model[2]):
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def train(seed):
        for micro in range(2):
            x = torch.randn(8, 30, generator=torch.Generator().manual_seed(100 * seed + 10 * micro + rank))
            model(x).float().square().mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    def wanted():
        return {name: t.full_tensor().detach().to(BF16) for name, t in model.state_dict().items()}

    sharded_steps(lambda: track(optimizer, sparserl.sources.fsdp(model), cast=BF16), wanted, train, rank)


class DistributedOptimizer:
    """Megatron's, in small: a flat bf16 buffer, of which every rank owns a range that respects no parameter.

    As in Megatron, a rank keeps fp32 main shards of its range, gradients are averaged, the inner optimizer steps on the
    main shards, they are copied into the buffer, and the ranges of all ranks are gathered.
    """

    def __init__(self, shapes, rank, size):
        self.rank, self.size = rank, size
        total = sum(int(np.prod(shape)) for shape in shapes.values())
        each = -(-total // size)
        torch.manual_seed(0)
        self.param_data = torch.randn(each * size).to(BF16)  # padded, as there
        self.low, self.high = rank * each, min((rank + 1) * each, total)
        self.ranges, self.params, at = {}, {}, 0
        for name, shape in shapes.items():
            n = int(np.prod(shape))
            self.params[name] = self.param_data[at : at + n].view(shape)
            a, b = max(self.low, at), min(self.high, at + n)
            if a < b:
                self.ranges[name] = (a - at, b - at, a, b)
            at += n
        self.main = {n: torch.nn.Parameter(self.param_data[a:b].float()) for n, (_, _, a, b) in self.ranges.items()}
        self.optimizer = torch.optim.Adam(self.main.values(), lr=1e-4)

    def step_with_ready_grads(self, grads):
        for name, (low, high, _, _) in self.ranges.items():
            self.main[name].grad = grads[name].reshape(-1)[low:high].float()
        self.optimizer.step()
        self._copy_main_params_to_model_params()
        self.all_gather()

    def _copy_main_params_to_model_params(self):
        for name, (_, _, a, b) in self.ranges.items():
            self.param_data[a:b].copy_(self.main[name].detach())

    def all_gather(self):
        each = self.param_data.numel() // self.size
        mine = self.param_data[self.rank * each : (self.rank + 1) * each].clone().view(torch.uint8)
        parts = [torch.empty_like(mine) for _ in range(self.size)]
        torch.distributed.all_gather(parts, mine)
        self.param_data.copy_(torch.cat(parts).view(BF16))


def megatron(rank):
    """Every rank tracks and publishes its own range; the hook point is the copy of main parameters."""
    shapes = {"a": (17, 9), "b": (5, 4, 3), "c": (61,), "d": (13, 13)}
    optimizer = DistributedOptimizer(shapes, rank, torch.distributed.get_world_size())
    table = sparserl.tensor_table(optimizer.params)

    class Ranges:
        def weights(self):
            parts = []
            for name, (low, high, _, _) in optimizer.ranges.items():
                at = low
                for box in boxes(shapes[name], low, high):
                    data = optimizer.params[name].reshape(-1)[at : at + box.numel].view(box.size)
                    parts.append(Part(name, box, data))
                    at += box.numel
            return Shards(table, parts)

    mine = optimizer.param_data[optimizer.low : optimizer.high]

    def make():
        source = track(None, Ranges(), params=[mine])
        copy = optimizer._copy_main_params_to_model_params

        def tracked():
            with source.step():
                copy()

        optimizer._copy_main_params_to_model_params = tracked
        return source

    def train(seed):
        generator = torch.Generator().manual_seed(seed)
        optimizer.step_with_ready_grads({n: torch.randn(s, generator=generator) for n, s in shapes.items()})

    def wanted():
        return {name: t.clone() for name, t in optimizer.params.items()}

    sharded_steps(make, wanted, train, rank)


def run_rank(rank, size, meeting, report):
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    os.environ["SPARSERL_THREADS"] = "2"
    try:
        torch.distributed.init_process_group("gloo", f"file://{meeting}", rank=rank, world_size=size)
        for scene in (fsdp2, megatron):
            scene(rank)
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
        report.put((rank, ""))
    except BaseException:
        report.put((rank, traceback.format_exc()))
        raise


def test_sharded_trainers(tmp_path):
    """FSDP2 with mixed precision, and Megatron's distributed optimizer: two processes publish what they own."""
    report = CONTEXT.SimpleQueue()
    ranks = [CONTEXT.Process(target=run_rank, args=(r, 2, tmp_path / "meeting", report)) for r in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(120)
        if process.is_alive():
            process.kill()
    said = []
    while not report.empty():
        said.append(report.get())
    assert sorted(said) == [(0, ""), (1, "")], "\n".join(text for _, text in said)
