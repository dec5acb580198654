"""A rank of a trainer of slime or miles, as a process: Megatron-core's model on a CPU, and what they do at an update.

Without a checkout, a few lines stand for the framework: they load the hook and call the class that it puts in place as
both frameworks do, which other tests hold against their code.
"""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import torch

from tests.integrations.sglang_server import HEAD, HEADS, HIDDEN, INNER, LAYERS, VOCAB, checkpoint

OPTIONS = {
    "colocate": False,
    "offload_train": False,
    "offload_rollout": False,
    "check_weight_update_equal": False,
    "use_critic": False,
    "update_weight_mode": "full",
    "update_weight_transport": "nccl",
    "update_weight_transfer_mode": "broadcast",
    "pause_generation_mode": "retract",
    "indep_dp": False,
}


def save_checkpoint(folder: Path) -> None:
    """The config of the model, as it is beside the checkpoint that engines begin with."""
    from transformers import Qwen2Config

    config = Qwen2Config(
        hidden_size=HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=1,
        intermediate_size=INNER,
        vocab_size=VOCAB,
        max_position_embeddings=64,
        tie_word_embeddings=False,
        dtype="bfloat16",
    )
    assert config.hidden_size // config.num_attention_heads == HEAD
    config.save_pretrained(folder)


def megatron_chunk(folder: Path) -> torch.nn.Module:
    """Megatron-core's own model, in bf16."""
    from transformers import AutoConfig

    from tests.sources.megatron_models import megatron_model

    config = AutoConfig.from_pretrained(folder)
    config.head_dim = HEAD
    return megatron_model("qwen2", config).bfloat16()


@torch.no_grad()
def fill(chunk: torch.nn.Module, folder: Path, version: int) -> None:
    """Give the model of this rank the weights of a version."""
    from transformers import AutoConfig

    from tests.sources import megatron_models

    megatron_models.fill(chunk, AutoConfig.from_pretrained(folder), checkpoint(version))


class Engine:
    """An engine as a trainer sees it: an actor of Ray."""

    def __init__(self, url: str) -> None:
        host, _, port = url.removeprefix("http://").partition(":")
        self.get_url = SimpleNamespace(remote=lambda: url)
        self.get_server_info = SimpleNamespace(remote=lambda: {"host": host, "port": int(port)})


def load(path: str):
    """As both frameworks load a function by its path."""
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def stand_in(framework: str, group) -> ModuleType:
    """The few modules of a framework that the hooks ask for, and Ray."""
    actor = ModuleType(f"{framework}.backends.megatron_utils.actor")
    actor.UpdateWeightFromDistributed = None
    distributed = ModuleType(f"{framework}.utils.distributed_utils")
    distributed.get_gloo_group = lambda: group
    for module in (actor, distributed):
        *path, _ = module.__name__.split(".")
        for i in range(len(path)):
            sys.modules.setdefault(".".join(path[: i + 1]), ModuleType(path[i]))
        sys.modules[module.__name__] = module
    sys.modules[f"{framework}.backends.megatron_utils"].actor = actor
    sys.modules["ray"] = ModuleType("ray")
    sys.modules["ray"].get = lambda refs: refs
    return actor


def train(rank, group, pipe, environment: dict[str, str], folder: Path, sizes: dict[str, int], framework: str):
    """Do as the test says: fill the model with a version, or update the engines."""
    os.environ.update(environment)
    from tests.sources.megatron_models import megatron_ranks

    actor = stand_in(framework, group)
    args = SimpleNamespace(hf_checkpoint=str(folder), **OPTIONS)
    load(f"sparserl.integrations.slime_megatron.publish_in_{framework}")(args)
    with megatron_ranks(sizes.get("tp", 1), sizes.get("pp", 1)):
        chunk = megatron_chunk(folder)
        more = {"is_lora": False} if framework == "miles" else {}
        updater = actor.UpdateWeightFromDistributed(
            args, [chunk], weights_getter=dict, model_name="qwen2config", quantization_config=None, **more
        )
        obey(pipe, lambda version: fill(chunk, folder, version), lambda urls: update(updater, urls))


def update(updater, urls):
    """As the actor does it, with engines that may be new."""
    engines = [Engine(url) for url in urls]
    updater.connect_rollout_engines(engines, None, engine_gpu_counts=[1] * len(engines), engine_gpu_offsets=[0])
    updater.update_weights()
    return updater.pop_metrics()


def obey(pipe, fill_model, update_engines) -> None:
    """Answer the test until it has no more orders."""
    for order, said in iter(pipe.recv, None):
        try:
            answer = update_engines(said) if order == "update" else fill_model(said)
        except Exception as error:  # noqa: BLE001  # the test looks at it
            answer = error
        pipe.send(answer)
