"""What `make soak`, `make load` and `make collective` found last, as sections of docs/results.md."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def tables(home: Path) -> list[str]:
    """Lines of Markdown; none for what was never run."""
    out: list[str] = []
    if (home / "soak.jsonl").exists():
        out += _kills([json.loads(line) for line in (home / "soak.jsonl").read_text().splitlines()])
    if (home / "load.json").exists():
        out += _load(json.loads((home / "load.json").read_text()))
    if (home / "collective.json").exists():
        out += _collective(json.loads((home / "collective.json").read_text()))
    return out


def _kills(runs: list[dict[str, Any]]) -> list[str]:
    columns = ("store", "kills", "published", "committed", "seconds", "faults")
    return [
        "## Kills",
        "",
        "`make soak`: a publisher and two subscribers, killed with SIGKILL before drawn calls of their own and from",
        "outside at drawn moments, and started again. In the end all hold the same bits, every version that was ever",
        "reported was exact, and the store holds what its head needs and nothing else.",
        "",
        "| store | kills | versions published | commits | seconds | faults |",
        "| --- " * len(columns) + "|",
        *("| " + " | ".join(str(run[name]) for name in columns) + " |" for run in runs),
        "",
    ]


def _load(r: dict[str, Any]) -> list[str]:
    late, pause, size = r["publish to commit, s"], r["pause, ms"], r["bytes per subscriber"]
    crowd = f"{r['subscribers']} subscribers in processes of their own over one folder, {r['versions']} versions"
    change = f"{r['elements']:,} bf16 elements, of which {r['density']:.0%} change"
    moves = f"{r['left']} left and {r['joined again']} joined again"
    return [
        "## Many subscribers",
        "",
        f"`{r['command']}`:",
        f"one publisher, {crowd}",
        f"of {change}; {moves} meanwhile. All of it on one machine, whose cores",
        "they share: each commit waits for those of the others.",
        "",
        "| what | figure |",
        "| --- | --- |",
        f"| commits | {r['commits']:,} |",
        f"| of these not exact | {r['wrong']} |",
        f"| from publish to commit, p50 / p90 / p99 | {late['p50']:.2f} / {late['p90']:.2f} / {late['p99']:.2f} s |",
        f"| pause, p50 / p99 | {pause['p50']:.1f} / {pause['p99']:.1f} ms |",
        f"| bytes per subscriber, mean / most | {size['mean'] / 1e6:.1f} / {size['max'] / 1e6:.1f} MB |",
        "",
    ]


def _collective(r: dict[str, Any]) -> list[str]:
    links = r["links"]
    rows = []
    for way in links[0]["ways"]:
        cells = []
        for link in links:
            dense, found = link["ways"]["dense, in buckets"]["seconds"], link["ways"][way]
            ratio = f" ({dense / found['seconds']:.1f}×)" if found["bytes"] > 1 << 10 else ""
            cells.append(f"{found['seconds']:.3f} s{ratio}")
        any_link = links[0]["ways"][way]
        size, pause = f"{any_link['bytes']:,.0f}", f"{1e3 * any_link['pause']:,.1f} ms"
        rows.append(f"| {way} | {any_link['messages']:.0f} | {size} | " + " | ".join(cells) + f" | {pause} |")
    names = [f"{link['link']} ({link['plain'] / 1e6:,.0f} measured)" for link in links]
    weights = f"{r['megabytes']} MB of bf16 in {links[0]['tensors']} tensors, {r['density']:.1%} changed"
    return [
        "## By broadcast",
        "",
        f"`python -m benchmarks.collective`: {weights}, from one process to",
        "another in its own network namespace, over a link held to a rate. Time of a whole sync, from finding changes",
        "to the baseline; in brackets, against a dense broadcast in buckets. The pause is the receiver's, at the",
        "slowest link. [collective.md](collective.md) has all of it, and how far to trust it.",
        "",
        "| way | messages | bytes | " + " | ".join(names) + " | pause |",
        "| --- | ---: | ---: |" + " ---: |" * len(names) + " ---: |",
        *rows,
        "",
    ]
