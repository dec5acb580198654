"""The RL example over other ways than a folder: the run is the same, and every version is verified."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import sparserl
from tests.servers import BUCKET, Server

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from examples.rl import __main__ as demo  # noqa: E402
from examples.rl import ways  # noqa: E402
from examples.rl.options import Options  # noqa: E402
from examples.rl.weights import distinct  # noqa: E402
from tests.transport.serve_program import serving  # noqa: E402

pytestmark = pytest.mark.usefixtures("torch_as_before")

HOME = Path(__file__).resolve().parents[2]
SHORT = ("--syncs", "3", "--warm-up", "2", "--prompts", "4", "--staleness", "0", "--schedule", "fixed")


def syncs(said: str) -> list[dict[str, Any]]:
    """The versions of a run with `--json`."""
    *found, end = map(json.loads, said.splitlines())
    assert end["summary"][0].startswith("all 4 versions verified bit for bit"), end
    return found


def inside(capsys: pytest.CaptureFixture[str], *options: object) -> list[dict[str, Any]]:
    """A run with its worker inside the trainer."""
    code = demo.main([*SHORT, "--workers", "0", "--json", *map(str, options)])
    out = capsys.readouterr()
    assert code == 0, out.err
    return syncs(out.out)


def learnt(found: list[dict[str, Any]]) -> list[tuple[float, int, str]]:
    """What a run must have in common with one over another way."""
    return [(sync["reward"], sync["changed"], sync["digest"]) for sync in found]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[float, int, str]]:
    """The same run through a folder."""
    home = tmp_path_factory.mktemp("expected")
    with pytest.MonkeyPatch.context() as patch, (home / "out").open("w+") as out:
        patch.setattr(sys, "stdout", out)
        assert demo.main([*SHORT, "--workers", "0", "--json", "--folder", str(home)]) == 0
        out.seek(0)
        return learnt(syncs(out.read()))


@pytest.mark.long
def test_over_http(tmp_path: Path, capsys: pytest.CaptureFixture[str], expected: list[tuple[float, int, str]]) -> None:
    """The trainer writes a folder, workers read it from `sparserl serve`."""
    store, log = tmp_path / "store", tmp_path / "log"
    store.mkdir()
    with serving(store, "--access-log", log) as (url, _):
        found = inside(capsys, "--url", store, "--follow", url, "--folder", tmp_path / "run")
    assert learnt(found) == expected
    assert log.read_text().count("GET") >= 4 * 3  # of each version the head, its index and a bucket


@pytest.mark.long
def test_through_an_object_store(
    server: Server,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    expected: list[tuple[float, int, str]],
) -> None:
    """Trainer and worker find the server where the environment says."""
    for name, value in {"ENDPOINT_URL": server.endpoint, "ALLOW_HTTP": "true", "REGION": "us-east-1"}.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    for name in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY"):
        monkeypatch.setenv(f"AWS_{name}", "test")
    found = inside(capsys, "--url", f"s3://{BUCKET}/{tmp_path.name}", "--folder", tmp_path)
    assert learnt(found) == expected
    with sparserl.Subscriber(f"s3://{BUCKET}/{tmp_path.name}", (), name=False) as late:
        assert late.store.get("head.json", 1 << 20).data


@pytest.mark.long
def test_over_a_process_group(tmp_path: Path, expected: list[tuple[float, int, str]]) -> None:
    """Two workers are ranks beside the trainer, and commit every version with it."""
    ended = subprocess.run(
        [sys.executable, "-W", "error", "-m", "examples.rl", *SHORT, "--json", "--url", "gloo:"],
        cwd=HOME,
        env={**os.environ, "PYTHONPATH": str(Path(sparserl.__file__).parents[1]), "TMPDIR": str(tmp_path)},
        capture_output=True,
        encoding="utf-8",
        timeout=900,
        check=False,
    )
    assert (ended.returncode, ended.stderr) == (0, ""), ended.stdout
    found = syncs(ended.stdout)
    assert learnt(found) == expected
    assert all({landed["worker"] for landed in sync["landed"]} == {0, 1} for sync in found)
    assert not list(tmp_path.glob("**/head*"))  # there was no store


def test_addresses_are_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A path is one of this machine, `gloo:` a port of it that is free; what has a scheme stays as it is."""
    monkeypatch.chdir(tmp_path)
    assert ways.complete("", Path("/run")) == "file:///run/store"
    assert ways.complete("there", Path("/run")) == f"file://{tmp_path}/there"
    assert ways.complete("s3://bucket/run", Path("/run")) == "s3://bucket/run"
    assert ways.complete("gloo:", Path("/run")).startswith("gloo://127.0.0.1:")


@pytest.mark.parametrize(
    "wrong",
    [
        ("--workers", "0"),
        ("--follow", "http://127.0.0.1:1"),
        ("--schedule", "fixed", "--staleness", "1"),
        ("--kill", "1"),
    ],
)
def test_what_a_process_group_cannot_do_is_refused(wrong: tuple[str, ...]) -> None:
    """Workers inside the trainer, another address, going back, and coming back."""
    assert Options(url="gloo:").broadcast
    with pytest.raises(SystemExit) as error:
        demo.main(["--url", "gloo:", *wrong])
    assert error.value.code == 2


def test_tied_weights_travel_once() -> None:
    """Of an embedding that is the head as well, the name stays that a checkpoint has; order stays, too."""
    tied, other = torch.zeros(4, 2), torch.zeros(3)
    found = distinct({"model.embed_tokens.weight": tied, "a": other, "lm_head.weight": tied.detach()})
    assert list(found) == ["model.embed_tokens.weight", "a"]
