"""A griffe extension: doctests in the text of a docstring become code blocks of the API reference."""

from __future__ import annotations

import re
from typing import Any

import griffe


class DoctestBlocks(griffe.Extension):
    """Put a fence around every doctest, so that Markdown does not take it for a quotation."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Go through all objects of a package after it was read."""
        _fence_members(pkg)


def _fence_members(obj: griffe.Object) -> None:
    if obj.docstring is not None:
        obj.docstring.value = fenced(obj.docstring.value)
    for member in obj.members.values():
        if not member.is_alias:
            _fence_members(member)  # type: ignore[arg-type]


def fenced(text: str) -> str:
    """Put fences around each doctest, which ends at the next empty line."""
    return re.sub(r"(?m)^([ \t]*)(>>> .*(?:\n(?!\s*\n)(?!\s*$).*)*)", r"\1```pycon\n\1\2\n\1```", text)
