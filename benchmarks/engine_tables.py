"""Tables of what `benchmarks.engine` measured: one row for a model and a mode, then one for every sync."""

from __future__ import annotations

from typing import Any

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
