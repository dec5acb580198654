"""vLLM on the CPU, for real: live weights follow a run bit for bit, and nothing that goes wrong is served.

These run in an environment of their own (`make test-vllm`) and are left out where vLLM is not installed. All engines
are started at once, two at a time, and tests wait for those that they judge.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.effort import each

pytestmark = [
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed; see `make test-vllm`"),
    pytest.mark.timeout(900),
]

HERE = "tests.integrations.real_vllm"
ROOT = Path(__file__).parents[3]
SYNCS = 8
KINDS = ("llama", "qwen2", "moe")
SHORT = [("llama", 1), ("llama", 2), ("moe", 2)]  # models and ranks
LONG = [("qwen2", 1), ("qwen2", 2), ("moe", 1)]
FAMILIES = ("mla", "gpt-oss", "vlm", "glm", "gemma3", "mixtral", "fp8")
DRAFTERS = (("mtp", 1), ("eagle", 1), ("mtp", 2), ("draft_model", 2))  # methods and ranks
PIPELINE = {"pipeline_parallel_size": 2}
ARRANGEMENTS = {  # a model, ranks that share each tensor, and how other ranks share the rest
    "pipeline": ("llama", 1, PIPELINE),
    "experts": ("moe", 2, {"enable_expert_parallel": True}),
    "four ranks": ("llama", 4, {}),
    "both": ("llama", 2, PIPELINE),
    "classes": ("llama", 2, {}),
    "experts in classes": ("moe", 2, {}),
}
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": os.pathsep.join((str(ROOT / "src"), str(ROOT))),
    "SPARSERL_VLLM_CPU": "plain",
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
}


def cases(*kinds):
    """The short and the long ones of these models."""
    short, long = ([case for case in every if case[0] in kinds] for every in (SHORT, LONG))
    return each(("kind", "ranks"), [*short, *long], long=long)


def job(folder, module, name, *args, ranks=1):
    """Run a function in a process of its own, and return what it returned."""
    folder.mkdir(parents=True, exist_ok=True)
    log, found = folder / f"{name}.log", folder / f"{name}.json"
    process = multiprocessing.get_context("forkserver").Process(
        target=work, args=(log, found, module, name, args, ranks)
    )
    process.start()
    process.join(280)
    with contextlib.suppress(ProcessLookupError):  # an engine that failed has left processes
        os.killpg(process.pid, signal.SIGKILL)
    process.join()
    assert process.exitcode == 0, f"{module}.{name} ended with {process.exitcode}:\n{log.read_text()[-6000:]}"
    return json.loads(found.read_text())


def work(log, found, module, name, args, ranks):
    """What such a process does."""
    os.setsid()
    with log.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    if ranks > 1:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
    try:
        function = getattr(importlib.import_module(f"{HERE}.{module}"), name)
        found.write_text(json.dumps(function(*args)))
        gc.collect()  # ends an engine in a cycle of references; Python waits for its processes at exit
    except BaseException:  # noqa: BLE001  # Python would wait for an engine's processes, which nobody has told to end
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)


def followed(model, folder, kind, ranks, syncs=SYNCS):
    """An engine that followed a run, and a fresh one on the checkpoint that was saved in the end."""
    out = job(folder, "engine", "follow", model, folder, kind, ranks, syncs, ranks=ranks)
    out["log"] = (folder / "follow.log").read_text()
    same = (f"file://{folder}/run", out["first"] + SYNCS) if kind in KINDS else ()
    out["fresh"] = job(folder, "engine", "fresh", folder / "new", ranks, *same, ranks=ranks)
    return out | {"fresh log": (folder / "fresh.log").read_text()}


def arranged(model, folder, kind, ranks, options):
    """The same of several ranks that share the weights in another way, and a few syncs."""
    follow = "follow_in_classes" if "classes" in folder.name else "follow"
    out = job(folder, "engine", follow, model, folder, kind, ranks, 2, options, ranks=2)
    return out | {"fresh": job(folder, "engine", "fresh_with", folder / "new", ranks, options, ranks=2)}


def family(root, kind):
    """The same of a model that is made for it."""
    job(root / kind, "models", "make", root / kind / "model", kind)
    out = followed(root / kind / "model", root / kind, kind, 1, 3)
    return out | (job(root / kind, "faults", "copied_halves", root / kind / "model") if kind == "mla" else {})


def drafted(model, drafter, folder, method, ranks):
    """The same of an engine with a drafter."""
    out = job(folder, "drafts", "follow", model, drafter, folder, method, ranks, ranks=ranks)
    out["log"] = (folder / "follow.log").read_text()
    return out | {"fresh": job(folder, "drafts", "fresh", folder, method, ranks, ranks=ranks)}


def adapted(model, folder, ranks):
    """An engine with an adapter that followed a run, and a fresh one on the adapter that was saved in the end."""
    out = job(folder, "adapters", "follow", model, folder, ranks, ranks=ranks)
    out["log"] = (folder / "follow.log").read_text()
    return out | {"fresh": job(folder, "adapters", "fresh", folder, ranks, ranks=ranks)}


def served(model, folder):
    """The same of a server."""
    out = job(folder, "served", "served", folder, model)
    fresh = job(folder, "faults", "fresh_with_more", folder / "new", f"file://{folder}/run", 4)
    return out | {"fresh": fresh, "folder": folder}


def example(model, folder):
    """The program in the documentation, with nothing set but that this is a CPU."""
    folder.mkdir()
    page = (ROOT / "docs/how-to/integrations/vllm.md").read_text()
    program = max(re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL), key=len)
    (folder / "example.py").write_text(program)
    return subprocess.run(
        [sys.executable, folder / "example.py", model, f"file://{folder}/run"],
        env=os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


@pytest.fixture(scope="module")
def seen(request, tmp_path_factory):
    """What engines saw, each to be waited for: two at a time are at work."""
    root = tmp_path_factory.mktemp("vllm")
    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(2) as pool:
        for name, value in {**ENVIRONMENT, "VLLM_CACHE_ROOT": str(root / "cache")}.items():
            patch.setenv(name, value)
        multiprocessing.get_context("forkserver").set_forkserver_preload([f"{HERE}.preload"])
        models = {kind: root / kind for kind in KINDS}
        for kind, model in models.items():
            job(root, "models", "make", model, kind)
        llama = models["llama"]
        job(root, "models", "make_mimo", root / "mimo")
        job(root, "models", "make_eagle", root / "eagle", llama)
        drafters = {"mtp": (root / "mimo", None), "eagle": (llama, root / "eagle"), "draft_model": (llama, llama)}
        jobs = {("llama", 1): (followed, llama, root / "llama-1", "llama", 1)}  # first: it compiles what others find
        jobs |= {name: (job, root, "faults", name, llama) for name in ("packed", "packed_and_verified", "derived")}
        jobs |= {"served": (served, llama, root / "served"), "example": (example, llama, root / "example")}
        asked = [item.callspec.params for item in request.session.items if hasattr(item, "callspec")]
        chosen = [(kind, n) for kind, n in LONG if {"kind": kind, "ranks": n} in asked]
        others = (*SHORT[1:], *chosen)
        jobs |= {(kind, n): (followed, models[kind], root / f"{kind}-{n}", kind, n) for kind, n in others}
        chosen = {item.callspec.params["kind"] for item in request.session.items if "test_families" in item.name}
        chosen |= {"mla"} if any("made_of_others" in item.name for item in request.session.items) else set()
        jobs |= {kind: (family, root, kind) for kind in FAMILIES if kind in chosen}
        jobs["unfollowed"] = (job, root, "drafts", "unfollowed", llama, root / "eagle", root)
        chosen = {item.callspec.params["drafter"] for item in request.session.items if "test_drafters" in item.name}
        jobs |= {(m, n): (drafted, *drafters[m], root / f"{m}-{n}", m, n) for m, n in DRAFTERS if (m, n) in chosen}
        chosen = {item.callspec.params["way"] for item in request.session.items if "test_arrangements" in item.name}
        for way in chosen:
            kind, ranks, options = ARRANGEMENTS[way]
            jobs[way] = (arranged, models[kind], root / way.replace(" ", "-"), kind, ranks, options)
        chosen = {item.callspec.params["ranks"] for item in request.session.items if "test_adapters" in item.name}
        jobs |= {("adapters", n): (adapted, llama, root / f"adapters-{n}", n) for n in chosen}
        yield {name: pool.submit(function, *args) for name, (function, *args) in jobs.items()}
        pool.shutdown(cancel_futures=True)


def tokens(generations):
    """Without their likelihoods: vLLM may batch requests otherwise, and then sums in another order."""
    return [found for found, _ in generations]


@cases(*KINDS)
def test_syncs(seen, kind, ranks):
    """After all syncs, live bits and generations are those of a fresh engine on the new checkpoint."""
    found = seen[kind, ranks].result()
    fresh = found["fresh"]
    assert found["version"].endswith(f":{found['first'] + SYNCS}")
    assert len(found["live"]) == ranks
    patch = found["fetched"]
    assert max(patch["by rank"]) < patch["all"] / ranks * 1.1  # what both have, and heads of buckets
    assert found["live"] == fresh["live"]
    assert tokens(found["generations"][-1]) == tokens(fresh["generations"])
    told_apart = {json.dumps(one) for one in (found["before"], *found["generations"])}
    assert len(told_apart) == 1 + len(found["generations"]) > 2


@pytest.mark.parametrize(
    "way",
    [
        pytest.param(way, marks=pytest.mark.nightly if way in ("four ranks", "both") else pytest.mark.long)
        for way in ARRANGEMENTS
    ],
)
def test_arrangements(seen, way):
    """Ranks that have other layers or other experts, and four of them, have what ranks of a fresh engine have."""
    found = seen[way].result()
    ranks = 4 if way in ("four ranks", "both") else 2
    patch = found["fetched"]
    assert len(found["live"]) == ranks
    assert max(patch["by rank"]) < patch["all"] * (0.4 if ranks == 4 else 0.6)  # besides its own, what several have
    assert (patch["profiles"] == ["ctx"]) == ("classes" in way)
    assert found["fresh"]["live"] == found["live"] != found["live before"]
    assert tokens(found["generations"][-1]) == tokens(found["fresh"]["generations"])
    assert (found["generations"][-1] == found["before"]) == (way == "experts")  # which do not generate


@cases("llama", "qwen2")
def test_the_checkpoint_is_loaded_once(seen, kind, ranks):
    """Where vLLM keeps weights as they are, the load with which it starts shows where: none follows it."""
    log = seen[kind, ranks].result()["log"]
    assert "sparserl: made-up weights are loaded" not in log
    assert log.count("sparserl: learnt from the load") == ranks


def test_a_checkpoint_that_is_loaded_again(seen):
    """Where a kernel permutes experts, made-up weights are loaded, and the log says why."""
    log = seen["moe", 2].result()["log"]
    assert "sparserl: made-up weights are loaded, then the checkpoint once more: 'model.layers" in log


def warnings_in(log):
    """Where in the code, ours and vLLM's, the warnings in a log come from."""
    return set(re.findall(r"(?:WARNING|ERROR) \S+ \S+ \[(\S+)\]", log))


@cases("qwen2", "moe")
def test_an_engine_warns_of_nothing_more(seen, kind, ranks):
    """With the backend, whichever way it learns, vLLM warns of nothing that it does not warn of without it."""
    found = seen[kind, ranks].result()
    assert "INFO" in found["log"]
    assert warnings_in(found["log"]) <= warnings_in(found["fresh log"])


@pytest.mark.long
def test_an_error_comes_out_at_once(seen, tmp_path):
    """What a job of two ranks raises is in its log when it ends, and its engine ends with it."""
    llama = seen["llama", 2].result()["model"]
    with pytest.raises(AssertionError, match=r"ended with 1:(?s:.*)this is no answer"):
        job(tmp_path, "faults", "raised_beside_an_engine", llama, tmp_path, ranks=2)
    deadline = time.monotonic() + 60
    for pid in json.loads((tmp_path / "pids.json").read_text()):
        while Path(f"/proc/{pid}").exists():
            assert time.monotonic() < deadline, f"process {pid} of the engine goes on"
            time.sleep(0.1)


@cases(*KINDS)
def test_engines_that_follow_nothing_are_verified(seen, kind, ranks):
    """An engine without the backend is compared with a checkpoint and with a run; one flipped bit is named."""
    found = seen[kind, ranks].result()
    verified = found["fresh"]["verified"]
    right = verified["checkpoint"]
    assert (right["answer"], right["uncompared"], right["cast"]) == ("equal", {}, {})
    assert right["bytes"] > right["tensors"] > 20
    assert verified["left as it was"]
    assert verified["version"]["answer"] == "equal"
    assert verified["version"]["version"] == found["first"] + SYNCS
    assert verified["older"]["answer"] == "different"
    for comparison in (verified["flipped"], verified["flipped in the run"]):
        assert comparison["answer"] == "different"
        assert comparison["different"] == ["model.layers.1.self_attn.k_proj.weight"]
    assert verified["flipped left as it was"]


@each("kind", FAMILIES, by_day=["mla"])
def test_families(seen, kind):
    """Models that load otherwise are followed as exactly: latent attention, experts with biases, two towers, FP8."""
    found = seen[kind].result()
    assert found["live"] == found["fresh"]["live"]
    assert found["generations"][-1] != found["before"]
    assert tokens(found["generations"][-1]) == tokens(found["fresh"]["generations"])


def test_weights_made_of_others(seen):
    """The two halves that MLA makes of a projection when it is loaded change with it; copies of it are refused."""
    found = seen["mla"].result()
    made = [name for name in found["live"][0] if name.endswith((".W_UK_T", ".W_UV"))]
    assert len(made) == 4
    assert all(found["live"][0][name] != found["live before"][0][name] for name in made)
    assert re.search(r"UnsupportedTensor: '\S+kv_b_proj\.weight' and '\S+\.W_U\S+' both have", found["start"])


@each("drafter", DRAFTERS, by_day=[("mtp", 1)])
def test_drafters(seen, drafter):
    """The drafter's weights change in the policy's commit, or with it not at all; if the run lacks them, they stay."""
    method, ranks = drafter
    found = seen[drafter].result()
    fresh = found["fresh"]
    assert len(found["live"]) == ranks
    shared = {"drafter model.embed_tokens.weight", "drafter lm_head.weight"}  # but a draft model has its own
    assert found["without"]["policy"]
    assert set(found["without"]["drafter"]) == (set() if method == "draft_model" else shared)
    assert found["log"].count("are not in the run and stay as they are") == 1
    assert len(set(found["with"]["drafter"]) - shared) > 4
    assert "was not committed" in found["poked"] or "CommitFailed" in found["poked"]
    assert found["poked left as it was"]
    assert found["recovered"] is None
    assert found["live"] == fresh["live"]
    assert tokens(found["generations"]) == tokens(fresh["generations"])


def test_a_drafter_that_cannot_be_followed(seen):
    """An engine starts with it and says so; the drafter is what it was, and a run with its weights is refused."""
    found = seen["unfollowed"].result()
    assert found["as it was"]
    assert found["supported"] == [False]
    assert "no rank has" in found["refused"]
    assert "'draft_model." in found["refused"]
    log = (Path(found["folder"]) / "unfollowed.log").read_text()
    assert "cannot be followed: 'model.fc.doubled' is computed" in log


@each("ranks", [1, 2], long=[2])
def test_adapters(seen, ranks):
    """An adapter follows a run in place, under its id; vLLM may drop it; nothing that goes wrong changes it."""
    found = seen["adapters", ranks].result()
    fresh = found["fresh"]
    assert found["kind"] == "patch"
    assert "the bytes are not those that its name promises" in found["damaged"]
    assert "this layer cannot be written" in found["failed"]
    assert found["left as it was"]
    assert found["dropped"] == [2, 3]
    assert re.findall(r"vLLM has loaded no adapter \d+", found["log"]) == ["vLLM has loaded no adapter 7"]
    assert tokens(found["from the copy"]) == tokens(found["from the run"]) == tokens(found["generations"][4])
    assert tokens(found["generations"][-1]) == tokens(fresh["generations"])
    told_apart = [found["base"], *found["generations"]]
    assert len({json.dumps(one) for one in told_apart}) == len(told_apart) == 8
    for before, after, expected in zip(found["before"], found["after"], fresh["after"], strict=True):
        assert after["slot"] == expected["slot"] != before["slot"]
        assert after["copy"] == expected["copy"] != before["copy"]
        assert after["addresses"] == before["addresses"]


def test_faults(seen):
    """What is damaged, or was written or replaced by something else, is refused; nothing is written, and it goes on."""
    found = seen["llama", 1].result()
    assert "ChecksumMismatch" in found["damaged"]
    assert found["damaged left as it was"]
    assert "CommitFailed" in found["poked"]
    assert found["poked left as it was"]
    assert found["recovered"] is None
    assert "ChecksumMismatch" in found["audited"]
    assert "'model.norm.weight' has moved since" in found["replaced"]
    assert found["replaced left as it was"]
    assert found["audited version"] == "default"
    assert "the engine follows run" in found["another run"]
    assert found["another run's version"].rpartition(":")[2] == "5"
    assert found["first"] == 6


def test_one_rank_of_two_fails(seen):
    """Where one rank cannot commit, none does. Where it is killed in the middle, the engine serves no more."""
    found = seen["llama", 2].result()
    assert "was not committed" in found["poked"]
    assert found["poked left as it was"]
    assert found["recovered"] is None
    assert "nothing was written" in found["refused"]
    assert "'ahaed'" in found["unknown option"]
    assert "no credentials" in found["no store"]
    assert "call init_weight_transfer_engine first" in found["no store then"]
    assert found["killed"] is not None
    assert "EngineDeadError" in found["serve"]


def test_packed_weights(seen):
    """An engine whose weights cannot be followed does not start, and names one that was emptied."""
    said = seen["packed"].result()["start"]
    assert "UnsupportedTensor: 'model.layers.0.self_attn.qkv_proj.weight' is empty" in said
    found = seen["packed_and_verified"].result()
    verified = found["verified"]
    assert found["left as it was"]
    assert (verified["answer"], verified["tensors"]) == ("incomplete", 0)
    assert "vLLM has packed its weights" in verified["uncompared"]["model.layers.0.self_attn.q_proj.weight"]


def test_values_computed_of_weights(seen):
    """Nor does one that keeps something that it has computed of its weights, and it says what."""
    said = seen["derived"].result()["start"]
    assert "UnsupportedTensor" in said
    assert "doubled' is computed from the weights" in said


def test_values_computed_of_weights_are_not_compared(seen):
    """Where it follows nothing, its weights are compared, what was computed is named, and all stays as it was."""
    verified = seen["served"].result()["fresh"]["verified"]
    assert verified["left as it was"]
    assert verified["flipped left as it was"]
    assert verified["flipped"]["different"] == ["model.layers.1.self_attn.k_proj.weight"]
    right = verified["checkpoint"]
    assert (right["answer"], right["different"]) == ("incomplete", [])
    assert right["tensors"] == 21
    assert len(right["uncompared"]) == 8
    assert all(name.endswith("_proj.doubled") for name in right["uncompared"])


def test_a_server(seen):
    """`vllm serve` follows a trainer over HTTP: requests wait and are answered, versions and errors are seen."""
    found = seen["served"].result()
    assert [version.rpartition(":")[2] for version in found["versions"]] == ["1", "2", "3"]
    assert all("500" in error for error in found["refused"])  # of a damaged bucket, and of workers that follow nothing
    assert found["paused"] is False
    (right, text), (wrong, difference) = found["verified"]
    assert (right, wrong) == (0, 1), text + difference
    assert text.count("\n") == 1
    assert "equal to" in text
    assert "differ from version 2 of run" in difference
    assert set(found["meanwhile"]) == {40}
    assert found["generations"] == tokens(found["fresh"]["generations"])
    assert found["generations"][2] != found["before"]


def test_versions_of_requests(seen):
    """A server generates with the version that is demanded or a later one; answers say with which, also streams."""
    found = seen["served"].result()
    third = found["versions"][-1]
    run = third.rpartition(":")[0]
    fourth = f"{run}:4"
    assert found["attached"] == [200, [f"{run}:0"] * 2, None]
    assert found["invoked"] == [200, [fourth, fourth], None]
    assert found["no version"] == [  # the engine has been told to follow a run that its bits are not of
        412,
        ["default", None],
        "the engine has default, but 0 or later is demanded: its weights are no version of a run",
    ]
    status, (start, end), lines = found["streamed"]
    assert (status, start, end) == (200, third, None)
    assert lines[-2:] == [f": X-Sparserl-End-Version: {fourth}", "data: [DONE]"]
    assert sum('"finish_reason":"length"' in line for line in lines) == 1
    engine = f"the engine has {fourth}, but"
    assert found["demands"] == {
        "held": [200, [fourth, fourth], None],
        "older": [200, [fourth, fourth], None],
        "later": [412, [fourth, None], f"{engine} {run}:5 or later is demanded"],
        "other": [412, [fourth, None], f"{engine} another:0 or later is demanded: it follows another run"],
        "wrong": [
            400,
            [fourth, None],
            "'newest' is no version: write RUN:VERSION or VERSION, such as 12e9e740decf9cd4:42",
        ],
    }
    assert found["spans"] == [{"version": fourth, "start": 0, "end": 8}]


def test_staleness_is_bounded(seen):
    """The example trains a run of its own from samples that are at most one version old; others it leaves out.

    Versions of the run before are refused then.
    """
    found = seen["served"].result()
    status, (start, _), error = found["replaced"]
    assert status == 412
    assert start.endswith(":5")  # the last of its versions that it committed, of six
    assert error.endswith("it follows another run")
    log = (found["folder"] / "served.log").read_text()
    learnt = re.findall(r"version (\d+) learnt from versions (\d+) to (\d+)", log)
    assert [int(version) for version, _, _ in learnt] == [2, 3, 4, 5, 6]
    assert all(int(version) - 1 - int(start) <= 1 for version, start, _ in learnt)
    ((stale, refused),) = re.findall(r"(\d+) samples were too old when they were taken; the server refused (\d+)", log)
    assert int(stale) + int(refused) > 0  # after the second step, whatever was asked for with the first version


def test_the_example(seen):
    """The program in the documentation runs."""
    done = seen["example"].result()
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
