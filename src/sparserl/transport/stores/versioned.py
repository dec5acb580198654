"""A version of the run in a store, as people write it: the URL, `@`, and the version."""

from __future__ import annotations

from ...files import path_of


def split_version(text: str) -> tuple[str, int | None]:
    """A store's URL, and the version behind it, as in s3://bucket/run@100; None where there is none.

    A folder whose own name ends like that is taken as it is.
    """
    url, _, version = text.rpartition("@")
    if not url or not version.isascii() or not version.isdigit() or path_of(text).exists():
        return text, None
    return url, int(version)
