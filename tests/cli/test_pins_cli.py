"""Commands for versions that stay: `pin`, `unpin`, `pins`, `export --pin`, `follow --every` and `--pin`."""

from __future__ import annotations

import json
from pathlib import Path

import sparserl
from sparserl.session.store.pins import pin_path
from sparserl.sources import open_checkpoint
from sparserl.transport.stores.folder import FolderStore
from tests.checkpoints import equal
from tests.cli.session_commands import URL, W, failed, invoke, said, same, usage, values


def test_pins_of_a_run(here: Path) -> None:
    """A version is pinned, listed, shown by `log`, exported by its pin, moved and unpinned."""
    assert said("pins", URL) == "no pins\n"
    pin = values("pin", f"{URL}@1", "--name", "best", "--note", "reward 0.7", "--trusted-key", "key.pub")
    assert (pin["name"], pin["version"], pin["note"], pin["digest"]) == (
        "best",
        1,
        "reward 0.7",
        sparserl.digest(W[1]).hex,
    )
    assert values("pins", URL)["pins"] == [{name: pin[name] for name in pin if name != "url"}]
    assert said("pins", URL).startswith("pin best: version 1, ")
    assert values("log", URL)["pins"] == values("pins", URL)["pins"]
    assert said("log", URL).splitlines()[-1].endswith("ago: reward 0.7")
    assert "pin best is at version 1" in failed("pin", URL, "--name", "best")
    assert values("pin", URL, "--name", "best", "--move")["version"] == 2
    said("export", URL, "--pin", "best", "-o", "best", "--trusted-key", "key.pub")
    assert equal(open_checkpoint(Path("best")), W[2])
    assert said("unpin", URL, "--name", "best") == "pin best removed\n"
    assert "there is no pin best" in failed("unpin", URL, "--name", "best")
    said("pin", f"{URL}@1")
    said("unpin", f"{URL}@1")


def test_what_is_refused(here: Path) -> None:
    """Versions that are not there, names that mean nothing, and stores that can only be read."""
    assert "version 9 cannot be pinned; the store has versions 0 to 2" in failed("pin", f"{URL}@9")
    assert "cannot be the name of a pin" in failed("pin", URL, "--name", "a/b")
    assert "say which pin" in usage("unpin", URL)
    assert "not both" in usage("export", f"{URL}@1", "--pin", "best", "-o", "out")
    assert "--every and --pin are for following" in usage("follow", URL, "-o", "out", "--version", "1", "--every", "2")
    for command in ("pin", "pins"):
        assert "can only be read; pins are in the folder or object store" in failed(command, "http://127.0.0.1:9")


def test_a_damaged_pin(here: Path) -> None:
    """`fsck` and `gc` name it, `gc` goes on, `unpin` removes it."""
    store = FolderStore("store")
    store.put(pin_path("bad"), b"{}")
    store.close()
    assert "pin bad is damaged" in values("fsck", URL, code=1)["faults"][0]
    assert "pin bad is damaged" in invoke("gc", URL).stderr
    said("unpin", URL, "--name", "bad")
    said("fsck", URL)


def test_following_every_second_version(here: Path) -> None:
    """The newest multiple at first; a pin of the version that the folder has."""
    out = said("follow", URL, "-o", "model", "--once", "--every", "2", "--pin", "eval", "--json")
    assert [json.loads(line)["version"] for line in out.splitlines()] == [2]
    assert same(Path("model"), W[2])
    assert [(pin["name"], pin["version"]) for pin in values("pins", URL)["pins"]] == [("eval", 2)]
    said("follow", URL, "-o", "other", "--once", "--every", "5")
    assert same(Path("other"), W[0])
