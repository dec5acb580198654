"""The corpus: its code loses nothing, the tests' trace is a cut of it, and it takes what is published."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import sparserl
from benchmarks import planes, traces
from benchmarks.__main__ import _HOME as HOME
from research.cut_trace import ROWS, SYNCS, cut
from sparserl.weights.dtypes import BY_NAME, Bits

SMALL = Path(__file__).resolve().parents[1] / "data" / "trace"
CORPUS = traces.find_traces()


@pytest.mark.parametrize("path", sorted(SMALL.glob("*.safetensors")), ids=lambda path: path.name)
def test_the_code_loses_nothing(path: Path) -> None:
    """Files come back byte for byte, smaller than they were."""
    data = path.read_bytes()
    coded = planes.pack(data)
    assert planes.unpack(coded) == data
    assert len(coded) < 0.8 * len(data)


def test_the_trace_of_the_tests_is_a_cut(tmp_path: Path) -> None:
    """Leading rows and syncs of the corpus, cut again, are the files that the tests have in plain safetensors."""
    cut(CORPUS, tmp_path, ROWS, SYNCS)
    made = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert made == {path.name: path.read_bytes() for path in SMALL.iterdir()}


def test_the_corpus_takes_what_is_published() -> None:
    """Changes and bytes of a run in `ctx` are those of the recorded results; the files stay within their limit."""
    run = traces.runs(CORPUS)[-1]
    changed = taken = 0
    for old, new in traces.syncs(CORPUS, run):
        before, after = ({n: Bits(b, BY_NAME["bfloat16"]) for n, b in side.items()} for side in (old, new))
        patch = sparserl.diff(before, after, profile="ctx")
        changed += patch.changed
        taken += patch.nbytes - patch.table_nbytes
    (row,) = (
        row
        for row in json.loads((HOME / "results.json").read_text())["sizes"]
        if (row["format"], row["trace"]) == ("ctx", run)
    )
    assert (changed, taken) == (row["changed"], row["bytes"])
    assert changed == sum(sync["changed"] for sync in traces.describe(CORPUS, run)["syncs"])
    assert sum(path.stat().st_size for path in CORPUS.iterdir()) < 15_000_000


def test_syncs_are_joined() -> None:
    """Versions that are several syncs apart, and what the warm-up changed, are those that syncs lead to."""
    run = traces.runs(SMALL)[-1]
    first, second = traces.syncs(SMALL, run)
    ((old, new),) = traces.joined(SMALL, run, 2)
    assert all(np.array_equal(old[n], first[0][n]) and np.array_equal(new[n], second[1][n]) for n in old)
    ((base, warm),) = traces.joined(SMALL, run, 0)
    assert all(np.array_equal(warm[n], first[0][n]) for n in warm)
    assert any((base[n] != warm[n]).any() for n in base)


@pytest.mark.parametrize("density", [0.03, 0.05])
def test_uniform_changes(density: float) -> None:
    """Any element changes with the same chance, by 1% of itself as near as bf16 comes to it."""
    ((old, new),) = traces.uniform(SMALL, density)
    before, after = (np.concatenate([bits.ravel() for bits in side.values()]) for side in (old, new))
    moved = before != after
    assert moved.mean() == pytest.approx(density, rel=0.1)
    values = [(bits.astype(np.uint32) << 16).view(np.float32)[moved] for bits in (before, after)]
    assert np.abs(np.abs(values[1] / values[0] - 1) - 0.01).max() < 2.0**-8
