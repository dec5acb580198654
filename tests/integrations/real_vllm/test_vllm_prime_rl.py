"""prime-rl's method of vLLM's workers, on the CPU: with the backend it commits steps from the store."""

from __future__ import annotations

import multiprocessing
from importlib.util import find_spec

import pytest

from tests.integrations.real_vllm.test_vllm import ENVIRONMENT, HERE, job

pytestmark = [
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed; see `make test-vllm`"),
    pytest.mark.timeout(900),
]


@pytest.mark.long
@pytest.mark.parametrize("ranks", [1, 2])
def test_steps(tmp_path, monkeypatch, ranks):
    """Live weights are those of the step that was asked for last, bit for bit; folders of no step are refused."""
    for name, value in {**ENVIRONMENT, "VLLM_CACHE_ROOT": str(tmp_path / "cache")}.items():
        monkeypatch.setenv(name, value)
    multiprocessing.get_context("forkserver").set_forkserver_preload([f"{HERE}.preload"])
    model = tmp_path / "model"
    job(tmp_path, "models", "make", model, "llama")
    out = job(tmp_path, "prime", "follow", model, tmp_path, ranks, ranks=ranks)
    fresh = job(tmp_path, "engine", "fresh", tmp_path / "new", ranks, ranks=ranks)
    assert out["live"] == fresh["live"]
    assert out["generations"][-1] == fresh["generations"]
    assert out["generations"][-1] != out["before"]
    assert "/elsewhere/model is not a broadcast of prime-rl" in str(out["refused"])
