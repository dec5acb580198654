"""Each supported release of vLLM, by its source distribution: what this package needs of it is there, and fits.

The newest release may have no wheel for CPUs, so that `make test-vllm` cannot see it. The page of the integration says
which releases are supported; `test_newer_releases`, at night, tells of one after them.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.effort import each
from tests.integrations import vllm_sources
from tests.integrations.vllm_sources import Release
from tests.integrations.wheels import ROOT, releases

FIRST, LAST = vllm_sources.window()
VERSIONS = [f"0.{minor}.0" for minor in range(FIRST, LAST + 1)]
WITH_CLASSES = [
    f"tests/integrations/real_vllm/{name}.py"
    for name in ("test_vllm_trainer", "test_vllm_options", "test_skyrl_sender")
]

WORKER = "vllm/v1/worker/gpu_worker.py"
CALLS = {  # of methods, in the words of the integration; by their class and, where there are several, its file
    ("LLM", None): [
        "init_weight_transfer_engine(request)",
        "start_weight_update()",
        "update_weights(request)",
        "finish_weight_update(version)",
        "update_weight_version(version)",
        "get_weight_version()",
        "collective_rpc(method, kwargs=arguments)",
        "reset_prefix_cache(reset_running_requests=True)",
    ],
    ("LLMEngine", None): ["reset_encoder_cache()"],
    ("Worker", WORKER): ["load_model()", "get_model()", "shutdown()"],
    ("WorkerWrapperBase", None): ["__getattr__(name)"],
    ("LayerReloadingInfo", None): ["reset()", "can_load()"],
    ("BaseModelLoader", None): ["load_model(config, model_config)", "load_weights(model, model_config)"],
    ("DefaultModelLoader", None): ["get_all_weights(model_config, model)"],
    ("WorkerLoRAManager", None): ["_load_adapter(request)"],
    ("LoRAModelManager", None): [
        "list_adapters()",
        "_create_merged_loras_inplace(lora)",
        "_get_lora_layer_weights(lora, name)",
    ],
    ("BaseLayerWithLoRA", None): ["reset_lora(slot)", "set_lora(slot, lora_a, lora_b)"],
    ("LoRARequest", None): [],
}
ATTRIBUTES = {
    ("Worker", WORKER): ["weight_transfer_engine", "_weight_update_active", "model_runner", "device"],
    ("WorkerBase", None): ["vllm_config", "parallel_config", "rank"],
    ("WorkerWrapperBase", None): ["worker"],
    ("WorkerLoRAManager", None): ["_adapter_manager"],
    ("LoRAModelManager", None): ["lora_index_to_id", "modules"],
    ("LoRAModel", None): ["loras"],
    ("LoRARequest", None): ["lora_int_id", "is_3d_lora_weight"],
    ("LayerReloadingInfo", None): ["load_numel"],
}
ROUTES = {  # and what they are sent
    "pause": ["mode"],
    "resume": [],
    "init_weight_transfer_engine": ["init_info"],
    "start_weight_update": [],
    "update_weights": ["update_info"],
    "finish_weight_update": ["weight_version"],
    "update_weight_version": ["new_version"],
    "collective_rpc": ["method", "kwargs"],
    "reset_prefix_cache": ["reset_running_requests", "reset_external"],
    "reset_encoder_cache": [],
    "server_info": ["config_format"],
    "health": [],
}


def unmet(release: Release) -> list[str]:
    """What this package needs and a release does not have."""
    found = vllm_sources.missing_names(release) + vllm_sources.wrong_calls(release)
    for (name, path), texts in CALLS.items():
        functions = [node for node in release.class_body(name, path) if isinstance(node, ast.FunctionDef)]
        for text in texts:
            call = ast.parse(text, mode="eval").body
            assert isinstance(call, ast.Call)
            same = [function for function in functions if function.name == ast.unparse(call.func)]
            if not any(vllm_sources.takes(function, call) for function in same[:1]):
                found.append(f"{name}.{text}")
    for (name, path), attributes in ATTRIBUTES.items():
        body = [*release.class_body(name, path)]
        stored = {node.attr for node in body if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)}
        stored |= {node.target.id for node in body if isinstance(node, ast.AnnAssign) and hasattr(node.target, "id")}
        found += [f"{name}.{attribute}" for attribute in attributes if attribute not in stored]
    for route, words in ROUTES.items():
        text = release.routes.get(route, "")
        found += [f"/{route}: {word or 'the route'}" for word in (words or [""]) if not text or word not in text]
    return sorted({*found})


def tried(release: Release, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run the tests of classes over vLLM's own base classes of a release."""
    vllm_sources.write_package(release, folder / "package")
    path = os.pathsep.join((str(folder / "package"), str(ROOT / "src"), str(ROOT)))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--color=no", *WITH_CLASSES]
    command += ["--basetemp", str(folder / "tests")]
    return subprocess.run(
        command, env=os.environ | {"PYTHONPATH": path}, cwd=ROOT, capture_output=True, text=True, check=False
    )


@each("version", VERSIONS, by_day=VERSIONS[-1:])
def test_what_is_needed_is_there(version: str) -> None:
    """Modules, names and routes that this package uses exist, and functions take its calls."""
    assert unmet(Release(version)) == []


@pytest.mark.skipif(sys.version_info < (3, 11), reason="vLLM needs Python 3.11 from 0.32 on")
@each("version", VERSIONS, by_day=VERSIONS[-1:])
def test_classes_fit(version: str, tmp_path: Path) -> None:
    """Backend, trainers, sources, options and clients work over the release's own base classes and factories."""
    done = tried(Release(version), tmp_path)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


def test_pages_state_the_window() -> None:
    """All pages that name releases of vLLM name those that are tested here."""
    stated = f"0.{FIRST} to 0.{LAST}"
    (row,) = [line for line in (ROOT / "README.md").read_text().splitlines() if line.startswith("| [vLLM]")]
    assert stated in row


@pytest.mark.nightly
def test_newer_releases(tmp_path: Path) -> None:
    """The newest release is in the stated window, or would fit; if it is after the window, this says so."""
    newest = releases("vllm")[-1]
    major, minor = map(int, newest.split(".")[:2])
    if (major, minor) <= (0, LAST):
        return
    said = f"vLLM {newest} is out, and {vllm_sources.PAGE.name} says that 0.{FIRST} to 0.{LAST} are supported"
    release = Release(newest)
    done = tried(release, tmp_path)
    assert unmet(release) == [], said
    assert done.returncode == 0, f"{said}: {done.stdout[-6000:]}"
    pytest.skip(f"{said}. It would fit: state the new window there")
