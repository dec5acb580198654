"""How a dozen tensors become buckets, byte by byte: runs sparserl and prints research/buckets.md.

    python examples/buckets.py > research/buckets.md

Weights and changes come from one seed, so that all of the page but the timings is the same in every run.
"""

from __future__ import annotations

import inspect
import os
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import zstandard

import sparserl
from sparserl import files
from sparserl.codec import PROFILES, Stream, ctx
from sparserl.codec.coders import CODERS
from sparserl.kernels import reference
from sparserl.patch.cpu_compare import Comparer
from sparserl.plan import buckets
from sparserl.plan.buckets import BUCKET_COVER_BYTES, ENOUGH_CHANGES, ENOUGH_COVER_BYTES
from sparserl.plan.routing import BUCKET_CHANGES, BUCKET_PAYLOAD_BYTES
from sparserl.weights.batches import PIECE_BYTES, batches
from sparserl.weights.dtypes import BY_NAME
from sparserl.weights.region import Region
from sparserl.wire import Head
from sparserl.wire.patchfile import PatchWriter

MIB = 1 << 20
THREADS = 2
COLUMNS = 72  # of the timeline
Weights = dict[str, Any]


class Kind(NamedTuple):
    """One tensor of the example, and how far an update moves it (0: not at all)."""

    dtype: str
    shape: tuple[int, ...]
    update: float
    what: str


TENSORS = {
    "adapter.up": Kind("bfloat16", (2560, 4096), 5e-2, "as a LoRA: new, and learning fast"),
    "counter": Kind("int64", (), 1, "one number"),
    "embed.weight": Kind("bfloat16", (24576, 1024), 1e-7, "an embedding"),
    "layers.0.attn.q": Kind("bfloat16", (4096, 2560), 4e-7, "a matrix"),
    "layers.0.mlp.codes": Kind("int8", (2048, 1024), 2e-5, "quantized"),
    "layers.0.mlp.up": Kind("bfloat16", (12288, 4096), 4e-7, "a matrix"),
    "layers.0.norm.1": Kind("bfloat16", (4096,), 1e-6, "a norm"),
    "layers.0.norm.2": Kind("bfloat16", (4096,), 1e-6, "a norm"),
    "layers.1.attn.q": Kind("bfloat16", (1024, 1024), 4e-7, "a small matrix"),
    "layers.1.frozen": Kind("bfloat16", (2048, 1024), 0, "not trained"),
    "layers.1.norm": Kind("float32", (512,), 2e-11, "a norm, in fp32"),
    "scale": Kind("float32", (16,), 2e-10, "a few numbers, in fp32"),
}


def bell(rng: np.random.Generator, count: int) -> np.ndarray:
    """Numbers with a bell-shaped distribution of deviation 1, by exact arithmetic: the same on every machine."""
    words = rng.integers(0, 1 << 64, count, np.uint64).view(np.uint16).reshape(-1, 4)
    return (words.sum(1, dtype=np.int32) - 2 * 0xFFFF).astype(np.float32) * np.float32(2**-15 * 0.875)


def bf16(values: np.ndarray) -> np.ndarray:
    """The nearest bf16 bits of fp32 numbers."""
    wide = values.view(np.uint32)
    return ((wide + 0x7FFF + (wide >> 16 & 1)) >> 16).astype(np.uint16)


def versions(seed: int = 0) -> tuple[Weights, Weights]:
    """The weights before and after an update: fp32 numbers that move a little, rounded to the dtype."""
    old: Weights = {}
    new: Weights = {}
    rng = np.random.default_rng(seed)
    for name, kind in TENSORS.items():
        count = int(np.prod(kind.shape))
        master = bell(rng, count) * np.float32(2**-5)
        moved = master + bell(rng, count) * np.float32(kind.update)
        for side, values in ((old, master), (new, moved)):
            if kind.dtype == "bfloat16":
                bits = bf16(values).reshape(kind.shape)
                side[name] = sparserl.Bits(bits, BY_NAME["bfloat16"])
            elif kind.dtype == "int8":
                side[name] = np.rint(values * np.float32(512)).astype(np.int8).reshape(kind.shape)
            elif kind.dtype == "int64":
                side[name] = np.array(1000 + (side is new), np.int64)
            else:
                side[name] = values.reshape(kind.shape)
    return old, new


@dataclass(frozen=True)
class Field:
    """Some bytes of a bucket, and what they say."""

    offset: int
    data: bytes
    note: str


class Dissected:
    """A bucket taken apart by docs/reference/format.md, field by field."""

    def __init__(self, data: bytes, head: Head, table: sparserl.TensorTable) -> None:
        self.data, self.head, self.table, self.at = data, head, table, 0
        self.fields: list[Field] = []
        self.streams: list[tuple[int, int, list[int]]] = []
        self._header()
        self._directory()
        self.payload = self.at
        for stream, coder, lengths in self.streams:
            note = self._entries() if stream == Stream.ENTRIES else self._values(stream, coder)
            self._take(sum(lengths), f"{name_of(stream)}{': ' + note if note else ''}")
        self._take(16, "checksum of the bucket")
        if self.at != len(data):
            raise AssertionError("bytes are left over")

    def _take(self, size: int, note: str) -> bytes:
        data = self.data[self.at : self.at + size]
        self.fields.append(Field(self.at, data, note))
        self.at += size
        return data

    def _number(self, at: int) -> tuple[int, int]:
        """A LEB128 number and where it ends."""
        value = shift = 0
        while True:
            byte = self.data[at]
            value |= (byte & 127) << shift
            shift, at = shift + 7, at + 1
            if byte < 128:
                return value, at

    def _numbers(self, count: int) -> tuple[list[int], int]:
        """The next numbers, and how many bytes they take."""
        values, at = [], self.at
        for _ in range(count):
            value, at = self._number(at)
            values.append(value)
        return values, at - self.at

    def _header(self) -> None:
        head = self.head
        self._take(4, '"SRLB"')
        self._take(4, f"version 1, profile {head.profile.id} ({head.profile.name}), dtype {head.dtype}, no features")
        self._take(16, "table hash")
        (entries, length), size = self._numbers(2)
        self._take(size, f"{entries} {'entry' if entries == 1 else 'entries'}, the entry table has {length} bytes")
        self._take(2, f"tiles of 2^{head.tile_log} positions, chunks of 2^{head.chunk_log} items")
        (count,), _ = self._numbers(1)
        (_, *pairs), size = self._numbers(1 + 2 * count)
        names = {p.id: p.name for p in PROFILES.values()}
        estimates = ", ".join(f"{names[i]} {b}" for i, b in zip(pairs[::2], pairs[1::2], strict=True))
        self._take(size, f"{count} estimates, in bytes: {estimates}" if count else "no estimates: nothing to choose")

    def _directory(self) -> None:
        (count,), size = self._numbers(1)
        self._take(size, f"{count} streams")
        for _ in range(count):
            stream, coder = self.data[self.at : self.at + 2]
            chunks, end = self._number(self.at + 2)
            lengths = []
            for _ in range(chunks):
                length, end = self._number(end)
                lengths.append(length)
            self.streams.append((stream, coder, lengths))
            extent = f"{many(chunks, 'chunk')} of {many(sum(lengths), 'byte')}{' together' * (chunks > 1)}"
            self._take(end - self.at, f"stream {stream}, {name_of(stream)}: {CODERS[coder].name}, {extent}")

    def _values(self, stream: int, coder: int) -> str:
        """What a stream says, where it is stored as it is and short enough to be read."""
        (length,) = [sum(n) for id, _, n in self.streams if id == stream]
        if stream == Stream.CLASSES:
            shift, *pairs = self.data[self.at : self.at + length]
            limits = [low | high << 8 for low, high in zip(pairs[::2], pairs[1::2], strict=True)]
            return f"magnitudes by {', '.join(map(str, limits))}, shifted left by {shift}"
        if coder or length > 64 or stream not in (Stream.GAP_TOKENS, Stream.STEP_TOKENS):
            return ""
        at = self.at + length  # the low bits are the stream behind
        lows = sum(sum(n) for id, _, n in self.streams if id == stream + 1)
        string = int.from_bytes(self.data[at : at + lows], "little")
        values = []
        for token in self.data[self.at : self.at + length]:
            width = 0 if token < 16 else (token - 16) // 4 + 2
            values.append(reference.untoken(token, string & ((1 << width) - 1)))
            string >>= width
        if stream == Stream.GAP_TOKENS:
            return "gaps " + ", ".join(map(str, values))
        return "steps " + ", ".join(f"{v // 2:+}" if v % 2 == 0 else f"{-(v + 1) // 2:+}" for v in values)

    def _entries(self) -> str:
        entries = self.head.entries
        lines = []
        for e, tensor in enumerate(entries.tensor.tolist()):
            region = entries.region[e]
            place = f"{self.table[tensor].name}{'' if region is None else ' ' + box(region)}"
            lines.append(f"{place}, {many(entries.count[e], 'change')}{', dense' if entries.dense[e] else ''}")
        return "; ".join(lines)


def name_of(stream: int) -> str:
    """The name of a stream, as docs/reference/format.md has it."""
    if stream >= Stream.CLASS:
        c, part = divmod(stream - Stream.CLASS, 4)
        return f"class {c} {('gap tokens', 'gap lows', 'step tokens', 'step lows')[part]}"
    for planes in (Stream.DENSE_PLANE, Stream.WORD_PLANE):
        if planes <= stream < planes + 8:
            return f"{planes.name} {stream - planes}"
    return Stream(stream).name


def box(region: Region) -> str:
    return "[" + ", ".join(f"{a}:{a + n}" for a, n in zip(region.start, region.size, strict=True)) + "]"


def many(count: int, what: str) -> str:
    return f"{count:,} {what}" + ("" if count == 1 else "s")


def size(nbytes: int) -> str:
    return f"{nbytes / MIB:.1f} MiB" if nbytes >= MIB else f"{nbytes:,} B"


def prose(text: str) -> Iterator[str]:
    """A paragraph."""
    yield from textwrap.wrap(" ".join(text.split()), 118, break_long_words=False, break_on_hyphens=False)
    yield ""


def listed(header: str, rows: Iterator[tuple[Any, ...]]) -> Iterator[str]:
    """A Markdown table."""
    names = header.split(", ")
    yield "| " + " | ".join(names) + " |"
    yield "| --- " * len(names) + "|"
    for row in rows:
        yield "| " + " | ".join(map(str, row)) + " |"
    yield ""


def page(patch: sparserl.Patch) -> Iterator[str]:
    """All that does not depend on the clock."""
    yield from ("# Buckets: a worked example", "")
    yield from prose(
        f"""Written by `python examples/buckets.py`, which makes two versions of twelve tensors, lets `sparserl.diff`
        find what changed between them, and takes the patch apart. Everything but the timeline at the end is the same in
        every run with zstd {".".join(map(str, zstandard.ZSTD_VERSION))}; another may take a few bytes more or less. The
        words are those of [architecture.md](../docs/explanation/architecture.md), the fields those of
        [format.md](../docs/reference/format.md)."""
    )
    yield from ("## The tensors", "")
    yield from _tensors(patch)
    yield from _pieces(patch.table)
    yield from _buckets(patch)
    yield from _wire(patch)


def _tensors(patch: sparserl.Patch) -> Iterator[str]:
    entries = list(patch)

    def row(i: int, name: str) -> tuple[Any, ...]:
        spec = patch.table[i]
        changes = [e for e in entries if e.tensor == name]
        changed = sum(e.changed for e in changes)
        nbytes = spec.numel * spec.dtype.width
        share = f"{changed:,} ({changed / spec.numel:.2%})" if changed else "none"
        where = ", ".join(sorted({str(e.bucket) for e in changes})) or "none"
        return i, f"`{name}`", f"{spec.dtype} {list(spec.shape)}", size(nbytes), share, where, TENSORS[name].what

    yield from listed(
        "index, tensor, dtype and shape, size, changed, buckets, what it is",
        (row(i, spec.name) for i, spec in enumerate(patch.table.specs)),
    )
    yield f"Together {size(patch.table.dense_bytes)}; the patch has {size(patch.nbytes)}, {patch.changed:,} changes."
    yield ""


def _pieces(table: sparserl.TensorTable) -> Iterator[str]:
    yield from ("## Cut to be compared: pieces", "")
    yield from prose(
        f"""Threads compare batches of at most {size(PIECE_BYTES)} of one dtype. A larger tensor is cut along its first
        dimension, each piece a batch of its own; smaller tensors of one dtype share a batch, which is handed out when
        the next tensor does not fit or when the tensors are at an end. Untouched tensors are compared like all
        others."""
    )

    def row(i: int, batch: Any) -> tuple[Any, ...]:
        parts = [
            f"`{table[t].name}`{'' if r is None else ' ' + box(r)}"
            for t, r in zip(batch.tensor.tolist(), batch.region, strict=True)
        ]
        return i, batch.dtype, size(batch.elements * batch.dtype.width), ", ".join(parts)

    table_batches = batches(table, [(i, None) for i in range(len(table))])
    yield from listed("batch, dtype, size, what", (row(i, batch) for i, batch in enumerate(table_batches)))


def _buckets(patch: sparserl.Patch) -> Iterator[str]:
    yield from ("## Filled to be sent: buckets", "")
    yield from prose(
        f"""Changes are gathered by dtype, in order, until a bucket would cover more than {size(ENOUGH_COVER_BYTES)} of
        weights with more than {ENOUGH_CHANGES:,} changes ({size(BUCKET_COVER_BYTES)} with fewer), hold more than
        {BUCKET_CHANGES:,} changes, or have a payload of more than {size(BUCKET_PAYLOAD_BYTES)} by the estimates.
        Where dense bits are smaller than any sparse form, a region goes dense, in boxes that fit a bucket. A bucket
        takes the profile with the smallest estimate; tiles hold about 2048 changes each, and never cross the end of a
        region."""
    )
    reasons = [b.reason for b in patch.stats().buckets]

    def row(i: int, head: Head) -> tuple[Any, ...]:
        entries, profile = head.entries, head.profile.name
        sparse = int(entries.sparse.sum())
        shape = f"{ctx.tiles(head.layout)} of 2^{head.tile_log}" if sparse and head.profile.tiled else "none"
        kind = f"{sparse} sparse" * (sparse > 0) + ", " * (0 < sparse < len(entries))
        kind += f"{len(entries) - sparse} dense" * (sparse < len(entries))
        return i, head.dtype, profile, kind, f"{int(entries.count.sum()):,}", shape, size(len(patch.contents.bucket(i)))

    yield from listed(
        "bucket, dtype, profile, entries, changes, tiles, size",
        (row(i, head) for i, head in enumerate(patch.contents.heads)),
    )
    yield "Why each bucket is what it is:"
    yield ""
    yield from (f"- {i}: {reason}." for i, reason in enumerate(reasons))
    yield ""


def _wire(patch: sparserl.Patch) -> Iterator[str]:
    data = patch.to_bytes()
    sizes = [len(patch.contents.bucket(i)) for i in range(patch.buckets)]
    starts = [patch.table_nbytes + sum(sizes[:i]) for i in range(patch.buckets)]
    footer = starts[-1] + sizes[-1]
    yield from ("## On the wire", "")
    rows = [
        (0, patch.table_nbytes, "header with the tensor table"),
        *((at, n, f"bucket {i}") for i, (at, n) in enumerate(zip(starts, sizes, strict=True))),
        (footer, len(data) - footer - 16, "footer: digests, lengths and checksums of the buckets"),
        (len(data) - 16, 16, "trailer: length of the footer"),
    ]
    yield from listed("offset, bytes, what", ((f"{a:,}", f"{n:,}", what) for a, n, what in rows))
    smallest = min((i for i, h in enumerate(patch.contents.heads) if len(h.entries) > 1), key=sizes.__getitem__)
    before: list[tuple[int, int]] = []
    for i, head in enumerate(patch.contents.heads):
        taken = Dissected(bytes(patch.contents.bucket(i)), head, patch.table)
        like = [(stream, coder) for stream, coder, _ in taken.streams]
        if i == smallest:
            yield from _hexdump(i, taken)
        elif like == before:
            (entries,) = [f.note for f in taken.fields if f.note.startswith("ENTRIES")]
            yield from prose(f"**Bucket {i}** has the same fields, {sizes[i]:,} bytes. {entries}.")
        else:
            yield from _summary(i, taken)
        before = like


def _hexdump(i: int, taken: Dissected) -> Iterator[str]:
    yield from (f"### Bucket {i}, every byte", "", "Offsets count from the start of the bucket.", "", "```hexdump")
    for field in taken.fields:
        note = field.note
        for at in range(0, len(field.data), 16):
            yield f"{field.offset + at:3}  {field.data[at : at + 16].hex(' ')}  {note}"
            note = "(goes on)"
    yield from ("```", "")


def _summary(i: int, taken: Dissected) -> Iterator[str]:
    yield from (f"### Bucket {i}, field by field", "")
    head = [f for f in taken.fields if f.offset < taken.payload and not f.note.startswith("stream ")]
    first = next(f.offset for f in taken.fields if f.note.startswith("stream "))
    lines = [(f.offset, len(f.data), f.note) for f in head]
    lines.append((first, taken.payload - first, "of each stream its id, coder, number of chunks, and their lengths"))
    streams = iter(taken.streams)
    for field in taken.fields:
        if field.offset >= taken.payload:
            _, coder, lengths = next(streams, (0, None, []))
            how = "" if coder is None else f" ({CODERS[coder].name}, {many(len(lengths), 'chunk')})"
            lines.append((field.offset, len(field.data), f"{field.note}{how}"))
    yield from listed("offset, bytes, what", ((f"{at:,}", f"{n:,}", note) for at, n, note in lines))


DOING = {  # the functions that show what a thread is doing
    Comparer.compare.__code__: "F",
    buckets.write.__code__: "E",
    PatchWriter.add.__code__: "W",
    inspect.unwrap(files.replacing).__code__: "S",
}


class Watch:
    """Looks at what every thread is doing, many times a second, and at how far the patch file has grown."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.stop = folder, threading.Event()
        self.seen: list[tuple[float, str, str]] = []
        self.grown: list[tuple[float, int, int]] = []  # when, bytes compared, bytes in the file
        self.compared, self.start = 0, time.perf_counter()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Watch:
        self.start = time.perf_counter()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop.set()
        self._thread.join()
        self.end = time.perf_counter() - self.start

    def progress(self, compared: int) -> None:
        self.compared += compared
        written = sum(entry.stat().st_size for entry in os.scandir(self.folder))
        self.grown.append((time.perf_counter() - self.start, self.compared, written))

    def _run(self) -> None:
        while not self.stop.wait(0.0005):
            now = time.perf_counter() - self.start
            names = {t.ident: t.name for t in threading.enumerate()}
            for ident, frame in sys._current_frames().items():  # noqa: SLF001  # the one way to watch without touching
                if name := names.get(ident):
                    self.seen.append((now, name, self._doing(frame)))

    @staticmethod
    def _doing(frame: Any) -> str:
        while frame is not None:
            if frame.f_code in DOING:
                return DOING[frame.f_code]
            frame = frame.f_back
        return "."


def overlap() -> Iterator[str]:
    yield from ("## What overlaps with what", "")
    yield from prose(
        f"""The same diff once more, on {THREADS} threads, watched from outside: F is finding changes in a batch, E
        encoding a bucket, W handing a bucket to the file, S waiting until the disk has it, a dot anything else. Finding
        and encoding share the threads, which encode first, and of each at most two items per thread are in flight.
        Below, how far things were each time a batch had been compared. These figures are of one run, and differ in the
        next."""
    )


def timeline(watch: Watch) -> Iterator[str]:
    """What overlaps with what, drawn from what was seen."""
    step = watch.end / COLUMNS
    workers = sorted({name for _, name, doing in watch.seen if doing != "."})
    yield f"one column is {1e3 * step:.1f} ms, all of it {1e3 * watch.end:.0f} ms"
    for name in workers:
        cells: list[dict[str, int]] = [{} for _ in range(COLUMNS)]
        for at, who, doing in watch.seen:
            if who == name:
                cell = cells[min(COLUMNS - 1, int(at / step))]
                cell[doing] = cell.get(doing, 0) + 1
        row = "".join(max(cell, key=cell.__getitem__) if cell else " " for cell in cells)
        yield f"{name:12} {row}"
    yield ""
    yield "     ms  MiB compared  bytes in the file"
    for at, compared, written in watch.grown:
        yield f"{1e3 * at:7.1f}  {compared / MIB:12.1f}  {written:17,}"


def main() -> None:
    old, new = versions()
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "patch"
        patch = sparserl.diff(old, new, to=path, threads=THREADS)
        lines = list(page(patch))
        path.unlink()
        with Watch(path.parent) as watch:
            sparserl.diff(old, new, to=path, threads=THREADS, progress=watch.progress)
        lines += [*overlap(), "```timeline", *timeline(watch), "```"]
        patch.apply(old)
    if sparserl.digest(old) != sparserl.digest(new):
        raise SystemExit("the patch did not land")
    print("\n".join(line.rstrip() for line in lines))


if __name__ == "__main__":
    main()
