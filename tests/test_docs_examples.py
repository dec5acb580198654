"""Programs in the documentation run, its code uses names that exist, its links lead somewhere, and it stays short."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import sparserl

ROOT = Path(__file__).resolve().parents[1]
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT / "src"), "HF_HUB_OFFLINE": "1"}
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
NOTES = [
    *PAGES,
    ROOT / "tests" / "golden" / "example.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    *sorted((ROOT / "research").rglob("*.md")),
]
GENERATED = {"docs/reference/cli.md"}
CLASSES = ("Publisher", "Subscriber", "GroupPublisher", "GroupSubscriber", "Relay")


def blocks(page: Path) -> list[str]:
    """The Python code of a page, block by block."""
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


def names_of(paths: list[Path]) -> list[str]:
    return [str(path.relative_to(ROOT)) for path in paths]


def run(*command: str, folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def words(path: Path) -> int:
    return len(path.read_text().split())


@pytest.mark.long
@pytest.mark.parametrize("page", ["docs/tutorial.md", "docs/how-to/checkpoints.md"])
def test_a_page_is_a_program(page: str, tmp_path: Path) -> None:
    """All blocks of the page, one after the other, are a program that checks what it shows."""
    pytest.importorskip("torch")
    (tmp_path / "example.py").write_text("\n\n".join(blocks(ROOT / page)))
    run("example.py", folder=tmp_path)


def test_the_first_example_of_the_readme(tmp_path: Path) -> None:
    """It runs as it stands, with NumPy alone."""
    (tmp_path / "example.py").write_text(blocks(ROOT / "README.md")[0])
    run("example.py", folder=tmp_path)


@pytest.mark.long
def test_the_example_of_two_runs_of_one_trainer(tmp_path: Path) -> None:
    """It runs as it stands, and writes both runs."""
    pytest.importorskip("torch")
    page = ROOT / "docs" / "how-to" / "lora-and-quantized.md"
    (code,) = [block for block in blocks(page) if "also=" in block]
    (tmp_path / "example.py").write_text(code)
    run("example.py", folder=tmp_path)
    assert {path.name for path in (tmp_path / "runs").iterdir()} == {"bf16", "fp8"}


@pytest.mark.long
@pytest.mark.parametrize("package", ["transformers", "peft", "ray"])
def test_examples_of_integrations(package: str, tmp_path: Path) -> None:
    """The longest block of a page is a program, which checks what it shows."""
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    page = ROOT / "docs" / "how-to" / "integrations" / f"{package}.md"
    (tmp_path / "example.py").write_text(max(blocks(page), key=len))
    run("example.py", folder=tmp_path)


@pytest.mark.long
def test_examples_of_suites(tmp_path: Path) -> None:
    """A store, a source and a target of one's own pass the suites."""
    shutil.copy(ROOT / "examples" / "sqlite_store.py", tmp_path)
    (tmp_path / "test_mine.py").write_text("\n\n".join(blocks(ROOT / "docs" / "how-to" / "testing.md")))
    run("-m", "pytest", "-q", "-p", "no:cacheprovider", "test_mine.py", folder=tmp_path)


@pytest.mark.long
def test_a_trainer_that_publishes_and_a_rollout_that_follows(tmp_path: Path) -> None:
    """The two programs of the page, in processes of their own; the trainer shows what it has published."""
    pytest.importorskip("accelerate")
    programs = blocks(ROOT / "docs" / "how-to" / "integrations" / "trl.md")
    for name, mark in (("trainer", "PublishCallback("), ("rollout", "first.follow(")):
        (code,) = [block for block in programs if mark in block]
        (tmp_path / f"{name}.py").write_text(code)
    said = {"stdout": subprocess.PIPE, "cwd": tmp_path, "env": ENVIRONMENT, "text": True}
    with subprocess.Popen([sys.executable, "-u", "rollout.py", "store"], **said) as rollout:  # type: ignore[call-overload]
        try:
            trained = subprocess.run([sys.executable, "trainer.py", "store"], **said, check=True)  # type: ignore[call-overload]
            assert any(line.startswith("version 8: ") for line in rollout.stdout)
        finally:
            rollout.kill()
    assert "'sparserl/version': 8" in trained.stdout
    assert "'sparserl/bytes': " in trained.stdout


def test_the_reference_has_what_sessions_inherit() -> None:
    """The site shows what a class has itself; of what it inherits, the page lists all that is for callers."""
    page = (ROOT / "docs" / "reference" / "api" / "sessions.md").read_text()
    listed = dict(
        re.findall(r"^::: sparserl\.(\w+)\n    options:\n      inherited_members: \[(.*)\]$", page, re.MULTILINE)
    )
    for name in CLASSES:
        own = getattr(sparserl, name)
        shown = {
            *vars(own),
            *listed.get(name, "").split(", "),
            "prepare",
            "with_fresh",
        }  # what sessions call themselves
        assert not {member for member in dir(own) if not member.startswith("_")} - shown, name


def chains(tree: ast.AST) -> Iterator[list[str]]:
    """Dotted names that begin with `sparserl`, such as ["sparserl", "sources", "track"]."""
    for node in ast.walk(tree):
        parts: list[str] = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        if parts and isinstance(node, ast.Name) and node.id == "sparserl":
            yield ["sparserl", *reversed(parts)]


def resolve(parts: list[str]) -> Any:
    """The object that a dotted name is; modules are imported on the way."""
    value: Any = importlib.import_module(parts[0])
    for depth, name in enumerate(parts[1:], 2):
        if not hasattr(value, name):
            importlib.import_module(".".join(parts[:depth]))
        value = getattr(value, name)
    return value


def imported(tree: ast.AST) -> Iterator[list[str]]:
    """Names that are imported from sparserl; integrations need their frameworks, and are left out."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "sparserl":
            module = str(node.module)
            if not module.startswith("sparserl.integrations"):
                yield from ([*module.split("."), alias.name] for alias in node.names)


@pytest.mark.parametrize("page", names_of([page for page in PAGES if blocks(page)]))
def test_code_uses_names_that_exist(page: str) -> None:
    """Blocks are Python, their names of sparserl exist, and sessions get options that they have."""
    for block in blocks(ROOT / page):
        tree = ast.parse(block)
        for parts in (*chains(tree), *imported(tree)):
            resolve(parts)
        for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
            name = getattr(call.func, "attr", getattr(call.func, "id", None))
            if name in CLASSES:
                options = inspect.signature(getattr(sparserl, name)).parameters
                unknown = {keyword.arg for keyword in call.keywords if keyword.arg} - options.keys()
                assert not unknown, f"{name} has no {unknown}"


def commands(page: Path) -> list[list[str]]:
    """The words of every `sparserl` command in the console blocks of a page."""
    shown = "\n".join(re.findall(r"^```console\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL))
    joined = shown.replace("\\\n", " ")
    found = re.findall(r"^(?:\$ )?sparserl (.*)$", joined, re.MULTILINE)
    return [shlex.split(command.split(" | ")[0].split(" > ")[0], comments=True) for command in found]


@pytest.mark.parametrize("page", names_of([page for page in PAGES if commands(page)]))
def test_commands_have_the_options_that_pages_show(page: str) -> None:
    """Every command exists, and has every option that is given to it."""
    import typer.main

    from sparserl.cli.app import app

    known: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    for name, *words in commands(ROOT / page):
        options = {flag for parameter in known[name].params for flag in parameter.opts}
        unknown = {word for word in words if word.startswith("-") and word != "-"} - options
        assert not unknown, f"sparserl {name} has no {unknown}"


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and mkdocs make them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", names_of(NOTES))
def test_links_lead_somewhere(page: str) -> None:
    """Files that links name exist, and pages have the headings that links name."""
    path = ROOT / page
    for target, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]*))?\)", path.read_text()):
        if "://" in target:
            continue
        linked = (path.parent / target).resolve() if target else path
        assert linked.exists() or str(linked.relative_to(ROOT)) in GENERATED, target
        if anchor:
            assert anchor in anchors(linked), f"{target}#{anchor}"


def test_pages_are_short() -> None:
    """People read the README, the architecture and the glossary to the end."""
    assert words(ROOT / "README.md") < 900
    assert words(ROOT / "docs" / "explanation" / "architecture.md") < 1200
    glossary = (ROOT / "docs" / "explanation" / "concepts.md").read_text().split("## Glossary")[1]
    assert len(re.findall(r"^\| \w", glossary, re.MULTILINE)) - 1 <= 30
    assert sum(map(words, (ROOT / "docs").rglob("*.md"))) <= 25_000
