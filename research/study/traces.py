"""What the traces say about the same questions: a 135M model whose masters were bf16 numbers at first.

A trace has one patch for all syncs before the first that is kept, so `again` counts elements that changed in any of
those, too, unless they had changed back.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np

import sparserl
from benchmarks import traces
from research.study.summary import classes
from sparserl.record import Recorder, Recording
from sparserl.weights.dtypes import BY_NAME


def replay(folder: Path, run: str) -> dict[str, Any]:
    """Figures of one trace, in the words of the study."""
    base = traces.load(folder / "base.safetensors")
    described = traces.describe(folder, run)
    with tempfile.TemporaryDirectory() as scratch:
        recorder = Recorder(Path(scratch) / "run.jsonl", meta=described["run"])
        versions: list[traces.Weights] = []
        for (old, new), sync in zip(traces.syncs(folder, run), described["syncs"], strict=True):
            if not versions:
                recorder.observe(_bits(base), _bits(old), version=sync["sync"] - 1, precision="bf16")
                versions.append(old)
            recorder.observe(_bits(old), _bits(new), version=sync["sync"], precision="bf16")
            versions.append(new)
        _, *found = Recording.read(Path(scratch) / "run.jsonl").syncs
    changed = [sync.total for sync in found]
    return {
        "about": described["run"],
        "elements": found[0].elements,
        "tensors": len(base),
        "versions": [sync.version for sync in found],
        "changed": changed,
        "inactive": [sync.inactive for sync in found],
        "again": [sync.again for sync in found],
        "bytes": {name: [sync.bytes(name) for sync in found] for name in found[0].profiles},
        "classes": classes(found),
        "apart": {
            k: [_differing(versions[-1 - k], versions[-1]), sum(changed[-k:])]
            for k in (1, 2, 4, 8)
            if k < len(versions)
        },
    }


def _bits(weights: traces.Weights) -> dict[str, sparserl.Bits]:
    return {name: sparserl.Bits(bits, BY_NAME["bfloat16"]) for name, bits in weights.items()}


def _differing(old: traces.Weights, new: traces.Weights) -> int:
    return sum(int(np.count_nonzero(old[name] != new[name])) for name in new)
