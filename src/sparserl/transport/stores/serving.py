"""What a server needs that can be said without its packages, starlette and uvicorn."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from ...errors import StoreError

TOKEN = re.compile(r"[!-~]+")
_PACKAGES = ("starlette", "uvicorn", "h11")


@contextmanager
def needs_serving_packages() -> Iterator[None]:
    """Goes around an import of the server; says what to install where a package is missing."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in _PACKAGES:
            raise
        raise StoreError("serving needs starlette and uvicorn: pip install 'sparserl[serve]'") from error
