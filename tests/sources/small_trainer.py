"""A model small enough to train in a test, in mixed precision, and publishes that are compared with full ones."""

from __future__ import annotations

import pytest

import sparserl
from sparserl.session.baseline import HostBaseline, NoBaseline
from sparserl.sources import track
from sparserl.weights.tensors import memory_of

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
        """The bits that are to arrive, made the plain way: the tied head under one name."""
        found = {name: tensor for name, tensor in self.model.state_dict().items() if name != "head.weight"}
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


def changed(part):
    """The positions of a part whose bits are not the old ones."""
    positions, old = part.marks.run(0, part.region.numel)
    current = memory_of(part.tensor, part.data).copied().reshape(-1)
    return positions[current[positions] != old]


def known(shards):
    return [part.marks is not None for part in shards.parts]
