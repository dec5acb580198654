"""What `make soak`, `make load`, `make collective` and so on found last, as sections of research/results/results.md."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean, median
from typing import Any

from research.study import page as study_page


def tables(home: Path) -> list[str]:
    """Lines of Markdown; none for what was never run."""
    out: list[str] = []
    if (home / "soak.jsonl").exists():
        out += _kills([json.loads(line) for line in (home / "soak.jsonl").read_text().splitlines()])
    if (home / "load.json").exists():
        out += _load(json.loads((home / "load.json").read_text()))
    if (home / "collective.json").exists():
        out += _collective(json.loads((home / "collective.json").read_text()))
    if (home / "slow_link.json").exists():
        out += ["## RL over a slow link", "", *slow_link(json.loads((home / "slow_link.json").read_text())), ""]
    if (home / "gpu.json").exists():
        out += _gpu(json.loads((home / "gpu.json").read_text()))
    if (home / "study.json").exists():
        out += study_page.section(json.loads((home / "study.json").read_text()))
    return out


def _kills(runs: list[dict[str, Any]]) -> list[str]:
    columns = ("kills", "published", "committed", "seconds", "faults")
    killed = ("publisher, subscribers", "two ranks that publish")
    return [
        "## Kills",
        "",
        "`make soak`: a publisher and two subscribers, or two ranks that publish together, killed with SIGKILL before",
        "drawn calls of their own and from outside at drawn moments, and started again. In the end all hold the",
        "same bits, every version that was ever reported was exact, and the store holds what its head needs alone.",
        "",
        "| store | killed | kills | versions published | commits | seconds | faults |",
        "| --- " * (2 + len(columns)) + "|",
        *(
            f"| {run['store']} | {killed['writers' in run]} | {' | '.join(f'{run[name]:,}' for name in columns)} |"
            for run in runs
        ),
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


def slow_link(r: dict[str, Any]) -> list[str]:
    """What a sync took in every format, and the whole run."""
    dense, rows = r["runs"][0]["rows"][1]["dense"], []
    for run in r["runs"]:
        first, *syncs = run["rows"]
        size, took = fmean(s["bytes"] for s in syncs), sorted(s["sync"] for s in syncs)
        stages = [f"{median(s[name] for s in syncs):.2f} s" for name in ("encode", "transfer", "apply")]
        whole = f"{median(took):.2f} s ({took[0]:.2f} to {took[-1]:.2f})"
        ends = [f"{run['wall']:.1f} s", f"{sum(took) / run['wall']:.0%}", f"{first['sync']:.1f} s"]
        cells = [run["way"], f"{size:,.0f}", f"{dense / size:.1f}×", *stages, whole, *ends]
        rows.append(f"| {' | '.join(cells)} |")
    count = len(r["runs"][0]["rows"]) - 1
    loads = [load for run in r["runs"] for load in run["load"]]
    others = [run["wall"] - sum(s["sync"] for s in run["rows"][1:]) for run in r["runs"]]
    return [
        f"`make slow-link`: {r['model']}, {r['options']}, {count} syncs in turn with one worker. All",
        f"weights go over a link of {r['link']}; dense they are {dense:,} bytes. A sync lasts from the",
        "beginning of the publish until the worker holds the version; of it, transfer is what is neither encoding nor",
        f"applying. Times are medians of {count} syncs, bytes are means; the first copy, of all weights, stands apart.",
        f"The wall time is that of the {count} syncs; for a part of it the rollout waits for weights. Rollouts,",
        f"learning and hashing, the same work in each run, took {min(others):.1f} to {max(others):.1f} s of it: other",
        f"programs ran on the machine, {r['machine']}, at load averages of {min(loads):.1f} to {max(loads):.1f}.",
        "Tokens, rewards and the weights of every version were the same in all runs, bit for bit.",
        "",
        "| format | bytes a sync | less by | encode | transfer | apply | sync | wall time | waiting | first copy |",
        "| --- |" + " ---: |" * 9,
        *rows,
    ]


_TARGETS = {  # of the time of a floor, or in milliseconds
    "diff + raw": "1.5×",
    "diff + ulp": "2×",
    "diff + ctx": "4×",
    "raw: check + apply": "2 ms",
    "ctx: decode + apply": "4×",
}


def _gpu(r: dict[str, Any]) -> list[str]:
    main, traces = r["kernels"], r.get("traces", {})
    floor = main["ms"]

    def cell(run: dict[str, Any], name: str) -> str:
        if name not in run["ms"]:
            return ""
        ms, ratio = run["ms"][name], run["times floor"].get(name)
        return f"{ms:.2f} ms" if ratio is None else f"{ms:.2f} ms ({ratio:.2f}×)"

    runs = [main, *traces.values()]
    names = [name for name in main["ms"] if name not in ("read one", "read both", "copy")]
    heads = [f"synthetic, {main['density']:.2%}", *(f"{run}, {t['density']:.2%}" for run, t in traces.items())]
    tracking, training, sync = main["tracking ms"], r["training"], r["7b"]
    plain, marked = tracking.values()
    read, both, copy = (f"{floor[name]:.2f} ms" for name in ("read one", "read both", "copy"))
    others = {
        f"cast, compare, mark, copy, over cast and copy ({plain:.2f} ms)": (
            f"{marked:.2f} ms ({main['tracking ratio']:.2f}×)",
            "1.2×",
        ),
        f"a training step with marks, over one without ({training['step ms']['off']:.1f} ms)": (
            f"{training['step ms']['on']:.1f} ms ({training['step ratio']:.3f}×)",
            "",
        ),
        f"kernels and copies of a sync of {sync['parameters'] / 1e9:.1f}B parameters": (
            f"{sync['ms']['total']:.1f} ms",
            "60 ms",
        ),
    }
    if (row := r.get("library", {}).get("ctx")) is not None:
        times = f"{row['diff ms']:.0f} + {row['apply ms']:.0f} ms"
        others["the same through `sparserl.diff` and `apply`, in `ctx`"] = times, ""
    return [
        "## On a GPU",
        "",
        f"`python -m benchmarks.gpu` on one {r['device']}: {main['GiB']:g} GiB of bf16, synthetic and the traces tiled",
        f"to that size. Floors of the same run: reading one copy {read}, both {both}, copying one {copy}. In brackets,",
        "times the floor: both for encoding, one for decoding. [gpu.md](gpu.md) says how far to trust it.",
        "",
        "| what | " + " | ".join(heads) + " | target |",
        "| --- " * (len(runs) + 2) + "|",
        *(f"| {n} | " + " | ".join(cell(run, n) for run in runs) + f" | {_TARGETS.get(n, '')} |" for n in names),
        *(f"| {n} | {figure}" + " |" * len(traces) + f" | {target} |" for n, (figure, target) in others.items()),
        "",
    ]
