"""Recordings of ranks: merged, they are the recording of the whole weights; anything else is refused by name."""

from __future__ import annotations

import datetime as dt
import json
from copy import deepcopy
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from sparserl import Part, Publisher, Region, Shards, sources, tensor_table
from sparserl.cli.app import app
from sparserl.errors import SparserlError
from sparserl.record import Observer, Recorder, Recording, merge
from sparserl.weights.staging import lazy_bits
from tests.record.test_observing import figures
from tests.session.ranks import finish, launch

VERSIONS = 4
SAMPLE = 700  # of 4386 elements


def rank_main(rank: int, size: int, folder: str) -> None:
    """One rank of FSDP2: publishes its shards and records what it publishes; rank 0 records the whole model, too."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    limit = dt.timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=f"file://{folder}/init", rank=rank, world_size=size, timeout=limit)
    torch.manual_seed(7)
    model = torch.nn.Sequential(torch.nn.Embedding(53, 32), torch.nn.Linear(32, 70), torch.nn.LayerNorm(70))
    model.experts = torch.nn.ParameterDict({"gate_up_proj": torch.nn.Parameter(torch.randn(5, 8, 6))})
    copy = deepcopy(model)
    fully_shard(model, mesh=init_device_mesh("cpu", (size,)))
    source = sources.fsdp(model, cast=torch.bfloat16)
    recorder = Recorder(f"{folder}/rank-{rank}.jsonl", {"model": "small"}, sample=SAMPLE, seed=3)
    whole = None
    if rank == 0:
        whole_recorder = Recorder(f"{folder}/whole.jsonl", {"model": "small"}, sample=SAMPLE, seed=3)
        whole = Observer(whole_recorder, sources.module(copy, cast=torch.bfloat16))
    generator = torch.Generator().manual_seed(rank)
    with Publisher(
        f"file://{folder}/store", source, writers=dist.group.WORLD, timeout=60, observe=recorder
    ) as publisher:
        for version in range(VERSIONS):
            for parameter in model.parameters():
                local = parameter.to_local().detach()
                local *= torch.where(torch.rand(local.shape, generator=generator) < 0.05, 1.02, 1.0)
                local *= torch.where(torch.rand(local.shape, generator=generator) < 0.2, 1.0001, 1.0)
                parameter.grad = torch.zeros_like(parameter)
                parameter.grad.to_local().normal_(generator=generator).mul_(local.abs() > 0.3)
            publisher.publish()
            for parameter, whole_parameter in zip(model.parameters(), copy.parameters(), strict=True):
                whole_parameter.data.copy_(parameter.full_tensor())
                whole_parameter.grad = parameter.grad.full_tensor()
            if whole is not None:
                whole.observe(version=version)
    dist.destroy_process_group()


@pytest.mark.long
def test_two_fsdp_ranks_are_the_whole(tmp_path: Path) -> None:
    """All counts of two ranks, of samples too, add up to those of one process that has the whole model."""
    finish(launch(rank_main, 2, tmp_path), tmp_path)
    merged = merge([tmp_path / f"rank-{rank}.jsonl" for rank in range(2)], tmp_path / "merged.jsonl")
    whole = Recording.read(tmp_path / "whole.jsonl")
    assert (merged.tensors, merged.meta) == (whole.tensors, whole.meta)
    assert figures(merged) == figures(whole)
    assert [sync.version for sync in merged.syncs] == [1, 2, 3]
    for sync in merged.syncs:
        sampled = sum(kind["sampled"] for kind in sync.masters.values())
        assert SAMPLE <= sampled <= SAMPLE + len(sync.changed)
        assert all(sum(kind[count] for kind in sync.masters.values()) for count in ("visible", "hidden"))
        assert sum(kind["zero"] for kind in sync.gradients.values()) > 0.1 * sampled
    alone = Recording.read(tmp_path / "rank-0.jsonl").syncs[0]
    assert 0 < sum(kind["sampled"] for kind in alone.masters.values()) < SAMPLE
    assert all(sync.total and sum(sync.experts["experts.gate_up_proj"]) for sync in merged.syncs)
    for sync, other in zip(merged.syncs, whole.syncs, strict=True):
        for part in ("index", "value", "dense", "table"):
            assert sync.profiles["raw"][part] == other.profiles["raw"][part]


def record_ranks(folder: Path) -> list[Path]:
    """Recordings of two ranks with six and four rows of a tensor; the first has one version more."""
    weights = np.zeros((10, 8), np.float32)
    table = tensor_table({"w": weights})
    paths = []
    for rank, (first, size) in enumerate(((0, 6), (6, 4))):
        rows = Region((first, 0), (size, 8))
        recorder = Recorder(folder / f"rank-{rank}.jsonl")
        observer = Observer(recorder, Shards(table, [Part("w", rows, weights[rows.slices])]))
        weights[:] = 0
        for version in range(4 - rank):
            weights[:, version] = 1
            observer.observe(version=version, seconds={"encode": rank + 1.0}, reward=rank / 2)
        paths.append(recorder.path)
    return paths


def test_versions_of_all_ranks(tmp_path: Path) -> None:
    """From the command line: counts are added, the slowest rank counts, a version that one lacks is left out."""
    paths = record_ranks(tmp_path)
    arguments = ["record", "--merge", *map(str, paths), "-o", str(tmp_path / "run.jsonl"), "--json"]
    result = CliRunner().invoke(app, arguments)
    assert json.loads(result.output) == {"path": f"{tmp_path}/run.jsonl", "syncs": 2, "left_out": [3]}
    merged = Recording.read(tmp_path / "run.jsonl")
    assert [(sync.version, sync.changed, sync.ever, sync.elements) for sync in merged.syncs] == [
        (1, [10], 10, 80),
        (2, [10], 20, 80),
    ]
    assert merged.seconds[2] == {"encode": 2.0}
    assert merged.rewards[2] == 0.0
    assert merged.tensors["float32"].whole is None


def test_what_cannot_be_merged(tmp_path: Path) -> None:
    """Missing ranks, ranks given twice, other models, and names that are taken."""
    paths = record_ranks(tmp_path)
    to = tmp_path / "run.jsonl"
    with pytest.raises(
        SparserlError, match=r"'w' has 80 elements, the recordings have 48 in float32: a rank is missing"
    ):
        merge(paths[:1], to)
    with pytest.raises(SparserlError, match="given twice"):
        merge([*paths, paths[0]], to)
    again = tmp_path / "again.jsonl"
    again.write_bytes(paths[0].read_bytes())
    with pytest.raises(SparserlError, match="have 128 in float32: ranks have the same elements"):
        merge([*paths, again], to)
    other = Recorder(tmp_path / "other.jsonl")
    other.observe({"v": np.zeros(3, np.float32)}, {"v": np.ones(3, np.float32)}, version=1)
    with pytest.raises(SparserlError, match=r"other\.jsonl is of other tensors in float32 than .*rank-0\.jsonl"):
        merge([*paths, other.path], to)
    with pytest.raises(SparserlError, match=r"again\.jsonl exists"):
        merge(paths, again)
    with pytest.raises(SparserlError, match="at least one"):
        merge([], to)
    assert not to.exists()


def test_samples_of_other_elements(tmp_path: Path) -> None:
    """Ranks whose recorders had other seeds did not sample parts of one sample."""
    torch = pytest.importorskip("torch")
    paths = []
    for rank in range(2):
        weights = torch.arange(8, dtype=torch.float32).reshape(2, 4)[rank : rank + 1].clone()
        table = tensor_table({"w": torch.zeros(2, 4, dtype=torch.bfloat16)})
        part = Part("w", Region((rank, 0), (1, 4)), lazy_bits(weights, torch.bfloat16))
        recorder = Recorder(tmp_path / f"{rank}.jsonl", seed=rank)
        observer = Observer(recorder, Shards(table, [part]))
        for version in range(2):
            observer.observe(version=version)
            weights += 1
        paths.append(recorder.path)
    with pytest.raises(SparserlError, match="version 1 was sampled in different ways"):
        merge(paths, tmp_path / "run.jsonl")
