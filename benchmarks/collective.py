"""`python -m benchmarks.collective`: syncs by Gloo broadcast over shaped links; writes collective.{json,md}.

Two ranks in two network namespaces, joined by a pair of virtual interfaces that `tc tbf` holds to a rate. What the link
gives to a plain socket is measured in the same run. Needs root; without it nothing is measured.

    dense, a message per tensor     every tensor broadcast into the receiver's own, as trainers do today
    dense, in buckets               the same bytes in messages of 4 MiB
    sparse, a message per tensor    positions and bits of the changes, two broadcasts a tensor, sizes in one before them
    as many messages of one byte    what those launches cost alone, on this machine as it was then
    raw, gap, ulp, ctx, auto        sparserl: buckets, verified and committed in two phases
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

RATES = {  # and the bytes that may pass at once: far less than a patch has, or they would not be held to the rate
    "100 Mbit/s": ("100mbit", "16kb"),
    "1 Gbit/s": ("1gbit", "64kb"),
    "10 Gbit/s": ("10gbit", "256kb"),
}
PROFILES = ("raw", "gap", "ulp", "ctx", "auto")
DENSE, FLAT, SPARSE = "dense, a message per tensor", "dense, in buckets", "sparse, a message per tensor"
LAUNCH = "as many messages of one byte"
_HOME = Path(__file__).parent.parent / "research" / "results"
_BUCKET = 4 << 20
_LAYERS, _LAYER = 28, (1, 1, 8, 8, 256, 64, 64, 256, 512, 512, 512)  # tensors of a layer, by their share of it
_SECONDS = 30.0  # for the repeats of one way over one link
_HOSTS = ("10.213.7.1", "10.213.7.2")


def cut(bits: Any) -> dict[str, Any]:
    """Flat bits as the tensors of a model: an embedding, and layers with large and small ones."""
    edges, room = [bits.size // 4], bits.size - bits.size // 4
    for _ in range(_LAYERS):
        edges += [max(1, room * share // (_LAYERS * sum(_LAYER))) for share in _LAYER]
    ends = np.cumsum(edges)
    ends[-1] = bits.size
    return {f"tensor.{i:03d}": part for i, part in enumerate(np.split(bits, ends[:-1]))}


# -- one rank ----------------------------------------------------------------------------------------------------------


class Rank:
    """One of the two: its weights, and every way to bring the receiver's to the sender's bits."""

    def __init__(self, rank: int, port: int, megabytes: int, density: float) -> None:
        import torch
        import torch.distributed as dist

        from benchmarks import traces

        torch.set_num_threads(1)
        self.rank = rank
        self.states = traces.synthetic(megabytes << 20, density, 1)
        self.bits = self.states[0].copy()
        self.parts = cut(self.bits)
        self.tensors = {n: torch.from_numpy(b.view(np.int16)).view(torch.bfloat16) for n, b in self.parts.items()}
        self.flat = torch.from_numpy(self.bits.view(np.uint8))
        self.plain = self._plain_rate(port + 1)
        dist.init_process_group("gloo", init_method=f"tcp://{_HOSTS[0]}:{port}", rank=rank, world_size=2)

    def _plain_rate(self, port: int) -> float:
        """Bits per second of a plain socket, over a second or two."""
        block, end = bytes(1 << 18), 2.0
        if self.rank == 0:
            with socket.create_server((_HOSTS[0], port)) as server:
                there, _ = server.accept()
                with there:
                    until = time.monotonic() + end
                    while time.monotonic() < until:
                        there.sendall(block)
            return 0.0
        for _ in range(600):
            with contextlib.suppress(OSError):
                there = socket.create_connection((_HOSTS[0], port))
                break
            time.sleep(0.1)
        with there:
            moved, started = 0, None
            while data := there.recv(1 << 20):
                started = started or time.monotonic()
                moved += len(data)
        assert started is not None
        return 8 * moved / (time.monotonic() - started)

    def measure(self, ways: dict[str, Callable[[], dict[str, float]]], repeats: int) -> dict[str, Any]:
        """Medians of some rounds, in each of which every way has its turn: what else the machine does meets them alike.

        In each round the sender goes from one state to the other, and so must the receiver. The first is not counted.
        """
        import torch
        import torch.distributed as dist

        rows: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
        go = torch.zeros(1, dtype=torch.int64)
        for number in range(1, repeats + 2):
            old, new = self.states[(number - 1) % 2], self.states[number % 2]
            for way, sync in ways.items():
                go[0] = int(len(rows[way]) < 3 or sum(row["seconds"] for row in rows[way]) < _SECONDS)
                dist.broadcast(go, 0)
                if not go:
                    continue
                self.bits[:] = new if self.rank == 0 else old
                dist.barrier()
                started = time.perf_counter()
                row = sync()
                dist.barrier()
                rows[way].append({"seconds": time.perf_counter() - started} | row)
                assert way == LAUNCH or np.array_equal(self.bits, new), "the receiver does not hold the sender's bits"
        return {way: _medians(found[1:]) for way, found in rows.items()}

    def launches(self) -> dict[str, float]:
        """As many broadcasts as there are for each tensor and its changes, of one byte: what messages cost alone."""
        import torch
        import torch.distributed as dist

        one, count = torch.zeros(1, dtype=torch.uint8), 2 * len(self.parts) + 1
        started = time.perf_counter()
        for _ in range(count):
            dist.broadcast(one, 0)
        return {"messages": count, "bytes": count, "pause": time.perf_counter() - started}

    def dense(self) -> dict[str, float]:
        import torch.distributed as dist

        started = time.perf_counter()
        for tensor in self.tensors.values():
            dist.broadcast(tensor, 0)
        return {"messages": len(self.tensors), "bytes": self.bits.nbytes, "pause": time.perf_counter() - started}

    def in_buckets(self) -> dict[str, float]:
        import torch.distributed as dist

        started, pieces = time.perf_counter(), self.flat.split(_BUCKET)
        for piece in pieces:
            dist.broadcast(piece, 0)
        return {"messages": len(pieces), "bytes": self.bits.nbytes, "pause": time.perf_counter() - started}

    def sparse(self) -> dict[str, float]:
        """Without verification, and written into the weights as they come. Finding the changes is not counted."""
        import torch
        import torch.distributed as dist

        before = self.states[0] if np.array_equal(self.bits, self.states[1]) else self.states[1]
        found, counts = [], torch.zeros(len(self.parts), dtype=torch.int64)
        if self.rank == 0:
            for i, (old, new) in enumerate(zip(cut(before).values(), self.parts.values(), strict=True)):
                at = np.flatnonzero(old != new).astype(np.int32)
                found.append((torch.from_numpy(at), torch.from_numpy(new[at].view(np.int16))))
                counts[i] = at.size
        dist.barrier()
        started = time.perf_counter()
        dist.broadcast(counts, 0)
        messages, moved = 1, counts.nbytes
        for i, (count, part) in enumerate(zip(counts.tolist(), self.parts.values(), strict=True)):
            if not count:
                continue
            empty = torch.empty(count, dtype=torch.int32), torch.empty(count, dtype=torch.int16)
            at, bits = found[i] if self.rank == 0 else empty
            dist.broadcast(at, 0)
            dist.broadcast(bits.view(torch.uint8), 0)
            if self.rank == 1:
                part[at.numpy()] = bits.numpy().view(np.uint16)
            messages, moved = messages + 2, moved + 6 * count
        pause = time.perf_counter() - started
        dist.barrier()
        return {"seconds": time.perf_counter() - started, "messages": messages, "bytes": moved, "pause": pause}

    def ours(self, profile: str, link: str) -> tuple[Any, Callable[[], dict[str, float]]]:
        """A session, and a sync of it."""
        import torch.distributed as dist

        from sparserl import GroupPublisher, GroupSubscriber

        group = dist.new_group([0, 1])
        if self.rank == 0:
            chosen = link if profile == "auto" else None
            session: Any = GroupPublisher(group, self.tensors, profile=profile, link=chosen, threads=1)
            turn = session.publish
        else:
            session = GroupSubscriber(group, self.tensors, threads=1)
            turn = session.sync
        assert turn().bytes == 0  # both hold the same bits: nothing is sent

        def sync() -> dict[str, float]:
            report = turn()
            stages = {f"{stage}_s": seconds for stage, seconds in report.seconds.items() if stage != "wait"}
            return {"messages": report.messages, "bytes": report.bytes, "pause": report.seconds["commit"]} | stages

        return session, sync


def _medians(rows: list[dict[str, float]]) -> dict[str, float]:
    spread = {"fastest": min(row["seconds"] for row in rows), "slowest": max(row["seconds"] for row in rows)}
    return {key: median(row[key] for row in rows) for key in rows[0]} | spread | {"syncs": len(rows)}


def run_rank(rank: int, port: int, megabytes: int, density: float, repeats: int, link: str) -> dict[str, Any]:
    """All ways over one link, as one rank sees them."""
    here = Rank(rank, port, megabytes, density)
    ways: dict[str, Any] = {FLAT: here.in_buckets, DENSE: here.dense, LAUNCH: here.launches, SPARSE: here.sparse}
    sessions = {profile: here.ours(profile, link) for profile in PROFILES}
    found = here.measure(ways | {profile: sync for profile, (_, sync) in sessions.items()}, repeats)
    for session, _ in sessions.values():
        session.close()
    return {"plain": here.plain, "tensors": len(here.parts), "ways": found}


# -- the link ----------------------------------------------------------------------------------------------------------


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@contextmanager
def link(rate: str, burst: str) -> Iterator[tuple[str, str]]:
    """Two network namespaces whose only way to each other has this rate."""
    names = f"srl{os.getpid()}a", f"srl{os.getpid()}b"
    try:
        for name in names:
            _ip("netns", "add", name)
        _ip("link", "add", "srl0", "netns", names[0], "type", "veth", "peer", "name", "srl0", "netns", names[1])
        for name, host in zip(names, _HOSTS, strict=True):
            _ip("-n", name, "addr", "add", f"{host}/24", "dev", "srl0")
            for device in ("lo", "srl0"):
                _ip("-n", name, "link", "set", device, "up")
            shape = ["tc", "-n", name, "qdisc", "add", "dev", "srl0", "root", "tbf"]
            subprocess.run([*shape, "rate", rate, "burst", burst, "latency", "100ms"], check=True, capture_output=True)
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def over(name: str, megabytes: int, density: float, repeats: int) -> dict[str, Any]:
    """Both ranks over one link."""
    rate, burst = RATES[name]
    with link(rate, burst) as spaces, tempfile.TemporaryDirectory() as folder:
        started = []
        for rank, space in enumerate(spaces):
            program = [sys.executable, "-m", "benchmarks.collective", "--rank", str(rank), "--out", f"{folder}/{rank}"]
            words = ["--megabytes", str(megabytes), "--density", str(density), "--repeats", str(repeats)]
            words += ["--link", name.split("/", maxsplit=1)[0].replace(" ", "")]
            env = {**os.environ, "GLOO_SOCKET_IFNAME": "srl0", "SPARSERL_THREADS": "1"}
            started.append(subprocess.Popen(["ip", "netns", "exec", space, *program, *words], env=env))
        try:
            for process in started:
                if process.wait(1200):
                    raise SystemExit(f"a rank ended with {process.returncode}")
        finally:
            for process in started:
                process.kill()
        sent, got = (json.loads(Path(f"{folder}/{rank}").read_text()) for rank in (0, 1))
    for way, row in sent["ways"].items():
        row["pause"] = got["ways"][way]["pause"]  # it is the receiver that pauses
        row["receiver"] = {k: v for k, v in got["ways"][way].items() if k.endswith("_s")}
    return {"link": name, "burst": burst, "plain": got["plain"], "tensors": sent["tensors"], "ways": sent["ways"]}


def render(result: dict[str, Any]) -> str:
    """The tables of research/results/collective.md."""
    out = []
    for row in result["links"]:
        ways, dense = row["ways"], row["ways"][FLAT]["seconds"]
        out += [
            f"**{row['link']}** ({row['plain'] / 1e6:,.0f} Mbit/s for a plain socket in the same run)",
            "",
            "| way | messages | bytes | time per sync | fastest to slowest | against dense in buckets | pause |",
            "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
        ]
        for way, w in ways.items():
            spread = f"{w['fastest']:.3f} to {w['slowest']:.3f} s"
            cells = [way, f"{w['messages']:.0f}", f"{w['bytes']:,.0f}", f"{w['seconds']:.3f} s", spread]
            ratio = "" if way == LAUNCH else f"{dense / w['seconds']:.1f}×"
            out.append(f"| {' | '.join(cells)} | {ratio} | {1e3 * w['pause']:,.1f} ms |")
        out.append("")
    return "\n".join(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=128)
    parser.add_argument("--density", type=float, default=0.006)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--rates", nargs="*", default=list(RATES))
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--link", help=argparse.SUPPRESS)
    parser.add_argument("--out", help=argparse.SUPPRESS)
    said = parser.parse_args()
    if said.rank is not None:
        found = run_rank(said.rank, 29641, said.megabytes, said.density, said.repeats, said.link)
        Path(said.out).write_text(json.dumps(found))
        os._exit(0)  # Gloo does not leave quietly when its peer has left
    if os.geteuid() != 0:
        print("shaping a link needs root; nothing was measured")
        return
    links = [over(name, said.megabytes, said.density, said.repeats) for name in said.rates]
    machine = f"{platform.machine()}, {os.cpu_count()} cores for both ranks, one thread each"
    result = {"megabytes": said.megabytes, "density": said.density, "machine": machine, "links": links}
    (_HOME / "collective.json").write_text(json.dumps(result, indent=1) + "\n")
    page = _HOME / "collective.md"
    text = page.read_text()
    start, end = "<!-- figures -->\n", "<!-- end of figures -->"
    head, rest = text.split(start)
    page.write_text(head + start + "\n" + render(result) + "\n" + end + rest.split(end)[1])
    print(render(result))


if __name__ == "__main__":
    main()
