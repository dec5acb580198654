"""A rollout worker: take a job, go to the version it asks for, answer its questions, hand the answers in.

Started by the trainer as a process of its own: `python -m examples.rl.worker FOLDER NUMBER`. It leaves when it has
been sent home, and when the trainer is gone.
"""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from . import policy, task
from .losses import informative
from .options import PARTS, Options
from .queue import Job, Landed, Queue, Rollouts
from .task import Tokenizer
from .ways import Way
from .weights import Holder

ROUNDS = 3  # times that DAPO samples at most to find enough groups that teach something
PAUSE = 0.01  # seconds between two looks into the queue


class Answers:
    """A model that answers the questions of jobs."""

    def __init__(self, options: Options, model: Any, tokenizer: Tokenizer, before: str) -> None:
        self._options, self._model, self._tokenizer, self._before = options, model, tokenizer, before

    def to(self, job: Job, version: int) -> Rollouts:
        """Rollouts: the same job with the same weights, which are of this version, always gives the same.

        The reward is the mean of the first round: DAPO's further rounds look for groups that teach something.
        """
        count = self._options.prompts // PARTS
        rounds = [self._sample(job, 0, version)]
        while self._options.algorithm == "dapo" and len(rounds) < ROUNDS and _useful(rounds) < count:
            rounds.append(self._sample(job, len(rounds), version))
        rollouts = Rollouts.joined(rounds)
        best = informative(rollouts.rewards).int().argsort(descending=True, stable=True)[:count].sort().values
        rows = (best[:, None] * self._options.group + torch.arange(self._options.group)).flatten()
        return replace(
            rollouts,
            tokens=rollouts.tokens[rows],
            mask=rollouts.mask[rows],
            old=rollouts.old[rows],
            rewards=rollouts.rewards[best],
            reward=rounds[0].reward,
        )

    def _sample(self, job: Job, turn: int, version: int) -> Rollouts:
        """A group of answers to each of some new questions."""
        options = self._options
        tokenizer = self._tokenizer
        rng = random.Random(f"{options.seed}/{job.name}/{turn}")
        generator = torch.Generator().manual_seed(rng.getrandbits(63))
        questions = task.questions(options.prompts // PARTS, rng)
        prompts = [tokenizer.encode(self._before + question) for question in questions]
        width = max(map(len, prompts)) + task.LONGEST
        tokens = torch.zeros((len(questions), options.group, width), dtype=torch.long)
        mask, old = (torch.zeros((len(questions), options.group, width - 1)) for _ in range(2))
        rewards = torch.zeros((len(questions), options.group))
        for length in sorted(set(map(len, prompts))):
            same_length = [i for i, prompt in enumerate(prompts) if len(prompt) == length]
            batch = torch.tensor([prompts[i] for i in same_length for _ in range(options.group)], device=options.device)
            answers, chances = (
                t.cpu().view(len(same_length), options.group, -1)
                for t in policy.answer(self._model, batch, tokenizer.end, generator)
            )
            tokens[same_length, :, :length] = batch.cpu().view(len(same_length), options.group, -1)
            tokens[same_length, :, length : length + task.LONGEST] = answers.clamp(min=0)
            mask[same_length, :, length - 1 : length - 1 + task.LONGEST] = (answers >= 0).float()
            old[same_length, :, length - 1 : length - 1 + task.LONGEST] = chances
            for i, group in zip(same_length, answers.tolist(), strict=True):
                texts = (tokenizer.decode([t for t in answer if t >= 0]) for answer in group)
                rewards[i] = torch.tensor([task.reward(questions[i], text) for text in texts])
        flat = (tensor.flatten(0, 1) for tensor in (tokens, mask, old))
        return Rollouts(*flat, rewards, float(rewards.mean()), len(questions), version)


class Worker:
    """Answers questions with the weights that it holds."""

    def __init__(self, options: Options, folder: Path, tell: Callable[[Landed], None], number: int, way: Way) -> None:
        model, tokenizer, before = policy.build(options.model, options.seed)
        self.holder = Holder(model.requires_grad_(False).eval(), options, folder, tell, number, way)
        self._answers = Answers(options, self.holder.model, tokenizer, before)

    def do(self, job: Job) -> Rollouts:
        """Answer the questions of a job with the version that it asks for."""
        self.holder.goto(job.version if job.exact else None, job.version)
        assert self.holder.version is not None
        return replace(self._answers.to(job, self.holder.version), weights=self.holder.fingerprint)


def _useful(rounds: list[Rollouts]) -> int:
    return sum(int(informative(rollouts.rewards).sum()) for rollouts in rounds)


def main(folder: Path, number: int, way: Way) -> int:
    """Work until sent home."""
    trainer = os.getppid()
    torch.set_num_threads(1)
    queue = Queue(folder)
    options = Options.load(folder / "options.json")
    worker = Worker(options, folder, queue.tell, number, way)
    while os.getppid() == trainer:
        if (job := queue.claim(number)) is not None:
            queue.answer(job, worker.do(job), number)
        elif (last := queue.stopped()) is not None:
            worker.holder.goto(last)
            worker.holder.close()
            return 0
        else:
            worker.holder.look()
            time.sleep(PAUSE)
    return 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2]), Way()))
