"""Measuring this machine: what every profile takes to find and encode changes, and to decode and apply them.

Weights are drawn from a normal distribution and rounded to bf16. An update of one size everywhere is added and rounded
at random, as if each weight stood anywhere between its neighbours: so small weights change often, large ones seldom,
and nearly all steps are ±1. Nothing here is fitted to any data set.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..codec import PROFILES
from ..parallel import Progress, ordered, thread_count
from ..plan import AnchorSpeed, Speed, Speeds, Work
from ..weights.digest import Digest, digest
from ..weights.dtypes import BY_NAME, Bits
from .compare import diff
from .contents import Contents
from .patch import Patch
from .snapshot import restore, snapshot

# Densities: the range that reinforcement learning moves in.
FEW = 0.002
MANY = 0.02
_BF16 = BY_NAME["bfloat16"]
_SPREAD = 0.02  # of the weights; as common as any, and of no consequence
_EXPONENTS = np.arange(256)
_CHUNK = 1 << 18

Words = npt.NDArray[np.uint16]


def measure(
    threads: int | None = None, megabytes: int = 128, repeats: int = 3, progress: Progress | None = None
) -> Speeds:
    """Measure how fast this machine encodes and applies patches, in some ten seconds; medians of the repeats.

    Each thread works on weights of its own, as it does when a model has many buckets.

    Args:
        threads: How many threads to measure; None for as many as there are cores.
        megabytes: Size of the weights, which should be larger than the caches, as models are.
        repeats: How often each measurement is repeated.
        progress: Called with the dense bytes just worked on; `work_bytes` says how many there are in all.
    """
    threads = thread_count(threads)
    tick: Progress = progress or (lambda _done: None)
    elements = megabytes * 10**6 // 2 // threads
    nbytes = 2 * elements * threads
    copies: list[float] = []

    shards: list[_Shard] = []

    def turns(density: float) -> dict[str, _Taken]:
        shards[:] = list(ordered(lambda seed: _Shard.draw(elements, density, seed), range(threads), threads))
        return {name: _turns(name, shards, threads, repeats, copies, tick) for name in PROFILES}

    few = turns(FEW)
    many = turns(MANY)
    anchors = {name: _anchor_speed(name == "coded", shards, threads, repeats, tick) for name in ("dense", "coded")}
    profiles = {name: _speed(nbytes, few[name], many[name]) for name in PROFILES}
    origin = f"measured on this machine {time.strftime('%Y-%m-%d')}, {megabytes} MB, {threads} thread(s)"
    return Speeds(threads, median(copies) / nbytes, profiles, anchors, origin)


def work_bytes(megabytes: int = 128, repeats: int = 3) -> int:
    """The dense bytes that `measure` works on."""
    return 2 * (len(PROFILES) + 1) * (repeats + 1) * megabytes * 10**6


def synthetic(elements: int, density: float, seed: int) -> tuple[Words, Words]:
    """Old and new bits of bf16 weights after an update, of which a share `density` differs."""
    rng = np.random.default_rng(seed)
    old = np.empty(elements, np.uint16)
    new = np.empty(elements, np.uint16)
    moves = None
    for at in range(0, elements, _CHUNK):
        floats = rng.standard_normal(min(_CHUNK, elements - at), np.float32) * np.float32(_SPREAD)
        bits = (floats.view(np.uint32) >> np.uint32(16)).astype(np.uint16)
        exponent = (bits >> np.uint16(7)).astype(np.uint8)  # the cast drops the sign
        if moves is None:
            moves = _moves(np.bincount(exponent, minlength=256) / exponent.size, density)
        steps = (moves[exponent] + rng.random(bits.size, np.float32)).astype(np.uint16)
        inward = (floats.view(np.uint32) & np.uint32(1)).astype(bool) & ((bits & np.uint16(0x7FFF)) >= steps)
        old[at : at + _CHUNK] = bits
        new[at : at + _CHUNK] = np.where(inward, bits - steps, bits + steps)
    return old, new


@dataclass
class _Shard:
    """One thread's share: two versions of some weights, and memory that patches are applied to."""

    old: dict[str, Bits]
    new: dict[str, Bits]
    target: Words
    base: Digest
    changes: int
    patch: bytes = b""
    anchor: Contents | None = None

    @classmethod
    def draw(cls, elements: int, density: float, seed: int) -> _Shard:
        old, new = synthetic(elements, density, seed)
        weights = {"w": Bits(old, _BF16)}
        base = digest(weights, threads=1)
        return cls(weights, {"w": Bits(new, _BF16)}, old.copy(), base, int(np.count_nonzero(old != new)))

    def encode(self, profile: str) -> None:
        self.patch = diff(self.old, self.new, profile=profile, base_digest=self.base, threads=1).to_bytes()

    def decode(self) -> None:
        Patch.from_bytes(self.patch).apply({"w": Bits(self.target, _BF16)}, digest=self.base, threads=1)

    def restore(self) -> None:
        """Also what it takes to receive dense weights: a copy."""
        np.copyto(self.target, self.old["w"].array)

    def encode_anchor(self, coded: bool) -> None:
        self.anchor = snapshot(self.new, coded=coded, threads=1)

    def decode_anchor(self) -> None:
        assert self.anchor is not None
        restore(self.anchor, {"w": Bits(np.zeros_like(self.target), _BF16)}, threads=1)


class _Taken(NamedTuple):
    """One profile at one density: median seconds, and bits sent."""

    changes: int
    encode_s: float
    decode_s: float
    bits: int


def _turns(name: str, shards: list[_Shard], threads: int, repeats: int, copies: list[float], tick: Progress) -> _Taken:
    """Encode and decode all shards at once, several times, of which the first only warms up."""
    encodes: list[float] = []
    decodes: list[float] = []
    for turn in range(repeats + 1):
        seconds = [
            _timed(lambda s: s.encode(name), shards, threads),
            _timed(_Shard.decode, shards, threads),
            _timed(_Shard.restore, shards, threads),
        ]
        if turn:
            for times, taken in zip((encodes, decodes, copies), seconds, strict=True):
                times.append(taken)
        tick(sum(s.target.nbytes for s in shards))
    patches = [Patch.from_bytes(s.patch) for s in shards]
    sent = sum(p.nbytes - p.table_nbytes for p in patches)
    return _Taken(sum(s.changes for s in shards), median(encodes), median(decodes), 8 * sent)


def _anchor_speed(coded: bool, shards: list[_Shard], threads: int, repeats: int, tick: Progress) -> AnchorSpeed:
    """Make and take anchors of all shards at once, several times, of which the first only warms up."""
    encodes: list[float] = []
    decodes: list[float] = []
    nbytes = sum(shard.target.nbytes for shard in shards)
    for turn in range(repeats + 1):
        encode_s = _timed(lambda shard: shard.encode_anchor(coded), shards, threads)
        decode_s = _timed(_Shard.decode_anchor, shards, threads)
        if turn:
            encodes.append(encode_s)
            decodes.append(decode_s)
        tick(nbytes)
    sent = sum(shard.anchor.nbytes for shard in shards if shard.anchor is not None)
    return AnchorSpeed(median(encodes) / nbytes, median(decodes) / nbytes, sent / nbytes)


def _timed(work: Callable[[_Shard], None], shards: list[_Shard], threads: int) -> float:
    start = time.perf_counter()
    for _ in ordered(work, shards, threads):
        pass
    return time.perf_counter() - start


def _speed(nbytes: int, few: _Taken, many: _Taken) -> Speed:
    """A model from two densities: bits fall with the logarithm of the density, seconds rise with changes."""
    bits = few.bits / few.changes
    bits_many = many.bits / many.changes
    slope = (bits - bits_many) / math.log2(MANY / FEW)
    return Speed(
        Work.fit(nbytes, (few.changes, few.encode_s), (many.changes, many.encode_s)),
        Work.fit(nbytes, (few.changes, few.decode_s), (many.changes, many.decode_s)),
        bits_at_percent=bits_many + slope * math.log2(MANY / 0.01),
        bits_per_halving=slope,
    )


def _moves(share: Any, density: float) -> npt.NDArray[np.float32]:
    """How many steps the update is at each exponent, of a size that changes a share `density` of all weights."""
    low = -300.0
    high = 0.0
    for _ in range(60):
        size = (low + high) / 2
        moves = np.exp2(size + 134.0 - _EXPONENTS)  # the spacing of bf16 is 2^(exponent - 134)
        below = float(share @ np.minimum(moves, 1)) < density
        if below:
            low = size
        else:
            high = size
    return np.asarray(np.minimum(moves, 64), np.float32)
