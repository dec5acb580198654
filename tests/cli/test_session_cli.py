"""Sessions on the command line: what is followed is what was published, and what is wrong is said in one line."""

from __future__ import annotations

import contextlib
import functools
import http.server
import json
import os
import pty
import queue
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors
from typer.testing import CliRunner

import sparserl
from sparserl.cli import app
from sparserl.session.store import signing, transfer
from sparserl.session.store.records import HEAD, Head, Index, path, sha256
from sparserl.session.store.retention import read_head, read_index, read_run
from sparserl.sources import open_checkpoint
from sparserl.targets.checkpoint_folder import FolderTarget, write_checkpoint
from sparserl.transport.stores.folder import FolderStore
from sparserl.weights.dtypes import Bits
from tests.checkpoints import equal, random_weights, stepped, tree, write_file, write_folder
from tests.servers import BUCKET, NoServer, running

ROOT = Path(__file__).resolve().parents[2]
ENV = os.environ | {"PYTHONPATH": str(ROOT / "src")}
W = [random_weights()]
for seed in (1, 2):
    W.append(stepped(W[-1], seed))
FILES = {"config.json": b'{"model_type": "tiny"}', "assets/vocab.txt": b"a\nb\n"}
COMMANDS = ("publish", "follow", "log", "fsck", "gc", "keygen")


def invoke(*args: object, **env: str) -> Any:
    return CliRunner().invoke(app, [str(a) for a in args], env={"COLUMNS": "300", **env})


def said(*args: object, code: int = 0, **env: str) -> str:
    """Run in this process; what it printed, once the exit code is the expected one."""
    result = invoke(*args, **env)
    assert result.exit_code == code, result.output
    return str(result.stdout)


def values(*args: object, code: int = 0) -> dict[str, Any]:
    found = json.loads(said(*args, "--json", code=code))
    assert isinstance(found, dict)
    return found


def failed(*args: object, **env: str) -> str:
    """Run in this process, expecting failure; its one line on stderr."""
    result = invoke(*args, **env)
    assert result.exit_code == 1, result.output
    assert result.stdout == ""
    assert result.stderr.startswith("sparserl: error: ")
    assert result.stderr.count("\n") == 1
    return str(result.stderr)


def usage(*args: object) -> str:
    """Run in this process, expecting that it is refused as a command line."""
    result = invoke(*args)
    assert result.exit_code == 2, result.output
    return str(result.stderr)


def program(*args: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "sparserl.cli", *map(str, args)]
    return subprocess.run(command, env=ENV, capture_output=True, text=True, check=False, timeout=120)


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
        return self.process.wait(60)


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


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three checkpoints, a key, and a signed run with all three as versions."""
    root = tmp_path_factory.mktemp("made")
    write_folder(root / "0", W[0], shards=3)
    write_checkpoint(root / "1", W[1], FILES)
    write_file(root / "2.safetensors", W[2])
    (root / "key.pub").write_text(said("keygen", root / "key"))
    for name in ("0", "1", "2.safetensors"):
        said("publish", root / name, f"file://{root}/store", "--state", root / "state", "--key", root / "key")
    return root


@pytest.fixture
def here(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of it, which becomes the current folder; the store is at file://store."""
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


URL = "file://store"


def same(folder: Path, weights: dict[str, Bits]) -> bool:
    """Whether a followed folder holds the weights bit for bit, as we and as safetensors read it."""
    current = folder / "current"
    held = safetensors.deserialize((current / "model.safetensors").read_bytes())
    theirs = {name: bytes(found["data"]) for name, found in held}
    ours = {name: bits.array.tobytes() for name, bits in weights.items()}
    return equal(open_checkpoint(current), weights) and theirs == ours


def objects(kind: str) -> list[Path]:
    """Objects of the store, by kind."""
    (run,) = [p.parent for p in Path("store/runs").glob("*/run.json")]
    return sorted(p for p in (run / kind).rglob("*") if p.is_file())


# -- publish and follow ------------------------------------------------------------------------------------------------


def test_a_round_trip_in_processes_of_their_own(here: Path) -> None:
    """keygen, publish, follow and fsck, each as a program: one line of result on stdout, and nothing on stderr."""
    url = "file://new"
    done = program("keygen", "mine")
    public = done.stdout.strip()
    assert (done.returncode, done.stderr) == (0, "")
    for args, says in (
        (("publish", "0", url, "--key", "mine", "--state", "mystate"), "new run "),
        (("publish", "1", url, "--key", "mine", "--state", "mystate"), "run "),
        (("follow", url, "-o", "out", "--once", "--key", public), "version 1: anchor, "),
        (("publish", "2.safetensors", url, "--key", "mine", "--state", "mystate"), "run "),
        (("follow", url, "-o", "out", "--once", "--key", public), "version 2: patch, "),
        (("fsck", url, "--key", public), ""),
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
        "import sys\nfrom sparserl.cli import app\n"
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
    line = failed("publish", "0", URL)
    assert f"has run {old}, version 2, and without --state it cannot go on" in line
    assert "--new-run" in line
    assert "other is not the state of its publisher" in failed("publish", "0", URL, "--state", "other")
    assert f"state goes on with run {old}" in failed("publish", "0", URL, "--state", "state", "--new-run")
    assert tree(here / "store" / "runs") == before
    new = values("publish", "0", URL, "--state", "other", "--new-run")
    assert (new["version"], new["new_run"]) == (0, True)
    assert new["run"] != old
    assert "state is not the state of its publisher" in failed("publish", "1", URL, "--state", "state")
    assert values("publish", "1", URL, "--state", "other")["version"] == 1


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
        (("0", "new"), "'new' is not a URL"),
        (("0", "ftp://host/path"), "ftp://host/path: "),
        (("0", "http://127.0.0.1:9/run"), "can only be read"),
        (("0", "file://file/below"), "file/below"),
        (("0", "file://new", "--key", "nowhere"), "nowhere: No such file or directory"),
        (("0", "file://new", "--key", "nokey"), "nokey: a secret key reads sparserl-secret-"),
        (("0", "file://new", "--key", "key.pub"), "key.pub: a secret key reads"),
        (("0", "file://new", "--key", "binary"), "binary does not hold one line of text"),
        (("0", "file://new", "--key", "long"), "long does not hold one line of text"),
        (("0", "file://new", "--key", secret), "can be seen by others; give the file"),
        (("other.safetensors", URL, "--state", "state"), "tensor(s) differ"),
    ):
        line = failed("publish", *args)
        assert says in line, args
        assert secret not in line
        assert not (here / "new" / HEAD).exists()
    assert values("log", URL)["version"] == 2
    usage("publish", "0")
    assert "not a profile" in usage("publish", "0", "file://new", "--profile", "zip")
    assert "'25G' is not a bandwidth" in usage("publish", "0", "file://new", "--link", "25G")


def test_follow_once(here: Path) -> None:
    """From nothing by the anchor, from an earlier version by patches, and not at all where it is the newest."""
    first = values("follow", URL, "-o", "out", "--once", "--key", "key.pub")
    assert (first["version"], first["kind"], first["digest"]) == (2, "anchor", sparserl.digest(W[2]).hex)
    assert same(here / "out", W[2])
    result = invoke("follow", URL, "-o", "out", "--once", "--json")
    assert (result.exit_code, result.stdout) == (0, "")
    assert "version 2 is held already" in result.stderr
    said("publish", "0", URL, "--state", "state", "--key", "key")
    for key in ("key.pub", "key", (here / "key.pub").read_text().strip()):
        said("follow", URL, "-o", "out", "--once", "--key", key, "--keep", 1)
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
        ((URL, "--key", other), "signed by another key"),
        ((URL, "--key", "text"), "text holds no key"),
        ((URL, "--key", "nowhere"), "nowhere: No such file"),
        ((URL, "--key", "sparserl-public-12"), "a public key reads sparserl-public-"),
        (("file://unsigned", "--key", other), "is not signed, and a key is pinned"),
        (("file://nowhere",), "there is no head.json"),
        (("store",), "'store' is not a URL"),
        ((URL, "--run", "0" * 16), "only follows run 0000000000000000"),
        ((URL, "-o", "taken"), "current is not a link; choose a folder that nothing else is in"),
    ):
        assert says in failed("follow", "-o", "out", "--once", *args), args
        assert tree(here / "out") == before
    target = FolderTarget(here / "out")
    target.attach(open_checkpoint_table(here))
    assert "another process follows into" in failed("follow", URL, "-o", "out", "--once")
    target.close()
    usage("follow", URL)
    usage("follow", URL, "-o", "out", "--keep", 0)
    assert "'soon' is not a duration; write 30s, 10m, 2h or 1d" in usage(
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


def test_progress_is_for_terminals(here: Path) -> None:
    """There, long work has a bar on stderr."""
    assert "publish" in on_a_terminal("publish", "0", "file://new")
    assert "fetch" in on_a_terminal("follow", URL, "-o", "out", "--once")
    assert "read" in on_a_terminal("fsck", URL)


def test_a_timeout(here: Path) -> None:
    """Ends it well where there was a version, and badly where there was none; meanwhile it says what it waits for."""
    result = invoke("follow", URL, "-o", "out", "--timeout", "100ms")
    assert (result.exit_code, result.stdout.count("\n")) == (0, 1)
    assert "stopped at version 2" in result.stderr
    for more in ((), ("--once",)):
        result = invoke("follow", "file://nowhere", "-o", "none", "--timeout", "0.2", *more)
        assert (result.exit_code, result.stdout) == (1, "")
        waiting, error = result.stderr.splitlines()
        assert waiting.startswith("sparserl: waiting: ")
        assert waiting.endswith("there is no head.json")
        assert error.startswith("sparserl: error: ")
    assert not (here / "none" / "current").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_follow_until_told_to_stop(number: signal.Signals, here: Path) -> None:
    """It waits for a publisher, tells of each version in a line, and ends with 0 and a whole folder."""
    with started("follow", "file://new", "-o", "out", "--json") as running:
        assert "waiting: " in running.err.get(timeout=60)
        for version, name in enumerate(("0", "1", "2.safetensors")):
            said("publish", name, "file://new", "--state", "mystate")
            assert json.loads(running.out.get(timeout=60))["version"] == version
            assert same(here / "out", W[version])
        assert running.end(number) == 0
        assert running.err.get(timeout=10) == "sparserl: stopped at version 2\n"
        assert running.out.empty()
    assert same(here / "out", W[2])
    assert list((here / "out" / ".sparserl").iterdir()) == []
    assert [p.name[-2:] for p in sorted((here / "out" / "versions").iterdir())] == ["01", "02"]


def test_stopping_before_the_first_version(here: Path) -> None:
    """Is no failure either."""
    with started("follow", "file://new", "-o", "out") as running:
        running.err.get(timeout=60)
        assert running.end(signal.SIGINT) == 0
        assert running.err.get(timeout=10) == "sparserl: stopped before the first version\n"


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
                said("publish", versions[int(time.monotonic() * 1000) % 3], URL, "--state", "state")
            timer.join()
            assert running.process.wait(60) == -signal.SIGKILL, running.err.queue
        assert any(same(here / "out", weights) for weights in W)
    said("publish", "1.safetensors", URL, "--state", "state")
    said("follow", URL, "-o", "out", "--once")
    assert same(here / "out", W[1])
    assert list((here / "out" / ".sparserl").iterdir()) == []


# -- looking after a store ---------------------------------------------------------------------------------------------


def add_squashed() -> None:
    """A patch from version 0 to version 2, as a tool would add it."""
    store = FolderStore("store")
    head, tag = read_head(store)
    patch = sparserl.diff(W[0], W[2])
    step = transfer.send(store, head.run, patch).step(0, 2, time.time())
    index = Index(head.run, (*read_index(store, head).steps, step))
    store.put(path(head.run, "index", sha256(index.to_bytes())), index.to_bytes())
    moved = Head(**(vars(head) | {"index": sha256(index.to_bytes()), "nonce": "0" * 16}))
    store.swap(HEAD, signing.seal(moved.body(), Path("key").read_text()), tag)
    store.close()


def test_log(here: Path) -> None:
    """All steps with their kind and what they cost, newest last, and totals; the same as JSON."""
    add_squashed()
    log = values("log", URL, "--key", "key.pub")
    assert (log["version"], log["tensors"], log["digest"]) == (2, len(W[0]), sparserl.digest(W[2]).hex)
    steps = log["steps"]
    kinds = [(s["version"], s["base"], s["kind"]) for s in steps]
    assert kinds == [(0, None, "anchor"), (1, 0, "patch"), (2, 1, "patch"), (2, 0, "squashed")]
    assert (steps[0]["changed"], steps[0]["density"], steps[0]["bits_per_changed"]) == (None, None, None)
    changed = sparserl.diff(W[0], W[1]).changed
    assert (steps[1]["changed"], steps[1]["density"]) == (changed, changed / log["elements"])
    assert steps[1]["bits_per_changed"] == 8 * steps[1]["bytes"] / changed
    assert log["totals"]["patch"] == {"count": 2, "bytes": steps[1]["bytes"] + steps[2]["bytes"]}
    top, header, *rows, totals = said("log", URL).splitlines()
    assert top.startswith(f"run {log['run']}, begun ")
    assert header.split() == [
        "version",
        "from",
        "kind",
        "changed",
        "density",
        "bytes",
        "bits/change",
        "profiles",
        "age",
    ]
    assert [row.split()[2] for row in rows] == [kind for _, _, kind in kinds]
    assert f"{changed / log['elements']:.4%}" in rows[1]
    assert rows[0].split()[3:5] == ["-", "-"]
    assert totals.startswith("3 version(s), newest 2: anchor 1 of ")
    assert "squashed 1 of " in totals
    assert "there is no head.json" in failed("log", "file://nowhere")
    assert "signed by another key" in failed("log", URL, "--key", said("keygen", "other").strip())
    (here / "store" / HEAD).write_text("{}")
    assert "head.json" in failed("log", URL)


def test_fsck_of_a_store_that_is_well(here: Path) -> None:
    """Counts what it read; what nothing refers to is no fault, and leases are not counted."""
    found = values("fsck", URL, "--key", "key.pub")
    assert (found["faults"], found["unreferenced"]["objects"]) == ([], 2)
    assert found["objects"] == 3 + len(objects("files")) + len(objects("manifests")) + len(objects("buckets"))
    said("follow", URL, "-o", "out", "--once")
    assert len(objects("leases")) == 1
    stray = here / "store" / "runs" / "0123456789abcdef" / "run.json"
    stray.parent.mkdir()
    stray.write_bytes(b"x" * 100)
    after = values("fsck", URL)
    assert after["unreferenced"] == {"objects": 3, "bytes": found["unreferenced"]["bytes"] + 100}
    line = said("fsck", URL)
    assert line.count("\n") == 1
    assert "no fault(s); nothing refers to 3 object(s), " in line


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def grow(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"x")


def head_of(kind: str) -> Path:
    """One object of a kind that the head leads to."""
    if kind == "head":
        return Path("store", HEAD)
    store = FolderStore("store")
    head, _ = read_head(store)
    if kind == "run":
        return Path("store", "runs", head.run, "run.json")
    if kind == "index":
        return Path("store", path(head.run, "index", head.index))
    if kind == "file":
        return Path("store", path(head.run, "files", read_run(store, head).files["config.json"].hash))
    return objects({"manifest": "manifests", "bucket": "buckets"}[kind])[0]


@pytest.mark.parametrize("damage", [flip, cut, grow, Path.unlink])
@pytest.mark.parametrize("kind", ["head", "run", "index", "manifest", "bucket", "file"])
def test_fsck_finds_every_damage(kind: str, damage: Callable[[Path], None], here: Path) -> None:
    """Whatever object is altered, cut short, longer or gone: one line that names it, and exit code 1."""
    broken = head_of(kind)
    damage(broken)
    *faults, total = said("fsck", URL, "--key", "key.pub", code=1).splitlines()
    assert len(faults) == 1
    assert total.endswith(": 1 fault(s)")
    named = {"run": "run.json", "head": "head.json"}.get(kind, broken.name)
    assert named in faults[0]
    found = values("fsck", URL, "--key", "key.pub", code=1)
    assert (found["faults"], found["unreferenced"]) == (faults, None)


def test_fsck_finds_all_damages(here: Path) -> None:
    """One does not hide another."""
    flip(objects("buckets")[0])
    objects("buckets")[-1].unlink()
    flip(objects("files")[0])
    assert len(values("fsck", URL, code=1)["faults"]) == 3


def test_fsck_finds_versions_that_cannot_be_reached(here: Path) -> None:
    """An index that lost the anchor is whole by its hash, and no use."""
    store = FolderStore("store")
    head, tag = read_head(store)
    index = Index(head.run, read_index(store, head).steps[1:])
    store.put(path(head.run, "index", sha256(index.to_bytes())), index.to_bytes())
    moved = Head(**(vars(head) | {"index": sha256(index.to_bytes())}))
    store.swap(HEAD, signing.seal(moved.body(), None), tag)
    store.close()
    faults = values("fsck", URL, code=1)["faults"]
    assert faults == [f"version {v} cannot be reached with what the store has" for v in (1, 2)]
    assert "is not signed" in values("fsck", URL, "--key", "key.pub", code=1)["faults"][0]


def test_fsck_of_a_store_with_a_late_subscriber(here: Path) -> None:
    """Patches that are kept for a subscriber, behind the oldest anchor, are no fault."""
    weights = {name: Bits(bits.array.copy(), bits.dtype) for name, bits in W[0].items()}
    publisher = sparserl.Publisher("file://new", weights, anchor_after=0, keep_anchors=1, grace=0)
    publisher.publish()
    sparserl.Subscriber("file://new", {n: Bits(b.array.copy(), b.dtype) for n, b in W[1].items()}).sync()
    for other in W[1:]:
        for name, bits in weights.items():
            bits.array[...] = other[name].array
        publisher.publish()
    assert values("fsck", "file://new")["faults"] == []


def test_gc(here: Path) -> None:
    """Deletes what nothing refers to once it is old enough; a dry run only says so."""
    said("publish", "0", URL, "--new-run")
    before = tree(here / "store")
    assert values("gc", URL)["objects"] == 0
    stray = values("fsck", URL)["unreferenced"]
    time.sleep(0.05)
    *names, total = said("gc", URL, "--grace", "0s", "--dry-run").splitlines()
    assert total.endswith(" would be deleted")
    assert len(names) == stray["objects"]
    assert tree(here / "store") == before
    dry = values("gc", URL, "--grace", "0s", "--dry-run")
    assert (dry["dry_run"], dry["names"], dry["bytes"]) == (True, names, stray["bytes"])
    assert said("gc", URL, "--grace", "0").startswith(f"{len(names)} object(s), ")
    assert tree(here / "store") == {name: data for name, data in before.items() if name not in names}
    assert values("fsck", URL)["unreferenced"] == {"objects": 0, "bytes": 0}
    for text in ("1 week", "-1h", "h", ""):
        assert "is not a duration" in usage("gc", URL, "--grace", text)
    for text, old in (("10m", 500), ("2h", 7000), ("1.5d", 129_000)):
        stray_file = here / "store" / "runs" / "0123456789abcdef" / "run.json"
        stray_file.parent.mkdir(exist_ok=True)
        stray_file.touch()
        for age, gone in ((old, 0), (old + 800, 1)):
            os.utime(stray_file, (time.time() - age, time.time() - age))
            assert values("gc", URL, "--grace", text)["objects"] == gone
    assert "there is no head.json" in failed("gc", "file://nowhere")
    assert "is not signed" in failed("gc", URL, "--key", "key.pub")


def test_gc_deletes_nothing_of_a_store_it_cannot_read(here: Path) -> None:
    """With a manifest gone nobody knows what its buckets were."""
    said("publish", "0", URL, "--state", "state", "--key", "key")
    objects("manifests")[0].unlink()
    before = tree(here / "store")
    failed("gc", URL, "--grace", "0")
    assert tree(here / "store") == before


# -- keys --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mask", [0, 0o077, 0o777])
def test_keygen(mask: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The secret is for its owner alone, whatever the umask; only the public key is printed."""
    monkeypatch.chdir(tmp_path)
    before = os.umask(mask)
    try:
        public = said("keygen", "key")
    finally:
        os.umask(before)
    assert (tmp_path / "key").stat().st_mode & 0o7777 == 0o600
    secret = (tmp_path / "key").read_text()
    assert public.strip() == signing.public_key(secret)
    assert public.startswith("sparserl-public-")
    assert secret.strip() not in public
    assert "key: exists already; a key is never replaced" in failed("keygen", "key")
    assert (tmp_path / "key").read_text() == secret
    (tmp_path / "link").symlink_to("nowhere")
    assert "exists already" in failed("keygen", "link")
    assert "No such file or directory" in failed("keygen", "no/key")
    made = values("keygen", "second")
    assert made == {"path": "second", "public_key": signing.public_key((tmp_path / "second").read_text())}


# -- other stores ------------------------------------------------------------------------------------------------------


class Guarded(http.server.SimpleHTTPRequestHandler):
    """A folder over HTTP, for those who know the word, from a server that knows no tags."""

    asked = 0

    def do_GET(self) -> None:
        Guarded.asked += 1
        if self.headers["Authorization"] == "Bearer open sesame":
            super().do_GET()
        else:
            self.send_error(401)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def served(here: Path) -> Iterator[str]:
    """The URL of the store over HTTP; the token is in a file."""
    (here / "token").write_text("open sesame\n")
    handler = functools.partial(Guarded, directory=str(here / "store"))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_over_http(here: Path, served: str) -> None:
    """A store can be followed and looked at with the token, and neither published to nor collected."""
    said("follow", served, "-o", "out", "--once", "--token-file", "token", "--key", "key.pub")
    assert same(here / "out", W[2])
    assert values("log", served, "--token-file", "token")["version"] == 2
    found = values("fsck", served, "--token-file", "token")
    assert (found["faults"], found["unreferenced"]) == ([], None)
    assert served in failed("log", served)
    assert "nowhere: No such file" in failed("log", served, "--token-file", "nowhere")
    assert "can only be read" in failed("gc", served)
    assert "can only be read" in failed("publish", "0", served)


def test_a_server_without_tags_is_not_hammered(here: Path, served: str) -> None:
    """Waiting for the next version takes a few looks a second."""
    said("follow", served, "-o", "out", "--once", "--token-file", "token")
    before = Guarded.asked
    said("follow", served, "-o", "out", "--timeout", "1s", "--token-file", "token")
    assert Guarded.asked - before < 50


def test_options_that_do_not_fit_the_url(here: Path) -> None:
    """Are not passed over in silence."""
    assert "is for object storage, not for file://" in usage("log", URL, "--endpoint", "http://localhost:1")
    assert "is for object storage, not for http://" in usage("log", "http://localhost:1", "--region", "x")
    (here / "token").write_text("x")
    assert "is for http(s), not for file://" in usage("log", URL, "--token-file", "token")


def test_over_s3(here: Path) -> None:
    """Every command works on a bucket of an S3-compatible service, with credentials from the environment."""
    env = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test"}
    with contextlib.ExitStack() as stack:
        try:
            server = stack.enter_context(running("moto", here / "server"))
        except NoServer as error:
            pytest.skip(str(error))
        where = (f"s3://{BUCKET}/run", "--endpoint", server.endpoint, "--region", "us-east-1")
        said("publish", "0", *where, "--state", "mystate", **env)
        said("publish", "1", *where, "--state", "mystate", **env)
        said("follow", *where, "-o", "out", "--once", **env)
        assert same(here / "out", W[1])
        assert "newest 1: " in said("log", *where, **env)
        assert ": no fault(s); nothing refers to 1 object(s)" in said("fsck", *where, **env)
        assert said("gc", *where, "--grace", "0s", **env).startswith("1 object(s), ")
        assert "nothing refers to 0 object(s)" in said("fsck", *where, **env)
        assert "is not there" in failed("log", f"s3://{BUCKET}/other", *where[1:], **env)


def test_help_teaches() -> None:
    """Every command has a help text with an example that calls it."""
    top = said("--help")
    for command in COMMANDS:
        assert command in top
        assert f"sparserl {command} " in said(command, "--help").split("Example", 1)[1]
    assert "where the store has a run already, this must be meant (--new-run)" in " ".join(
        said("publish", "--help").split()
    )


def test_squash_in_a_store(here: Path) -> None:
    """One more way between two versions, which `log` shows and receivers take; what cannot be done is said."""
    args = "squash", URL, "--key", "key", "--from", 0, "--to"
    assert "patch 0 → 2" in said(*args, 2)
    assert "squashed" in said("log", URL)
    assert "already" in failed(*args, 2)
    assert "no way" in failed(*args, 9)
    assert "secret key is needed" in failed("squash", URL, "--from", 0, "--to", 1)
    assert invoke("squash", URL).exit_code == 2
    assert invoke("squash", "a.patch", "b.patch").exit_code == 2
    said("fsck", URL, "--key", "key.pub")
    said("follow", URL, "-o", "out", "--once", "--key", "key.pub")
    assert same(here / "out", W[2])
