"""Experts and locality: counted by tensor, and shown on the page."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np
import pytest

import sparserl
from sparserl.record import Recorder, Recording
from sparserl.record.activity import expert_changes
from sparserl.record.page import page
from sparserl.record.summary import summary

NAMED = "model.layers.0.mlp.experts"
FUSED = "model.layers.1.mlp.experts"


def weights() -> dict[str, np.ndarray]:
    """Three experts with tensors of their own, four in two tensors that have all of them, and a router."""
    named = {
        f"{NAMED}.{n}.{kind}_proj.weight": np.zeros((2, 3), np.float32) for n in range(3) for kind in ("up", "down")
    }
    fused = {f"{FUSED}.{kind}": np.zeros((4, 3, 5), np.float32) for kind in ("gate_up_proj", "down_proj")}
    return {**named, **fused, "model.layers.0.mlp.gate.weight": np.zeros((3, 8), np.float32)}


def test_experts_and_locality(tmp_path: Path) -> None:
    """Never, sometimes and always active; an expert is active if any of its tensors is."""
    current = weights()
    path = tmp_path / "run.jsonl"
    with sparserl.Publisher(tmp_path / "store", current, observe=Recorder(path)) as publisher:
        publisher.publish()
        for version in (1, 2):
            current[f"{NAMED}.0.{'up' if version == 1 else 'down'}_proj.weight"][0, :2] = version
            current[f"{FUSED}.{'gate_up' if version == 1 else 'down'}_proj"][2, 1, :3] = version
            current["model.layers.0.mlp.gate.weight"][0, : 2 * version] = version
            publisher.publish()
        current[f"{NAMED}.2.up_proj.weight"][:] = 1
        current[f"{FUSED}.down_proj"][3, 0, 0] = 1
        current[f"{FUSED}.down_proj"][2, 1, 1:4] = 9
        current[f"{NAMED}.0.up_proj.weight"][0, 0] = 9
        publisher.publish()
    recording = Recording.read(path)
    changes = expert_changes(recording, "float32")
    assert {key: counts.tolist() for key, counts in changes.items()} == {
        (NAMED, 0): [2, 2, 1],
        (NAMED, 1): [0, 0, 0],
        (NAMED, 2): [0, 0, 6],
        (FUSED, 0): [0, 0, 0],
        (FUSED, 1): [0, 0, 0],
        (FUSED, 2): [3, 3, 3],
        (FUSED, 3): [0, 0, 1],
    }
    figures = summary(recording)["precisions"]["float32"]
    experts = figures["experts"]
    assert (experts["experts"], experts["never"], experts["sometimes"], experts["always"]) == (7, 3, 2, 2)
    assert experts["never_names"] == [f"{NAMED}.1", f"{FUSED}.0", f"{FUSED}.1"]
    # the last sync: 1 of 1 again, 0 of 6, and of the fused tensor 2 of 4
    assert list(figures["locality"].values()) == [0.0, 0.25, 0.5, 0.75, 1.0]
    items = ["".join(item.itertext()) for item in ET.fromstring(page(recording)).iter("li")]
    assert "Experts that change in these syncs: 3 never, 2 sometimes, 2 always, of 7." in items
    assert any("min 0%, 25% 25%, median 50%, 75% 75%, max 100%" in item for item in items)


@pytest.mark.parametrize("count", [1, 2])
def test_a_page_without_old_bits(tmp_path: Path, count: int) -> None:
    """A recording of patches alone has a page, which says what is missing; no experts, no word about them."""
    recorder = Recorder(tmp_path / "run.jsonl")
    old = {"w": np.zeros(500, np.float32)}
    new = {"w": np.zeros(500, np.float32)}
    for version in range(1, count + 1):
        new["w"][:7] = version
        recorder.observe_patch(sparserl.diff(old, new, profile="gap"), None, version=version)
    recording = Recording.read(recorder.path)
    assert summary(recording)["precisions"]["float32"]["experts"] is None
    text = page(recording)
    assert "old bits were not at hand" in text
    assert "experts" not in text
