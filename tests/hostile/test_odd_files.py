"""Files that are not what they should be, and files that others must not see: checkpoints, patches, spools."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import sparserl
from sparserl.errors import CheckpointError, WrongBase
from sparserl.files import Folder
from sparserl.sources import open_checkpoint
from sparserl.targets import apply_to_checkpoint
from sparserl.weights.dtypes import BY_NAME, Bits
from tests.checkpoints import safetensors_header, write_file, write_folder

HERE = Path(__file__).resolve().parents[2]
ENVIRONMENT = os.environ | {"PYTHONPATH": f"{HERE}{os.pathsep}{HERE / 'src'}"}

# -- checkpoints -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "shard", ["x" * 300, "a/" * 3000 + "b", "a\nb", "a\x1b[2Jb", "\x7f", "\ud800", ".", "m.safetensors/b", "a\\b"]
)
def test_an_index_that_names_no_file(shard: str, tmp_path: Path) -> None:
    """Whatever stands where the name of a shard should, it is a checkpoint that cannot be read."""
    write_file(tmp_path / "m.safetensors", {"w": Bits(np.zeros(4, np.uint32), BY_NAME["float32"])})
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": shard}}))
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(tmp_path)
    assert str(tmp_path) in str(caught.value)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("name", ["model.safetensors.index.json", "model-00001-of-00003.safetensors", "alone"])
def test_nobody_waits_for_a_pipe(name: str, tmp_path: Path) -> None:
    """A pipe in the place of a file of a checkpoint is refused at once."""
    folder = write_folder(tmp_path / "w", {n: Bits(np.zeros(4, np.uint32), BY_NAME["float32"]) for n in "abc"})
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    with pytest.raises(CheckpointError, match="not a regular file"):
        open_checkpoint(folder / name if name == "alone" else folder)


def test_what_was_verified_is_what_is_patched(tmp_path: Path) -> None:
    """A base that is written to through a mapping, which leaves its time as it is, gives no output of other bits."""
    old = {"w": np.arange(1000, dtype=np.float32)}
    new = {"w": old["w"].copy()}
    new["w"][5] = -1
    patch = sparserl.diff(old, new)
    raw = safetensors_header({"w": {"dtype": "F32", "shape": [1000], "data_offsets": [0, 4000]}})
    base = tmp_path / "base.safetensors"
    base.write_bytes(raw + old["w"].tobytes())
    mapped = np.memmap(base, np.uint8, "r+")
    mapped[-1] ^= 0  # from now on its page is dirty, and no write to it is noted down

    def stage(name: str, _total: int) -> Callable[[int], None]:
        if name == "copy":
            mapped[-1] ^= 1
        return lambda _done: None

    with pytest.raises(WrongBase):
        apply_to_checkpoint(base, [patch], tmp_path / "out.safetensors", stage)
    assert [path.name for path in tmp_path.iterdir()] == ["base.safetensors"]
    mapped[-1] ^= 1
    landed = apply_to_checkpoint(base, [patch], tmp_path / "out.safetensors")
    assert sparserl.digest(open_checkpoint(tmp_path / "out.safetensors")) == landed.digest == patch.result


def test_a_lock_that_is_a_link_makes_no_file_elsewhere(tmp_path: Path) -> None:
    """The lock beside an output is a file of its own, or an error."""
    weights = {"w": Bits(np.zeros(4, np.uint32), BY_NAME["float32"])}
    base = write_file(tmp_path / "base", weights)
    (tmp_path / ".out.sparserl-lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match="cannot be opened to be locked"):
        apply_to_checkpoint(base, [sparserl.diff(weights, weights)], tmp_path / "out")
    assert not (tmp_path / "elsewhere").exists()


# -- files -------------------------------------------------------------------------------------------------------------


def test_the_umask_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that is saved has the mode that any new file has, and the umask of the process is never another one."""
    (tmp_path / "any").touch()

    def umask(_: int) -> int:
        raise AssertionError("another thread may just be making a file")

    monkeypatch.setattr(os, "umask", umask)
    sparserl.diff({"w": np.zeros(9, np.float32)}, {"w": np.ones(9, np.float32)}).save(tmp_path / "patch")
    assert (tmp_path / "patch").stat().st_mode == (tmp_path / "any").stat().st_mode
    assert sorted(path.name for path in tmp_path.iterdir()) == ["any", "patch"]


SPOOLS = """
import sys
import numpy as np
from sparserl.patch import capture
from sparserl.session import anchors
from sparserl.session.options import EncodingOptions
from sparserl.session.store.ladder import Ladder

anchors.SPOOL_BYTES = 0
encoding = EncodingOptions("auto", None, None, None)
old = {"w": np.zeros(1 << 20, np.uint32)}
new = {"w": np.random.default_rng(0).integers(0, 1 << 32, 1 << 20, np.uint32)}
ladder = Ladder(2, 4)
for version in range(10**6):
    assert anchors.anchor_of(new, encoding).nbytes > 1 << 20
    ladder.add(version, capture(old, new))
    print(version, flush=True)
"""


def test_a_kill_leaves_no_spooled_patches(tmp_path: Path) -> None:
    """Patches that are written to the temporary folder have no name there, at no moment."""
    environment = ENVIRONMENT | {"TMPDIR": str(tmp_path)}
    with subprocess.Popen([sys.executable, "-c", SPOOLS], env=environment, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        for _ in range(3):
            assert child.stdout.readline()
        seen = []
        for _ in range(100):
            seen += tmp_path.iterdir()
            time.sleep(0.005)
        child.kill()
    assert seen == []
    assert [*tmp_path.iterdir()] == []


def test_names_in_a_folder(tmp_path: Path) -> None:
    """A name is one name: nothing that leads up, on, or nowhere."""
    with Folder.open(tmp_path) as folder:
        for name in ("", ".", "..", "a/b", "/", "a\0"):
            for work in (folder.file, folder.folder):
                with pytest.raises(OSError, match="not the name") as caught:
                    work(name)
                assert caught.value.errno == errno.EINVAL
