"""What is done with hostile bytes, in processes of their own that watch time and memory.

Run as a program it takes every bomb every way and prints one line of JSON for each: how it ended, the processor time it
took and how far the resident memory grew. An address space limit keeps a bomb that works from taking the machine with
it.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import sparserl
from sparserl import Bits, Digest, Patch, SparserlError
from sparserl.errors import NeedsBase
from sparserl.weights.local import LocalWeights
from tests.hostile import bombs
from tests.hostile.bombs import BOMBS
from tests.hostile.forged_store import Forged

ADDRESS_SPACE = 4 << 30
REFERENCE = 0.15  # seconds that `slowness` takes on the processor that the bounds are for; an Arm Neoverse N1: 0.37
WAYS: dict[str, Callable[[bytes, Path], str]] = {}
WEIGHTS, TENSORS = 1 << 30, 1 << 17  # bytes and tensors that may be allocated to apply a bomb to


def way(go: Callable[[bytes, Path], str]) -> Callable[[bytes, Path], str]:
    """A way in: what somebody does with bytes that may be hostile. Says what was found."""
    WAYS[go.__name__] = go
    return go


@way
def read(data: bytes, folder: Path) -> str:
    its_patch = Patch.from_bytes(data)
    heads = its_patch.contents.heads
    conditional = any(head.profile.conditional for head in heads)
    base = LocalWeights.of(weights(its_patch), its_patch.table) if conditional else None
    for index in range(its_patch.buckets):
        its_patch.contents.decode(index, base)
    return f"valid: {len(heads)} buckets, {len(its_patch.table)} tensors"


@way
def inspect(data: bytes, folder: Path) -> str:
    """From a file, as `sparserl inspect` does."""
    (folder / "patch").write_bytes(data)
    stats = Patch.open(folder / "patch").stats()
    return f"valid: {len(stats.buckets)} buckets"


@way
def apply(data: bytes, folder: Path) -> str:
    """It leads nowhere, which is seen when all of it was written."""
    its_patch = leading(Patch.from_bytes(data), Digest(1, 2))
    return f"valid: {its_patch.apply(weights(its_patch), digest=its_patch.base).changed} changed"


@way
def invert(data: bytes, folder: Path) -> str:
    its_patch = Patch.from_bytes(data)
    try:
        return f"valid: {its_patch.invert().changed} changed"
    except NeedsBase:
        return f"valid: {its_patch.invert(weights(its_patch), digest=its_patch.base).changed} changed"


@way
def squash(data: bytes, folder: Path) -> str:
    """With itself: it starts from the digest that it leads to."""
    its_patch = Patch.from_bytes(data)
    try:
        return f"valid: {sparserl.squash(its_patch, its_patch).changed} changed"
    except NeedsBase:
        base = weights(its_patch)
        return f"valid: {sparserl.squash(its_patch, its_patch, base=base, digest=its_patch.base).changed} changed"


@way
def merge(data: bytes, folder: Path) -> str:
    its_patch = Patch.from_bytes(data)
    return f"valid: {sparserl.merge(its_patch, its_patch).buckets} buckets"


@way
def sync(data: bytes, folder: Path) -> str:
    """From a store, as the anchor of a run."""
    its_patch = Patch.from_bytes(data)
    table = its_patch.table
    target = weights(its_patch)
    store = Forged(folder / "store", table, aside(lambda: sparserl.digest(target)))
    buckets = [bytes(its_patch.contents.bucket(index)) for index in range(its_patch.buckets)]
    store.write([store.step(None, 0, buckets, its_patch.changed)])
    return store.sync(target)


def ways(name: str) -> tuple[str, ...]:
    """All ways that a bomb is taken; with a million tensors, those that need none of them at hand."""
    return ("read", "inspect") if name == "table_of_a_million_tensors" else tuple(WAYS)


class NotAtHand(SparserlError):
    """Weights that are too large to be had for a test."""


def weights(its_patch: Patch) -> dict[str, Bits]:
    """Zeros to apply a patch to; memory that no one writes to takes no room."""
    if its_patch.table.dense_bytes > WEIGHTS or len(its_patch.table) > TENSORS:
        raise NotAtHand(f"the weights would be {its_patch.table}")
    specs = its_patch.table.specs
    return aside(lambda: {s.name: Bits(np.zeros(s.shape, s.dtype.uint), s.dtype) for s in specs})


def leading(its_patch: Patch, result: Digest) -> Patch:
    """The same patch, with the promise of another result."""
    its_patch.contents.ends = its_patch.contents.ends._replace(result=result)
    return its_patch


ASIDE = {"seconds": 0.0, "bytes": 0}


def aside(make: Callable[[], Any]) -> Any:
    """Something that the test takes, not the reader: neither its time nor its memory counts."""
    started, before = time.process_time(), resident()
    made = make()
    ASIDE["seconds"] += time.process_time() - started
    ASIDE["bytes"] += max(0, resident() - before)
    return made


def taken(its_patch: Patch | None, its: str) -> dict[str, float]:
    """What the weights themselves may take: seconds for tensors and elements, and memory for a copy of them."""
    if its_patch is None:
        return {"weights": 0.0, "bytes": 0}
    table = its_patch.table
    at_hand = table.dense_bytes <= WEIGHTS and its not in ("inspect", "merge")
    seconds = (5e-5 if at_hand else 1e-5) * len(table) + 2e-7 * (its_patch.changed + dense_elements(its_patch))
    return {"weights": seconds + 5e-9 * table.dense_bytes * at_hand, "bytes": table.dense_bytes * at_hand}


def dense_elements(its_patch: Patch) -> int:
    """How many elements are written that need not change."""
    try:
        return sum(head.dense_elements for head in its_patch.contents.heads)
    except SparserlError:
        return 0


def opened(data: bytes) -> Patch | None:
    try:
        return Patch.from_bytes(data)
    except SparserlError:
        return None


def watch(go: Callable[[], str]) -> dict[str, Any]:
    """Do one thing and say what it took."""
    ASIDE.update(seconds=0.0, bytes=0)
    started = time.process_time()
    before = resident()
    try:
        ended = go()
    except SparserlError as error:
        ended = f"{type(error).__name__}: {error}"
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    seconds = time.process_time() - started - ASIDE["seconds"]
    return {"ended": ended, "seconds": seconds, "grown": peak - before - ASIDE["bytes"]}


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def apart(name: str, go: Callable[[Path], str], **more: Any) -> None:
    """Do one thing in a process of its own, and print a line of JSON about it."""
    sys.stdout.flush()
    if child := os.fork():
        _, status = os.waitpid(child, 0)
        if status:
            died = {"name": name, "ended": f"died with status {status}", "seconds": 0, "grown": 0}
            print(json.dumps({**died, **more}))
        return
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + ADDRESS_SPACE,) * 2)
    with tempfile.TemporaryDirectory(prefix="bomb-") as folder:
        record = watch(lambda: go(Path(folder)))
    print(json.dumps({"name": name, **record, **more}), flush=True)
    os._exit(0)


def slowness() -> float:
    """How much longer this processor takes now than the one that the bounds were set on, for Python and for arrays."""
    started = time.process_time()
    for _ in range(3):
        sorted(f"{i * 7919 % 100_003}" for i in range(100_000))
        np.sort(np.arange(1 << 20)[::-1] * 7919 % 1_000_003)
    return max(1.0, (time.process_time() - started) / REFERENCE)


def warm(folder: Path) -> None:
    """Load and compile what readers need, outside of what is measured."""
    small = (
        bombs.changes_in_no_bytes(5000),
        bombs.boxes_and_changes_in_one_bucket(64),
        bombs.dense_entries_of_one_element(128),
        bombs.dense_of_zeros(5000),
        *(BOMBS[name]() for name in ("chunks_of_nothing", "classes_of_many_entries", "symbols_of_a_table_without_end")),
    )
    for data in small:
        for go in WAYS.values():
            with contextlib.suppress(SparserlError):
                go(data, folder)
    for name in ("tiles_in_no_bytes", "classes_in_no_bytes"):
        read(BOMBS[name](), folder)


def main(names: list[str], reads: bool) -> None:
    """Watch what is done with bombs, by default with all of them; or only what reads them."""
    with tempfile.TemporaryDirectory(prefix="bomb-") as folder:
        warm(Path(folder))
    print(json.dumps({"slowness": slowness()}), flush=True)
    for name in names or list(BOMBS):
        data = BOMBS[name]()
        its_patch = opened(data)
        for its in ["read"] if reads else ways(name):
            inputs = 2 if its in ("merge", "squash") else 1
            apart(name, partial(WAYS[its], data), way=its, size=inputs * len(data), **taken(its_patch, its))


if __name__ == "__main__":
    main([name for name in sys.argv[1:] if name != "--reads"], "--reads" in sys.argv)
