"""`sparserl serve` as a program of its own, and requests to it that say exactly what they want."""

from __future__ import annotations

import http.client
import os
import signal
import ssl
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
ENV = os.environ | {"PYTHONPATH": str(ROOT / "src"), "COLUMNS": "200"}


@dataclass
class Answer:
    """What came back; header names in lower case."""

    status: int
    headers: dict[str, str]
    body: bytes


def ask(
    url: str, path: str, method: str = "GET", tls: ssl.SSLContext | None = None, timeout: float = 120, **headers: str
) -> Answer:
    """One request on a connection of its own; `if_none_match=…` sends If-None-Match. The path goes as it is."""
    place = urlsplit(url)
    assert place.hostname is not None
    if tls is None:
        connection = http.client.HTTPConnection(place.hostname, place.port, timeout=timeout)
    else:
        connection = http.client.HTTPSConnection(place.hostname, place.port, timeout=timeout, context=tls)
    try:
        connection.request(method, path, headers={name.replace("_", "-"): value for name, value in headers.items()})
        response = connection.getresponse()
        return Answer(response.status, {k.lower(): v for k, v in response.getheaders()}, response.read())
    finally:
        connection.close()


@contextmanager
def serving(
    folder: Path, *options: object, listen: str = "127.0.0.1:0", first: str = ""
) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """The URL of a server of its own, and its process; it must end cleanly and without a word.

    first: what it runs before it starts.
    """
    code = f"{first}\nfrom sparserl.cli import main\nmain()"
    command = [sys.executable, "-c", code, "serve", str(folder), "--listen", listen, *map(str, options)]
    with subprocess.Popen(command, env=ENV, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        assert running.stderr is not None
        try:
            line = running.stderr.readline()
            assert " at http" in line, line + running.stderr.read()
            yield line.split()[-1], running
        finally:
            if running.poll() is None:
                running.send_signal(signal.SIGTERM)
            _, said = running.communicate(timeout=900)
        assert (running.returncode, said) == (0, ""), said[-3000:]


def weights(size: int = 20_000) -> dict[str, np.ndarray]:
    return {"a": np.arange(size, dtype=np.float32), "b": np.ones((50, 70), np.float32)}


def step(held: dict[str, np.ndarray], seed: int) -> None:
    """Change some elements in place."""
    rng = np.random.default_rng(seed)
    for array in held.values():
        flat = array.reshape(-1)
        flat[rng.integers(0, flat.size, max(1, flat.size // 50))] *= np.float32(1.01)


def same(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> bool:
    return all(one[name].tobytes() == other[name].tobytes() for name in one)
