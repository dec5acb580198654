"""Checkpoints are patched on disk: out is the base with the patches in it, or nothing changes."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import sparserl
from sparserl import Patch, TensorTable
from sparserl.errors import ChainError, CheckpointError, ChecksumMismatch, TensorMismatch, WrongBase
from sparserl.sources import open_checkpoint
from sparserl.targets import apply_to_checkpoint
from tests.boxed_shards import diff_shards
from tests.checkpoints import (
    equal,
    safetensors_bytes,
    tree,
    write_file,
    write_folder,
)
from tests.targets.written_checkpoints import BOTH, P, W, Write, assert_refused, expected


@pytest.fixture
def base(tmp_path: Path, write: Write) -> Path:
    return write(tmp_path / "base", W[0])


@BOTH
def test_out_is_the_base_with_the_patch_in_it(base: Path, write: Write, tmp_path: Path) -> None:
    """Every file travels, the weights become the result bit for bit, metadata stays, and the base is untouched."""
    before = tree(base)
    landed = apply_to_checkpoint(base, [P[0]], tmp_path / "out")
    assert tree(tmp_path / "out") == expected(tmp_path, write, W[1])
    assert equal(open_checkpoint(tmp_path / "out"), W[1])
    assert tree(base) == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["base", "out"]
    assert (landed.path, landed.digest, landed.changed) == (tmp_path / "out", P[0].result, P[0].changed)
    assert (landed.applied, landed.already, landed.unreached) == (1, False, ())


@BOTH
def test_out_may_be_the_base(base: Path, write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In place, by any name for the place, the checkpoint becomes the result and nothing else is left."""
    monkeypatch.chdir(tmp_path)
    apply_to_checkpoint(base, [P[0]], "base")
    assert tree(base) == expected(tmp_path, write, W[1])
    apply_to_checkpoint("base", [P[1]], Path("../") / tmp_path.name / "base")
    assert tree(base) == expected(tmp_path, write, W[2])
    if base.is_dir():
        monkeypatch.chdir(base)
        apply_to_checkpoint(".", [P[2]], ".")
        assert tree(base) == expected(tmp_path, write, W[3])
    assert [p.name for p in tmp_path.iterdir()] == ["base"]


@BOTH
@pytest.mark.parametrize("start", range(4))
def test_a_chain_starts_where_the_base_is(start: int, write: Write, tmp_path: Path) -> None:
    """From any version of the chain the result is the last one; what the base has already is not applied again."""
    held = write(tmp_path / "held", W[start])
    landed = apply_to_checkpoint(held, P, tmp_path / "out")
    assert tree(tmp_path / "out") == expected(tmp_path, write, W[3])
    assert landed.applied == 3 - start
    assert landed.changed == sum(p.changed for p in P[start:])
    assert landed.already is (start == 3)


@BOTH
def test_a_retry_is_harmless(base: Path, write: Write, tmp_path: Path) -> None:
    """The same command again, in place, says `already` and does not even copy."""
    apply_to_checkpoint(base, P, base)
    inode = base.stat().st_ino
    assert apply_to_checkpoint(base, P, base).already
    assert base.stat().st_ino == inode
    assert tree(base) == expected(tmp_path, write, W[3])


@BOTH
def test_an_older_version_is_replaced(base: Path, write: Write, tmp_path: Path) -> None:
    """An output that is another version of the same weights, or an empty folder, gives way."""
    out = write(tmp_path / "out", W[3])
    apply_to_checkpoint(base, P[:1], out)
    assert tree(out) == expected(tmp_path, write, W[1])
    if base.is_dir():
        (tmp_path / "empty").mkdir()
        apply_to_checkpoint(base, P[:1], tmp_path / "empty")
        assert tree(tmp_path / "empty") == expected(tmp_path, write, W[1])


@BOTH
def test_the_base_is_read_once(base: Path, tmp_path: Path) -> None:
    """However many patches: one read to verify, one copy, one write, and progress that adds up to each."""
    stages: dict[str, list[int]] = {}

    def stage(name: str, total: int) -> Callable[[int], None]:
        stages[name] = [total, 0]

        def done(count: int) -> None:
            stages[name][1] += count

        return done

    apply_to_checkpoint(base, P, tmp_path / "out", stage)
    size = sum(len(b) for b in tree(base).values())
    weights = open_checkpoint(base).nbytes
    assert stages == {"verify": [weights, weights], "copy": [size, size], "write": [size, size]}


@BOTH
def test_a_wrong_base_is_refused(base: Path, write: Write, tmp_path: Path) -> None:
    """Weights that no patch of the chain knows stay as they are, and there is no output."""
    assert_refused(WrongBase, "Nothing was written", tmp_path, base, P[1:], tmp_path / "out")
    assert_refused(WrongBase, "Nothing was written", tmp_path, base, P[1:], base)
    other = write(tmp_path / "other", W[0] | {"router": W[0]["embed.weight"]})
    assert_refused(TensorMismatch, "'router' is float32", tmp_path, other, P, tmp_path / "out")


@BOTH
def test_a_broken_chain_is_refused(base: Path, tmp_path: Path) -> None:
    """Patches that do not follow one another are refused before the base is read."""
    assert_refused(ChainError, "patch 1 leads to", tmp_path, base, [P[0], P[2]], base)
    assert_refused(ChainError, "no patch", tmp_path, base, [], base)
    strange = sparserl.diff({"x": W[0]["router"]}, {"x": W[1]["router"]})
    assert_refused(TensorMismatch, "in patch 1 but not in patch 2", tmp_path, base, [P[0], strange], base)


@BOTH
def test_a_corrupted_patch_is_refused(base: Path, tmp_path: Path) -> None:
    """A flipped bit in the last patch of a chain is noticed before anything is written."""
    data = bytearray(P[1].to_bytes())
    data[len(data) // 2] ^= 1
    assert_refused(ChecksumMismatch, "checksum", tmp_path, base, [P[0], Patch.from_bytes(bytes(data))], base)


def test_patches_of_shards_land_too(tmp_path: Path) -> None:
    """A patch that speaks for some tensors changes those; two with different regions are no chain."""
    table: TensorTable = sparserl.tensor_table(W[0])

    def part(name: str) -> Patch:
        return diff_shards({name: W[0][name]}, {name: W[1][name]}, table=table)

    base = write_file(tmp_path / "base", W[0])
    landed = apply_to_checkpoint(base, [part("router")], tmp_path / "out")
    assert landed.applied == 1
    assert equal(open_checkpoint(tmp_path / "out"), W[0] | {"router": W[1]["router"]})
    empty = {"x": W[0]["empty"], "y": W[0]["empty"]}
    nothing = [diff_shards({n: b}, {n: b}, table=sparserl.tensor_table(empty)) for n, b in empty.items()]
    assert nothing[0].result == nothing[1].base
    assert_refused(ChainError, "cover different regions", tmp_path, base, nothing, tmp_path / "out")


def test_what_is_unrelated_is_not_replaced(tmp_path: Path) -> None:
    """An output that exists must be the base, a version of it, or an empty folder; all else is refused."""
    file = write_file(tmp_path / "base.safetensors", W[0])
    folder = write_folder(tmp_path / "base", W[0])
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "todo.txt").write_text("buy milk")
    (tmp_path / "text").write_text("not weights")
    write_file(tmp_path / "strange.safetensors", {"x": W[0]["router"]})
    shutil.copytree(folder, tmp_path / "richer")
    (tmp_path / "richer" / "optimizer.pt").write_text("state")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    for base, out, says in (
        (folder, "base.safetensors", "the base is a folder, but .* is a file"),
        (folder, "notes", "is not a version of the base"),
        (folder, "richer", "would lose 'optimizer.pt'"),
        (folder, "base/out", "is inside the other"),
        (folder / "assets" / "..", "base/assets", "is inside the other"),
        (file, "base", "the base is a file, but .* is a folder"),
        (file, "notes", "the base is a file, but .* is a folder"),
        (file, "text", "is not a version of the base"),
        (file, "strange.safetensors", "is not a version of the base.*'x' is in"),
        (file, "dangling", "is not a version of the base"),
        (file, "no/such/folder", "is not a folder, make it first"),
        (tmp_path / "nowhere", "out", "no such file or folder"),
        (tmp_path / "notes", "out", "is not a checkpoint"),
    ):
        assert_refused(CheckpointError, says, tmp_path, base, P, tmp_path / out)
    assert_refused(CheckpointError, "cannot be written", tmp_path, file, P, Path("/"))
    inner = write_folder(tmp_path / "outer" / "inner", W[0])
    assert_refused(CheckpointError, "is inside the other", tmp_path, inner, P, tmp_path / "outer")


def test_a_snapshot_of_links_becomes_real_files(tmp_path: Path) -> None:
    """Links are followed and left alone; in place, the links give way and the blobs stay what they are."""
    blobs = write_folder(tmp_path / "blobs", W[0])
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    for path in blobs.iterdir():
        (snapshot / path.name).symlink_to(path)
    before = tree(blobs)
    apply_to_checkpoint(snapshot, P[:1], tmp_path / "out")
    apply_to_checkpoint(snapshot, P[:1], snapshot)
    for out in (tmp_path / "out", snapshot):
        assert tree(out) == expected(tmp_path, write_folder, W[1])
        assert not any(p.is_symlink() for p in out.rglob("*"))
    assert tree(blobs) == before


@BOTH
def test_a_link_gives_way_to_what_it_pointed_to(base: Path, write: Write, tmp_path: Path) -> None:
    """Where the output is a link, the link is replaced and its target left alone."""
    before = tree(base)
    link = tmp_path / "link"
    link.symlink_to(base)
    apply_to_checkpoint(link, P[:1], link)
    assert not link.is_symlink()
    assert tree(link) == expected(tmp_path, write, W[1])
    assert tree(base) == before


def test_links_that_lead_nowhere_are_refused(tmp_path: Path) -> None:
    """A broken link, a loop of links or a pipe in the folder is an error, not a hole in the copy."""
    base = write_folder(tmp_path / "base", W[0])
    for make, says in (
        (lambda p: p.symlink_to("nowhere"), "broken link"),
        (lambda p: p.symlink_to(base), "a link to a folder that contains it"),
        (os.mkfifo, "not a regular file"),
    ):
        make(base / "odd")
        with pytest.raises(CheckpointError, match=says):
            apply_to_checkpoint(base, P, tmp_path / "out")
        (base / "odd").unlink()
    assert [p.name for p in tmp_path.iterdir()] == ["base"]


def test_modes_stay(tmp_path: Path) -> None:
    """Private files stay private, read-only ones read-only."""
    base = write_folder(tmp_path / "base", W[0])
    modes = {"config.json": 0o400, "assets": 0o750, "model-00001-of-00003.safetensors": 0o440, ".": 0o700}
    for name, mode in modes.items():
        (base / name).chmod(mode)
    apply_to_checkpoint(base, P, base)
    assert {name: (base / name).stat().st_mode & 0o7777 for name in modes} == modes
    assert tree(base) == expected(tmp_path, write_folder, W[3])


def test_other_weights_in_the_folder_are_reported(tmp_path: Path) -> None:
    """A second copy of the weights that the index does not name travels as it is, and the caller is told."""
    base = write_folder(tmp_path / "base", W[0])
    write_file(base / "consolidated.safetensors", W[0])
    landed = apply_to_checkpoint(base, P, tmp_path / "out")
    assert landed.unreached == ("consolidated.safetensors",)
    assert (tmp_path / "out" / "consolidated.safetensors").read_bytes() == safetensors_bytes(W[0])
