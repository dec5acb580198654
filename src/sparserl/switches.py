"""Environment variables that take one of a few words."""

from __future__ import annotations

import os

from .errors import SparserlError


def switch(name: str, *words: str) -> str | None:
    """The word that an environment variable is set to, in lower case; None if it is not set, or empty.

    Raises:
        SparserlError: It is none of `words`.
    """
    word = os.environ.get(name, "").lower()
    if word and word not in words:
        known = " or ".join(words)
        raise SparserlError(f"{name} is {os.environ[name]!r}; set it to {known}, or do not set it")
    return word or None
