"""A server of a small run for each module of tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.transport.serve_program import serving
from tests.transport.served_run import fill


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """A server that is open to everyone, and its folder."""
    folder = tmp_path_factory.mktemp("site") / "store"
    folder.mkdir()
    store = fill(folder)
    with serving(folder) as (url, _):
        yield url, folder
    store.close()
