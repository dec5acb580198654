"""A rank of slime's own trainer, from a checkout, on a CPU: its actor, its process groups, its choice of an updater.

What is not here is what needs GPUs or a cluster: Ray (calls of actors are calls), SGLang's server, the training of
Megatron-LM (the model is Megatron-core's own, of tests/sources), and the memory of a GPU, which slime gives back while
a critic trains. slime asks an accelerator for everything else; here it is a CPU, with Gloo.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest.mock import MagicMock

import torch

from sparserl.integrations.sglang_plugin import LOADER
from tests.integrations import slime_trainer

MISSING = (
    "ray",
    "torch_memory_saver",
    "wandb",
    "httpx",
    "megatron.training",
    "sglang",
    "sglang_router",
    "polars",
    "mooncake",
)


class Stubs(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds packages that are not installed, all of whose names are mocks."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None):
        if any(name == package or name.startswith(f"{package}.") for package in MISSING):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        module = ModuleType(spec.name)
        module.__getattr__ = self._name
        return module

    def exec_module(self, module) -> None:
        pass

    def _name(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock(name=name)


class OnHost(torch.overrides.TorchFunctionMode):
    """Memory is not pinned where there is no GPU."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        kwargs.pop("pin_memory", None)
        return func(*args, **kwargs)


def use_checkout(path: str, framework: str) -> None:
    """Import a framework from here on, without Ray."""
    sys.meta_path.append(Stubs())
    sys.path.insert(0, path)
    import ray

    ray.get = lambda refs: refs
    ray.get_gpu_ids = lambda: [0]
    assert Path(importlib.import_module(framework).__path__[0]).parent == Path(path).resolve()


def remote(result):
    """A method of an actor of Ray, which returns this."""
    return SimpleNamespace(remote=lambda *_: result)


def use_cpu() -> None:
    """Have slime take the CPU for its accelerator, and Gloo for NCCL."""
    from slime.utils import accelerator
    from slime.utils.accelerator.base import Accelerator

    answers = {
        "is_available": True,
        "device": torch.device("cpu"),
        "device_name": "cpu",
        "current_device": "cpu",
        "device_count": 1,
        "mem_get_info": (1 << 40, 1 << 40),
        "memory_allocated": 0,
        "memory_reserved": 0,
    } | dict.fromkeys(("set_device", "synchronize", "current_stream", "empty_cache"))
    methods = {name: lambda *_, answer=answer: answer for name, answer in answers.items()}
    names = {"name": "cpu", "device_type": "cpu", "communication_backend_name": "gloo"}
    Cpu = type("Cpu", (Accelerator,), methods | names)  # noqa: N806  # a class
    accelerator.register_accelerator("cpu", Cpu, lambda: True, communication_backends=("gloo",))
    accelerator.set_accelerator(Cpu())


def options(folder: Path, sizes: dict[str, int], given: dict) -> SimpleNamespace:
    """Slime's options: those of an ordinary run, as far as the actor looks at them."""
    values = slime_trainer.OPTIONS | {
        "hf_checkpoint": str(folder),
        "custom_megatron_init_path": "sparserl.integrations.slime_megatron.publish_in_slime",
        "tensor_model_parallel_size": sizes.get("tp", 1),
        "pipeline_model_parallel_size": sizes.get("pp", 1),
        "context_parallel_size": 1,
        "expert_model_parallel_size": 1,
        "num_distributed_optimizer_instances": 1,
        "distributed_timeout_minutes": 2,
        "distributed_backend": "nccl",
        "enable_gloo_process_groups": True,
        "seed": 1,
        "num_gpus_per_node": 8,
        "micro_batch_size": 1,
        "global_batch_size": 4,
        "data_parallel_size": 1,
        "vocab_size": None,
        "update_weight_start_version": 0,
    }
    return MockedOptions(**values | given)


class MockedOptions(SimpleNamespace):
    """Options that nobody has set are None, as most of them are by default."""

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)


def engines_of(urls: list[str]) -> list[SimpleNamespace]:
    """Slime's own engines, as handles of actors; they have not started the servers, which are there."""
    from slime.backends.sglang_utils.sglang_engine import SGLangEngine

    handles = []
    for url in urls:
        host, _, port = url.removeprefix("http://").partition(":")
        engine = SGLangEngine(None, 0)
        engine.node_rank = 0
        engine.server_host = host
        engine.server_port = int(port)
        handles.append(SimpleNamespace(get_url=SimpleNamespace(remote=engine.get_url)))
    return handles


def train(rank, group, pipe, environment, folder: Path, sizes: dict[str, int], checkout: str, port: int, given: dict):
    """Do as the test says, in slime's own actor."""
    os.environ.update(environment)
    import torch.distributed as dist

    from tests.sources import megatron_models

    size = dist.get_world_size()
    dist.destroy_process_group()  # the actor makes its own
    use_checkout(checkout, "slime")
    use_cpu()
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    from slime.backends.megatron_utils import actor as module
    from slime.backends.megatron_utils import initialize

    initialize.np = SimpleNamespace(__version__="1.26", random=MagicMock())  # Megatron-LM's demand, not Megatron-core's
    initialize.tensor_parallel = MagicMock()  # seeds of GPUs
    module.init_tracking = MagicMock()
    module.clear_memory = MagicMock()  # of the host: what was pinned
    module.AutoTokenizer = MagicMock()
    chunks = []

    def make_model(args, role):
        megatron_models.prepare_cpu()
        chunk = slime_trainer.megatron_chunk(folder)
        chunks.append(chunk)
        return [chunk], None, None, -1

    @torch.no_grad()
    def lose_memory():
        for parameter in chunks[0].parameters():
            parameter.fill_(7)

    module.initialize_model_and_optimizer = make_model
    module.torch_memory_saver = MagicMock(pause=lose_memory)
    trainer = module.MegatronTrainRayActor(size, rank, "127.0.0.1", port)
    with OnHost(), megatron_models.OnCpu():
        trainer.init(options(folder, sizes, given), "actor")

        def update(urls):
            engines = engines_of(urls)
            trainer.rollout_manager = SimpleNamespace(
                recover_updatable_engines=remote(None),
                get_updatable_engines_and_lock=remote((engines, None, len(engines), [1], [0], [{}])),
                clear_updatable_num_new_engines=remote(None),
            )
            trainer.update_weights()
            return trainer.weight_updater.pop_metrics()

        def fill(version):  # in place of the training
            if trainer.args.offload_train:
                trainer.wake_up()
            slime_trainer.fill(chunks[0], folder, version)
            trainer.weights_backuper.backup("actor")
            if trainer.args.offload_train:
                trainer.sleep()

        with contextlib.suppress(EOFError):
            slime_trainer.obey(pipe, fill, update)


def server_options(rank, group, pipe, checkout: str, framework: str):
    """The loaders that an engine of a framework gives its server, if the user names one."""
    use_checkout(checkout, framework)
    if framework == "slime":
        use_cpu()
    module = importlib.import_module(f"{framework}.backends.sglang_utils.sglang_engine")
    module.ServerArgs = dataclasses.make_dataclass("ServerArgs", ["custom_weight_loader"])
    args = MockedOptions(
        hf_checkpoint="model",
        seed=1,
        num_gpus_per_node=8,
        rollout_num_gpus_per_engine=1,
        sglang_pp_size=1,
        sglang_custom_weight_loader=[LOADER],
        lora_rank=0,
    )
    made, _ = module._compute_server_args(args, 0, "127.0.0.1:1", 2, "127.0.0.1", 3, base_gpu_id=0)
    return made["custom_weight_loader"]
