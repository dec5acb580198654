"""Asynchronous RL on a vLLM server, with a bound on staleness: no sample is more than so many versions old.

    VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --weight-transfer-config '{"backend": "sparserl"}' \
        --middleware sparserl.integrations.vllm_versions.VersionMiddleware
    python examples/staleness.py MODEL http://localhost:8000 file:///tmp/run --max-lag 1

A thread asks for completions all the time and demands a version that is recent enough; the server refuses while it has
an older one. The trainer publishes at every step and lets the server commit at every second one. It leaves out samples
that have become too old while they waited. The task is to write even tokens.
"""

from __future__ import annotations

import argparse
import queue
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import requests
import torch
from transformers import AutoModelForCausalLM
from vllm.distributed.weight_transfer import ModuleSource

from sparserl.integrations.vllm_trainer import HTTPClient, SparserlTrainer, SparserlTrainerInitInfo
from sparserl.integrations.vllm_versions import END_VERSION, MIN_VERSION, START_VERSION

PROMPT = [1, 5, 9]
TOKENS = 16
COMMIT_EVERY = 2


@dataclass(frozen=True)
class Sample:
    """Tokens that followed on the prompt, and the versions that wrote the first and the last of them."""

    tokens: list[int]
    start: int
    end: int


class Rollouts:
    """Samples of a server, none of which began before a version that may be raised at any time."""

    def __init__(self, server: str, model: str, min_version: str) -> None:
        self.min_version = min_version
        self.refused = 0
        self._url = f"{server}/v1/completions"
        self._body: dict[str, Any] = {"model": model, "prompt": PROMPT, "max_tokens": TOKENS, "ignore_eos": True}
        self._body["return_token_ids"] = True
        self._samples: queue.Queue[Sample] = queue.Queue(maxsize=4)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._ask, daemon=True)
        self._thread.start()

    def take(self) -> Sample:
        """The next sample, when there is one."""
        return self._samples.get(timeout=300)

    def end(self) -> None:
        self._ended.set()
        self._thread.join()

    def _ask(self) -> None:
        while not self._ended.is_set():
            headers = {MIN_VERSION: self.min_version}
            answer = requests.post(self._url, json=self._body, headers=headers, timeout=60)
            if answer.status_code == requests.codes.precondition_failed:  # the server has yet to commit
                self.refused += 1
                time.sleep(0.05)
                continue
            answer.raise_for_status()
            start, end = (int(answer.headers[name].rpartition(":")[2]) for name in (START_VERSION, END_VERSION))
            sample = Sample(answer.json()["choices"][0]["token_ids"], start, end)
            while not self._ended.is_set():
                try:
                    self._samples.put(sample, timeout=0.1)
                    break
                except queue.Full:
                    continue


def learn(policy: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: Sequence[Sample]) -> float:
    """One step of REINFORCE; returns the share of even tokens."""
    tokens = torch.tensor([[*PROMPT, *sample.tokens] for sample in batch])
    rewards = (tokens[:, len(PROMPT) :] % 2 == 0).float()
    logits = policy(input_ids=tokens).logits[:, len(PROMPT) - 1 : -1].float()
    chosen = logits.log_softmax(-1).gather(-1, tokens[:, len(PROMPT) :, None])[..., 0]
    (-(rewards - rewards.mean()) * chosen).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(rewards.mean())


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model")
    parser.add_argument("server")
    parser.add_argument("store")
    parser.add_argument("--max-lag", type=int, default=1, help="how many versions old a sample may be")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=4)
    options = parser.parse_args(arguments)
    if options.max_lag < COMMIT_EVERY - 1:
        parser.error(f"--max-lag must be at least {COMMIT_EVERY - 1}: the server commits every {COMMIT_EVERY} versions")

    policy = AutoModelForCausalLM.from_pretrained(options.model, dtype="auto")
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.1)
    info = SparserlTrainerInitInfo(rank=0, url=options.store)
    trainer = SparserlTrainer.trainer_init(info, client=HTTPClient(options.server), source=ModuleSource(policy))
    report = trainer.send_weights()  # from now on the server has a version of this run
    rollouts = Rollouts(options.server, options.model, f"{report.run}:{report.version}")
    stale = 0
    for step in range(1, options.steps + 1):
        batch: list[Sample] = []
        while len(batch) < options.batch:
            sample = rollouts.take()
            if report.version - sample.start <= options.max_lag:
                batch.append(sample)
            else:
                stale += 1
        reward = learn(policy, optimizer, batch)
        report = trainer.publish()
        rollouts.min_version = f"{report.run}:{max(report.version - options.max_lag, 0)}"
        if step % COMMIT_EVERY == 0:
            trainer.commit(report.version)
        spread = f"{min(sample.start for sample in batch)} to {max(sample.end for sample in batch)}"
        print(f"version {report.version} learnt from versions {spread}, {reward:.0%} even")
    rollouts.end()
    trainer.shutdown()
    print(f"{stale} samples were too old when they were taken; the server refused {rollouts.refused} requests")


if __name__ == "__main__":
    main()
