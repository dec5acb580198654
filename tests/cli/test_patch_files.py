"""Files beside the weights in patches between folders: they travel, are checked, and can be undone."""

import json

import numpy as np
import pytest
import safetensors.numpy

import sparserl
from sparserl import Patch
from sparserl.errors import ChecksumMismatch, FormatError, SparserlError
from sparserl.targets import apply_to_checkpoint
from tests.cli.session_commands import invoke

WEIGHTS = {"w": np.arange(1000, dtype=np.float32)}


def run(*args):
    """What a command prints, once it has worked."""
    result = invoke(*args)
    assert result.exit_code == 0, result.output
    return result


def checkpoint(folder, weights, **files):
    """A folder with weights and other files."""
    folder.mkdir()
    safetensors.numpy.save_file(weights, folder / "model.safetensors")
    for name, text in files.items():
        (folder / f"{name}.json").write_text(text)
    return folder


def read(folder):
    """The files of a folder beside its weights."""
    return {path.stem: path.read_text() for path in folder.rglob("*.json")}


@pytest.fixture
def folders(tmp_path):
    """Three versions of a checkpoint whose files are changed, added and removed."""
    tuned = {"w": WEIGHTS["w"] + (np.arange(1000) % 100 == 0)}
    return (
        checkpoint(tmp_path / "base", WEIGHTS, config="old", tokenizer="same", generation_config="gone"),
        checkpoint(tmp_path / "tuned", tuned, config="new", tokenizer="same", chat_template="added"),
        checkpoint(tmp_path / "last", tuned, config="newest", tokenizer="same", generation_config="again"),
    )


def test_files_that_differ_travel(folders, tmp_path):
    """`diff` and `apply` of folders: the result has the files of the new folder, whatever the base had."""
    base, tuned, _ = folders
    made = json.loads(run("diff", base, tuned, "-o", tmp_path / "p", "--json").stdout)
    assert made["files"] == {"chat_template.json": 5, "config.json": 3}
    assert made["removed_files"] == ["generation_config.json"]
    out = json.loads(run("apply", base, tmp_path / "p", "-o", tmp_path / "out", "--json").stdout)
    assert out["files"] == ["chat_template.json", "config.json", "generation_config.json"]
    assert read(tmp_path / "out") == read(tuned)
    shown = run("inspect", tmp_path / "p").stdout
    assert "chat_template.json" in shown
    again = json.loads(run("apply", tmp_path / "out", tmp_path / "p", "-o", tmp_path / "out", "--json").stdout)
    assert (again["already"], again["files"]) == (True, [])


def test_an_older_result_is_replaced(folders, tmp_path):
    """A file that a patch has added is no reason to refuse the folder that it was added to."""
    base, tuned, last = folders
    run("diff", base, tuned, "-o", tmp_path / "1")
    run("diff", tuned, last, "-o", tmp_path / "2")
    run("apply", base, tmp_path / "1", "-o", tmp_path / "out")
    run("apply", base, tmp_path / "1", tmp_path / "2", "-o", tmp_path / "out")
    assert read(tmp_path / "out") == read(last)


def test_files_alone_may_differ(folders, tmp_path):
    """Equal weights and other files: a patch of no changes, which is applied for its files."""
    _, tuned, last = folders
    run("diff", tuned, last, "-o", tmp_path / "p")
    assert Patch.open(tmp_path / "p").changed == 0
    out = json.loads(run("apply", tuned, tmp_path / "p", "-o", tuned, "--json").stdout)
    assert not out["already"]
    assert read(tuned) == read(last)


def test_chains_and_squashed_patches_have_the_last_files(folders, tmp_path):
    """Patches in turn and one that was squashed leave the same folder behind."""
    base, tuned, last = folders
    run("diff", base, tuned, "-o", tmp_path / "1", "--profile", "ulp")
    run("diff", tuned, last, "-o", tmp_path / "2", "--profile", "ulp")
    run("squash", tmp_path / "1", tmp_path / "2", "-o", tmp_path / "both")
    run("apply", base, tmp_path / "1", tmp_path / "2", "-o", tmp_path / "chain")
    run("apply", base, tmp_path / "both", "-o", tmp_path / "squashed")
    assert read(tmp_path / "chain") == read(tmp_path / "squashed") == read(last)


def test_an_inverse_undoes_files(folders, tmp_path):
    """With the folder that the patch applies to; without it, that is said."""
    base, tuned, _ = folders
    run("diff", base, tuned, "-o", tmp_path / "p", "--profile", "ulp")
    run("invert", tmp_path / "p", "--base", base, "-o", tmp_path / "undo")
    run("apply", tuned, tmp_path / "undo", "-o", tmp_path / "back")
    assert read(tmp_path / "back") == read(base)
    assert "files of the patch are not undone" in run("invert", tmp_path / "p", "-o", tmp_path / "undo2").stderr
    assert Patch.open(tmp_path / "undo2").files is None


def test_what_does_not_travel_is_named(folders, tmp_path):
    """Hidden files and optimizer states, on stderr."""
    base, tuned, _ = folders
    (tuned / "optimizer.pt").write_bytes(b"state")
    assert "not in the patch: optimizer.pt" in run("diff", base, tuned, "-o", tmp_path / "p").stderr


def test_training_state_stays_with_its_weights(tmp_path):
    """Of a Trainer's checkpoints, the result is the new one without its optimizer, not with that of the old."""
    folder = trained(tmp_path)
    before, after = folder / "checkpoint-1", folder / "checkpoint-2"
    state = {"optimizer.pt", "scheduler.pt", "rng_state.pth", "training_args.bin"}
    assert state < {path.name for path in before.iterdir()}
    run("diff", before, after, "-o", tmp_path / "p")
    said = run("apply", before, tmp_path / "p", "-o", tmp_path / "out")
    assert f"left out: {', '.join(sorted(state))}" in " ".join(said.stderr.split())
    assert contents(tmp_path / "out") == {n: data for n, data in contents(after).items() if n not in state}
    made = json.loads(run("apply", before, tmp_path / "p", "-o", tmp_path / "again", "--json").stdout)
    assert made["left_out"] == sorted(state)


def test_training_state_is_not_lost(folders, tmp_path):
    """In place, leaving it out would remove it: that is refused, as for any file that the result has not."""
    base, tuned, _ = folders
    run("diff", base, tuned, "-o", tmp_path / "p")
    (base / "optimizer.pt").write_bytes(b"state")
    before = contents(base)
    result = invoke("apply", base, tmp_path / "p", "-o", base)
    assert result.exit_code == 1
    assert "would lose 'optimizer.pt'" in " ".join(result.stderr.split())
    assert contents(base) == before


def trained(tmp_path):
    """A folder with the checkpoints of a real Trainer, one step apart."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    ids = torch.arange(8)
    arguments = transformers.TrainingArguments(
        str(tmp_path / "trained"), max_steps=2, save_steps=1, report_to=[], use_cpu=True, disable_tqdm=True
    )
    data = [{"input_ids": ids, "labels": ids}] * 16
    transformers.Trainer(transformers.LlamaForCausalLM(config), arguments, train_dataset=data).train()
    return tmp_path / "trained"


def contents(folder):
    """All files of a folder."""
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_patches_without_files_are_as_before(folders, tmp_path):
    """Of single files, and of folders with the same files, not a byte differs from a patch of the weights."""
    base, tuned, last = folders
    for old, new in ((base / "model.safetensors", tuned / "model.safetensors"), (tuned, tuned)):
        run("diff", old, new, "-o", tmp_path / "p", "--threads", "1")
        weights = [sparserl.sources.open_checkpoint(path) for path in (old, new)]
        assert (tmp_path / "p").read_bytes() == sparserl.diff(*weights, threads=1).to_bytes()
    assert last.is_dir()


def with_files():
    return sparserl.diff(WEIGHTS, WEIGHTS).with_files({"a.json": b"text " * 100, "b/c.txt": b"x"}, ["d"])


def test_every_damaged_byte_is_noticed():
    """Whatever byte of the section is wrong: reading its files fails, or they are what they were."""
    data = with_files().to_bytes()
    files = with_files().files
    unnoticed = 0
    for position in range(len(data) - files.nbytes, len(data)):
        damaged = bytearray(data)
        damaged[position] ^= 1
        try:
            patch = Patch.from_bytes(bytes(damaged))
            assert patch.files is not None
            assert (dict(patch.files), patch.files.removed) == (dict(files), files.removed)
        except FormatError:
            continue
        unnoticed += 1  # a bit of a zstd frame that decoding does not need
    assert unnoticed < 10


def test_every_cut_is_refused():
    """No beginning of a patch with files is a patch, but for the patch itself without them."""
    data = with_files().to_bytes()
    patch = sparserl.diff(WEIGHTS, WEIGHTS).to_bytes()
    for size in range(len(patch) + 1, len(data)):
        with pytest.raises(FormatError):
            Patch.from_bytes(data[:size])


@pytest.mark.parametrize("name", ["../x", "/x", "a/../b", "model.safetensors", "", "a//b", "x" * 256, "a\0b"])
def test_names_that_lead_elsewhere_are_refused(name):
    """When files are added, and when they are read."""
    patch = sparserl.diff(WEIGHTS, WEIGHTS)
    with pytest.raises(SparserlError):
        patch.with_files({name: b"x"})
    with pytest.raises(SparserlError):
        patch.with_files({}, [name])


def test_a_file_in_the_place_of_a_folder(folders, tmp_path):
    """A name below one that is a file is refused, and the checkpoint stays as it was."""
    base, _, _ = folders
    patch = sparserl.diff(WEIGHTS, WEIGHTS).with_files({"config.json/inner": b"x"})
    before = read(base)
    with pytest.raises((SparserlError, OSError)):
        apply_to_checkpoint(base, [patch], tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert read(base) == before


def test_contents_are_checked_by_their_hash(monkeypatch):
    """Bytes that decode but are others are refused."""
    import hashlib

    from sparserl.wire import file_section

    real = hashlib.sha256
    monkeypatch.setattr(file_section.hashlib, "sha256", lambda data: real(data + b"!"))
    data = with_files().to_bytes()
    monkeypatch.undo()
    with pytest.raises(ChecksumMismatch, match=r"b/c\.txt"):
        Patch.from_bytes(data).files["b/c.txt"]
