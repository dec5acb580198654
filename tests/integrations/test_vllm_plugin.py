"""The entry point of vLLM: what it registers, and what it must not load. A stand-in takes the place of vLLM."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import sparserl
from tests.integrations.wheels import entry_point

SRC = Path(sparserl.__file__).parents[1]

FACTORY = """
class Registry:
    def __init__(self):
        self.engines = {}

    def register_engine(self, backend, module, name):
        if backend in self.engines:
            raise ValueError(backend)
        self.engines[backend] = module, name


WeightTransferEngineFactory = Registry()
"""
TRAINERS = "WeightTransferTrainerFactory = Registry()\n"

WORKER = """
class WorkerWrapperBase:
    worker = None
"""

PROGRAM = """
import importlib, sys
module, _, name = sys.argv[1].partition(":")
register = getattr(importlib.import_module(module), name)
register()
register()
from vllm.distributed.weight_transfer import factory
factories = [value for name, value in vars(factory).items() if name.endswith("Factory")]
print(*(value.engines for value in factories))
from vllm.v1.worker.worker_base import WorkerWrapperBase
print([name for name in dir(WorkerWrapperBase()) if name.startswith("sparserl")])
print([name for name in ("torch", "numba", "llvmlite", "triton") if name in sys.modules])
"""


def write_vllm(path: Path, factory: str) -> None:
    """The modules of vLLM that the plugin imports."""
    package = path / "vllm" / "distributed" / "weight_transfer"
    package.mkdir(parents=True)
    for folder in (package, *package.parents[:2]):
        (folder / "__init__.py").write_text("")
    (package / "factory.py").write_text(factory)
    workers = path / "vllm" / "v1" / "worker"
    workers.mkdir(parents=True)
    for folder in (workers, workers.parent):
        (folder / "__init__.py").write_text("")
    (workers / "worker_base.py").write_text(WORKER)


@pytest.mark.parametrize("has_trainers", [True, False])
def test_the_plugin_registers_both_sides_and_loads_no_kernels(tmp_path: Path, has_trainers: bool) -> None:
    """Called twice it registers each side once, and a process with it has loaded neither torch nor a compiler.

    vLLM 0.25, which NeMo-RL has, knows no trainers, and must start all the same.
    """
    write_vllm(tmp_path, FACTORY + TRAINERS * has_trainers)
    env = {**os.environ, "PYTHONPATH": f"{SRC}:{tmp_path}"}
    env.pop("SPARSERL_VLLM_CPU", None)
    program = subprocess.run(
        [sys.executable, "-c", PROGRAM, entry_point("vllm.general_plugins")],
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert program.returncode == 0, program.stderr
    registered, methods, loaded = program.stdout.splitlines()
    assert methods == "['sparserl_end_update', 'sparserl_sums', 'sparserl_version']"
    engine = "{'sparserl': ('sparserl.integrations.vllm', 'SparserlEngine')}"
    trainer = " {'sparserl': ('sparserl.integrations.vllm_trainer', 'SparserlTrainer')}"
    assert registered == engine + trainer * has_trainers
    assert loaded == "[]"


def test_a_vllm_that_transfers_no_weights_starts(tmp_path: Path) -> None:
    """Versions before 0.16, which ROLL has, load plugins without catching what they raise."""
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text("")
    module, _, name = entry_point("vllm.general_plugins").partition(":")
    program = f"import {module} as plugin; plugin.{name}()"
    env = {**os.environ, "PYTHONPATH": f"{SRC}:{tmp_path}"}
    subprocess.run([sys.executable, "-c", program], env=env, check=True)


def test_an_unknown_word_for_cpus_is_refused(tmp_path: Path) -> None:
    """An engine does not start with packed weights where somebody wanted plain ones."""
    write_vllm(tmp_path, FACTORY)
    module, _, name = entry_point("vllm.general_plugins").partition(":")
    program = f"import {module} as plugin; plugin.{name}()"
    env = {**os.environ, "PYTHONPATH": f"{SRC}:{tmp_path}", "SPARSERL_VLLM_CPU": "unpacked"}
    ended = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, check=False)
    assert "SPARSERL_VLLM_CPU is 'unpacked'; set it to plain" in ended.stderr


def test_what_is_registered_exists() -> None:
    """Both classes are defined in the files that the plugin names."""
    folder = SRC / "sparserl" / "integrations"
    assert "class SparserlEngine(" in (folder / "vllm.py").read_text()
    assert "class SparserlTrainer(" in (folder / "vllm_trainer.py").read_text()
