"""Hooks of mkdocs: they generate the command-line reference, take parts of the README, and lead links out of docs/."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the page of the command line."""
    files.append(File.generated(config, "reference/cli.md", content=command_line()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, **_: Any) -> str:
    """Put in parts of the README, and let links to files outside docs/ lead to the repository."""
    markdown = re.sub("<!-- README: (.*) -->", _part_of_readme, markdown)
    folder = (ROOT / "docs" / page.file.src_uri).parent

    def resolve(match: re.Match[str]) -> str:
        text, target = match.groups()
        name, hash, anchor = target.partition("#")
        path = (folder / name).resolve()
        if "://" in target or not path.exists() or (ROOT / "docs") in path.parents:
            return match[0]
        return f"[{text}]({config.repo_url}/blob/main/{path.relative_to(ROOT)}{hash}{anchor})"

    return re.sub(r"(?<!!)\[([^\]\n]+)\]\(([^)\s]+)\)", resolve, markdown)


def _part_of_readme(match: re.Match[str]) -> str:
    """A section of the README as part of a page in docs/; its beginning has no heading."""
    beginning, *sections = re.split("^## ", (ROOT / "README.md").read_text(), flags=re.MULTILINE)
    parts = {section.partition("\n")[0]: f"## {section}" for section in sections}
    parts["the beginning"] = beginning.partition("\n")[2]
    return re.sub(r"\]\((?!https?:|#)", "](../", parts[match[1]]).replace("](../docs/", "](")


def command_line() -> str:
    """All commands of `sparserl`, with arguments, options and help texts."""
    sys.path.insert(0, str(ROOT / "src"))
    import typer.main

    from sparserl.cli.app import app

    group = typer.main.get_command(app)
    lines = ["# Command line", "", _plain(group.help or ""), "", "`sparserl COMMAND --help` shows the same."]
    commands: dict[str, Any] = group.commands  # type: ignore[attr-defined]
    for name, command in commands.items():
        lines += ["", f"## sparserl {name}", "", _plain(command.help or ""), "", *_usage(name, command)]
    return "\n".join(lines) + "\n"


def _usage(name: str, command: Any) -> list[str]:
    arguments = [p for p in command.params if p.param_type_name == "argument"]
    options = [p for p in command.params if p.param_type_name == "option" and not p.hidden]
    words = ["sparserl", name, "[OPTIONS]", *(_placeholder(p) for p in arguments)]
    lines = ["```console", " ".join(words), "```", ""]
    if arguments:
        lines += ["| argument | |", "| --- | --- |"]
        lines += [f"| `{_placeholder(p)}` | {_cell(getattr(p, 'help', '') or '')} |" for p in arguments]
        lines += [""]
    lines += ["| option | | default |", "| --- | --- | --- |"]
    lines += [f"| {_flags(p)} | {_cell(p.help or '')} | {_default(p)} |" for p in options]
    return lines


def _placeholder(parameter: Any) -> str:
    name = parameter.metavar or parameter.name.upper()
    name = name + ("..." if parameter.nargs == -1 and not name.endswith("...") else "")
    return name if parameter.required else f"[{name}]"


def _flags(parameter: Any) -> str:
    names = ", ".join(f"`{flag}`" for flag in (*parameter.opts, *parameter.secondary_opts))
    if parameter.is_flag:
        return names
    return f"{names} `{parameter.metavar or parameter.name.upper()}`"


def _default(parameter: Any) -> str:
    value = parameter.default
    if parameter.is_flag or value is None or callable(value) or value in ((), [], ""):
        return ""
    return f"`{value}`" if not isinstance(value, (list, tuple)) else ", ".join(f"`{v}`" for v in value)


def _cell(text: str) -> str:
    return _plain(text).replace("\n", " ").replace("|", "\\|")


def _plain(text: str) -> str:
    """Help texts without rich markup."""
    return re.sub(r"\[/?[a-z ]+\]", "", text).strip()
