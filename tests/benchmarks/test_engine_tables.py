"""The figures of engines on the pages are those that were measured."""

from __future__ import annotations

import json
import re

import pytest

from benchmarks.engine_tables import HOME, PAGE, RESULTS, report, with_table


@pytest.fixture
def results():
    return json.loads(RESULTS.read_text())


def test_tables_are_those_of_the_results(results):
    """The pages have what the benchmark wrote."""
    assert with_table(PAGE.read_text(), results) == PAGE.read_text()
    assert report(results) == RESULTS.with_suffix(".md").read_text()


def test_other_results_change_the_page(results):
    """The table of vLLM's page is made from the results, and nothing else there is."""
    (follow,) = (one for one in results if (one["model"], one["mode"], one["way"]) == ("6.7B", "graphs", "follow"))
    longest = max(follow["syncs"], key=lambda sync: sync["pause_ms"])
    before = PAGE.read_text().splitlines()
    longest["pause_ms"] = 12345
    after = with_table(PAGE.read_text(), results).splitlines()
    changed = [line for line, old in zip(after, before, strict=True) if line != old]
    assert [line.partition(" |")[0] for line in changed] == ["| Llama 6.7 B, graphs"]
    assert "12345" in changed[0]


def test_the_first_claim(results):
    """README's first figures are those of the largest model."""
    of_model = [one for one in results if one["model"] == "6.7B"]
    pauses = [sync["pause_ms"] for one in of_model for sync in one.get("syncs", ())]
    claimed = re.search(
        r"pauses for (\d+) to (\d+) ms.*?takes (\d+) to (\d+) ms.*?and ([\d.]+) to\s+([\d.]+) s.*?"
        r"transfer (\d+) to (\d+) ms",
        (HOME / "README.md").read_text(),
        re.DOTALL,
    )
    dense = [sorted(one[key] for one in of_model if key in one) for key in ("memory_ms", "disk_ms", "send_ms")]
    expected = [min(pauses), max(pauses), *(value for pair in dense for value in pair)]
    rounded = [f"{value / 1000:.1f}" if value > 1000 else f"{value:.0f}" for value in expected]
    assert [*claimed.groups()] == rounded
