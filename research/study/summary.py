"""A run of the study as study.json keeps it: counts of every sync, and sums over the later half of them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from sparserl.record import Recording, Sync
from sparserl.record.kinds import place


def summary(counted: dict[str, Any], syncs: Path, apart: Path) -> dict[str, Any]:
    """Everything that tables and plots are made of.

    `settled` are the syncs of the later half: the first steps of AdamW are larger than those that follow.
    """
    recording, distances = Recording.read(syncs), Recording.read(apart)
    about = counted["about"]
    settled = about["syncs"] // 2
    out = {**counted, "settled": settled, "precisions": {}}
    for precision, tensors in recording.tensors.items():
        found = recording.of(precision)
        later = [sync for sync in found if sync.version > settled]
        out["precisions"][precision] = {
            "elements": sum(tensors.elements),
            "tensors": len(tensors.names),
            "dense bytes": found[0].dense_bytes,
            "recorded": [sync.version for sync in found],
            "bytes": {name: [sync.bytes(name) for sync in found] for name in found[0].profiles},
            "steps": _added(sync.steps for sync in later),
            "classes": classes(later),
            "kinds": _grouped((place(n)[1], e, c) for n, e, c in _rows(tensors, later)),
            "layers": _grouped((place(n)[0], e, c) for n, e, c in _rows(tensors, later) if place(n)[0] is not None),
        }
    out["again"] = [sync.again for sync in recording.of("bf16")]
    out["ever"] = [sync.ever for sync in recording.of("bf16")]
    squashed = {1: recording.of("bf16")[-1], **{sync.version: sync for sync in distances.syncs}}
    out["squashed"] = {d: {name: sync.bytes(name) for name in sync.profiles} for d, sync in sorted(squashed.items())}
    return out


def _rows(tensors: Any, syncs: list[Sync]) -> Iterable[tuple[str, int, int]]:
    """Name, elements and changes of every tensor, over some syncs."""
    for i, (name, elements) in enumerate(zip(tensors.names, tensors.elements, strict=True)):
        yield name, elements * len(syncs), sum(sync.changed[i] for sync in syncs)


def _grouped(rows: Iterable[tuple[Any, int, int]]) -> dict[Any, list[int]]:
    """Changed elements, and all, of each group."""
    out: dict[Any, list[int]] = defaultdict(lambda: [0, 0])
    for group, elements, changed in rows:
        out[group][0] += changed
        out[group][1] += elements
    return dict(out)


def _added(steps: Iterable[dict[str, int]]) -> dict[str, int]:
    out: dict[str, int] = defaultdict(int)
    for each in steps:
        for name, number in each.items():
            out[name] += number
    return dict(out)


def classes(syncs: list[Sync]) -> dict[str, dict[int, list[int]]]:
    """By dtype and exponent: changed elements, and all."""
    out: dict[str, dict[int, list[int]]] = {}
    for sync in syncs:
        for dtype, found in sync.classes.items():
            rows = zip(found["keys"], found["members"], found["changed"], strict=True)
            sums = out.setdefault(dtype, defaultdict(lambda: [0, 0]))
            for key, members, changed in rows:
                sums[key][0] += changed
                sums[key][1] += members
    return {dtype: dict(sums) for dtype, sums in out.items()}
