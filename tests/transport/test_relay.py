"""Two nginx caches between one origin and eight subscribers, configured by examples/nginx.conf."""

from __future__ import annotations

import hashlib
import os
import shutil
import socket
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

import sparserl
from sparserl.errors import StoreError
from sparserl.transport import open_store
from sparserl.transport.stores.base import fetch
from sparserl.transport.stores.folder import FolderStore
from tests.transport.serve_program import ROOT, ask, same, serving, step, weights

pytest.importorskip("uvicorn")
pytest.importorskip("obstore")

TOKEN = "t0ken"
BEARER = {"authorization": f"Bearer {TOKEN}"}


def installed() -> str:
    """Where nginx is; it is installed where that can be done."""
    path = os.environ.get("PATH", "") + ":/usr/sbin"
    if shutil.which("nginx", path=path) is None and os.geteuid() == 0 and shutil.which("apt-get"):
        env = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
        for command in (["update"], ["install", "-y", "--no-install-recommends", "nginx-light"]):
            subprocess.run(["apt-get", *command], env=env, check=False, capture_output=True, timeout=900)
    found = shutil.which("nginx", path=path)
    if found is None:
        pytest.skip("nginx is not there and could not be installed with apt-get")
    return found


@contextmanager
def cache(nginx: str, folder: Path, origin: str) -> Iterator[str]:
    """The URL of a cache in front of an origin: the configuration that the docs name, with places of our own."""
    folder.mkdir()
    with socket.create_server(("127.0.0.1", 0)) as free:
        place = f"127.0.0.1:{free.getsockname()[1]}"
    site = (ROOT / "examples" / "nginx.conf").read_text()
    for theirs, ours in (
        ("/var/cache/nginx/sparserl", str(folder / "cache")),
        ("127.0.0.1:8000", origin.removeprefix("http://")),
        ("127.0.0.1:8080", place),
    ):
        assert site.count(theirs) == 1
        site = site.replace(theirs, ours)
    kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    temporary = "".join(f"{kind}_temp_path {folder}/{kind};\n" for kind in kinds)
    user = "user root;\n" if os.geteuid() == 0 else ""
    (folder / "nginx.conf").write_text(
        f"{user}daemon off;\npid {folder}/pid;\nerror_log {folder}/error.log;\nevents {{}}\n"
        f"http {{\naccess_log off;\n{temporary}{site}}}\n"
    )
    command = [nginx, "-p", str(folder), "-e", str(folder / "error.log"), "-c", str(folder / "nginx.conf")]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as running:
        try:
            for _ in range(100):
                try:
                    socket.create_connection(("127.0.0.1", int(place.rpartition(":")[2])), timeout=1).close()
                    break
                except OSError:
                    assert running.poll() is None, running.stderr and running.stderr.read()
                    time.sleep(0.1)
            yield f"http://{place}"
        finally:
            running.terminate()
            running.communicate(timeout=20)


@dataclass
class Relay:
    """A store, the origin that serves it, two caches in front of it, and the origin's access log."""

    store: Path
    origin: str
    caches: list[str]
    log: Path

    def served(self, kind: str = "buckets") -> Counter[str]:
        """How often the origin was asked for each object of a kind."""
        lines = [line.split() for line in self.log.read_text().splitlines()]
        assert all(len(line) == 4 for line in lines)
        return Counter(path for _, path, status, _ in lines if f"/{kind}/" in path and status in ("200", "206"))


@pytest.fixture
def relay(tmp_path: Path) -> Iterator[Relay]:
    nginx = installed()
    store, log, tokens = tmp_path / "store", tmp_path / "access", tmp_path / "tokens"
    store.mkdir()
    tokens.write_text(f"another\n{TOKEN}\n")
    with ExitStack() as stack:
        origin, _ = stack.enter_context(serving(store, "--token-file", tokens, "--access-log", log))
        caches = [stack.enter_context(cache(nginx, tmp_path / f"cache-{i}", origin)) for i in range(2)]
        yield Relay(store, origin, caches, log)


@pytest.mark.long
def test_the_origin_sends_each_bucket_once_per_cache(relay: Relay) -> None:
    """Eight subscribers at two caches sync six versions at the same moments; all have the same bits."""
    ours = weights(400_000)
    publisher = sparserl.Publisher(f"file://{relay.store}", ours, anchor_after=1e9)
    targets = [{name: np.zeros_like(array) for name, array in ours.items()} for _ in range(8)]
    subscribers = [
        sparserl.Subscriber(relay.caches[i % 2], target, token=TOKEN, threads=1) for i, target in enumerate(targets)
    ]
    ready = threading.Barrier(8)

    def sync(subscriber: sparserl.Subscriber) -> None:
        ready.wait()
        assert subscriber.sync() is not None

    with ThreadPoolExecutor(8) as pool:
        for version in range(6):
            step(ours, version)
            publisher.publish()
            list(pool.map(sync, subscribers))
            assert all(same(ours, target) for target in targets)
    for kind in ("buckets", "manifests", "index"):
        served = relay.served(kind)
        assert len(served) >= 6
        assert max(served.values()) <= 2, (kind, served)
    print("requests at the origin, by bucket:", sorted(relay.served().values()))
    _refused_without_a_token(relay)


def _refused_without_a_token(relay: Relay) -> None:
    """Also what the cache has, and what nobody has."""
    cached = next(iter(relay.served()))
    for url in relay.caches:
        assert ask(url, cached, **BEARER).status == 200
        for path in (cached, "/head.json", "/runs/nothing", "/auth"):
            for given in ({}, {"authorization": "Bearer wrong"}):
                got = ask(url, path, **given)
                assert got.status == (404 if path == "/auth" else 401)
                assert b"<html>" in got.body or got.body == b""
        with pytest.raises(StoreError, match="401"):
            sparserl.Subscriber(url, weights(400_000), token="wrong").sync()
    assert max(relay.served().values()) <= 2


def test_ranges_through_a_cache(relay: Relay) -> None:
    """Ranges of an object that is not there yet, all asked for at once, are one request at the origin."""
    data = os.urandom(20_000_000)
    name = f"runs/0123456789abcdef/buckets/0123456789abcdef/{hashlib.sha256(data).hexdigest()}"
    first = relay.caches[0]
    assert ask(first, f"/{name}", **BEARER).status == 404  # which is not remembered
    writer = FolderStore(relay.store)
    writer.put(name, data)
    writer.close()
    with ThreadPoolExecutor(4) as pool, ThreadPoolExecutor(4) as ranges:
        stores = [open_store(first, token=TOKEN) for _ in range(4)]
        assert list(pool.map(lambda s: fetch(s, name, len(data), ranges) == data, stores)) == [True] * 4
    assert relay.served() == {f"/{name}": 1}
    part = ask(first, f"/{name}", range="bytes=19999990-", **BEARER)
    assert (part.status, part.body) == (206, data[-10:])
    assert part.headers["content-range"] == "bytes 19999990-19999999/20000000"
    known = ask(first, f"/{name}", if_none_match=part.headers["etag"], **BEARER)
    assert (known.status, known.body) == (304, b"")
    assert ask(first, f"/{name}", range="bytes=20000000-", **BEARER).status == 416
    assert relay.served() == {f"/{name}": 1}


def test_following_through_a_cache(relay: Relay) -> None:
    """A held request for the head goes through: versions arrive well under a second after they were published."""
    ours = weights()
    theirs = {name: np.zeros_like(array) for name, array in ours.items()}
    publisher = sparserl.Publisher(f"file://{relay.store}", ours)
    publisher.publish()
    subscriber = sparserl.Subscriber(relay.caches[1], theirs, token=TOKEN)
    committed: dict[int, float] = {}
    arrived = threading.Condition()
    ended = threading.Event()

    def note(report: sparserl.SyncReport) -> None:
        with arrived:
            committed[report.version] = time.monotonic()
            arrived.notify()

    options = {"stop": ended.is_set, "on_commit": note}
    following = threading.Thread(target=subscriber.follow, kwargs=options, daemon=True)
    following.start()
    late = []
    for version in range(5):
        published = time.monotonic()
        with arrived:
            assert arrived.wait_for(lambda v=version: v in committed, 20)
        late.append(committed[version] - published)
        assert same(ours, theirs)
        time.sleep(0.3)
        step(ours, version)
        publisher.publish()
    ended.set()
    following.join(120)
    assert not following.is_alive()
    print(f"from published to committed: {[round(1000 * s) for s in late]} ms, the first with all weights")
    assert sorted(late)[2] < 0.8
