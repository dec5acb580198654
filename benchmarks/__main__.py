"""`python -m benchmarks`: every claim of size or speed, beside the peers; writes research/results/results.{json,md}."""

from __future__ import annotations

import argparse
import json
import platform
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from llvmlite.binding import get_host_cpu_name
from rich.console import Console
from rich.status import Status

import sparserl
import sparserl.codec
from benchmarks import bound, kernels, memory_use, profiles, session_tables, start, traces
from benchmarks.bound import Bound
from benchmarks.ceiling import Ceilings
from benchmarks.kernels import Finding
from benchmarks.profiles import Size, Speed

_TARGETS = {"gap": (23.0, 20.0), "ulp": (13.0, 10.5), "ctx": (6.9, 5.8)}  # bits at about 0.2% and 1.2% density
_MEAN_TARGET = 6.3  # of ctx, over the traces
_SPEED_TARGETS = {  # one thread: encode of the two-stream, decode of the scatter and of the one-stream ceiling
    "raw": (None, 0.60, None),
    "ulp": (0.65, 0.60, None),
    "ctx": (0.40, None, 0.40),
}
_HOME = Path(__file__).parent.parent / "research" / "results"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=512, help="dense weights for the speed tables")
    parser.add_argument("--density", type=float, default=0.006, help="share of elements changed in them")
    parser.add_argument("--sizes", action="store_true", help="measure sizes alone; keep the recorded speeds")
    parser.add_argument(
        "--out", type=Path, default=_HOME, help="folder for results.json and results.md, with the figures of others"
    )
    options = parser.parse_args()
    recorded = options.out / "results.json"
    with Console(stderr=True).status("reading the corpus") as status:
        timed = (
            json.loads(recorded.read_text()) if options.sizes else _timed(options.megabytes, options.density, status)
        )
        data = timed | _sized(traces.find_traces(), status)
    options.out.mkdir(parents=True, exist_ok=True)
    recorded.write_text(json.dumps(data, indent=1) + "\n")
    text = page(options.out)
    (options.out / "results.md").write_text(text)
    print(text)


def _sized(folder: Path, status: Status) -> dict[str, Any]:
    """What is the same on every machine."""
    run = traces.runs(folder)[-1]
    cases = {run: traces.syncs(folder, run) for run in traces.runs(folder)}
    denser = {
        "3 syncs in one": traces.joined(folder, run, 3),
        "warm-up in one": traces.joined(folder, run, 0),
        **{f"uniform, {density:.0%}": traces.uniform(folder, density) for density in (0.03, 0.05)},
    }
    return {
        "sizes": _rows(profiles.sizes(cases, _tick(status, "size"))),
        "denser": _rows(profiles.sizes(denser, _tick(status, "size"))),
        "bounds": [_bound(one) for one in bound.measure(folder, _tick(status, "bound"))],
    }


def _rows(sizes: list[Size]) -> list[dict[str, Any]]:
    return [{**asdict(s), "bits_per_changed": s.bits, "ratio": s.ratio} for s in sizes]


def _bound(one: Bound) -> dict[str, Any]:
    total = one.total
    figures = {"wire": total.bits, "streams": total.stream_bits, "bound": total.bound, "over": total.over}
    return {"trace": one.trace, **figures, "overhead": one.overhead}


def _timed(megabytes: int, density: float, status: Status) -> dict[str, Any]:
    """What depends on the machine, and on what else it does."""
    old, new = traces.synthetic(megabytes << 20, density, seed=0)
    status.update("finding changes")
    finding = kernels.measure(old, new)
    speeds, ceilings = profiles.speeds(old, new, _tick(status, "speed"))
    status.update("memory and start")
    return {
        "version": sparserl.__version__,
        "machine": {"cpu": _cpu(), "python": platform.python_version(), "system": platform.platform()},
        "finding": {**asdict(finding), "share_one": finding.share_one, "share_two": finding.share_two},
        "speeds": [asdict(s) for s in speeds],
        "speed_ceilings": asdict(ceilings),
        "memory": memory_use.measure(megabytes, density),
        "start": start.measure(),
    }


def _tick(status: Status, stage: str) -> Any:
    return lambda note: status.update(f"{stage}: {note}")


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else ():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return f"{platform.machine()}, {get_host_cpu_name()}"  # Linux on Arm does not say


def page(home: Path) -> str:
    """The report, in Markdown, from the results that a folder has."""
    data = json.loads((home / "results.json").read_text())
    machine = data["machine"]
    ceilings = Ceilings(**data["finding"]["ceilings"])
    figures = {f.name: data["finding"][f.name] for f in fields(Finding)}
    finding = Finding(**figures | {"ceilings": ceilings})
    lines = [
        "# Results",
        "",
        f"Written by `make bench` (sparserl {data['version']}, {machine['cpu']}, Python {machine['python']}).",
        "Timings are the best of several turns; shares are of ceilings measured in the same run. Speeds count the",
        "dense bytes of one copy of the weights. `python -m benchmarks --sizes` measures sizes alone.",
        "",
        *_size_table(data["sizes"]),
        *_denser_table(data["denser"]),
        *_bound_table(data["bounds"]),
        *_speed_table(finding, [Speed(**speed) for speed in data["speeds"]]),
        *_finding_table(finding),
        *_memory_table(finding.bytes, data["memory"]),
        *(_start_table(data["start"]) if "start" in data else ()),
        *session_tables.tables(home),
    ]
    return "\n".join(lines) + "\n"


def _size_table(sizes: list[dict[str, Any]]) -> list[str]:
    runs = sorted({s["trace"] for s in sizes})
    by = {(s["format"], s["trace"]): s for s in sizes}
    out = [
        "## Size",
        "",
        "Two RL runs of a 135M model in bf16, of one seed each: half of the rows of three layers and a sixteenth of",
        "the embedding ([the corpus](../../benchmarks/corpus/README.md)). All syncs, patch after patch, each decoded",
        "and compared bit for bit. All bytes count but the tensor table, which a run sends once.",
        "",
        "| format | " + " | ".join(f"{r}: bits per changed | ratio to dense" for r in runs) + " | target |",
        "| --- " * (2 * len(runs) + 2) + "|",
    ]
    for name in dict.fromkeys(s["format"] for s in sizes):
        cells = " | ".join(f"{by[name, r]['bits_per_changed']:.2f} | {by[name, r]['ratio']:.0f}×" for r in runs)
        target = " / ".join(f"≤ {t:g}" for t in _TARGETS[name]) if name in _TARGETS else ""
        out.append(f"| {_label(name)} | {cells} | {target} |")
    densities = ", ".join(f"{run} {density_of(sizes, run):.2%}" for run in runs)
    return [*out, "", f"Densities: {densities}.", ""]


def density_of(sizes: list[dict[str, Any]], trace: str) -> float:
    """The share of elements that change, of all syncs of a trace."""
    one = next(s for s in sizes if s["trace"] == trace)
    return 2 * float(one["changed"]) / float(one["dense_bytes"])


def _denser_table(sizes: list[dict[str, Any]]) -> list[str]:
    names = list(dict.fromkeys(s["trace"] for s in sizes))
    bits = {(s["format"], s["trace"]): f"{s['bits_per_changed']:.2f}" for s in sizes}
    rows = (
        f"| {_label(format)} | {' | '.join(bits[format, name] for name in names)} |"
        for format in dict.fromkeys(s["format"] for s in sizes)
    )
    return [
        "### Where more changes",
        "",
        "Bits per changed element. Versions of the second run that are three syncs apart; all that its warm-up of",
        "twelve syncs changed; and any element of the base changed by 1% of itself, up or down, as NeMo-DCR (arXiv",
        "2610.08430) was measured, which reports 12.56 bits at 3% and 12.10 at 5%.",
        "",
        f"| format | {' | '.join(f'{name}: {density_of(sizes, name):.2%}' for name in names)} |",
        "| --- " * (1 + len(names)) + "|",
        *rows,
        "",
    ]


def _bound_table(bounds: list[dict[str, Any]]) -> list[str]:
    mean = sum(b["wire"] for b in bounds) / len(bounds)
    rows = (
        f"| {b['trace']} | {b['wire']:.2f} | {b['streams']:.2f} | {b['bound']:.2f} | {b['over']:+.1%} | "
        f"{_overhead(b['overhead'])} |"
        for b in bounds
    )
    return [
        "### `ctx` and the entropy of its classes",
        "",
        "Bits per changed element. The bound is the entropy of which members of a class change and of the steps given",
        "the class, for the classes that the encoder chose in each bucket; streams count gaps, steps, tile counts,",
        "tables and coder states, the wire counts everything but the tensor table. Directory and states: the largest",
        "share in a patch of 100,000 changes or more.",
        "",
        "| trace | on the wire | streams alone | bound | streams over it (target 6%) | directory, states (target 2%) |",
        "| --- | --- | --- | --- | --- | --- |",
        *rows,
        "",
        f"Mean over the traces: {mean:.2f} bits (target {_MEAN_TARGET:g}).",
        "",
    ]


def _overhead(share: float | None) -> str:
    return "" if share is None else f"{share:.1%}"


def _label(name: str) -> str:
    return f"**`{name}`**" if name in ("auto", *sparserl.codec.PROFILES) else name


def _speed_table(finding: Finding, speeds: list[Speed]) -> list[str]:
    out = [
        "## Speed",
        "",
        f"{finding.bytes >> 20} MB of bf16, {finding.density:.2%} changed, magnitudes and steps as in the traces.",
        "Ours includes digests and checksums, with the base's digest held as a running session holds it; the peers'",
        "formats have neither. Encode is held against reading both versions once, decode + apply against a bare",
        "scatter of the changes and against reading the weights once (`ctx` must, to see the classes).",
        "",
        "| format | threads | encode GB/s | of two-stream | decode + apply GB/s | of scatter | of one-stream |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    rows = (
        f"| {_label(s.format)} | {s.threads} | {s.encode / 1e9:.2f} | {_share(s, 0, s.encode_share)} | "
        f"{s.decode / 1e9:.2f} | {_share(s, 1, s.decode_share)} | {_share(s, 2, s.decode_read_share)} |"
        for s in speeds
    )
    return [*out, *rows, "", *_threads(speeds)]


def _share(speed: Speed, column: int, share: float) -> str:
    target = _SPEED_TARGETS.get(speed.format, (None, None, None))[column] if speed.threads == 1 else None
    return f"{share:.0%}" + (f" (target {target:.0%})" if target else "")


def _threads(speeds: list[Speed]) -> list[str]:
    """What a second thread brings."""
    by = {(s.format, s.threads): s for s in speeds}
    gains = [
        f"`{name}` {by[name, 2].encode / by[name, 1].encode:.2f}× / {by[name, 2].decode / by[name, 1].decode:.2f}×"
        for name in sparserl.codec.PROFILES
        if (name, 2) in by
    ]
    return ["Two threads over one, encode / decode + apply (target 1.7×): " + ", ".join(gains) + ".", ""]


def _finding_table(f: Finding) -> list[str]:
    c = f.ceilings
    rows = [
        ("read one stream, ceiling", f"{c.one_stream_1 / 1e9:.1f}", f"{c.one_stream_2 / 1e9:.1f}", ""),
        ("read two streams, ceiling", f"{c.two_stream_1 / 1e9:.1f}", f"{c.two_stream_2 / 1e9:.1f}", ""),
        ("find and compact changes", f"{f.one_thread / 1e9:.1f}", f"{f.two_threads / 1e9:.1f}", ""),
        ("share of the two-stream ceiling", f"{f.share_one:.0%}", f"{f.share_two:.0%}", "≥ 75% / ≥ 85%"),
        ("`torch.ne` + `nonzero` + gather", f"{f.torch_one / 1e9:.2f}", f"{f.torch_two / 1e9:.2f}", ""),
        ("ours over PyTorch's", f"{f.one_thread / f.torch_one:.1f}×", f"{f.two_threads / f.torch_two:.1f}×", "≥ 10×"),
        ("10,000 small tensors over one, kernel", f"{f.small_kernel_ratio:.2f}×", "", "≤ 3×"),
        ("10,000 small tensors over one, all of `diff`", f"{f.small_diff_ratio:.2f}×", "", ""),
        ("digest from plain weights", f"{f.digest_one_thread / 1e9:.1f}", f"{f.digest_two_threads / 1e9:.1f}", ""),
        ("scatter, ceiling, ns per change", f"{1e9 / c.scatter_1:.1f}", f"{1e9 / c.scatter_2:.1f}", ""),
    ]
    return [
        "## Finding changes",
        "",
        f"Dense GB/s on {f.bytes >> 20} MB of bf16 at {f.density:.2%}, ceilings and kernels taking turns.",
        "",
        "| what | 1 thread | 2 threads | target |",
        "| --- | --- | --- | --- |",
        *(f"| {a} | {b} | {c_} | {d} |" for a, b, c_, d in rows),
        "",
    ]


def _memory_table(dense: int, memory: dict[str, int]) -> list[str]:
    return [
        "## Memory beyond the inputs",
        "",
        f"Peak anonymous memory on {dense >> 20} MB of bf16, {memory['changed']:,} changes, two threads.",
        "",
        "| what | MiB |",
        "| --- | --- |",
        f"| the patch itself | {memory['size'] / 2**20:.1f} |",
        f"| `diff`, streamed to a file | {memory['to_disk'] / 2**20:.1f} |",
        f"| `diff`, kept in memory | {memory['in_memory'] / 2**20:.1f} |",
        f"| `apply` | {memory['applied'] / 2**20:.1f} |",
        "",
    ]


def _start_table(took: dict[str, float]) -> list[str]:
    return [
        "## The first patch",
        "",
        "Fresh processes, 2 MB of bf16. Kernels are compiled once on a machine, and a message says so.",
        "",
        "| what | seconds | target |",
        "| --- | --- | --- |",
        f"| all kernels compiled: `auto`, then every profile, made and applied | {took['compile']:.1f} | < 30 |",
        f"| `import sparserl` and all that a patch needs, NumPy and Numba among it | {took['import']:.2f} | |",
        f"| the first patch made and applied, kernels in the cache | {took['first']:.2f} | < 0.5 |",
        "",
    ]


if __name__ == "__main__":
    main()
