"""One run of the study: fp32 masters are trained, and at every sync cast to each precision and held against the last.

Changes are counted by torch at every sync in every precision. Sizes, classes and steps are a `Recorder`'s, whose counts
must be the same. NAME.jsonl has the syncs, and NAME-apart.jsonl the last version held against earlier ones, where
`version` is how many syncs lie between them.
"""

from __future__ import annotations

import copy
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from examples.rl import policy, task
from examples.rl.losses import ALGORITHMS, group_advantages
from examples.rl.options import PARTS, Options
from examples.rl.queue import Job, Rollouts
from examples.rl.task import Tokenizer
from examples.rl.weights import bits, narrow
from examples.rl.worker import Answers
from sparserl.record import Recorder

PRECISIONS = ("fp32", "fp16", "bf16", "fp8")
DISTANCES = (2, 4, 8, 16, 32)  # syncs between two versions that are compared, beside 1
EVERY = {"bf16": 1, "fp16": 8, "fp8": 8}  # syncs from one that is recorded to the next; the first and last always are
SFT = "sft"
BLOCK = 128
Weights = dict[str, Tensor]


@dataclass(frozen=True)
class Point:
    """One run. `model` is `tiny`, `smollm2-135m`, or a folder; `algorithm` that of a loss, or `sft`.

    `start`: which numbers the masters are at first. Checkpoints are published in bf16, so that each master is in the
    middle of what is rounded to the same bits; with `fp32` it can be anywhere.
    """

    name: str
    model: str
    algorithm: str
    lr: float
    syncs: int
    prompts: int = 8
    group: int = 8
    warm_up: int = 200
    beta2: float = 0.999
    eps: float = 1e-8
    start: str = "bf16"
    seed: int = 0


class Run:
    """Masters under AdamW, and the bf16 copy of them that answers."""

    def __init__(self, point: Point, device: str, doing: Callable[[str], None]) -> None:
        self._point, self._rng = point, random.Random(point.seed)
        algorithm = "grpo" if point.algorithm == SFT else point.algorithm
        self._options = Options(algorithm=algorithm, device=device, prompts=point.prompts, group=point.group)
        doing("the model is made, and learns before RL if it is the tiny one")
        model, self._tokenizer, self._before = _begun(point.model, point.warm_up, point.seed)
        self._model = copy.deepcopy(model).to(device)
        self._rollout = narrow(copy.deepcopy(self._model), torch.bfloat16).requires_grad_(False).eval()
        if point.start == "bf16":
            self._copy(to=self._model, of=self._rollout)
        self._answers = Answers(self._options, self._rollout, self._tokenizer, self._before)
        how = {"lr": point.lr, "betas": (0.9, point.beta2), "eps": point.eps, "weight_decay": 0.0}
        self._optimizer = torch.optim.AdamW(self._model.parameters(), **how)

    def step(self, sync: int) -> float | None:
        """One optimizer step; the mean reward of what it was learnt from, if that was sampled."""
        reward = None
        if self._point.algorithm == SFT:
            lines = task.lines(self._point.prompts * self._point.group, 1.0, self._rng)
            loss = policy.line_loss(self._model, self._tokenizer, self._before, lines)
        else:
            self._copy(to=self._rollout, of=self._model)
            jobs = (Job(sync, part, sync, True) for part in range(PARTS))
            found = Rollouts.joined([self._answers.to(job, sync) for job in jobs])
            loss, reward = self._loss(found), found.reward
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()
        return reward

    def masters(self) -> Weights:
        """The fp32 weights, where the optimizer writes them; tied ones once."""
        return {name: parameter.detach() for name, parameter in self._model.named_parameters()}

    @torch.no_grad()
    def loss(self, lines: list[str], precision: str) -> float:
        """What the casts of the masters to some floats still have to learn from lines, computed in fp32."""
        kept = {name: master.clone() for name, master in self.masters().items()}
        for name, master in self.masters().items():
            master.copy_(cast({name: kept[name]}, precision)[name])
        found = float(policy.line_loss(self._model, self._tokenizer, self._before, lines))
        for name, master in self.masters().items():
            master.copy_(kept[name])
        return found

    @staticmethod
    @torch.no_grad()
    def _copy(to: Any, of: Any) -> None:
        for written, read in zip(to.parameters(), of.parameters(), strict=True):
            written.copy_(read)

    def _loss(self, found: Rollouts) -> Tensor:
        advantages = group_advantages(found.rewards).flatten()
        tokens, old, gained, mask = (
            t.to(self._model.device) for t in (found.tokens, found.old, advantages, found.mask)
        )
        return ALGORITHMS[self._point.algorithm](policy.log_probs(self._model, tokens), old, gained, mask)


@lru_cache(1)
def _begun(model: str, warm_up: int, seed: int) -> tuple[Any, Tokenizer, str]:
    """The model before RL, which all runs of one process share."""
    found = policy.build(model, seed)
    if model in policy.MADE:
        policy.learn(found[0], warm_up, Options().right, seed, lambda _: None)
    return found


def cast(masters: Mapping[str, Tensor], precision: str) -> Weights:
    """A copy of the masters as a rollout of some precision has them.

    In fp8 all matrices are codes and scales of blocks, embeddings included; norms are in bf16.
    """
    if precision == "fp8":
        return {name: made for master in masters.items() for name, made in _fp8(*master)}
    dtype = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[precision]
    return {name: tensor.to(dtype, copy=True) for name, tensor in masters.items()}


def _fp8(name: str, master: Tensor) -> list[tuple[str, Tensor]]:
    """What `sparserl.sources.fp8_blockwise` makes of a finite tensor, on the device where it is."""
    if master.dim() != 2:
        return [(name, master.to(torch.bfloat16))]
    rows, columns = master.shape
    blocks = torch.nn.functional.pad(master, (0, -columns % BLOCK, 0, -rows % BLOCK))
    blocks = blocks.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))
    scales = blocks.abs().amax((1, 3))
    scales /= scales.new_full((1,), 448.0)
    scales[scales < torch.finfo(torch.float32).tiny] = 1.0
    codes = (blocks / scales[:, None, :, None]).flatten(2).flatten(0, 1)[:rows, :columns]
    return [(name, codes.contiguous().to(torch.float8_e4m3fn)), (f"{name}_scale_inv", scales)]


def count(old: Mapping[str, Tensor], new: Mapping[str, Tensor]) -> list[int]:
    """Changed elements of every tensor, sorted by name; owes nothing to sparserl."""
    return torch.stack([(bits(old[name]) != bits(new[name])).sum() for name in sorted(new)]).tolist()


def run(point: Point, folder: Path, device: str, threads: int | None, doing: Callable[[str], None]) -> dict[str, Any]:
    """Train, write both recordings, and return the counts: changed elements and inactive tensors, by sync."""
    began = time.perf_counter()
    torch.manual_seed(point.seed)
    paths = [folder / f"{point.name}{kind}.jsonl" for kind in ("", "-apart")]
    for path in paths:
        path.unlink(missing_ok=True)
    about = {**asdict(replace(point, model=Path(point.model).name)), "device": _device(device)}
    syncs, apart = (Recorder(path, meta=about) for path in paths)
    trained = Run(point, device, doing)
    last = {precision: cast(trained.masters(), precision) for precision in PRECISIONS}
    kept = {point.syncs: _on_cpu(last["fp32"])} if point.syncs in DISTANCES else {}
    counts: dict[str, Any] = {p: {"changed": [], "inactive": [], "apart": {}} for p in PRECISIONS}
    rewards = []
    for sync in range(1, point.syncs + 1):
        rewards.append(trained.step(sync))
        for precision, before in last.items():
            now = cast(trained.masters(), precision)
            changed = count(before, now)
            counts[precision]["changed"].append(sum(changed))
            counts[precision]["inactive"].append(changed.count(0))
            if sync in (1, point.syncs) or sync % EVERY.get(precision, point.syncs) == 0:
                doing(f"sync {sync} of {point.syncs}: recording {precision}")
                line = syncs.observe(before, now, version=sync, precision=precision, threads=threads)
                if line["changed"] != changed:
                    raise AssertionError(f"{point.name}, sync {sync}, {precision}: the recorder counts differently")
            last[precision] = now
        if point.syncs - sync in DISTANCES:
            kept[point.syncs - sync] = _on_cpu(last["fp32"])
        shares = (f"{p} {counts[p]['changed'][-1] / elements(last[p]):.3%}" for p in PRECISIONS)
        doing(f"sync {sync} of {point.syncs}: {', '.join(shares)}, reward {rewards[-1]}")
    for found in counts.values():
        found["apart"][1] = found["changed"][-1]
    for distance, weights in kept.items():
        doing(f"versions {distance} apart")
        there = {name: tensor.to(device) for name, tensor in weights.items()}
        for precision, now in last.items():
            was = cast(there, precision)
            counts[precision]["apart"][distance] = sum(count(was, now))
            if precision == "bf16":
                apart.observe(was, now, version=distance, precision=precision, threads=threads)
    seconds = round(time.perf_counter() - began, 1)
    return {"about": about, "seconds": seconds, "rewards": rewards, "counts": counts}


def elements(weights: Mapping[str, Tensor]) -> int:
    """How many there are, scales included."""
    return sum(tensor.numel() for tensor in weights.values())


def _on_cpu(weights: Weights) -> Weights:
    return {name: tensor.to("cpu", copy=True) for name, tensor in weights.items()}


def _device(device: str) -> str:
    return torch.cuda.get_device_name() if device == "cuda" else device
