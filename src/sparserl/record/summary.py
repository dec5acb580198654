"""A recording in figures: what the page shows in words, and `sparserl report --json` prints."""

from __future__ import annotations

import math
from collections import Counter
from statistics import median
from typing import Any

from ..codec import PROFILES
from ..parallel import default_threads
from ..plan import Link, Speeds, best, predict
from .activity import expert_activity, locality
from .kinds import ORDER, OTHER, place
from .masters import gradient_figures, update_figures
from .recording import Recording, Sync
from .statistics import PARTS

LINKS = ("100Mbit", "1Gbit", "10Gbit", "100Gbit", "400Gbit")
SIZES = (7e9, 70e9, 671e9)  # elements of other models
_ROWS = 40  # of tensors that stand outside the layers and are of no known kind


def summary(recording: Recording) -> dict[str, Any]:
    """Everything in figures; medians are over the syncs of a precision."""
    return {
        "meta": recording.meta,
        "precisions": {name: _precision(recording, name) for name in recording.tensors if recording.of(name)},
        "sent": _sent(recording),
        "seconds": {stage: median(values) for stage, values in _by_stage(recording).items()},
        "numbers": {name: _ends(values) for name, values in recording.numbers.items()},
        "missing": missing(recording),
    }


def missing(recording: Recording) -> list[str]:
    """What the recording does not have, in words."""
    out = []
    if not recording.syncs:
        out.append("no weights were observed: nothing is said about tensors, classes, profiles or other models")
    if any(not sync.steps for sync in recording.syncs):
        out.append("old bits were not at hand: nothing is said about magnitudes, sizes of changes and all profiles")
    if not recording.seconds:
        out.append("no timings were recorded: there is no timeline")
    if not recording.rewards:
        out.append("no rewards were recorded")
    if recording.cut:
        out.append("the last line of the file is not whole, and was left out")
    return out


def _precision(recording: Recording, name: str) -> dict[str, Any]:
    syncs = recording.of(name)
    last = syncs[-1]
    steps: Counter[str] = Counter()
    for sync in syncs:
        steps.update(sync.steps)
    changes = sum(sync.total for sync in syncs)
    profiles = [profile for profile in last.profiles if all(profile in sync.profiles for sync in syncs)]
    return {
        "syncs": len(syncs),
        "versions": [syncs[0].version, last.version],
        "tensors": len(last.changed),
        "elements": last.elements,
        "dense_bytes": last.dense_bytes,
        "changed": changes,
        "density": median(sync.density for sync in syncs),
        "density_range": [min(sync.density for sync in syncs), max(sync.density for sync in syncs)],
        "by_version": [
            {"version": s.version, "changed": s.total, "density": s.density, "bytes": s.bytes()} for s in syncs
        ],
        "by_layer": by_layer(recording, name),
        "bytes": {profile: median(sync.bytes(profile) for sync in syncs) for profile in profiles},
        "ratio": sum(s.dense_bytes for s in syncs) / max(1, sum(s.bytes() for s in syncs)),
        "bits_per_change": {profile: bits(syncs, profile) for profile in profiles},
        "steps": {step: count / max(1, changes) for step, count in steps.items()},
        "inactive_tensors": median(sync.inactive for sync in syncs),
        "changed_before": last.again / max(1, last.total),
        "ever_changed": last.ever / max(1, last.elements),
        "locality": locality(last),
        "experts": expert_activity(recording, name),
        "masters": update_figures(sampled) if (sampled := [sync.masters for sync in syncs if sync.masters]) else None,
        "gradients": _gradients(syncs),
        "projection": projection(syncs) if changes and set(PROFILES) <= set(profiles) else [],
    }


def by_layer(recording: Recording, precision: str) -> list[dict[str, Any]]:
    """Density by layer and kind of tensor, over all syncs: layers in order, then what lies outside of them.

    What lies outside and is of no known kind has its name in the place of a layer.
    """
    rows = list(recording.rows(precision))
    names = _names([name for name, *_ in rows if place(name) == (None, OTHER)])
    cells: dict[tuple[float, str, str], list[int]] = {}
    for name, elements, changed in rows:
        layer, kind = place(name)
        key = (math.inf, names.get(name, "outside"), kind) if layer is None else (layer, str(layer), kind)
        cells[key] = [a + b for a, b in zip(cells.get(key, (0, 0, 0)), (1, elements, changed), strict=True)]
    syncs = len(recording.of(precision))
    columns = ("layer", "kind", "tensors", "elements", "changed", "density")
    return [
        dict(zip(columns, (*key[1:], *cell, cell[2] / max(1, cell[1] * syncs)), strict=True))
        for key, cell in sorted(cells.items(), key=lambda row: (row[0][0], ORDER.index(row[0][2])))
    ]


def _names(names: list[str]) -> dict[str, str]:
    """What tensors are called in a table with few rows: their names, or as many leading parts of them as it takes."""
    for parts in range(max((name.count(".") + 1 for name in names), default=0), 0, -1):
        short = {name: ".".join(name.split(".")[:parts]) for name in names}
        called = {name: start if start == name else f"{start}.*" for name, start in short.items()}
        if len({*called.values()}) <= _ROWS:
            return called
    return {}


def _gradients(syncs: list[Sync]) -> dict[str, Any] | None:
    """The gradients of the last sync that has them, by kind of tensor."""
    kinds = next((sync.gradients for sync in reversed(syncs) if sync.gradients), None)
    return None if kinds is None else {kind: gradient_figures(counts) for kind, counts in kinds.items()}


def bits(syncs: list[Sync], profile: str) -> dict[str, float]:
    """Bits per change by what they are for, over all syncs, without the tensor table."""
    changes = sum(sync.total for sync in syncs)
    parts = [part for part in PARTS if part != "table"]
    return {part: 8 * sum(s.profiles[profile][part] for s in syncs) / changes if changes else 0.0 for part in parts}


def projection(syncs: list[Sync]) -> list[dict[str, Any]]:
    """How long a sync takes over other links and for other models, of the same density and bits per change."""
    last = syncs[-1]
    changes = sum(sync.total for sync in syncs)
    elements = sum(sync.elements for sync in syncs)
    speeds = Speeds.load_or_built_in(default_threads())
    bits_per_change = {name: sum(bits(syncs, name).values()) for name in speeds.profiles}
    out = []
    for size in (last.elements, *SIZES):
        for text in LINKS:
            width = last.dense_bytes / last.elements
            estimates = predict(size, width, changes / elements, Link.parse(text), speeds, bits_per_change)
            dense = estimates[0]
            fastest = best(estimates)
            out.append(
                {
                    "elements": size,
                    "link": text,
                    "dense_s": dense.total_s,
                    "best": fastest.name,
                    "best_s": fastest.total_s,
                    "speeds": speeds.origin,
                }
            )
    return out


def _sent(recording: Recording) -> dict[str, Any] | None:
    sent = list(recording.sent.values())
    if not sent:
        return None
    return {
        "syncs": len(sent),
        "density": median(sizes.changed / max(1, sizes.elements) for sizes in sent),
        "bytes": median(sizes.bytes for sizes in sent),
        "ratio": sum(sizes.dense_bytes for sizes in sent) / max(1, sum(sizes.bytes for sizes in sent)),
    }


def _by_stage(recording: Recording) -> dict[str, list[float]]:
    by_stage: dict[str, list[float]] = {}
    for stages in recording.seconds.values():
        for stage, seconds in stages.items():
            by_stage.setdefault(stage, []).append(seconds)
    return by_stage


def _ends(values: dict[int, float]) -> dict[str, float]:
    """First and last are means of a tenth of the versions."""
    ordered = [values[version] for version in sorted(values)]
    tenth = max(1, len(ordered) // 10)
    return {"first": sum(ordered[:tenth]) / tenth, "last": sum(ordered[-tenth:]) / tenth}
