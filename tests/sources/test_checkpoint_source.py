"""Checkpoints are read exactly, and every way in which they can be wrong is an error that names it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import sparserl
from sparserl.errors import CheckpointError, UnsupportedTensor
from sparserl.sources import Checkpoint, open_checkpoint
from sparserl.sources import safetensors as header_of
from sparserl.weights.dtypes import BY_SAFETENSORS, Bits
from tests.checkpoints import (
    equal,
    random_weights,
    safetensors_bytes,
    safetensors_header,
    stepped,
    write_file,
    write_folder,
)

X = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


def test_a_file_is_read_exactly(tmp_path: Path) -> None:
    """Every tensor has the name, dtype, shape and bits that stand in the file, and metadata is no tensor."""
    weights = random_weights()
    path = write_file(tmp_path / "w.safetensors", weights)
    checkpoint = open_checkpoint(path)
    assert isinstance(checkpoint, Checkpoint)
    assert equal(checkpoint, weights)
    assert (checkpoint.path, checkpoint.files) == (path, (path,))
    assert checkpoint.nbytes == sum(b.array.nbytes for b in weights.values())
    assert repr(checkpoint) == f"<Checkpoint {path}: {len(weights)} tensors in 1 file(s)>"


@pytest.mark.parametrize("name", sorted(BY_SAFETENSORS))
def test_every_dtype_of_the_format_is_known(name: str, tmp_path: Path) -> None:
    """Each dtype we can hold is read with its own width and format."""
    dtype = BY_SAFETENSORS[name]
    bits = Bits(np.arange(6, dtype=dtype.uint).reshape(2, 3), dtype)
    assert equal(open_checkpoint(write_file(tmp_path / "w.safetensors", {"w": bits})), {"w": bits})


def test_files_of_the_safetensors_package_are_read(tmp_path: Path) -> None:
    """What the safetensors package writes from torch tensors comes back with torch's names, shapes and bits."""
    torch = pytest.importorskip("torch")
    package = pytest.importorskip("safetensors.torch")
    generator = torch.Generator().manual_seed(0)
    bytes_ = torch.randint(0, 256, (4, 6), dtype=torch.uint8, generator=generator)
    tensors = {
        "bf16": torch.randn(5, 7, generator=generator).to(torch.bfloat16),
        "e4m3": bytes_.clone().view(torch.float8_e4m3fn),
        "scalar": torch.tensor(3.0),
        "none": torch.empty(0, 3),
    }
    if hasattr(torch, "float4_e2m1fn_x2"):
        tensors["pairs"] = bytes_.clone().view(torch.float4_e2m1fn_x2)
    path = tmp_path / "w.safetensors"
    package.save_file(tensors, path, metadata={"format": "pt"})
    checkpoint = open_checkpoint(path)
    assert sparserl.tensor_table(checkpoint) == sparserl.tensor_table(tensors)
    assert sparserl.digest(checkpoint) == sparserl.digest(tensors)


@pytest.mark.parametrize("pad", range(8))
def test_alignment_does_not_matter(pad: int, tmp_path: Path) -> None:
    """Tensors at odd addresses have the same digest, the same patch, and take a patch like any others."""
    old, new = random_weights(), stepped(random_weights(), 1)
    a = write_file(tmp_path / "a.safetensors", old, pad)
    b = write_file(tmp_path / "b.safetensors", new, pad + 1)
    patch = sparserl.diff(open_checkpoint(a), open_checkpoint(b))
    assert patch.to_bytes() == sparserl.diff(old, new).to_bytes()
    assert sparserl.digest(open_checkpoint(a)) == sparserl.digest(old)
    inverse = patch.invert(open_checkpoint(a))
    patch.apply(open_checkpoint(a, writable=True))
    assert equal(open_checkpoint(a), new)
    inverse.apply(open_checkpoint(a, writable=True))
    assert equal(open_checkpoint(a), old)


def test_weights_are_read_only_unless_asked_for(tmp_path: Path) -> None:
    """Nothing that a reader does can reach the file."""
    old, new = random_weights(), stepped(random_weights(), 1)
    path = write_file(tmp_path / "w.safetensors", old)
    checkpoint = open_checkpoint(path)
    with pytest.raises(UnsupportedTensor, match="read-only"):
        sparserl.diff(old, new).apply(checkpoint)
    with pytest.raises(ValueError, match="read-only"):
        checkpoint["router"].array[0, 0] = 1
    assert path.read_bytes() == safetensors_bytes(old)


@pytest.mark.parametrize("stem", ["model", "consolidated", "diffusion_pytorch_model"])
def test_a_folder_is_read_through_its_index(stem: str, tmp_path: Path) -> None:
    """Whatever the index is called and however many shards there are, the weights are the same."""
    weights = random_weights()
    for shards in (1, 2, 4):
        folder = write_folder(tmp_path / str(shards), weights, shards, stem)
        checkpoint = open_checkpoint(str(folder))
        assert equal(checkpoint, weights)
        assert len(checkpoint.files) == shards
        assert sparserl.digest(checkpoint) == sparserl.digest(weights)


@pytest.mark.parametrize("name", ["model.safetensors", "weights.safetensors"])
def test_a_folder_with_one_file_needs_no_index(name: str, tmp_path: Path) -> None:
    """A lone safetensors file is the checkpoint, beside any other files."""
    path = write_file(tmp_path / name, random_weights())
    (tmp_path / "config.json").write_text("{}")
    assert open_checkpoint(tmp_path).files == (path,)


def test_the_usual_names_win(tmp_path: Path) -> None:
    """Where a folder has a second set of weights beside, `model` is the one that loaders take."""
    write_file(tmp_path / "consolidated.safetensors", random_weights(1))
    path = write_file(tmp_path / "model.safetensors", random_weights())
    assert open_checkpoint(tmp_path).files == (path,)
    folder = write_folder(tmp_path / "sharded", random_weights())
    (folder / "consolidated.safetensors.index.json").write_text("{}")
    assert equal(open_checkpoint(folder), random_weights())


def test_links_are_followed(tmp_path: Path) -> None:
    """A snapshot folder whose files are links to blobs reads like one of real files."""
    real = write_folder(tmp_path / "blobs", random_weights())
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    for path in real.iterdir():
        (snapshot / path.name).symlink_to(path)
    assert equal(open_checkpoint(snapshot), random_weights())


def test_an_empty_checkpoint_is_one(tmp_path: Path) -> None:
    """A file without tensors is valid and has the digest of no weights."""
    (tmp_path / "w.safetensors").write_bytes(safetensors_header({}))
    checkpoint = open_checkpoint(tmp_path)
    assert len(checkpoint) == 0
    assert sparserl.digest(checkpoint) == sparserl.digest({})


def _file(entries: object, data: bytes = bytes(8)) -> bytes:
    return safetensors_header(entries) + data


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (b"", "0 bytes are too few"),
        (b"1234567", "7 bytes are too few"),
        (b"SRLPATCH and more", "is a sparserl patch, not weights"),
        ((1 << 63).to_bytes(8, "little") + b"{}", "header of 9223372036854775808 bytes"),
        ((3).to_bytes(8, "little") + b"{}", "header of 3 bytes"),
        (b"\x02" + bytes(7) + b"{]", "not valid JSON"),
        (b"\x02" + bytes(7) + b"\xff\xfe", "not valid JSON"),
        (b"\x02" + bytes(7) + b"[]", "a JSON list, not an object"),
        ((100_000).to_bytes(8, "little") + b"[" * 100_000, "not valid JSON"),
        ((16).to_bytes(8, "little") + b'{"a": 1, "a": 2}', "'a' occurs twice"),
        (_file({"x": X | {"shape": [10**30]}}), "a number of 31 digits"),
        (_file({"x": X | {"shape": [float("nan")]}}), "not valid JSON"),
        (_file({"__metadata__": {"a": 1}, "x": X}), "__metadata__ is not a map from text to text"),
        (_file({"__metadata__": [], "x": X}), "__metadata__ is not a map from text to text"),
        (_file({"x": 3}), "'x': needs dtype, shape and data_offsets"),
        (_file({"x": {"dtype": "F32", "shape": [2]}}), "'x': needs dtype, shape and data_offsets"),
        (_file({"x": X | {"dtype": "F6_E2M3"}}), "'x': dtype 'F6_E2M3' is not supported"),
        (_file({"x": X | {"dtype": 5}}), "'x': dtype 5 is not supported"),
        (_file({"x": X | {"dtype": "F4", "shape": [3]}}), "'x': F4 of shape [3] does not fill whole bytes"),
        (_file({"x": X | {"dtype": "F4", "shape": []}}), "'x': F4 of shape [] does not fill whole bytes"),
        (_file({"x": X | {"shape": [-2]}}), "'x': shape is not a list of whole numbers"),
        (_file({"x": X | {"shape": [2.0]}}), "'x': shape is not a list of whole numbers"),
        (_file({"x": X | {"shape": [True, 2]}}), "'x': shape is not a list of whole numbers"),
        (_file({"x": X | {"shape": 2}}), "'x': shape is not a list of whole numbers"),
        (_file({"x": X | {"shape": [1] * 33}}), "'x': 33 dimensions"),
        (
            _file({"x": X | {"shape": [1 << 40, 1 << 40]}}),
            "'x': shape [1099511627776, 1099511627776] is past the limit",
        ),
        (_file({"x": X | {"shape": [0, 1 << 60]}}), "'x': shape [0, 1152921504606846976] is past the limit"),
        (_file({"x": X | {"shape": [0, *[1 << 48] * 3], "data_offsets": [0, 0]}}), "'x': shape"),
        (_file({"x": X | {"data_offsets": [0, 9]}}), "'x': data_offsets [0, 9] do not lie in the 8 bytes"),
        (_file({"x": X | {"data_offsets": [8, 0]}}), "'x': data_offsets [8, 0]"),
        (_file({"x": X | {"data_offsets": [0, 4, 8]}}), "'x': data_offsets [0, 4, 8]"),
        (_file({"x": X | {"data_offsets": "08"}}), "'x': data_offsets is not a list of whole numbers"),
        (_file({"x": X}, bytes(7)), "'x': data_offsets [0, 8] do not lie in the 7 bytes"),
        (_file({"x": X | {"shape": [3]}}), "'x': 8 bytes of data, but float32[3] takes 12 bytes"),
        (_file({"x": X | {"data_offsets": [0, 4]}}), "'x': 4 bytes of data, but float32[2] takes 8 bytes"),
        (_file({"x": X, "y": X | {"data_offsets": [4, 12]}}, bytes(12)), "tensors 'x' and 'y' overlap"),
        (_file({"x": X, "y": X}), "tensors 'x' and 'y' overlap"),
        (_file({"\ud800": X}), "the name is not valid Unicode"),
        (_file({"x" * 5000: X}), "the name is longer than 4096 bytes"),
    ],
)
def test_a_file_that_is_wrong_is_refused(raw: bytes, says: str, tmp_path: Path) -> None:
    """The error names the file, the tensor, and what is wrong; nothing else can come out."""
    path = tmp_path / "w.safetensors"
    path.write_bytes(raw)
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(path)
    assert says in str(caught.value)
    assert str(path) in str(caught.value)


def test_any_prefix_of_a_file_is_refused(tmp_path: Path) -> None:
    """A file that was cut short anywhere is an error, never fewer tensors."""
    whole = safetensors_bytes(random_weights())
    path = tmp_path / "w.safetensors"
    for end in [*range(0, 1000, 7), *range(1000, len(whole), 101), len(whole) - 1]:
        path.write_bytes(whole[:end])
        with pytest.raises(CheckpointError):
            open_checkpoint(path)


def test_holes_and_a_tail_are_allowed(tmp_path: Path) -> None:
    """Tensors need not touch one another, nor the end of the file."""
    path = tmp_path / "w.safetensors"
    entries = {"x": X | {"data_offsets": [3, 11]}, "e": {"dtype": "U8", "shape": [0], "data_offsets": [5, 5]}}
    path.write_bytes(_file(entries, b"abc" + b"\x01" * 8 + b"tail"))
    assert open_checkpoint(path)["x"].array.tolist() == [0x01010101] * 2


def _index(folder: Path, weight_map: object) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


@pytest.mark.parametrize(
    ("weight_map", "says"),
    [
        (None, "no weight_map"),
        ({}, "no weight_map"),
        ([], "no weight_map"),
        ({"x": 3}, "the shard of 'x' is not a file name"),
        ({"x": "a\0b"}, "the shard of 'x' is not a file name"),
        ({"x": "../a.safetensors"}, "the shard '../a.safetensors' of 'x' lies outside the folder"),
        ({"x": "/a.safetensors"}, "the shard '/a.safetensors' of 'x' lies outside the folder"),
        (
            {"x": "a.safetensors", "y": "c.safetensors"},
            "shard 'c.safetensors' is missing; model.safetensors.index.json",
        ),
        ({"x": "a.safetensors", "y": "a.safetensors"}, "tensor 'y' is not in a.safetensors, where the index puts it"),
        ({"x": "b.safetensors", "y": "a.safetensors"}, "tensor 'x' is not in b.safetensors"),
        ({"y": "b.safetensors", "z": "b.safetensors"}, "tensor 'z' is not in b.safetensors"),
        ({"x": "a.safetensors", "y": "b.safetensors", "z": "twin.safetensors"}, "tensor 'x' is in two shards"),
        ({"y": "pair.safetensors"}, "tensor 'z' is in pair.safetensors, but the index does not name it"),
    ],
)
def test_index_and_shards_must_agree(weight_map: object, says: str, tmp_path: Path) -> None:
    """A shard or tensor that is missing, unnamed, misplaced or doubled is named in the error."""
    for shard, names in {"a": "x", "b": "y", "twin": "xz", "pair": "yz"}.items():
        entries = {n: X | {"data_offsets": [8 * i, 8 * i + 8]} for i, n in enumerate(names)}
        (tmp_path / f"{shard}.safetensors").write_bytes(_file(entries, bytes(16)))
    _index(tmp_path, weight_map)
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(tmp_path)
    assert says in str(caught.value)
    assert str(tmp_path) in str(caught.value)


def test_what_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    """Missing paths, folders without weights, and folders that can be read in two ways."""

    def refused(path: Path, says: str) -> None:
        with pytest.raises(CheckpointError, match=says):
            open_checkpoint(path)

    refused(tmp_path / "nowhere", "no such file or folder")
    refused(tmp_path, r"is not a checkpoint: it has no \.safetensors file")
    refused(Path("/dev/null"), "neither a file nor a folder")
    write_file(tmp_path / "a.safetensors", random_weights())
    write_file(tmp_path / "b.safetensors", random_weights())
    refused(tmp_path, "several .safetensors files and no index")
    (tmp_path / "a.safetensors.index.json").write_text("{}")
    (tmp_path / "b.safetensors.index.json").write_text("{}")
    refused(tmp_path, "several indices and none is model.safetensors.index.json: a.safe")
    folder = write_folder(tmp_path / "both", random_weights())
    write_file(folder / "model.safetensors", random_weights(1))
    refused(folder, "has both model.safetensors and model.safetensors.index.json")


def test_an_index_has_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither header nor index is read past the limit."""
    folder = write_folder(tmp_path / "w", random_weights())
    monkeypatch.setattr("sparserl.sources.checkpoint.HEADER_BYTES", 10)
    with pytest.raises(CheckpointError, match="larger than 10 bytes"):
        open_checkpoint(folder)
    monkeypatch.setattr(header_of, "HEADER_BYTES", 10)
    with pytest.raises(CheckpointError, match="the limit is 10"):
        open_checkpoint(next(folder.glob("*.safetensors")))
