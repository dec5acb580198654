"""A recording, read."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import SparserlError
from .recorder import FORMAT
from .statistics import PARTS

_MOST_SECONDS = 1e11  # since 1970, and of anything that takes time


@dataclass(frozen=True)
class Tensors:
    """The tensors of one precision, column by column."""

    names: list[str]
    dtypes: list[str]
    elements: list[int]
    whole: list[int] | None = None  # elements of all ranks, in the recording of one that has parts


@dataclass
class Sync:
    """One sync in one precision, as it was observed."""

    version: int
    precision: str
    dense_bytes: int
    changed: list[int]  # by tensor
    elements: int
    again: int  # changed elements that had changed in an earlier sync
    ever: int  # elements that changed in any sync so far
    steps: dict[str, int]
    classes: dict[str, dict[str, Any]]
    profiles: dict[str, dict[str, int]]  # bytes by what they are for
    again_by_tensor: list[int] = field(default_factory=list)
    experts: dict[str, list[int]] = field(default_factory=dict)  # changes by expert, of tensors that have all of them
    masters: dict[str, dict[str, Any]] = field(default_factory=dict)  # updates of fp32 masters, by kind of tensor
    gradients: dict[str, dict[str, Any]] = field(default_factory=dict)  # by kind of tensor
    sampling: dict[str, int | None] = field(default_factory=dict)  # of which elements these two are

    @property
    def total(self) -> int:
        return sum(self.changed)

    @property
    def density(self) -> float:
        return self.total / max(1, self.elements)

    @property
    def inactive(self) -> int:
        """Tensors in which nothing changed."""
        return self.changed.count(0)

    def bytes(self, profile: str = "auto") -> int:
        """Of the patch, without the tensor table, which a run sends once."""
        return sum(size for part, size in self.profiles[profile].items() if part != "table")

    @property
    def ratio(self) -> float:
        return self.dense_bytes / max(1, self.bytes())


@dataclass(frozen=True)
class PublishedSizes:
    """One version as its publisher reported it."""

    changed: int
    elements: int
    bytes: int
    dense_bytes: int


@dataclass
class Recording:
    """All that is in a file: syncs in the order they came, and what was noted about their versions.

    A recording is a file of JSON lines. Each has a `kind`:

    - `run`, the first line: `format` (1), `time`, `meta`.
    - `tensors`, before the first sync of a precision: `precision`, `names`, `dtypes`, `elements`, column by column. Of
      a rank that has parts, `elements` are its own, and `whole` those of all ranks.
    - `sync`, one sync in one precision: `version`, `precision`; `dense_bytes`, bytes of all weights; `changed`, changed
      elements of each tensor; `again`, changed elements that had changed in an earlier sync of this recorder and
      precision, and `again_by_tensor`; `experts`, by tensor that has all experts of a layer the changed elements of
      each; `ever`, elements that changed in any; `steps`, how far changes go, in neighbouring numbers of the
      format (`-1`, `+1`, `-2`, `+2`, `more`); `classes`, by dtype the `keys`, `members` and `changed` elements of each
      magnitude (a key is the old magnitude shifted right by `shift`); `profiles`, by profile the bytes of `index`,
      `value`, `dense` entries, `header` and tensor `table`; `seconds` and `numbers` as in a note. Without the old bits
      `steps` and `classes` are empty, and of `profiles` there is `auto` alone.
      `masters` and `gradients`, where a trainer has them, are of a sample of the elements: `sampling` says how many
      (`elements`, None for all) and by which `seed`. `masters` has by kind of tensor the elements `sampled`; those of
      which the fp32 bits `changed`; those whose published bits did (`visible`), or only the fp32 bits did (`hidden`);
      and `bins` of the sizes of updates, in steps of the published format. `gradients` has by kind the elements
      `sampled` of all `elements`, how many are `zero` or `not_finite`, the exact sum of their `squares` in units of
      2^-298, and `bins` of their sizes. Bin `b` is from 2^(b/4) to 2^((b+1)/4).
    - `note`: `version`, and any of `seconds` (by stage; of several receivers the slowest), `numbers` (by name, such as
      `reward`), `sent` (what a publisher reported).
    """

    meta: dict[str, Any]
    time: float
    tensors: dict[str, Tensors] = field(default_factory=dict)
    syncs: list[Sync] = field(default_factory=list)
    sent: dict[int, PublishedSizes] = field(default_factory=dict)  # by version
    seconds: dict[int, dict[str, float]] = field(default_factory=dict)  # by version and stage, of the slowest
    numbers: dict[str, dict[int, float]] = field(default_factory=dict)  # by name and version
    cut: bool = False  # the last line is not whole: the recorder was killed, or still writes

    @classmethod
    def read(cls, path: str | Path) -> Recording:
        """A recording from its file. A last line that is not whole is left out; any other is an error."""
        lines = Path(path).read_bytes().split(b"\n")
        cut = bool(lines.pop())
        try:
            first, *rest = [json.loads(line) for line in lines]
            if first["kind"] != "run" or first["format"] != FORMAT:
                raise SparserlError(f"{path} is not a recording of this release")
            recording = cls(first["meta"], _finite(first["time"]), cut=cut)
            for line in rest:
                recording._add(line)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise SparserlError(f"{path} is not a recording: {error!r}") from error
        return recording

    @property
    def rewards(self) -> dict[int, float]:
        """By version."""
        return self.numbers.get("reward", {})

    def of(self, precision: str) -> list[Sync]:
        """The syncs of one precision."""
        return [sync for sync in self.syncs if sync.precision == precision]

    def rows(self, precision: str) -> Iterator[tuple[str, int, int]]:
        """Name, elements and changes over all syncs of every tensor."""
        syncs = self.of(precision)
        tensors = self.tensors[precision]
        for i, (name, elements) in enumerate(zip(tensors.names, tensors.elements, strict=True)):
            yield name, elements, sum(sync.changed[i] for sync in syncs)

    def _add(self, line: dict[str, Any]) -> None:
        kind = line.pop("kind")
        if kind == "run":  # of a second recorder that began at the same moment
            return
        if kind == "tensors":
            precision = line.pop("precision")
            self.tensors[precision] = tensors = Tensors(**line)
            "".join(tensors.names)  # which are text
            return
        version = line["version"]
        for stage, seconds in line.pop("seconds", {}).items():
            stages = self.seconds.setdefault(version, {})
            stages[stage] = max(_finite(seconds), stages.get(stage, 0.0))
        for name, number in line.pop("numbers", {}).items():
            if math.isfinite(number):  # a reward that is not a number has no place in a chart
                self.numbers.setdefault(name, {})[version] = number
        if "sent" in line:
            self.sent[version] = PublishedSizes(**line.pop("sent"))
        if kind == "sync":
            tensors = self.tensors[line["precision"]]
            sync = Sync(elements=sum(tensors.elements), **line)
            _require_columns(sync, tensors)
            self.syncs.append(sync)


def _finite(number: float) -> float:
    if not abs(number) < _MOST_SECONDS:
        raise ValueError(f"{number!r} seconds")
    return number


def _require_columns(sync: Sync, tensors: Tensors) -> None:
    """Refuse a sync whose columns are not those of its tensors, magnitudes and profiles, or hold other than numbers."""
    columns: list[list[Any]] = [sync.changed, [sync.version, sync.dense_bytes, sync.again, sync.ever]]
    columns += [[sync.profiles["auto"][part] for part in PARTS], [*sync.steps.values()]]
    columns += [[sizes[part] for part in PARTS] for sizes in sync.profiles.values()]
    for classes in sync.classes.values():
        rows = zip(classes["keys"], classes["members"], classes["changed"], strict=True)
        columns += map(list, rows)
    numbers = [number for column in columns for number in column]
    if len(sync.changed) != len(tensors.names) or any(type(n) is not int or not 0 <= n < 1 << 63 for n in numbers):
        raise ValueError(f"version {sync.version!r} is damaged")
