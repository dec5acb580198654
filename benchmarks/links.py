"""`python -m benchmarks.links`: predicted and measured sync times over real sockets; writes links.{json,md}.

A sender and a receiver are processes of their own. A third one stands between them where the link is slow, and lets
through as many bits per second as the link has, each after its latency. Both sides work on one thread: a small machine
must run all three.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import socket
import struct
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from rich.console import Console

import sparserl
from benchmarks import traces
from benchmarks.throttle import Line, Page, carry
from benchmarks.traces import Bits
from sparserl.codec import PROFILES
from sparserl.patch import measure
from sparserl.plan import Estimate, Link, Speeds, best, predict
from sparserl.weights.dtypes import BY_NAME

LINKS = (Link(10e6, 0.04), Link(100e6, 0.01), Link(1e9, 0.001), None)  # None: as fast as sockets are
PATIENCE = 30.0  # seconds: what is predicted to take longer is not measured
_ROUNDS = 8.0  # seconds for the repeats of one way over one link
_CALM = 0.1  # how far the machine's speed may move while a link is measured
_STUBBORN = 90.0  # seconds for one link to be measured on a calm machine
_HOME = Path(__file__).parent.parent / "research" / "results"
_HEADER = struct.Struct("<cQ")  # what comes, how many bytes
_PATCH, _DENSE, _PROBE, _END = b"p", b"d", b"?", b"."
_SPAWN = get_context("spawn")


@dataclass(frozen=True)
class Taken:
    """Seconds of one sync."""

    encode: float
    send: float
    decode: float

    @property
    def total(self) -> float:
        return self.encode + self.send + self.decode


@dataclass(frozen=True)
class Row:
    """One way over one link. `auto` has no prediction of its own: it takes that of the profile it chose."""

    name: str
    bytes: int
    chosen: str
    predicted: Estimate
    measured: Taken

    @property
    def error(self) -> float:
        return self.predicted.total_s / self.measured.total - 1


@dataclass(frozen=True)
class Result:
    """One link: its rows, what the model picks of those measured, and how much slower that is than the best."""

    link: Link
    throttled: bool
    rows: list[Row]
    calm: bool  # whether the machine was as fast after it as before

    @property
    def pick(self) -> str:
        return best([r.predicted for r in self.rows if r.name != "auto"]).name

    @property
    def loss(self) -> float:
        times = {r.name: r.measured.total for r in self.rows if r.name != "auto"}
        return times[self.pick] / min(times.values()) - 1


def _ours(bits: Bits) -> dict[str, sparserl.Bits]:
    return {"w": sparserl.Bits(bits, BY_NAME["bfloat16"])}


def receive(control: Connection, path: str) -> None:
    """The receiver: weights at the base; whatever comes is landed and verified, timed, and undone off the clock."""
    old = np.load(path)
    weights, base, room = old.copy(), sparserl.digest(_ours(old)), bytearray(old.nbytes + (1 << 20))
    with socket.create_server(("127.0.0.1", 0)) as server:
        control.send(server.getsockname()[1])
        while control.recv():
            there, _ = server.accept()
            with there:
                for kind, size in _headers(there):
                    data = memoryview(room)[:size]
                    _fill(there, data)
                    arrived = time.monotonic()
                    digest = None
                    if kind == _PATCH:
                        digest = sparserl.Patch.from_bytes(data).apply(_ours(weights), digest=base, threads=1).digest
                    elif kind == _DENSE:
                        weights.view(np.uint8)[:] = np.frombuffer(data, np.uint8)
                    done = time.monotonic()
                    if kind == _DENSE:
                        digest = sparserl.digest(_ours(weights))
                    np.copyto(weights, old)
                    control.send((arrived, done, digest))


def _headers(there: socket.socket) -> Iterator[tuple[bytes, int]]:
    head = bytearray(_HEADER.size)
    while True:
        _fill(there, memoryview(head))
        kind, size = _HEADER.unpack(head)
        if kind == _END:
            return
        yield kind, size


def _fill(there: socket.socket, data: memoryview) -> None:
    at = 0
    while at < len(data):
        got = there.recv_into(data[at:])
        if not got:
            raise ConnectionError("the sender left")
        at += got


def throttle(control: Connection, port: int, link: Link) -> None:
    """The link: one connection, to the receiver."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        control.send(server.getsockname()[1])
        near, _ = server.accept()
    with near, socket.create_connection(("127.0.0.1", port)) as far:
        far.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        carry(near, far, Line(Page.of(link), link.latency_s))


class Sender:
    """The sender: two versions of the weights, the digest of the base held, and a way to the receiver."""

    def __init__(self, old: Bits, new: Bits, control: Connection) -> None:
        self.old, self.new, self.control = old, new, control
        self.base, self.result = (sparserl.digest(_ours(bits)) for bits in (old, new))

    @contextmanager
    def over(self, link: Link | None, port: int) -> Iterator[None]:
        """Connected through a link, or straight."""
        self.control.send(True)
        way = None
        if link is not None:
            ours, theirs = _SPAWN.Pipe()
            way = _SPAWN.Process(target=throttle, args=(theirs, port, link))
            way.start()
            port = ours.recv()
        with socket.create_connection(("127.0.0.1", port)) as self.there:
            self.there.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            yield
            self.there.sendall(_HEADER.pack(_END, 0))
        if way is not None:
            way.join()

    def probe(self, size: int) -> float:
        """Seconds that so many bytes take to arrive."""
        start = time.monotonic()
        return self._send(_PROBE, memoryview(self.new.view(np.uint8))[:size])[0] - start

    def sync(self, name: str, link: Link) -> tuple[Taken, int, str]:
        """One sync: its times, the bytes sent, and the profile they were in."""
        start = time.monotonic()
        data, kind, patch = memoryview(self.new.view(np.uint8)), _DENSE, None
        if name != "dense":
            on = {"profile": name} if name != "auto" else {"link": link}
            patch = sparserl.diff(_ours(self.old), _ours(self.new), base_digest=self.base, threads=1, **on)
            data, kind = memoryview(patch.to_bytes()), _PATCH
        encoded = time.monotonic()
        arrived, done, digest = self._send(kind, data)
        if digest != self.result:
            raise AssertionError(f"{name} did not land the weights")
        taken = Taken(encoded - start, arrived - encoded, done - arrived)
        return taken, len(data), name if patch is None else patch.stats().profile

    def _send(self, kind: bytes, data: memoryview) -> tuple[float, float, sparserl.Digest | None]:
        self.there.sendall(_HEADER.pack(kind, len(data)))
        self.there.sendall(data)
        answer: tuple[float, float, sparserl.Digest | None] = self.control.recv()
        return answer


@contextmanager
def pair(old: Bits, new: Bits) -> Iterator[tuple[Sender, int]]:
    """A sender, and the port of a receiver that holds the old weights in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "old.npy"
        np.save(path, old)
        ours, theirs = _SPAWN.Pipe()
        process = _SPAWN.Process(target=receive, args=(theirs, str(path)))
        process.start()
        try:
            port = ours.recv()
            yield Sender(old, new, ours), port
            ours.send(False)
            process.join()
        finally:
            process.kill()


@contextmanager
def remembered(speeds: Speeds) -> Iterator[None]:
    """Speeds that `diff` finds, without touching those that the user keeps."""
    before = os.environ.get("XDG_CACHE_HOME")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = folder
        speeds.save()
        try:
            yield
        finally:
            del os.environ["XDG_CACHE_HOME"]
            if before is not None:
                os.environ["XDG_CACHE_HOME"] = before


def compare(sender: Sender, port: int, link: Link | None, speeds: Speeds, repeats: int) -> Result:
    """Every way over one link: predicted first, then measured in turns, medians. Slow ones take fewer turns."""
    with sender.over(link, port), remembered(speeds):
        known = link or _straight(sender)
        density = np.count_nonzero(sender.old != sender.new) / sender.old.size
        estimates = {e.name: e for e in predict(sender.old.size, 2, density, known, speeds)}
        names = [n for n in ("dense", *PROFILES, "auto") if n == "auto" or estimates[n].total_s < PATIENCE]
        slowest = max(e.total_s for e in estimates.values() if e.sparse)
        often = {
            n: max(1, min(repeats, int(_ROUNDS / (estimates[n].total_s if n != "auto" else slowest)))) for n in names
        }
        turns: dict[str, list[tuple[Taken, int, str]]] = {name: [] for name in names}
        for turn in range(repeats + 1):
            for name in names:
                if turn <= often[name] and (turn or often[name] > 1):  # the first one warms up
                    turns[name].append(sender.sync(name, known))
        steady = link is not None or _near(_straight(sender).bits_per_second, known.bits_per_second)
    rows = []
    for name, all_ in turns.items():
        _, size, chosen = all_[-1]
        times = [taken for taken, _, _ in all_[-often[name] :]]
        middle = sorted(times, key=lambda t: t.total)[len(times) // 2]
        rows.append(Row(name, size, chosen, estimates[chosen], middle))
    return Result(known, link is not None, rows, steady)


def _near(one: float, other: float) -> bool:
    return abs(one / other - 1) < _CALM


def _rest(until: float) -> None:
    """Wait for other programs to rest, but not for ever."""
    while time.monotonic() < until:
        idle, total = _ticks()
        time.sleep(1)
        later = _ticks()
        if later[0] - idle > 0.9 * (later[1] - total):
            return


def _ticks() -> tuple[int, int]:
    """What the processors were idle, and all that they did."""
    counts = [int(n) for n in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]]
    return counts[3] + counts[4], sum(counts)


def _same(one: Speeds, other: Speeds, sender: Sender) -> bool:
    """Whether work takes as long by one measurement as by the other."""
    work = [predict(sender.old.size, 2, 0.006, Link(1e9), s) for s in (one, other)]
    return all(_near(a.encode_s + a.decode_s, b.encode_s + b.decode_s) for a, b in zip(*work, strict=True))


def _straight(sender: Sender) -> Link:
    """The link without anything between: what sockets of this machine do."""
    size = sender.new.nbytes
    latency = median(sender.probe(1) for _ in range(20))
    taken = median(sender.probe(size) for _ in range(5))
    return Link(8 * size / max(1e-9, taken - latency), latency)


def run(megabytes: int, density: float, repeats: int, tick: Callable[[str], None]) -> dict[str, Any]:
    """Every link."""
    tick("making weights")
    old, new = traces.synthetic(megabytes << 20, density, seed=0)
    results = []
    with pair(old, new) as (sender, port):
        for link in LINKS:
            tick(f"{link or 'plain sockets'}")
            results.append(_calmly(sender, port, link, megabytes, repeats))
    return {
        "version": sparserl.__version__,
        "system": platform.platform(),
        "megabytes": megabytes,
        "density": density,
        "repeats": repeats,
        "links": [_plain(result) for result in results],
        "text": render(old.nbytes, density, repeats, results),
    }


def _calmly(sender: Sender, port: int, link: Link | None, megabytes: int, repeats: int) -> Result:
    """Speeds, then the link, and speeds again: where those moved, something else was running, and it is done anew."""
    until = time.monotonic() + _STUBBORN
    while True:
        _rest(until)
        before = measure(threads=1, megabytes=megabytes, repeats=repeats)
        result = compare(sender, port, link, before, repeats)
        after = measure(threads=1, megabytes=megabytes, repeats=repeats)
        result = replace(result, calm=result.calm and _same(before, after, sender))
        if result.calm or time.monotonic() > until:
            return result


def _plain(result: Result) -> dict[str, Any]:
    rows = [
        {**asdict(r), "predicted_s": r.predicted.total_s, "measured_s": r.measured.total, "error": r.error}
        for r in result.rows
    ]
    about = {"link": asdict(result.link), "throttled": result.throttled, "calm": result.calm}
    return {**about, "pick": result.pick, "pick_loss": result.loss, "rows": rows}


def render(nbytes: int, density: float, repeats: int, results: list[Result]) -> str:
    """Markdown: the picks, then every row."""
    intro = (
        f"`python -m benchmarks.links`: {nbytes / 1e6:,.0f} MB of bf16 weights, {density:.2%} changed as in real runs, "
        f"sender and receiver on one thread each, medians of up to {repeats}. Speeds were measured just before each "
        "link, on weights that the library draws itself, and just after it: where they moved by more than "
        f"{_CALM:.0%}, the link was measured again, for {_STUBBORN:.0f} s at most; where they moved to the end, "
        "`calm` says no. Predictions are in brackets."
    )
    lines = [
        "# Predicted and measured sync times",
        "",
        intro,
        "",
        "| link | pick | slower than the best by | largest error of a prediction | `auto` took | calm |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for r in results:
        auto = next(row for row in r.rows if row.name == "auto")
        error = max((row.error for row in r.rows if row.name != "auto"), key=abs)
        lines.append(
            f"| {_name(r)} | `{r.pick}` | {r.loss:.0%} | {error:+.0%} | `{auto.chosen}` | {'yes' if r.calm else 'no'} |"
        )
    for r in results:
        lines += ["", f"## {_name(r)}", ""]
        lines += ["| | bytes | find + encode, ms | send | decode + apply | total | error |"]
        lines += ["| --- |" + " ---: |" * 6]
        lines += [_line(row) for row in r.rows]
    return "\n".join(lines) + "\n"


def _name(result: Result) -> str:
    return str(result.link) if result.throttled else f"plain sockets ({result.link})"


def _line(row: Row) -> str:
    m, p = row.measured, row.predicted
    pairs = [(m.encode, p.encode_s), (m.send, p.send_s), (m.decode, p.decode_s), (m.total, p.total_s)]
    stages = " | ".join(f"{1000 * a:,.1f} ({1000 * b:,.1f})" for a, b in pairs)
    name = f"`{row.name}`" + (f" = `{row.chosen}`" if row.name == "auto" else "")
    return f"| {name} | {row.bytes:,} | {stages} | {row.error:+.0%} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=128, help="dense weights")
    parser.add_argument("--density", type=float, default=0.006, help="share of elements changed in them")
    parser.add_argument("--repeats", type=int, default=7, help="syncs of each kind; the median counts")
    parser.add_argument("--out", type=Path, default=_HOME, help="folder for links.json and links.md")
    options = parser.parse_args()
    with Console(stderr=True).status("") as status:
        data = run(options.megabytes, options.density, options.repeats, status.update)
    text = data.pop("text")
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "links.json").write_text(json.dumps(data, indent=1) + "\n")
    (options.out / "links.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
