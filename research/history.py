"""An experiment: what would the history of each element add to the magnitude classes of `ctx`, and what would it cost?

`python -m research.history` prints the tables of research/history.md. Nothing of it is shipped.

Both sides would keep a byte per element: when it last changed (0 never, 1 long ago, else a count of syncs that is wound
back before it overflows) and, in the lowest bit, whether it went up. Elements are put into groups by age, every
group gets magnitude classes of its own, and steps are counted in the direction of the last one. Groups and classes are
chosen anew for each sync, by the costs that `ctx` goes by.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numpy.typing import NDArray

import sparserl
from benchmarks import bound, traces
from benchmarks.bound import entropy
from benchmarks.kernels import best
from benchmarks.traces import Bits, Weights
from sparserl.codec import BucketLayout, numbers
from sparserl.codec.coders import encode_by_entropy, encode_smallest
from sparserl.codec.ctx import KEYS, magnitude, tiles
from sparserl.kernels import MOST_CLASSES, cpu, reference
from sparserl.kernels.cpu.arguments import ClassChanges, ClassEnds, ClassStreams, Landing, Tiled
from sparserl.kernels.cpu.compiling import kernel
from sparserl.kernels.cpu.llvm import (
    at_most8,
    at_most16,
    intrinsic,
    load,
    popcount,
    prefetch,
    select,
    splat,
    store,
)
from sparserl.plan.classes import _partition  # the rule by which `ctx` places thresholds
from sparserl.weights.batches import Batch
from sparserl.weights.dtypes import BY_NAME
from sparserl.weights.local import LocalWeights
from sparserl.wire import Head

ENOUGH = 0.12  # of the bytes, which history must save to be worth it
MOST_TIME = 2.0  # times that of ctx, which it may take
_BF16 = BY_NAME["bfloat16"]
_LOOK = Landing(False, _BF16.sign_magnitude)  # what `class_positions` is told: nothing is to land
_SHIFT = 8 * _BF16.width - KEYS.bit_length()  # keys are the highest nine bits of the magnitude; ctx has eight
_WARM = 1  # the stamp of a change in the warm-up: one event, older than any sync that follows
_FIRST = 2 + _WARM  # the stamp of the first sync
_BLOCKS = 128
_ROW = _BLOCKS + 8
_ONE, _ALL = np.uint64(1), ~np.uint64(0)
_I32, _I64 = ir.IntType(32), ir.IntType(64)

Array = NDArray[Any]


@dataclass(frozen=True)
class Way:
    """A way to use history: whether age tells elements apart, and whether steps follow the last direction."""

    name: str
    age: bool = False
    direction: bool = False


PLAIN = Way("magnitude alone, `ctx`")
BOTH = Way("both", age=True, direction=True)
WAYS = (PLAIN, Way("direction", direction=True), Way("age", age=True), BOTH)
AGES = (1, 2, 4, 8)  # syncs: elements that changed so lately are told apart, if it pays
CELLS = len(AGES) + 3  # those, older ones, those that changed in the warm-up, those that never did


def cells(now: int) -> Array:
    """The cell of each state byte, the youngest first."""
    stamp = np.arange(256) >> 1
    age = np.minimum(np.searchsorted(AGES, now - stamp, side="left"), len(AGES))
    return np.select([stamp == 0, stamp == _WARM], [CELLS - 1, CELLS - 2], age).astype(np.uint8)


def begins(now: int) -> list[int]:
    """The state byte with which each cell begins; the cell before it, which is younger, begins where it ends."""
    return [*(2 * max(_WARM + 1, now - age) for age in AGES), 2 * (_WARM + 1), 2 * _WARM, 0]


@dataclass(frozen=True)
class Sync:
    """One sync, the regions of its bucket one after the other, with the state of every element before it."""

    layout: BucketLayout
    old: Bits
    new: Bits
    state: NDArray[np.uint8]
    now: int
    nbytes: int  # of the real patch, without the tensor table
    streams: int  # of those, what is counted here: gaps, steps and tile counts
    thresholds: tuple[int, ...]  # of the real patch


@dataclass(frozen=True)
class Box:
    """A class: cells `young` to `old` and keys `low` to `high`, the last of each left out."""

    young: int
    old: int
    low: int
    high: int


@dataclass(frozen=True)
class Split:
    """Classes, and what they make of a sync."""

    boxes: tuple[Box, ...]
    bits: float  # n·H(k/n) + k·H(step | class)
    streams: int  # bytes, really coded
    directory: int  # bytes


@dataclass(frozen=True)
class Saving:
    """One way on one trace."""

    way: str
    trace: str
    classes: int  # most of any sync
    entropy: float  # bits per changed element, without tables, states and tile counts
    bits: float  # on the wire
    saved: float  # share of the bytes on the wire, all syncs
    saved_last: float  # of the last sync, where there is most history


def syncs(folder: Path, run: str) -> Iterator[Sync]:
    """The syncs of a trace with the history that has built up."""
    state: dict[str, NDArray[np.uint8]] = {}
    for now, (old, new) in enumerate(traces.syncs(folder, run), _FIRST):
        if not state:
            base = traces.load(folder / "base.safetensors")  # only history looks behind the warm-up
            state = {name: np.zeros(bits.shape, np.uint8) for name, bits in old.items()}
            _remember(state, base, old, _WARM)
        yield _sync(old, new, state, now)
        _remember(state, old, new, now)


def _remember(state: dict[str, NDArray[np.uint8]], old: Weights, new: Weights, now: int) -> None:
    for name, bits in state.items():
        up = traces.order(new[name]) > traces.order(old[name])
        np.copyto(bits, (now << 1 | up).astype(np.uint8), where=old[name] != new[name])


def _sync(old: Weights, new: Weights, state: dict[str, NDArray[np.uint8]], now: int) -> Sync:
    patch = sparserl.diff(_held(old), _held(new), profile="ctx")
    if patch.buckets != 1:
        raise AssertionError(f"{patch.buckets} buckets; the experiment looks at one")
    head, wire = patch.contents.heads[0], bound.parts(old, new)
    places = zip(head.entries.tensor.tolist(), head.entries.region, strict=True)
    which = [(patch.table[t].name, ... if r is None else r.slices) for t, r in places]
    flat = [np.concatenate([side[name][part].ravel() for name, part in which]) for side in (old, new, state)]
    return Sync(head.layout, *flat, now, wire.bytes, wire.streams, _thresholds(patch, head))


def _held(weights: Weights) -> dict[str, sparserl.Bits]:
    return {name: sparserl.Bits(bits, _BF16) for name, bits in weights.items()}


def _thresholds(patch: sparserl.Patch, head: Head) -> tuple[int, ...]:
    chosen = bound.classes_of(patch, 0)
    if head.profile.name != "ctx" or chosen.shift < _SHIFT:
        raise AssertionError("the bucket has no classes to start from")
    return tuple(t << (chosen.shift - _SHIFT) for t in chosen.thresholds)


def split(sync: Sync, way: Way) -> Split:
    """Put the elements into classes, and code what changed."""
    changed = sync.old != sync.new
    key = (sync.old & np.uint16(0x7FFF)) >> np.uint16(_SHIFT)
    cell = cells(sync.now)[sync.state]
    steps = _steps(sync, way, changed)
    boxes = _boxes(sync, way, cell, key, changed, steps)
    mine = _owner(boxes)[cell, key]
    gaps = np.empty(steps.size, np.uint32)
    counts = np.zeros((tiles(sync.layout), len(boxes)), np.uint32)
    class_gaps(mine, changed, sync.layout.numel, sync.layout.tile_log, gaps, counts)
    members, whose = np.bincount(mine, minlength=len(boxes)), mine[changed]
    fresh = sync.state[changed] == 0
    bits, coded = 0.0, [_coded(sync.layout, counts.ravel(), encode_smallest)]
    for c in range(len(boxes)):
        here = whose == c
        bits += entropy([int(here.sum()), int(members[c] - here.sum())])
        coded.append(_coded(sync.layout, gaps[here]))
        # Where some members of a class have a direction and some have none, their steps are told apart.
        for some in (here & fresh, here & ~fresh) if way.direction else (here,):
            bits += entropy(np.unique(steps[some], return_counts=True)[1])
            coded.append(_coded(sync.layout, steps[some]))
    return Split(boxes, bits, *(sum(column) for column in zip(*coded, strict=True)))


def _owner(boxes: Sequence[Box]) -> Array:
    """The class of each cell and key."""
    owner = np.zeros((CELLS, KEYS), np.uint8)
    for c, box in enumerate(boxes):
        owner[box.young : box.old, box.low : box.high] = c
    return owner


def _steps(sync: Sync, way: Way, changed: Array) -> Array:
    """Folded steps, counted in the direction of the last one where there was one."""
    if not way.direction:
        return reference.steps(sync.old[changed], sync.new[changed], _BF16.sign_magnitude)
    signed = traces.order(sync.new[changed]) - traces.order(sync.old[changed])
    state = sync.state[changed]
    signed = np.where((state != 0) & (state & 1 == 0), -signed, signed)
    return np.where(signed >= 0, 2 * signed, -2 * signed - 1).astype(np.uint16)


def _boxes(sync: Sync, way: Way, cell: Array, key: Array, changed: Array, steps: Array) -> tuple[Box, ...]:
    """Classes: neighbouring cells joined where that is cheaper, each group cut by magnitude as ctx would cut it."""
    if way == PLAIN:
        return _cut(0, CELLS, sync.thresholds)
    place = cell * np.int64(KEYS) + key
    members = np.bincount(place, minlength=CELLS * KEYS).reshape(-1, KEYS)
    column = np.select([steps == 2, steps == 1, steps < 7], [0, 1, 2], 3)
    hits = np.bincount(place[changed] * 4 + column, minlength=CELLS * KEYS * 4).reshape(-1, KEYS, 4)

    def best_cut(young: int, old: int) -> tuple[tuple[int, ...], float]:
        return _partition(members[young:old].sum(0).astype(float), hits[young:old].sum(0), tiles(sync.layout))

    if not way.age:
        return _cut(0, CELLS, best_cut(0, CELLS)[0])
    least: list[tuple[float, tuple[Box, ...]]] = [(0.0, ())]
    for old in range(1, CELLS + 1):
        options = []
        for young in range(old):
            cuts, bits = best_cut(young, old)
            options.append((least[young][0] + bits, least[young][1] + _cut(young, old, cuts)))
        least.append(min(options, key=lambda option: option[0]))
    return least[-1][1]


def _cut(young: int, old: int, thresholds: Sequence[int]) -> tuple[Box, ...]:
    edges = (0, *thresholds, KEYS)
    return tuple(Box(young, old, low, high) for low, high in zip(edges, edges[1:], strict=False))


@kernel
def class_gaps(owner: Any, changed: Any, numel: Any, log: Any, gaps: Any, counts: Any) -> None:
    """Gaps inside the classes of the elements, and changes by tile and class: plainly, element by element."""
    at, k, t = 0, 0, 0
    run = np.zeros(counts.shape[1], np.uint32)
    for e in range(numel.size):
        for i in range(numel[e]):
            if i & ((1 << log) - 1) == 0:
                run[:] = 0
                t += 1
            c = owner[at + i]
            if changed[at + i]:
                gaps[k] = run[c]
                counts[t - 1, c] += np.uint32(1)
                run[c] = 0
                k += 1
            else:
                run[c] += np.uint32(1)
        at += numel[e]


def _coded(layout: BucketLayout, values: Array, coder: Callable[..., Any] = encode_by_entropy) -> tuple[int, int]:
    """Bytes of numbers as a pair of streams, and of their place in the directory."""
    written = numbers.write(layout, values, 0, 1)
    streams = directory = 0
    for id, chunks in written.items():
        if any(map(len, chunks)):
            coded = coder(chunks)[1] if id == 0 else chunks
            streams += sum(map(len, coded))
            directory += 3 + sum(len(chunk).bit_length() // 7 + 1 for chunk in coded)
    return streams, directory


def savings(folder: Path) -> list[Saving]:
    """Every way on every trace; that of ctx must come out as the real patches have it."""
    out = []
    for run in traces.runs(folder):
        plain: list[tuple[int, int]] = []
        rows: dict[Way, list[tuple[Split, float]]] = {way: [] for way in WAYS}
        changed = []
        for sync in syncs(folder, run):
            changed.append(int(np.count_nonzero(sync.old != sync.new)))
            for way in WAYS:
                found = split(sync, way)
                if way == PLAIN:
                    if found.streams != sync.streams:
                        raise AssertionError(f"{found.streams} bytes of streams, the patch has {sync.streams}")
                    plain.append((sync.nbytes, found.streams + found.directory))
                nbytes = plain[-1][0] - plain[-1][1] + found.streams + found.directory
                rows[way].append((found, nbytes))
        whole, total = sum(n for n, _ in plain), sum(changed)
        for way, row in rows.items():
            out.append(
                Saving(
                    way.name,
                    run,
                    max(len(found.boxes) for found, _ in row),
                    sum(found.bits for found, _ in row) / total,
                    8 * sum(nbytes for _, nbytes in row) / total,
                    1 - sum(nbytes for _, nbytes in row) / whole,
                    1 - row[-1][1] / plain[-1][0],
                )
            )
    return out


@dataclass(frozen=True)
class Time:
    """Seconds of `ctx`, all of it and its look at the old bits alone, and of the same look with history. One thread."""

    trace: str
    bytes: int
    changed: int
    classes: int
    encode: float
    decode: float
    encode_look: float
    decode_look: float
    encode_history: float
    decode_history: float
    remember: float  # writing the states of what changed, on either side

    @property
    def encode_ratio(self) -> float:
        """Encoding with history over encoding without."""
        return 1 + (self.encode_history - self.encode_look + self.remember) / self.encode

    @property
    def decode_ratio(self) -> float:
        return 1 + (self.decode_history - self.decode_look + self.remember) / self.decode


def _vector(b: Any, address: Any, vector: Any) -> Any:
    value = b.load(b.inttoptr(address, vector.as_pointer()))
    value.align = 1
    return value


@intrinsic
def below64(_: Any, kind: Any, address: Any, keep: Any, limits: Any, masks: Any) -> Any:
    """For each limit, the mask of the 64 unsigned elements at an address that are below it, one row after another."""

    def codegen(ctx: Any, b: Any, sig: Any, args: Any) -> Any:
        element = ctx.get_data_type(sig.args[0].dtype)
        vector = ir.VectorType(element, 64)
        size = b.and_(_vector(b, args[1], vector), splat(b, b.trunc(args[2], element), vector))
        for k in range(sig.args[3].count):
            limit = splat(b, b.trunc(b.extract_value(args[3], k), element), vector)
            at = b.inttoptr(b.add(args[4], _I64(8 * _ROW * k)), _I64.as_pointer())
            b.store(b.bitcast(b.icmp_unsigned("<", size, limit), _I64), at)
        return ctx.get_dummy_value()

    return types.void(kind, types.int64, types.uint64, limits, types.int64), codegen


@intrinsic
def members16(_: Any, below: Any, above: Any, younger: Any, older: Any, mine: Any, ranks: Any, rank: Any) -> Any:
    """Masks of the members of a class in 16 blocks and the ranks before them, from four rows. Returns the next rank."""

    def codegen(ctx: Any, b: Any, sig: Any, args: Any) -> Any:
        wide, narrow = ir.VectorType(_I64, 16), ir.VectorType(_I32, 16)
        inside, outside, young, old = (_vector(b, at, wide) for at in args[:4])
        mask = b.and_(b.and_(inside, b.not_(outside)), b.and_(young, b.not_(old)))
        b.store(mask, b.inttoptr(args[4], wide.as_pointer())).align = 1
        ones = cgutils.get_or_insert_function(b.module, ir.FunctionType(wide, [wide]), "llvm.ctpop.v16i64")
        total = count = b.trunc(b.call(ones, [mask]), narrow)
        zeros = ir.Constant(narrow, [0] * 16)
        for shift in (1, 2, 4, 8):
            moved = ir.Constant(ir.VectorType(_I32, 16), [16 if i < shift else i - shift for i in range(16)])
            total = b.add(total, b.shuffle_vector(total, zeros, moved))
        total = b.add(total, splat(b, args[6], narrow))
        short = ir.VectorType(ir.IntType(16), 16)
        b.store(b.trunc(b.sub(total, count), short), b.inttoptr(args[5], short.as_pointer())).align = 1
        return b.extract_element(total, _I32(15))

    return types.int32(*(types.int64,) * 6, types.int32), codegen


@kernel
def _look(
    kind: Any, keep: Any, a: Any, s: Any, limits: Any, stamps: Any, boxes: Any, grid: Any, members: Any, inside: Any
) -> None:
    """Masks and ranks of the members of every class, for a stretch of 128 blocks at `a` with states at `s`.

    `boxes` has for each class its rows in the masks of magnitudes and of states: above one and not above another.
    """
    masks, state_masks, byte = grid
    line, row = 64 * np.int64(kind.itemsize), np.int64(8 * _ROW)
    mask_at, state_at = np.int64(masks.ctypes.data), np.int64(state_masks.ctypes.data)
    for b in range(_BLOCKS):
        # The next stretch is fetched meanwhile, from four places at once, as the kernels of ctx do.
        ahead = _BLOCKS + (b % 4) * (_BLOCKS // 4) + b // 4
        for at in range(0, line, 64):
            prefetch(a + line * ahead + at)
        prefetch(s + 64 * ahead)
        below64(kind, a + b * line, keep, limits, mask_at + row + 8 * b)
        below64(byte, s + b * 64, np.uint64(255), stamps, state_at + row + 8 * b)
    for c in range(boxes.shape[0]):
        above, below = mask_at + row * boxes[c, 0], mask_at + row * boxes[c, 1]
        older, younger = state_at + row * boxes[c, 2], state_at + row * boxes[c, 3]
        mine, ranks = np.int64(members.ctypes.data) + row * c, np.int64(inside.ctypes.data) + 2 * _ROW * c
        rank = np.int32(0)
        for b in range(0, 8 * _BLOCKS, 128):
            rank = members16(below + b, above + b, younger + b, older + b, mine + b, ranks + b // 4, rank)
        inside[c, _BLOCKS] = rank


@kernel
def _rows(limits: Any) -> Any:
    """Room for the masks below limits, between a row for no element and a row for all."""
    masks = np.zeros((len(limits) + 2, _ROW), np.uint64)
    masks[len(limits) + 1, :] = _ALL
    return masks


@kernel
def history_gaps(
    kind: Any,
    keep: Any,
    address: Any,
    states: Any,
    numel: Any,
    counts: Any,
    log: Any,
    limits: Any,
    stamps: Any,
    boxes: Any,
    owner: Any,
    cell: Any,
    positions: Any,
    words: Any,
    tiles: Any,
    gaps: Any,
    turned: Any,
) -> None:
    """Gaps and turned steps of all changes, a row for each class, and the changes per tile and class."""
    grid, count = (_rows(limits), _rows(stamps), np.empty(0, np.uint8)), boxes.shape[0]
    members, inside = np.zeros((count, _ROW), np.uint64), np.zeros((count, _ROW), np.int16)
    seen, last, ends = np.zeros(count, np.int64), np.zeros(count, np.int64), np.zeros(count, np.int64)
    mask_at, rank_at = np.int64(members.ctypes.data), np.int64(inside.ctypes.data)
    gap_at, word_at, row = np.int64(gaps.ctypes.data), np.int64(turned.ctypes.data), np.int64(gaps.shape[1])
    byte = np.empty(0, np.uint8)
    k, t = np.int64(0), 0
    for e in range(counts.size):
        end = k + counts[e]
        for tile in range(0, numel[e], np.int64(1) << log):
            stop = min(tile + (np.int64(1) << log), numel[e])
            seen[:] = 0
            last[:] = -1
            before = ends.copy()
            for low in range(tile, stop, 64 * _BLOCKS):
                if k >= end or np.int64(positions[k]) >= stop:
                    break
                a, s = address[e] + low * 2, states[e] + low
                _look(kind, keep, a, s, limits, stamps, boxes, grid, members, inside)
                while k < end and np.int64(positions[k]) < low + 64 * _BLOCKS:
                    p = np.int64(positions[np.uint64(k)]) - low
                    state = load(byte, s + p)
                    key = (np.uint64(load(kind, a + p * 2)) & keep) >> np.uint64(_SHIFT)
                    column = np.uint64(owner[np.uint64(cell[np.uint64(state)]), key])
                    c, b, bit = np.int64(column), p >> 6, np.uint64(p & 63)
                    mask = load(members, mask_at + 8 * (_ROW * c + b)) & ((_ONE << bit) - _ONE)
                    rank = seen[column] + np.int64(load(inside, rank_at + 2 * (_ROW * c + b))) + popcount(mask)
                    here = row * c + ends[column]
                    store(gaps, gap_at + 4 * here, np.uint32(rank - last[column] - 1))
                    store(turned, word_at + 2 * here, np.uint16(_turn(words[np.uint64(k)], state)))
                    last[column] = rank
                    ends[column] += 1
                    k += 1
                for j in range(count):
                    seen[j] += inside[j, _BLOCKS]
            for j in range(count):
                tiles[t, j] = ends[j] - before[j]
            t += 1


@kernel
def _turn(step: Any, state: Any) -> Any:
    """A folded step in the direction of the last one: its sign is turned where that went down. Undoes itself."""
    down = np.int64(state != 0) & ~np.int64(state) & np.int64(step != 0)
    return np.int64(step) + down * (2 * (np.int64(step) & 1) - 1)


@kernel
def history_positions(
    tag: Any,
    kind: Any,
    keep: Any,
    address: Any,
    states: Any,
    numel: Any,
    counts: Any,
    log: Any,
    limits: Any,
    stamps: Any,
    boxes: Any,
    tiles: Any,
    at: Any,
    gaps: Any,
    turned: Any,
    positions: Any,
    words: Any,
    old: Any,
) -> Any:
    """Positions with their steps and old bits, from gaps (and one to spare) and turned steps by class."""
    grid, count = (_rows(limits), _rows(stamps), np.empty(0, np.uint8)), boxes.shape[0]
    members, inside = np.zeros((count, _ROW), np.uint64), np.zeros((count, _ROW), np.int16)
    coarse, out, byte = np.empty((count, 16), np.int16), (positions, words, old), np.empty(0, np.uint8)
    want, left, none = np.empty(count, np.int64), np.empty(count, np.int64), np.zeros(8, np.int16)
    k, t = np.int64(0), 0
    for e in range(counts.size):
        for tile in range(0, numel[e], np.int64(1) << log):
            stop = min(tile + (np.int64(1) << log), numel[e])
            here = np.int64(0)
            for c in range(count):
                left[c], want[c] = tiles[t, c], gaps[at[c]]
                here += left[c]
            t += 1
            for low in range(tile, stop, 64 * _BLOCKS):
                if not here:
                    break
                a, s = address[e] + low * 2, states[e] + low
                _look(kind, keep, a, s, limits, stamps, boxes, grid, members, inside)
                for c in range(count):
                    for j in range(16):
                        coarse[c, j] = inside[c, 8 * j]
                found = (members, inside, coarse, none, byte)
                for c in range(count):
                    q, end = at[c], at[c] + left[c]
                    want[c], at[c] = _emit(tag, a, s, low, c, want[c], q, end, found, gaps, turned, k, out)
                    k += at[c] - q
                    left[c] = end - at[c]
                    here -= at[c] - q
    return k


@kernel
def _emit(
    tag: Any,
    a: Any,
    s: Any,
    low: Any,
    c: Any,
    rank: Any,
    q: Any,
    end: Any,
    found: Any,
    gaps: Any,
    turned: Any,
    k: Any,
    out: Any,
) -> Any:
    """Write down the changes of a class in a stretch, as the kernel of ctx does, with their steps turned back."""
    members, inside, coarse, none, byte = found
    positions, words, old = out
    total = np.int64(inside[c, _BLOCKS])
    mask_at, rank_at = np.int64(members.ctypes.data) + 8 * _ROW * c, np.int64(inside.ctypes.data) + 2 * _ROW * c
    coarse_at, none_at = np.int64(coarse.ctypes.data) + 32 * c, np.int64(none.ctypes.data)
    while rank < total and q < end:
        b = 8 * at_most16(coarse_at, rank) - 8
        b += at_most8(none_at, rank_at + 2 * b, rank) - 1
        p = b * 64 + select(load(members, mask_at + 8 * b), rank - np.int64(load(inside, rank_at + 2 * b)))
        positions[np.uint64(k)] = low + p
        old[np.uint64(k)] = load(tag, a + p * 2)
        words[np.uint64(k)] = _turn(turned[np.uint64(q)], load(byte, s + p))
        k += 1
        q += 1
        rank += 1 + np.int64(gaps[np.uint64(q)])
    return rank - total, q


@kernel
def remember(state: Any, counts: Any, states: Any, positions: Any, words: Any, now: Any) -> None:
    """The new states of what changed."""
    k = 0
    for e in range(counts.size):
        for i in range(k, k + counts[e]):
            up = np.uint8(words[i] & np.uint16(1) == 0)
            store(state, states[e] + np.int64(positions[i]), np.uint8(now << 1) | up)
        k += counts[e]


def times(folder: Path, megabytes: int = 256, repeats: int = 5) -> list[Time]:
    """The last sync of each trace with its history, repeated until it is large; all in turns, the best of each."""
    return [_time(run, list(syncs(folder, run))[-1], megabytes << 19, repeats) for run in traces.runs(folder)]


def _time(run: str, sync: Sync, elements: int, repeats: int) -> Time:
    old, new, state = (np.resize(a, elements) for a in (sync.old, sync.new, sync.state))
    digest = sparserl.digest(_held({"w": old}))

    def encode() -> sparserl.Patch:
        return sparserl.diff(_held({"w": old}), _held({"w": new}), profile="ctx", base_digest=digest, threads=1)

    patch = encode()
    landing = old.copy()
    parts = [_Part(sync, patch, i, (old, new, state)) for i in range(patch.buckets)]
    work = {"encode": encode, "decode": lambda: patch.apply(_held({"w": landing}), digest=patch.base, threads=1)}
    for name in ("encode_look", "encode_history", "decode_look", "decode_history", "remember"):
        work[name] = lambda name=name: [getattr(part, name)() for part in parts]
    took: dict[str, list[float]] = {name: [] for name in work}
    for _ in range(repeats + 1):  # the first compiles
        landing[:] = old
        for name, job in work.items():
            took[name].append(best(job, 1))
    if (landing != new).any() or not all(part.agrees() for part in parts):
        raise AssertionError("the changes did not come back; the figures would be worth nothing")
    seconds = {name: min(all_) for name, all_ in took.items()}
    return Time(run, old.nbytes, patch.changed, max(len(part.boxes) for part in parts), **seconds)


class _Part:
    """One bucket, and what the kernels need to look at it with and without history."""

    def __init__(self, sync: Sync, patch: sparserl.Patch, index: int, sides: tuple[Bits, Bits, Array]) -> None:
        old, new, state = sides
        held = LocalWeights.of(_held({"w": old}), patch.table)
        self.layout, entries = patch.contents.heads[index].layout, patch.contents.heads[index].entries
        if (self.layout.numel % (64 * _BLOCKS)).any():
            raise AssertionError("the kernels here read whole stretches only")
        self.address, _ = held.read(Batch(_BF16, entries.tensor, list(entries.region), entries.numel))
        self.after, self.now = state.copy(), sync.now
        offset = (self.address - old.ctypes.data) // old.itemsize
        self.states, self.after_states = state.ctypes.data + offset, self.after.ctypes.data + offset
        ranges = [slice(low, low + n) for low, n in zip(offset.tolist(), entries.numel.tolist(), strict=True)]
        self.positions = np.concatenate([np.flatnonzero(old[r] != new[r]) for r in ranges]).astype(np.uint32)
        changed = [(old[r] != new[r], old[r], new[r]) for r in ranges]
        self.words = np.concatenate([reference.steps(a[hit], b[hit], _BF16.sign_magnitude) for hit, a, b in changed])
        self._classes(sync, patch, index)
        n, classes = self.positions.size, (len(self.limits) + 1, len(self.boxes))
        self.tiles = [np.empty((tiles(self.layout), c), np.uint32) for c in classes]
        self.gaps = [np.empty((c, n), np.uint32) for c in classes]
        self.sorted = [np.empty((c, n), np.uint16) for c in classes]
        self.found = [[np.empty(n, dtype) for dtype in (np.uint32, np.uint16, np.uint16)] for _ in classes]
        self.encode_look()
        self.encode_history()
        self.ready = [self._joined(i) for i in range(2)]

    def _classes(self, sync: Sync, patch: sparserl.Patch, index: int) -> None:
        """Limits as the kernels take them: ctx's own, and those of the boxes that suit the sync."""
        chosen = bound.classes_of(patch, index)
        spare = (4 if len(chosen.thresholds) <= 4 else MOST_CLASSES - 1) - len(chosen.thresholds)
        self.limits = (np.uint64(0),) * spare + tuple(np.uint64(t << chosen.shift) for t in chosen.thresholds)
        boxes = split(sync, BOTH).boxes
        first = begins(sync.now)
        keys = sorted({box.low for box in boxes} - {0})
        stamps = sorted({box.old for box in boxes} - {CELLS}, reverse=True)  # of old cells come first
        self.key_limits = tuple(np.uint64(k << _SHIFT) for k in keys)
        self.stamps = tuple(np.uint64(first[cell - 1]) for cell in stamps)
        low, high = {0: 0}, {KEYS: len(keys) + 1}
        for row, key in enumerate(keys, 1):
            low[key] = high[key] = row
        above, below = {CELLS: 0}, {0: len(stamps) + 1}
        for row, cell in enumerate(stamps, 1):
            above[cell] = below[cell] = row
        self.boxes = np.array([(low[x.low], high[x.high], above[x.old], below[x.young]) for x in boxes], np.int64)
        self.owner, self.cell = _owner(boxes), cells(sync.now)

    def _joined(self, i: int) -> tuple[Array, Array, Array]:
        """Gaps and words class after class, with one gap to spare, and where they begin: what a decoder has in hand."""
        totals = self.tiles[i].sum(0, np.int64)
        gaps, words = (
            np.concatenate([row[:n] for row, n in zip(rows, totals.tolist(), strict=True)])
            for rows in (self.gaps[i], self.sorted[i])
        )
        return np.append(gaps, np.uint32(0)), words, np.cumsum(totals) - totals

    def agrees(self) -> bool:
        """Whether both decoders found the changes, in whatever order inside an entry."""
        owner = np.repeat(np.arange(self.layout.count.size), self.layout.count)
        for positions, words, _ in self.found:
            order = np.lexsort((positions, owner))
            if not (np.array_equal(positions[order], self.positions) and np.array_equal(words[order], self.words)):
                return False
        return True

    def encode_look(self) -> None:
        layout = self.layout
        regions = Tiled(self.address, layout.numel, layout.count, layout.tile_log)
        ends = (np.array([row.ctypes.data for row in rows], np.int64) for rows in (self.gaps[0], self.sorted[0]))
        places = ClassEnds(self.tiles[0].reshape(-1), *ends)
        cpu.classes.class_gaps(
            magnitude(_BF16), regions, self.limits, self.positions, self.words, self.words[:0], places
        )

    def encode_history(self) -> None:
        layout = self.layout
        args = *magnitude(_BF16), self.address, self.states, layout.numel, layout.count, layout.tile_log
        told = self.key_limits, self.stamps, self.boxes, self.owner, self.cell
        out = self.tiles[1], self.gaps[1], self.sorted[1]
        history_gaps(*args, *told, self.positions, self.words, *out)

    def decode_look(self) -> None:
        layout, tag = self.layout, np.empty(0, np.uint16)
        gaps, words, at = self.ready[0]
        regions = Tiled(self.address, layout.numel, layout.count, layout.tile_log)
        streams = ClassStreams(self.tiles[0].ravel(), at.copy(), gaps, words)
        out = ClassChanges(*self.found[0])
        cpu.classes.class_positions(tag, magnitude(_BF16), regions, self.limits, streams, _LOOK, out)

    def decode_history(self) -> None:
        layout, tag = self.layout, np.empty(0, np.uint16)
        gaps, words, at = self.ready[1]
        args = *magnitude(_BF16), self.address, self.states, layout.numel, layout.count, layout.tile_log
        told = self.key_limits, self.stamps, self.boxes, self.tiles[1]
        history_positions(tag, *args, *told, at.copy(), gaps, words, *self.found[1])

    def remember(self) -> None:
        args = self.layout.count, self.after_states, self.positions, self.words
        remember(np.empty(0, np.uint8), *args, np.uint8(self.now))


def render(saved: list[Saving], took: list[Time]) -> str:
    """The tables, in Markdown, and what follows from them."""
    lines = [
        "| trace | context | most classes | entropy | on the wire | saved | saved, last sync |",
        "| --- | --- | --- | --- | --- | --- | --- |",
        *(
            f"| {s.trace} | {s.way} | {s.classes} | {s.entropy:.2f} | {s.bits:.2f} "
            f"| {s.saved:.1%} | {s.saved_last:.1%} |"
            for s in saved
        ),
        "",
        "| trace | changed | encode: look, ms | with history | in all | decode: look, ms | with history | in all |",
        "| --- " * 8 + "|",
        *(
            f"| {t.trace} | {t.changed:,} | {1e3 * t.encode_look:.0f} | {1e3 * (t.encode_history + t.remember):.0f} "
            f"| {t.encode_ratio:.2f}× | {1e3 * t.decode_look:.0f} | {1e3 * (t.decode_history + t.remember):.0f} "
            f"| {t.decode_ratio:.2f}× |"
            for t in took
        ),
        "",
    ]
    mean = float(np.mean([s.saved for s in saved if s.way == BOTH.name]))
    slowest = max(max(t.encode_ratio, t.decode_ratio) for t in took)
    worth = mean > ENOUGH and slowest < MOST_TIME
    lines.append(
        f"Saved on average {mean:.1%} (more than {ENOUGH:.0%} is asked for), at most {slowest:.2f}× the time "
        f"(less than {MOST_TIME:g}× is asked for): {'worth it' if worth else 'not worth it'}."
    )
    return "\n".join(lines)


def main() -> None:
    folder = traces.find_traces()
    print(render(savings(folder), times(folder)))


if __name__ == "__main__":
    main()
