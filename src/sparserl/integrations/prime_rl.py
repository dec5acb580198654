"""prime-rl: patches in a store between the trainer's disk and vLLM's workers. See docs/how-to/integrations/prime-rl.md.

    trainer: broadcasts/step_7/ on its disk ──► publish ──► store ──► (workers stage it by themselves)
    orchestrator ──► /update_weights ──► every worker commits the version of step 7

`python -m sparserl.integrations.prime_rl RUN_DIR URL` publishes what the trainer writes; or the trainer publishes by
itself (`prime_rl_trainer`). Workers have the backend `sparserl`, and take the store from the environment: SPARSERL_URL,
and SPARSERL_TRUSTED_KEYS.
"""

from __future__ import annotations

import argparse
import logging
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..errors import CheckpointError, SessionError, SparserlError
from ..session import Publisher, SyncReport
from ..transport.stores.opening import open_store
from . import environment
from .saved_checkpoints import LatestCheckpoint

log = logging.getLogger("sparserl.prime_rl")
_MARKER = "STABLE"  # is touched when a broadcast is whole
_FIRST = 2  # so many broadcasts are published that are on disk at the start: an engine may ask for the last but one
_POLL_SECONDS = 1.0


class BroadcastPublisher:
    """Publishes what prime-rl's trainer broadcasts through the file system, each broadcast as a version of its step.

    Args:
        run_dir: The folder of the run, in which the trainer makes `broadcasts/step_N/`.
        url: Where to publish.
        options: Further options of the `Publisher`.

    Example:
        >>> BroadcastPublisher("outputs/my-run", "s3://bucket/run").follow()                       # doctest: +SKIP
    """

    def __init__(self, run_dir: str | Path, url: str, **options: Any) -> None:
        self._broadcasts = Path(run_dir) / "broadcasts"
        self._published: dict[int, int] | None = None  # by step, when its marker was touched
        self._store = open_store(url)
        self._options = options
        self._source = LatestCheckpoint()
        self._publisher: Publisher | None = None

    def publish_new(self) -> list[SyncReport]:
        """Publish the broadcasts that are whole and not published yet, in the order in which they were made.

        A trainer that resumes from an older step broadcasts it again; then it is published again.
        """
        touched = self._touched()
        if self._published is None:
            old = sorted(touched, key=touched.__getitem__)[:-_FIRST]
            self._published = {step: touched[step] for step in old}
        waiting = [step for step, when in touched.items() if self._published.get(step) != when]
        reports = []
        for step in sorted(waiting, key=touched.__getitem__):
            folder = self._broadcasts / f"step_{step}"
            self._source.path = folder
            try:
                if self._publisher is None:  # it reads the files of the first broadcast
                    self._publisher = Publisher(self._store, self._source, **self._options)
                report = self._publisher.publish(step=step)
            except (CheckpointError, OSError):
                if (folder / _MARKER).exists():
                    raise
                log.warning("%s was removed before it could be published", folder)
            else:
                log.info("step %d: %s", step, report)
                reports.append(report)
            self._published[step] = touched[step]
        return reports

    def follow(self, stop: Callable[[], bool] = lambda: False) -> None:
        """Publish broadcasts as they are made, until `stop` says so."""
        log.info("waiting for broadcasts in %s", self._broadcasts)
        while not stop():
            self.publish_new()
            time.sleep(_POLL_SECONDS)

    def close(self) -> None:
        if self._publisher is not None:
            self._publisher.close()
        self._store.close()

    def _touched(self) -> dict[int, int]:
        """When the marker of each whole broadcast was touched."""
        touched = {}
        for marker in self._broadcasts.glob(f"step_*/{_MARKER}"):
            step = _step_of(str(marker.parent))
            try:
                touched[step] = marker.stat().st_mtime_ns
            except FileNotFoundError:
                continue  # the trainer removes old ones
        return touched


def commit_broadcast(engine: Any, weight_dir: str) -> None:
    """On all workers of a vLLM at once: commit the version of the step that a broadcast is of; waits for it.

    Args:
        engine: The `SparserlEngine` of the worker.
        weight_dir: The folder of the broadcast. Only its name is read: the folder may be on another machine.
    """
    from .vllm import raise_on_last_rank

    with raise_on_last_rank(engine.parallel_config):
        update = {"step": _step_of(weight_dir)}
        init = {"url": environment.store_url(), "trusted_keys": environment.trusted_keys()}
        if not engine.is_following:
            engine.init_transfer_engine(engine.parse_init_info(init))
        engine.update_weights(update)


def _step_of(folder: str) -> int:
    match = re.fullmatch(r"step_(\d+)", Path(folder).name)
    if match is None:
        raise SessionError(f"{folder} is not a broadcast of prime-rl through the file system: its name is not step_N")
    return int(match[1])


def main(arguments: list[str]) -> None:
    """Publish the broadcasts of a run until the process is ended."""
    parser = argparse.ArgumentParser(
        prog="python -m sparserl.integrations.prime_rl",
        description="Publish what prime-rl's trainer broadcasts through the file system, until the process is ended.",
        epilog="SPARSERL_STATE and SPARSERL_SIGNING_KEY_FILE configure it. Start it before the trainer.",
    )
    parser.add_argument("run_dir", metavar="RUN_DIR", help="the run's folder, in which the trainer makes broadcasts/")
    parser.add_argument("url", metavar="URL", help="the store, such as s3://bucket/run")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    try:
        publisher = BroadcastPublisher(options.run_dir, options.url, **environment.publisher_options())
    except SparserlError as error:
        parser.error(str(error))
    try:
        publisher.follow()
    except KeyboardInterrupt:
        publisher.close()


if __name__ == "__main__":
    main(sys.argv[1:])
