"""What tests of sessions share: the URL of a run in a folder."""

from __future__ import annotations

import pytest


@pytest.fixture
def url(tmp_path):
    return f"file://{tmp_path}/store"
