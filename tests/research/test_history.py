"""The experiment with history still runs: it checks itself against real patches, and decoders against the changes."""

from __future__ import annotations

from pathlib import Path

import pytest

from research import history

TRACE = Path(__file__).parents[1] / "data" / "trace"


@pytest.mark.long
def test_history_takes_fewer_bits() -> None:
    """Plain classes come out as the real patches have them, to the byte; with history it is less."""
    saved = history.savings(TRACE)
    took = history.times(TRACE, megabytes=4, repeats=1)
    by = {(s.trace, s.way): s for s in saved}
    for trace in {s.trace for s in saved}:
        assert by[trace, history.PLAIN.name].saved == 0
        assert by[trace, history.BOTH.name].entropy < 0.97 * by[trace, history.PLAIN.name].entropy
        assert 0 < by[trace, history.BOTH.name].saved < 0.2  # of so few changes, tables take most of it
    assert {t.trace for t in took} == {s.trace for s in saved}
    assert "not worth it" in history.render(saved, took)
