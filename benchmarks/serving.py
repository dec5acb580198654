"""`sparserl serve` in a process of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
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
            yield int(running.stderr.readline().rpartition(":")[2])
        finally:
            running.send_signal(signal.SIGTERM)
