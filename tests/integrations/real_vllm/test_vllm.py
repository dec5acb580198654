"""vLLM on the CPU, for real: live weights follow a run bit for bit, and nothing that goes wrong is served.

These run in an environment of their own (`make test-vllm`) and are left out where vLLM is not installed.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed; see `make test-vllm`")

ROOT = Path(__file__).parents[3]
SYNCS = int(os.environ.get("SPARSERL_VLLM_SYNCS", "20"))
KINDS = ("llama", "qwen2", "moe")


def engine(job, folder, *rest, ranks=1, timeout=280):
    """Run one job in a process of its own, and return what it wrote down."""
    folder.mkdir(parents=True, exist_ok=True)
    run([sys.executable, "-m", "tests.integrations.real_vllm.engine", job, folder, *map(str, rest)], ranks, timeout)
    return json.loads((folder / f"{job}.json").read_text())


def run(command, ranks, timeout=280):
    """A process as vLLM on this machine needs it."""
    env = os.environ | {
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": str(ROOT),
        "SPARSERL_VLLM_CPU": "plain",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "0|1" if ranks == 2 else "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0" if ranks == 1 else "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
    }
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=timeout, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory):
    """Engines of one rank that followed a run, and fresh ones on the checkpoints that were saved in the end."""
    root = tmp_path_factory.mktemp("one")
    out = {kind: engine("follow", root / kind, 1, SYNCS, kind)[kind] for kind in KINDS}
    folders = {str(root / kind / kind / "new"): kind for kind in KINDS}
    for folder, found in engine("fresh", root / "fresh", 1, *folders).items():
        out[folders[folder]]["fresh"] = found
    return out


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    """Engines of two ranks that followed a run, and then loaded the checkpoint that was saved in the end."""
    return engine("follow", tmp_path_factory.mktemp("two"), 2, SYNCS, *KINDS, ranks=2, timeout=600)


def tokens(generations):
    """Without their likelihoods: vLLM may batch requests otherwise, and then sums in another order."""
    return [found for found, _ in generations]


def require_followed(seen, expected, ranks):
    assert seen["version"] == str(SYNCS)
    assert len(seen["live"]) == ranks
    assert seen["live"] == expected["live"]
    assert tokens(seen["generations"][-1]) == tokens(expected["generations"])
    told_apart = {json.dumps(one) for one in (seen["before"], *seen["generations"])}
    assert len(told_apart) == 1 + len(seen["generations"]) > 2


@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", KINDS)
def test_one_rank(one_rank, kind):
    """After all syncs, live bits and generations are those of a fresh engine on the new checkpoint."""
    require_followed(one_rank[kind], one_rank[kind]["fresh"], 1)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks(two_ranks, kind):
    """After all syncs, live bits and generations are those that vLLM loads of the new checkpoint."""
    require_followed(two_ranks[kind], two_ranks[kind]["reloaded"], 2)


def test_faults(tmp_path):
    """A damaged bucket, and a weight that something else wrote to, are refused; nothing is written, and it goes on."""
    seen = engine("faults", tmp_path)
    assert "ChecksumMismatch" in seen["damaged"]
    assert seen["damaged left as it was"]
    assert "CommitFailed" in seen["poked"]
    assert seen["poked left as it was"]
    assert "ChecksumMismatch" in seen["audited"]
    assert seen["in the end"]
    assert seen["version"] == "4"


def test_one_rank_of_two_fails(tmp_path):
    """Where one rank cannot commit, none does. Where it is killed in the middle, the engine serves no more."""
    seen = engine("killed", tmp_path, ranks=2)
    assert "was not committed" in seen["poked"]
    assert seen["poked left as it was"]
    assert seen["recovered"] is None
    assert seen["commit"] is not None
    assert "EngineDeadError" in seen["serve"]


def test_packed_weights(tmp_path):
    """An engine whose weights cannot be followed does not start, and names one that was emptied."""
    seen = engine("packed", tmp_path)
    assert "UnsupportedTensor: 'model.layers.0.self_attn.qkv_proj.weight' is empty" in seen["start"]


def test_values_computed_of_weights(tmp_path):
    """Nor does one that keeps something that it has computed of its weights, and it says what."""
    seen = engine("derived", tmp_path)
    assert "UnsupportedTensor" in seen["start"]
    assert "doubled' is computed of the weights" in seen["start"]


def test_a_server(tmp_path):
    """`vllm serve` follows a trainer over HTTP: requests wait and are answered, versions and errors are seen."""
    seen = engine("served", tmp_path)
    assert seen["versions"] == ["1", "2", "3"]
    assert "500" in seen["damaged"]
    assert seen["paused"] is False
    assert len(seen["meanwhile"]) > 1
    assert set(seen["meanwhile"]) == {40}
    found = engine("fresh", tmp_path / "fresh", 1, tmp_path / "new")[str(tmp_path / "new")]
    assert seen["generations"] == tokens(found["generations"])
    assert seen["generations"][2] != seen["before"]


def test_the_example(tmp_path):
    """The program in the documentation runs, with nothing set but that this is a CPU."""
    engine("make", tmp_path)
    page = (ROOT / "docs/integrations/vllm.md").read_text()
    program = max(re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL), key=len)
    (tmp_path / "example.py").write_text(program)
    run([sys.executable, tmp_path / "example.py", tmp_path / "model", f"file://{tmp_path}/run"], ranks=1)
