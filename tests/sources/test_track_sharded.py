"""Tracking in several processes, each of which publishes what it owns."""

from __future__ import annotations

import os
import traceback
import warnings

import pytest

import sparserl
from sparserl import Patch
from sparserl.session.baseline import HostBaseline, NoBaseline
from sparserl.sources import track
from tests.session.ranks import CONTEXT
from tests.sources.small_trainer import BF16, bits, changed

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
        assert sum(changed(part).size for part in shards.parts) <= 0.7 * sum(part.marks.numel for part in shards.parts)
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


def run_rank(rank, size, meeting, report):
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    os.environ["SPARSERL_THREADS"] = "2"
    try:
        torch.distributed.init_process_group("gloo", f"file://{meeting}", rank=rank, world_size=size)
        fsdp2(rank)
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
        report.put((rank, ""))
    except BaseException:
        report.put((rank, traceback.format_exc()))
        raise


@pytest.mark.long
def test_sharded_trainers(tmp_path):
    """FSDP2 with mixed precision: two processes publish what they own."""
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
