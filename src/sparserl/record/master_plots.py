"""What a page shows of fp32 masters and gradients."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from . import plots
from .kinds import ORDER
from .masters import BINS, all_bins, norm, update_figures
from .plots import power_of_two, share
from .recording import Sync

_FEWEST = 2e-3  # columns at the ends that have a smaller share are left out


def master_plots(syncs: Sequence[Sync]) -> Iterable[str]:
    """Curves over versions and columns of sizes, of what was sampled."""
    with_masters = [sync for sync in syncs if sync.masters]
    if with_masters:
        rows = {sync.version: update_figures([sync.masters]) for sync in with_masters}
        curves = {
            "fp32 masters": {version: row["changed"] for version, row in rows.items()},
            "published": {version: row["visible"] for version, row in rows.items()},
        }
        note = "Of the sampled elements, those whose bits change."
        yield plots.lines("fp32 and published changes", curves, share, note=note)
        yield _sizes(
            "Size of fp32 updates",
            all_bins(sync.masters for sync in with_masters),
            "steps of the published format",
            f"An update of less than half a step is hidden, unless earlier ones add to it. {_sampling(with_masters)}",
        )
    with_gradients = [sync for sync in syncs if sync.gradients]
    if with_gradients:
        norms = {sync.version: norm(sync.gradients) for sync in with_gradients}
        yield plots.lines("Norm of the gradients", {"norm": norms}, "{:.3g}".format, note=_sampling(with_gradients))
        yield _sizes("Gradients by size", all_bins(sync.gradients for sync in with_gradients), "magnitude", "")


def updates_sentence(figures: Mapping[str, Any]) -> str:
    """The updates of masters in a sentence."""
    size = figures["steps"].get("median", 0.0)
    return (
        f"fp32 masters, of {figures['sampled']:,} samples: {share(figures['changed'])} change, "
        f"{share(figures['visible'])} as published; {share(figures['hidden'])} of the updates are too small to be "
        f"seen; half are below {size:.2g} steps of the published format."
    )


def gradient_table(kinds: Mapping[str, Mapping[str, Any]] | None) -> str:
    """The gradients of the last sync, by kind of tensor."""
    if not kinds:
        return ""
    columns = ("norm", "zero", "median size", "99% below", "sampled")
    head = "".join(f"<th>{column}</th>" for column in ("kind", *columns))
    lines = []
    for kind in (kind for kind in ORDER if kind in kinds):
        row = kinds[kind]
        sizes = [f"{row['size'][name]:.2g}" if row["size"] else "–" for name in ("median", "99%")]
        cells = (f"{row['norm']:.3g}", share(row["zero"]), *sizes, f"{row['sampled']:,} of {row['elements']:,}")
        lines.append(f"<tr><th>{escape(kind)}</th>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>")
    return (
        "<section><details open='open'><summary>Gradients of the last sync, by kind</summary><div class='scroll'>"
        f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table></div></details></section>"
    )


def _sizes(title: str, bins: Mapping[int, int], below: str, note: str) -> str:
    """Shares by power of two."""
    octaves: dict[int, int] = {}
    for key, count in bins.items():
        octaves[key // BINS] = octaves.get(key // BINS, 0) + count
    total = max(1, sum(octaves.values()))
    large = [octave for octave, count in octaves.items() if count >= _FEWEST * total] or [0]
    keys = range(min(large), max(large) + 1)
    shares = [octaves.get(key, 0) / total for key in keys]
    return plots.columns(title, [power_of_two(key) for key in keys], {"share": shares}, share, below=below, note=note)


def _sampling(syncs: Sequence[Sync]) -> str:
    """How the elements were chosen."""
    sampling = syncs[-1].sampling
    if sampling["elements"] is None:
        return "All elements."
    return (
        f"A sample of about {sampling['elements']:,} elements, the same ones in all versions (seed {sampling['seed']})."
    )
