"""`python -m benchmarks.load`: one publisher, many subscribers in processes of their own that come and go.

Every subscriber holds live weights, follows, and writes down when it committed which version and with which digest. In
the end every commit is compared with what was published under that version, and the time between the two is told.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import tempfile
import threading
import time
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

import sparserl
from benchmarks import traces
from sparserl.weights.dtypes import BY_NAME

_BF16 = BY_NAME["bfloat16"]
_SPAWN = get_context("spawn")


def subscribe(url: str, size: int, seed: int, out: str, stop: Any) -> None:
    """Follow until told to stop; one line for each commit."""
    weights = {"w": sparserl.Bits(np.zeros(size, np.uint16), _BF16)}
    subscriber = sparserl.Subscriber(url, weights, name=f"load-{seed}", threads=1)
    with Path(out).open("a", buffering=1) as file:

        def note(report: sparserl.SyncReport) -> None:
            line = {"version": report.version, "time": time.time(), "bytes": report.bytes, "digest": report.digest}
            pause = report.seconds["commit"]
            file.write(json.dumps({**line, "kind": report.kind, "pause": pause}) + "\n")

        subscriber.follow(stop=stop.is_set, on_commit=note)
        if subscriber.version is not None:
            subscriber.audit()
        file.write(json.dumps({"audited": subscriber.version}) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--subscribers", type=int, default=64)
    parser.add_argument("--versions", type=int, default=200)
    parser.add_argument("--elements", type=int, default=1 << 20)
    parser.add_argument("--density", type=float, default=0.01)
    parser.add_argument("--every", type=float, default=1.0, help="seconds between versions")
    parser.add_argument("--url", help="the store; a folder of its own if not given")
    parser.add_argument("--out", type=Path, help="write the figures to this file as JSON")
    args = parser.parse_args()
    console = Console(stderr=True)
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        url = args.url or f"file://{folder}/store"
        figures = run(args, url, Path(folder), console, stack)
    text = json.dumps(figures, indent=2)
    console.print(text)
    if args.out is not None:
        args.out.write_text(text + "\n")


class Crowd:
    """Subscribers in processes, which can leave and join again."""

    def __init__(self, url: str, size: int, folder: Path, count: int) -> None:
        self.url, self.size = url, size
        self.logs = [folder / f"{i}.jsonl" for i in range(count)]
        self.stops = [_SPAWN.Event() for _ in self.logs]
        self.processes: list[Any] = [None] * count
        self.left = self.joined = 0
        starters = [threading.Thread(target=self.join, args=(i,)) for i in range(count)]
        for starter in starters:
            starter.start()
        for starter in starters:
            starter.join()

    def join(self, i: int) -> None:
        self.stops[i].clear()
        args = self.url, self.size, i, str(self.logs[i]), self.stops[i]
        self.processes[i] = _SPAWN.Process(target=subscribe, args=args, daemon=True)
        self.processes[i].start()

    def leave(self, i: int) -> None:
        if not self.stops[i].is_set():
            self.stops[i].set()
            self.left += 1

    def back(self, timeout: float = 0.0) -> None:
        """Those that have left join again."""
        for i, process in enumerate(self.processes):
            if self.stops[i].is_set():
                process.join(timeout)
                if not process.is_alive():
                    self.join(i)
                    self.joined += 1

    def end(self) -> int:
        """Stop all; returns how many failed."""
        for stop in self.stops:
            stop.set()
        for process in self.processes:
            process.join(60)
        return sum(process.exitcode != 0 for process in self.processes)

    def kill(self) -> None:
        for process in self.processes:
            process.kill()


def run(args: Any, url: str, folder: Path, console: Console, stack: contextlib.ExitStack) -> dict[str, Any]:
    rng, dice = np.random.default_rng(0), random.Random(0)
    bits, _ = traces.synthetic(2 * args.elements, args.density, 0)
    publisher = sparserl.Publisher(url, {"w": sparserl.Bits(bits, _BF16)})
    published: dict[int, tuple[float, str]] = {}

    def publish() -> None:
        stamp, report = time.time(), publisher.publish()
        assert report is not None
        published[report.version] = stamp, report.digest

    publish()
    console.print(f"starting {args.subscribers} subscribers")
    crowd = Crowd(url, bits.size, folder, args.subscribers)
    stack.callback(crowd.kill)
    publisher.wait(0, args.subscribers, timeout=600)
    for version in range(1, args.versions):
        began = time.monotonic()
        where = rng.random(bits.size) < args.density
        bits[where] += rng.choice(np.array([1, 65535], np.uint16), int(where.sum()))
        publish()
        crowd.back()
        if version % 4 == 0:
            crowd.leave(dice.randrange(args.subscribers))
        if version % 10 == 0:
            console.print(f"version {version}")
        time.sleep(max(0.0, args.every - (time.monotonic() - began)))
    crowd.back(60)
    arrived = publisher.wait(args.versions - 1, args.subscribers, timeout=300)
    failed = crowd.end()
    figures = summary(crowd.logs, published, arrived, crowd.left, crowd.joined, failed)
    command = f"python -m benchmarks.load --subscribers {args.subscribers} --versions {args.versions}"
    command += f" --elements {args.elements} --every {args.every:g}"
    return {"command": command, "elements": bits.size, "density": args.density, **figures}


def summary(
    logs: list[Path], published: dict[int, tuple[float, str]], arrived: int, leaves: int, joins: int, failed: int
) -> dict[str, Any]:
    latencies, pauses, sizes, wrong, commits = [], [], [], 0, 0
    for log in logs:
        lines = [json.loads(line) for line in log.read_text().splitlines()]
        taken = [line for line in lines if "version" in line]
        commits += len(taken)
        wrong += sum(published[line["version"]][1] != line["digest"] for line in taken)
        first = {min(line["version"] for line in taken)} if taken else set()
        steady = [line for line in taken if line["kind"] == "patch" and line["version"] not in first]
        latencies += [line["time"] - published[line["version"]][0] for line in steady]
        pauses += [line["pause"] for line in taken]
        sizes.append(sum(line["bytes"] for line in taken))
    return {
        "subscribers": len(logs),
        "versions": len(published),
        "commits": commits,
        "wrong": wrong,
        "at the newest in the end": arrived,
        "left": leaves,
        "joined again": joins,
        "processes that failed": failed,
        "publish to commit, s": {f"p{q}": float(np.percentile(latencies, q)) for q in (50, 90, 99)},
        "pause, ms": {f"p{q}": 1e3 * float(np.percentile(pauses, q)) for q in (50, 99)},
        "bytes per subscriber": {"mean": float(np.mean(sizes)), "max": int(max(sizes))},
    }


if __name__ == "__main__":
    main()
