"""`sparserl serve` with clients that mean no good: others are still served, and it ends without a word."""

from __future__ import annotations

import contextlib
import http.client
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from sparserl.transport import open_store
from sparserl.transport.stores.base import Retry
from tests.transport.serve_program import ask, serving

pytest.importorskip("uvicorn")

FEW = "from sparserl.transport.server import connections\nconnections.MAX_CONNECTIONS = 20"
SOON = (
    "from sparserl.transport.server import connections, run\nconnections._REQUEST_SECONDS = 1.0\nrun._END_SECONDS = 1"
)
GET = "GET /{} HTTP/1.1\r\nHost: x\r\n{}\r\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A head, and an object that is larger than what lies between two sockets."""
    root = tmp_path / "store"
    root.mkdir()
    (root / "head.json").write_bytes(b"first")
    with (root / "large").open("wb") as file:
        file.truncate(64 << 20)
    return root


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    path = tmp_path / "tokens"
    path.write_text("t0ken\n")
    return path


@pytest.fixture
def certificate(tmp_path: Path) -> tuple[Path, Path]:
    """For 127.0.0.1 and a name that leads nowhere, and its key."""
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    made = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    names = ["-days", "2", "-subj", "/CN=x", "-addext", "subjectAltName=IP:127.0.0.1,DNS:store.invalid"]
    subprocess.run([*made, *names, "-keyout", key, "-out", cert], check=True, capture_output=True)
    return cert, key


@contextlib.contextmanager
def connections(url: str, count: int, sent: str = "") -> Iterator[list[socket.socket]]:
    """Connections on which something was sent, and that stay."""
    place = urlsplit(url)
    assert place.port is not None
    with contextlib.ExitStack() as stack:
        opened = []
        for _ in range(count):
            one = stack.enter_context(socket.create_connection((place.hostname, place.port), timeout=30))
            one.sendall(sent.encode())
            opened.append(one)
        yield opened


def closed(one: socket.socket) -> bool:
    """Whether the other side has ended a connection, once all that it sent is read."""
    try:
        while one.recv(1 << 16):
            pass
    except ConnectionError:
        pass
    except TimeoutError:
        return False
    return True


def test_who_has_no_token_is_heard_once(folder: Path, tokens: Path) -> None:
    """A connection on which a token was missing is closed with the answer; others are kept."""
    with serving(folder, "--token-file", tokens) as (url, _):
        assert ask(url, "/head.json").headers["connection"] == "close"
        with connections(url, 3, GET.format("head.json", "")) as several:
            assert all(map(closed, several))
        kept = http.client.HTTPConnection(urlsplit(url).netloc, timeout=30)
        kept.connect()
        socket_ = kept.sock
        for _ in range(3):
            kept.request("GET", "/head.json", headers={"Authorization": "Bearer t0ken"})
            assert kept.getresponse().read() == b"first"
        assert kept.sock is socket_
        kept.close()


def test_silent_connections_make_room(folder: Path, tokens: Path) -> None:
    """Three times as many as there may be, silent or in the middle of a request: whoever asks is answered.

    Those that wait for an answer keep their place.
    """
    token = {"authorization": "Bearer t0ken"}
    with contextlib.ExitStack() as stack:
        url, _ = stack.enter_context(serving(folder, "--token-file", tokens, first=FEW))
        tag = ask(url, "/head.json", **token).headers["etag"]
        wait = f"Authorization: Bearer t0ken\r\nIf-None-Match: {tag}\r\nPrefer: wait=30\r\n"
        held = stack.enter_context(connections(url, 5, GET.format("head.json", wait)))
        while b"sparserl_serve_waiting 5\n" not in ask(url, "/metrics", **token).body:
            time.sleep(0.05)
        for sent in ("", "GET /head.json HTTP/1.1\r\nX-Slow: ", GET.format("nothing", "")):
            with connections(url, 60, sent):
                for _ in range(3):
                    assert ask(url, "/head.json", **token).body == b"first"
        (folder / "head.json").write_bytes(b"second")
        for one in held:
            assert one.recv(1 << 16).startswith(b"HTTP/1.1 200")


def test_it_ends_without_a_word(folder: Path) -> None:
    """On SIGTERM, with clients that take nothing, wait, are silent, have not finished asking, or were refused."""
    wait = "If-None-Match: *\r\nPrefer: wait=30\r\n"
    with contextlib.ExitStack() as stack:
        url, running = stack.enter_context(serving(folder, first=SOON))
        for sent in (
            GET.format("large", ""),
            GET.format("head.json", wait),
            GET.format("head.json", ""),
            GET.format("large", "")[:-2],
            "no request\r\n\r\n",
            "",
        ):
            stack.enter_context(connections(url, 10, sent))
        ask(url, "/head.json")
        running.terminate()
        assert running.wait(120) == 0  # what it said is looked at when it is left


def test_tls_is_no_way_to_be_slow(folder: Path, certificate: tuple[Path, Path]) -> None:
    """Who does not shake hands is cut off as soon as who does not ask; idle clients do not keep it from ending."""
    cert, key = certificate
    with serving(folder, "--tls-cert", cert, "--tls-key", key, first=SOON) as (url, running):
        with connections(url, 3) as several:
            assert all(map(closed, several))  # after one second here; they would wait for thirty
        store = open_store(url, client_options={"root_certificate": cert.read_bytes()})
        assert store.get("head.json", 10).data == b"first"
        running.terminate()
        assert running.wait(120) == 0
        store.close()


def test_a_question_mark_is_a_part_of_the_name(folder: Path) -> None:
    """With a query or without one, what is asked for is another name, and that is not there."""
    with serving(folder) as (url, _):
        for name in ("head.json", "large", "auth", "metrics", ""):
            for query in ("?", "?x", "??", "?x=y&z", "?x?"):
                assert ask(url, f"/{name}{query}").status == 404
        assert ask(url, "/auth").status == 204


def test_a_tunnel_of_a_proxy(folder: Path, certificate: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Over https the proxy sees where to, and nothing else; the certificate is that of the server."""
    cert, key = certificate
    seen: list[bytes] = []

    def pump(source: socket.socket, to: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while part := source.recv(1 << 16):
                seen.append(part)
                to.sendall(part)

    def forward(listener: socket.socket, port: int) -> None:
        with listener.accept()[0] as client, socket.create_connection(("127.0.0.1", port)) as server:
            seen.append(client.recv(1 << 16))
            client.sendall(b"HTTP/1.1 200 Fine\r\n\r\n")
            back = threading.Thread(target=pump, args=(server, client))
            back.start()
            pump(client, server)
            server.shutdown(socket.SHUT_RDWR)
            back.join(120)

    with (
        serving(folder, "--tls-cert", cert, "--tls-key", key) as (url, _),
        socket.create_server(("127.0.0.1", 0)) as at,
    ):
        port = urlsplit(url).port
        assert port is not None
        thread = threading.Thread(target=forward, args=(at, port))
        thread.start()
        monkeypatch.setenv("https_proxy", f"127.0.0.1:{at.getsockname()[1]}")
        monkeypatch.delenv("no_proxy", raising=False)
        options = {"root_certificate": cert.read_text()}
        store = open_store("https://store.invalid:9", token="t0ken", retry=Retry(attempts=1), client_options=options)
        assert store.get("head.json", 10).data == b"first"
        store.close()
        thread.join(120)
    assert seen[0].startswith(b"CONNECT store.invalid:9 HTTP/1.1\r\n")
    assert not [part for part in seen if b"t0ken" in part or b"head.json" in part]
