"""Every profile and every peer, on the same data in the same run: bits per changed element, and speed."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import sparserl
from benchmarks import traces
from benchmarks.ceiling import Ceilings
from benchmarks.kernels import best
from benchmarks.peers import PEERS, Payload, size
from benchmarks.traces import Bits, Weights
from sparserl.bits import BY_NAME
from sparserl.codec import PROFILES

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


Encode = Callable[[], Any]


def _ours(weights: Weights) -> dict[str, sparserl.Bits]:
    return {name: sparserl.Bits(bits, _BF16) for name, bits in weights.items()}


def _require_equal(format: str, got: Weights, want: Weights) -> None:
    """A figure of a format that is not exact would be worth nothing."""
    for name, bits in want.items():
        if not np.array_equal(got[name], bits):
            raise AssertionError(f"{format} did not reproduce {name!r}")


def sizes(folder: Path, tick: Callable[[str], None]) -> list[Size]:
    """All syncs of all traces, decoded and checked. The tensor table, which a run sends once, is left out."""
    out = []
    for run in traces.runs(folder):
        changed = dense = 0
        total: dict[str, int] = {}
        for old, new in traces.syncs(folder, run):
            tick(run)
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
        out += [Size(name, run, changed, nbytes, dense) for name, nbytes in total.items()]
    return out


def speeds(old: Bits, new: Bits, ceilings: Ceilings, tick: Callable[[str], None], repeats: int = 6) -> list[Speed]:
    """Encode and decode + apply. Ours with digests and checksums, the base's digest held as in a running session."""
    changes = int(np.count_nonzero(old != new))
    weights = {"w": old}, {"w": new}
    digest = sparserl.digest(_ours(weights[0]))
    out = []
    for name in ("auto", *PROFILES):
        for threads in (1, 2):
            tick(f"{name}, {threads} thread(s)")
            encode = lambda p=name, t=threads: sparserl.diff(  # noqa: E731  # two lines are clearer than a def
                *map(_ours, weights), profile=p, base_digest=digest, threads=t
            )
            patch = encode()
            landing = {"w": old.copy()}
            undo = patch.invert(_ours(weights[0]), digest=digest)

            def decode(patch: sparserl.Patch = patch, threads: int = threads, landing: Weights = landing) -> None:
                patch.apply(_ours(landing), digest=patch.base, threads=threads)

            seconds = _turns(encode, decode, lambda u=undo, w=landing: u.apply(_ours(w), digest=u.base), repeats)
            _require_equal(name, landing, weights[1])
            out.append(_speed(name, threads, old.nbytes, changes, *seconds, ceilings))
    for peer in PEERS:
        tick(peer.name)
        payload: Payload = peer.encode(*weights)
        landing = {"w": old.copy()}

        def restore(landing: Weights = landing) -> None:
            landing["w"][:] = old

        seconds = _turns(
            lambda p=peer: p.encode(*weights),
            lambda p=peer, b=payload, w=landing: p.decode_apply(b, w),
            restore,
            repeats,
        )
        _require_equal(peer.name, landing, weights[1])
        out.append(_speed(peer.name, 1, old.nbytes, changes, *seconds, ceilings))
    return out


def _turns(encode: Encode, decode: Encode, restore: Encode, repeats: int) -> tuple[float, float]:
    """Best times; the weights are put back between two decodings, outside the clock, and end decoded."""
    gc.collect()
    encoding = best(encode, repeats)
    decoding = []
    for i in range(repeats + 1):
        if i:
            restore()
        decoding.append(best(decode, 1))
    return encoding, min(decoding)


def _speed(
    name: str, threads: int, nbytes: int, changes: int, encoding: float, decoding: float, ceilings: Ceilings
) -> Speed:
    read = ceilings.two_stream_1 if threads == 1 else ceilings.two_stream_2
    scatter = ceilings.scatter_1 if threads == 1 else ceilings.scatter_2
    one = ceilings.one_stream_1 if threads == 1 else ceilings.one_stream_2
    return Speed(
        name,
        threads,
        nbytes / encoding,
        nbytes / decoding,
        nbytes / encoding / read,
        changes / decoding / scatter,
        nbytes / decoding / one,
    )
