"""What tests of sessions share: the URL of a run in a folder."""

from __future__ import annotations

import logging

import pytest


@pytest.fixture
def url(tmp_path):
    return f"file://{tmp_path}/store"


@pytest.fixture
def log(caplog):
    """What sessions have logged, by level."""
    caplog.set_level(logging.INFO, logger="sparserl.session")

    def lines(level):
        return [record.getMessage() for record in caplog.records if record.levelname == level]

    return lines
