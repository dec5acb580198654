"""A recording as one HTML page: figures, plots as inline SVG, tables. No script, nothing from elsewhere."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from ..humanize import duration, short_size, size
from ..plan import Link
from . import plots
from .counts import EXPONENTS
from .kinds import ORDER
from .master_plots import gradient_table, master_plots, updates_sentence
from .plots import power_of_two, share
from .recording import Recording, Sync
from .summary import summary

STAGES = ("find", "encode", "upload", "transfer", "fetch", "stage", "pause")
_BARS = 60  # versions that the timeline has room for
_STYLE = Path(__file__).with_name("page.css")


def page(recording: Recording, *, title: str = "", lines: Sequence[str] = (), good: bool | None = None) -> str:
    """The whole page. It is well-formed XML, too.

    Args:
        recording: What to show.
        title: The heading; by default the model that `meta` names.
        lines: Sentences below the heading.
        good: Whether the heading says something good, or bad; None for neither.
    """
    figures = summary(recording)
    heading = title or f"sparserl: {recording.meta.get('model', 'a recording')}"
    about = ", ".join(f"{name} {value}" for name, value in recording.meta.items())
    when = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(recording.time))
    body = [
        f'<h1{"" if good is None else f""" class="{"good" if good else "bad"}" """}>{escape(heading)}</h1>',
        f"<p>{escape(about)}{'; ' if about else ''}recorded {when}</p>",
        _list(lines),
        *(_cards(name, values) for name, values in figures["precisions"].items()),
        "" if figures["precisions"] or not figures["sent"] else _sent_cards(figures["sent"]),
        _section("Over time", _over_time(recording)),
        *(_of_precision(recording, name, values) for name, values in figures["precisions"].items()),
        *(_of_masters(recording, name, values) for name, values in figures["precisions"].items()),
        _section("Seconds of a sync", _timeline(recording)),
        *(_projected(name, values["projection"]) for name, values in figures["precisions"].items()),
        _table(recording),
        f"<section><h2>Not in this recording</h2>{_list(figures['missing'])}</section>" if figures["missing"] else "",
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"/>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"/><title>{escape(heading)}</title>'
        f"<style>{_STYLE.read_text()}</style></head><body>{''.join(body)}</body></html>\n"
    )


def _card(id: str, value: float, shown: str, caption: str) -> str:
    return f'<div class="card" id="{escape(id)}" data-value="{value!r}"><b>{escape(shown)}</b>{escape(caption)}</div>'


def _cards(name: str, figures: Mapping[str, Any]) -> str:
    bits = sum(figures["bits_per_change"]["auto"].values())
    sent = figures["bytes"]["auto"]
    whole = figures["dense_bytes"]
    inactive = figures["inactive_tensors"]
    cards = (
        _card(f"ratio-{name}", figures["ratio"], f"{figures['ratio']:,.1f}×", "less to send than all weights"),
        _card(f"density-{name}", figures["density"], share(figures["density"]), "of the elements change, median"),
        _card(f"bits-{name}", bits, f"{bits:.2f}", "bits per change, index and headers included"),
        _card(f"bytes-{name}", sent, size(sent), f"a sync, median, instead of {size(whole)}"),
        _card(f"inactive-{name}", inactive, f"{inactive:g}", f"of {figures['tensors']} tensors do not change, median"),
    )
    first, last = figures["versions"]
    about = f"{figures['elements']:,} elements, {figures['syncs']} sync(s), versions {first} to {last}"
    activity = _list([*_activity(figures)])
    return (
        f'<section><h2>{escape(name)}</h2><p>{about}</p><div class="cards">{"".join(cards)}</div>{activity}</section>'
    )


def _activity(figures: Mapping[str, Any]) -> Iterable[str]:
    """Sentences about masters, experts and locality, where the recording has them."""
    if (masters := figures["masters"]) is not None:
        yield updates_sentence(masters)
    if (experts := figures["experts"]) is not None:
        kinds = ", ".join(f"{experts[kind]} {kind}" for kind in ("never", "sometimes", "always"))
        yield f"Experts that change in these syncs: {kinds}, of {experts['experts']}."
    if figures["syncs"] > 1 and (locality := figures["locality"]) is not None:
        quartiles = ", ".join(f"{name} {share(value)}" for name, value in locality.items())
        yield f"Share of a tensor's last changes where it changed before, over tensors: {quartiles}."


def _sent_cards(sent: Mapping[str, Any]) -> str:
    cards = (
        _card("ratio", sent["ratio"], f"{sent['ratio']:,.1f}×", "less to send than all weights"),
        _card("density", sent["density"], share(sent["density"]), "of the elements change, median"),
        _card("bytes", sent["bytes"], size(sent["bytes"]), f"a sync, median of {sent['syncs']}"),
    )
    return f'<div class="cards">{"".join(cards)}</div>'


def _over_time(recording: Recording) -> Iterable[str]:
    syncs = {name: recording.of(name) for name in recording.tensors if recording.of(name)}
    density = {name: {s.version: s.density for s in some} for name, some in syncs.items()}
    sizes: dict[str, dict[int, float]] = {name: {s.version: s.bytes() for s in some} for name, some in syncs.items()}
    if not syncs and recording.sent:
        density = {
            "published": {v: published.changed / max(1, published.elements) for v, published in recording.sent.items()}
        }
        sizes = {"published": {v: published.bytes for v, published in recording.sent.items()}}
    if density:
        yield plots.lines("Density: elements that change", density, share)
        yield plots.lines("Bytes of a sync", sizes, short_size)
    if syncs:
        again = {name: {s.version: s.again / max(1, s.total) for s in some} for name, some in syncs.items()}
        ever = [{s.version: s.ever / max(1, s.elements) for s in some} for some in syncs.values()]
        note = (
            "Of the elements that change, those that changed before; dashed: of all elements, those that ever changed."
        )
        yield plots.lines("Locality", again, share, beside=ever, note=note)
    for name, values in recording.numbers.items():
        yield plots.lines(name.capitalize(), {name: values}, lambda v: f"{v:.3g}", from_zero=False)


def _of_precision(recording: Recording, name: str, figures: Mapping[str, Any]) -> str:
    syncs = recording.of(name)
    if not figures["changed"]:
        return f"<section><h2>Where and how {escape(name)} changes</h2><p>Nothing changed.</p></section>"
    labels = [step.replace("-", "−") for step in figures["steps"]]
    shares = list(figures["steps"].values())
    unit = "steps to the neighbouring number of the format"
    drawn = [
        _heat(figures["by_layer"]),
        plots.rows(
            "Bits per change, by profile", figures["bits_per_change"], "{:.2f}".format, "Tensor table left out."
        ),
        *_classes(syncs),
    ]
    if labels:
        drawn.append(plots.columns("Size of the changes", labels, {"all changes": shares}, share, below=unit))
    return _section(f"Where and how {name} changes", drawn)


def _of_masters(recording: Recording, name: str, figures: Mapping[str, Any]) -> str:
    """What was sampled of the trainer's fp32 masters and gradients."""
    drawn = _section(f"Masters and gradients ({name})", master_plots(recording.of(name)))
    return drawn and drawn + gradient_table(figures["gradients"])


def _heat(rows: Sequence[Mapping[str, Any]]) -> str:
    cells = {}
    for row in rows:
        where = f"layer {row['layer']}" if row["layer"].isdigit() else row["layer"]
        about = f"{share(row['density'])} of {row['elements']:,} elements, {row['tensors']} tensor(s)"
        cells[row["layer"], row["kind"]] = row["density"], f"{row['kind']}, {where}: {about}"
    kinds = [kind for kind in ORDER if any(kind == row["kind"] for row in rows)]
    layers = list(dict.fromkeys(row["layer"] for row in rows))
    note = "Mean over all syncs. An empty frame: nothing changed."
    return plots.heat("Density by layer and kind", kinds, layers, cells, share, note)


def _classes(syncs: Sequence[Sync]) -> Iterable[str]:
    """For every dtype with a hundredth of the elements: who changes, and who there is, by magnitude."""
    for dtype in syncs[-1].classes:
        members: dict[int, int] = {}
        changed: dict[int, int] = {}
        for sync in syncs:
            classes = sync.classes.get(dtype, {"keys": [], "members": [], "changed": []})
            rows = zip(classes["keys"], classes["members"], classes["changed"], strict=True)
            for key, class_members, class_changed in rows:
                members[key] = members.get(key, 0) + class_members
                changed[key] = changed.get(key, 0) + class_changed
        total = sum(members.values())
        if total * 100 < sum(sync.elements for sync in syncs) or not any(changed.values()):
            continue
        keys = [key for key in sorted(members) if members[key] >= 1e-6 * total]
        bias = EXPONENTS.get(dtype, (0, None))[1]
        labels = [str(key) if bias is None else "0" if not key else power_of_two(key - bias) for key in keys]
        chance = [changed[key] / members[key] for key in keys]
        hover = [
            f"{label}: {share(p)} change, {changed[key]:,} of {members[key]:,}"
            for label, p, key in zip(labels, chance, keys, strict=True)
        ]
        below = "class: highest byte of the magnitude" if bias is None else "magnitude of the old value"
        yield plots.columns(
            f"Chance to change, by magnitude ({dtype})",
            labels,
            {"chance": chance},
            share,
            hover=hover,
            log=True,
            below=below,
        )
        parts = [members[key] / total for key in keys]
        yield plots.columns(
            f"Elements, by magnitude ({dtype})", labels, {"elements": parts}, share, hover=hover, below=below
        )


def _timeline(recording: Recording) -> Iterable[str]:
    if not recording.seconds:
        return
    versions = sorted(recording.seconds)[-_BARS:]
    recorded = {stage for version in versions for stage in recording.seconds[version]}
    stages = [*(stage for stage in STAGES if stage in recorded), *sorted(recorded - set(STAGES))]
    stacks = {stage: [recording.seconds[v].get(stage, 0.0) for v in versions] for stage in stages}
    note = "Stages one after the other, of the slowest receiver." + (
        f" The last {_BARS} versions." if len(recording.seconds) > _BARS else ""
    )
    yield plots.columns("Stages", list(map(str, versions)), stacks, duration, below="version", note=note, cut_far=True)
    if "pause" in recorded:
        pauses = {v: seconds["pause"] for v, seconds in recording.seconds.items() if "pause" in seconds}
        yield plots.lines("Pause: weights that cannot be used", {"pause": pauses}, duration)


def _projected(name: str, rows: Sequence[Mapping[str, Any]]) -> str:
    """A table of models and links: seconds of all weights, and of the fastest profile."""
    if not rows:
        return ""
    links = list(dict.fromkeys(row["link"] for row in rows))
    heads = "".join(f"<th>{escape(str(Link.parse(link)))}</th>" for link in links)
    lines = []
    for elements in dict.fromkeys(row["elements"] for row in rows):
        cells = []
        for row in (row for row in rows if row["elements"] == elements):
            ratio = row["dense_s"] / row["best_s"]
            cells.append(
                f'<td title="{ratio:,.1f}× faster"><s>{duration(row["dense_s"])}</s><br/>'
                f"<b>{duration(row['best_s'])}</b> {escape(row['best'])}</td>"
            )
        lines.append(f"<tr><th>{_count(elements)}</th>{''.join(cells)}</tr>")
    about = (
        "Above: all weights are sent. Below: the fastest profile. Find, encode, send, decode and apply, one after the "
        "other, on one machine, at the density and the bits per change of this recording. A model of another size may "
        f"change more or less than this one. Work: {rows[0]['speeds']}; sparserl plan --measure measures a machine."
    )
    return (
        f"<section><h2>Other links and models ({escape(name)})</h2><p>{escape(about)}</p><div class='scroll'>"
        f"<table class='plan'><thead><tr><th>elements</th>{heads}</tr></thead><tbody>{''.join(lines)}</tbody></table>"
        "</div></section>"
    )


def _count(elements: float) -> str:
    for unit, name in ((1e12, "T"), (1e9, "B"), (1e6, "M")):
        if elements >= unit:
            return f"{elements / unit:.3g} {name}"
    return f"{elements:,.0f}"


def _table(recording: Recording) -> str:
    rows: list[dict[str, object]] = [
        {
            "version": sync.version,
            "precision": sync.precision,
            "changed": f"{sync.total:,}",
            "density": share(sync.density),
            "bytes": f"{sync.bytes():,}",
            "less": f"{sync.ratio:,.1f}×",
            "bits per change": f"{8 * sync.bytes() / max(1, sync.total):.2f}",
            "changed before": share(sync.again / max(1, sync.total)),
        }
        for sync in recording.syncs
    ] or [
        {
            "version": version,
            "changed": f"{sent.changed:,}",
            "density": share(sent.changed / max(1, sent.elements)),
            "bytes": f"{sent.bytes:,}",
            "less": f"{sent.dense_bytes / max(1, sent.bytes):,.1f}×",
        }
        for version, sent in recording.sent.items()
    ]
    if not rows:
        return ""
    head = "".join(f"<th>{name}</th>" for name in rows[0])
    body = "".join(f"<tr>{''.join(f'<td>{escape(str(cell))}</td>' for cell in row.values())}</tr>" for row in rows)
    return (
        "<section><details><summary>All syncs</summary><div class='scroll'><table><thead><tr>"
        f"{head}</tr></thead><tbody>{body}</tbody></table></div></details></section>"
    )


def _section(title: str, drawn: Iterable[str]) -> str:
    inside = "".join(drawn)
    return f"<section><h2>{escape(title)}</h2><div class='plots'>{inside}</div></section>" if inside else ""


def _list(lines: Sequence[str]) -> str:
    return f"<ul>{''.join(f'<li>{escape(line)}</li>' for line in lines)}</ul>" if lines else ""
