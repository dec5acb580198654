"""Shards of verl's training engines: the names and bits that verl's own export has, with nothing gathered.

verl's functions are run from its wheel. `make test-verl` has its FSDP engine train; its Megatron engine needs a GPU, so
Megatron-core's own model stands here in an object with the attributes of that engine.
"""

from __future__ import annotations

import ast
import contextlib
import re
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

import sparserl
from sparserl.integrations.verl_shards import EngineShards, UnpackedExperts
from sparserl.sources import Source
from sparserl.weights.digest import table_digest
from tests.integrations.test_verl import VERSION
from tests.integrations.wheels import definition, wheel
from tests.sources.megatron_models import fill, megatron_model, megatron_ranks, two_ranks
from tests.sources.transformers_models import transformers_model


def function(path: str, name: str):
    """A function of verl, from its source."""
    tree = ast.Module([definition(wheel("verl", VERSION).tree(path), name)], [])
    module = {"torch": torch, "re": re}
    exec(compile("from __future__ import annotations\n" + ast.unparse(tree), path, "exec"), module)
    return module[name]


@pytest.fixture(name="exported")
def _exported(monkeypatch):
    """What verl's export makes of the tensors of a module."""
    unpack = function("verl/workers/engine/fsdp/utils.py", "unfuse_moe_params")
    rename = function("verl/utils/model.py", "convert_weight_keys")
    for name in ("verl", "verl.utils", "verl.utils.model", "verl.utils.device"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["verl.utils.model"].convert_weight_keys = rename
    sys.modules["verl.utils.device"].get_device_name = lambda: "cuda"

    def exported(module, model_type, dtype=torch.bfloat16):
        weights = rename(module.state_dict(), module)
        return {name: tensor.to(dtype) for name, tensor in unpack(weights.items(), model_type)}

    return exported


class Mixture(torch.nn.Module):
    """A model with packed experts, which transformers calls otherwise than its checkpoints do."""

    def __init__(self) -> None:
        super().__init__()
        self._checkpoint_conversion_mapping = {"^visual": "model.visual"}
        torch.manual_seed(0)
        self.model = torch.nn.Module()
        self.model.visual = torch.nn.Linear(3, 4)
        self.model.mlp = torch.nn.Module()
        self.model.mlp.experts = torch.nn.Module()
        self.model.mlp.experts.gate_up_proj = torch.nn.Parameter(torch.randn(3, 8, 6))
        self.model.mlp.experts.down_proj = torch.nn.Parameter(torch.randn(3, 6, 4))


def engine_of(module, strategy="fsdp2", model_type="qwen3_moe", **more):
    """The attributes of a training engine that are read."""
    model_config = SimpleNamespace(hf_config=SimpleNamespace(model_type=model_type))
    parts = {"engine_config": SimpleNamespace(strategy=strategy), "module": module, "model_config": model_config}
    return SimpleNamespace(**parts | {"is_param_offload_enabled": False} | more)


@pytest.mark.parametrize("model_type", ["qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, None])
def test_names_and_bits_of_the_export(exported, model_type, dtype):
    """Experts are unpacked, but for gpt_oss, and tensors have the names of the checkpoint."""
    module = Mixture()
    shards = EngineShards(engine_of(module, model_type=model_type), dtype).weights()
    wanted = exported(module, model_type, dtype or torch.float32)
    assert "visual.weight" in wanted
    assert sparserl.tensor_table(wanted) == shards.table
    assert sparserl.digest(wanted) == sparserl.digest(shards)


def test_shards_that_cut_experts(exported):
    """A rank may have any box of a packed parameter: its rows of the gate, of the up projection, or of both."""
    module = Mixture()
    wanted = exported(module, "qwen3_moe", torch.float32)
    whole = {name: tensor for name, tensor in module.state_dict().items() if "experts" in name}
    table = sparserl.tensor_table(whole)
    total = None
    for rows in (slice(0, 3), slice(3, 6), slice(6, 8)):
        for columns in (slice(0, 1), slice(1, 6)):
            parts = [_part(name, tensor, rows, columns) for name, tensor in whole.items()]

            class Cut(Source):
                shards = sparserl.Shards(table, [part for part in parts if part is not None])

                def weights(self):
                    return self.shards

            unpacked = UnpackedExperts(Cut(), "qwen3_moe").weights()
            digest = sparserl.digest(unpacked)
            total = digest if total is None else total + digest
    experts = {name: tensor for name, tensor in wanted.items() if "experts" in name}
    assert sparserl.tensor_table(experts) == unpacked.table
    assert sparserl.digest(experts) == total + table_digest(unpacked.table)


def _part(name, tensor, rows, columns):
    """A box of a parameter; None where there is none."""
    data = tensor[:, rows, columns]
    if not data.numel():
        return None
    start = (0, rows.start, columns.start)
    return sparserl.Part(name, sparserl.Region(start, tuple(data.shape)), data)


def test_offloaded_parameters_of_megatron(exported, monkeypatch):
    """They are loaded while they are published, and offloaded again, also when that fails."""
    calls = []
    engine = engine_of(
        [], "megatron", is_param_offload_enabled=True, to=lambda device, **parts: calls.append((device, parts))
    )
    monkeypatch.setattr("sparserl.sources.megatron", lambda model, config: None)
    with contextlib.suppress(RuntimeError), EngineShards(engine, None).in_memory():
        calls.append("publish")
        raise RuntimeError
    parts = {"model": True, "optimizer": False, "grad": False}
    assert calls == [("cuda", parts), "publish", ("cpu", parts)]


@pytest.mark.long
def test_two_ranks_of_megatron(tmp_path):
    """Both halves of a model of Megatron-core, as verl's engine holds it: the bits of the checkpoint."""
    two_ranks(tmp_path, run_megatron)


def run_megatron(_rank):
    from torch import distributed

    _, config, checkpoint = transformers_model("qwen3_moe", "float32")
    with megatron_ranks(tp=2), torch.no_grad():
        model = megatron_model("qwen3_moe", config)
        fill(model, config, checkpoint)
        engine = engine_of([model], "megatron", model_config=SimpleNamespace(hf_config=config), peft_cls=None)
        shards = EngineShards(engine, None).weights()
        digests = [None, None]
        distributed.all_gather_object(digests, sparserl.digest(shards, threads=1))
        assert shards.table == sparserl.tensor_table(checkpoint)
        assert sum(digests, table_digest(shards.table)) == sparserl.digest(checkpoint, threads=1)
