"""Traces for `benchmarks.gpu`, written on a machine without a GPU."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks import gpu, traces
from benchmarks.gpu_data import read_traces


@pytest.mark.slow
def test_traces_are_written_and_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A share of the first sync of each run comes back with its classes, and the CPU's streams of it are written."""
    folder = traces.find_traces()
    file = tmp_path / "traces.npz"
    for arguments in (["--write-traces", file], ["--traces", file, "--write-expected", tmp_path / "expected.npz"]):
        monkeypatch.setattr(sys, "argv", ["gpu", *map(str, arguments)])
        gpu.main()
    found = read_traces(file)
    assert [*found] == traces.runs(folder)
    for run, (old, new, classes) in found.items():
        before, after = next(iter(traces.syncs(folder, run)))
        for bits, side in ((old, before), (new, after)):
            assert np.array_equal(bits, np.concatenate([b.ravel()[: int(b.size * 0.3)] for b in side.values()]))
        assert len(classes) > 1
    with np.load(tmp_path / "expected.npz") as expected:
        assert sum(stream.size for stream in expected.values()) > 0
