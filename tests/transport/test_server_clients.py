"""The HTTP server of a run among many, slow, hostile and vanishing clients."""

from __future__ import annotations

import contextlib
import signal
import socket
import ssl
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

import pytest

import sparserl
from sparserl.errors import StoreError
from sparserl.transport import open_store
from sparserl.transport.stores.base import Retry
from tests.transport.serve_program import ask, serving, weights
from tests.transport.served_run import BUCKET, DATA, begun, fill

pytest.importorskip("uvicorn")
pytest.importorskip("obstore")


def open_connection(url: str) -> socket.socket:
    place = urlsplit(url)
    assert place.port is not None
    return socket.create_connection((place.hostname, place.port), timeout=30)


def test_hundreds_wait_and_none_is_in_the_way(tmp_path: Path) -> None:
    """Three hundred held requests are all answered when the head moves; meanwhile others are served."""
    store, tag = begun(tmp_path)
    with serving(tmp_path) as (url, _):
        known = ask(url, "/head.json").headers["etag"]
        held = [open_connection(url) for _ in range(300)]
        for one in held:
            one.sendall(
                f"GET /head.json HTTP/1.1\r\nHost: x\r\nIf-None-Match: {known}\r\nPrefer: wait=30\r\n\r\n".encode()
            )
        time.sleep(0.5)
        began = time.monotonic()
        assert ask(url, "/head.json").body == b"0"
        assert time.monotonic() - began < 15, "others wait while requests are held"
        store.swap("head.json", b"1", tag)
        began = time.monotonic()
        for one in held:
            assert one.recv(4096).startswith(b"HTTP/1.1 200 ")
            one.close()
        assert time.monotonic() - began < 25, "answered when their time was up"
    store.close()


def test_tokens(tmp_path: Path) -> None:
    """Who has one of them may read; who has none learns nothing, not even what is there."""
    folder = tmp_path / "store"
    folder.mkdir()
    fill(folder).close()
    tokens = tmp_path / "tokens"
    tokens.write_text("# two of them\nopen-sesame\n\nsecond.token~\n")
    with serving(folder, "--token-file", tokens) as (url, _):
        for path in ("/head.json", BUCKET, "/nothing", "/auth", "/../x", "/.hidden"):
            for method in ("GET", "HEAD", "POST"):
                for given in ({}, {"authorization": "Bearer open-sesam"}, {"authorization": "Bearer open-sesame x"}):
                    got = ask(url, path, method, **given)
                    assert (got.status, got.body) == (401, b"")
                    assert got.headers["www-authenticate"] == 'Bearer realm="sparserl"'
                    assert "etag" not in got.headers
        for given in ("Basic open-sesame", "Bearer", "Bearer ", "open-sesame", "Bearer \xfc", "Bearer # two of them"):
            assert ask(url, "/head.json", authorization=given).status == 401
        for given in ("Bearer open-sesame", "bearer second.token~"):
            assert ask(url, "/head.json", authorization=given).body == b"first"
            assert ask(url, "/nothing", authorization=given).status == 404
            for method in ("GET", "HEAD", "POST", "PUT"):
                assert ask(url, "/auth", method, authorization=given).status == 204
        assert open_store(url, token="open-sesame").get("head.json", 100).data == b"first"
        with pytest.raises(StoreError, match=r"head\.json.*401") as refused:
            open_store(url, token="wrong").get("head.json", 100)
        assert "wrong" not in str(refused.value)
        with pytest.raises(StoreError, match="401"):
            sparserl.Subscriber(url, weights(), token=None).sync()


def test_tokens_are_read_again_at_a_hangup(tmp_path: Path) -> None:
    """Those that are new are taken, those that are gone refused, without a restart; the log says whose token it was."""
    folder, tokens, log = tmp_path / "store", tmp_path / "tokens", tmp_path / "access"
    folder.mkdir()
    fill(folder).close()
    tokens.write_text("# names are written behind tokens\nold#1 # trainer\nplain\n")
    with serving(folder, "--token-file", tokens, "--access-log", log) as (url, running):

        def status(token: str) -> int:
            return ask(url, "/head.json", authorization=f"Bearer {token}").status

        assert (status("old#1"), status("plain"), status("new"), status("trainer")) == (200, 200, 401, 401)
        tokens.write_text("new # rollout-7\nplain\n")
        running.send_signal(signal.SIGHUP)
        ends = time.monotonic() + 60
        while status("new") != 200:
            assert time.monotonic() < ends
        assert (status("old#1"), status("plain")) == (401, 200)
    lines = log.read_text().splitlines()
    assert lines[:3] == ["GET /head.json 200 5 trainer", "GET /head.json 200 5", "GET /head.json 401 0"]
    assert "GET /head.json 200 5 rollout-7" in lines[4:]


def test_tokens_that_cannot_be_read_change_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Half a file must not lock everybody out, nor let everybody in."""
    pytest.importorskip("starlette")
    from sparserl.transport.server import run
    from sparserl.transport.server.app import App

    tokens = tmp_path / "tokens"
    app = App(tmp_path, {"good": ""})
    for text in ("", "good\ntwo words\n", "good # two names\n", "good #\n", "g\udcfcd\n"):
        tokens.write_bytes(text.encode(errors="surrogateescape"))
        run._reload_tokens(app, tokens)
    tokens.unlink()
    run._reload_tokens(app, tokens)
    assert app.tokens == {"good": ""}
    assert caplog.text.count("the tokens stay as they are") == 6


def test_too_much_is_refused(site: tuple[str, Path]) -> None:
    """Headers and URLs that are too long, and what is not HTTP: an answer in the four hundreds, or none, and on."""
    url, _ = site
    assert ask(url, "/" + "a" * 3000).status == 414
    assert ask(url, "/head.json", x_long="a" * 17_000).status in (400, 431)
    for sent in (b"GET /" + b"a" * 300_000, b"\x16\x03\x01" + bytes(200), b"GET / HTTP/1.1\r\nX: " + b"b" * 200_000):
        with open_connection(url) as raw:
            try:
                raw.sendall(sent + b"\r\n\r\n")
                answer = raw.recv(4096)
            except OSError:  # cut off while we were still sending
                answer = b""
            assert answer == b"" or answer.split()[1].startswith(b"4")
    assert ask(url, "/head.json").body == b"first"


def test_slow_clients_are_cut_off(site: tuple[str, Path]) -> None:
    """Fifty that send a byte at a time, or nothing, do not keep others waiting, and are gone after ten seconds."""
    url, _ = site
    slow = [open_connection(url) for _ in range(50)]
    for i, one in enumerate(slow[10:]):
        rest = b"Content-Length: 100000\r\n\r\n" if i < 10 else b"X-Slow: "
        one.sendall(b"GET /head.json HTTP/1.1\r\nHost: x\r\n" + rest)
    began = time.monotonic()
    worst = 0.0
    while time.monotonic() - began < 13:
        for one in slow[10:]:
            with contextlib.suppress(OSError):  # cut off
                one.send(b"a")
        asked = time.monotonic()
        assert ask(url, "/head.json").body == b"first"
        worst = max(worst, time.monotonic() - asked)
        time.sleep(0.5)
    assert worst < 8, "others wait until slow clients are cut off"
    for one in slow:
        one.settimeout(60)
        with contextlib.suppress(ConnectionError), one:
            while one.recv(4096):
                pass


def _open_files(pid: int) -> list[str]:
    """What each descriptor of a process points to."""
    found = []
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            found.append(str(fd.readlink()))
    return found


@pytest.mark.slow
def test_who_takes_nothing_is_cut_off(tmp_path: Path) -> None:
    """An answer that stands still for long (three seconds here) ends there, and the server has the connection back."""
    size = 64 << 20
    with (tmp_path / "large").open("wb") as file:
        file.truncate(size)
    sooner = "from sparserl.transport.server import connections\nconnections._STALL_SECONDS = 3.0"
    with serving(tmp_path, first=sooner) as (url, running), open_connection(url) as one:
        one.sendall(b"GET /large HTTP/1.1\r\nHost: x\r\n\r\n")
        assert one.recv(10) == b"HTTP/1.1 2"
        large = str(tmp_path / "large")
        while large not in (held := _open_files(running.pid)):
            time.sleep(0.01)
        ends = time.monotonic() + 120
        while large in (now := _open_files(running.pid)) or len(now) > len(held) - 2:
            assert time.monotonic() < ends  # the connection or the file is still open
            time.sleep(0.1)
        got = 0
        with contextlib.suppress(ConnectionError):
            while part := one.recv(1 << 20):
                got += len(part)
        assert got < size


def test_who_leaves_or_does_not_read_is_no_harm(tmp_path: Path) -> None:
    """Clients that go in the middle of an answer, or take none of it: memory stays bounded and others are served."""
    size = 64 << 20
    with (tmp_path / "large").open("wb") as file:
        file.truncate(size)
    with serving(tmp_path) as (url, running):
        assert len(ask(url, "/large").body) == size
        before = _memory(running.pid)
        held = [open_connection(url) for _ in range(30)]
        for one in held:
            one.sendall(b"GET /large HTTP/1.1\r\nHost: x\r\n\r\n")
            assert one.recv(10) == b"HTTP/1.1 2"
        for one in held[:15]:
            one.close()
        time.sleep(0.5)
        assert ask(url, "/large", range="bytes=5-6").body == bytes(2)
        assert _memory(running.pid) - before < size
        for one in held:
            one.close()


def test_many_who_take_nothing_share_a_bounded_memory(tmp_path: Path) -> None:
    """Sixty clients that ask for 64 MiB and take none of it, where there is room for 2; others are served in full."""
    with (tmp_path / "large").open("wb") as file:
        file.truncate(64 << 20)
    less = "from sparserl.transport.server import responses as r\nr._ROOM, r._CHUNK = 2 << 20, 1 << 20"
    with serving(tmp_path, first=less) as (url, running), contextlib.ExitStack() as stack:
        before = _memory(running.pid)
        for _ in range(60):
            one = stack.enter_context(socket.socket())
            one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            one.connect(("127.0.0.1", urlsplit(url).port))
            one.sendall(b"GET /large HTTP/1.1\r\nHost: x\r\n\r\n")
            assert one.recv(10) == b"HTTP/1.1 2"
        assert ask(url, "/large", range="bytes=7-3000006").body == bytes(3_000_000)
        assert _memory(running.pid) - before < 10 << 20


@pytest.mark.parametrize(
    "lengths",
    [
        "Content-Length: 0\r\nContent-Length: 0",
        "Content-Length: 0\r\ncontent-length: 40",
        "Content-Length: 0, 0",
        "Content-Length: 4\r\nTransfer-Encoding: chunked",
        "Transfer-Encoding: chunked\r\nX: y\r\nTransfer-Encoding: chunked",
        "Transfer-Encoding: chunked, identity",
        "Content-Length: +4",
        "Content-Length: -4",
    ],
)
def test_a_request_has_one_length(site: tuple[str, Path], lengths: str) -> None:
    """Where it could be read in two ways it is refused, and nothing behind it is taken for another request."""
    url, _ = site
    with open_connection(url) as raw:
        raw.sendall(f"GET /head.json HTTP/1.1\r\nHost: x\r\n{lengths}\r\n\r\n".encode())
        raw.sendall(b"0\r\n\r\nGET /empty HTTP/1.1\r\nHost: x\r\n\r\n")
        answer = b""
        with contextlib.suppress(ConnectionError):
            while part := raw.recv(4096):
                answer += part
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert answer.count(b"HTTP/1.1 ") == 1
    for body in ("Content-Length: 4\r\n\r\nabcd", "Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n"):
        with open_connection(url) as raw:
            raw.sendall(f"GET /head.json HTTP/1.1\r\nHost: x\r\nX: ,\r\n{body}".encode())
            assert raw.recv(4096).startswith(b"HTTP/1.1 200 ")


def _memory(pid: int) -> int:
    """Bytes of its own that a process has in memory."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("RssAnon:"))


def test_signals_end_it_at_once(tmp_path: Path) -> None:
    """Ctrl-C and SIGTERM: requests that are held are answered, and the exit code is 0."""
    begun(tmp_path)[0].close()
    for number in (signal.SIGINT, signal.SIGTERM):
        with serving(tmp_path) as (url, running), ThreadPoolExecutor(2) as pool:
            waiting = []
            for path in ("/head.json", "/coming.json"):
                known = ask(url, path).headers["etag"]
                waiting.append(pool.submit(ask, url, path, if_none_match=known, prefer="wait=30"))
            time.sleep(0.3)
            began = time.monotonic()
            running.send_signal(number)
            assert [answer.result().status for answer in waiting] == [304, 304]
            assert running.wait(120) == 0
            assert time.monotonic() - began < 25, "it waited for the requests that it held"


def test_tls(tmp_path: Path) -> None:
    """With a certificate the same over https; a client that trusts it needs nothing else."""
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    folder = tmp_path / "store"
    folder.mkdir()
    fill(folder).close()
    made = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    name = ["-days", "2", "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run([*made, *name, "-keyout", key, "-out", cert], check=True, capture_output=True)
    with serving(folder, "--tls-cert", cert, "--tls-key", key) as (url, _):
        assert url.startswith("https://127.0.0.1:")
        context = ssl.create_default_context(cafile=str(cert))
        assert ask(url, "/head.json", tls=context).body == b"first"
        with pytest.raises(ssl.SSLCertVerificationError):
            ask(url, "/head.json", tls=ssl.create_default_context())
        open_ = open_store(url, client_options={"allow_invalid_certificates": True})
        assert open_.get(BUCKET[1:], len(DATA)).data == DATA
        once = Retry(attempts=1)
        with pytest.raises(StoreError):
            open_store(url, retry=once).get("head.json", 100)
        with open_connection(url) as plain:  # http to an https port
            plain.sendall(b"GET / HTTP/1.1\r\n\r\n")
            plain.recv(100)
        assert ask(url, "/head.json", tls=context).status == 200
