"""Recordings of what publishers and observers find: the same figures as from two whole versions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import sparserl
from sparserl.errors import NeedsBase, SessionError, TensorMismatch
from sparserl.patch.measuring import synthetic
from sparserl.record import Observer, Recorder, Recording
from sparserl.weights.dtypes import BY_NAME, Bits

BF16 = BY_NAME["bfloat16"]


def versions(count: int) -> list[dict[str, Bits]]:
    """Versions of a sparse tensor, a dense one and one that stays what it is."""
    bits = synthetic(20_000, 0.02, 0)[0]
    rng = np.random.default_rng(0)
    out = []
    for seed in range(count):
        out.append(
            {
                "sparse": Bits(bits.reshape(100, 200), BF16),
                "dense": Bits(rng.integers(0, 1 << 16, 3000, np.uint16), BF16),
                "still": Bits(np.zeros(7, np.uint16), BF16),
            }
        )
        old, new = synthetic(20_000, 0.02, seed + 1)
        bits = bits ^ (old ^ new)
    return out


def figures(recording: Recording) -> list[dict[str, Any]]:
    """Everything about the syncs but the bytes, which depend on how changes are cut into buckets."""
    return [{name: value for name, value in vars(sync).items() if name != "profiles"} for sync in recording.syncs]


def whole_recording(path: Path, steps: list[dict[str, Bits]]) -> Recording:
    recorder = Recorder(path)
    for version, (old, new) in enumerate(zip(steps, steps[1:], strict=False), 1):
        recorder.observe(old, new, version=version)
    return Recording.read(path)


@pytest.mark.parametrize("profile", ["auto", "raw"])
def test_a_publisher_observes(tmp_path: Path, profile: str) -> None:
    """Figures from its patches are those of the whole versions; bytes too, where all changes are in one bucket."""
    steps = versions(4)
    current = {name: Bits(bits.array.copy(), BF16) for name, bits in steps[0].items()}
    recorder = Recorder(tmp_path / "observed.jsonl")
    with sparserl.Publisher(tmp_path / "store", current, observe=recorder, profile=profile) as publisher:
        publisher.publish()
        for number, step in enumerate(steps[1:]):
            for name, bits in step.items():
                current[name].array[...] = bits.array
            report = publisher.publish() if number % 2 else publisher.publish_in_background().result()
            assert "observe" in report.seconds
    expected = whole_recording(tmp_path / "whole.jsonl", steps)
    observed = Recording.read(recorder.path)
    assert observed.tensors == expected.tensors
    assert figures(observed) == figures(expected)
    assert all(sync.again for sync in observed.syncs[1:])
    for sync, other in zip(observed.syncs, expected.syncs, strict=True):
        for name in other.profiles:
            assert sync.bytes(name) == pytest.approx(other.bytes(name), rel=0.01), name


def test_an_observer_of_shards(tmp_path: Path) -> None:
    """Two halves of a tensor, cut across its rows, are counted as the whole is; nothing is sent."""
    steps = versions(3)
    table = sparserl.tensor_table(steps[0])
    halves = [sparserl.Region((0, first), (100, size)) for first, size in ((0, 70), (70, 130))]
    number = 0

    def shards(half: sparserl.Region) -> sparserl.Shards:
        data = Bits(steps[number]["sparse"].array[half.slices], BF16)
        return sparserl.Shards(table, [sparserl.Part("sparse", half, data)])

    recorders = [Recorder(tmp_path / f"{rank}.jsonl") for rank in range(2)]
    observers = [
        Observer(recorder, lambda half=half: shards(half)) for recorder, half in zip(recorders, halves, strict=True)
    ]
    for number in range(3):  # read by the sources
        assert [observer.observe(version=number) is None for observer in observers] == [number == 0] * 2
    expected = whole_recording(tmp_path / "whole.jsonl", steps)
    ranks = [Recording.read(recorder.path) for recorder in recorders]
    sparse = expected.tensors["bfloat16"].names.index("sparse")
    for index, sync in enumerate(expected.syncs):
        parts = [rank.syncs[index] for rank in ranks]
        assert sum(part.changed[sparse] for part in parts) == sync.changed[sparse]
        assert sum(part.again for part in parts) == sync.again_by_tensor[sparse]
        assert [part.dense_bytes for part in parts] == [14_000, 26_000]
    assert ranks[0].tensors["bfloat16"].whole == expected.tensors["bfloat16"].elements


def test_without_old_bits(tmp_path: Path) -> None:
    """Positions and bytes are recorded; what needs the old bits is left out, or the patch is refused."""
    old, new = versions(2)
    recorder = Recorder(tmp_path / "run.jsonl")
    line = recorder.observe_patch(sparserl.diff(old, new, profile="gap"), None, version=1)
    expected = Recorder(tmp_path / "whole.jsonl").observe(old, new, version=1)
    sparse = sparserl.tensor_table(old).index["sparse"]
    assert line["changed"][sparse] == expected["changed"][sparse]
    assert (line["steps"], line["classes"], list(line["profiles"])) == ({}, {}, ["auto"])
    assert line["profiles"]["auto"] == expected["profiles"]["gap"]
    with pytest.raises(NeedsBase, match="'ulp'"):
        recorder.observe_patch(sparserl.diff(old, new, profile="ulp"), None, version=2)
    with pytest.raises(TensorMismatch, match="syncs before"):
        recorder.observe_patch(
            sparserl.diff({"w": np.zeros(3, np.uint16)}, {"w": np.ones(3, np.uint16)}),
            None,
            version=2,
            precision="bfloat16",
        )


def test_what_cannot_observe_is_refused(tmp_path: Path) -> None:
    """In the constructor, by the name of the option."""
    weights = {"w": np.zeros(3, np.float32)}
    for wrong in ("run.jsonl", Recorder):
        with pytest.raises(SessionError, match=r"observe is .*must be a sparserl.record.Recorder"):
            sparserl.Publisher(tmp_path / "store", weights, observe=wrong)  # type: ignore[arg-type]
    with pytest.raises(SessionError, match=r"recorder is 'run\.jsonl'"):
        Observer("run.jsonl", weights)  # type: ignore[arg-type]


def test_a_failing_recorder_does_not_stop_a_publisher(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It is logged once, and versions go on."""
    weights = {"w": np.zeros(300, np.float32)}
    recorder = Recorder(tmp_path / "run.jsonl")
    recorder.path = tmp_path / "nowhere" / "run.jsonl"
    with sparserl.Publisher(tmp_path / "store", weights, observe=recorder) as publisher:
        for version in range(3):
            weights["w"][version] = 1
            assert publisher.publish().version == version
    assert [record.getMessage() for record in caplog.records if "not observed" in record.getMessage()] == [
        "version 1 was not observed; later failures are not logged"
    ]
