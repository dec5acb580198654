"""The command line as a program: one that ends, and one that runs until the test is over."""

from __future__ import annotations

import contextlib
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
ENV = os.environ | {"PYTHONPATH": str(ROOT / "src")}


def program(*args: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "sparserl.cli", *map(str, args)]
    return subprocess.run(command, env=ENV, capture_output=True, text=True, check=False, timeout=900)


class Running:
    """A program that runs; its lines as they come."""

    def __init__(self, *args: object) -> None:
        command = [sys.executable, "-m", "sparserl.cli", *map(str, args)]
        self.process = subprocess.Popen(command, env=ENV, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.out, self.err = self._lines(self.process.stdout), self._lines(self.process.stderr)

    @staticmethod
    def _lines(stream: Any) -> queue.Queue[str]:
        lines: queue.Queue[str] = queue.Queue()

        def read() -> None:
            for line in stream:
                lines.put(line)

        threading.Thread(target=read, daemon=True).start()
        return lines

    def wait(self) -> None:
        """Until it has said anything."""
        end = time.monotonic() + 60
        while self.out.empty() and self.err.empty() and time.monotonic() < end:
            time.sleep(0.01)

    def end(self, number: int) -> int:
        self.process.send_signal(number)
        return self.process.wait(120)


@contextlib.contextmanager
def started(*args: object) -> Iterator[Running]:
    """A program that is gone when the test is over."""
    running = Running(*args)
    try:
        yield running
    finally:
        if running.process.poll() is None:
            running.process.kill()
        running.process.wait()
        for stream in (running.process.stdout, running.process.stderr):
            assert stream is not None
            stream.close()
