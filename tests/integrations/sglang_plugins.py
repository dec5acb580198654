"""How SGLang comes to know the loader: its own loader of plugins and its own step of options, out of its wheel.

The steps import most of SGLang, and SGLang a great deal more. So the functions that matter here are taken out of their
files and run as they are, in a process that finds sparserl by what pip writes of its entry points.
"""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import sparserl
from tests.integrations.wheels import Wheel, definition, entry_point

GROUP = "sglang.srt.plugins"
ARGUMENTS = "sglang/srt/arg_groups"
RESOLUTION_HOOKS = f"{ARGUMENTS}/resolution_hooks.py"
WHOLE = (  # files that import nothing but the standard library and each other
    "sglang/srt/environ.py",
    "sglang/srt/plugins/__init__.py",
    "sglang/srt/plugins/hook_registry.py",
    RESOLUTION_HOOKS,
)

OVERRIDES = """
from __future__ import annotations

def is_record(_):
    return False

def get_context():
    raise ValueError("nothing is published yet")
"""

STEP = """
from __future__ import annotations
from sglang.srt.arg_groups.overrides import declare_resolution, resolving_view

run_post_process_pass = _gguf_quantization = lambda *_: None
check_gguf_file = is_mistral_native_format = is_runai_obj_uri = is_remote_url = lambda _: False
"""

PROGRAM = """
import json, sys
from types import SimpleNamespace
from sglang.srt.plugins import load_plugins

load_plugins()
loaded = [name for name in ("torch", "numba", "sparserl.integrations.sglang") if name in sys.modules]

from sglang.srt.arg_groups.model_path_hook import handle_load_format
from sglang.srt.arg_groups.overrides import resolving_view
from sglang.srt.arg_groups.resolution_hooks import run_hook

class Options(SimpleNamespace):
    load_format, startup_weight_load_mode, weight_cache_mode = "auto", "serial", "off"

    def __getattr__(self, name):
        return None

decided = []
for given in json.loads(sys.argv[1]):
    options = Options(**given)
    run_hook(handle_load_format, options)
    decided.append(resolving_view(options).custom_weight_loader)
print(json.dumps([loaded, decided]))
"""


def weight_loaders(sglang: Wheel, *given: dict, plugin: bool = True) -> tuple[list[str], list[list[str]]]:
    """What the plugin imports, and the loaders that a server has with each of some options; also without the plugin."""
    with tempfile.TemporaryDirectory() as folder:
        _unpack(sglang, Path(folder))
        if plugin:
            _install(Path(folder))
        path = os.pathsep.join((folder, str(Path(sparserl.__file__).parents[1])))
        program = subprocess.run(
            [sys.executable, "-S", "-c", PROGRAM, json.dumps(given)],  # -S: with no other packages, installed or not
            env={**os.environ, "PYTHONPATH": path},
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
    assert program.returncode == 0, program.stderr
    loaded, decided = json.loads(program.stdout)
    return loaded, decided


def _unpack(sglang: Wheel, folder: Path) -> None:
    for name in WHOLE:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(sglang.text(name))
    views = sglang.tree(f"{ARGUMENTS}/model_override_base.py")
    overrides = [
        definition(sglang.tree(f"{ARGUMENTS}/overrides.py"), "declare_resolution"),
        definition(views, "ResolvingConfig"),
        definition(views, "resolving_view"),
    ]
    step = definition(sglang.tree(f"{ARGUMENTS}/model_path_hook.py"), "handle_load_format")
    for name, head, parts in (("overrides", OVERRIDES, overrides), ("model_path_hook", STEP, [step])):
        (folder / ARGUMENTS / f"{name}.py").write_text(head + "\n\n".join(ast.unparse(part) for part in parts))


def _install(folder: Path) -> None:
    """What pip writes of a package's entry points."""
    info = folder / f"sparserl-{sparserl.__version__}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: sparserl\nVersion: {sparserl.__version__}\n")
    (info / "entry_points.txt").write_text(f"[{GROUP}]\nsparserl = {entry_point(GROUP)}\n")
