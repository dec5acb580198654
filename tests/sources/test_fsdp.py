"""Sharded modules, in real processes: what each rank finds in its own shards adds up to what the whole would give."""

from __future__ import annotations

import traceback
import warnings

import numpy as np
import pytest

import sparserl
from sparserl.errors import TensorMismatch, UnsupportedTensor
from sparserl.session.anchors import copy_weights
from sparserl.weights.digest import Digest, table_digest
from tests.session.ranks import together

torch = pytest.importorskip("torch")
dist = pytest.importorskip("torch.distributed")
if not dist.is_available() or not dist.is_gloo_available():
    pytest.skip("torch without Gloo", allow_module_level=True)

from torch import nn  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402
from torch.distributed.tensor import (  # noqa: E402
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_tensor,
)
from torch.distributed.tensor.debug import CommDebugMode  # noqa: E402
from torch.distributed.tensor.parallel import (  # noqa: E402
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.distributed.tensor.placement_types import _StridedShard  # noqa: E402


class Block(nn.Module):
    """Sizes that few meshes divide."""

    def __init__(self, width, inner):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, inner)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Policy(nn.Module):
    """Tied embeddings, buffers that are not sharded, and a tensor with fewer rows than ranks."""

    def __init__(self, vocab=13, width=10, inner=6, rows=1):
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList([Block(width, inner), Block(width, inner)])
        self.scale = nn.Parameter(torch.ones(rows, width))
        self.head = nn.Linear(width, vocab, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("none", torch.zeros(0, 4))

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x * self.scale.sum(0))


def fsdp_uneven(world):
    model = Policy()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    return model


def fsdp_of_columns(world):
    model = Policy(vocab=13, width=8, inner=12)
    where = lambda p: Shard(1) if p.ndim == 2 and p.shape[1] % world == 0 else Shard(0)  # noqa: E731
    for block in model.blocks:
        fully_shard(block, shard_placement_fn=where)
    fully_shard(model, shard_placement_fn=where)
    return model


def hsdp(world):
    model = Policy(rows=3)
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def fsdp_and_tp(world):
    """Rows of `up` are cut by both: strided shards, uneven ones."""
    model = Policy(width=10, inner=10)
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("dp", "tp"))
    for block in model.blocks:
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    return model


def tp_and_copies(world):
    """Tensor parallel on a part of the mesh: the other part has the same again, and the DTensors do not say so."""
    model = Policy(inner=8)
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("dp", "tp"))
    for block in model.blocks:
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


CASES = {
    2: [("uneven", fsdp_uneven, {}), ("columns", fsdp_of_columns, {}), ("cast", fsdp_uneven, {"cast": True})],
    4: [
        ("uneven", fsdp_uneven, {}),
        ("hsdp", hsdp, {}),
        ("fsdp_tp", fsdp_and_tp, {}),
        ("tp_copies", tp_and_copies, {}),
    ],
}


def published(name):
    """What a mixed-precision trainer sends: bf16, but for its norms."""
    return None if "norm" in name else torch.bfloat16


def whole(model, cast):
    """All weights, gathered; the tied head once."""
    out = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if name == "head.weight":
            continue
        full = tensor.detach().full_tensor() if isinstance(tensor, DTensor) else tensor.detach()
        if cast and isinstance(tensor, nn.Parameter) and published(name):
            full = full.to(published(name))
        out[name] = full.clone()
    return out


def storages(model):
    held = (t.to_local() if isinstance(t, DTensor) else t for t in model.state_dict().values())
    return {t.untyped_storage().data_ptr() for t in held}


def train(model, world):
    """One step of a real optimizer, then bits that no step would leave behind."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(7)
    for _ in range(world):
        model(torch.randint(0, 13, (2, 5), generator=generator)).square().mean().backward()
    optimizer.step()
    with torch.no_grad():
        model.seen += 1
        model.mean[1] = -0.0
        for tensor in model.state_dict().values():
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            if local.dtype == torch.float32 and local.numel() > 4:
                bits = local.view(torch.int32).view(-1)
                bits[1], bits[2] = -(1 << 31), 0x7FC00123  # -0.0, and a NaN that says something


def one_case(rank, world, name, make, kind, folder):
    torch.manual_seed(0)
    model = make(world)
    source = sparserl.sources.fsdp(model, cast=published if kind.get("cast") else None)
    before, old = whole(model, kind.get("cast")), copy_weights(source.weights())
    train(model, world)
    with torch.no_grad():
        model(torch.zeros(1, 2, dtype=torch.int64))  # FSDP2 leaves the outermost parameters unsharded after it
    with CommDebugMode() as talk:
        new = source.weights()
        patch = sparserl.diff(old, new, threads=1)
    assert talk.get_total_counts() == 0
    if not kind:
        assert {p.data.untyped_storage().data_ptr() for p in new.parts} - {0} <= storages(model) - {0}
    patch.save(folder / f"{name}.{rank}")
    (folder / f"{name}.{rank}.digest").write_text(sparserl.digest(new, threads=1).hex)
    after = whole(model, kind.get("cast"))
    if rank == 0:
        torch.save((before, after), folder / f"{name}.whole")


def strided(rank, world):
    """Shards that are several boxes, also in two dimensions at once, hold just what their placements say."""
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("a", "b"))
    full = torch.arange(11 * 9, dtype=torch.float32).view(11, 9)
    placements = (
        (_StridedShard(0, split_factor=3), Shard(1)),
        (_StridedShard(0, split_factor=2), _StridedShard(1, split_factor=2)),
        (Shard(0), _StridedShard(0, split_factor=2)),
        (Shard(1), Shard(1)),
        (Replicate(), _StridedShard(0, split_factor=4)),
    )
    lone = nn.Module()
    for placed in placements:
        lone.w = nn.Parameter(distribute_tensor(full, mesh, placed, src_data_rank=None))
        parts = sparserl.sources.fsdp(lone).weights().parts
        for part in parts:
            assert torch.equal(part.data, full[part.region.slices])
        held = [None] * world
        dist.all_gather_object(held, [p.region for p in parts])
        assert sum(r.numel for regions in held for r in regions) == full.numel()
        seen = torch.zeros_like(full)
        for regions in held:
            for region in regions:
                seen[region.slices] += 1
        assert bool((seen == 1).all()), placed
    lone.w = nn.Parameter(DTensor.from_local(full, mesh, (Replicate(), Partial())))
    with pytest.raises(UnsupportedTensor, match=r"'w' is P"):
        sparserl.sources.fsdp(lone).weights()


def stages(rank, world):
    """Two stages of a pipeline, each sharded over its own group, publish one checkpoint."""
    table = sparserl.tensor_table({f"{s}.weight": torch.empty(5, 3, device="meta") for s in "ab"})
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = groups[rank // 2]
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    model = nn.ModuleDict({"ab"[rank // 2]: nn.Linear(3, 5, bias=False)})
    fully_shard(next(iter(model.values())), mesh=mesh["dp"])
    parts = sparserl.sources.fsdp(model, group=mine, table=table).weights().parts
    held = [None] * world
    dist.all_gather_object(held, [(p.tensor, str(p.region)) for p in parts])
    assert held == [
        [("a.weight", "[0:3, 0:3]")],
        [("a.weight", "[3:5, 0:3]")],
        [("b.weight", "[0:3, 0:3]")],
        [("b.weight", "[3:5, 0:3]")],
    ]


def work(rank, world, folder):
    """One rank: all cases, and a note of what went wrong."""
    try:
        warnings.simplefilter("ignore")
        torch.set_num_threads(1)
        dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=world)
        for name, make, kind in CASES[world]:
            one_case(rank, world, name, make, kind, folder)
        if world == 4:
            strided(rank, world)
            stages(rank, world)
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        (folder / f"failed.{rank}").write_text(traceback.format_exc())
        raise


@pytest.fixture(scope="module", params=[pytest.param(ranks, marks=pytest.mark.long) for ranks in (2, 4)])
def trained(request, tmp_path_factory):
    """What the ranks left behind, once all have ended well."""
    folder = tmp_path_factory.mktemp(f"ranks{request.param}")
    try:
        together(work, (request.param, folder), request.param)
    except torch.multiprocessing.ProcessRaisedException:  # the first one to be heard of is seldom the one to blame
        pytest.fail("\n".join(p.read_text() for p in sorted(folder.glob("failed.*"))))
    return request.param, folder


def test_ranks_together_find_what_the_whole_would(trained):
    """Merged, the ranks' patches turn the whole old weights into the new ones, bit by bit; digests add up."""
    world, folder = trained
    for name, _, _ in CASES[world]:
        before, after = torch.load(folder / f"{name}.whole")
        patches = [sparserl.Patch.open(folder / f"{name}.{rank}") for rank in range(world)]
        merged = sparserl.merge(*patches)
        assert merged.complete, name
        assert (merged.base, merged.result) == (sparserl.digest(before), sparserl.digest(after)), name
        digests = [Digest.from_hex((folder / f"{name}.{rank}.digest").read_text()) for rank in range(world)]
        assert sum(digests, table_digest(merged.table)) == sparserl.digest(after), name
        assert merged.changed == sparserl.diff(before, after).changed, name
        merged.apply(before)
        for key, tensor in after.items():
            assert before[key].dtype == tensor.dtype
            assert before[key].view(-1).view(torch.uint8).tolist() == tensor.view(-1).view(torch.uint8).tolist(), key


def test_every_rank_finds_its_share(trained):
    """No rank owns all of a sharded module; of replicas, one does."""
    world, folder = trained
    for name, _, _ in CASES[world]:
        covers = [sparserl.Patch.open(folder / f"{name}.{rank}").covers for rank in range(world)]
        idle = [rank for rank, places in enumerate(covers) if not places]
        assert idle == ([2, 3] if name in ("hsdp", "tp_copies") else [])


def test_without_processes():
    """A module that is not distributed is one shard, with the digest of the whole."""
    model = Policy()
    shards = sparserl.sources.fsdp(model).weights()
    assert sparserl.digest(shards) == sparserl.digest(sparserl.sources.module(model).weights())
    assert "embed.weight" in shards.table.index
    assert "head.weight" not in shards.table.index


def test_cast():
    """Floating parameters are published as the dtype they are cast to; buffers and exceptions as they are."""
    model = Policy()
    shards = sparserl.sources.fsdp(model, cast=torch.bfloat16).weights()
    names = {spec.name: spec.dtype.name for spec in shards.table.specs}
    assert names["embed.weight"] == names["blocks.0.norm.weight"] == "bfloat16"
    assert (names["mean"], names["seen"]) == ("float32", "int64")
    mixed = sparserl.sources.fsdp(model, cast=published).weights()
    assert mixed.table.get("blocks.0.norm.weight").dtype.name == "float32"
    buffers = dict(model.named_buffers())
    state = {name: tensor for name, tensor in model.state_dict().items() if name != "head.weight"}
    want = {name: t if name in buffers else t.to(published(name) or t.dtype) for name, t in state.items()}
    assert sparserl.digest(mixed) == sparserl.digest(want)


def test_strangers_are_refused():
    """What is no module, and a table that has other shapes, is an error that says so."""
    with pytest.raises(UnsupportedTensor, match="expected a torch module, got dict"):
        sparserl.sources.fsdp({})
    table = sparserl.tensor_table({"weight": np.zeros((2, 2), np.float32)})
    with pytest.raises(TensorMismatch, match="weight"):
        sparserl.digest(sparserl.sources.fsdp(nn.Linear(2, 3, bias=False), table=table).weights())
