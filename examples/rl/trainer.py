"""The trainer: ask for rollouts, learn from them, publish; once for every sync.

With staleness S, batch n may be answered by version n - S, so it is asked for as soon as that version is published:
workers answer batches n+1 … n+S while the trainer learns from batch n. How old a batch really is, is recorded. With
the schedule `free` workers take the newest version they find; with `fixed` exactly version n - S, and then a run can be
repeated bit for bit.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

import sparserl
from sparserl.record import Recorder

from . import policy, weights
from .fleet import Failed, Inside, Processes, start
from .losses import ALGORITHMS, group_advantages
from .options import PARTS, Options
from .queue import Job, Landed, Rollouts
from .ways import Publisher, Way

RECORDING = "recording.jsonl"


@dataclass
class Sync:
    """One version: how it was learnt, what it took to send, and where it has landed."""

    version: int
    reward: float  # of the rollouts that it was learnt from; for version 0, of nothing
    staleness: int
    sampled: int  # groups
    changed: int
    elements: int
    bytes: int
    dense_bytes: int
    digest: str
    publish: float  # seconds
    tokens: str = ""  # SHA-256 of what was sampled, where a proof asks for it
    rewards: str = ""
    rollout: str = ""  # and of the weights that sampled it
    landed: list[Landed] = field(default_factory=list)

    @property
    def density(self) -> float:
        return self.changed / max(1, self.elements)

    @property
    def ratio(self) -> float:
        return self.dense_bytes / max(1, self.bytes)

    @property
    def pause(self) -> float:
        return max((landed.pause for landed in self.landed), default=0.0)

    @property
    def verified(self) -> bool:
        """Whether every worker that holds it has the bits that were published."""
        good = (not one.difference and one.digest == self.digest != "" for one in self.landed)
        return bool(self.landed) and all(good)


class Trainer:
    """A model in fp32, its optimizer, the publisher and the workers."""

    def __init__(self, options: Options, folder: Path, doing: Callable[[str], None], way: Way | None = None) -> None:
        self.options, self.folder, self._doing, self._way = options, folder, doing, way or Way()
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # or CUDA refuses to be deterministic
        torch.use_deterministic_algorithms(True)
        doing("compiling kernels: a few seconds on the first run, cached for later ones")
        compile_kernels(options)
        self.fleet: Inside | Processes = start(options, folder, self._way)
        self.syncs: list[Sync] = []
        self._publisher: Publisher | None = None
        self._recorder = Recorder(folder / RECORDING, options.described())
        self._before: weights.Weights | None = None  # the last version, for observing

    def learn_before(self) -> None:
        """Make the model, and let it learn the task by half."""
        options = self.options
        model, _, _ = policy.build(options.model, options.seed)
        if options.model in policy.MADE:
            policy.learn(model, options.warm_up, options.right, options.seed, self._doing)
        if options.lora:
            model = with_lora(model, options)
        self.model = model.to(options.device)
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=options.lr, weight_decay=0.0)
        self._published = weights.Published(self.model, self.optimizer, options)
        if options.sparse:
            self._publisher = self._way.publisher(options, self._published, [self._recorder])

    def run(self) -> Iterator[Sync]:
        """All syncs, each as it is published."""
        options = self.options
        next_batch = 0
        yield self._publish(0, None, 0)
        for batch in range(options.syncs):
            while next_batch < min(options.syncs, batch + options.staleness + 1):
                for job in self._jobs(next_batch):
                    self.fleet.ask(job)
                next_batch += 1
            self._doing(f"sync {batch + 1} of {options.syncs}: waiting for rollouts")
            rollouts = Rollouts.joined([self.fleet.take(job) for job in self._jobs(batch)])
            self._doing(f"sync {batch + 1} of {options.syncs}: learning")
            self._learn(rollouts)
            yield self._publish(batch + 1, rollouts, batch - rollouts.version)
        self._doing("waiting for the workers")
        self.fleet.finish(options.syncs)
        self._hear()

    def close(self) -> None:
        """Stop the workers and close the publisher."""
        self.fleet.stop()
        if self._publisher is not None:
            self._publisher.close()

    def _jobs(self, batch: int) -> list[Job]:
        options = self.options
        version = max(0, batch - options.staleness)
        return [Job(batch, part, version, options.schedule == "fixed") for part in range(PARTS)]

    def _learn(self, found: Rollouts) -> None:
        """One optimizer step for each slice of the batch."""
        options = self.options
        advantages = group_advantages(found.rewards).flatten()
        rows = len(advantages) // options.steps
        for step in range(options.steps):
            part = slice(step * rows, (step + 1) * rows)
            tokens, old, gained, mask = (
                t[part].to(options.device) for t in (found.tokens, found.old, advantages, found.mask)
            )
            loss = ALGORITHMS[options.algorithm](policy.log_probs(self.model, tokens), old, gained, mask)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()

    def _publish(self, version: int, found: Rollouts | None, staleness: int) -> Sync:
        """Send the weights on their way, in each form that the modes ask for."""
        options, bits = self.options, None
        if options.full or "observe" in options.modes:
            bits = self._published.dense()
        if bits is not None and options.full:  # before it is published: workers may have it before that returns
            weights.save(bits, self.folder, version, options.staleness + 32)
        began = time.perf_counter()
        changed = elements = size = dense = 0
        digest = ""
        if self._publisher is not None:
            report = self._publisher.publish()
            assert report is not None
            assert report.version == version
            changed, elements, size, dense = report.changed, report.elements, report.bytes, report.dense_bytes
            digest = report.digest
        took = time.perf_counter() - began
        if bits is not None and "observe" in options.modes:
            changed, elements, observed, dense = self._observe(version, bits)
            size = size or observed
        weights.announce(self.folder, version)
        sync = Sync(version, 0.0, staleness, 0, changed, elements, size, dense, digest, took)
        if found is not None:
            sync.reward, sync.sampled, sync.rollout = found.reward, found.sampled, found.weights
            self._recorder.note(version, reward=sync.reward, staleness=staleness)
            if options.fingerprint:
                sync.tokens, sync.rewards = sha256(found.tokens, found.mask, found.old), sha256(found.rewards)
        self.syncs.append(sync)
        self._hear()
        return sync

    def _observe(self, version: int, bits: weights.Weights) -> tuple[int, int, int, int]:
        """Record what a patch from the last version would be, and keep it if that was asked for.

        Changes, elements, bytes of the patch and of all weights. Nothing else is touched.
        """
        before, self._before = self._before, bits
        if self.options.patches:
            base = before or {name: torch.zeros_like(tensor) for name, tensor in bits.items()}
            sparserl.diff(base, bits, to=self.folder / f"{version:06}.patch")
        table = sparserl.tensor_table(bits)
        if before is None:
            return table.elements, table.elements, table.dense_bytes, table.dense_bytes
        line = self._recorder.observe(before, bits, version=version, precision=self.options.dtype)
        return sum(line["changed"]), table.elements, sum(line["profiles"]["auto"].values()), table.dense_bytes

    def _hear(self) -> None:
        """Note down what has landed; bits that are not what was published end the run."""
        for landed in self.fleet.news():
            sync = self.syncs[landed.version]
            sync.landed.append(landed)
            self._recorder.note(landed.version, seconds={"pause": landed.pause})
            if landed.difference:
                raise Failed(f"version {landed.version} at worker {landed.worker}: {landed.difference}")
            if landed.digest not in ("", sync.digest):
                raise Failed(
                    f"version {landed.version} at worker {landed.worker}: digest {landed.digest}, {sync.digest}"
                )


def with_lora(model: torch.nn.Module, options: Options) -> torch.nn.Module:
    """Freeze the model in the dtype that workers compute in, and add adapters in fp32 to its linear layers."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(options.seed)
    narrow = weights.narrow(model, weights.float_dtype(options))
    config = LoraConfig(r=options.lora, lora_alpha=2 * options.lora, target_modules="all-linear")
    return get_peft_model(narrow, config)


def compile_kernels(options: Options) -> None:
    """Send a few numbers there and back, so that trainer and workers need not compile the same kernels at once."""
    there = {"a.weight": torch.randn(256, 256).to(weights.float_dtype(options))}
    if options.dtype == "fp8":
        there = weights.packed(there)
    live = {name: torch.zeros_like(tensor) for name, tensor in there.items()}
    for _ in range(2):
        sparserl.diff(live, there).apply(live)
        for tensor in there.values():
            weights.bits(tensor).view(-1)[::50] ^= 1
    sparserl.digest(live)


def sha256(*tensors: Tensor) -> str:
    """A hash of the bits of some tensors."""
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.contiguous().numpy())
    return found.hexdigest()
