"""`python -m benchmarks.streaming`: a sync over a slow link against its stages one by one; writes streaming.{json,md}.

A publisher writes to a folder, which `sparserl serve` offers. A subscriber, in a process of its own, follows it over
HTTP through `benchmarks.throttle`. The clock runs from the start of `publish` to the end of the subscriber's commit.
Then the same version is taken through every stage alone: changes are found, encoded, written to a folder, fetched
through the same link, staged, and committed. A sync whose stages overlap takes little longer than the longest of them.
"""

from __future__ import annotations

import argparse
import itertools
import json
import platform
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from benchmarks.serving import served
from benchmarks.throttle import throttled
from sparserl import Bits, Publisher, Subscriber, SyncReport
from sparserl.humanize import parse_number
from sparserl.parallel import thread_count
from sparserl.patch import Replacement, capture, stage_all
from sparserl.plan import Link
from sparserl.session.anchors import anchor_of, copy_weights, restored
from sparserl.session.options import EncodingOptions
from sparserl.session.store import routes, transfer
from sparserl.session.store.stored_run import StoredRun
from sparserl.transport.stores.opening import open_store
from sparserl.weights.digest import Digest
from sparserl.weights.dtypes import BY_NAME
from sparserl.weights.local import LocalWeights

Weights = dict[str, Bits]
STAGES = ("find", "encode", "upload", "fetch", "stage", "commit")
RATES = ("10Mbit", "100Mbit", "1Gbit")
PROFILES = ("raw", "gap", "ulp", "ctx", "auto")
ANCHORS = ("raw", "auto")  # as they are, and coded
DENSITY = 0.006
LATENCY = 0.0005  # seconds, each way
PATIENCE = 100.0  # seconds: what would take longer over the link is left out
SHARE = 1.15  # of the longest stage, that a sync may take ...
SLACK = 0.1  # ... and so many seconds more
_TENSORS = 16
_HOME = Path(__file__).parent.parent / "research" / "results"
_SPAWN = get_context("spawn")


def random_weights(nbytes: int) -> Weights:
    """Weights like those of a model: normal, in bf16."""
    rng = np.random.default_rng(0)
    size = nbytes // 2 // _TENSORS
    draw = lambda: (rng.standard_normal(size, np.float32) * 0.02).view(np.uint32) >> 16  # noqa: E731
    return {f"layers.{i}": Bits(draw().astype(np.uint16), BY_NAME["bfloat16"]) for i in range(_TENSORS)}


def change(weights: Weights, rng: np.random.Generator) -> None:
    """One optimizer step: some elements move by one representable number."""
    for tensor in weights.values():
        size = tensor.array.size
        where = rng.integers(0, size, int(size * DENSITY))
        tensor.array[where] += rng.choice(np.array([1, 65535], np.uint16), where.size)


def copied(weights: Weights) -> Weights:
    """Weights of the same bits in other memory."""
    return {name: Bits(tensor.array.copy(), tensor.dtype) for name, tensor in weights.items()}


def follow(url: str, shapes: dict[str, int], pipe: Connection) -> None:
    """A subscriber: says when it has committed each version."""
    weights = {name: Bits(np.ones(size, np.uint16), BY_NAME["bfloat16"]) for name, size in shapes.items()}

    def committed(report: SyncReport) -> None:
        pipe.send((report.version, time.monotonic(), report.seconds))

    load_kernels()
    with Subscriber(url, weights) as subscriber:
        pipe.send(None)
        subscriber.follow(on_commit=committed)


def load_kernels() -> None:
    """Take a small anchor through all stages, so that a process does not load kernels on the clock."""
    weights = random_weights(1 << 20)
    for profile in ANCHORS:
        fresh = restored(anchor_of(weights, EncodingOptions(profile, None, None, None)))
        Replacement(LocalWeights.of(copied(weights)), LocalWeights.of(fresh), exchange=True).commit()


@contextmanager
def running(subscriber: Callable[..., None], *args: Any) -> Iterator[Connection]:
    """A subscriber in a process of its own, once it is ready."""
    near, far = _SPAWN.Pipe()
    process = _SPAWN.Process(target=subscriber, args=(*args, far), daemon=True)
    process.start()
    near.recv()
    try:
        yield near
    finally:
        process.kill()
        process.join()


@contextmanager
def serving(folder: Path, link: Link) -> Iterator[str]:
    """The URL of a folder behind a link."""
    with served(folder) as port, throttled(port, link) as line:
        yield f"http://127.0.0.1:{line.port}"


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    """How long work takes, and its result."""
    started = time.perf_counter()
    result = work()
    return time.perf_counter() - started, result


def patch_stages(old: Weights, new: Weights, digest: Digest, url: str, profile: str) -> dict[str, float]:
    """The seconds of every stage of a patch, each alone."""
    seconds: dict[str, float] = {}
    seconds["find"], captured = timed(lambda: capture(old, new, profile=profile, base_digest=digest))
    seconds["encode"], patch = timed(captured.encode)
    seconds["upload"] = upload_alone(patch)
    seconds["fetch"], fetched = timed(lambda: fetch_alone(url, is_anchor=False))
    seconds["stage"], staged = timed(lambda: stage_all(fetched.contents, old, digest=digest))
    seconds["commit"], _ = timed(staged.commit)
    return seconds


def anchor_stages(new: Weights, url: str, profile: str) -> dict[str, float]:
    """The seconds of every stage of an anchor, each alone."""
    seconds: dict[str, float] = {}
    seconds["find"], weights = timed(lambda: copy_weights(new))
    seconds["encode"], anchor = timed(lambda: anchor_of(weights, EncodingOptions(profile, None, None, None)))
    seconds["upload"] = upload_alone(anchor)
    seconds["fetch"], fetched = timed(lambda: fetch_alone(url, is_anchor=True))
    seconds["stage"], fresh = timed(lambda: restored(fetched))
    replacement = Replacement(LocalWeights.of(weights), LocalWeights.of(fresh), exchange=True)
    seconds["commit"], _ = timed(replacement.commit)
    return seconds


def upload_alone(patch: Any) -> float:
    """The seconds of writing a patch to a folder."""
    with tempfile.TemporaryDirectory() as folder:
        return timed(lambda: transfer.send(open_store(folder), "0" * 16, patch))[0]


def fetch_alone(url: str, *, is_anchor: bool) -> Any:
    """The patch of the newest version, or its anchor, through the link."""
    run = StoredRun.read(open_store(url))
    newest = run.head.version
    if is_anchor:
        steps = [step for step in run.index.steps if step.base is None and step.version == newest]
    else:
        steps = routes.route(run.index.steps, (newest - 1, run.digests[newest - 1]), newest)
    return run.patches(steps)[0]


@contextmanager
def published(weights: Weights, profile: str) -> Iterator[tuple[Path, Publisher]]:
    """A folder, and a publisher that has published nothing yet."""
    folder = Path(tempfile.mkdtemp())
    try:
        with Publisher(folder, weights, profile=profile, ladder=None) as publisher:
            yield folder, publisher
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def anchor_row(weights: Weights, link: Link, profile: str, _repeats: int) -> dict[str, Any]:
    """The stages and the sync of an anchor, with kernels that are loaded already."""
    few = {name: Bits(tensor.array[:4096].copy(), tensor.dtype) for name, tensor in weights.items()}
    anchor_of(few, EncodingOptions(profile, None, None, None))
    with (
        published(weights, profile) as (folder, publisher),
        serving(folder, link) as url,
        running(follow, url, {name: tensor.array.size for name, tensor in weights.items()}) as pipe,
    ):
        total, report = sync(publisher, pipe)
        return {"sync": total, "sent": report.bytes, "stages": anchor_stages(weights, url, profile)}


def patch_row(weights: Weights, link: Link, profile: str, repeats: int) -> dict[str, Any]:
    """The stages and the sync of a patch; of some patches, the median."""
    rng = np.random.default_rng(1)
    rows: list[dict[str, Any]] = []
    with published(weights, profile) as (folder, publisher):
        publisher.publish()
        with serving(folder, link) as url, running(follow_from, url, str(folder), list(weights)) as pipe:
            for _ in range(repeats + 1):
                old = copied(weights)
                digest = StoredRun.read(open_store(folder)).head.digest
                change(weights, rng)
                total, report = sync(publisher, pipe)
                stages = patch_stages(old, weights, digest, url, profile)
                rows.append({"sync": total, "sent": report.bytes, "stages": stages})
    warm = rows[1:]  # the first one loads kernels
    return sorted(warm, key=lambda row: row["sync"] - limit(row["stages"]))[len(warm) // 2]


def follow_from(url: str, folder: str, names: list[str], pipe: Connection) -> None:
    """A subscriber that begins with the newest weights of a folder."""
    run = StoredRun.read(open_store(folder))
    weights = run.weights(run.head.version)
    with Subscriber(url, {name: weights[name] for name in names}) as subscriber:
        subscriber.sync()
        pipe.send(None)
        subscriber.follow(on_commit=lambda report: pipe.send((report.version, time.monotonic(), report.seconds)))


def sync(publisher: Publisher, pipe: Connection) -> tuple[float, SyncReport]:
    """From the start of a publish to the end of the commit at the subscriber."""
    started = time.monotonic()
    report = publisher.publish()
    while True:
        version, committed, _ = pipe.recv()
        if version == report.version:
            return committed - started, report


KINDS = {"patch": patch_row, "anchor": anchor_row}


def limit(stages: dict[str, float]) -> float:
    """How long a sync with such stages may take."""
    return SHARE * max(stages.values()) + SLACK


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as a table."""
    lines = [
        "| weights | link | kind | profile | " + " | ".join(STAGES) + " | sum | sync | limit | |",
        "|---|---|---|---|" + "---:|" * (len(STAGES) + 3) + "---|",
    ]
    for row in rows:
        stages = row["stages"]
        most = limit(stages)
        cells = [f"{row['bytes'] / 1e9:g} GB", row["rate"], row["kind"], row["profile"]]
        cells += [f"{stages[stage] * 1e3:.0f}" for stage in STAGES]
        cells += [f"{seconds * 1e3:.0f}" for seconds in (sum(stages.values()), row["sync"], most)]
        lines.append("| " + " | ".join([*cells, "met" if row["sync"] <= most else "missed"]) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure every combination, and write the tables as they grow."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bytes", nargs="+", type=parse_number, default=[512e6, 2e9])
    parser.add_argument("--rates", nargs="+", default=RATES)
    parser.add_argument("--profiles", nargs="+", default=PROFILES, choices=PROFILES)
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=KINDS)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, default=_HOME, help="the folder to write to")
    options = parser.parse_args()
    console = Console(stderr=True)
    rows: list[dict[str, Any]] = []
    for nbytes in map(int, options.bytes):
        weights = random_weights(nbytes)
        for rate, kind, profile in itertools.product(options.rates, options.kinds, options.profiles):
            link = Link(Link.parse(rate).bits_per_second, LATENCY)
            if kind == "anchor" and (profile not in ANCHORS or 8 * nbytes / link.bits_per_second > PATIENCE):
                continue
            with console.status(f"{nbytes / 1e9:g} GB over {rate}, {kind}, {profile}"):
                row = KINDS[kind](weights, link, profile, options.repeats)
            rows.append({"bytes": nbytes, "rate": rate, "kind": kind, "profile": profile, **row})
            console.print(table(rows[-1:]).splitlines()[2])
            write(rows, options.out)
    print(table(rows))


def write(rows: list[dict[str, Any]], out: Path) -> None:
    """Write what was measured so far."""
    record = {"machine": platform.processor() or platform.machine(), "threads": thread_count(None), "rows": rows}
    out.mkdir(parents=True, exist_ok=True)
    (out / "streaming.json").write_text(json.dumps(record, indent=1) + "\n")
    title = f"# Syncs whose stages overlap\n\nMilliseconds; {record['machine']}, {record['threads']} threads.\n\n"
    (out / "streaming.md").write_text(title + table(rows))


if __name__ == "__main__":
    main()
