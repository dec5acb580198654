"""`sparserl serve` in a process of its own."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def served(folder: Path) -> Iterator[int]:
    """The port of `sparserl serve` for a folder."""
    folder.mkdir(exist_ok=True)
    code = "from sparserl.cli import main; main()"
    command = [sys.executable, "-c", code, "serve", str(folder), "--listen", "127.0.0.1:0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ, "COLUMNS": "500"}) as running:
        assert running.stderr is not None
        try:
            yield _port(running.stderr)
        finally:
            running.send_signal(signal.SIGTERM)


def _port(lines: Iterable[str]) -> int:
    """The port that a server tells of; there may be warnings before it."""
    told: list[str] = []
    for line in lines:
        if (match := re.search(r"https?://[^\s/]*:(\d+)", line)) is not None:
            return int(match[1])
        told.append(line)
    raise RuntimeError(f"the server has ended: {''.join(told)}")
