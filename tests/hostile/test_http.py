"""Servers that lie, hang, or point elsewhere: what is read is bounded, what is waited for ends, and errors are ours."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import sparserl
from sparserl.errors import LimitExceeded, NotFound, SparserlError, StoreError, Truncated, Unavailable
from sparserl.transport.stores.base import Retry, Store, fetch
from sparserl.transport.stores.deadline import within
from sparserl.transport.stores.opening import open_store
from tests.hostile.lying_server import Asked, Liar, answer, from_folder

ROOT = Path(__file__).resolve().parents[2]
ENV = os.environ | {"PYTHONPATH": str(ROOT / "src"), "AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}
ONCE = Retry(attempts=1)
MANY = Retry(attempts=100, first=1.0, longest=60.0)
ENOUGH = 64 << 20  # bytes: more than what lies between two sockets, far less than what is offered
SOON = 20.0  # seconds: far less than the timeout of one request


@pytest.fixture(params=["http", "s3"])
def opens(request: pytest.FixtureRequest) -> Callable[..., Store]:
    """Opens the store that a server pretends to be."""
    if request.param == "s3":
        pytest.importorskip("obstore")

    def opened(liar: Liar, retry: Retry = ONCE) -> Store:
        if request.param == "http":
            return open_store(liar.url, retry=retry, token="SECRET")
        keys = {"region": "us-east-1", "access_key_id": "a", "secret_access_key": "b"}
        return open_store("s3://b/p", retry=retry, endpoint=liar.url, client_options={"allow_http": True}, **keys)

    return opened


# -- bodies ------------------------------------------------------------------------------------------------------------

CHUNK = b"10000\r\n" + b"A" * 65536 + b"\r\n"
PLAIN = b"A" * 65536
DATE = b"Last-Modified: Mon, 01 Jan 2024 00:00:00 GMT\r\n"
LIES = {
    "a small length, and chunks without end": (b"Content-Length: 100\r\nTransfer-Encoding: chunked\r\n", CHUNK),
    "chunks without end": (b"Transfer-Encoding: chunked\r\n", CHUNK),
    "no end": (b"", PLAIN),
    "a large length": (b"Content-Length: 9000000000\r\n", PLAIN),
    "no length": (b"Content-Length: 99999999999999999999999\r\n", PLAIN),
    "two lengths": (b"Content-Length: 100\r\nContent-Length: 9000000000\r\n", PLAIN),
    "a chunk of less than nothing": (b"Transfer-Encoding: chunked\r\n", b"-1\r\n" + PLAIN),
    "trailers without end": (b"Transfer-Encoding: chunked\r\n", b"0\r\n" + b"X: y\r\n" * 10_000),
    "headers without end": (b"", b"X: y\r\n" * 10_000),
}


@pytest.mark.parametrize("lie", LIES)
@pytest.mark.parametrize("part", [False, True])
def test_a_body_is_read_to_its_limit(opens: Callable[..., Store], lie: str, part: bool) -> None:
    """Whatever the headers promise: a server that has two gigabytes to send gets rid of a small share of them."""
    lines, piece = LIES[lie]
    end = b"" if lie == "headers without end" else b"\r\n"
    status = b"206 P\r\nContent-Range: bytes 0-999/1000000" if part else b"200 OK"

    def pour(liar: Liar, connection: Any, _asked: Asked) -> None:
        liar.pour(connection, b"HTTP/1.1 " + status + b'\r\nETag: "x"\r\n' + DATE + lines + end, piece)

    with Liar(pour) as liar, within(10):
        store = opens(liar)
        try:
            data = store.read("a", 0, 1000) if part else store.get("a", 1000).data
        except (LimitExceeded, Truncated, Unavailable):
            data = b""
        assert len(data) <= 1000
        assert liar.sent < ENOUGH


def test_what_is_compressed_is_refused() -> None:
    """A body is never unpacked: it was not asked for that way."""
    with Liar(lambda *_: answer(b"x", content_encoding="gzip")) as liar, pytest.raises(StoreError, match="gzip"):
        open_store(liar.url, retry=ONCE).get("a", 10)


def test_parts_that_are_not_what_was_asked_for() -> None:
    """Another part, none at all, or one that ends too early is an error, and is never handed on."""
    for status, headers, body, error in (
        ("206 P", {"content_range": "bytes 5-14/100"}, b"0123456789", Unavailable),
        ("206 P", {"content_range": "bytes 0-98/100"}, b"0123456789", Unavailable),
        ("206 P", {}, b"0123456789", Unavailable),
        ("206 P", {"content_range": "bytes 0-4/5"}, b"01234", Truncated),
        ("206 P", {"content_range": "bytes 0-9/100"}, b"01234567890", LimitExceeded),
        ("416 R", {}, b"", Truncated),
        ("200 OK", {}, b"x" * 100, StoreError),
        ("404 N", {}, b"", NotFound),
    ):
        said = answer(body, status, **headers)
        with Liar(lambda *_, said=said: said) as liar, pytest.raises(error):
            open_store(liar.url, retry=ONCE).read("a", 0, 10)


# -- answers -----------------------------------------------------------------------------------------------------------

STATUSES = (100, 101, 204, 205, 206, 300, 304, 305, 400, 403, 404, 409, 410, 412, 416, 418, 429, 500, 503, 599, 999)
CALLS: dict[str, Callable[[Store], object]] = {
    "get": lambda store: store.get("a", 10),
    "read": lambda store: store.read("a", 0, 10),
    "changed": lambda store: store.changed("a", '"t"', 0),
    "changed from nothing": lambda store: store.changed("a", None, 0),
    "put": lambda store: store.put("a", b"1"),
    "swap": lambda store: store.swap("a", b"1", '"t"'),
    "create": lambda store: store.swap("a", b"1", None),
    "list": lambda store: list(store.list("a")),
    "delete": lambda store: store.delete(["a"]),
}


READS = ("get", "read", "changed")


@pytest.mark.parametrize("call", CALLS)
def test_every_error_is_ours(opens: Callable[..., Store], call: str) -> None:
    """Any status, and what is no HTTP at all, to any call: it works, or it is an error of sparserl's."""
    said = [answer(b"", f"{status} X", etag='"x"') for status in STATUSES]
    said += [
        answer(b"<x/>", "200 OK"),
        b"\r\n\r\n",
        b"HTTP/9 200\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nab",
    ]
    left = list(said)

    def parting(_liar: Liar, connection: Any, _asked: Asked) -> None:
        connection.sendall(left.pop())

    with Liar(parting) as liar:
        store = opens(liar)
        while left and (store.writable or call in READS):
            with contextlib.suppress(SparserlError), within(SOON):
                CALLS[call](store)


def test_an_answer_to_another_question_is_transient(opens: Callable[..., Store]) -> None:
    """A cache that says 304 where nobody named a tag: `Unavailable`, which does not end `follow`."""
    with Liar(lambda *_: answer(b"", "304 Not Modified", etag='"x"')) as liar:
        with pytest.raises(Unavailable):
            opens(liar).get("head.json", 10)
        heard: list[StoreError] = []
        subscriber = sparserl.Subscriber(opens(liar), {"w": np.zeros(4, np.float32)})
        with pytest.raises(Unavailable, match="no version within 2 s"):
            subscriber.follow(timeout=2, on_trouble=heard.append)
        assert heard


# -- redirects ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_redirects_stay_at_the_server(status: int) -> None:
    """To another path of it they are followed, with the token; to another port, name or scheme they are refused."""
    with Liar(lambda *_: answer(b"other", etag='"x"')) as other:
        places = [
            other.url,
            other.url.replace("127.0.0.1", "localhost"),
            "file:///etc/passwd#",
            "//[",
            "https://127.0.0.1",
        ]

        def here(liar: Liar, _connection: Any, asked: Asked) -> bytes:
            if asked.path == "/moved/a":
                return answer(b"here", etag='"x"')
            place = {"/b": f"{liar.url}/moved/a", "/c": "moved/a", "/d": "/d"}.get(asked.path)
            return answer(b"", f"{status} M", location=place or f"{places[0]}/a")

        with Liar(here) as liar:
            store = open_store(liar.url, retry=ONCE, token="SECRET")
            assert store.get("b", 10).data == store.get("c", 10).data == b"here"
            assert {asked.headers["authorization"] for asked in liar.asked} == {"Bearer SECRET"}
            while places:
                with pytest.raises(StoreError, match="is redirected to") as refused:
                    store.get("a", 10)
                assert places[0] in str(refused.value)
                assert not isinstance(refused.value, Unavailable)
                del places[0]
            with pytest.raises(StoreError, match="more than 5 times"):
                store.get("d", 10)
        assert not other.asked


# -- connections -------------------------------------------------------------------------------------------------------


def test_connections_are_kept() -> None:
    """Many requests go over one connection; where the server closes it in between, over another, without an error."""
    with Liar(lambda *_: answer(b"x", etag='"x"')) as liar:
        store = open_store(liar.url, retry=ONCE)
        for _ in range(20):
            assert store.get("a", 10).data == b"x"
        assert liar.connections == 1
        for one in liar._open:
            one.shutdown(2)
        assert store.get("a", 10).data == b"x"
        assert liar.connections == 2
        store.close()

    def parting(_liar: Liar, connection: Any, _asked: Asked) -> None:
        connection.sendall(answer(b"y", etag='"x"'))

    with Liar(parting) as liar:
        store = open_store(liar.url, retry=ONCE)
        for _ in range(20):
            assert store.get("a", 10).data == b"y"


def test_proxies_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests go through the proxy that is named, but for hosts that are excepted; https asks it for a tunnel."""

    def forward(_liar: Liar, _connection: Any, asked: Asked) -> bytes:
        return answer(b"", "403 No Tunnel") if asked.method == "CONNECT" else answer(b"x", etag='"x"')

    with Liar(forward) as proxy, Liar(lambda *_: answer(b"y", etag='"y"')) as liar:
        monkeypatch.setenv("http_proxy", proxy.url.replace("//", "//me:pass@"))
        monkeypatch.setenv("https_proxy", proxy.url)
        monkeypatch.delenv("no_proxy", raising=False)
        assert open_store("http://store.invalid/p", retry=ONCE).get("a", 10).data == b"x"
        (asked,) = proxy.asked
        assert asked.path == "http://store.invalid/p/a"
        assert asked.headers["proxy-authorization"] == "Basic bWU6cGFzcw=="
        with pytest.raises(Unavailable, match="the proxy answered 403"):
            open_store("https://store.invalid/p", retry=ONCE, token="SECRET").get("a", 10)
        assert (proxy.asked[-1].method, proxy.asked[-1].path) == ("CONNECT", "store.invalid:443")
        assert "authorization" not in proxy.asked[-1].headers
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        assert open_store(liar.url, retry=ONCE).get("a", 10).data == b"y"


def test_options_that_mean_nothing_are_refused() -> None:
    """A misspelt option, a token or a URL that cannot be sent: said when the store is opened, not later."""
    for url, options in (
        ("http://host", {"region": "here"}),
        ("http://host", {"client_options": {"timeuot": 1}}),
        ("http://host", {"client_options": {"timeout": "soon"}}),
        ("http://host", {"token": "two\r\nlines"}),
        ("http://host:port", {}),
        ("http://", {}),
        ("http:///path", {}),
        ("http://host/path?query", {}),
        ("http://[", {}),
    ):
        with pytest.raises(StoreError):
            open_store(url, **options)


# -- time --------------------------------------------------------------------------------------------------------------


def silent(liar: Liar, _connection: Any, _asked: Asked) -> None:
    liar.silent()


def dripping(liar: Liar, connection: Any, _asked: Asked) -> None:
    """A byte now and then: no single wait is long."""
    for byte in b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 10_000:
        connection.sendall(bytes([byte]))
        if liar._end.wait(0.05):
            return


def failing(*_: object) -> bytes:
    """To be tried again, after waits that grow."""
    return answer(b"", "503 Slow Down")


@pytest.mark.parametrize("rule", [silent, dripping, failing])
def test_a_deadline_ends_every_wait(opens: Callable[..., Store], rule: Any) -> None:
    """For an answer, for the rest of it, or between two attempts: the call ends when time is up, not when it would."""
    with Liar(rule) as liar:
        store = opens(liar, MANY)
        for call in CALLS if store.writable else READS:
            began = time.monotonic()
            with within(0.3), pytest.raises(Unavailable):
                CALLS[call](store)
            assert time.monotonic() - began < SOON, call


@pytest.fixture
def published(tmp_path: Path) -> Path:
    """The folder of a run with one version, of more than one range."""
    weights = {"w": np.random.default_rng(0).integers(0, 2**32, 5_000_000, np.uint32)}
    with sparserl.Publisher(f"file://{tmp_path}/store", weights) as publisher:
        publisher.publish()
    return tmp_path / "store"


@contextlib.contextmanager
def no_buckets(root: Path) -> Iterator[Liar]:
    """A server that has a version, and never sends its weights."""

    def rule(liar: Liar, _connection: Any, asked: Asked) -> bytes | None:
        return liar.silent() if "/buckets/" in asked.path else from_folder(root, asked)

    with Liar(rule) as liar:
        yield liar


def test_follow_ends_in_the_middle_of_a_version(published: Path) -> None:
    """By its timeout or when it is told to stop, while weights are fetched; they stay what they were."""
    mine = {"w": np.zeros(5_000_000, np.uint32)}
    with no_buckets(published) as liar:
        subscriber = sparserl.Subscriber(liar.url, mine)
        began = time.monotonic()
        with pytest.raises(Unavailable, match="not done in time"):
            subscriber.follow(timeout=0.5)
        ended = threading.Event()
        threading.Timer(0.5, ended.set).start()
        subscriber.follow(stop=ended.is_set)
        with pytest.raises(Unavailable):
            subscriber.follow(once=True, timeout=0.5)
        assert time.monotonic() - began < SOON
        assert subscriber.version is None
        assert not mine["w"].any()
        assert sum("/buckets/" in asked.path for asked in liar.asked) >= 3
    subscriber = sparserl.Subscriber(f"file://{published}", mine)
    subscriber.follow(timeout=60, stop=lambda: subscriber.version == 0)
    assert mine["w"].any()


def test_who_leaves_takes_the_transfers_along(published: Path) -> None:
    """Ctrl-C while ranges of a bucket are fetched on other threads: these end, too, and nobody waits for them."""
    with no_buckets(published) as liar:
        before = threading.active_count()
        subscriber = sparserl.Subscriber(liar.url, {"w": np.zeros(5_000_000, np.uint32)})
        threading.Timer(1.0, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        began = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            subscriber.sync()
        assert time.monotonic() - began < SOON
        names = [thread.name for thread in threading.enumerate() if thread.name.startswith("sparserl-")]
        assert not [name for name in names if name.startswith(("sparserl-range", "sparserl-transfer"))]
        assert before <= threading.active_count() + len(liar._threads)


@pytest.mark.long
def test_programs_end_when_they_are_told_to(published: Path, tmp_path: Path) -> None:
    """Ctrl-C, SIGTERM and --timeout end commands that wait for a server which does not answer, with nothing to add."""
    pytest.importorskip("obstore")
    with no_buckets(published) as liar, Liar(silent) as dead:
        s3 = ["s3://b/p", "--endpoint", dead.url, "--region", "us-east-1"]
        follow = ["follow", "-o"]
        cases = (
            ([*follow, "1", liar.url], signal.SIGINT, 0, "sparserl: stopped before the first version\n"),
            ([*follow, "2", liar.url], signal.SIGTERM, 0, "sparserl: stopped before the first version\n"),
            ([*follow, "3", dead.url, "--once", "--timeout", "1s"], None, 1, "not done in time"),
            (["fsck", *s3], signal.SIGINT, 130, ""),
        )
        command = [sys.executable, "-m", "sparserl.cli"]
        programs = [
            subprocess.Popen([*command, *args], env=ENV, cwd=tmp_path, stderr=subprocess.PIPE, text=True)
            for args, *_ in cases
        ]
        try:
            until = time.monotonic() + 120
            waiting = lambda: sum("/buckets/" in asked.path for asked in liar.asked) >= 2 and len(dead.asked) >= 2  # noqa: E731
            while not waiting():
                assert time.monotonic() < until
                time.sleep(0.05)
            for program, (_, number, _, _) in zip(programs, cases, strict=True):
                if number is not None:
                    program.send_signal(number)
            for program, (args, number, code, says) in zip(programs, cases, strict=True):
                _, said = program.communicate(timeout=60)  # one request alone would take twice as long
                # CPython ends by the signal itself if an interrupt that was caught came inside an import.
                ends = (code, -signal.SIGINT) if number == signal.SIGINT else (code,)
                assert program.returncode in ends, (args, said)
                assert says in said if code == 1 else said == says, args
                assert said.count("\n") == (1 if says else 0)
        finally:
            for program in programs:
                program.kill()
                program.wait()
                assert program.stderr is not None
                program.stderr.close()


def test_ranges_come_together(tmp_path: Path) -> None:
    """An object of several ranges, read at once over several connections, is what was written."""
    from concurrent.futures import ThreadPoolExecutor

    data = os.urandom(20 << 20)
    (tmp_path / "large").write_bytes(data)
    with Liar(lambda _liar, _connection, asked: from_folder(tmp_path, asked)) as liar, ThreadPoolExecutor(4) as pool:
        assert fetch(open_store(liar.url, retry=ONCE), "large", len(data), pool) == data
