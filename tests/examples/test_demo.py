"""The demo keeps its word: every version lands bit for bit, or the exit code and a clear message say otherwise."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import sparserl

pytest.importorskip("torch")
pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SMALL = ("--syncs", "3", "--steps-per-sync", "1", "--warm-up", "4")
ENDLESS = ("--syncs", "100000", "--steps-per-sync", "1", "--warm-up", "1")
PATCHES = [f"{version:06}.patch" for version in range(4)]
WAIT = 240  # seconds; a cold machine compiles kernels first


def start(program: str, *arguments: object) -> subprocess.Popen[str]:
    """An example as a user runs it, with the sparserl under test and with warnings as errors."""
    source = str(Path(sparserl.__file__).parents[1])
    return subprocess.Popen(
        [sys.executable, "-W", "error", str(EXAMPLES / program), *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": source, "PYTHONIOENCODING": "utf-8"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
    )


def ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a program that must end in time."""
    with process:
        try:
            out, err = process.communicate(timeout=WAIT)
        finally:
            process.kill()
    return process.returncode, out, err


def after_version(process: subprocess.Popen[str], version: int) -> int:
    """Read the demo's lines until a version has landed; returns the receiver's process id."""
    pid = 0
    for line in process.stdout:
        if found := re.search(r"receiver started as process (\d+)", line):
            pid = int(found[1])
        if line.startswith(f"{version:7}  "):
            return pid
    raise AssertionError(f"version {version} never landed: {process.stderr.read()}")


def gone(pid: int) -> bool:
    """Whether no such process runs any more, a moment later at most."""
    for _ in range(100):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    return False


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder and the output of a small run that kept its patches."""
    folder = tmp_path_factory.mktemp("demo") / "run"
    code, out, err = ended(start("demo.py", *SMALL, "--folder", folder, "--keep"))
    assert (code, err) == (0, ""), out
    return folder, out


def test_every_version_is_verified(kept: tuple[Path, str]) -> None:
    """A run ends with exit code 0, one verified line per version and its patch in the folder."""
    folder, out = kept
    rows = [line.split() for line in out.splitlines() if re.match(r" +\d+  \d", line)]
    assert [(str(version), "✓") for version in range(4)] == [(row[0], row[-1]) for row in rows]
    assert "all 4 versions verified bit for bit" in out
    assert sorted(path.name for path in (folder / "patches").iterdir()) == PATCHES


def test_patches_after_the_first_are_small(kept: tuple[Path, str]) -> None:
    """Version 0 is a patch of all weights; the later ones follow one another and carry a part of them."""
    patches = [sparserl.Patch.open(kept[0] / "patches" / name) for name in PATCHES]
    assert patches[0].changed > 0.9 * patches[0].table.elements
    for before, patch in zip(patches, patches[1:], strict=False):
        assert before.result == patch.base
        assert 0 < patch.changed < 0.2 * patch.table.elements


@pytest.mark.long
def test_same_seed_same_patches(kept: tuple[Path, str], tmp_path: Path) -> None:
    """A second run with the same seed writes the same bytes, also where an earlier run has left its patches."""
    stale = tmp_path / "patches"
    stale.mkdir()
    for name in ("000000.patch", "000077.patch", ".000078.patch.half"):
        (stale / name).write_bytes(b"an earlier run's")
    code, out, err = ended(start("demo.py", *SMALL, "--folder", tmp_path, "--keep"))
    assert (code, err) == (0, ""), out
    assert sorted(path.name for path in stale.iterdir()) == PATCHES
    for name in PATCHES:
        assert (kept[0] / "patches" / name).read_bytes() == (stale / name).read_bytes()


@pytest.mark.long
def test_nothing_is_left_behind(tmp_path: Path) -> None:
    """Without --keep a good run removes what it wrote, and nothing else."""
    (tmp_path / "mine.txt").write_text("stays")
    code, out, err = ended(start("demo.py", *SMALL, "--folder", tmp_path))
    assert (code, err) == (0, ""), out
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


@pytest.mark.parametrize("where", [0.01, 0.5, 0.99])
def test_a_flipped_bit_is_refused(kept: tuple[Path, str], tmp_path: Path, where: float) -> None:
    """One flipped bit in the second patch, wherever: version 0 is verified, version 1 refused, and that is the end."""
    patches = shutil.copytree(kept[0] / "patches", tmp_path / "patches")
    data = bytearray((patches / PATCHES[1]).read_bytes())
    data[int(where * len(data))] ^= 0x10
    (patches / PATCHES[1]).write_bytes(data)
    code, out, err = ended(start("receiver.py", patches, "--last", 3))
    assert code == 1
    ready, first, refusal = out.splitlines()
    assert ready == '{"ready": true}'
    assert '"version": 0' in first
    assert '"refused": "version 1' in refusal
    assert re.fullmatch(r"refused: version 1 \(.*000001\.patch\): \w+: .+\n", err)


def test_patches_out_of_order_are_refused(kept: tuple[Path, str], tmp_path: Path) -> None:
    """A patch that starts from other weights than the receiver holds is refused as a wrong base."""
    patches = shutil.copytree(kept[0] / "patches", tmp_path / "patches")
    (patches / PATCHES[2]).replace(patches / PATCHES[1])
    code, _, err = ended(start("receiver.py", patches, "--last", 1))
    assert code == 1
    assert "version 1" in err
    assert "WrongBase" in err


def test_a_patch_that_never_comes(tmp_path: Path) -> None:
    """A receiver without a trainer gives up when its patience ends, and says what it waited for."""
    code, _, err = ended(start("receiver.py", tmp_path, "--last", 0, "--patience", 0.1))
    assert code == 1
    assert "000000.patch did not appear within 0.1 s" in err


def test_a_dying_receiver_ends_the_demo(tmp_path: Path) -> None:
    """The receiver is killed: the demo says so and ends with exit code 1."""
    process = start("demo.py", *ENDLESS, "--folder", tmp_path)
    pid = after_version(process, 1)
    os.kill(pid, signal.SIGKILL)
    code, _, err = ended(process)
    assert code == 1
    assert f"failed: the receiver (process {pid}) was killed by signal 9" in err


@pytest.mark.long
def test_an_interrupt_ends_both_processes(tmp_path: Path) -> None:
    """Ctrl-C: a clear message instead of a traceback, exit code 1, and no receiver stays behind."""
    ours = signal.signal(signal.SIGINT, signal.default_int_handler)  # where it is ignored, children inherit that
    try:
        process = start("demo.py", *ENDLESS, "--folder", tmp_path)
    finally:
        signal.signal(signal.SIGINT, ours)
    pid = after_version(process, 1)
    process.send_signal(signal.SIGINT)
    code, _, err = ended(process)
    assert (code, err) == (1, "interrupted: the receiver is stopped\n")
    assert gone(pid)


@pytest.mark.parametrize("wrong", [("--syncs", "0"), ("--lr", "nan")])
def test_senseless_options_are_refused(wrong: tuple[str, str]) -> None:
    """Options that make no sense end in a usage message before anything is written."""
    code, _, err = ended(start("demo.py", *wrong))
    assert code == 2
    assert f"argument {wrong[0]}" in err
