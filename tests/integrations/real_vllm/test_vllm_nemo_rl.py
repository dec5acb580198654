"""The NeMo-RL engine in real workers of vLLM, which start with made-up weights: live bits are those of a fresh engine.

With SPARSERL_NEMO_RL, a checkout of NeMo-RL, its own worker extension makes the calls; Ray must be installed then.
"""

from __future__ import annotations

import multiprocessing
import re
from importlib.util import find_spec

import pytest

from tests.effort import each
from tests.integrations.real_vllm.test_vllm import ENVIRONMENT, HERE, job, tokens

pytestmark = [
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed; see `make test-vllm`"),
    pytest.mark.timeout(900),
]


@pytest.fixture(autouse=True)
def _environment(tmp_path, monkeypatch):
    for name, value in {**ENVIRONMENT, "VLLM_CACHE_ROOT": str(tmp_path / "cache")}.items():
        monkeypatch.setenv(name, value)
    multiprocessing.get_context("forkserver").set_forkserver_preload([f"{HERE}.preload"])


@each(("kind", "ranks"), [("llama", 1), ("qwen2", 2), ("moe", 1)], by_day=[("llama", 1)])
def test_syncs(kind, ranks, tmp_path):
    """In place from the first version on, also after something else wrote to a weight; or by NeMo-RL's own loader."""
    job(tmp_path, "models", "make", tmp_path / "model", kind)
    followed = job(tmp_path, "nemo", "follow", tmp_path / "model", tmp_path, kind, ranks, ranks=ranks)
    states = [followed["made up"], *followed["live"], followed["loaded"]]
    assert all(len(state) == ranks for state in states)
    assert all(before != after for before, after in zip(states, states[1:], strict=False))
    assert "something else wrote to it" in followed["poked"]
    fresh = job(tmp_path, "engine", "fresh", tmp_path / "new", ranks, ranks=ranks)
    assert followed["live"][-1] == fresh["live"]
    assert tokens(followed["generations"]) == tokens(fresh["generations"])
    assert followed["loaded"] == job(tmp_path, "engine", "fresh", tmp_path / "newer", ranks, ranks=ranks)["live"]


@pytest.mark.long
def test_weights_that_cannot_be_written_in_place(tmp_path):
    """The sync is refused, whenever it is tried, and names the tensor and what to do."""
    job(tmp_path, "models", "make", tmp_path / "model", "llama")
    refused = job(tmp_path, "nemo", "packed", tmp_path / "model", tmp_path, "llama")["refused"]
    for message in refused:
        assert re.match(r"UnsupportedTensor: '\S+' is empty: vLLM packs it .* Set in_place: false", message)
