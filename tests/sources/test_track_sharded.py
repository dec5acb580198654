"""Tracking in several processes, each of which publishes what it owns."""

from __future__ import annotations

import os
import traceback
import warnings

import numpy as np
import pytest

import sparserl
from sparserl import Part, Patch, Shards
from sparserl.session.baseline import HostBaseline, NoBaseline
from sparserl.sources import track
from sparserl.sources.layout import boxes
from tests.session.ranks import CONTEXT
from tests.sources.small_trainer import BF16, bits

torch = pytest.importorskip("torch")


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


@pytest.mark.long
def test_sharded_trainers(tmp_path):
    """FSDP2 with mixed precision, and Megatron's distributed optimizer: two processes publish what they own."""
    report = CONTEXT.SimpleQueue()
    ranks = [CONTEXT.Process(target=run_rank, args=(r, 2, tmp_path / "meeting", report)) for r in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(900)
        if process.is_alive():
            process.kill()
    said = []
    while not report.empty():
        said.append(report.get())
    assert sorted(said) == [(0, ""), (1, "")], "\n".join(text for _, text in said)
