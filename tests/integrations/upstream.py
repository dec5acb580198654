"""Files of a framework with a diff applied, and functions of them, to be run without what the framework imports.

And the commands that the page of a framework shows.
"""

from __future__ import annotations

import ast
import re
import shlex
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PAGES = ROOT / "docs/how-to/integrations"
DIFFS = PAGES / "diffs"


def commands(page: str) -> dict[str, list[str]]:
    """The commands in the console block of a page, by their first words; $PWD is a clone of this repository."""
    (block,) = re.findall(r"^```console\n(.*?)^```", (PAGES / page).read_text(), re.MULTILINE | re.DOTALL)
    lines = block.replace("\\\n", " ").replace("$PWD", str(ROOT)).splitlines()
    found = [shlex.split(line, comments=True) for line in lines]
    return {words[0]: words for words in found}


def patched(diff: str, read: Any, folder: Path) -> Path:
    """The files that a diff changes, with its changes; `read` gives the text of a file by its path."""
    path = DIFFS / diff
    for name in re.findall(r"^--- a/(.+)$", path.read_text(), re.MULTILINE):
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(read(name))
    subprocess.run(["git", "init", "-q", "."], cwd=folder, check=True)  # else git looks for a repository above
    for arguments in (["--check"], []):
        command = ["git", "apply", *arguments, str(path)]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    return folder


def run_definitions(text: str, names: Iterable[str], namespace: Mapping[str, Any]) -> dict[str, Any]:
    """Functions, classes and methods ("Class.method") of a file, run in a namespace, with decorators that are in it."""
    tree = ast.parse(text)
    wanted = []
    for name in names:
        node: ast.AST = tree
        for part in name.split("."):
            node = next(n for n in ast.walk(node) if getattr(n, "name", None) == part)
        node.decorator_list = [d for d in node.decorator_list if ast.unparse(d).partition("(")[0] in namespace]
        wanted.append(node)
    module = ast.Module([ast.ImportFrom("__future__", [ast.alias("annotations")], 0), *wanted], [])
    scope = dict(namespace)
    exec(compile(ast.fix_missing_locations(module), "upstream", "exec"), scope)
    return scope
