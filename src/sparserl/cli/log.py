"""`sparserl log`: the versions of a run, and what each of them cost."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import typer

from ..humanize import age
from . import show
from .keys import read_trusted_keys
from .options import SESSIONS, CertificateFile, Endpoint, Json, Region, TokenFile, TrustedKeys, Url
from .pins import pin_line, pin_values
from .reporting import reporting
from .stores import open_store

if TYPE_CHECKING:
    from ..session.store.records import HeadRecord, Index, RouteStep, RunRecord

commands = typer.Typer()

_KINDS = ("anchor", "patch", "squashed")
_HEADER = ("version", "from", "kind", "changed", "density", "bytes", "bits/change", "profiles", "age")
_LABELS = ("step", "note")  # columns of runs whose publisher has named steps or written notes
_TEXT_COLUMNS = {2, 7, 10}  # kind, profiles and note


@commands.command(rich_help_panel=SESSIONS, epilog="Example:  sparserl log s3://bucket/run")
@reporting
def log(
    url: Url,
    trusted_key: TrustedKeys = None,
    token_file: TokenFile = None,
    endpoint: Endpoint = None,
    region: Region = None,
    ca: CertificateFile = None,
    json: Json = False,
) -> None:
    """List the anchors and patches of a run, newest version last.

    An anchor holds all weights. A patch leads from one version to the next, a squashed patch over several versions.
    Density is the share of elements that changed; bits/change is what was sent for each changed element. Pins follow.
    """
    from ..session.store.layouts import run_at
    from ..session.store.pins import intact_pins
    from ..session.store.retention import read_head, read_index, read_run

    keys = read_trusted_keys(trusted_key)
    with open_store(url, endpoint, region, token_file, ca) as store:
        head, _ = read_head(store, keys)
        index = read_index(store, head)
        run = run_at(store, read_run(store, head), index, head.version)
        elements = {step.version: run_at(store, run, index, step.version).layout.elements for step in index.steps}
        pins = list(intact_pins(store)) if store.writable else None  # others cannot list them
    steps = sorted(index.steps, key=lambda step: (step.version, step.base is not None, -(step.base or 0)))
    if json:
        values = {"url": url, **_values(head, run, index, steps, elements)}
        show.result(True, values | {"pins": None if pins is None else [pin_values(pin) for pin in pins]})
    else:
        lines = [pin_line(pin, head.run) for pin in pins or ()]
        show.result(False, {}, *_lines(head, run, index, steps, elements), *lines)


def _values(
    head: HeadRecord, run: RunRecord, index: Index, steps: Sequence[RouteStep], elements: Mapping[int, int]
) -> dict[str, Any]:
    """A run for scripts; `elements` are those of each version."""
    return {
        "run": head.run,
        "created": head.created,
        "version": head.version,
        "digest": head.digest.hex,
        "time": head.time,
        "tensors": len(run.layout.specs),
        "elements": run.layout.elements,
        "dense_bytes": run.layout.dense_bytes,
        "files": {name: file.blob.size for name, file in index.files_of(head.version, run).items()},
        "layouts": [layout.version for layout in index.layouts],
        "changed_files": [{"version": changes.version, "files": sorted(changes.files)} for changes in index.files],
        "steps": [_step_values(step, elements[step.version]) for step in steps],
        "totals": {kind: {"count": len(group), "bytes": _bytes(group)} for kind, group in _by_kind(steps).items()},
    }


def _lines(
    head: HeadRecord, run: RunRecord, index: Index, steps: Sequence[RouteStep], elements: Mapping[int, int]
) -> Iterator[str]:
    """A run for people: what it is, a table of its steps, and their total."""
    now = time.time()
    yield (
        f"run {head.run}, begun {age(now - head.created)} ago: {len(run.layout.specs):,} tensor(s), "
        f"{run.layout.elements:,} elements, {show.size(run.layout.dense_bytes)}, "
        f"{len(index.files_of(head.version, run))} file(s)"
    )
    for layout in index.layouts:
        yield f"version {layout.version}: other tensors"
    for changes in index.files:
        yield f"version {changes.version}: other files: {', '.join(sorted(changes.files))}"
    rows = [(*_HEADER, *_LABELS), *(_row(step, elements[step.version], now) for step in steps)]
    has_labels = any(step.step is not None or step.note is not None for step in steps)
    yield from _columns(rows if has_labels else [row[: len(_HEADER)] for row in rows])
    totals = [f"{kind} {len(group)} of {show.size(_bytes(group))}" for kind, group in _by_kind(steps).items() if group]
    versions = len({step.version for step in steps})
    yield (f"{versions} version(s), newest {head.version}: {', '.join(totals)}; {show.size(_bytes(steps))} in all")


def _by_kind(steps: Sequence[RouteStep]) -> dict[str, list[RouteStep]]:
    return {kind: [step for step in steps if _kind(step) == kind] for kind in _KINDS}


def _bytes(steps: Sequence[RouteStep]) -> int:
    return sum(step.bytes for step in steps)


def _kind(step: RouteStep) -> str:
    if step.base is None:
        return "anchor"
    return "patch" if step.base == step.version - 1 else "squashed"


def _bits_per_change(step: RouteStep) -> float | None:
    """What was sent for each changed element; None for an anchor, which holds no changes."""
    return 8 * step.bytes / step.changed if step.base is not None and step.changed else None


def _step_values(step: RouteStep, elements: int) -> dict[str, Any]:
    return {
        "version": step.version,
        "base": step.base,
        "kind": _kind(step),
        "digest": step.digest.hex,
        "changed": None if step.base is None else step.changed,
        "density": None if step.base is None else step.changed / max(1, elements),
        "bytes": step.bytes,
        "bits_per_changed": _bits_per_change(step),
        "profiles": list(step.profiles),
        "time": step.time,
        "step": step.step,
        "note": step.note,
    }


def _row(step: RouteStep, elements: int, now: float) -> tuple[str, ...]:
    bits = _bits_per_change(step)
    return (
        str(step.version),
        "-" if step.base is None else str(step.base),
        _kind(step),
        "-" if step.base is None else f"{step.changed:,}",
        "-" if step.base is None else f"{step.changed / max(1, elements):.4%}",
        f"{step.bytes:,}",
        "-" if bits is None else f"{bits:.2f}",
        "+".join(step.profiles) or "-",
        age(now - step.time),
        "-" if step.step is None else str(step.step),
        step.note or "",
    )


def _columns(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Rows as aligned lines; numbers are aligned to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [
            cell.ljust(width) if column in _TEXT_COLUMNS else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield "  ".join(cells).rstrip()
