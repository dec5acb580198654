"""Megatron's parameters in several processes."""

from __future__ import annotations

import traceback
import warnings
from dataclasses import replace

import pytest

import sparserl
from sparserl.weights.digest import table_digest
from tests.session.ranks import together
from tests.sources.megatron_shards import (
    CONFIGS,
    changed,
    checkpoint,
    grid,
    parameters,
    require_equal,
)

torch = pytest.importorskip("torch")
dist = pytest.importorskip("torch.distributed")


class Layer(torch.nn.Module):
    """A layer that knows its number, as Megatron's do."""

    def __init__(self, number=None):
        super().__init__()
        if number is not None:
            self.layer_number = number


def as_module(named, offset):
    """Parameters by dotted names, as a tree of modules inside two wrappers."""
    root = Layer()
    for name, tensor in {f"module.module.{n}": t for n, t in named.items()}.items():
        *path, leaf = name.split(".")
        at = root
        for i, step in enumerate(path):
            if step not in at._modules:
                numbered = path[i - 1] == "layers" and step.isdigit()
                at.add_module(step, Layer(int(step) + 1 + offset if numbered else None))
            at = at._modules[step]
        at.register_parameter(leaf, torch.nn.Parameter(tensor, requires_grad=False))
    return root


def work(rank, folder, jobs, world):
    """One of the ranks; what went wrong is left in a file."""
    try:
        warnings.simplefilter("ignore")
        torch.set_num_threads(1)
        dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=world)
        jobs(rank)
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        (folder / f"failed.{rank}").write_text(traceback.format_exc())
        raise


def publish_all(rank):
    for kind, sizes in (
        ("qwen3_moe", {"tp": 2, "ep": 2, "dp": 2}),
        ("few_keys", {"tp": 4}),
        ("qwen2", {"tp": 2, "pp": 2}),
    ):
        publish(rank, kind, list(grid(**sizes))[rank])


def publish(rank, kind, ranks):
    """Every rank compares its own parameters; patches and digests meet at rank 0, the weights never do."""
    old = checkpoint(kind)
    new = changed(old)
    named = parameters(kind, old, ranks, engine=rank % 2 == 0)
    source = sparserl.sources.megatron(as_module(named, ranks.pp * 2), CONFIGS[kind], ranks)
    shards = source.weights()
    was = sparserl.Shards(shards.table, [replace(part, data=part.data.clone()) for part in shards.parts])
    for name, tensor in parameters(kind, new, ranks, engine=rank % 2 == 0).items():
        named[name].copy_(tensor)
    now = source.weights()
    mine = sparserl.diff(was, now, threads=1).to_bytes(), sparserl.digest(now, threads=1)
    met = [None] * 4 if rank == 0 else None
    dist.gather_object(mine, met)
    if rank == 0:
        merged = sparserl.merge(*(sparserl.Patch.from_bytes(data) for data, _ in met))
        assert merged.complete
        assert merged.result == sparserl.digest(new)
        assert sum((d for _, d in met), table_digest(shards.table)) == sparserl.digest(new)
        merged.apply(old)
        require_equal(old, new)


def spawn(folder, jobs, world):
    try:
        together(work, (folder, jobs, world), world)
    except torch.multiprocessing.ProcessRaisedException:  # the first one to be heard of is seldom the one to blame
        pytest.fail("\n".join(p.read_text() for p in sorted(folder.glob("failed.*"))))


@pytest.mark.long
def test_four_processes(tmp_path):
    """Modules in four real processes, under three ways to be parallel: the whole, bit by bit."""
    spawn(tmp_path, publish_all, 4)
