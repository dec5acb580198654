"""`publish` and `follow` from outside and from inside: what they say, how they fail and how they stop."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import sparserl
from sparserl.session.store.records import HEAD
from sparserl.sources import open_checkpoint
from sparserl.targets.checkpoint_folder import FolderTarget
from tests.checkpoints import tree, write_file, write_folder
from tests.cli.programs import ENV, program, started
from tests.cli.session_commands import FILES, URL, W, failed, invoke, said, same, usage, values


@pytest.mark.long
def test_a_round_trip_in_processes_of_their_own(here: Path) -> None:
    """keygen, publish, follow and fsck, each as a program: one line of result on stdout, and nothing on stderr."""
    url = "file://new"
    done = program("keygen", "mine")
    public = done.stdout.strip()
    assert (done.returncode, done.stderr) == (0, "")
    for args, says in (
        (("publish", "0", url, "--signing-key", "mine", "--state", "mystate"), "new run "),
        (("publish", "1", url, "--signing-key", "mine", "--state", "mystate"), "run "),
        (("follow", url, "-o", "out", "--once", "--trusted-key", public), "version 1: anchor, "),
        (("publish", "2.safetensors", url, "--signing-key", "mine", "--state", "mystate"), "run "),
        (("follow", url, "-o", "out", "--once", "--trusted-key", public), "version 2: patch in "),
        (("fsck", url, "--trusted-key", public), ""),
    ):
        done = program(*args)
        assert (done.returncode, done.stderr) == (0, ""), args
        assert done.stdout.startswith(says)
        assert done.stdout.count("\n") == 1
    assert same(here / "out", W[2])
    for name, data in FILES.items():
        assert (here / "out" / "current" / name).read_bytes() == data


def test_nothing_heavy_is_imported() -> None:
    """Neither loading the commands nor their help needs torch, obstore, cryptography or the session."""
    code = (
        "import sys\nfrom sparserl.cli.app import app\n"
        "import contextlib, io\n"
        "with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()): app(['follow', '--help'])\n"
        "assert not {'torch', 'obstore', 'cryptography', 'safetensors'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], env=ENV, check=True, capture_output=True)


def test_publish_says_what_it_did(here: Path) -> None:
    """For people and for scripts; the run is the same with --state, and the files are those of the folder."""
    first = values("publish", "0", "file://new", "--state", "mystate", "--profile", "gap", "--threads", 1)
    assert (first["version"], first["kind"], first["new_run"], first["notes"]) == (0, "anchor", True, [])
    assert first["digest"] == sparserl.digest(W[0]).hex
    second = values("publish", "1", "file://new", "--state", "mystate", "--profile", "gap", "--link", "1Gbit")
    assert (second["version"], second["kind"], second["new_run"]) == (1, "patch", False)
    assert second["run"] == first["run"]
    assert second["density"] == second["changed"] / second["elements"]
    again = said("publish", "1", "file://new", "--state", "mystate")
    assert again.startswith(f"run {first['run']}, version 2: patch, 0 changed")
    log = values("log", "file://new")
    assert log["files"] == {name: len(data) for name, data in FILES.items()}
    assert log["steps"][1]["profiles"] == ["gap"]
    assert not [p for p in (here / "new" / ".tmp").iterdir() if p.is_dir()]


def test_publish_leaves_no_run_by_accident(here: Path) -> None:
    """Where the store has a run that cannot go on, a new one must be meant; nothing was written before."""
    before = tree(here / "store" / "runs")
    old = values("log", URL)["run"]
    said("keygen", "another")
    for args in ((), ("--signing-key", "another")):
        line = failed("publish", "0", URL, *args)
        assert f"has run {old} at version 2, which cannot be continued" in line
        assert "--new-run" in line
    assert tree(here / "store" / "runs") == before
    key = ("--signing-key", "key")
    assert values("publish", "0", URL, *key, "--state", "other")["version"] == 3  # a folder that knows nothing
    new = values("publish", "0", URL, *key, "--state", "other", "--new-run")
    assert (new["version"], new["new_run"]) == (0, True)
    assert new["run"] != old
    for state in ("state", "other"):
        assert values("publish", "1", URL, *key, "--state", state)["run"] == new["run"]


def test_followers_go_over_to_a_new_run(here: Path) -> None:
    """Unless they follow one run and no other."""
    run = values("log", URL)["run"]
    said("follow", URL, "-o", "out", "--once")
    said("publish", "1", URL, "--new-run")
    line = failed("follow", URL, "-o", "out", "--once", "--run", run)
    assert f"this subscriber only follows run {run}" in line
    assert same(here / "out", W[2])
    said("follow", URL, "-o", "out", "--once")
    assert same(here / "out", W[1])


def test_what_cannot_be_published_is_one_line(here: Path) -> None:
    """The checkpoint, the key, the store: each is named, and nothing is made."""
    write_file(here / "other.safetensors", {"x": W[0]["router"]})
    (here / "nokey").write_text("sparserl-secret-12\n")
    (here / "binary").write_bytes(b"\xff\x00")
    (here / "long").write_text("x" * 5000)
    (here / "file").write_text("")
    secret = (here / "key").read_text().strip()
    for args, says in (
        (("nowhere", "file://new"), "nowhere: no such file or folder"),
        (("assets", "file://new"), "assets: no such file or folder"),
        (("0", "s3:new"), "'s3:new' is not the URL of a store"),
        (("0", "ftp://host/path"), "'ftp://host/path' is not the URL of a store"),
        (("0", "http://127.0.0.1:9/run"), "can only be read"),
        (("0", "file://file/below"), "file/below"),
        (("0", "0"), "would lie inside the checkpoint 0"),
        (("0", "file://0/store"), "would lie inside the checkpoint 0"),
        (("0", "file://new", "--signing-key", "nowhere"), "nowhere: No such file or directory"),
        (("0", "file://new", "--signing-key", "nokey"), "nokey: a secret key reads sparserl-secret-"),
        (("0", "file://new", "--signing-key", "key.pub"), "key.pub: a secret key reads"),
        (("0", "file://new", "--signing-key", "binary"), "binary does not hold one line of text"),
        (("0", "file://new", "--signing-key", "long"), "long does not hold one line of text"),
        (("0", "file://new", "--signing-key", secret), "can be seen by others; give the file"),
        (("other.safetensors", URL, "--state", "state", "--signing-key", "key"), "tensor(s) differ"),
    ):
        line = failed("publish", *args)
        assert says in line, args
        assert secret not in line
        assert not (here / "new" / HEAD).exists()
    assert values("log", URL)["version"] == 2
    usage("publish", "0")
    assert "not a profile" in usage("publish", "0", "file://new", "--profile", "zip")
    assert "'25G' is not a bandwidth" in usage("publish", "0", "file://new", "--link", "25G")
    assert "auto takes the smallest" in usage("publish", "0", "file://new", "--link", "measured")


def test_follow_once(here: Path) -> None:
    """From nothing by the anchor, from an earlier version by patches, and not at all where it is the newest."""
    first = values("follow", URL, "-o", "out", "--once", "--trusted-key", "key.pub")
    assert (first["version"], first["kind"], first["digest"]) == (2, "anchor", sparserl.digest(W[2]).hex)
    assert same(here / "out", W[2])
    assert (here / "out" / "held.json").read_text().endswith("}\n")
    result = invoke("follow", URL, "-o", "out", "--once", "--json")
    assert (result.exit_code, result.stdout) == (0, "")
    assert "already at version 2" in result.stderr
    said("publish", "0", URL, "--state", "state", "--signing-key", "key")
    for key in ("key.pub", "key", (here / "key.pub").read_text().strip()):
        said("follow", URL, "-o", "out", "--once", "--trusted-key", key, "--keep", 1)
    assert same(here / "out", W[0])
    assert len(list((here / "out" / "versions").iterdir())) == 1


def test_what_cannot_be_followed_is_one_line(here: Path) -> None:
    """Who signed, what is there, and where it goes; the folder stays as it is."""
    said("follow", URL, "-o", "out", "--once")
    before = tree(here / "out")
    other = said("keygen", "other").strip()
    said("publish", "0", "file://unsigned")
    (here / "text").write_text("hello\n")
    (here / "taken").mkdir()
    write_folder(here / "taken" / "current", W[0])
    for args, says in (
        ((URL, "--trusted-key", other), "signed by another key"),
        ((URL, "--trusted-key", "text"), "text holds no key"),
        ((URL, "--trusted-key", "nowhere"), "nowhere: No such file"),
        ((URL, "--trusted-key", "sparserl-public-12"), "a public key reads sparserl-public-"),
        (
            ("file://unsigned", "--trusted-key", other),
            "is not signed, and only what a trusted key has signed is accepted",
        ),
        (("file://nowhere",), "there is no head.json"),
        (("s3:store",), "'s3:store' is not the URL of a store"),
        ((URL, "--run", "0" * 16), "only follows run 0000000000000000"),
        ((URL, "-o", "taken"), "current is not a link; choose an empty folder"),
    ):
        assert says in failed("follow", "-o", "out", "--once", *args), args
        assert tree(here / "out") == before
    target = FolderTarget(here / "out")
    target.attach(open_checkpoint_table(here))
    assert "another process writes to" in failed("follow", URL, "-o", "out", "--once")
    target.close()
    usage("follow", URL)
    usage("follow", URL, "-o", "out", "--keep", 0)
    assert "'soon' is not a duration; write it as 20ms, 30s, 10m, 2h or 1d" in usage(
        "follow", URL, "-o", "out", "--timeout", "soon"
    )


def open_checkpoint_table(here: Path) -> Any:
    return sparserl.tensor_table(open_checkpoint(here / "0"))


def on_a_terminal(*args: str) -> str:
    """Run with stderr a terminal; what the terminal got."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "sparserl.cli", *args]
    with subprocess.Popen(command, env=ENV | {"TERM": "xterm"}, stdout=subprocess.DEVNULL, stderr=theirs) as running:
        os.close(theirs)
        seen = b""
        with contextlib.suppress(OSError):  # the other side is closed
            while part := os.read(ours, 4096):
                seen += part
    os.close(ours)
    assert running.returncode == 0
    return seen.decode()


@pytest.mark.long
def test_progress_is_for_terminals(here: Path) -> None:
    """There, long work has a bar on stderr."""
    assert "publish" in on_a_terminal("publish", "0", "file://new")
    assert "fetch" in on_a_terminal("follow", URL, "-o", "out", "--once")
    assert "read" in on_a_terminal("fsck", URL)


def test_a_timeout(here: Path) -> None:
    """Ends it well where there was a version, and badly where there was none; meanwhile it says what it waits for."""
    result = invoke("follow", URL, "-o", "out", "--timeout", "6s")
    assert (result.exit_code, result.stdout.count("\n")) == (0, 1)
    assert "stopped at version 2" in result.stderr
    for more in ((), ("--once",)):
        result = invoke("follow", "file://nowhere", "-o", "none", "--timeout", "1s", *more)
        assert (result.exit_code, result.stdout) == (1, "")
        waiting, error = result.stderr.splitlines()
        assert waiting.startswith("sparserl: warning: file://")
        assert ": waiting: " in waiting
        assert waiting.endswith("there is no head.json")
        assert error.startswith("sparserl: error: ")
    assert not (here / "none" / "current").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.long)])
def test_follow_until_told_to_stop(number: signal.Signals, here: Path) -> None:
    """It waits for a publisher, tells of each version in a line, and ends with 0 and a whole folder."""
    with started("follow", "file://new", "-o", "out", "--json") as running:
        assert "waiting: " in running.err.get(timeout=120)
        for version, name in enumerate(("0", "1", "2.safetensors")):
            said("publish", name, "file://new", "--state", "mystate")
            assert json.loads(running.out.get(timeout=120))["version"] == version
            assert same(here / "out", W[version])
        assert running.end(number) == 0
        assert ": waits no more, after " in running.err.get(timeout=120)
        assert running.err.get(timeout=120) == "sparserl: stopped at version 2\n"
        assert running.out.empty()
    assert same(here / "out", W[2])
    assert list((here / "out" / ".sparserl").iterdir()) == []
    assert [p.name[-2:] for p in sorted((here / "out" / "versions").iterdir())] == ["01", "02"]


def test_following_outlasts_a_damaged_head(here: Path) -> None:
    """What is wrong in the store for a while is said, and waited for."""
    with started("follow", URL, "-o", "out", "--json") as running:
        assert json.loads(running.out.get(timeout=120))["version"] == 2
        head = (here / "store" / HEAD).read_bytes()
        (here / "store" / HEAD).write_bytes(head[:100])
        assert "waiting: the head is damaged" in running.err.get(timeout=120)
        (here / "store" / HEAD).write_bytes(head)
        said("publish", "0", URL, "--state", "state", "--signing-key", "key")
        assert json.loads(running.out.get(timeout=120))["version"] == 3
        assert running.end(signal.SIGINT) == 0
    assert same(here / "out", W[0])


def test_a_run_is_rolled_back(here: Path) -> None:
    """An exported version that is published again is the newest: followers have its bits."""
    said("follow", URL, "-o", "out", "--once")
    said("export", f"{URL}@0", "-o", "rollback")
    said("publish", "rollback", URL, "--note", "rollback to 0", "--signing-key", "key")
    assert values("follow", URL, "-o", "out", "--once")["version"] == 3
    assert same(here / "out", W[0])


def test_stopping_before_the_first_version(here: Path) -> None:
    """Is no failure either."""
    with started("follow", "file://new", "-o", "out") as running:
        running.err.get(timeout=120)
        assert running.end(signal.SIGINT) == 0
        assert running.err.get(timeout=120) == "sparserl: stopped before the first version\n"


@pytest.mark.long
def test_a_kill_leaves_a_whole_checkpoint(here: Path) -> None:
    """Whenever it comes, `current` is one of the versions, and the next follower goes on from there."""
    versions = [f"{i}.safetensors" for i in range(3)]
    for name, weights in zip(versions, W, strict=True):
        write_file(here / name, weights)
    for attempt in range(3):
        with started("follow", URL, "-o", "out") as running:
            running.wait()
            stop = threading.Event()
            timer = threading.Timer(0.3 * attempt, lambda r=running, s=stop: (r.process.kill(), s.set()))
            timer.start()
            while not stop.is_set():
                said(
                    "publish",
                    versions[int(time.monotonic() * 1000) % 3],
                    URL,
                    "--state",
                    "state",
                    "--signing-key",
                    "key",
                )
            timer.join()
            assert running.process.wait(120) == -signal.SIGKILL, running.err.queue
        assert any(same(here / "out", weights) for weights in W)
    said("publish", "1.safetensors", URL, "--state", "state", "--signing-key", "key")
    said("follow", URL, "-o", "out", "--once")
    assert same(here / "out", W[1])
    assert list((here / "out" / ".sparserl").iterdir()) == []


def test_a_key_is_replaced(here: Path) -> None:
    """A run continues under a new key that trusts the old one; subscribers that trust both follow it."""
    new = said("keygen", "new").strip()
    said("follow", URL, "-o", "out", "--once", "--trusted-key", "key.pub", "--trusted-key", new)
    run = values("log", URL)["run"]
    again = ("publish", "0", URL, "--state", "state", "--signing-key", "new")
    assert "--new-run" in failed(*again)
    assert values(*again, "--trusted-key", "key.pub")["run"] == run
    assert "signed by another key" in failed("follow", URL, "-o", "out", "--once", "--trusted-key", "key.pub")
    said("follow", URL, "-o", "out", "--once", "--trusted-key", "key.pub", "--trusted-key", new)
    assert same(here / "out", W[0])
    said("fsck", URL, "--trusted-key", new)
