"""Lives of publishers and subscribers: processes that are killed, and what they noted down before.

A driver is a process that is warm (all kernels are compiled) and has no threads. It forks a child for every life, so
that a life costs milliseconds. A child notes in a journal what it is about to publish and what it has committed, by a
SHA-256 of the bits, which the code under test knows nothing of.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

import sparserl
import sparserl.transport.stores.folder
from sparserl.session.store.records import HEAD
from sparserl.session.store.retention import collect, faults, needed, read_head, runs_with_versions
from sparserl.sources import open_checkpoint
from sparserl.transport.stores.base import COMING, Store, exists
from sparserl.weights.dtypes import Bits
from sparserl.weights.memory import Weights
from sparserl.weights.tensors import memories
from tests.checkpoints import random_weights, stepped

EVENTS = {"open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.symlink", "os.chmod", "mmap.__new__"}
FILES = {"config.json": b'{"model_type": "tiny"}'}
NAMES = ("layers.0.down", "layers.0.scale", "empty", "step")  # few dtypes: few objects, and few moments to be killed at
_ROOT = Path(__file__).resolve().parents[2]
_BASE = {name: bits for name, bits in random_weights(1).items() if name in NAMES}


def weights_at(n: int) -> dict[str, Bits]:
    """What a trainer has after its n-th step: it may be far from what it had before a restart."""
    return stepped(_BASE, n)


def sha(weights: Weights) -> str:
    """The bits of weights, known by a hash that is not ours."""
    out = hashlib.sha256()
    for name, memory in sorted(memories(weights).items()):
        out.update(f"{name} {memory.dtype.name} {memory.shape}\n".encode())
        out.update(memory.view().tobytes())
    return out.hexdigest()


def warm(folder: Path) -> None:
    """Load every kernel, so that a child that is forked has them."""
    weights = weights_at(0)
    store = sparserl.transport.open_store(f"file://{folder}/store")
    options = {"state": folder / "state", "threads": 1, "ladder": (2, 4), "anchor_after": 0.0}
    publisher = sparserl.Publisher(store, weights, files=FILES, **options)
    mine = weights_at(1)
    memory = sparserl.Subscriber(store, mine, threads=1)
    with closing(sparserl.targets.folder(folder / "target", threads=1)) as target:
        disk = sparserl.Subscriber(store, target, threads=1)
        for n in range(6):
            publish(publisher, weights, n, Journal(folder / "journal"))
            if n != 3:
                memory.sync()
                disk.sync()
    publisher.close()
    sparserl.Publisher(store, weights, **options).close()


def driver(*arguments: object) -> Any:
    """Run a driver to its end; returns what it printed last."""
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=_ROOT,
        env=os.environ | {"PYTHONPATH": f"{_ROOT}{os.pathsep}{_ROOT / 'src'}"},
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
    )
    if "NoServer" in done.stderr:
        pytest.skip(done.stderr.strip().splitlines()[-1])
    assert done.returncode == 0, done.stderr[-5000:]
    return json.loads(done.stdout.splitlines()[-1])


# -- killing -----------------------------------------------------------------------------------------------------------


class Fuse:
    """Ends this process just before its n-th call that can touch a file or a store."""

    def __init__(self) -> None:
        self.left: int | None = None
        self.note: Callable[[str], None] = lambda _where: None
        sys.addaudithook(lambda event, args: self.burn(event, args) if event in EVENTS else None)
        os.fsync, os.write = self._counted(os.fsync), self._counted(os.write)  # type: ignore[assignment]

    def _counted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.burn(f"os.{function.__name__}", args)
            return function(*args, **kwargs)

        return call

    def burn(self, event: str, args: tuple[Any, ...]) -> None:
        if self.left is None:
            return
        self.left -= 1
        if self.left < 0:
            self.left = None
            self.note(where(event, args))
            os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(60)  # another thread may be the one that is asked; none goes on


def where(event: str, args: tuple[Any, ...]) -> str:
    """A call, and what it was about to touch, in a few words."""
    texts = [os.fsdecode(a) for a in args if isinstance(a, str | bytes) and len(a) < 4096]
    kinds = ("head.json", "leases", "manifests", "index", "buckets", "files", "run.json", "anchor-")
    kinds = (*kinds, "current", "versions", ".sparserl", ".tmp")
    said = next((kind for kind in kinds if any(kind in text for text in reversed(texts))), "")
    return f"{event} {said}".strip()


class Killing:
    """A store whose every request may be the last one: the process ends before it, or when it is done."""

    def __init__(self, store: Store, fuse: Fuse) -> None:
        self._store, self._fuse = store, fuse
        self.url, self.writable = store.url, store.writable

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._store, name)
        if name not in ("get", "read", "put", "swap", "list", "delete"):
            return function

        def call(*args: Any) -> Any:
            self._fuse.burn(f"before {name}", args)
            result = function(*args)
            self._fuse.burn(f"after {name}", args)
            return result

        return call


def fork(work: Callable[[], object]) -> int:
    """A child that does some work; it exits with 1 and says why if that fails."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        work()
        code = 0
    except BaseException:  # noqa: BLE001  # the child must not go on as its parent
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def ended(child: int) -> bool:
    """Wait for a child: True if it came to its end, False if it was killed."""
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL, status
        return False
    assert os.WEXITSTATUS(status) == 0, "a life ended with an error"
    return True


# -- journals ----------------------------------------------------------------------------------------------------------


class Journal:
    """Lines of JSON that several processes add to; a line is written whole or not at all."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.touch()

    def add(self, what: str, **fields: Any) -> None:
        with self.path.open("ab", buffering=0) as file:
            file.write(json.dumps({"what": what, **fields}).encode() + b"\n")

    def read(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.path.read_text().splitlines()]


def publish(publisher: sparserl.Publisher, weights: dict[str, Bits], n: int, journal: Journal) -> None:
    """Publish the weights of a step, noting it before and after."""
    for name, bits in weights_at(n).items():
        weights[name].array[...] = bits.array
    version = 0 if publisher.version is None else publisher.version + 1
    journal.add("attempt", run=publisher.run, version=version, sha=sha(weights), n=n)
    report = publisher.publish()
    assert report is not None
    assert report.version == version
    journal.add("published", run=report.run, version=report.version, sha=sha(weights), notes=report.notes)


def check(journal: Journal) -> dict[str, int]:
    """Every version that anyone ever reported has the bits that its publisher had. Returns how many there were."""
    lines = journal.read()
    known: dict[tuple[str, int], str] = {}
    attempts = {(line["run"], line["version"], line["sha"]) for line in lines if line["what"] == "attempt"}
    for line in lines:
        if line["what"] not in ("published", "committed"):
            continue
        at, bits = (line["run"], line["version"]), line["sha"]
        assert known.setdefault(at, bits) == bits, f"version {at} was seen with other bits"
        assert (*at, bits) in attempts or (at[1] == 0 and (None, 0, bits) in attempts), f"{at} was never attempted"
    count = [line["what"] for line in lines]
    runs = {run for run, _ in known}
    return {"published": count.count("published"), "committed": count.count("committed"), "runs": len(runs)}


# -- what must hold in the end -----------------------------------------------------------------------------------------


def settled(store: Store) -> None:
    """Nothing is wrong with the store, and once garbage is collected it holds what the head needs and nothing else."""
    assert list(faults(store)) == []
    collect(store, 0.0, lambda: time.time() + 10 * 86400)  # leases would stay for a day
    head, _ = read_head(store)
    left = {item.name for item in store.list("")} - {COMING}  # what was announced last
    assert left == needed(store, head), left ^ needed(store, head)


def has_lost_head(store: Store) -> bool:
    """Whether a first publish was killed between its index and its head, so that a new run must be asked for."""
    return not exists(store, HEAD) and bool(runs_with_versions(store))


def no_drafts(root: Path) -> None:
    """A folder store has no files but its objects."""
    store = sparserl.transport.stores.folder.FolderStore(root)  # type: ignore[attr-defined]
    store.put("probe", b"")  # sweeps
    store.delete(["probe"])
    store.close()
    assert [p.name for p in (root / ".tmp").iterdir()] == ["lock"]
    files = {p.relative_to(root).as_posix() for p in root.rglob("*") if p.is_file()} - {".tmp/lock"}
    assert files == {item.name for item in store.list("")}


def current(folder: Path) -> str | None:
    """The bits of the checkpoint that a folder target shows; None if it shows none. It must be whole."""
    link = folder / "current"
    if not os.path.lexists(link):
        return None
    assert link.is_symlink()
    assert json.loads((link / "config.json").read_bytes()) == json.loads(FILES["config.json"])
    return sha(open_checkpoint(link))


def tidy(folder: Path, keep: int = 2) -> None:
    """A folder target has its versions, the link to one of them, and nothing else."""
    assert {p.name for p in folder.iterdir()} - {"held.json"} == {".sparserl", "current", "versions"}
    assert list((folder / ".sparserl").iterdir()) == []
    assert len(list((folder / "versions").iterdir())) <= keep
    for version in (folder / "versions").iterdir():
        assert sorted(p.name for p in version.iterdir()) == ["config.json", "model.safetensors"]


def synced(store: Store | str, journal: Journal, weights: Mapping[str, Bits] | None = None) -> str:
    """A subscriber in memory goes to the newest version and notes what it then holds; returns that."""
    mine = dict(weights or weights_at(10**6))
    subscriber = sparserl.Subscriber(store, mine, name=False, threads=1)
    subscriber.sync()
    subscriber.audit()
    journal.add("committed", run=subscriber.run, version=subscriber.version, sha=sha(mine))
    return sha(mine)


@contextlib.contextmanager
def closing(target: sparserl.targets.FolderTarget) -> Iterator[sparserl.targets.FolderTarget]:  # type: ignore[name-defined]
    """A folder target that lets go of its folder in the end."""
    try:
        yield target
    finally:
        target.close()
