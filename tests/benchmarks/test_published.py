"""Every figure of README and of the page of results is one that was recorded, or one that another work published."""

from __future__ import annotations

import json
import re
from statistics import median
from typing import Any

import pytest

from benchmarks.__main__ import _HOME as HOME
from benchmarks.__main__ import density_of, page
from research.study.page import families

ROOT = HOME.parents[1]
FORMATS = {  # as pages call them: as the benchmark does
    "sparserl `ctx`": "ctx",
    "sparserl `ulp`": "ulp",
    "sparserl `gap`": "gap",
    "NeMo-RL": "NeMo-RL",
    "slime": "slime",
    "PULSE": "PULSE",
    "SparseRL-Sync": "SparseRL-Sync compressed",
}
OTHERS = (  # what other works report of themselves
    "NeMo-DCR (arXiv 2610.08430) reports 12.56 and 12.10",
    "0.6% to 1.2% (NeMo-DCR, 0.5 to 30 B)",
    "0.60% to 0.70% (SparseRL-Sync, arXiv 2605.07330, Qwen3-30B-A3B)",
    "2.1% to 2.6% (verl, 72 B), 4.5% (vime, 30 B)",
    "0.04% to 0.2% (SparseRL-Sync, 284 B)",
    "others see up to 4.5% at 30 B",
    "14 times in PULSE (arXiv 2602.03839, 7 B)",
)
NAMES = r"SmolLM2-135M|135M|bf16|fp16|fp32|H200|arXiv \d{4}\.\d{5}|1e-6|2e-5"  # that have digits, and are no figures


def recorded(name: str) -> Any:
    return json.loads((HOME / f"{name}.json").read_text())


def bits_of(name: str) -> dict[str, list[str]]:
    """Bits per changed element of a format: of the runs, and where more changes."""
    results = recorded("results")
    return {
        key: [f"{row['bits_per_changed']:.1f}" for row in results[key] if row["format"] == name]
        for key in ("sizes", "denser")
    }


def densities(key: str) -> list[str]:
    rows = recorded("results")[key]
    return [f"{density_of(rows, name):.2%}" for name in dict.fromkeys(row["trace"] for row in rows)]


def share(value: float) -> str:
    return f"{value:.2g}%" if value < 1 else f"{value:.1f}%"


def of_study() -> dict[str, Any]:
    """Runs of the study from both starts, by name."""
    found = families(recorded("study"))
    return {"bf16": found["135m"], "fp32": found["135m-from-fp32"]}


def study_sentences() -> list[str]:
    starts = [of_study()[name] for name in ("bf16", "fp32")]
    slow = [100 * start["grpo-1e-06"].density("bf16") for start in starts]
    fast = [100 * start["grpo-2e-05"].density("bf16") for start in starts]
    far = [100 * start["grpo-1e-06"].apart()[32] for start in starts]
    chains = [start["grpo-1e-06"].chained(32)[0] for start in starts]
    halves = [start["grpo-1e-06"].density("fp16") / start["grpo-1e-06"].density("bf16") for start in starts]
    assert [round(ratio) for ratio in sorted(halves)] == [6, 8]  # "six to eight times"
    assert min(start["grpo-1e-06"].density("fp32") for start in starts) > 0.95  # "nearly all"
    drifted = {profile: starts[1]["grpo-1e-06"].bits("bf16", profile) for profile in ("ctx", "ulp")}
    return [
        f"{share(slow[0])} of the bf16 elements change",
        f"{share(slow[1])} where they began anywhere between",
        f"At 2e-5, {share(fast[0])} and {share(fast[1])} change",
        f"Versions that are 32 steps apart differ in {share(far[0])} and {share(far[1])}",
        f"over 32 steps, 32 patches have {chains[0]:.1f} and {chains[1]:.1f} times",
        f"`ctx` takes {drifted['ctx']:.1f} bits and `ulp` {drifted['ulp']:.1f}",
    ]


def link_sentences() -> list[str]:
    runs = recorded("slow_link")
    assert runs["link"].startswith("100 Mbit/s")
    took = {run["way"]: median(row["sync"] for row in run["rows"][1:]) for run in runs["runs"]}
    ways = ("slime", "SparseRL-Sync raw", "PULSE", "SparseRL-Sync compressed", "NeMo-RL")
    http = took["sparserl over HTTP"]
    assert sum(took[way] < http for way in ways) == 3  # "behind three of them"
    assert took["sparserl over TCP"] < min(took[way] for way in ways)
    peers = ", ".join(f"{way} {took[way]:.2f}" for way in sorted(ways, key=took.__getitem__, reverse=True))
    broadcast = recorded("collective")
    gains = [
        link["ways"]["dense, in buckets"]["seconds"] / link["ways"]["ulp"]["seconds"] for link in broadcast["links"]
    ]
    assert [link["link"] for link in broadcast["links"]] == ["100 Mbit/s", "1 Gbit/s", "10 Gbit/s"]
    return [
        f"over 100 Mbit/s, seconds per sync: dense {took['dense bf16']:.2f}, {peers}",
        f"sparserl {took['sparserl over TCP']:.2f}, all over TCP",
        f"takes {http:.2f}, behind three of them",
        f"Broadcast of {broadcast['megabytes']} MB over Gloo",
        f"{gains[0]:.0f}× as fast at 100 Mbit/s, {gains[1]:.0f}× at 1 Gbit/s, {gains[2]:.1f}× at 10 Gbit/s",
    ]


def speed_sentences() -> list[str]:
    results = recorded("results")
    gpu = recorded("gpu")
    (ulp, ctx) = (
        next(row for row in results["speeds"] if (row["format"], row["threads"]) == (name, 1))
        for name in ("ulp", "ctx")
    )
    library = gpu["library"]
    training = gpu["training"]
    memory = {name: f"{results['memory'][name] / 2**20:.0f}" for name in ("to_disk", "applied")}
    return [
        f"{results['finding']['bytes'] >> 20} MB of bf16, {results['finding']['density']:.1%} changed",
        f"`ulp` encodes at {ulp['encode'] / 1e9:.1f} GB/s of dense weights",
        f"decodes and applies at {ulp['decode'] / 1e9:.1f};",
        f"`ctx` {ctx['encode'] / 1e9:.1f} and {ctx['decode'] / 1e9:.1f}",
        f"`diff` takes {memory['to_disk']} MiB beyond its inputs, `apply` {memory['applied']}",
        f"{library['parameters'] / 1e9:.1f} billion parameters, {gpu['kernels']['density']:.1%} changed",
        f"in `ctx` take {library['ctx']['diff ms']:.0f} and {library['ctx']['apply ms']:.0f} ms",
        f"added {max(0.0, training['step ratio'] - 1):.1%} to a training step",
    ]


def fault_sentences() -> list[str]:
    runs = [json.loads(line) for line in (HOME / "soak.jsonl").read_text().splitlines()]
    alone, ranks = ([run for run in runs if ("writers" in run) == together] for together in (False, True))
    assert {run["store"] for run in alone} == {run["store"] for run in ranks} == {"file", "seaweedfs", "moto"}
    assert {run["faults"] for run in runs} == {0}
    (kills,) = {run["kills"] for run in alone}
    (rank_kills,) = {run["kills"] for run in ranks}
    load = recorded("load")
    assert load["wrong"] == 0
    return [
        f"killed publishers and subscribers {kills:,} times",
        f"two ranks that publish together {rank_kills:,} times",
        f"ran {load['subscribers']} subscribers over {load['versions']} versions: {load['commits']:,} commits",
    ]


def engine_sentences() -> list[str]:
    """What `test_engine_tables` holds against the records word by word, and the hosts of the notes."""
    return [
        "6.7 B parameters",
        re.search(r"pauses for .*? its dense transfer \d+ to \d+ ms", read("README.md"))[0],  # type: ignore[index]
    ]


def hosts() -> tuple[str, ...]:
    """How long reloads took on hosts where vLLM was faster, from the notes on the table."""
    notes = " ".join((ROOT / "research" / "engines.md").read_text().split())
    memory = re.search(r"\((\d+ and \d+) on two others\)", notes)
    disk = re.search(r"from disk [\d. and]+ s \(([\d.]+)\)", notes)
    assert memory
    assert disk
    return (f"{memory[1]} ms, {disk[1]} s",)


def read(name: str) -> str:
    """A page without the addresses of its links, in one line."""
    return " ".join(re.sub(r"\]\([^)]*\)", "]", (ROOT / name).read_text()).split())


def require_sources(text: str, sentences: list[str]) -> None:
    """Each sentence is there; nothing else has a digit."""
    for sentence in sentences:
        assert sentence in text
        text = text.replace(sentence, " ")
    assert not re.findall(r"[^.|]*\d[^.|]*", re.sub(NAMES, "", text))


def results_sentences() -> list[str]:
    denser = densities("denser")
    ctx, peer = (bits_of(name)["denser"] for name in ("ctx", "NeMo-RL"))
    return [
        f"`ctx` takes {ctx[0]} bits per changed element at {denser[0]} (three syncs in one)",
        f"{ctx[1]} at {denser[1]} (twelve), NeMo-RL {peer[0]} and {peer[1]}",
        "any element by 1% of itself",
        f"`ctx` takes {ctx[2]} at 3% and {ctx[3]} at 5%, NeMo-RL {peer[2]} and {peer[3]}",
        *study_sentences(),
        *link_sentences(),
        *speed_sentences(),
        *fault_sentences(),
        *(sentence for sentence in OTHERS if sentence in read("docs/explanation/results.md")),
        "models above 7B",
    ]


def test_the_report_is_that_of_the_records() -> None:
    """Nothing in the report differs from what its recorded files make of it."""
    assert page(HOME) == (HOME / "results.md").read_text()


def test_the_page_of_results() -> None:
    """Each figure has a source, and each recorded one is as it was recorded."""
    assert set(OTHERS) - {"others see up to 4.5% at 30 B"} == {
        sentence for sentence in OTHERS if sentence in read("docs/explanation/results.md")
    }
    require_sources(read("docs/explanation/results.md"), results_sentences())


def test_the_figures_of_the_readme() -> None:
    """Those of its beginning and of its comparison."""
    text = read("README.md")
    begin = text.partition("## Install")[0]
    comparison = text.partition("## How it compares")[2].partition("## Documentation")[0]
    starts = [start["grpo-1e-06"].density("bf16") for start in of_study().values()]
    fast = [start["grpo-2e-05"].density("bf16") for start in of_study().values()]
    drifted = of_study()["fp32"]["grpo-1e-06"]
    require_sources(
        begin,
        [
            *engine_sentences(),
            *hosts(),
            f"changes {starts[0]:.1%} to {starts[1]:.1%} of elements",
            f"{fast[0]:.1%} to {fast[1]:.1%} at 2e-5",
            "others see up to 4.5% at 30 B",
        ],
    )
    runs = densities("sizes")
    rows = [f"| {' | '.join(bits_of(name)['sizes'])} |" for name in FORMATS.values()]
    simple = f"{8 * (4 + 2):.1f}"  # a position and a value
    names = [
        re.escape(called.replace("sparserl ", "**sparserl ") + "**" * ("sparserl" in called)) for called in FORMATS
    ]
    for name, row in zip(names, rows, strict=True):
        assert re.search(rf"\| {name}( \([^)]*\))? {re.escape(row)}", comparison), (name, row)
    require_sources(
        comparison,
        [
            *rows,
            f"| {runs[0]} changed | {runs[1]} changed |",
            f"| positions and values (verl, vLLM, AReaL) | {simple} | {simple} |",
            f"`ctx` takes {drifted.bits('bf16', 'ctx'):.1f} bits at {drifted.density('bf16'):.2%}",
            "±0.0",
        ],
    )


def test_a_figure_without_a_source_is_noticed() -> None:
    """As is a recorded one that was changed by hand."""
    text = read("docs/explanation/results.md")
    with pytest.raises(AssertionError, match="99"):
        require_sources(text + " It is 99 times as fast.", results_sentences())
    with pytest.raises(AssertionError):
        require_sources(text.replace("PULSE 0.40", "PULSE 0.64"), results_sentences())
