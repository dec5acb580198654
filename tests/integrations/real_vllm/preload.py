"""What a process imports of which those of engines are forked: importing vLLM takes longer than starting an engine."""

from __future__ import annotations

import importlib
import multiprocessing

from vllm.model_executor.models import registry
from vllm.utils import system_utils

# On a CPU, vLLM would start its own processes anew, and look at classes of models in new ones.
system_utils.get_mp_context = lambda: multiprocessing.get_context("fork")
registry._run_in_subprocess = lambda look: look()

for name in (
    "distributed.weight_transfer",
    "entrypoints.llm",
    "model_executor.models.deepseek_v2",
    "model_executor.models.gemma3",
    "model_executor.models.glm4_moe",
    "model_executor.models.gpt_oss",
    "model_executor.models.idefics3",
    "model_executor.models.llama",
    "model_executor.models.mixtral",
    "model_executor.models.qwen2",
    "model_executor.models.qwen3_moe",
    "v1.executor.multiproc_executor",
    "v1.worker.cpu_worker",
):
    importlib.import_module(f"vllm.{name}")
importlib.import_module("tests.integrations.real_vllm.models")
