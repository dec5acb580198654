"""What vLLM calls in each of its processes (entry point `vllm.general_plugins`): makes the backend `sparserl` known.

It stands apart from `sparserl` and imports nothing of it: that brings Numba with it, and vLLM 0.32 on a CPU cannot
start a worker in a process where llvmlite is loaded already.
"""

from __future__ import annotations

import os


def register() -> None:
    """Register both sides of the backend; they are imported when they are asked for."""
    from vllm.distributed.weight_transfer import factory

    for registry, module, name in (
        (factory.WeightTransferEngineFactory, "vllm", "SparserlEngine"),
        (factory.WeightTransferTrainerFactory, "vllm_trainer", "SparserlTrainer"),
    ):
        try:
            registry.register_engine("sparserl", f"sparserl.integrations.{module}", name)
        except ValueError:
            continue  # vLLM may load plugins more than once
    if os.environ.get("SPARSERL_VLLM_CPU") == "plain":
        keep_cpu_weights()


def keep_cpu_weights() -> None:
    """Have vLLM's CPU backend compute with weights as they were loaded.

    It would pack them for oneDNN or AMX otherwise, and keep nothing that changes could be written into. vLLM has no
    option for it.
    """
    import torch
    import vllm._custom_ops as ops

    ops._supports_onednn = False  # noqa: SLF001
    torch.cpu._is_amx_tile_supported = lambda: False  # noqa: SLF001
