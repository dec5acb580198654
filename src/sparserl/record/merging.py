"""The recordings of ranks, each of which has parts of the weights, as one recording of the whole."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..errors import SparserlError
from ..files import replacing
from . import masters
from .recorder import FORMAT
from .recording import Recording, Sync, Tensors

_COUNTS = ("dense_bytes", "again", "ever")


def merge(paths: Sequence[str | Path], to: str | Path) -> Recording:
    """Write the recording of the whole weights, from those of all ranks.

    Counts are added up, and so are the bytes of the ranks' patches; the seconds of a stage are those of the slowest
    rank. A version that some ranks do not have, as where one was killed, is left out.

    >>> import numpy as np, tempfile
    >>> from sparserl import Part, Region, Shards, tensor_table
    >>> from sparserl.record import Observer, Recorder, merge
    >>> weights, folder = np.zeros((4, 4), np.float32), tempfile.mkdtemp()
    >>> observers = []
    >>> for rank in range(2):
    ...     rows = Region((2 * rank, 0), (2, 4))
    ...     shards = Shards(tensor_table({"w": weights}), [Part("w", rows, weights[rows.slices])])
    ...     observers.append(Observer(Recorder(f"{folder}/{rank}.jsonl"), shards))
    >>> for version in range(2):
    ...     weights += version
    ...     _ = [observer.observe(version=version) for observer in observers]
    >>> merge([f"{folder}/0.jsonl", f"{folder}/1.jsonl"], f"{folder}/whole.jsonl").syncs[0].changed
    [16]

    Args:
        paths: The recordings of all ranks.
        to: The file to write, which must not exist.

    Raises:
        SparserlError: A file is no recording, the recordings are of other tensors, or are not those of all ranks.
    """
    if isinstance(paths, str | Path) or not paths:
        raise SparserlError("give the recordings of all ranks, at least one")
    if Path(to).exists():
        raise SparserlError(f"{to} exists; choose another name")
    ranks = {str(path): Recording.read(path) for path in paths}
    if len(ranks) < len(paths):
        raise SparserlError(f"a recording is given twice: {[str(path) for path in paths]}")
    lines = list(_lines(ranks))
    with replacing(Path(to)) as file:
        file.writelines(json.dumps(line, separators=(",", ":")).encode() + b"\n" for line in lines)
    return Recording.read(to)


def missing_versions(paths: Sequence[str | Path]) -> list[int]:
    """The versions that some of the recordings have, and others do not: `merge` leaves them out."""
    versions = [{sync.version for sync in Recording.read(path).syncs} for path in paths]
    return sorted({version for some in versions for version in some if not all(version in other for other in versions)})


def _lines(ranks: Mapping[str, Recording]) -> Iterable[dict[str, Any]]:
    """All lines of the merged recording."""
    first = next(iter(ranks.values()))
    yield {"kind": "run", "format": FORMAT, "time": min(r.time for r in ranks.values()), "meta": first.meta}
    for path, rank in ranks.items():
        if rank.tensors.keys() != first.tensors.keys():
            raise SparserlError(f"{path} has precisions {[*rank.tensors]}, {next(iter(ranks))} has {[*first.tensors]}")
    for precision in first.tensors:
        tensors = _merge_tensors(precision, {path: rank.tensors[precision] for path, rank in ranks.items()})
        yield {"kind": "tensors", "precision": precision} | {k: v for k, v in asdict(tensors).items() if k != "whole"}
        by_version = [{sync.version: sync for sync in rank.of(precision)} for rank in ranks.values()]
        for version in by_version[0]:
            syncs = [syncs[version] for syncs in by_version if version in syncs]
            if len(syncs) == len(ranks):
                yield {"kind": "sync", "version": version, "precision": precision} | _merge_syncs(syncs)
    yield from _notes([*ranks.values()])


def _merge_tensors(precision: str, ranks: Mapping[str, Tensors]) -> Tensors:
    """The tensors of the whole: every element must be in the recording of one rank."""
    paths = [*ranks]
    first = ranks[paths[0]]
    whole = first.whole or first.elements
    for path, tensors in ranks.items():
        same = (tensors.names, tensors.dtypes, tensors.whole or tensors.elements) == (first.names, first.dtypes, whole)
        if not same:
            raise SparserlError(f"{path} is of other tensors in {precision} than {paths[0]}; they must be of one model")
    elements = [sum(column) for column in zip(*(tensors.elements for tensors in ranks.values()), strict=True)]
    for name, covered, numel in zip(first.names, elements, whole, strict=True):
        if covered != numel:
            trouble = "a rank is missing" if covered < numel else "ranks have the same elements"
            raise SparserlError(
                f"tensor {name!r} has {numel} elements, the recordings have {covered} in {precision}: {trouble}"
            )
    return Tensors(first.names, first.dtypes, elements)


def _merge_syncs(syncs: Sequence[Sync]) -> dict[str, Any]:
    """One sync of all ranks."""
    line: dict[str, Any] = {name: sum(getattr(sync, name) for sync in syncs) for name in _COUNTS}
    line["changed"] = _added([sync.changed for sync in syncs])
    if all(sync.again_by_tensor for sync in syncs):  # recordings of earlier releases have no such column
        line["again_by_tensor"] = _added([sync.again_by_tensor for sync in syncs])
    line["steps"] = _added_by_key([sync.steps for sync in syncs]) if all(sync.steps for sync in syncs) else {}
    with_classes = all(sync.classes for sync in syncs if sync.dense_bytes)
    line["classes"] = _merge_classes([sync.classes for sync in syncs]) if with_classes else {}
    line["profiles"] = _merge_profiles([sync.profiles for sync in syncs])
    names = syncs[0].experts
    if names:
        line["experts"] = {name: _added([sync.experts[name] for sync in syncs]) for name in names}
    return line | _merge_samples(syncs)


def _merge_samples(syncs: Sequence[Sync]) -> dict[str, Any]:
    """The samples of masters and gradients, which must be parts of one; a rank that has none adds nothing."""
    samplings = [sync.sampling for sync in syncs if sync.sampling]
    if not samplings:
        return {}
    if any(sampling != samplings[0] for sampling in samplings):
        raise SparserlError(
            f"version {syncs[0].version} was sampled in different ways: {samplings}; recorders of all ranks must have "
            "the same `sample` and `seed`"
        )
    by_name = {"masters": masters.merged([sync.masters for sync in syncs])}
    by_name["gradients"] = masters.merged([sync.gradients for sync in syncs])
    return {"sampling": samplings[0]} | {name: kinds for name, kinds in by_name.items() if kinds}


def _added(columns: Sequence[Sequence[int]]) -> list[int]:
    return [sum(row) for row in zip(*columns, strict=True)]


def _added_by_key(rows: Iterable[Mapping[str, int]]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for row in rows:
        total.update(row)
    return dict(total)


def _merge_classes(ranks: Sequence[Mapping[str, Mapping[str, Any]]]) -> dict[str, dict[str, Any]]:
    """Members and changes by dtype and magnitude class."""
    merged = {}
    for dtype in dict.fromkeys(name for classes in ranks for name in classes):
        members: Counter[int] = Counter()
        changed: Counter[int] = Counter()
        present = [classes[dtype] for classes in ranks if dtype in classes]
        for columns in present:
            members.update(dict(zip(columns["keys"], columns["members"], strict=True)))
            changed.update(dict(zip(columns["keys"], columns["changed"], strict=True)))
        keys = sorted(members)
        merged[dtype] = {
            "shift": present[0]["shift"],
            "keys": keys,
            "members": [members[key] for key in keys],
            "changed": [changed[key] for key in keys],
        }
    return merged


def _merge_profiles(ranks: Sequence[Mapping[str, Mapping[str, int]]]) -> dict[str, dict[str, int]]:
    """Bytes of all ranks in the profiles that all have; each has the tensor table, which is sent once."""
    names = [name for name in ranks[0] if all(name in profiles for profiles in ranks)]
    merged = {}
    for name in names:
        merged[name] = _added_by_key(profiles[name] for profiles in ranks)
        merged[name]["table"] = max(profiles[name]["table"] for profiles in ranks)
    return merged


def _notes(ranks: Sequence[Recording]) -> Iterable[dict[str, Any]]:
    """What was noted about versions: of seconds the slowest, of others what the first rank says that has them."""
    notes: dict[int, dict[str, Any]] = {}
    for rank in ranks:
        for version, seconds in rank.seconds.items():
            stages = notes.setdefault(version, {}).setdefault("seconds", {})
            stages.update({stage: max(value, stages.get(stage, 0.0)) for stage, value in seconds.items()})
        for name, by_version in rank.numbers.items():
            for version, number in by_version.items():
                notes.setdefault(version, {}).setdefault("numbers", {}).setdefault(name, number)
        for version, sizes in rank.sent.items():
            notes.setdefault(version, {}).setdefault("sent", asdict(sizes))
    return ({"kind": "note", "version": version} | notes[version] for version in sorted(notes))
