"""Commands that make, apply and show patches, from outside and from inside."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import sparserl
from sparserl import Patch
from sparserl.cli.app import app
from sparserl.sources import open_checkpoint
from sparserl.weights.dtypes import BY_NAME, Bits
from tests.checkpoints import equal, safetensors_header, tree, write_file
from tests.cli.patch_commands import W, run_command

ROOT = Path(__file__).resolve().parents[2]
ENV = os.environ | {"PYTHONPATH": str(ROOT / "src")}


def failed(*args: object) -> str:
    """Run in this process, expecting failure; its one line on stderr."""
    result = CliRunner().invoke(app, [str(a) for a in args])
    assert result.exit_code == 1, result.output
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1
    assert result.stderr.startswith("sparserl: error: ")
    return result.stderr


def program(*args: object, module: str = "sparserl.cli") -> subprocess.CompletedProcess[str]:
    """Run as a process of its own, with neither stdout nor stderr a terminal."""
    command = [sys.executable, "-m", module, *map(str, args)]
    return subprocess.run(command, env=ENV, capture_output=True, text=True, check=False, timeout=900)


@pytest.mark.long
def test_a_round_trip_in_processes_of_their_own(files: Path) -> None:
    """diff, verify, apply and digest, each as a program, agree on a sharded folder; nothing is on stderr."""
    for args, says in (
        (("diff", "0", "1.safetensors", "-o", "p.patch"), "p.patch: "),
        (("verify", "0", "p.patch"), "base\n"),
        (("apply", "0", "p.patch", "-o", "out"), "out: "),
        (("verify", "out", "p.patch"), "result\n"),
        (("digest", "out"), sparserl.digest(W[1]).hex + "\n"),
    ):
        done = program(*args)
        assert (done.returncode, done.stderr) == (0, ""), args
        assert done.stdout.startswith(says)
        assert done.stdout.count("\n") == 1
    assert equal(open_checkpoint("out"), W[1])
    assert (files / "out" / "assets" / "vocab.txt").read_text() == "a\nb\n"


def test_both_modules_are_the_program(files: Path) -> None:
    """`python -m sparserl` and `python -m sparserl.cli` are the same."""
    for module in ("sparserl", "sparserl.cli"):
        assert program("--version", module=module).stdout == f"sparserl {sparserl.__version__}\n"


def test_torch_is_not_imported(files: Path) -> None:
    """Neither loading the command line nor a diff needs torch."""
    code = (
        "import sys\nfrom sparserl.cli.app import app\n"
        "app(['diff', '0', '1', '-o', 'p.patch'], standalone_mode=False)\n"
        "assert not {'torch', 'safetensors'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], env=ENV, check=True, capture_output=True)


@pytest.mark.parametrize("profile", ["auto", "raw", "gap", "ulp", "ctx"])
def test_diff_writes_the_patch_of_the_library(profile: str, files: Path) -> None:
    """However the weights are sharded, the patch has the same bytes as one made in memory."""
    expected = sparserl.diff(W[0], W[1], profile=profile).to_bytes()
    for old in ("0", "0.safetensors"):
        said = run_command("diff", old, "1", "--output", "p.patch", "--profile", profile, "--threads", 2)
        assert (files / "p.patch").read_bytes() == expected
        assert f"p.patch: {Patch.from_bytes(expected).changed:,} of " in said


@pytest.mark.parametrize(("base", "suffix"), [("0", ""), ("0.safetensors", ".safetensors")])
def test_apply(base: str, suffix: str, files: Path) -> None:
    """One patch or a chain, into a new place or in place; a base that is ahead gets the rest, or nothing."""
    said = run_command("apply", base, "01.patch", "12.patch", "-o", "out")
    assert "by 2 of 2 patch(es)" in said
    assert equal(open_checkpoint("out"), W[2])
    run_command("apply", base, "01.patch", "-o", base)
    assert equal(open_checkpoint(base), W[1])
    assert "by 1 of 2 patch(es)" in run_command("apply", base, "01.patch", "12.patch", "-o", base, "--threads", 1)
    assert equal(open_checkpoint(base), W[2])
    assert "already the result" in run_command("apply", base, "01.patch", "12.patch", "-o", f"copy{suffix}")
    assert equal(open_checkpoint(f"copy{suffix}"), W[2])
    assert not [p for p in files.iterdir() if p.name.startswith(".")]


def test_apply_tells_of_weights_it_does_not_reach(files: Path) -> None:
    """A second set of weights in the folder is named in a note on stderr; the result stays on stdout."""
    write_file(files / "0" / "consolidated.safetensors", W[0])
    result = CliRunner().invoke(app, ["apply", "0", "01.patch", "-o", "out"])
    assert result.exit_code == 0
    assert "note: consolidated.safetensors is not part of the checkpoint" in result.stderr
    assert result.stdout.startswith("out: ")


def test_verify_has_three_answers(files: Path) -> None:
    """`base` and `result` leave with 0, `neither` with 1, also where not even the tensors are the same."""
    assert run_command("verify", "0", "01.patch") == "base\n"
    assert run_command("verify", "1.safetensors", "01.patch") == "result\n"
    assert run_command("verify", "2.safetensors", "01.patch", code=1) == "neither\n"
    write_file(files / "other.safetensors", {"x": W[0]["router"]})
    result = CliRunner().invoke(app, ["verify", "other.safetensors", "01.patch"])
    assert (result.exit_code, result.stdout) == (1, "neither\n")
    assert "'x' is in other.safetensors but not in the patch" in result.stderr
    assert json.loads(run_command("verify", "2.safetensors", "01.patch", "--json", code=1))["answer"] == "neither"
    run_command("diff", "0", "0.safetensors", "-o", "nothing.patch")
    assert run_command("verify", "0", "nothing.patch") == "result\n"


def test_squash_and_invert(files: Path) -> None:
    """A squashed patch does what its parts do, and its inverse undoes it; the base is asked for where it is needed."""
    run_command("squash", "01.patch", "12.patch", "--base", "0", "-o", "02.patch", "--profile", "gap")
    run_command("apply", "0", "02.patch", "-o", "2")
    assert equal(open_checkpoint("2"), W[2])
    assert failed("invert", "02.patch", "-o", "20.patch").endswith("hand over the base weights (--base)\n")
    assert not (files / "20.patch").exists()
    run_command("invert", "02.patch", "--base", "0.safetensors", "-o", "20.patch")
    run_command("apply", "2", "20.patch", "-o", "2")
    assert equal(open_checkpoint("2"), W[0])
    for i in (0, 1):
        run_command("diff", f"{i}.safetensors", f"{i + 1}.safetensors", "-o", f"{i}{i + 1}.ulp", "--profile", "ulp")
    run_command("squash", "01.ulp", "12.ulp", "-o", "02.ulp")
    run_command("invert", "02.ulp", "-o", "20.ulp")
    assert Patch.open("20.ulp").result == sparserl.digest(W[0])
    assert "patch 1 leads to" in failed("squash", "12.patch", "01.patch", "-o", "x.patch")
    assert "the patch starts from" in failed("squash", "01.patch", "--base", "1", "-o", "x.patch")


def test_outputs_that_are_no_files(files: Path) -> None:
    """A pipe, a device or a missing folder is refused at once, and nothing is made of it."""
    os.mkfifo("pipe")
    assert "not a regular file" in failed("diff", "0", "1", "-o", "pipe")
    assert (files / "pipe").is_fifo()
    assert "no such folder" in failed("diff", "0", "1", "-o", "nowhere/x.patch")
    assert not (files / "nowhere").exists()
    assert "not a regular file" in failed("inspect", "pipe")


def test_inspect_for_people(files: Path) -> None:
    """Digests, sizes, buckets with profile and reason; with --tensors one row for each, names unbroken."""
    stats = Patch.open("01.patch").stats()
    plain = run_command("inspect", "01.patch")
    assert stats.base_digest in plain
    assert stats.result_digest in plain
    assert all(b.reason in plain for b in stats.buckets)
    assert "embed.weight" not in plain
    rows = run_command("inspect", "01.patch", "--tensors").splitlines()
    assert all(any(row.split()[:1] == [name] for row in rows) for name in W[0])


def test_names_are_not_markup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Brackets in names come out as they are, in tables and in errors."""
    monkeypatch.chdir(tmp_path)
    name = "[red]layers[0][/]"
    write_file(tmp_path / "[bold].safetensors", {name: W[0]["router"]})
    run_command("diff", "[bold].safetensors", "[bold].safetensors", "-o", "[i].patch")
    assert name in run_command("inspect", "[i].patch", "--tensors")
    write_file(tmp_path / "other.safetensors", {"x": W[0]["router"]})
    assert name in failed("diff", "[bold].safetensors", "other.safetensors", "-o", "x.patch")


def test_json(files: Path) -> None:
    """Every command speaks JSON, with the figures of the library and digests in hexadecimal."""

    def said(*args: object) -> dict[str, object]:
        found = json.loads(run_command(*args, "--json"))
        assert isinstance(found, dict)
        return found

    stats = Patch.open("01.patch").stats()
    inspected = said("inspect", "01.patch")
    assert inspected == json.loads(json.dumps(stats.as_dict() | {"files": {}, "removed_files": []}))
    keys = "elements changed density bytes bits_per_changed profile base_digest result_digest tensors"
    assert set(keys.split()) <= inspected.keys()
    assert said("diff", "0", "1", "-o", "p.patch")["changed"] == stats.changed
    assert said("digest", "0") == {
        "digest": stats.base_digest,
        "tensors": len(W[0]),
        "elements": stats.elements,
        "bytes": stats.dense_bytes,
    }
    assert said("verify", "1", "01.patch") == {
        "answer": "result",
        "digest": stats.result_digest,
        "base_digest": stats.base_digest,
        "result_digest": stats.result_digest,
    }
    assert said("apply", "0", "01.patch", "-o", "out") == {
        "path": "out",
        "digest": stats.result_digest,
        "changed": stats.changed,
        "applied": 1,
        "already": False,
        "unreached": [],
        "files": [],
        "left_out": [],
    }
    assert said("squash", "01.patch", "12.patch", "--base", "0", "-o", "02.patch")["path"] == "02.patch"
    assert said("invert", "01.patch", "--base", "0", "-o", "10.patch")["result_digest"] == stats.base_digest


def test_tensors_that_do_not_match_are_named(files: Path) -> None:
    """New, missing, retyped and reshaped tensors are each named with what is wrong."""
    router = W[0]["router"]
    changed: Mapping[str, Bits] = {
        "new": router,
        "router": Bits(router.array, BY_NAME["int32"]),
        "layers.0.scale": Bits(W[0]["layers.0.scale"].array.reshape(7, 10), BY_NAME["float32"]),
    }
    weights = {name: bits for name, bits in W[0].items() if name != "step"} | changed
    write_file(files / "other.safetensors", weights)
    for args in (("diff", "0", "other.safetensors", "-o", "p"), ("apply", "other.safetensors", "01.patch", "-o", "p")):
        line = failed(*args)
        assert "4 tensor(s) differ" in line
        assert "'new' is in" in line
        assert "'step' is in" in line
        assert "'router' is float32[4, 64] in" in line
        assert "'layers.0.scale' is float32[70] in" in line
        assert not (files / "p").exists()


def test_what_cannot_be_read_or_written_is_one_line(files: Path) -> None:
    """Each failure names the file and leaves nothing behind."""
    data = bytearray((files / "01.patch").read_bytes())
    (files / "short.patch").write_bytes(data[:-5])
    data[len(data) // 2] ^= 1
    (files / "flipped.patch").write_bytes(data)
    (files / "bad.safetensors").write_bytes(safetensors_header({"x": {"dtype": "F32"}}))
    (files / "config.json").write_text("{}")
    before = tree(files)
    for args, says in (
        (("diff", "nowhere", "1", "-o", "p"), "nowhere: no such file or folder"),
        (("diff", "0", "bad.safetensors", "-o", "p"), "bad.safetensors: tensor 'x': needs dtype, shape"),
        (("diff", "0/assets", "1", "-o", "p"), "0/assets is not a checkpoint"),
        (("diff", "01.patch", "1", "-o", "p"), "01.patch is a sparserl patch, not weights"),
        (("diff", "0", "1", "-o", "0"), "0: is a folder; a patch is a file"),
        (("diff", "0", "1", "-o", "config.json"), "config.json: exists and is not a patch"),
        (("diff", "0", "1", "-o", "1.safetensors"), "1.safetensors: exists and is not a patch"),
        (("diff", "0", "1", "-o", "config.json/p"), "config.json: is not a folder"),
        (("apply", "0", "nowhere.patch", "-o", "out"), "nowhere.patch: No such file or directory"),
        (("apply", "0", "1.safetensors", "-o", "out"), "1.safetensors: patch header: not a sparserl patch"),
        (("apply", "0", "short.patch", "-o", "out"), "short.patch: patch: the end mark is missing"),
        (("apply", "0", "flipped.patch", "-o", "0"), "flipped.patch: "),
        (("apply", "0", "01.patch", "flipped.patch", "-o", "out"), "flipped.patch: "),
        (("apply", "0", "12.patch", "-o", "out"), "Nothing was written"),
        (("apply", "0", "12.patch", "-o", "0"), "Nothing was written"),
        (("apply", "0", "12.patch", "01.patch", "-o", "out"), "patch 1 leads to"),
        (("apply", "0", "01.patch", "-o", "config.json"), "but "),
        (("inspect", "0.safetensors"), "0.safetensors: patch header: not a sparserl patch"),
        (("inspect", "flipped.patch"), "flipped.patch: "),
        (("verify", "bad.safetensors", "01.patch"), "bad.safetensors"),
        (("digest", "config.json"), "config.json is not a safetensors file"),
        (("invert", "01.patch", "--base", "1", "-o", "p"), "starts from"),
    ):
        assert says in failed(*args), args
        assert tree(files) == before, args


def test_a_setting_that_makes_no_sense_is_one_line(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment may say how many threads to use, but it must be a number."""
    monkeypatch.setenv("SPARSERL_THREADS", "many")
    assert "SPARSERL_THREADS is 'many'" in failed("digest", "0")


def test_a_patch_may_be_replaced_by_a_patch(files: Path) -> None:
    """An output that is a patch already, its own input even, or an empty file, is replaced."""
    run_command("squash", "01.patch", "12.patch", "--base", "0", "-o", "01.patch")
    assert Patch.open("01.patch").result == sparserl.digest(W[2])
    (files / "empty").touch()
    run_command("diff", "0", "1", "-o", "empty")
    assert Patch.open("empty").changed


def test_usage_errors_leave_with_two(files: Path) -> None:
    """A command line that makes no sense is not run; a profile that does not exist says which do."""

    def usage(*args: object) -> str:
        result = CliRunner().invoke(app, [str(a) for a in args], env={"COLUMNS": "300"})
        assert result.exit_code == 2, result.output
        assert result.stdout == ""
        return result.stderr

    assert "this release has auto, raw, gap, ulp, ctx" in usage("diff", "0", "1", "-o", "p", "--profile", "zip")
    usage("diff", "0", "1")
    usage("diff", "0", "-o", "p")
    usage("apply", "0", "-o", "out")
    usage("verify", "0")
    usage("digest", "0", "--threads", 0)
    usage("nonsense")
    assert not (files / "p").exists()


def test_help_teaches() -> None:
    """Every command has a help text with an example that calls it."""
    commands = ["diff", "apply", "inspect", "verify", "squash", "invert", "digest", "plan"]
    said = run_command("--help")
    for command in commands:
        assert command in said
        assert f"sparserl {command} " in run_command(command, "--help").split("Example", 1)[1]
    assert run_command("--version") == f"sparserl {sparserl.__version__}\n"


def _on_a_terminal(*args: str) -> tuple[str, str]:
    """Run with stderr a terminal; stdout and what the terminal got."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "sparserl.cli", *args]
    with subprocess.Popen(command, env=ENV | {"TERM": "xterm"}, stdout=subprocess.PIPE, stderr=theirs) as running:
        os.close(theirs)
        seen = b""
        while True:
            try:
                part = os.read(ours, 4096)
            except OSError:  # the other side is closed
                break
            if not part:
                break
            seen += part
        assert running.stdout is not None
        said = running.stdout.read().decode()
    os.close(ours)
    assert running.returncode == 0
    return said, seen.decode()


@pytest.mark.long
def test_progress_is_for_terminals(files: Path) -> None:
    """On a terminal each stage has a bar with bytes and speed on stderr, and stdout is the same as ever."""
    said, seen = _on_a_terminal("apply", "0", "01.patch", "-o", "out")
    assert said.startswith("out: ")
    for stage in ("verify", "copy", "write"):
        assert stage in seen
    assert "B/s" in seen or "kB" in seen or "bytes" in seen


def test_a_reader_that_leaves_is_no_error(files: Path) -> None:
    """A closed pipe behind us ends the program without a word."""
    command = [sys.executable, "-m", "sparserl.cli", "inspect", "01.patch", "--json"]
    with subprocess.Popen(command, env=ENV, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as running:
        assert running.stdout is not None
        assert running.stderr is not None
        running.stdout.close()
        assert running.stderr.read() == b""


def _sparse(path: Path, size: int, changes: int) -> None:
    """A bf16 checkpoint of about `size` bytes that is all holes, but for some elements."""
    rows = size // 40 // 2 // 1000
    each = rows * 2000
    entries = {
        f"layers.{i}": {"dtype": "BF16", "shape": [rows, 1000], "data_offsets": [i * each, (i + 1) * each]}
        for i in range(40)
    }
    head = safetensors_header(entries)
    with path.open("wb") as file:
        file.write(head)
        file.truncate(len(head) + 40 * each)
        for position in np.random.default_rng(0).integers(0, 20 * each, changes).tolist():
            file.seek(len(head) + 2 * position)
            file.write(b"\x01\x3f")


@pytest.mark.long
def test_memory_does_not_grow_with_the_weights(tmp_path: Path) -> None:
    """Comparing two checkpoints of 5 GB takes less than 1 GB of memory of our own."""
    _sparse(tmp_path / "a.safetensors", 5_000_000_000, 0)
    _sparse(tmp_path / "b.safetensors", 5_000_000_000, 20_000)
    args = [str(tmp_path / name) for name in ("a.safetensors", "b.safetensors", "p.patch")]
    command = [sys.executable, "-m", "sparserl.cli", "diff", args[0], args[1], "-o", args[2]]
    peak = 0
    with subprocess.Popen(command, env=ENV, stdout=subprocess.DEVNULL) as running:
        while running.poll() is None:
            for line in Path(f"/proc/{running.pid}/status").read_text().splitlines():
                if line.startswith("RssAnon:"):
                    peak = max(peak, int(line.split()[1]) * 1024)
            time.sleep(0.01)
    assert running.returncode == 0
    assert 19_000 < Patch.open(args[2]).changed <= 20_000
    assert 10_000_000 < peak < 1_000_000_000
