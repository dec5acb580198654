"""`python -m benchmarks.slow_link`: RL over a slow link, once for every format; writes research/results/slow_link.json.

The loop of examples/rl with one worker, trainer and worker in turn, in processes of their own. Every byte of weights
goes through `benchmarks.throttle`. sparserl publishes to a folder, which `sparserl serve` offers; dense weights and
the peers' formats are pushed over one plain TCP connection as soon as they are encoded, which saves them the round
trips of HTTP. The worker starts without weights.

All formats are lossless and the seed is one, so tokens, rewards and weights of all runs must be the same, bit for bit:
SHA-256 at both ends says so, off the clock.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import socket
import struct
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from threading import Event, Thread
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

import sparserl
from benchmarks import session_tables
from benchmarks.peers import PEERS, Dense, Payload, Peer
from benchmarks.serving import served
from benchmarks.throttle import Throttled, throttled
from examples.rl import policy, worker
from examples.rl.fleet import PATIENCE
from examples.rl.options import Options
from examples.rl.trainer import Trainer, compile_kernels
from examples.rl.ways import Way
from examples.rl.weights import Published, Weights, bits, distinct, sha256
from sparserl.plan import Link
from sparserl.weights.dtypes import BY_NAME

LANDED, READY = "landed.jsonl", "ready"  # files of the worker
_HOME = Path(__file__).parent.parent / "research" / "results"
_FROM, _TO = "<!-- slow link -->\n", "<!-- end of slow link -->"  # where the table stands in rl.md
_FRAME = struct.Struct("<II")  # the version, and how many parts it has; then the size of each
_NEEDLESS = ("plan", "fetch")  # stages of a subscriber that are not work on what has come


class Patches:
    """sparserl's patches as if they were a peer's format: verified at the worker, but kept nowhere."""

    name = "sparserl over TCP"

    def __init__(self, link: Link | None) -> None:
        self._link, self._digest = link, sparserl.Digest()

    def know(self, weights: Any) -> None:
        """What this end holds."""
        self._digest = sparserl.digest(ours(weights), threads=1)

    def encode(self, old: Any, new: Any) -> Payload:
        patch = sparserl.diff(ours(old), ours(new), base_digest=self._digest, link=self._link, threads=1)
        self._digest = patch.result
        return [patch.to_bytes()]

    def decode_apply(self, payload: Payload, weights: Any) -> None:
        patch = sparserl.Patch.from_bytes(payload[0])
        self._digest = patch.apply(ours(weights), digest=self._digest, threads=1).digest


def ours(weights: Any) -> dict[str, sparserl.Bits]:
    """The bits of weights, as sparserl takes them."""
    return {name: sparserl.Bits(part, BY_NAME["bfloat16"]) for name, part in weights.items()}


OURS = "sparserl over HTTP"
WAYS = (*(peer.name for peer in PEERS), Patches.name, OURS)


# -- the trainer's end -------------------------------------------------------------------------------------------------


class Pushed:
    """Weights in a peer's format, or dense, over a connection."""

    def __init__(self, peer: Peer, server: socket.socket) -> None:
        self._peer, self._server = peer, server
        self._old: dict[str, Any] | None = None
        self._there: socket.socket | None = None
        self._sending: Thread | None = None
        self._version = -1

    def publish(self, dense: Weights) -> sparserl.SyncReport:
        """Encode what changed; it is on its way when this returns."""
        old, new = self._old, arrays(dense)
        payload = Dense().encode({}, new) if old is None else self._peer.encode(old, new)
        self._old, self._version = new, self._version + 1
        if self._there is None:
            self._there, _ = self._server.accept()
        if old is None and isinstance(self._peer, Patches):
            self._peer.know(new)
        self._settle()
        self._sending = Thread(target=self._send, args=(self._there, self._version, payload))
        self._sending.start()
        return report(self._version, sum(map(len, payload)), sum(part.nbytes for part in new.values()))

    @staticmethod
    def _send(there: socket.socket, version: int, payload: Payload) -> None:
        sizes = struct.pack(f"<{len(payload)}Q", *map(len, payload))
        for part in (_FRAME.pack(version, len(payload)) + sizes, *payload):
            there.sendall(part)

    def _settle(self) -> None:
        if self._sending is not None:
            self._sending.join()

    def close(self) -> None:
        self._settle()
        if self._there is not None:
            self._there.close()


class Ours:
    """Weights by sparserl, into a folder."""

    def __init__(self, url: str, published: Published, link: Link) -> None:
        self._publisher = sparserl.Publisher(url, published.source, link=f"{link.bits_per_second:g}", threads=1)

    def publish(self, _dense: Weights) -> sparserl.SyncReport:
        made: sparserl.SyncReport = self._publisher.publish()
        return made

    def close(self) -> None:
        self._publisher.close()


class Clocked:
    """The trainer's end, with what each version took, and its hash."""

    def __init__(self, published: Published, end: Pushed | Ours, link: Throttled) -> None:
        self._published, self._end, self._link = published, end, link
        self.rows: list[dict[str, Any]] = []

    def publish(self) -> sparserl.SyncReport:
        """Publish, by the clock. What it is compared with is made before."""
        began = time.monotonic()
        dense = self._published.dense()
        cast = time.monotonic() - began if isinstance(self._end, Pushed) else 0.0  # sparserl reads what is trained
        hashed = sha256(dense)
        row: dict[str, Any] = {"sha256": hashed, "before": self._link.moved, "began": time.monotonic() - cast}
        made = self._end.publish(dense)
        row |= {"encoded": time.monotonic(), "payload": made.bytes, "dense": made.dense_bytes, "stages": made.seconds}
        self.rows.append(row)
        return made

    def close(self) -> None:
        self._end.close()


# -- the worker's end --------------------------------------------------------------------------------------------------


class Landing:
    """A worker's end, with what each version took; it starts without weights."""

    told = False

    def __init__(self, target: Weights, folder: str) -> None:
        self._log = Path(folder) / LANDED
        for tensor in target.values():
            tensor.zero_()

    def look(self) -> None:
        """Nothing is taken before it is asked for."""

    def land(self, version: int) -> float:
        """Hold a version; the seconds of decoding and writing."""
        took = self._land(version)
        with self._log.open("a") as log:
            log.write(json.dumps({"version": version, "apply": took, "held": time.monotonic()}) + "\n")
        return took

    def _land(self, version: int) -> float:
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError


class Received(Landing):
    """Weights in a peer's format."""

    def __init__(self, peer: Peer, address: str, target: Weights, folder: str) -> None:
        super().__init__(target, folder)
        self._peer, self._weights = peer, arrays(target)
        host, _, port = address.rpartition(":")
        self._there = socket.create_connection((host, int(port)))

    def _land(self, version: int) -> float:
        sent, parts = _FRAME.unpack(self._read(_FRAME.size))
        assert sent == version
        payload = [self._read(size) for size in struct.unpack(f"<{parts}Q", self._read(8 * parts))]
        began = time.perf_counter()
        (self._peer if version else Dense()).decode_apply(payload, self._weights)
        if not version and isinstance(self._peer, Patches):
            self._peer.know(self._weights)
        return time.perf_counter() - began

    def _read(self, size: int) -> bytes:
        data, at = bytearray(size), 0
        while at < size:
            got = self._there.recv_into(memoryview(data)[at:])
            if not got:
                raise ConnectionError("the trainer left")
            at += got
        return bytes(data)

    def close(self) -> None:
        self._there.close()


class Followed(Landing):
    """Weights by sparserl, over HTTP: followed as they come, and committed when they are asked for."""

    def __init__(self, url: str, target: Weights, folder: str) -> None:
        super().__init__(target, folder)
        self._asked: SimpleQueue[None] = SimpleQueue()
        self._committed: SimpleQueue[sparserl.SyncReport] = SimpleQueue()
        self._over = Event()
        self._subscriber = sparserl.Subscriber(url, target, threads=1, before=self._asked.get)
        self._following = Thread(target=self._follow, daemon=True)
        self._following.start()

    def _follow(self) -> None:
        self._subscriber.follow(stop=self._over.is_set, on_commit=self._committed.put)

    def _land(self, version: int) -> float:
        self._asked.put(None)
        made = self._committed.get(timeout=PATIENCE)
        assert made.version == version
        return sum(seconds for stage, seconds in made.seconds.items() if stage not in _NEEDLESS)

    def close(self) -> None:
        self._over.set()
        self._following.join(PATIENCE)
        self._subscriber.close()


# -- both --------------------------------------------------------------------------------------------------------------


class Format(Way):
    """A way over a link: `url` of the options says in which format, or to which folder sparserl writes."""

    worker = (sys.executable, "-m", "benchmarks.slow_link", "worker")

    def __init__(self, link: Link | None = None, through: Throttled | None = None, server: Any = None) -> None:
        self._link, self._through, self._server = link, through, server
        self.clocked: Clocked | None = None

    def publisher(self, options: Options, published: Published, callbacks: Sequence[Any]) -> Clocked:
        assert self._link is not None
        assert self._through is not None
        if (peer := peer_of(options, self._link)) is None:
            end: Pushed | Ours = Ours(options.url, published, self._link)
        else:
            end = Pushed(peer, self._server)
        until = time.monotonic() + PATIENCE
        while not (Path(options.folder) / READY).exists():  # or its start would count as part of the first copy
            if time.monotonic() > until:
                raise SystemExit(f"the worker has not started within {PATIENCE} s")
            time.sleep(0.1)
        self.clocked = Clocked(published, end, self._through)
        return self.clocked

    def follower(self, options: Options, target: Weights, worker: int) -> Landing:
        compile_kernels(options)
        peer, common = peer_of(options, self._link), (options.follow, target, options.folder)
        made = Followed(*common) if peer is None else Received(peer, *common)
        (Path(options.folder) / READY).touch()
        return made


def peer_of(options: Options, link: Link | None) -> Peer | None:
    """The format of a run in which weights are pushed, warmed up; None for a run by way of a store."""
    if options.url == Patches.name:
        return Patches(link)  # `compile_kernels` has warmed it up
    found = next((peer for peer in PEERS if peer.name == options.url), None)
    if found is not None:
        old, new = ({"w": np.arange(start, start + 64, dtype=np.uint16)} for start in (0, 1))
        found.decode_apply(found.encode(old, new), old)
    return found


def arrays(weights: Weights) -> dict[str, Any]:
    """The bits of weights."""
    return {name: bits(tensor).numpy().view(np.uint16) for name, tensor in weights.items()}


def report(version: int, size: int, dense: int) -> sparserl.SyncReport:
    """What the loop wants to know of a version."""
    return sparserl.SyncReport("", version, "", "patch" if version else "anchor", 0, dense // 2, size, dense)


# -- a run -------------------------------------------------------------------------------------------------------------


@contextmanager
def unpacked(model: str, seed: int) -> Iterator[str]:
    """A model that is quickly loaded: SmolLM2 is packed, and taken out once for all runs."""
    if model != "smollm2-135m":
        yield model
        return
    with tempfile.TemporaryDirectory(prefix="sparserl-model-") as folder:
        found, tokenizer, _ = policy.build(model, seed)
        save_file(distinct(found.state_dict()), f"{folder}/model.safetensors", {"format": "pt"})
        del found.config.quantization_config
        found.config.save_pretrained(folder)
        tokenizer._tokenizer.save_pretrained(folder)  # type: ignore[attr-defined]  # noqa: SLF001
        yield folder


def run(name: str, options: Options, link: Link) -> dict[str, Any]:
    """One run in one format: what every sync took, and hashes of all that must be the same in the others."""
    load = os.getloadavg()[0]
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="sparserl-slow-link-")))
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        port = stack.enter_context(served(folder / "store")) if name == OURS else server.getsockname()[1]
        through = stack.enter_context(throttled(port, link))
        url, follow = (f"file://{folder}/store", "http://") if name == OURS else (name, "")
        own = replace(options, url=url, follow=f"{follow}127.0.0.1:{through.port}", folder=str(folder))
        way = Format(link, through, server)
        trainer = Trainer(own, folder, lambda _: None, way)
        try:
            trainer.learn_before()
            for _ in trainer.run():
                pass
            assert way.clocked is not None
            rows = joined(way.clocked.rows, folder / LANDED, through.moved)
        finally:
            trainer.close()
        for row, sync in zip(rows, trainer.syncs, strict=True):
            (landed,) = sync.landed
            if landed.weights != row["sha256"]:
                raise SystemExit(f"{name}: version {sync.version} is not what was published")
            row["same"] = [sync.tokens, sync.rewards, sync.rollout]
            row["reward"] = sync.reward
    return {"way": name, "load": [load, os.getloadavg()[0]], "wall": rows[-1]["held"] - rows[0]["held"], "rows": rows}


def joined(sent: list[dict[str, Any]], path: Path, moved: int) -> list[dict[str, Any]]:
    """What both ends know of every version, and the bytes that came through the link for it."""
    landed = [json.loads(line) for line in path.read_text().splitlines()]
    after = [*(row["before"] for row in sent[1:]), moved]
    rows = []
    for one, other, end in zip(sent, landed, after, strict=True):
        row = one | other | {"bytes": end - one["before"], "encode": one["encoded"] - one["began"]}
        row["sync"] = row["held"] - row["began"]
        row["transfer"] = row["sync"] - row["encode"] - row["apply"]
        rows.append(row)
    return rows


def compare(names: Sequence[str], options: Options, link: Link) -> Iterator[dict[str, Any]]:
    """All runs, after each what there is; ends where one is not like the first."""
    made: list[dict[str, Any]] = []
    about = {
        "options": f"{options.algorithm}, {options.prompts} prompts, groups of {options.group}, rate {options.lr:g}",
        "link": str(link),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "threads": torch.get_num_threads(),
    }
    for name in names:
        made.append(run(name, options, link))
        first, last = made[0], made[-1]
        for a, b in zip(first["rows"], last["rows"], strict=True):
            if a["same"] != b["same"] or a["sha256"] != b["sha256"]:
                raise SystemExit(f"{name}: sync {b['version']} is not what {first['way']} made of it")
        if first["rows"][-1]["sha256"] == first["rows"][0]["sha256"]:
            raise SystemExit("no weight has changed, so nothing is shown")
        took = [row["sync"] for row in last["rows"][1:]]
        print(f"{name}: {sum(took) / len(took):.2f} s a sync, {last['wall']:.1f} s in all", flush=True)
        yield about | {"runs": made}


def main(argv: list[str] | None = None) -> int:
    """Run it, and write down what came out."""
    given = sys.argv[1:] if argv is None else argv
    if given[:1] == ["worker"]:
        return worker.main(Path(given[1]), int(given[2]), Format())
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", help="as for examples.rl (default %(default)s)")
    parser.add_argument("--syncs", type=int, default=5, help="after the first copy (default %(default)s)")
    parser.add_argument("--prompts", type=int, default=4, help="questions of a batch (default %(default)s)")
    parser.add_argument("--group", type=int, default=4, help="answers to each (default %(default)s)")
    parser.add_argument("--lr", type=float, default=1e-6, help="learning rate (default %(default)s)")
    parser.add_argument("--warm-up", type=int, default=200, help="supervised steps of the tiny model before RL")
    parser.add_argument("--workers", type=int, default=1, choices=[0, 1], help="0: answer inside the trainer")
    parser.add_argument("--rate", default="100Mbit", help="of the link (default %(default)s)")
    parser.add_argument("--latency", default="10ms", help="of each bit on it (default %(default)s)")
    parser.add_argument("--ways", default=",".join(WAYS), help="formats, with commas (default all)")
    parser.add_argument("--out", type=Path, default=_HOME, help="folder for slow_link.json, and of rl.md")
    said = vars(parser.parse_args(argv))
    link, names, out = Link.parse(said.pop("rate"), said.pop("latency")), said.pop("ways").split(","), said.pop("out")
    if not set(names) <= set(WAYS):
        parser.error(f"ways are some of {','.join(WAYS)}")
    out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    options = Options(**said, staleness=0, schedule="fixed", modes=("update",), fingerprint=True)
    with unpacked(options.model, options.seed) as folder:
        for made in compare(names, replace(options, model=folder), link):
            found = {"model": options.model} | made
            (out / "slow_link.json").write_text(json.dumps(found, indent=1) + "\n")
    lines = "\n".join(session_tables.slow_link(found)) + "\n"
    print(lines)
    if (page := out / "rl.md").exists():
        head, rest = page.read_text().split(_FROM)
        page.write_text(f"{head}{_FROM}\n{lines}\n{_TO}{rest.split(_TO)[1]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
