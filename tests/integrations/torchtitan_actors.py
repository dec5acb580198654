"""The actors of torchtitan RL on a CPU, for tests: what is for CUDA alone is put aside, and nothing else.

The trainer's device is the CPU. The generator's model is torchtitan's, in the wrapper that it has for vLLM; the engine
around it is put aside, as torchtitan's worker and attention for vLLM are for GPUs.
"""

# ruff: noqa: E402  # torchtitan looks for devices when it is imported

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch._utils

torch._utils._get_available_device_type = lambda: "cpu"  # before torchtitan is imported, which else takes CUDA

import torch.distributed as dist
from monarch.actor import concurrent_endpoint, this_host
from torchtitan.components.optimizer import default_adamw
from torchtitan.config import CompileConfig, Configurable
from torchtitan.distributed.spmd_types import plain_tensor_to_dtensor_state_dict
from torchtitan.experiments.rl import controller as controller_module
from torchtitan.experiments.rl.actors import generator as generator_module
from torchtitan.experiments.rl.actors.trainer import PolicyTrainer
from torchtitan.experiments.rl.controller import Controller
from torchtitan.experiments.rl.models import attention as attention_module
from torchtitan.experiments.rl.models import vllm_wrapper as wrapper_module
from torchtitan.experiments.rl.renderer import RendererConfig
from torchtitan.models.qwen3 import model_registry
from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config

from sparserl.integrations.torchtitan import FollowingGenerator, PublishingTrainer, StoreController


def fingerprints(tensors: dict[str, Any]) -> dict[str, str]:
    """A hash of the bits of every tensor, gathered if it is sharded."""
    whole = {name: t.full_tensor() if hasattr(t, "full_tensor") else t for name, t in tensors.items()}
    return {
        name: hashlib.sha256(t.detach().view(-1).view(torch.uint8).numpy()).hexdigest() for name, t in whole.items()
    }


class CpuTrainer(PublishingTrainer):
    """torchtitan's trainer on a CPU."""

    @concurrent_endpoint
    async def fingerprints(self) -> dict[str, str]:
        """What a generator must have: the parameters in its dtype, and the buffers as they are."""
        buffers = {id(buffer) for buffer in self.model.buffers()}
        tensors = self.model.state_dict(keep_vars=True)
        return fingerprints({n: t if id(t) in buffers else t.to(torch.bfloat16) for n, t in tensors.items()})

    @concurrent_endpoint
    async def gradients(self, seed: int) -> None:
        """Set gradients, as a backward pass does: the attention that torchtitan RL has works on GPUs only."""
        torch.manual_seed(seed)
        for parameter in self.model.parameters():
            parameter.grad = torch.randn_like(parameter)


class NoAttention(torch.nn.Module):
    """In place of vLLM's attention: no parameters, and a buffer that the trainer does not have."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.register_buffer("_k_scale", torch.tensor(1.0))


class CpuEngine:
    """In place of vLLM's engine, whose workers are for GPUs: the model that torchtitan runs there, and no requests."""

    def __init__(self, spec: Any, config: Any) -> None:
        self.vllm_config = VllmConfig(device_config=DeviceConfig("cpu"))
        self.vllm_config.parallel_config.tensor_parallel_size = config.parallelism.tensor_parallel_degree
        self.prefix_cache_resets = 0
        torch.set_default_dtype(torch.bfloat16)  # as vLLM does
        with set_current_vllm_config(self.vllm_config):
            model = wrapper_module.VLLMModelWrapper(
                model_spec=spec,
                parallelism=config.parallelism,
                compile_config=CompileConfig(enable=False),
                checkpoint_config=config.checkpoint,
                vllm_config=self.vllm_config,
                override=config.override,
            )
        torch.set_default_dtype(torch.float32)
        self.model_executor = SimpleNamespace(driver_worker=SimpleNamespace(get_model=lambda: model))

    def reset_prefix_cache(self, *, reset_running_requests: bool) -> None:
        assert reset_running_requests
        self.prefix_cache_resets += 1

    def has_unfinished_requests(self) -> bool:
        return False


class CpuGenerator(FollowingGenerator):
    """torchtitan's generator, with its model on a CPU."""

    def __init__(self, config: Any, *, model_spec: Any, **options: Any) -> None:
        if not dist.is_initialized():
            dist.init_process_group("gloo")  # as vLLM does
        attention_module.Attention = NoAttention
        wrapper_module._patch_vllm_all_reduce = lambda: None  # for GPUs; nothing is computed here
        generator_module.register_to_vllm = lambda *_args, **_options: None
        generator_module.EngineArgs = dict
        generator_module.VLLMCudagraphConfig.get_vllm_compilation_config = lambda *_args, **_options: None
        generator_module.LLMEngine = SimpleNamespace(from_engine_args=lambda _: CpuEngine(model_spec, config))
        super().__init__(config, model_spec=model_spec, **options)

    @concurrent_endpoint
    async def fingerprints(self) -> dict[str, str]:
        """Of the tensors that the engine computes with, as torchtitan's state dict shows them."""
        model = self._get_model()
        tensors = plain_tensor_to_dtensor_state_dict(
            model.model.state_dict(),
            state_dict_layouts=model.get_state_dict_layouts(),
            parallel_dims=model.parallel_dims,
        )
        return fingerprints(tensors)

    @concurrent_endpoint
    async def synced(self) -> tuple[int, int, int]:
        """The policy version, the version of the run, and how often the prefix cache was reset."""
        return self.policy_version, self._subscriber.version, self._engine.prefix_cache_resets


class CpuController(StoreController):
    """The controller, with these actors."""

    trainer_class = CpuTrainer
    generator_class = CpuGenerator

    async def setup_async(self, **meshes: Any) -> None:
        async def initialize(**options: Any) -> None:
            """TorchStore's wheel is older than Monarch's, and cannot be started with it; nothing needs it here."""

        controller_module.ts.initialize = initialize
        await super().setup_async(**meshes)


class NoRollouts(Configurable):
    """The controller needs a rollouter; these tests ask generators themselves."""

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        pass

    def __init__(self, config: Config) -> None:
        pass


def small_config(folder: Path, trainer_ranks: int, generator_ranks: int) -> Controller.Config:
    """A config as torchtitan's registries make them, of two layers of its Qwen3, with fused and tied parameters."""
    _save_tokenizer(folder / "assets")
    spec = model_registry("debugmodel", attn_backend="varlen")
    spec.model.layers = spec.model.layers[:2]
    config = Controller.Config(
        model_spec=spec,
        hf_assets_path=str(folder / "assets"),
        dump_folder=str(folder / "out"),
        rollouter=NoRollouts.Config(),
        renderer=RendererConfig(name="default"),
        trainer=PolicyTrainer.Config(optimizer=default_adamw(lr=1e-5)),
    )
    config.compile.enable = False
    config.trainer.parallelism.data_parallel_shard_degree = trainer_ranks
    config.trainer.parallelism.spmd_backend = (
        "partial_dtensor"  # torchtitan's default needs a newer FSDP than torch 2.13
    )
    config.generator.parallelism.tensor_parallel_degree = generator_ranks
    config.generator.cudagraph.enable = False
    return config


def _save_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {f"w{i}": i for i in range(2047)} | {"<end>": 2047}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", chat_template=template).save_pretrained(
        folder
    )


class Processes:
    """Processes for actors, in which this module is imported before any of torchtitan; `actors` has them by name."""

    def __init__(self, count: int) -> None:
        self._mesh = this_host().spawn_procs(per_host={"gpus": count}, bootstrap=_imported)
        self.actors: dict[str, Any] = {}

    def spawn(self, name: str, *args: Any, **options: Any) -> Any:
        self.actors[name] = self._mesh.spawn(name, *args, **options)
        return self.actors[name]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._mesh, name)


def _imported() -> None:
    pass
