"""Tables of what `benchmarks.engine` measured, for research/results/engine.md and for vLLM's page in docs/how-to.

python -m benchmarks.engine_tables      # writes both again, from engine.json
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

HOME = Path(__file__).resolve().parents[1]
RESULTS = HOME / "research" / "results" / "engine.json"
PAGE = HOME / "docs" / "how-to" / "integrations" / "vllm.md"
NAMES = {"0.14B": "Llama 0.14 B", "1B": "Llama 1 B", "6.7B": "Llama 6.7 B", "moe": "Qwen3-MoE 0.5 B"}  # on the page
HEADING = """# sparserl in vLLM

One GPU, one rank, random bf16 weights of which 0.1% to 1.2% change; `python -m benchmarks.engine`. `memory`, `disk` and
`ipc` are vLLM's own ways: a reload of all weights from the memory of its process or from disk, and its backend for
processes on one host. Milliseconds, but for the starts.

"""
SYNCS = """
## Sync by sync

Milliseconds, from the first sync to the last. `staged`: from the end of publish until the engine may commit.

"""
_STAGES = ("publish", "staged_after", "pause")


def report(results: list[dict[str, Any]]) -> str:
    """The page."""
    return HEADING + table(results) + SYNCS + sync_table(results)


def case_of(result: dict[str, Any]) -> tuple[str, str, str]:
    """Which model, mode and way a result is of."""
    return result["model"], result["mode"], result["way"]


def table(results: list[dict[str, Any]]) -> str:
    """The results of every model and mode, one row each."""
    head = (
        "| model | start, s | | publish | staged after | pause | two behind | audit | memory | disk | `ipc` | bits |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---|",
        "| | alone | follows | ms | ms | ms | ms | ms | ms | ms | ms | |",
    )
    rows: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}
    for result in results:
        rows.setdefault((result["model"], result["mode"]), {})[result["way"]] = result
    return "\n".join([*head, *(_row(*case, ways) for case, ways in rows.items())]) + "\n"


def sync_table(results: list[dict[str, Any]]) -> str:
    """Every sync of the engines that followed."""
    followed = [result for result in results if result.get("syncs")]
    syncs = max((len(result["syncs"]) for result in followed), default=0)
    head = (
        f"| model | stage | {' | '.join(map(str, range(1, syncs + 1)))} |",
        f"|---|---|{'---:|' * syncs}",
    )
    rows = [
        f"| {one['model']}, {one['mode']} | {stage.split('_')[0]} | "
        f"{' | '.join(_number(sync[f'{stage}_ms']) for sync in one['syncs'])} |"
        for one in followed
        for stage in _STAGES
    ]
    return "\n".join([*head, *rows]) + "\n"


def with_table(page: str, results: list[dict[str, Any]]) -> str:
    """The page of vLLM with the table of these results in place of the one that it has."""
    begin = page.index("| | publish |")
    return page[:begin] + "\n".join(_page_table(results)) + page[page.index("\n\n", begin) :]


def _page_table(results: list[dict[str, Any]]) -> list[str]:
    """A row for each model and mode: how long an engine waits, and how long it waits for vLLM's own ways."""
    by_case = {case_of(result): result for result in results}
    rows = []
    for model, name in NAMES.items():
        for mode in ("eager", "graphs"):
            alone, follow, ipc = (by_case.get((model, mode, way), {}) for way in ("alone", "follow", "ipc"))
            publish, staged, pause = (_range(follow.get("syncs", []), f"{stage}_ms") for stage in _STAGES)
            dense = (alone.get("memory_ms"), alone.get("disk_ms"), ipc.get("send_ms"))
            cells = [f"{name}, {mode}", publish, staged, f"**{pause}**", *map(_number, dense)]
            rows.append(f"| {' | '.join(cells)} |")
    return [
        "| | publish | then staged after | pause | memory | disk | `ipc` |",
        "|---|---:|---:|---:|---:|---:|---:|",
        *rows,
    ]


def _row(model: str, mode: str, ways: dict[str, dict[str, Any]]) -> str:
    follow = ways.get("follow", {})
    syncs = follow.get("syncs", [])
    alone = ways.get("alone", {})
    cells = [
        f"{model}, {mode}",
        _number(alone.get("start_s")),
        _number(follow.get("start_s")),
        *(_range(syncs, f"{stage}_ms") for stage in _STAGES),
        _number(follow.get("late_ms")),
        _range(syncs, "audit_ms"),
        *(_number(alone.get(key)) for key in ("memory_ms", "disk_ms")),
        _number(ways.get("ipc", {}).get("send_ms")),
        _verdict(follow),
    ]
    return f"| {' | '.join(cells)} |"


def _verdict(follow: dict[str, Any]) -> str:
    if not follow:
        return ""
    if "failed" in follow:
        return "**failed**"
    return "equal" if follow["same_bits"] and follow["same_generations"] else "**differ**"


def _range(syncs: list[dict[str, Any]], key: str) -> str:
    if not syncs:
        return ""
    values = [sync[key] for sync in syncs]
    return f"{_number(min(values))} to {_number(max(values))}"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}" if value < 20 else f"{value:.0f}"


def main() -> None:
    """Write both pages."""
    results = json.loads(RESULTS.read_text())
    RESULTS.with_suffix(".md").write_text(report(results))
    PAGE.write_text(with_table(PAGE.read_text(), results))


if __name__ == "__main__":
    main()
