"""Tables and plots of the study, from study.json in research/results/: for study.md, results.md and plots/.

Published figures are those of arXiv 2605.07330 (SparseRL-Sync) and arXiv 2602.03839 (PULSE).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from research.study.plots import Axis, plot

PULSE_RATES = {5e-7: 0.002, 1e-6: 0.0027, 3e-6: 0.0057, 5e-6: 0.0094}  # 1.5B, bf16
PULSE_APART = {1: 0.0086, 8: 0.0140, 32: 0.0196}  # 7B, bf16
PAPER = {"fp32": 0.995, "fp16": 0.0243, "bf16": 0.006, "fp8": 0.00066}  # 30B, mixture of experts
PAPER_AGAIN = {10: 0.745}  # 72 to 77%
PROFILES = ("raw", "gap", "ulp", "ctx")
PRECISIONS = ("fp32", "fp16", "bf16", "fp8")
ALGORITHMS = ("grpo", "dapo", "gspo", "sft")
FAMILIES = ("135m", "135m-from-fp32", "tiny", "tiny-from-fp32")  # what the first of these found is told first
CALLED = {
    "135m": "SmolLM2-135M from bf16 numbers",
    "135m-from-fp32": "SmolLM2-135M from fp32 numbers",
    "tiny": "The tiny model from bf16 numbers",
    "tiny-from-fp32": "The tiny model from fp32 numbers",
}
BEGIN, END = "<!-- written by python -m research.study --render -->", "<!-- end -->"


def share(value: float) -> str:
    """A share in percent, with three digits or so."""
    if value < 5e-6:
        return "< 0.001%" if value else "0"
    return f"{value:.1%}" if value >= 0.1 else f"{value:.2%}" if value >= 0.001 else f"{value:.3%}"


class Found:
    """One run, and what tables ask of it. Means are over its later half."""

    def __init__(self, data: dict[str, Any]) -> None:
        self.data, self.about = data, data["about"]
        self.counts = data["counts"]
        self.precisions = {p: data["precisions"][p] for p in PRECISIONS if p in data["precisions"]}
        self.settled, self.syncs = data["settled"], data["about"]["syncs"]

    @property
    def order(self) -> tuple[int, float, str]:
        """Where it stands among others."""
        return ALGORITHMS.index(self.about["algorithm"]), self.about["lr"], self.about["name"]

    def densities(self, precision: str) -> dict[float, float]:
        elements = self.precisions[precision]["elements"]
        return {float(n): c / elements for n, c in enumerate(self.counts[precision]["changed"], 1)}

    def density(self, precision: str) -> float:
        return _mean(list(self.densities(precision).values())[self.settled :])

    def inactive(self, precision: str) -> float:
        return _mean(self.counts[precision]["inactive"][self.settled :]) / self.precisions[precision]["tensors"]

    def again(self) -> dict[float, float]:
        """The share of changed elements that had changed before, by sync."""
        pairs = zip(self.data["again"], self.counts["bf16"]["changed"], strict=True)
        return {float(n): a / max(1, c) for n, (a, c) in enumerate(pairs, 1)}

    def bits(self, precision: str, profile: str) -> float:
        """Per changed element, over the recorded syncs of the later half."""
        found = self.precisions[precision]
        rows = [(n, b) for n, b in zip(found["recorded"], found["bytes"][profile], strict=True) if n > self.settled]
        changed = sum(self.counts[precision]["changed"][n - 1] for n, _ in rows)
        return 8 * sum(b for _, b in rows) / max(1, changed)

    def ratio(self, precision: str, profile: str = "auto") -> float:
        """Dense bytes over those of a patch."""
        found = self.precisions[precision]
        sizes = [b for n, b in zip(found["recorded"], found["bytes"][profile], strict=True) if n > self.settled]
        return found["dense bytes"] / max(1.0, _mean(sizes))

    def apart(self, precision: str = "bf16") -> dict[float, float]:
        """The density of one patch over so many syncs."""
        elements, found = self.precisions[precision]["elements"], self.counts[precision]["apart"]
        return {float(k): found[k] / elements for k in sorted(found, key=int)}

    def chained(self, distance: int) -> tuple[float, float]:
        """Elements and bytes of so many patches, over those of one."""
        changed, sizes = self.counts["bf16"]["changed"], self.precisions["bf16"]["bytes"]["auto"]
        one, size = self.counts["bf16"]["apart"][str(distance)], self.data["squashed"][str(distance)]["auto"]
        return sum(changed[-distance:]) / max(1, one), sum(sizes[-distance:]) / max(1, size)


Family = dict[str, Found]


def families(data: Mapping[str, Any]) -> dict[str, Family]:
    """Runs by family, in the order in which they are told."""
    out: dict[str, Family] = {}
    for family in FAMILIES:
        runs = [(key.split("/")[1], Found(value)) for key, value in data.items() if key.split("/")[0] == family]
        if runs:
            out[family] = dict(sorted(runs, key=lambda run: run[1].order))
    return out


def starts(every: Mapping[str, Family]) -> dict[str, Family]:
    """The model that is told first, by the numbers its masters are at first."""
    model = next(iter(every)).partition("-")[0]
    found = {name.partition("-")[2] or "from-bf16": every[name] for name in every if name.partition("-")[0] == model}
    return {start.replace("-", " "): family for start, family in found.items()}


def write(data: Mapping[str, Any], folder: Path) -> None:
    """The plots, and the part of research/results/study.md between two comments."""
    pictures = folder / "plots"
    pictures.mkdir(exist_ok=True)
    every = families(data)
    for name, drawn in plots(starts(every)).items():
        (pictures / f"{name}.svg").write_text(drawn, encoding="utf-8")
    page = folder / "study.md"
    before, rest = page.read_text(encoding="utf-8").split(BEGIN)
    lines = [f"## {next(CALLED[name] for name in every).partition(' from')[0]} beside published figures", ""]
    lines += [*_beside(starts(every)), *(f"![{title}](plots/{file}.svg)\n" for file, title in TITLES.items())]
    for name, family in every.items():
        lines += _chapter(CALLED[name], family)
    lines += _traces({key.split("/")[1]: value for key, value in data.items() if key.startswith("traces/")})
    made = "\n".join(lines).rstrip("\n")
    page.write_text(f"{before}{BEGIN}\n\n{made}\n\n{END}{rest.split(END)[1]}", encoding="utf-8")


def section(data: Mapping[str, Any]) -> list[str]:
    """What research/results/results.md has of it."""
    every = families(data)
    name, family = next(iter(every.items()))
    one = next(iter(family.values()))
    where = f"{one.syncs} syncs of one optimizer step on {one.about['device']}"
    return [
        "## Sparsity of real RL",
        "",
        f"`python -m research.study`: {CALLED[name]}. {where}.",
        f"Densities are means of syncs {one.settled + 1} to {one.syncs}. *From bf16*: fp32 masters were bf16 numbers",
        "at first, as those of a published checkpoint are; *from fp32*: they could be any. [study.md](study.md) has",
        "the rest: distances, algorithms, kinds of tensors, magnitudes, and where these figures and published ones",
        "differ, and why.",
        "",
        *_rates(family),
        *_beside(starts(every)),
        *(f"![{title}](plots/{file}.svg)\n" for file, title in TITLES.items() if file != "layers"),
    ]


TITLES = {
    "rates": "Changed elements of a sync, by learning rate",
    "syncs": "Changed elements in bf16, sync by sync",
    "apart": "One patch over several syncs, bf16",
    "magnitudes": "Chance of a change in bf16, by magnitude",
    "again": "Changed elements that had changed before, bf16",
    "layers": "Changed elements in bf16, by layer",
}


def plots(found: Mapping[str, Family]) -> dict[str, str]:
    """SVG files by name: of the first start, and of the others how bf16 goes with the rate."""
    (_, family), *others = found.items()
    grpo = _grpo(family)
    named = {f"rate {rate:g}": run for rate, run in grpo.items()}
    some = next(iter(grpo.values()))
    density = Axis("density", lambda value: f"{100 * value:.10g}%", log=True)
    shares = Axis("share", lambda value: f"{value:.0%}", marks=(0, 0.25, 0.5, 0.75, 1))
    syncs = Axis("sync", _plain, marks=(1, *range(10, some.syncs + 1, 10)))
    apart = Axis("syncs between the versions", _plain, log=True, marks=tuple(some.apart()))
    rates = Axis("learning rate", _plain, log=True, marks=tuple(grpo))
    exponents = Axis("magnitude of the weight", _power, marks=tuple(range(-24, 1, 4)))
    layers = {name: _by_layer(run) for name, run in named.items()}
    last = max(layers[next(iter(named))])
    layer = Axis("layer", _plain, marks=tuple(dict.fromkeys((0, *range(10, int(last), 10), last))))
    precisions = {p: {rate: run.density(p) for rate, run in grpo.items()} for p in some.precisions}
    precisions |= {f"bf16, {s}": {r: run.density("bf16") for r, run in _grpo(f).items()} for s, f in others}
    by_sync = {name: run.densities("bf16") for name, run in named.items()}
    by_distance = {name: run.apart() for name, run in named.items()}
    by_exponent = {name: _by_exponent(run) for name, run in named.items()}
    again = {name: run.again() for name, run in named.items()}
    return {
        "rates": plot(TITLES["rates"], precisions, rates, density, {"PULSE, 1.5B, bf16": PULSE_RATES}),
        "syncs": plot(TITLES["syncs"], by_sync, syncs, density),
        "apart": plot(TITLES["apart"], by_distance, apart, density, {"PULSE, 7B": PULSE_APART}),
        "magnitudes": plot(TITLES["magnitudes"], by_exponent, exponents, density),
        "again": plot(TITLES["again"], again, syncs, shares, {"SparseRL-Sync, 30B": PAPER_AGAIN}),
        "layers": plot(TITLES["layers"], layers, layer, density),
    }


def _plain(value: float) -> str:
    return f"{value:g}"


def _power(exponent: float) -> str:
    return "2" + f"{exponent:g}".translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))


def _chapter(title: str, family: Family) -> list[str]:
    one = next(iter(family.values()))
    about = one.about
    return [
        f"## {title}",
        "",
        f"{one.syncs} syncs on {about['device']}, {about['prompts']} × {about['group']} answers each,",
        f"{one.precisions['bf16']['elements']:,} elements in {one.precisions['bf16']['tensors']} tensors.",
        f"Means are of syncs {one.settled + 1} to {one.syncs}.",
        "",
        "### Learning rates (GRPO)",
        "",
        *_rates(family),
        "### Algorithms, and the optimizer",
        "",
        *_algorithms(family),
        "### Distance",
        "",
        *_distances(family),
        "### Bits per changed element",
        "",
        *_bits(family),
        "### Kinds of tensors",
        "",
        *_kinds(family),
        "### Magnitudes",
        "",
        *_magnitudes(family),
    ]


def _rates(family: Family) -> list[str]:
    head = ("learning rate", "fp32", "fp16", "bf16", "bf16, first sync", "fp8", "inactive tensors, bf16")
    rows = [
        (
            f"{rate:g}",
            share(run.density("fp32")),
            share(run.density("fp16")),
            f"**{share(run.density('bf16'))}**",
            share(run.densities("bf16")[1]),
            share(run.density("fp8")),
            share(run.inactive("bf16")),
            share(run.again()[min(10, run.syncs)]),
            share(run.again()[run.syncs]),
            f"{run.ratio('bf16'):.0f}×",
            share(PULSE_RATES[rate]) if rate in PULSE_RATES else "",
        )
        for rate, run in _grpo(family).items()
    ]
    last = next(iter(family.values())).syncs
    tail = (f"seen before, at sync {min(10, last)}", f"at {last}", "bf16 bytes, dense over `auto`", "PULSE, 1.5B, bf16")
    return _table((*head, *tail), rows)


def _algorithms(family: Family) -> list[str]:
    rows = [
        (
            _title(run),
            f"{run.about['lr']:g}",
            *(share(run.density(p)) for p in ("fp32", "fp16", "bf16", "fp8")),
            share(run.densities("bf16")[1]),
            share(run.inactive("bf16")),
            share(run.again()[run.syncs]),
            f"{run.bits('bf16', 'ctx'):.1f}",
            _reward(run),
        )
        for run in family.values()
    ]
    head = (
        "run",
        "learning rate",
        "fp32",
        "fp16",
        "bf16",
        "fp8",
        "bf16, first sync",
        "inactive, bf16",
        "seen before, last",
    )
    return _table((*head, "bits in `ctx`", "reward, first and last 5"), rows)


def _distances(family: Family) -> list[str]:
    grpo = _grpo(family)
    distances = [int(k) for k in next(iter(grpo.values())).apart()]
    rows = [
        (f"{rate:g}", *(share(run.apart()[k]) for k in distances), *(_ratios(run, k) for k in distances if k > 1))
        for rate, run in grpo.items()
    ]
    head = ("learning rate", *(f"{k} apart" for k in distances), *(f"{k} patches over one" for k in distances if k > 1))
    note = "Density in bf16 of one patch over so many syncs, the last ones; then elements / bytes of the chain over it."
    return [note, "", *_table(head, rows)]


def _ratios(run: Found, distance: int) -> str:
    elements, size = run.chained(distance)
    return f"{elements:.2f} / {size:.2f}"


def _bits(family: Family) -> list[str]:
    rows, plain = [], _grpo(family).values()
    for run in family.values():
        for precision in run.precisions if run in plain else ("bf16",):
            cells = (f"{run.bits(precision, profile):.2f}" for profile in PROFILES)
            what = (_title(run), f"{run.about['lr']:g}", precision, share(run.density(precision)))
            rows.append((*what, *cells, f"{run.ratio(precision):.1f}×"))
    head = ("run", "learning rate", "precision", "density", *(f"`{p}`" for p in PROFILES), "dense over `auto`")
    return _table(head, rows)


def _kinds(family: Family) -> list[str]:
    run = family.get("grpo-1e-06") or next(iter(family.values()))
    rows = [
        (kind, *(share(found["kinds"][kind][0] / found["kinds"][kind][1]) for found in run.precisions.values()))
        for kind in run.precisions["bf16"]["kinds"]
    ]
    fp8 = run.precisions["fp8"]["classes"]
    codes, scales = (share(_ratio(fp8[dtype].values())) for dtype in ("float8_e4m3fn", "float32"))
    fp8_note = f"In fp8, {codes} of the codes and {scales} of the scales change in a sync."
    return [f"{_title(run)} at {run.about['lr']:g}. {fp8_note}", "", *_table(("kind", *run.precisions), rows)]


def _ratio(pairs: Iterable[list[int]]) -> float:
    changed, count = (sum(column) for column in zip(*pairs, strict=True))
    return changed / count


def _magnitudes(family: Family) -> list[str]:
    grpo = _grpo(family)
    rows = []
    members = _exponents(next(iter(grpo.values())).precisions["bf16"]["classes"]["bfloat16"])
    total = sum(count for _, count in members.values())
    for exponent in sorted(members):
        if members[exponent][1] < total * 1e-5:
            continue
        chances = []
        for run in grpo.values():
            changed, count = _exponents(run.precisions["bf16"]["classes"]["bfloat16"]).get(exponent, (0, 1))
            chances.append(share(changed / count))
        rows.append((f"2^{exponent}", share(members[exponent][1] / total), *chances))
    return _table(("magnitude from", "of the weights", *(f"{rate:g}" for rate in grpo)), rows)


def _beside(found: Mapping[str, Family]) -> list[str]:
    """Figures of each start, where its runs were made, and those of others."""

    def density(precision: str) -> Callable[[Found], str]:
        return lambda run: share(run.density(precision))

    def apart(distance: int) -> Callable[[Found], str]:
        return lambda run: share(run.apart()[distance]) if distance in run.apart() else ""

    def again(run: Found) -> str:
        return share(run.again()[10]) if run.syncs >= 10 else ""

    def chained(run: Found) -> str:
        return f"{run.chained(32)[0]:.1f}×" if 32 in run.apart() else ""

    def bits(run: Found) -> str:
        return ", ".join(f"{run.bits('bf16', profile):.1f} (`{profile}`)" for profile in reversed(PROFILES))

    usual, bf16 = "grpo-1e-06", share(PAPER["bf16"])
    asked: list[tuple[str, str, Callable[[Found], str], str, str]] = [
        (f"density, {p}, at 1e-6", usual, density(p), share(PAPER[p]), share(PULSE_RATES[1e-6]) if p == "bf16" else "")
        for p in PRECISIONS
    ]
    asked += [
        (f"density, bf16, at {rate:g}", f"grpo-{rate:g}", density("bf16"), "", share(published))
        for rate, published in PULSE_RATES.items()
        if rate != 1e-6
    ]
    asked += [
        ("DAPO at 1e-6, bf16", "dapo-1e-06", density("bf16"), bf16, ""),
        ("GSPO at 1e-6, bf16", "gspo-1e-06", density("bf16"), bf16, ""),
        ("SFT at 1e-6, bf16", "sft-1e-06", density("bf16"), "", "2–4%"),
        ("SFT at 2e-5, bf16", "sft-2e-05", density("bf16"), "", "2–4%"),
        ("inactive tensors, bf16", usual, lambda run: share(run.inactive("bf16")), "5–6%", ""),
        ("seen before, at sync 10", usual, again, "72–77%", ""),
        *((f"density, bf16, {k} apart", usual, apart(k), "", f"{share(d)} (7B)") for k, d in PULSE_APART.items()),
        ("elements of 32 patches over one", usual, chained, "", "14× (7B)"),
        ("bits per changed element, bf16", usual, bits, "25.6; raw 48", "23"),
        (
            "all weights over a patch, bf16",
            usual,
            lambda run: f"{run.ratio('bf16'):.0f}×",
            "60–101×; raw 32–54×",
            "130×",
        ),
    ]
    rows = []
    for what, name, ask, paper, pulse in asked:
        cells = [ask(family[name]) if name in family else "" for family in found.values()]
        if any(cells):
            rows.append((what, *cells, paper, pulse))
    return _table(("what", *(f"here, {start}" for start in found), "SparseRL-Sync", "PULSE"), rows)


def _traces(found: Mapping[str, Any]) -> list[str]:
    if not found:
        return []
    rows = []
    for name, run in found.items():
        elements, changed = run["elements"], run["changed"]
        far = max(run["apart"], key=int)
        one, chain = run["apart"][far]
        rows.append(
            (
                name,
                f"{run['versions'][0]}–{run['versions'][-1]}",
                share(sum(changed) / len(changed) / elements),
                share(_mean(run["inactive"]) / run["tensors"]),
                share(sum(run["again"]) / sum(changed)),
                f"{chain / one:.2f} over {far}",
                *(f"{8 * sum(run['bytes'][p]) / sum(changed):.2f}" for p in PROFILES),
            )
        )
    head = (
        "trace",
        "syncs",
        "density",
        "inactive tensors",
        "seen before",
        "chain over one patch",
        *(f"`{p}`" for p in PROFILES),
    )
    return ["## The traces", "", *_table(head, rows)]


def _grpo(family: Family) -> dict[float, Found]:
    """The runs that differ in their learning rate alone."""
    plain = {run.about["lr"]: run for name, run in family.items() if name == f"grpo-{run.about['lr']:g}"}
    return dict(sorted(plain.items()))


def _title(run: Found) -> str:
    about = run.about
    more = f", β2 = {about['beta2']:g}" if about["beta2"] != 0.999 else ""
    return about["algorithm"].upper() + more + (f", ε = {about['eps']:g}" if about["eps"] != 1e-8 else "")


def _reward(run: Found) -> str:
    rewards = [reward for reward in run.data["rewards"] if reward is not None]
    return f"{_mean(rewards[:5]):.3f} → {_mean(rewards[-5:]):.3f}" if rewards else ""


def _by_layer(run: Found) -> dict[float, float]:
    layers = run.precisions["bf16"]["layers"]
    return {float(n): layers[n][0] / layers[n][1] for n in sorted(layers, key=int)}


def _exponents(classes: Mapping[str, list[int]]) -> dict[int, tuple[int, int]]:
    """By exponent of two: changed elements, and all."""
    return {int(key) - 127: (changed, count) for key, (changed, count) in classes.items()}


def _by_exponent(run: Found) -> dict[float, float]:
    found = _exponents(run.precisions["bf16"]["classes"]["bfloat16"])
    return {
        float(e): found[e][0] / found[e][1]
        for e in sorted(found)
        if -24 <= e <= 0 and found[e][0] >= 1e-6 * found[e][1]
    }


def _mean(values: list[Any]) -> float:
    return sum(values) / max(1, len(values))


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> list[str]:
    head = tuple(head)
    out = ["| " + " | ".join(head) + " |", "| --- " * len(head) + "|"]
    return [*out, *("| " + " | ".join(row) + " |" for row in rows), ""]
