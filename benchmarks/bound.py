"""How near `ctx` comes to the entropy of its own classes, patch after patch, on the traces.

`python -m benchmarks.bound` prints a table. The bound of a bucket takes the classes that the encoder chose, as they
stand in its CLASSES stream: which members of a class change, n·H(k/n), and by which step, k·H(step | class). Were
changes independent given the class, no code could go below it; that they cluster pays for a part of the overhead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import sparserl
from benchmarks import traces
from benchmarks.traces import Weights
from sparserl.codec import Classes, Stream, ctx
from sparserl.codec.coders import Buffer, Coder, Rans
from sparserl.codec.index import tiles
from sparserl.kernels import cpu, reference
from sparserl.weights.dtypes import BY_NAME, DType
from sparserl.wire import BytesInMemory, Head, PatchReader, decode_bucket

LARGE = 100_000  # changes: from here on directory and states must be small
_BF16 = BY_NAME["bfloat16"]
_TILES = frozenset((Stream.TILE_TOKENS, Stream.TILE_LOWS))
_NO_CHANGES = frozenset((Stream.ENTRIES, Stream.CLASSES))

Coded = Mapping[int, tuple[Coder, list[Buffer]]]


@dataclass(frozen=True)
class Parts:
    """One patch (or several added up) in bytes, and its bound in bits. The tensor table is left out."""

    changed: int = 0
    bytes: int = 0
    streams: int = 0  # gaps, steps and tile counts as coded, with the coder's tables and states
    tiles: int = 0  # of them, the tile counts
    tables: int = 0  # of them, the coder's tables
    states: int = 0  # of them, the coder's states
    index_bits: float = 0.0
    step_bits: float = 0.0

    def __add__(self, other: Parts) -> Parts:
        return Parts(*(a + b for a, b in zip(vars(self).values(), vars(other).values(), strict=True)))

    @property
    def bits(self) -> float:
        """On the wire, per changed element."""
        return 8 * self.bytes / self.changed

    @property
    def stream_bits(self) -> float:
        return 8 * self.streams / self.changed

    @property
    def bound(self) -> float:
        return (self.index_bits + self.step_bits) / self.changed

    @property
    def over(self) -> float:
        """How far the streams are above the bound, as a share of it."""
        return self.stream_bits / self.bound - 1

    @property
    def directory(self) -> int:
        """All that is not changes: bucket headers, entry tables, stream directories, tile counts, checksums, footer."""
        return self.bytes - self.streams + self.tiles

    @property
    def overhead(self) -> float:
        """Directory and coder states, as a share of the bytes."""
        return (self.directory + self.states) / self.bytes


@dataclass(frozen=True)
class Bound:
    """All syncs of one trace."""

    trace: str
    elements: int
    patches: tuple[Parts, ...]

    @property
    def total(self) -> Parts:
        return sum(self.patches, Parts())

    @property
    def density(self) -> float:
        return self.total.changed / self.elements

    @property
    def overhead(self) -> float | None:
        """The largest share of directory and states among patches with many changes; None where there are none."""
        return max((p.overhead for p in self.patches if p.changed >= LARGE), default=None)


def measure(folder: Path, tick: Callable[[str], None] = lambda _: None) -> list[Bound]:
    """The bound of every trace in a folder. Each patch is applied and compared first."""
    out = []
    for run in traces.runs(folder):
        patches, elements = [], 0
        for old, new in traces.syncs(folder, run):
            tick(run)
            elements += sum(a.size for a in old.values())
            patches.append(parts(old, new))
        out.append(Bound(run, elements, tuple(patches)))
    return out


def classes_of(patch: sparserl.Patch, index: int) -> Classes | None:
    """The classes that a bucket was written with; None where it has none."""
    hash = PatchReader(BytesInMemory(patch.to_bytes())).hash
    return _classes(_coded(patch, index, hash)[1])


def parts(old: Weights, new: Weights) -> Parts:
    """The `ctx` patch between two versions, taken apart."""
    patch = sparserl.diff(_held(old), _held(new), profile="ctx")
    landed = {name: bits.copy() for name, bits in old.items()}
    patch.apply(_held(landed))
    if any((landed[name] != bits).any() for name, bits in new.items()):
        raise AssertionError("the patch did not land; its figures would be worth nothing")
    total = Parts(bytes=patch.nbytes - patch.table_nbytes)
    hash = PatchReader(BytesInMemory(patch.to_bytes())).hash
    for index in range(patch.buckets):
        total += _bucket(*_coded(patch, index, hash), patch.table, old, new)
    if total.changed != patch.changed:
        raise AssertionError(f"the buckets hold {total.changed} changes, the patch {patch.changed}")
    return total


def _coded(patch: sparserl.Patch, index: int, hash: bytes) -> tuple[Head, Coded]:
    head, reader = decode_bucket(patch.contents.bucket(index), patch.table, hash, f"bucket {index}")
    return head, reader._coded  # noqa: SLF001  # nothing else tells how long a chunk is before it is decoded


def _held(weights: Weights) -> dict[str, sparserl.Bits]:
    return {name: sparserl.Bits(bits, _BF16) for name, bits in weights.items()}


def _bucket(head: Head, coded: Coded, table: sparserl.TensorTable, old: Weights, new: Weights) -> Parts:
    """One bucket: what its streams take, and the bound of its classes (one class where it has none)."""
    if head.entries.dense.any():
        raise AssertionError("a bucket has dense entries, to which the bound does not speak")
    entries = list(head.entries.places())
    before, after = (
        np.concatenate([side[table[t].name][... if r is None else r.slices].ravel() for t, r in entries])
        for side in (old, new)
    )
    classes = _members(head.dtype, _classes(coded), before)
    changed = before != after
    steps = reference.steps(before[changed], after[changed], head.dtype.sign_magnitude)
    index_bits = step_bits = 0.0
    for c in range(int(classes.max()) + 1):
        mine = classes == c
        index_bits += entropy([int(changed[mine].sum()), int((~changed[mine]).sum())])
        step_bits += entropy(np.unique(steps[classes[changed] == c], return_counts=True)[1])
    sizes = {id: sum(map(len, chunks)) for id, (_, chunks) in coded.items() if id not in _NO_CHANGES}
    models = [_model(head, id, coded, np.bincount(classes[changed])) for id in sizes if coded[id][0].id == Rans.id]
    return Parts(
        changed=int(changed.sum()),
        streams=sum(sizes.values()),
        tiles=sum(size for id, size in sizes.items() if id in _TILES),
        tables=sum(table for table, _ in models),
        states=sum(states for _, states in models),
        index_bits=index_bits,
        step_bits=step_bits,
    )


def _classes(coded: Coded) -> Classes | None:
    if Stream.CLASSES not in coded:
        return None
    data = bytes(coded[Stream.CLASSES][1][0])
    return Classes(data[0], tuple(np.frombuffer(data[1:], "<u2").tolist()))


def _members(dtype: DType, classes: Classes | None, old: NDArray[Any]) -> NDArray[np.int64]:
    """The class of every element: how many thresholds its old magnitude reaches."""
    if classes is None:
        return np.zeros(old.size, np.int64)
    kind = "float" if dtype.sign_magnitude else "signed" if dtype.signed else "unsigned"
    thresholds = np.array(classes.thresholds, np.int64) << classes.shift
    return np.searchsorted(thresholds, reference.magnitude(old, kind), side="right")


def entropy(counts: Sequence[int] | NDArray[Any]) -> float:
    """Bits to tell apart all items of kinds that occur so often, were they drawn alike."""
    seen = np.asarray(counts, np.float64)
    seen = seen[seen > 0]
    return float((seen * np.log2(seen.sum() / seen)).sum())


def _model(head: Head, id: int, coded: Coded, counts: NDArray[Any]) -> tuple[int, int]:
    """Bytes of the tables and of the states at the start of the chunks of a rans stream."""
    layout, by_class = head.layout, id >= Stream.CLASS
    if id in _TILES:
        items = ctx.tiles(layout) * (len(chosen.thresholds) + 1) if (chosen := _classes(coded)) else tiles(layout)
    else:
        items = int(counts[(id - Stream.CLASS) // 4]) if by_class else layout.changes
    chunks = coded[id][1]
    tables = sum(int(cpu.rans.read_table(np.frombuffer(c, np.uint8), np.empty(256, np.uint32))) for c in chunks)
    sizes = layout.chunk_sizes(items)
    if len(sizes) != len(chunks):
        raise AssertionError(f"stream {id}: {len(chunks)} chunks where {items} items make {len(sizes)}")
    return tables, sum(4 * int(cpu.rans.lanes(size)) for size in sizes)


def main() -> None:
    found = measure(traces.find_traces())
    print("bits per changed element, all syncs of each trace, patch after patch, without the tensor table\n")
    print("| trace | density | on the wire | streams | bound | index | step | streams over bound |")
    print("| --- " * 8 + "|")
    for b in found:
        t = b.total
        index, step = t.index_bits / t.changed, t.step_bits / t.changed
        print(f"| {b.trace} | {b.density:.2%} | {t.bits:.3f} | {t.stream_bits:.3f} ", end="")
        print(f"| {t.bound:.3f} | {index:.3f} | {step:.3f} | {t.over:.2%} |")
    print(f"| mean | | {np.mean([b.total.bits for b in found]):.3f} | | | | | |\n")
    print("shares of those bytes; the directory is bucket headers, entry tables, stream directories, tile counts,")
    print("checksums and the footer\n")
    print(f"| trace | directory | of it tiles | states | tables | directory + states, {LARGE:,} changes or more |")
    print("| --- " * 6 + "|")
    for b in found:
        t = b.total
        shares = " | ".join(f"{n / t.bytes:.2%}" for n in (t.directory, t.tiles, t.states, t.tables))
        worst = "no patch is so large" if b.overhead is None else f"{b.overhead:.2%}"
        print(f"| {b.trace} | {shares} | {worst} |")


if __name__ == "__main__":
    main()
