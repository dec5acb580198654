"""Commands that look after a store: `log`, `fsck`, `gc`, `keygen`, `squash`."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import sparserl
from sparserl.session.store import signing, transfer
from sparserl.session.store.fields import sha256
from sparserl.session.store.records import HEAD, HeadRecord, Index, path
from sparserl.session.store.retention import read_head, read_index, read_run
from sparserl.transport.stores.folder import FolderStore
from sparserl.weights.dtypes import Bits
from tests.checkpoints import tree
from tests.cli.session_commands import URL, W, failed, invoke, said, same, usage, values

COMMANDS = ("publish", "follow", "log", "fsck", "gc", "keygen")


def objects(kind: str) -> list[Path]:
    """Objects of the store, by kind."""
    (run,) = [p.parent for p in Path("store/runs").glob("*/run.json")]
    return sorted(p for p in (run / kind).rglob("*") if p.is_file())


def add_squashed() -> None:
    """A patch from version 0 to version 2, as a tool would add it."""
    store = FolderStore("store")
    head, tag = read_head(store)
    patch = sparserl.diff(W[0], W[2])
    step = transfer.send(store, head.run, patch).step(0, 2, time.time())
    index = Index(head.run, (*read_index(store, head).steps, step))
    store.put(path(head.run, "index", sha256(index.to_bytes())), index.to_bytes())
    moved = HeadRecord(**(vars(head) | {"index": sha256(index.to_bytes()), "nonce": "0" * 16}))
    store.swap(HEAD, signing.seal(moved.body(), Path("key").read_text()), tag)
    store.close()


def test_log(here: Path) -> None:
    """All steps with their kind and what they cost, newest last, and totals; the same as JSON."""
    add_squashed()
    log = values("log", URL, "--trusted-key", "key.pub")
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
    assert "signed by another key" in failed("log", URL, "--trusted-key", said("keygen", "other").strip())
    (here / "store" / HEAD).write_text("{}")
    assert "head.json" in failed("log", URL)


def test_fsck_of_a_store_that_is_well(here: Path) -> None:
    """Counts what it read; what nothing refers to is no fault, and leases are not counted."""
    found = values("fsck", URL, "--trusted-key", "key.pub")
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
    *faults, total = said("fsck", URL, "--trusted-key", "key.pub", code=1).splitlines()
    assert len(faults) == 1
    assert total.endswith(": 1 fault(s)")
    named = {"run": "run.json", "head": "head.json"}.get(kind, broken.name)
    assert named in faults[0]
    found = values("fsck", URL, "--trusted-key", "key.pub", code=1)
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
    moved = HeadRecord(**(vars(head) | {"index": sha256(index.to_bytes())}))
    store.swap(HEAD, signing.seal(moved.body(), None), tag)
    store.close()
    faults = values("fsck", URL, code=1)["faults"]
    assert faults == [f"version {v} cannot be reached with what the store has" for v in (1, 2)]
    assert "is not signed" in values("fsck", URL, "--trusted-key", "key.pub", code=1)["faults"][0]


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
    assert "is not signed" in failed("gc", URL, "--trusted-key", "key.pub")


def test_gc_deletes_nothing_of_a_store_it_cannot_read(here: Path) -> None:
    """With a manifest gone nobody knows what its buckets were."""
    said("publish", "0", URL, "--state", "state", "--signing-key", "key")
    objects("manifests")[0].unlink()
    before = tree(here / "store")
    failed("gc", URL, "--grace", "0")
    assert tree(here / "store") == before


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


def test_help_teaches() -> None:
    """Every command has a help text with an example that calls it."""
    top = said("--help")
    for command in COMMANDS:
        assert command in top
        text = said(command, "--help")
        assert f"sparserl {command} " in text.split("Example", 1)[1]
        assert "<bool>" not in text
    assert "With --new-run a new run begins, and subscribers fetch all weights again" in " ".join(
        said("publish", "--help").split()
    )


def test_squash_in_a_store(here: Path) -> None:
    """One more way between two versions, which `log` shows and receivers take; what cannot be done is said."""
    args = "squash", URL, "--signing-key", "key", "--from", 0, "--to"
    assert "patch 0 → 2" in said(*args, 2)
    assert "squashed" in said("log", URL)
    assert "already" in failed(*args, 2)
    assert "no way" in failed(*args, 9)
    assert "secret key is needed" in failed("squash", URL, "--from", 0, "--to", 1)
    assert invoke("squash", URL).exit_code == 2
    assert invoke("squash", "a.patch", "b.patch").exit_code == 2
    said("fsck", URL, "--trusted-key", "key.pub")
    said("follow", URL, "-o", "out", "--once", "--trusted-key", "key.pub")
    assert same(here / "out", W[2])


def test_publishing_to_a_run_without_a_head(here: Path) -> None:
    """It is refused and says what to do; a new run that is asked for deletes nothing of the old one."""
    (here / "store" / HEAD).unlink()
    before = tree(here / "store")
    told = failed("publish", "0", URL, "--keep-all", "--signing-key", "key")
    assert "has no head.json. To go on with run " in told
    assert "(on the command line, --new-run)" in told
    said("publish", "0", URL, "--new-run", "--grace", "0s", "--anchor-after", 0)
    assert before.keys() - {HEAD} <= tree(here / "store").keys()
