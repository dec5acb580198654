"""How sparse RL is: what a sync changes, by precision, learning rate, algorithm, distance, tensor and magnitude.

    python -m research.study tiny                                  a tiny model on the CPU: minutes
    python -m research.study 135m --device cuda --jobs 10          SmolLM2-135M, ten runs side by side on a GPU
    python -m research.study tiny --points grpo-5e-06 --syncs 4    one of the runs, shorter
    python -m research.study traces                                what the recorded traces say
    python -m research.study --render                              tables and plots of research/results/study.md again

A run that is in the file already is not made again. Every run is written down when it is whole.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks import traces
from examples.rl import policy
from research.study import page as study_page
from research.study.run import SFT, Point, run
from research.study.summary import summary
from research.study.traces import replay

RESULTS = Path(__file__).resolve().parents[1] / "results"
SYNCS = 40  # of a run; longer and shorter ones are families of their own
RATES = (5e-7, 1e-6, 3e-6, 5e-6, 2e-5)
MODELS = {"tiny": "tiny", "135m": "smollm2-135m"}


def points(preset: str, model: str, syncs: int, start: str) -> dict[str, Point]:
    """The runs of a preset: learning rates, algorithms, and what else could explain a figure."""
    usual = 1e-6
    made = [Point(f"grpo-{lr:g}", model, "grpo", lr, syncs) for lr in RATES]
    made += [Point(f"{name}-{usual:g}", model, name, usual, syncs) for name in ("dapo", "gspo", SFT)]
    made.append(Point(f"sft-{RATES[-1]:g}", model, SFT, RATES[-1], syncs))
    made.append(Point(f"grpo-{usual:g}-beta2-0.98", model, "grpo", usual, syncs, beta2=0.98))
    made.append(Point(f"grpo-{usual:g}-eps-1e-15", model, "grpo", usual, syncs, eps=1e-15))
    family = preset if start == "bf16" else f"{preset}-from-{start}"
    family += "" if syncs == SYNCS else f"-{syncs}-syncs"
    return {f"{family}/{p.name}": replace(p, name=f"{family}-{p.name}", start=start) for p in made}


def one(key: str, point: Point, folder: Path, device: str, threads: int) -> dict[str, Any]:
    """A run, in a process of its own where there are several."""
    torch.set_num_threads(1 if point.model in policy.MADE else threads)
    began = time.perf_counter()
    said = began

    def doing(what: str) -> None:
        nonlocal said
        if (now := time.perf_counter()) > said + 2:
            said = now
            print(f"{now - began:6.1f} s  {key}  {what}", file=sys.stderr, flush=True)

    counted = run(point, folder, device, threads, doing)
    return summary(counted, folder / f"{point.name}.jsonl", folder / f"{point.name}-apart.jsonl")


def study(wanted: dict[str, Point], out: Path, folder: Path, device: str, jobs: int) -> dict[str, Any]:
    """Make the runs that are not in the file yet; the file as it then is."""
    found: dict[str, Any] = json.loads(out.read_text()) if out.exists() else {}
    left = {key: point for key, point in wanted.items() if key not in found}
    folder.mkdir(parents=True, exist_ok=True)
    threads = -(-(os.cpu_count() or 1) // max(1, min(jobs, len(left))))
    with ProcessPoolExecutor(max(1, jobs), multiprocessing.get_context("spawn")) as pool:
        futures = {pool.submit(one, key, point, folder, device, threads): key for key, point in left.items()}
        for future in as_completed(futures):
            key = futures[future]
            if error := future.exception():
                print(f"{key}: failed, {error!r}", file=sys.stderr, flush=True)
                continue
            found[key] = future.result()
            keep(found, out)
            print(f"{key}: done, {len(found)} in {out}", file=sys.stderr, flush=True)
    return found


def keep(found: dict[str, Any], out: Path) -> None:
    """Write the file, a line for each run; it is whole at any time."""
    runs = (f'"{key}":{json.dumps(found[key], separators=(",", ":"), sort_keys=True)}' for key in sorted(found))
    half = out.with_suffix(".half")
    half.write_text("{\n" + ",\n".join(runs) + "\n}\n")
    half.rename(out)


def arguments(argv: list[str] | None) -> argparse.Namespace:
    """What was asked for."""
    parser = argparse.ArgumentParser(
        prog="python -m research.study", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("preset", nargs="?", choices=[*MODELS, "traces"], default="tiny")
    add("--points", default="", help="only these runs of the preset, with commas between them")
    add("--syncs", type=int, default=SYNCS, help="versions of a run (default %(default)s)")
    add("--start", choices=["bf16", "fp32"], default="bf16", help="which numbers masters are at first (%(default)s)")
    add("--device", choices=["cpu", "cuda"], default="cpu")
    add("--jobs", type=int, default=1, help="runs at a time (default %(default)s)")
    add("--model", default="", help="the model in a folder instead, as transformers saves it")
    add("--out", type=Path, default=RESULTS / "study.json", help="figures of all runs (default %(default)s)")
    add("--recordings", type=Path, help="keep the recordings of every sync in this folder")
    add("--json", action="store_true", help="print the figures of the runs that were asked for")
    add("--render", action="store_true", help="run nothing; write the tables and plots from --out")
    given = parser.parse_args(argv)
    every = points(given.preset, given.model or MODELS.get(given.preset, ""), given.syncs, given.start)
    asked = set(given.points.split(",")) - {""}
    given.wanted = {key: point for key, point in every.items() if not asked or key.split("/")[1] in asked}
    if unknown := asked - {key.split("/")[1] for key in given.wanted}:
        parser.error(f"no such run: {min(unknown)}; there are {', '.join(key.split('/')[1] for key in every)}")
    return given


def main(argv: list[str] | None = None) -> int:
    """Run what is left to be run."""
    given = arguments(argv)
    if given.render:
        study_page.write(json.loads(given.out.read_text()), RESULTS)
        return 0
    if given.preset == "traces":
        folder = traces.find_traces()
        found = json.loads(given.out.read_text()) if given.out.exists() else {}
        keep({**found, **{f"traces/{run}": replay(folder, run) for run in traces.runs(folder)}}, given.out)
        return 0
    with tempfile.TemporaryDirectory(prefix="sparserl-study-") as scratch:
        folder = given.recordings or Path(scratch)
        found = study(given.wanted, given.out, folder, given.device, given.jobs)
    made = {name: found[name] for name in given.wanted if name in found}
    if given.json:
        print(json.dumps(made, indent=1))
    return 0 if len(made) == len(given.wanted) else 1


if __name__ == "__main__":
    sys.exit(main())
