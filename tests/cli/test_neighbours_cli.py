"""`follow --serve`: eight receivers, of which one reaches the store."""

from __future__ import annotations

import re
import signal
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from sparserl import Publisher
from sparserl.sources import open_checkpoint
from tests.cli.programs import Running, started
from tests.cli.session_commands import usage

RECEIVERS = 8
SECONDS = 120


def served_url(running: Running) -> str:
    """The URL that a program says on stderr."""
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        match = re.search(r"(?:at|serving) (http://\S+)$", running.err.get(timeout=SECONDS).strip())
        if match is not None:
            return match[1]
    raise AssertionError("it never said where it serves")


def reaches(folder: Path, bits: np.ndarray) -> bool:
    """Wait until a checkpoint folder has the weights."""
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        current = folder / "current"
        if current.exists() and (open_checkpoint(current)["w"].array == bits.view(np.uint32)).all():
            return True
        time.sleep(0.05)
    return False


@pytest.mark.long
def test_eight_receivers_of_which_one_reaches_the_store(tmp_path: Path) -> None:
    """Each object leaves the store once; one that is killed and has lost everything fills itself from a neighbour."""
    rng = np.random.default_rng(2)
    weights = {"w": rng.standard_normal(400_000).astype(np.float32)}
    publisher = Publisher(tmp_path / "store", weights, files={"config.json": b"{}"}, anchor_after=100.0)
    publisher.publish()
    log = tmp_path / "requests"
    folders = [tmp_path / f"receiver-{number}" for number in range(RECEIVERS)]
    with ExitStack() as stack:
        origin = stack.enter_context(
            started("serve", tmp_path / "store", "--listen", "127.0.0.1:0", "--access-log", log)
        )
        first = stack.enter_context(started("follow", served_url(origin), "-o", folders[0], "--serve", "127.0.0.1:0"))
        url = served_url(first)
        others = [stack.enter_context(started("follow", url, "-o", folder)) for folder in folders[1:]]
        for _ in range(3):
            assert all(reaches(folder, weights["w"]) for folder in folders)
            weights["w"][rng.integers(0, 400_000, 500)] += 1
            publisher.publish()
        others[0].process.send_signal(signal.SIGKILL)
        others[0].process.wait()
        assert reaches(folders[0], weights["w"])
        lost = stack.enter_context(started("follow", url, "-o", tmp_path / "receiver-again", "--once"))
        assert lost.process.wait(SECONDS) == 0
        assert all(
            reaches(folder, weights["w"]) for folder in (*folders[:1], *folders[2:], tmp_path / "receiver-again")
        )
        assert first.end(signal.SIGINT) == 0
    lines = [line.split() for line in log.read_text().splitlines()]
    fetched = Counter(path for method, path, status, _ in lines if (method, status) == ("GET", "200"))
    buckets = [count for path, count in fetched.items() if "/buckets/" in path]
    assert buckets == [1] * 4, "an anchor and three patches"


def test_a_token_is_for_the_network(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("secret")
    assert "--token-file" in usage("follow", tmp_path / "store", "-o", tmp_path / "out", "--token-file", token)
