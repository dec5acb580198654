"""All ranks of an engine that follow a run, on threads."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import torch

import sparserl
from sparserl.integrations.ranks import EngineSubscriber
from sparserl.targets.engine import EngineTarget
from sparserl.targets.engine_layout import find_pieces
from tests.targets.engines import Engine, checkpoint, named


class Table:
    """Where ranks on threads hand their objects to each other."""

    def __init__(self, ranks):
        self.barrier, self.said = threading.Barrier(ranks, timeout=20), [None] * ranks

    def gather(self, rank):
        def gather(mine):
            self.said[rank] = mine
            self.barrier.wait()
            out = list(self.said)
            self.barrier.wait()
            return out

        return gather


class Fleet:
    """All ranks of an engine that follow a run, and the weights that are published."""

    def __init__(
        self,
        url,
        ranks,
        *,
        profile="ulp",
        tied=None,
        extra=None,
        other=None,
        anchor_after=1.0,
        device="cpu",
        published=None,
        **options,
    ):
        if other is None:
            self.weights = checkpoint() | (extra or {})
            encoding = {"profile": profile, "ladder": None, "anchor_after": anchor_after}
            source = self.weights if published is None else lambda: published(self.weights)
            self.publisher = sparserl.Publisher(url, source, **encoding)
            self.publisher.publish()
        else:
            self.weights = other.weights
            self.publisher = other.publisher
        self.engines = [Engine(rank, ranks, device=device) for rank in range(ranks)]
        self.pool, table, self.subscribers = ThreadPoolExecutor(ranks), Table(ranks), []
        for rank, engine in enumerate(self.engines):
            pieces = find_pieces(named(checkpoint()), engine.live, engine.load, lambda _: None)
            engine.load(checkpoint().items())
            target = EngineTarget(pieces, lambda engine=engine: engine.live, tied, threads=1)
            self.subscribers.append(EngineSubscriber(url, target, rank, table.gather(rank), threads=1, **options))

    def all(self, work):
        """What each rank makes of some work, or raises."""

        def one(subscriber):
            try:
                return work(subscriber)
            except Exception as error:  # noqa: BLE001
                return error

        return [*self.pool.map(one, self.subscribers)]

    def train(self, seed, step=None):
        generator = torch.Generator().manual_seed(seed)
        for tensor in {id(tensor): tensor for tensor in self.weights.values()}.values():
            chosen = torch.rand(tensor.shape, generator=generator) < 0.2
            tensor[chosen] += torch.randn(tensor.shape, generator=generator).to(tensor.dtype)[chosen]
        return self.publisher.publish(step=step).version

    def last_patch(self):
        """The step of the newest patch."""
        return [step for step in self.publisher._committed.index.steps if step.base is not None][-1]

    def live(self):
        return [{name: tensor.clone() for name, tensor in engine.live.items()} for engine in self.engines]

    def require_exact(self, weights=None):
        """Every rank holds what its loader would load."""
        for engine in self.engines:
            fresh = Engine(engine.rank, engine.ranks)
            fresh.load((weights or self.weights).items())
            for name, tensor in fresh.live.items():
                assert torch.equal(engine.live[name].cpu(), tensor), (engine.rank, name)


@contextmanager
def fleet(tmp_path, ranks, **options):
    """other: an engine that follows the same run.
    device: where the engine's tensors are.
    published: makes what is published of the weights.
    """
    made = Fleet(f"file://{tmp_path}/run", ranks, **options)
    try:
        yield made
    finally:
        made.all(lambda subscriber: subscriber.close())
        made.pool.shutdown()
