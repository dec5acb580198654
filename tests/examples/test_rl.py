"""The RL example: its losses are what the formulas say, its proof can fail, and its demo keeps its word."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

import sparserl
from sparserl.record import Recording

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from examples.rl import __main__ as demo  # noqa: E402
from examples.rl import fidelity, losses, task  # noqa: E402

pytestmark = pytest.mark.usefixtures("torch_as_before")

HOME = Path(__file__).resolve().parents[2]
SHORT = ("--syncs", "3", "--warm-up", "2", "--prompts", "4", "--workers", "0")


def tensors(*rows: list[list[float]]) -> list[torch.Tensor]:
    return [torch.tensor(row, dtype=torch.float64) for row in rows]


class TestLosses:
    """Two answers: one of two tokens with advantage 1, one of one token (the other is padding) with advantage -2."""

    new, old, mask = tensors(
        [[math.log(0.6), math.log(0.5)], [math.log(0.3), 9.0]],
        [[math.log(0.4), math.log(0.5)], [math.log(0.4), 0.0]],
        [[1, 1], [1, 0]],
    )
    advantages = torch.tensor([1.0, -2.0], dtype=torch.float64)

    def loss(self, name: str, **clip: float) -> float:
        return losses.ALGORITHMS[name](self.new, self.old, self.advantages, self.mask, **clip).item()

    def test_grpo(self) -> None:
        """Ratios 1.5, 1 and 0.75: the first is clipped to 1.2, the last to 0.8, and answers count the same."""
        assert self.loss("grpo") == pytest.approx(-((1.2 + 1) / 2 - 1.6) / 2)
        assert self.loss("grpo", low=0.5, high=0.2) == pytest.approx(-((1.2 + 1) / 2 - 1.5) / 2)

    def test_dapo(self) -> None:
        """The upper clip is 1.28, and the three tokens count the same."""
        assert self.loss("dapo") == pytest.approx(-(1.28 + 1 - 1.6) / 3)

    def test_gspo(self) -> None:
        """One ratio for an answer: √(1.5 · 1), clipped to 1.05, and 0.75, clipped to 0.95."""
        assert self.loss("gspo") == pytest.approx(-(1.05 - 2 * 0.95) / 2)
        assert self.loss("gspo", low=0.9, high=0.9) == pytest.approx(-(math.sqrt(1.5) - 2 * 0.75) / 2)

    def test_advantages(self) -> None:
        """Rewards in units of their group's deviation; where all are the same, nothing is to be learnt."""
        rewards = torch.tensor([[1.0, 0.0, 0.0, 1.0], [0.5, 0.5, 0.5, 0.5]], dtype=torch.float64)
        found = losses.group_advantages(rewards)
        assert found[0].tolist() == pytest.approx([1, -1, -1, 1], abs=1e-5)
        assert found[1].tolist() == [0, 0, 0, 0]
        assert losses.informative(rewards).tolist() == [True, False]


def test_checker() -> None:
    """Only the sorted digits and the end of the line are worth 1; the way there is worth a little."""
    assert task.reward("49131=", "11349\n") == 1
    assert task.reward("49131=", "11349") == pytest.approx(0.2 * 5 / 6)
    assert task.reward("49131=", "94311\n") == pytest.approx(0.2 * 2 / 6)
    assert task.reward("49131=", "") == 0


@pytest.mark.parametrize(
    ("algorithm", "staleness"),
    [
        pytest.param("grpo", 0, marks=pytest.mark.long),
        pytest.param("dapo", 2, marks=pytest.mark.long),
        ("gspo", 1),
    ],
)
@pytest.mark.long
def test_patches_and_full_weights_are_the_same_run(
    algorithm: str, staleness: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Tokens, rewards and weights are identical after every sync; and weights did change."""
    code = fidelity.main([*SHORT, "--syncs", "4", "--algorithm", algorithm, "--staleness", str(staleness)])
    out = capsys.readouterr().out
    assert (code, out.count("sync  ")) == (0, 4), out
    assert f"identical ({algorithm}, 4 syncs, staleness {staleness}" in out


@pytest.mark.long
@pytest.mark.parametrize(
    ("version", "found"),
    [(1, "sync 2: weights"), (3, "version 3: weights")],
)
def test_one_ulp_is_found_out(version: int, found: str, capsys: pytest.CaptureFixture[str]) -> None:
    """One element off by one ulp is found in the sync that is learnt from it; in the last version, too."""
    assert fidelity.main([*SHORT, "--inject", str(version), "--staleness", "0"]) == 1
    assert found in capsys.readouterr().out


@pytest.mark.long
def test_nothing_learnt_is_no_proof(capsys: pytest.CaptureFixture[str]) -> None:
    """Runs whose weights never change are the same for no reason."""
    assert fidelity.main([*SHORT, "--lr", "0"]) == 1
    assert "nothing is proven" in capsys.readouterr().out


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(("--dtype", "fp8"), marks=pytest.mark.long),
        pytest.param(("--lora", "4", "--lr", "1e-3"), marks=pytest.mark.long),
        pytest.param(("--modes", "validate"), marks=pytest.mark.long),
    ],
)
def test_every_kind_of_weights_lands(kind: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """fp8 codes, merged LoRA weights, and patches that land in a copy are verified bit for bit."""
    assert demo.main([*SHORT, *kind, "--folder", str(tmp_path)]) == 0
    assert "all 4 versions verified bit for bit" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]


@pytest.mark.long
def test_validate_names_the_place(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The first bit that differs is reported with version, tensor and position, and ends the run."""
    assert demo.main([*SHORT, "--inject", "1", "--folder", str(tmp_path)]) == 1
    assert (
        "failed: version 1 at worker 0: model.layers.0.mlp.gate_proj.weight[256, 0]: bits " in capsys.readouterr().err
    )


@pytest.mark.long
def test_observe_touches_nothing(tmp_path: Path) -> None:
    """Only statistics and patches are written: no store; every patch starts where the one before it ends."""
    assert demo.main([*SHORT, "--modes", "observe", "--patches", "--folder", str(tmp_path)]) == 0
    (run,) = tmp_path.glob("run-*")
    assert not (run / "store").exists()
    patches = [sparserl.Patch.open(path) for path in sorted(run.glob("*.patch"))]
    recording = Recording.read(run / "recording.jsonl")
    assert [patch.changed for patch in patches[1:]] == [sync.total for sync in recording.syncs]
    assert sorted(recording.rewards) == [1, 2, 3]
    assert [patch.result for patch in patches[:3]] == [patch.base for patch in patches[1:]]
    assert 0 < patches[1].changed < patches[1].table.elements / 2


@pytest.mark.parametrize("wrong", [("--prompts", "3"), ("--syncs", "0"), ("--modes", "all"), ("--inject", "121")])
def test_senseless_options_are_refused(wrong: tuple[str, str]) -> None:
    """They end in a usage message before anything is written."""
    with pytest.raises(SystemExit) as error:
        demo.main(list(wrong))
    assert error.value.code == 2


@pytest.mark.long
def test_the_demo_and_a_killed_worker(tmp_path: Path) -> None:
    """As a user runs it, in processes: every version is verified, and a worker killed with -9 comes back."""
    options = ("--syncs", "8", "--warm-up", "2", "--prompts", "4", "--staleness", "2", "--kill", "3", "--json")
    ended = subprocess.run(
        [sys.executable, "-W", "error", "-m", "examples.rl", *options, "--folder", str(tmp_path)],
        cwd=HOME,
        env={**os.environ, "PYTHONPATH": str(Path(sparserl.__file__).parents[1])},
        capture_output=True,
        encoding="utf-8",
        timeout=900,
        check=False,
    )
    assert (ended.returncode, ended.stderr) == (0, ""), ended.stdout
    *syncs, end = map(json.loads, ended.stdout.splitlines())
    assert [(sync["version"], sync["verified"]) for sync in syncs] == [(version, True) for version in range(9)]
    assert all(landed["compared"] for sync in syncs for landed in sync["landed"])
    assert {landed["worker"] for landed in syncs[-1]["landed"]} == {0, 1}
    assert max(sync["staleness"] for sync in syncs) <= 2
    assert "1 worker(s) were killed and replaced" in end["summary"]
    page = (tmp_path / "report.html").read_text()
    assert page.count("<svg") == 6
    assert "//" not in page
