"""Jobs and rollouts, through a folder. Files take their name when they are whole, and a job is claimed by renaming it.

jobs/000007-1.json ──► claimed/000007-1.json.0 (by worker 0) ──► rollouts/000007-1.safetensors
landed/…: which worker holds which version, and whether it is what the trainer published
stop.json: the last version; workers go there and leave
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor


@dataclass(frozen=True)
class Job:
    """A part of a batch: which version must answer it, or, if `exact` is false, which one at least."""

    batch: int
    part: int
    version: int
    exact: bool

    @property
    def name(self) -> str:
        return f"{self.batch:06}-{self.part}"


@dataclass(frozen=True)
class Landed:
    """A version that a worker holds."""

    worker: int
    version: int
    digest: str  # of all weights that patches have made, read anew; "" where there are none, or a proof does without
    pause: float  # seconds for which nothing could be generated
    compared: bool = False  # with all weights that the trainer wrote down
    difference: str = ""  # the first one found
    weights: str = ""  # SHA-256 of them, where a proof asks for it


@dataclass(frozen=True)
class Rollouts:
    """Answers to some questions: `group` rows each, padded on the right."""

    tokens: Tensor  # [answers, tokens]: question and answer
    mask: Tensor  # [answers, tokens - 1]: whether the next token belongs to the answer
    old: Tensor  # [answers, tokens - 1]: its log-probability when it was sampled
    rewards: Tensor  # [questions, group]
    reward: float  # the mean before groups without information were left out
    sampled: int  # groups
    version: int
    weights: str = ""

    @classmethod
    def joined(cls, parts: list[Rollouts]) -> Rollouts:
        """The parts of a batch, in order. The version is the oldest."""
        longest = max(part.tokens.shape[1] for part in parts)

        def rows(name: str, width: int) -> Tensor:
            tensors = [getattr(part, name) for part in parts]
            return torch.cat([torch.nn.functional.pad(t, (0, width - t.shape[1])) for t in tensors])

        return cls(
            rows("tokens", longest),
            rows("mask", longest - 1),
            rows("old", longest - 1),
            torch.cat([part.rewards for part in parts]),
            sum(part.reward for part in parts) / len(parts),
            sum(part.sampled for part in parts),
            min(part.version for part in parts),
            " ".join(part.weights for part in parts),
        )


class Queue:
    """The folder, from either side."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._heard: set[str] = set()
        for name in ("jobs", "claimed", "rollouts", "landed"):
            (folder / name).mkdir(parents=True, exist_ok=True)

    def ask(self, job: Job) -> None:
        """Offer a job to whoever takes it first."""
        self._write(self.folder / "jobs" / f"{job.name}.json", asdict(job))

    def claim(self, worker: int) -> Job | None:
        """The oldest job that nobody has taken; None if there is none."""
        for path in sorted((self.folder / "jobs").glob("*.json")):
            try:
                taken = path.rename(self.folder / "claimed" / f"{path.name}.{worker}")
            except FileNotFoundError:
                continue
            return Job(**json.loads(taken.read_text()))
        return None

    def answer(self, job: Job, rollouts: Rollouts, worker: int) -> None:
        """Hand in what was asked for."""
        path = self.folder / "rollouts" / f"{job.name}.safetensors"
        tensors = {name: value for name, value in vars(rollouts).items() if isinstance(value, Tensor)}
        others = {name: json.dumps(value) for name, value in vars(rollouts).items() if name not in tensors}
        half = path.with_suffix(f".{worker}")
        save_file(tensors, half, others)
        half.rename(path)
        (self.folder / "claimed" / f"{job.name}.json.{worker}").unlink(missing_ok=True)

    def take(self, job: Job) -> Rollouts | None:
        """The answers to a job, if they are there."""
        path = self.folder / "rollouts" / f"{job.name}.safetensors"
        if not path.exists():
            return None
        with safe_open(path, "pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # it is no mapping
            others = {name: json.loads(value) for name, value in file.metadata().items()}
        path.unlink()
        return Rollouts(**tensors, **others)

    def release(self, worker: int) -> None:
        """Offer what a worker had claimed to others: it is gone."""
        for path in (self.folder / "claimed").glob(f"*.json.{worker}"):
            path.rename(self.folder / "jobs" / path.stem)

    def tell(self, landed: Landed) -> None:
        """A worker holds a version."""
        name = f"{landed.version:06}-{landed.worker}-{os.getpid()}.json"
        self._write(self.folder / "landed" / name, asdict(landed))

    def news(self) -> Iterator[Landed]:
        """What workers have told since the last time."""
        for path in sorted((self.folder / "landed").glob("*.json")):
            if path.name not in self._heard:
                self._heard.add(path.name)
                yield Landed(**json.loads(path.read_text()))

    def stop(self, version: int) -> None:
        """Send the workers to the last version, and home."""
        self._write(self.folder / "stop.json", version)

    def stopped(self) -> int | None:
        """The last version, if it has been published."""
        path = self.folder / "stop.json"
        return int(json.loads(path.read_text())) if path.exists() else None

    @staticmethod
    def _write(path: Path, value: object) -> None:
        half = path.with_suffix(f".half{os.getpid()}")
        half.write_text(json.dumps(value))
        half.rename(path)
