"""The classes that vLLM is given, over vLLM's own: they fit, and trainers publish what vLLM's sources have.

No engine is started. `test_vllm_contract.py` runs these tests with the classes of every release that is supported.
"""

from __future__ import annotations

import inspect
import itertools
from importlib.util import find_spec
from typing import Any

import pytest
import torch
import torch.distributed as dist

import sparserl
from sparserl.errors import SessionError
from sparserl.weights.shards import require_whole
from sparserl.weights.tensors import tensor_table
from tests.session.ranks import ranks, results

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # those of vLLM, which has many
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed; see `make test-vllm`"),
]
METHODS = ("init_weight_transfer_engine", "start_weight_update", "update_weights", "finish_weight_update")


class Client:
    """An engine, as far as trainers see it: what it was told."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []

    def __getattr__(self, name: str) -> Any:
        if name not in METHODS:
            raise AttributeError(name)
        return lambda *arguments: self.calls.append((name, arguments))


def trainer_of(url: str, source: Any, rank: int = 0, **publisher: Any) -> Any:
    """What vLLM's factory makes."""
    from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

    from sparserl.integrations import vllm_plugin
    from sparserl.integrations.vllm_trainer import SparserlTrainerInitInfo

    vllm_plugin.register()
    info = SparserlTrainerInitInfo(rank=rank, url=url, publisher=publisher)
    return WeightTransferTrainerFactory.trainer_init(info, client=Client(), source=source)


def has_parts() -> bool:
    """Whether sources of this vLLM give the parts of a rank."""
    from vllm.distributed.weight_transfer.base import WeightSource

    return hasattr(WeightSource, "iter_local")


def stored(url: str, like: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The newest version."""
    held = {name: torch.zeros_like(tensor) for name, tensor in like.items()}
    with sparserl.Subscriber(url, held) as subscriber:
        subscriber.sync()
    return held


def accepts(base: Any, own: Any) -> bool:
    """Whether every call that one function takes is taken by another."""
    wanted = [*inspect.signature(base).parameters.values()]
    given = dict(inspect.signature(own).parameters)
    if any(p.kind is p.VAR_POSITIONAL for p in given.values()) and any(p.kind is p.VAR_KEYWORD for p in given.values()):
        return True
    order = [name for name, p in given.items() if p.kind is not p.KEYWORD_ONLY]
    for index, parameter in enumerate(wanted):
        same = given.pop(parameter.name, None)
        if same is None or (same.default is same.empty and parameter.default is not parameter.empty):
            return False
        if parameter.kind is not parameter.KEYWORD_ONLY and order[index : index + 1] != [parameter.name]:
            return False
    return all(p.default is not p.empty or p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in given.values())


def test_classes_fit() -> None:
    """They have all abstract methods, and take the calls that vLLM's own classes take."""
    from vllm.distributed.weight_transfer import base

    from sparserl.integrations import vllm, vllm_client, vllm_options, vllm_trainer

    for own, theirs in (
        (vllm.SparserlEngine, base.WeightTransferEngine),
        (vllm_trainer.SparserlTrainer, base.TrainerWeightTransferEngine),
        (vllm_options.SparserlInitInfo, base.WeightTransferInitInfo),
        (vllm_options.SparserlUpdateInfo, base.WeightTransferUpdateInfo),
        (vllm_trainer.SparserlTrainerInitInfo, base.TrainerInitInfo),
        (vllm_client.HTTPClient, base.VLLMWeightSyncClient),
        (vllm_trainer.OfflineClient, base.VLLMWeightSyncClient),
    ):
        assert not inspect.isabstract(own), f"{own.__name__} lacks {sorted(own.__abstractmethods__)}"
        for name, method in inspect.getmembers(theirs, callable):
            if not name.startswith("_") or (name, own) == ("__init__", vllm.SparserlEngine):
                assert accepts(method, getattr(own, name)), f"{own.__name__}.{name} cannot be called as vLLM calls it"


def test_a_module(tmp_path: Any) -> None:
    """The factory makes a trainer; the store has the bits of the module, and the engine is told of each version."""
    from vllm.distributed.weight_transfer import ModuleSource

    url = f"file://{tmp_path}/run"
    module = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 3)).to(torch.bfloat16)
    trainer = trainer_of(url, ModuleSource(module))
    assert (trainer.rank, trainer.is_sender) == (0, True)
    for version in (1, 2):
        with torch.no_grad():
            module[0].weight[version] *= 1.5
        report = trainer.send_weights()
        assert report.version == version
        held = stored(url, dict(module.named_parameters()))
        assert all(torch.equal(held[name], tensor) for name, tensor in module.named_parameters())
    trainer.shutdown()
    assert [name for name, _ in trainer.client.calls] == [METHODS[0], *METHODS[1:], *METHODS[1:]]
    assert trainer.client.calls[-1][1] == (f"{report.run}:2",)


def sharded(rank: int, group: Any, _: Any, folder: str) -> Any:
    """Publish a module of FSDP, gathered and in shards; with what is refused."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor
    from vllm.distributed.weight_transfer import ModuleSource

    torch.manual_seed(3)
    module = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 3))
    whole = {name: tensor.detach().clone() for name, tensor in module.named_parameters()}
    fully_shard(module, mesh=init_device_mesh("cpu", (2,)))
    source = ModuleSource(module)
    gathered = trainer_of(f"{folder}/gathered", source, rank)
    seen = [None if (report := gathered.send_weights()) is None else report.version]
    gathered.shutdown()
    if not has_parts():
        with pytest.raises(SessionError, match="ModuleSource has no iter_local"):
            trainer_of(f"{folder}/parts", source, rank, writers=group)
        return seen
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DTensor, "full_tensor", lambda _: pytest.fail("a tensor was gathered"))
        trainer = trainer_of(f"{folder}/parts", source, rank, writers=group)
        with torch.no_grad():
            for tensor in module.parameters():
                tensor.to_local().mul_(2)
        seen.append(trainer.send_weights().version)
    trainer.shutdown()
    dist.barrier()
    if rank == 0:
        held = stored(f"{folder}/parts", whole)
        seen.append(all(torch.equal(held[name], 2 * tensor) for name, tensor in whole.items()))
    return seen


def test_a_module_in_shards(tmp_path: Any) -> None:
    """Rank 0 publishes what all gather; with `writers` each rank publishes its shards, and nothing is gathered."""
    with ranks(2, sharded, f"file://{tmp_path}") as started:
        assert results(started) == ([[1, 1, True], [None, 1]] if has_parts() else [[1], [None]])


def test_any_placements() -> None:
    """The parts that ranks publish of parameters on any meshes are each element once, with its own value."""
    if not has_parts():
        pytest.skip("sources of this vLLM give no parts")
    from vllm.distributed.weight_transfer.base import ParamMeta, Replicate, Shard

    from sparserl.integrations.vllm_trainer import _parts_of

    axes = (Replicate(), Shard(0), Shard(1))
    metas = [ParamMeta("everywhere", torch.float32, (3, 2)), ParamMeta("one", torch.float32, (), owners=(2,))]
    metas += [ParamMeta("none", torch.float32, (0, 3), owners=(1, 3), placements=(Shard(1),))]
    for shape in ((5, 3), (1, 4)):
        for i, placements in enumerate(itertools.product(axes, repeat=2)):
            name, owners = f"{shape} {i}", (4, 1, 0, 2, 3, 5)
            metas.append(ParamMeta(name, torch.float32, shape, owners=owners, mesh_shape=(3, 2), placements=placements))
    tensors = {m.name: torch.arange(float(torch.Size(m.shape).numel())).reshape(m.shape) for m in metas}
    table = tensor_table(tensors)
    places = []
    for rank in range(6):
        parts = []
        for meta in metas:
            if meta.owners is None or rank in meta.owners:
                shard = tensors[meta.name]
                index = meta.owners.index(rank) if meta.owners else 0
                coordinate = torch.unravel_index(torch.tensor(index), meta.mesh_shape or (1,))
                for placement, size, at in zip(meta.placements or (), meta.mesh_shape or (), coordinate, strict=False):
                    if isinstance(placement, Shard):
                        chunks = shard.chunk(size, placement.dim)
                        shard = chunks[at] if at < len(chunks) else shard.narrow(placement.dim, 0, 0)
                parts += _parts_of(meta, shard, rank)
        for part in parts:
            assert torch.equal(part.data, tensors[part.tensor][part.region.slices])
        places.append([place for place, _ in sparserl.Shards(table, parts).located()])
    require_whole(table, places)


def test_a_source_that_is_split(tmp_path: Any) -> None:
    """Rank 0 alone would publish a part of the model for all of it: refused before anything is published."""
    from vllm.distributed.weight_transfer import ModuleSource

    class Stage(ModuleSource):
        def held_names(self) -> list[str]:  # until vLLM 0.32
            return ["weight"]

    source = Stage(torch.nn.Linear(2, 3))
    if has_parts():
        from vllm.distributed.weight_transfer.base import ParamMeta

        source = ModuleSource(torch.nn.Linear(2, 3))
        source.__dict__["metadata"] = [ParamMeta("weight", torch.float32, (3, 2), owners=(1,))]
    for rank in (0, 1):
        with pytest.raises(SessionError, match="rank 0 does not have all tensors"):
            trainer_of(f"file://{tmp_path}/run", source, rank)
    assert not (tmp_path / "run").exists()
