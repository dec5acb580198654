"""An engine of DeepSpeed's ZeRO-3, on a CPU, for one of two ranks; and the whole weights that its ranks share."""

from __future__ import annotations

import os
import warnings

import torch

CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "bf16": {"enabled": True},
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
}


def join(rank: int, port: int) -> None:
    """Begin DeepSpeed in this process, before any model is made."""
    os.environ |= {"DS_ACCELERATOR": "cpu", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_SIZE": "2"}
    warnings.simplefilter("ignore")
    import deepspeed

    deepspeed.init_distributed("gloo")


def engine_of(model: torch.nn.Module, learning_rate: float, persistence_threshold: int = 50):
    """A model that ZeRO-3 shards, and trains by AdamW. Parameters below the threshold stay whole."""
    import deepspeed

    zero = {"stage": 3, "stage3_param_persistence_threshold": persistence_threshold}
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=learning_rate)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=CONFIG | {"zero_optimization": zero})
    return engine


def whole_weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Copies of all weights, on every rank.

    Parameters are gathered one by one: of several, DeepSpeed 0.19.6 waits for the last that it has launched alone, and
    Gloo may end an earlier one after it. Its tensor then has what the memory had before.
    """
    import deepspeed

    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        with deepspeed.zero.GatheredParameters([parameter]):
            weights[name] = parameter.detach().clone()
    return weights
