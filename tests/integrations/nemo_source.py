"""NeMo-RL for tests: the modules of a checkout, or a stand-in with what was read in one.

NeMo-RL is not on the package index. SPARSERL_NEMO_RL names a checkout of github.com/NVIDIA-NeMo/RL. Importing its
packages takes Megatron and more, so that only the modules that are asked for are run, and no `__init__`. Most of these
import Ray.
"""

from __future__ import annotations

import os
import sys
from abc import ABC, abstractmethod
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

TRANSPORT = "sparserl.integrations.nemo_rl:Engine"
BASE = "nemo_rl.utils.checkpoint_engines.base"
PACKAGES = (
    "nemo_rl",
    "nemo_rl.data",
    "nemo_rl.distributed",
    "nemo_rl.models",
    "nemo_rl.models.generation",
    "nemo_rl.models.generation.vllm",
    "nemo_rl.models.policy",
    "nemo_rl.models.policy.workers",
    "nemo_rl.utils",
    "nemo_rl.utils.checkpoint_engines",
    "nemo_rl.weight_sync",
)
METHODS = {  # of the base class, and their parameters
    "prepare": [],
    "init_policy_process_group": ["worker_rank", "train_world_size", "rollout_world_size", "metadata"],
    "init_rollout_process_group": ["rollout_rank", "train_world_size", "rollout_world_size", "metadata"],
    "finalize": [],
    "send_weights": ["weights"],
    "receive_weight_batches": [],
}


class CheckpointEngine(ABC):
    """In the place of NeMo-RL's base class: the same methods are abstract."""

    shard_expert_weights = False

    @abstractmethod
    def prepare(self): ...

    @abstractmethod
    def init_policy_process_group(self, *, worker_rank, train_world_size, rollout_world_size, metadata): ...

    @abstractmethod
    def init_rollout_process_group(self, *, rollout_rank, train_world_size, rollout_world_size, metadata): ...

    @abstractmethod
    async def send_weights(self, weights): ...

    @abstractmethod
    def receive_weight_batches(self): ...


def checkout() -> Path | None:
    """The checkout of NeMo-RL, if there is one."""
    return Path(os.environ["SPARSERL_NEMO_RL"]) if "SPARSERL_NEMO_RL" in os.environ else None


def provide(source: Path | None) -> None:
    """Let modules of NeMo-RL be imported in this process."""
    for name in PACKAGES:
        package = ModuleType(name)
        package.__path__ = [] if source is None else [str(source.joinpath(*name.split(".")))]
        sys.modules[name] = package
    if source is None:
        base: Any = ModuleType(BASE)
        base.CheckpointEngine = CheckpointEngine
        sys.modules[BASE] = base


def engine_class() -> Any:
    """Our engine, under the base class of the checkout or of the stand-in."""
    provide(checkout())
    from sparserl.integrations.nemo_rl import Engine

    return Engine


def without_gpu() -> None:
    """Let NeMo-RL's workers of vLLM run on a CPU: they wait for a GPU, and mark what it does for a profiler."""
    import torch

    torch.cuda.current_stream = lambda: SimpleNamespace(synchronize=lambda: None)
    torch.cuda.nvtx = SimpleNamespace(range_push=lambda name: None, range_pop=lambda: None)


def forget() -> None:
    """Undo `provide`."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "nemo_rl"]:
        del sys.modules[name]
    sys.modules.pop("sparserl.integrations.nemo_rl", None)
