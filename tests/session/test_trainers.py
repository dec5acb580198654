"""Sharded trainers, whole: FSDP2 on real ranks, sources on top of each other, many writers, one subscriber."""

from __future__ import annotations

import datetime as dt

import pytest

import sparserl
from sparserl import Publisher, Subscriber, sources
from tests.session.ranks import finish, launch

KINDS = ("host", "none", "fp8")


def rank_main(rank: int, size: int, folder: str) -> None:
    """One rank: a tiny language model in fp32 shards, published as bf16, or as fp8 with scales."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    limit = dt.timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=f"file://{folder}/init", rank=rank, world_size=size, timeout=limit)
    torch.manual_seed(7)
    model = torch.nn.Sequential(
        torch.nn.Embedding(53, 32), torch.nn.Linear(32, 70, bias=False), torch.nn.LayerNorm(70), torch.nn.Linear(70, 9)
    )
    model.register_buffer("router_bias", torch.zeros(5))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    mesh = init_device_mesh("cpu", (size,))
    for layer in (model[1], model[3], model):
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    cast = torch.bfloat16
    trackers = {kind: sources.track(optimizer, sources.fsdp(model), cast=by_name) for kind in ("host", "none")}
    made = {
        **trackers,
        "fp8": sources.quantized(
            sources.fsdp(model, cast=cast), sources.fp8_blockwise((16, 16)), process_group=dist.group.WORLD
        ),
    }
    stores = {kind: f"file://{folder}/{kind}" for kind in KINDS}
    publishers = {
        kind: Publisher(
            stores[kind],
            made[kind],
            writers=dist.group.WORLD,
            timeout=60,
            baseline="none" if kind == "none" else "host",
        )
        for kind in KINDS
    }
    for version in range(4):
        for _ in range(version + 1):
            optimizer.zero_grad()
            tokens = torch.randint(0, 53, (8,), generator=torch.Generator().manual_seed(10 * version + rank))
            model(tokens).float().square().mean().backward()
            optimizer.step()
        model.router_bias[version] += 0.5
        for kind in KINDS:
            publisher = publishers[kind]
            report = publisher.publish() if version % 2 == 0 else publisher.publish_in_background().result()
            assert report.version == version
        state = {n: p.full_tensor() if hasattr(p, "full_tensor") else p for n, p in model.state_dict().items()}
        if rank == 0:
            check(stores, state)
    dist.destroy_process_group()


def by_name(name: str):
    """bf16, but for one parameter that the rollout keeps in fp32."""
    import torch

    return None if name in ("2.weight", "router_bias") else torch.bfloat16


def check(stores, state) -> None:
    """What a subscriber gets is what the unsharded model would have published."""
    import torch

    whole = {name: t.detach() if (d := by_name(name)) is None else t.detach().to(d) for name, t in state.items()}
    params = {n: t.detach() if n == "router_bias" else t.detach().to(torch.bfloat16) for n, t in state.items()}
    fp8 = sources.quantized(params, sources.fp8_blockwise((16, 16))).weights()
    for kind, wanted in (("host", whole), ("none", whole), ("fp8", fp8)):
        mine = {name: torch.zeros_like(tensor) for name, tensor in wanted.items()}
        got = Subscriber(stores[kind], mine).sync()
        assert got.digest == sparserl.digest(wanted).hex, kind
        for name, tensor in wanted.items():
            assert torch.equal(mine[name].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)), name


@pytest.mark.long
def test_fsdp_to_a_subscriber(tmp_path):
    """Every version bit for bit: tracked with a baseline and without, and quantized with blocks that ranks share."""
    finish(launch(rank_main, 4, tmp_path), tmp_path)
