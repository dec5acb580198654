"""RL over a slow link: every format gives the same run, and the link is as slow as it says."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from pathlib import Path
from threading import Thread

import pytest

from benchmarks.session_tables import slow_link as table
from benchmarks.throttle import throttled
from sparserl.plan import Link

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from benchmarks import peers, slow_link  # noqa: E402

pytestmark = pytest.mark.usefixtures("torch_as_before")

HOME = Path(__file__).resolve().parents[2]
SHORT = ("--model", "tiny", "--syncs", "2", "--warm-up", "2", "--lr", "5e-6", "--rate", "200Mbit", "--latency", "1ms")


@pytest.mark.long
def test_every_format_gives_the_same_run(tmp_path: Path) -> None:
    """Tokens, rewards and weights are compared inside; patches are the smallest, and all bytes crossed the link."""
    ways = "dense bf16,PULSE,sparserl over TCP,sparserl over HTTP"
    assert slow_link.main([*SHORT, "--ways", ways, "--workers", "0", "--out", str(tmp_path)]) == 0
    found = json.loads((tmp_path / "slow_link.json").read_text())
    sizes = {run["way"]: [row["bytes"] for row in run["rows"]] for run in found["runs"]}
    dense, pulse, patches, ours = (sizes[way] for way in ways.split(","))
    assert min(dense) > found["runs"][0]["rows"][0]["dense"]  # and a few bytes around it
    for version in (1, 2):
        assert dense[version] / 4 > pulse[version] > ours[version] > patches[version]
    for run in found["runs"]:
        for row in run["rows"]:
            assert row["sync"] > 8 * row["payload"] / 200e6
            assert row["sync"] == pytest.approx(row["encode"] + row["transfer"] + row["apply"])
    assert [line.split(" | ")[0] for line in table(found)[-4:]] == [f"| {way}" for way in ways.split(",")]


@pytest.mark.long
def test_one_bit_is_found_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A format that loses one bit of one version ends the comparison."""

    def decode_apply(self: peers.NemoRL, payload: peers.Payload, weights: peers.Weights) -> None:
        right(self, payload, weights)
        max(weights.values(), key=len).reshape(-1)[7] ^= 1

    right = peers.NemoRL.decode_apply
    monkeypatch.setattr(peers.NemoRL, "decode_apply", decode_apply)
    with pytest.raises(SystemExit, match="NeMo-RL: version 1 is not what was published"):
        slow_link.main([*SHORT, "--ways", "NeMo-RL", "--workers", "0", "--out", str(tmp_path)])


@pytest.mark.long
def test_with_a_worker_of_its_own(tmp_path: Path) -> None:
    """As `make slow-link` runs it, in processes."""
    options = [*SHORT, "--ways", "NeMo-RL,sparserl over HTTP", "--out", str(tmp_path)]
    done = subprocess.run([sys.executable, "-m", "benchmarks.slow_link", *options], cwd=HOME, timeout=900, check=False)
    assert done.returncode == 0
    assert (tmp_path / "slow_link.json").exists()


def test_a_link_is_as_slow_as_it_says() -> None:
    """Two connections share its rate, and every byte is counted; a round trip takes the latency twice."""
    with socket.create_server(("127.0.0.1", 0)) as server, throttled(server.getsockname()[1], Link(80e6, 0.02)) as link:
        ends = []
        for _ in range(2):
            near = socket.create_connection(("127.0.0.1", link.port))
            ends.append((near, server.accept()[0]))
        began = time.monotonic()
        ends[0][0].sendall(b"?")
        assert ends[0][1].recv(1) == b"?"
        ends[0][1].sendall(b"!")
        assert ends[0][0].recv(1) == b"!"
        assert time.monotonic() - began >= 0.04
        began = time.monotonic()
        threads = [Thread(target=far.sendall, args=(bytes(1_000_000),)) for _, far in ends]
        for thread in threads:
            thread.start()
        for near, _ in ends:
            left = 1_000_000
            while left:
                left -= len(near.recv(left))
        assert time.monotonic() - began >= 0.2 + 0.02
        assert link.moved == 2_000_001
        for thread in threads:
            thread.join()
        for pair in ends:
            for end in pair:
                end.close()
