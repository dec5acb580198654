"""The workers as the trainer sees them: processes that are started, watched and replaced, or one inside the trainer."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from .options import Options
from .queue import Job, Landed, Queue, Rollouts
from .ways import Way
from .worker import PAUSE, Worker

PATIENCE = 300  # seconds that a batch may take


class Failed(Exception):
    """The run cannot go on; the message says why."""


class Inside:
    """A worker in the trainer's own process: it answers as soon as it is asked."""

    def __init__(self, options: Options, folder: Path, way: Way) -> None:
        self._landed: list[Landed] = []
        self._answers: dict[Job, Rollouts] = {}
        self._worker = Worker(options, folder, self._landed.append, 0, way)
        self.replaced = 0

    def ask(self, job: Job) -> None:
        """Answer it."""
        self._answers[job] = self._worker.do(job)

    def take(self, job: Job) -> Rollouts:
        return self._answers.pop(job)

    def news(self) -> Iterator[Landed]:
        while self._landed:
            yield self._landed.pop(0)

    def finish(self, version: int) -> None:
        """Go to the last version."""
        self._worker.holder.goto(version)

    def kill(self, number: int) -> None:
        raise Failed(f"worker {number} cannot be killed: it lives in the trainer")

    def stop(self) -> None:
        """Nothing runs."""
        self._worker.holder.close()


class Processes:
    """Workers in processes of their own. One that was killed is replaced; one that fails ends the run."""

    def __init__(self, options: Options, folder: Path, way: Way) -> None:
        self._folder, self._queue, self._program, self._broadcast = folder, Queue(folder), way.worker, options.broadcast
        options.save(folder / "options.json")
        self._running = {number: self._start(number) for number in range(options.workers)}
        self.replaced = 0

    def ask(self, job: Job) -> None:
        self._queue.ask(job)

    def take(self, job: Job) -> Rollouts:
        """Wait for the answers to a job."""
        end = time.monotonic() + PATIENCE
        while (found := self._queue.take(job)) is None:
            self._watch()
            if time.monotonic() > end:
                raise Failed(f"no worker has answered job {job.name} within {PATIENCE} s; their logs: {self._folder}")
            time.sleep(PAUSE)
        return found

    def news(self) -> Iterator[Landed]:
        return self._queue.news()

    def finish(self, version: int) -> None:
        """Send all to the last version, and wait until they have left."""
        self._queue.stop(version)
        end = time.monotonic() + PATIENCE
        while any(process.poll() != 0 for process in self._running.values()):
            self._watch()
            if time.monotonic() > end:
                raise Failed(f"a worker did not leave within {PATIENCE} s; their logs: {self._folder}")
            time.sleep(PAUSE)

    def kill(self, number: int) -> None:
        """As the kernel does it when memory is short: without a word."""
        os.kill(self._running[number].pid, signal.SIGKILL)

    def stop(self) -> None:
        """Make sure that all are gone."""
        for process in self._running.values():
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            process.wait()

    def _start(self, number: int) -> subprocess.Popen[bytes]:
        home = Path(__file__).resolve().parents[2]
        with (self._folder / f"worker-{number}.log").open("ab") as log:
            return subprocess.Popen(
                [*self._program, str(self._folder), str(number)],
                cwd=home,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def _watch(self) -> None:
        """Replace those that were killed."""
        for number, process in self._running.items():
            code = process.poll()
            if code is not None and code < 0 and self._broadcast:
                raise Failed(f"worker {number} was killed, and nobody can take its place in a process group")
            if code is not None and code < 0:
                self._queue.release(number)
                self._running[number] = self._start(number)
                self.replaced += 1
            elif code:
                log = (self._folder / f"worker-{number}.log").read_text(errors="replace").strip()
                raise Failed(f"worker {number} ended with code {code}: {log.splitlines()[-1] if log else ''}")


def start(options: Options, folder: Path, way: Way) -> Inside | Processes:
    """The workers that were asked for."""
    return Processes(options, folder, way) if options.workers else Inside(options, folder, way)
