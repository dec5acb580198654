"""A rank of miles's own trainer, from a checkout, on a CPU, as slime_checkout.py has it for slime."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import torch

from tests.integrations import slime_trainer
from tests.integrations.slime_checkout import MockedOptions, OnHost, options, remote, use_checkout

MILES = {
    "custom_megatron_init_path": "sparserl.integrations.slime_megatron.publish_in_miles",
    "distributed_backend": "gloo",
    "object_store_backend": "ray",
    "profile_target": [],
    "lora_rank": 0,
    "megatron_to_hf_mode": "raw",
}


def train(rank, group, pipe, environment, folder: Path, sizes: dict[str, int], checkout: str, port: int):
    """Do as the test says, in miles's own actor."""
    os.environ.update(environment)
    import torch.distributed as dist

    from tests.sources import megatron_models

    size = dist.get_world_size()
    dist.destroy_process_group()  # the actor makes its own
    use_checkout(checkout, "miles")
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    torch.cuda.set_device = lambda device: None
    from miles.backends.megatron_utils import actor as module
    from miles.backends.megatron_utils import initialize
    from miles.utils.ft_utils.indep_dp import IndepDPInfo

    initialize.tensor_parallel = MagicMock()  # seeds of GPUs
    for name in ("init_tracking", "clear_memory", "print_memory", "load_tokenizer", "verify_megatron_parallel_state"):
        setattr(module, name, MagicMock())
    chunks = []

    def make_model(args, role, checkpointing_context):
        megatron_models.prepare_cpu()
        chunk = slime_trainer.megatron_chunk(folder)
        chunks.append(chunk)
        return [chunk], None, None, -1

    module.initialize_model_and_optimizer = make_model
    args = options(folder, sizes, MILES)
    with OnHost(), megatron_models.OnCpu():
        trainer = module.MegatronTrainRayActor(args, size, rank, "127.0.0.1", port, None, "actor", 0)
        trainer.init(args, "actor", indep_dp_info=IndepDPInfo.create_trivial())

        def update(urls):
            trainer.rollout_manager = SimpleNamespace(
                clear_updatable_has_new_engines=remote(None), set_weight_version=remote(None)
            )
            engines = engines_of(urls)
            trainer.update_weights(
                SimpleNamespace(
                    rollout_engines=engines,
                    rollout_engine_lock=None,
                    has_new_engines=True,
                    engine_gpu_counts=[1],
                    engine_gpu_offsets=[0],
                )
            )
            return trainer.weight_updater.pop_metrics()

        with contextlib.suppress(EOFError):
            slime_trainer.obey(pipe, lambda version: slime_trainer.fill(chunks[0], folder, version), update)


def engines_of(urls: list[str]) -> list[SimpleNamespace]:
    """Miles's own engines, as handles of actors."""
    from miles.backends.sglang_utils.sglang_engine import SGLangEngine

    handles = []
    for url in urls:
        host, _, port = url.removeprefix("http://").partition(":")
        engine = SGLangEngine(MockedOptions(), 0)
        engine.node_rank = 0
        engine.server_host = host
        engine.server_port = int(port)
        handles.append(SimpleNamespace(get_server_info=SimpleNamespace(remote=engine.get_server_info)))
    return handles
