"""Every profile and every peer, on the same data in the same run: bits per changed element, and speed."""

from __future__ import annotations

import functools
import gc
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

import sparserl
from benchmarks import ceiling
from benchmarks.ceiling import Ceilings
from benchmarks.peers import PEERS, size
from benchmarks.traces import Bits, Weights
from sparserl.codec import PROFILES
from sparserl.weights.dtypes import BY_NAME

_BF16 = BY_NAME["bfloat16"]


@dataclass(frozen=True)
class Size:
    """One format on one trace, all its syncs."""

    format: str
    trace: str
    changed: int
    bytes: int
    dense_bytes: int

    @property
    def bits(self) -> float:
        return 8 * self.bytes / self.changed

    @property
    def ratio(self) -> float:
        return self.dense_bytes / self.bytes


@dataclass(frozen=True)
class Speed:
    """One format on 512 MB of synthetic weights: dense bytes per second, and the share of the ceiling."""

    format: str
    threads: int
    encode: float
    decode: float
    encode_share: float  # of the two-stream ceiling
    decode_share: float  # of the scatter ceiling
    decode_read_share: float  # of the one-stream ceiling


def _ours(weights: Weights) -> dict[str, sparserl.Bits]:
    return {name: sparserl.Bits(bits, _BF16) for name, bits in weights.items()}


def _require_equal(format: str, got: Weights, want: Weights) -> None:
    """A figure of a format that is not exact would be worth nothing."""
    for name, bits in want.items():
        if not np.array_equal(got[name], bits):
            raise AssertionError(f"{format} did not reproduce {name!r}")


def sizes(cases: Mapping[str, Iterable[tuple[Weights, Weights]]], tick: Callable[[str], None]) -> list[Size]:
    """All syncs of each case, decoded and checked. The tensor table, which a run sends once, is left out."""
    out = []
    for case, syncs in cases.items():
        changed = dense = 0
        total: dict[str, int] = {}
        for old, new in syncs:
            tick(case)
            changed += sum(int(np.count_nonzero(old[n] != new[n])) for n in old)
            dense += sum(a.nbytes for a in new.values())
            for name in ("auto", *PROFILES):
                patch = sparserl.diff(_ours(old), _ours(new), profile=name)
                weights = {n: a.copy() for n, a in old.items()}
                patch.apply(_ours(weights))
                _require_equal(name, weights, new)
                total[name] = total.get(name, 0) + patch.nbytes - patch.table_nbytes
            for peer in PEERS:
                payload = peer.encode(old, new)
                weights = {n: a.copy() for n, a in old.items()}
                peer.decode_apply(payload, weights)
                _require_equal(peer.name, weights, new)
                total[peer.name] = total.get(peer.name, 0) + size(payload)
        out += [Size(name, case, changed, nbytes, dense) for name, nbytes in total.items()]
    return out


@dataclass
class _Job:
    """A format with so many threads, and the best times seen."""

    name: str
    threads: int
    encode: Callable[[], Any]
    decode: Callable[[Any, Weights], None]
    encoding: float = float("inf")
    decoding: float = float("inf")


def speeds(old: Bits, new: Bits, tick: Callable[[str], None], rounds: int = 6) -> tuple[list[Speed], Ceilings]:
    """Encode and decode + apply. Ours with digests and checksums, the base's digest held as in a running session.

    Ceilings and formats take turns, so that a slow moment of the machine hits all of them; the best of each counts.
    """
    where = np.flatnonzero(old != new).astype(np.uint32)
    values = new[where]
    landing = {"w": old.copy()}
    words = old.view(np.uint64), new.view(np.uint64), landing["w"].view(np.uint64)
    jobs = _jobs({"w": old}, {"w": new})
    turns = []
    for turn in range(rounds):
        tick(f"turn {turn + 1} of {rounds}, ceilings")
        turns.append(ceiling.turn(words[2], words[1], where, values))
        for job in jobs:
            tick(f"turn {turn + 1} of {rounds}, {job.name}, {job.threads} thread(s)")
            gc.collect()
            started = time.perf_counter()
            payload = job.encode()
            job.encoding = min(job.encoding, time.perf_counter() - started)
            landing["w"][:] = old
            ceiling.read(words[1])  # pushes them out of the caches
            started = time.perf_counter()
            job.decode(payload, landing)
            job.decoding = min(job.decoding, time.perf_counter() - started)
            _require_equal(job.name, landing, {"w": new})
    ceilings = ceiling.best(turns)
    return [_speed(job, old.nbytes, where.size, ceilings) for job in jobs], ceilings


def _jobs(old: Weights, new: Weights) -> list[_Job]:
    digest = sparserl.digest(_ours(old))
    jobs = []
    for name in ("auto", *PROFILES):
        for threads in (1, 2):

            def encode(name: str = name, threads: int = threads) -> sparserl.Patch:
                return sparserl.diff(_ours(old), _ours(new), profile=name, base_digest=digest, threads=threads)

            def decode(patch: sparserl.Patch, landing: Weights, threads: int = threads) -> None:
                patch.apply(_ours(landing), digest=patch.base, threads=threads)

            jobs.append(_Job(name, threads, encode, decode))
    return jobs + [_Job(p.name, 1, functools.partial(p.encode, old, new), p.decode_apply) for p in PEERS]


def _speed(job: _Job, nbytes: int, changes: int, ceilings: Ceilings) -> Speed:
    one = job.threads == 1
    return Speed(
        job.name,
        job.threads,
        nbytes / job.encoding,
        nbytes / job.decoding,
        nbytes / job.encoding / (ceilings.two_stream_1 if one else ceilings.two_stream_2),
        changes / job.decoding / (ceilings.scatter_1 if one else ceilings.scatter_2),
        nbytes / job.decoding / (ceilings.one_stream_1 if one else ceilings.one_stream_2),
    )
