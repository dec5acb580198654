"""`python -m benchmarks.moving_link`: syncs over a link whose rate moves, by profile; writes moving_link.{json,md}.

A publisher writes to SeaweedFS's S3. A subscriber, in a process of its own, reaches it through `benchmarks.throttle`,
whose rate moves between 10 Mbit/s and 1 Gbit/s; now and then, when half of a version is through, the link stalls, or
cuts off all connections. Every profile goes through the same, and waits as long before it tries again. The clock runs
from the start of `publish` to the end of the subscriber's commit.
"""

from __future__ import annotations

import argparse
import functools
import json
import platform
import random
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
from rich.console import Console

from benchmarks.throttle import Throttled, throttled
from sparserl import Bits, Publisher, Subscriber
from sparserl.parallel import thread_count
from sparserl.plan import Link
from sparserl.weights.dtypes import BY_NAME
from tests.servers import Server, running

RATES = (1000, 100, 10, 300, 30, 1000, 10, 300)  # Mbit/s, one stretch after the other
STALL_EVERY, STALL_SECONDS = 10, 0.3
CUT_EVERY = 25
DENSITY = 0.02  # of the small weights, which are a third
LATENCY = 0.0005
_LOOK = 0.002  # seconds between looks at what is through
MOST = 1.10  # times the best fixed profile
_MEGABIT = 1e6
_TENSORS = 8
_FIXED = ("raw", "gap", "ulp", "ctx")
_WAYS: dict[str, dict[str, Any]] = {
    **{name: {"profile": name, "link": None} for name in _FIXED},
    "smallest": {"profile": "auto", "link": None},
    "measured": {"profile": "auto", "link": "measured"},
}
_HOME = Path(__file__).parent.parent / "research" / "results"
_SPAWN = get_context("spawn")

Weights = dict[str, Bits]


def random_weights(nbytes: int) -> Weights:
    """Weights like those of a model: normal, in bf16."""
    rng = np.random.default_rng(0)
    size = nbytes // 2 // _TENSORS
    return {
        f"layers.{i}": Bits(
            (rng.standard_normal(size, np.float32).view(np.uint32) >> 16).astype(np.uint16), BY_NAME["bfloat16"]
        )
        for i in range(_TENSORS)
    }


def change(weights: Weights, rng: np.random.Generator) -> None:
    """One optimizer step: some of the small weights move by one representable number."""
    for tensor in weights.values():
        array = tensor.array
        where = rng.integers(0, array.size, int(array.size * DENSITY))
        where = where[(array[where] & 0x7FFF) < 0x3EE0]
        array[where] += 1


def follow(url: str, endpoint: str, nbytes: int, pipe: Connection) -> None:
    """A subscriber: syncs whenever it is told to, and says when it has committed."""
    weights = random_weights(nbytes)
    server = Server(endpoint)
    with Subscriber(server.store(url), weights) as subscriber:
        while True:
            random.seed(pipe.recv())  # the waits before another attempt are random
            report = subscriber.sync()
            pipe.send((time.monotonic(), None if report is None else report.seconds))


@contextmanager
def following(url: str, endpoint: str, nbytes: int) -> Iterator[Connection]:
    near, far = _SPAWN.Pipe()
    process = _SPAWN.Process(target=follow, args=(url, endpoint, nbytes, far), daemon=True)
    process.start()
    far.close()  # so that the end of the process is noticed
    try:
        yield near
    finally:
        process.kill()
        process.join()


@contextmanager
def disturbed(line: Throttled, number: int, nbytes: int) -> Iterator[None]:
    """What happens to the link in some syncs, when so many bytes are through."""
    happen: Callable[[], None]
    if number < 0:
        yield
        return
    if number % CUT_EVERY == CUT_EVERY - 1:
        happen = line.cut
    elif number % STALL_EVERY == STALL_EVERY - 1:
        happen = functools.partial(line.stall, STALL_SECONDS)
    else:
        yield
        return
    ended = threading.Event()
    happened = threading.Event()
    until = line.moved + nbytes

    def wait() -> None:
        while line.moved < until:
            if ended.wait(_LOOK):
                return
        happen()
        happened.set()

    thread = threading.Thread(target=wait)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
    if not happened.is_set():
        raise SystemExit(f"sync {number} was not disturbed: fewer than {nbytes} bytes came through")


def measure(server: Server, way: str, nbytes: int, stretch: int, console: Console) -> dict[str, Any]:
    """The times of all syncs with one way to choose profiles."""
    weights = random_weights(nbytes)
    rng = np.random.default_rng(1)
    port = urlsplit(server.endpoint).port
    assert port is not None
    seconds = []
    sent = []
    with (
        throttled(port, Link(1000 * _MEGABIT, LATENCY)) as line,
        Publisher(server.store(way), weights, ladder=None, anchor_after=1e9, **_WAYS[way]) as publisher,
        following(way, f"http://127.0.0.1:{line.port}", nbytes) as pipe,
        console.status(way) as status,
    ):
        publisher.publish()
        pipe.send(0)
        pipe.recv()
        for number in range(-4, stretch * len(RATES)):  # the first ones load kernels
            rate = RATES[max(0, number) // stretch]
            line.change_rate(rate * _MEGABIT)
            change(weights, rng)
            started = time.monotonic()
            report = publisher.publish()
            with disturbed(line, number, report.bytes // 2):
                pipe.send(number)
                committed, _ = pipe.recv()
            if number >= 0:
                seconds.append(committed - started)
                sent.append(report.bytes)
            status.update(f"{way}: {number + 1} of {stretch * len(RATES)}, {rate} Mbit/s")
    return {"way": way, "seconds": seconds, "bytes": sent}


def quantiles(seconds: list[float]) -> tuple[float, float]:
    """The median, and what 99 of 100 take at most."""
    return float(np.quantile(seconds, 0.5)), float(np.quantile(seconds, 0.99))


def table(rows: list[dict[str, Any]], stretch: int) -> str:
    """Times by way; with the best fixed one beside what is chosen."""
    rates = sorted(set(RATES))
    lines = [
        "| profile | p50 | p99 | MB sent | " + " | ".join(f"{rate} Mbit/s" for rate in rates) + " |",
        "|---|---:|---:|---:|" + "---:|" * len(rates),
    ]
    for row in rows:
        p50, p99 = quantiles(row["seconds"])
        at = {rate: [s for i, s in enumerate(row["seconds"]) if RATES[i // stretch] == rate] for rate in rates}
        cells = [row["way"], f"{p50 * 1e3:.0f}", f"{p99 * 1e3:.0f}", f"{sum(row['bytes']) / 1e6:.0f}"]
        cells += [f"{np.median(at[rate]) * 1e3:.0f}" for rate in rates]
        lines.append("| " + " | ".join(cells) + " |")
    fixed = [quantiles(row["seconds"]) for row in rows if row["way"] in _FIXED]
    chosen = [quantiles(row["seconds"]) for row in rows if row["way"] == "measured"]
    if fixed and chosen:
        shares = [chosen[0][i] / min(quantile[i] for quantile in fixed) for i in range(2)]
        verdict = "met" if max(shares) <= MOST else "missed"
        lines.append(
            f"\nMeasured against the best fixed profile: p50 × {shares[0]:.2f}, p99 × {shares[1]:.2f} ({verdict})."
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure every way, and write what was measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bytes", type=int, default=128_000_000)
    parser.add_argument("--stretch", type=int, default=12, help="syncs at each rate")
    parser.add_argument("--ways", nargs="+", default=list(_WAYS), choices=_WAYS)
    parser.add_argument("--out", type=Path, default=_HOME, help="the folder to write to")
    options = parser.parse_args()
    console = Console(stderr=True)
    rows = []
    with tempfile.TemporaryDirectory() as folder, running("seaweedfs", Path(folder)) as server:
        for way in options.ways:
            rows.append(measure(server, way, options.bytes, options.stretch, console))
            console.print(table(rows, options.stretch))
    record = {
        "machine": platform.processor() or platform.machine(),
        "threads": thread_count(None),
        "bytes": options.bytes,
        "stretch": options.stretch,
        "rates": RATES,
        "rows": rows,
    }
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "moving_link.json").write_text(json.dumps(record) + "\n")
    machine = f"{record['machine']}, {record['threads']} threads, {options.bytes / 1e6:.0f} MB of bf16"
    rates = f"{options.stretch} syncs at each of {', '.join(map(str, RATES))} Mbit/s"
    title = f"# A link whose rate moves\n\nMilliseconds from publish to commit; {machine}, {rates}.\n\n"
    (options.out / "moving_link.md").write_text(title + table(rows, options.stretch))
    print(table(rows, options.stretch))


if __name__ == "__main__":
    main()
