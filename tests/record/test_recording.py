"""Recordings: every figure is what NumPy finds without sparserl, and files that are no recordings are refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import sparserl
from sparserl.errors import SparserlError, TensorMismatch
from sparserl.patch.measuring import synthetic
from sparserl.record import Recorder, Recording
from sparserl.record.counts import class_shift
from sparserl.record.kinds import place
from sparserl.record.page import page
from sparserl.weights.dtypes import BY_NAME, Bits

BF16 = BY_NAME["bfloat16"]


def versions(count: int, elements: int = 40_000) -> list[np.ndarray[Any, Any]]:
    """Bits of bf16 weights, version after version."""
    out = [synthetic(elements, 0.02, 0)[0]]
    for seed in range(1, count):
        old, new = synthetic(elements, 0.02, seed)
        out.append(out[-1] ^ (old ^ new))
    return out


def weights(bits: np.ndarray[Any, Any]) -> dict[str, Bits]:
    """The same as two tensors and one of which nothing changes."""
    return {
        "b": Bits(bits[:-100].reshape(2, -1), BF16),
        "a": Bits(bits[-100:].copy(), BF16),
        "still": Bits(np.zeros(7, np.uint16), BF16),
    }


def signed(bits: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Where a bf16 number stands in the order of all of them."""
    size = (bits & 0x7FFF).astype(np.int64)
    return np.where(bits & 0x8000, -size - 1, size)


def test_every_figure(tmp_path: Path) -> None:
    """Changes by tensor, by class and by step, locality and bytes are what they are found to be otherwise."""
    recorder = Recorder(tmp_path / "run.jsonl", {"model": "line"})
    steps = versions(4)
    for version, (old, new) in enumerate(zip(steps, steps[1:], strict=False), 1):
        recorder.observe(weights(old), weights(new), version=version, precision="bf16", threads=2)
    found = Recording.read(recorder.path)
    assert found.meta == {"model": "line"}
    assert found.tensors["bf16"].names == ["a", "b", "still"]
    ever = np.zeros(steps[0].size, bool)
    for sync, old, new in zip(found.of("bf16"), steps, steps[1:], strict=False):
        moved = old != new
        assert sync.changed == [int(moved[-100:].sum()), int(moved[:-100].sum()), 0]
        assert (sync.elements, sync.inactive, sync.dense_bytes) == (40_007, 2 - bool(sync.changed[0]), 80_014)
        assert sync.again == int((moved & ever).sum())
        ever |= moved
        assert sync.ever == int(ever.sum())
        exponents = (old & 0x7FFF) >> 7
        classes = sync.classes["bfloat16"]
        for key, members, changed in zip(classes["keys"], classes["members"], classes["changed"], strict=True):
            assert members == int((exponents == key).sum()) + 7 * (key == 0)
            assert changed == int((moved & (exponents == key)).sum())
        assert sum(classes["members"]) == 40_007
        step = (signed(new) - signed(old))[moved]
        assert sync.steps == {
            **{name: int((step == int(name)).sum()) for name in ("-1", "+1", "-2", "+2")},
            "more": int((abs(step) > 2).sum()),
        }
        for profile, parts in sync.profiles.items():
            patch = sparserl.diff(weights(old), weights(new), profile=profile)
            assert sum(parts.values()) == patch.nbytes
            assert sync.bytes(profile) == patch.nbytes - patch.table_nbytes
        assert (sync.profiles["raw"]["index"], sync.profiles["raw"]["value"]) == (4 * sync.total, 2 * sync.total)


def test_what_profiles_spend_bits_on(tmp_path: Path) -> None:
    """`gap` and `ulp` have one index and different words; knowing magnitudes `ctx` saves on both."""
    old, new = ({"w": Bits(bits, BF16)} for bits in synthetic(200_000, 0.02, 0))
    parts = Recorder(tmp_path / "run.jsonl").observe(old, new, version=1)["profiles"]
    assert parts["gap"]["index"] == parts["ulp"]["index"] > parts["ctx"]["index"] > 4 * parts["ctx"]["header"]
    assert parts["gap"]["value"] > parts["ulp"]["value"] > parts["ctx"]["value"] > 2 * parts["ctx"]["header"]
    assert parts["ctx"]["index"] > 2 * parts["ctx"]["value"]


def test_what_is_dense_counts_as_dense(tmp_path: Path) -> None:
    """Where all bits change, nothing is left for an index."""
    rng = np.random.default_rng(0)
    old, new = ({"w": rng.standard_normal(9000)} for _ in range(2))
    line = Recorder(tmp_path / "run.jsonl").observe(old, new, version=1)
    assert line["precision"] == "float64"
    assert line["profiles"]["auto"]["index"] == 0
    assert line["profiles"]["auto"]["dense"] > 60_000


def test_parts_of_a_large_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor that is cut into pieces is counted as one that is not."""
    old, new = ({"w": bits} for bits in synthetic(50_000, 0.02, 3))
    whole = Recorder(tmp_path / "whole.jsonl").observe(old, new, version=1)
    monkeypatch.setattr("sparserl.weights.batches.PIECE_BYTES", 4096)
    recorder = Recorder(tmp_path / "cut.jsonl")
    cut = recorder.observe(old, new, version=1)
    assert {name: cut[name] for name in cut if name != "profiles"} == {n: whole[n] for n in whole if n != "profiles"}
    assert recorder.observe(old, new, version=2)["again"] == sum(cut["changed"])


def test_torch_and_precisions(tmp_path: Path) -> None:
    """Tensors are taken as they are; each precision has its own elements that have changed before."""
    torch = pytest.importorskip("torch")
    recorder = Recorder(tmp_path / "run.jsonl")
    for name in ("bfloat16", "float16"):
        old = {"w": torch.linspace(-1, 1, 999).to(getattr(torch, name))}
        new = {"w": old["w"] * 1.01}
        assert recorder.observe(old, new, version=1)["again"] == 0
        assert recorder.observe(new, old, version=2)["again"] == sum(recorder.observe(old, new, version=3)["changed"])
    assert list(Recording.read(recorder.path).tensors) == ["bfloat16", "float16"]


def test_notes_are_joined(tmp_path: Path) -> None:
    """Seconds of a stage are those of the slowest; numbers go by name; what was said with a sync counts, too."""
    recorder = Recorder(tmp_path / "run.jsonl")
    one = {"w": np.zeros(10, np.float32)}
    recorder.observe(one, one, version=3, seconds={"encode": 0.5}, reward=0.25)
    recorder.note(3, seconds={"pause": 0.1}, staleness=2)
    recorder.note(3, seconds={"pause": 0.3})
    recorder.note(3, seconds={"pause": 0.2})
    found = Recording.read(recorder.path)
    assert found.seconds == {3: {"encode": 0.5, "pause": 0.3}}
    assert found.numbers == {"reward": {3: 0.25}, "staleness": {3: 2.0}}
    assert found.rewards == {3: 0.25}


def test_a_session_is_recorded(tmp_path: Path) -> None:
    """As a callback it notes what was sent, what each stage took, and how far behind the target was."""
    held = {"w": np.arange(1000, dtype=np.float32)}
    recorder, url = Recorder(tmp_path / "run.jsonl"), f"file://{tmp_path}/store"
    with (
        sparserl.Publisher(url, held, callbacks=[recorder]) as publisher,
        sparserl.Subscriber(url, {"w": np.zeros(1000, np.float32)}, callbacks=[recorder]) as subscriber,
    ):
        publisher.publish()
        subscriber.sync()
        reports = []
        for position in (3, 4):
            held["w"][position] = -1
            reports.append(publisher.publish())
        last = subscriber.sync()
    found = Recording.read(recorder.path)
    assert {version: vars(sent) for version, sent in found.sent.items()} == {
        r.version: {n: getattr(r, n) for n in ("changed", "elements", "bytes", "dense_bytes")} for r in reports if r
    }
    assert last is not None
    assert found.seconds[2]["pause"] == pytest.approx(last.seconds["commit"], abs=1e-6)
    assert {"find", "encode", "upload", "fetch", "stage", "pause"} <= found.seconds[2].keys()
    assert found.numbers["staleness"] == {2: 2.0}


def test_going_on(tmp_path: Path) -> None:
    """A recording is gone on with under its first line; a file that is none is not touched."""
    one, path = {"w": np.zeros(10, np.float32)}, tmp_path / "run.jsonl"
    for version in (1, 2):
        Recorder(path, {"turn": version}).observe(one, one, version=version)
    found = Recording.read(path)
    assert found.meta == {"turn": 1}
    assert [sync.version for sync in found.syncs] == [1, 2]
    other = tmp_path / "notes.txt"
    other.write_text("mine\n")
    with pytest.raises(SparserlError, match=r"not a recording.*choose another"):
        Recorder(other)
    assert other.read_text() == "mine\n"


def test_other_tensors_are_refused(tmp_path: Path) -> None:
    """The syncs of one precision are of one model."""
    recorder = Recorder(tmp_path / "run.jsonl")
    one, two = {"w": np.zeros(10, np.float32)}, {"w": np.zeros(11, np.float32)}
    recorder.observe(one, one, version=1)
    with pytest.raises(TensorMismatch, match="the syncs before"):
        recorder.observe(two, two, version=2)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"version":1', '"version":"x"'),
        ('"time":', '"time":1e999,"was":'),
        ('"index"', '"idx"'),
        ('"auto"', '"other"'),
        ('"keys":[', '"keys":[[],'),
        ('"members":[', '"members":[1,'),
        ('"changed":[', '"changed":[-'),
        ('"changed":[', '"changed":[1,'),
        ('"+1":', '"+1":null,"+3":'),
        ('"names":["w"]', '"names":[5]'),
        ('"seconds":{', '"seconds":{"x":1e999,'),
        ('"meta":{', '"meta":' + "[" * 100_000 + "{"),
    ],
)
def test_damaged_recordings(tmp_path: Path, old: str, new: str) -> None:
    """They are refused when they are read, and not while a page is made of them."""
    recorder = Recorder(tmp_path / "run.jsonl")
    recorder.observe({"w": np.zeros(9, np.float32)}, {"w": np.ones(9, np.float32)}, version=1)
    recorder.note(1, seconds={"commit": 1.0})
    text = recorder.path.read_text()
    assert old in text
    recorder.path.write_text(text.replace(old, new))
    with pytest.raises(SparserlError, match="is not a recording"):
        Recording.read(recorder.path)


@pytest.mark.parametrize("reward", [math.nan, math.inf, -math.inf])
def test_a_reward_that_is_no_number(tmp_path: Path, reward: float) -> None:
    """It is left out; the page shows the others."""
    recorder = Recorder(tmp_path / "run.jsonl")
    for version in range(3):
        recorder.observe({"w": np.zeros(9, np.float32)}, {"w": np.ones(9, np.float32)}, version=version)
        recorder.note(version, reward=reward if version == 1 else 1.0)
    found = Recording.read(recorder.path)
    assert found.rewards == {0: 1.0, 2: 1.0}
    assert page(found).startswith("<!DOCTYPE html>")


def test_broken_files(tmp_path: Path) -> None:
    """A last line that is not whole is left out; anything else that is wrong is an error."""
    recorder, one = Recorder(tmp_path / "run.jsonl"), {"w": np.zeros(10, np.float32)}
    recorder.observe(one, one, version=1)
    text = recorder.path.read_text()
    recorder.path.write_text(text + text.splitlines()[-1][:50])
    found = Recording.read(recorder.path)
    assert (len(found.syncs), found.cut) == (1, True)
    lines = text.splitlines()
    for bad in ("", "{}\n", "[]\n", text.replace('"format":1', '"format":9'), "\n".join((lines[0], lines[2])) + "\n"):
        recorder.path.write_text(bad)
        with pytest.raises(SparserlError, match="is not a recording"):
            Recording.read(recorder.path)


def test_lines_of_a_recording_are_json(tmp_path: Path) -> None:
    """Whoever has no sparserl can read it line by line."""
    recorder, one = Recorder(tmp_path / "run.jsonl", {"name": "ä"}), {"w": np.zeros(10, np.float32)}
    recorder.observe(one, one, version=1)
    recorder.note(1, reward=0.5)
    kinds = [json.loads(line)["kind"] for line in recorder.path.read_bytes().splitlines()]
    assert kinds == ["run", "tensors", "sync", "note"]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("model.layers.12.self_attn.q_proj.weight", (12, "q")),
        ("model.layers.0.self_attn.k_proj.bias", (0, "k")),
        ("model.layers.1.self_attn.q_norm.weight", (1, "norm")),
        ("model.layers.7.self_attn.o_proj.weight", (7, "o")),
        ("model.layers.7.mlp.experts.63.gate_proj.weight", (7, "gate")),
        ("model.layers.7.mlp.gate.weight", (7, "router")),
        ("model.layers.7.mlp.down_proj.weight", (7, "down")),
        ("transformer.h.3.attn.c_attn.weight", (3, "qkv")),
        ("transformer.h.3.mlp.c_fc.weight", (3, "up")),
        ("transformer.h.3.ln_1.weight", (3, "norm")),
        ("model.embed_tokens.weight", (None, "emb")),
        ("model.norm.weight", (None, "norm")),
        ("lm_head.weight", (None, "head")),
        ("vision.patches", (None, "other")),
    ],
)
def test_places_by_name(name: str, expected: tuple[int | None, str]) -> None:
    """Layer and kind of a tensor are told by its name."""
    assert place(name) == expected


def test_classes_of_floats_are_exponents() -> None:
    """One step of the exponent is one class, in every format that has its exponent in eight bits or less."""
    assert [class_shift(BY_NAME[name]) for name in ("bfloat16", "float32", "float16", "float8_e4m3fn", "int32")] == [
        7,
        23,
        10,
        3,
        24,
    ]
