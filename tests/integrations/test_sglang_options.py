"""Options of the client for SGLang are checked where they are given."""

from __future__ import annotations

import pytest

from sparserl.errors import SessionError
from sparserl.integrations import sglang as ours


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"mode": "inplace"}, "mode is 'inplace'; it must be one of 'retract', 'abort', 'in_place'"),
        ({"timeout": float("nan")}, "timeout is nan; it must be a positive number of seconds"),
        ({"url": "localhost:30000"}, "url is 'localhost:30000'; it must be the address of a server"),
    ],
)
def test_options_of_clients(options, text):
    """What cannot be one is refused by name; a mode that there is not would have flushed the cache."""
    with pytest.raises(SessionError, match=text):
        ours.Client(**{"url": "http://localhost:30000"} | options)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"ranks": 0}, "ranks is 0; it must be an integer, 1 or more"),
        ({"version": "7"}, "version is '7'; it must be an integer, 0 or more"),
        ({"ahead": "no"}, "ahead is 'no'; it must be True or False"),
        ({"flush_cache": None}, "flush_cache is None; it must be True or False"),
    ],
)
def test_options_of_requests(options, text):
    """They are refused by name, before anything is sent."""
    with pytest.raises(SessionError, match=text):
        ours.request("runs/7", **options)
