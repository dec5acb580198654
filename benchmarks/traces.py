"""Bits of real RL runs, sync by sync, and synthetic pairs of any size that behave like them.

A trace folder holds `base.safetensors` (the weights before training) and, for each run, `RUN.json`,
`RUN-warm.safetensors` (all changes of the first syncs in one) and `RUN-NNN.safetensors` for each sync
after it. A change file has `TENSOR.indices` (int32, sorted, flat) and `TENSOR.values` (the new bf16 bits). A file may
be coded as `benchmarks.planes` does, and has `.xz` behind its name then.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import safetensors.torch
import torch
from numpy.typing import NDArray

from benchmarks.planes import unpack

Bits: TypeAlias = NDArray[np.uint16]
Weights: TypeAlias = dict[str, Bits]

_REPO = Path(__file__).resolve().parents[1]
_EXPONENTS = 256
_CHUNK = 1 << 22


def find_traces() -> Path:
    """The corpus, which is what every published size is measured on."""
    return _REPO / "benchmarks" / "corpus"


def runs(folder: Path) -> list[str]:
    """Names of the runs in a trace folder, sorted."""
    return sorted(path.stem for path in folder.glob("*.json"))


def describe(folder: Path, run: str) -> dict[str, Any]:
    """What `RUN.json` says: how the run was trained, and how many elements each sync changed."""
    description: dict[str, Any] = json.loads((folder / f"{run}.json").read_text())
    return description


def syncs(folder: Path, run: str) -> Iterator[tuple[Weights, Weights]]:
    """Yield (old, new) for each sync after the warm-up; the arrays of a pair are the caller's own."""
    base = load(folder / "base.safetensors")
    old = _patched(base, load(folder / f"{run}-warm.safetensors"))
    for sync in describe(folder, run)["syncs"]:
        new = _patched(old, load(folder / f"{run}-{sync['sync']:03d}.safetensors"))
        yield _copied(old), _copied(new)
        old = new


def joined(folder: Path, run: str, count: int) -> Iterator[tuple[Weights, Weights]]:
    """Yield (old, new) with so many syncs in one, after the warm-up; without a count, the warm-up in one."""
    versions = [old for old, _ in syncs(folder, run)]
    if not count:
        yield load(folder / "base.safetensors"), versions[0]
        return
    *_, (_, last) = syncs(folder, run)
    yield from zip(versions, [*versions[count:], last], strict=False)


def uniform(folder: Path, density: float) -> Iterator[tuple[Weights, Weights]]:
    """Yield one (old, new): any element of the base may change, and moves by a hundredth of itself, up or down.

    So NeMo-DCR (arXiv 2610.08430) was measured. A hundredth is one to three steps of bf16.
    """
    rng = np.random.default_rng(0)
    old = load(folder / "base.safetensors")
    new = {}
    for name, bits in old.items():
        factor = np.where(rng.random(bits.shape) < 0.5, np.float32(0.99), np.float32(1.01))
        moved = torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16).float() * torch.from_numpy(factor)
        moved_bits = moved.bfloat16().view(torch.int16).numpy().view(np.uint16)
        new[name] = np.where(rng.random(bits.shape) < density, moved_bits, bits)
    yield old, new


def synthetic(nbytes: int, density: float, seed: int) -> tuple[Bits, Bits]:
    """One flat bf16 pair of `nbytes` a copy, of which a share `density` of the elements differs.

    Old bits are the trace's base weights, tiled from a random start. Which elements change is drawn from
    P(change | old exponent) of the run whose density is nearest, scaled to the density asked for; the step
    is drawn from the steps seen at that exponent. Neighbours are independent, unlike in a real sync.
    """
    folder = find_traces()
    profile = min((_measure(folder, run) for run in runs(folder)), key=lambda p: abs(np.log(p.density / density)))
    rng = np.random.default_rng(seed)
    pool = np.concatenate([bits.ravel() for bits in load(folder / "base.safetensors").values()])
    old = np.resize(np.roll(pool, -int(rng.integers(pool.size))), nbytes // 2)
    chance = _scaled(profile.chance, _tiled_population(old, pool.size), density)
    new = old.copy()
    for start in range(0, old.size, _CHUNK):
        chunk = new[start : start + _CHUNK]
        hit = rng.random(chunk.size, np.float32) < chance[_exponent(chunk)]
        at = np.flatnonzero(hit)
        chunk[at] = _stepped(chunk[at], profile, rng)
    return old, new


@dataclass(frozen=True)
class _Profile:
    """How one run changes its weights.

    `outward` holds every step seen, grouped by the old exponent: exponent e owns
    `outward[first[e] : first[e] + count[e]]`. Outward means away from zero, so that a step seen on a
    positive weight can be taken from a negative one without leaving the finite numbers.
    """

    density: float
    chance: NDArray[np.float64]
    outward: NDArray[np.int32]
    first: NDArray[np.int64]
    count: NDArray[np.int64]


def load(path: Path) -> dict[str, NDArray[Any]]:
    """Tensors of a safetensors file, which may be coded, by name; bf16 ones as uint16 bits."""
    coded = path.with_name(f"{path.name}.xz")
    data = unpack(coded.read_bytes()) if coded.exists() else path.read_bytes()
    return {name: _as_numpy(tensor) for name, tensor in sorted(safetensors.torch.load(data).items())}


def _as_numpy(tensor: torch.Tensor) -> NDArray[Any]:
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(np.uint16)
    return tensor.numpy()


def _patched(weights: Weights, changes: dict[str, NDArray[Any]]) -> Weights:
    """New weights with the changes applied; a tensor without changes is the same array as before."""
    patched = dict(weights)
    for name, bits in weights.items():
        if f"{name}.indices" in changes:
            patched[name] = bits.copy()
            patched[name].reshape(-1)[changes[f"{name}.indices"]] = changes[f"{name}.values"]
    return patched


def _copied(weights: Weights) -> Weights:
    return {name: bits.copy() for name, bits in weights.items()}


def _exponent(bits: Bits) -> Bits:
    return (bits >> np.uint16(7)) & np.uint16(0xFF)


def order(bits: Bits) -> NDArray[np.int32]:
    """The monotonic integer order of bf16 patterns, zero at +0.0 and -1 at -0.0."""
    wide = bits.astype(np.int32)
    return np.where(wide >= 0x8000, 0x7FFF - wide, wide)


def _pattern(order: NDArray[np.int32]) -> Bits:
    return np.where(order < 0, 0x7FFF - order, order).astype(np.uint16)


def _away_from_zero(bits: Bits) -> NDArray[np.int32]:
    return np.where(bits >= 0x8000, -1, 1).astype(np.int32)


@cache
def _measure(folder: Path, run: str) -> _Profile:
    seen = np.zeros(_EXPONENTS, np.int64)
    exponents, steps = [], []
    for old, new in syncs(folder, run):
        for name, before in old.items():
            seen += np.bincount(_exponent(before).ravel(), minlength=_EXPONENTS)
            at = before != new[name]
            exponents.append(_exponent(before[at]))
            steps.append((order(new[name][at]) - order(before[at])) * _away_from_zero(before[at]))
    exponent = np.concatenate(exponents)
    count = np.bincount(exponent, minlength=_EXPONENTS)
    outward = np.concatenate(steps)[np.argsort(exponent, kind="stable")]
    chance = count / np.maximum(seen, 1)
    return _Profile(exponent.size / int(seen.sum()), chance, outward, np.cumsum(count) - count, count)


def _tiled_population(bits: Bits, period: int) -> NDArray[np.int64]:
    """How many elements have each exponent, counting one period and the broken one at the end."""
    whole, rest = divmod(bits.size, period)
    period_count = np.bincount(_exponent(bits[:period]), minlength=_EXPONENTS)
    rest_count = np.bincount(_exponent(bits[:rest]), minlength=_EXPONENTS)
    return whole * period_count + rest_count


def _scaled(chance: NDArray[np.float64], population: NDArray[np.int64], density: float) -> NDArray[np.float32]:
    """`chance` times the factor that makes the expected density right, no probability above one."""
    share = population / population.sum()
    reachable = float(share[chance > 0].sum())
    if not 0 < density < reachable:
        raise ValueError(f"density {density} is outside (0, {reachable:.3f}), the share the trace ever changes")
    low, high = 0.0, 1 / float(chance[chance > 0].min())
    for _ in range(60):
        middle = (low + high) / 2
        below = float(share @ np.minimum(chance * middle, 1)) < density
        low, high = (middle, high) if below else (low, middle)
    return np.minimum(chance * high, 1).astype(np.float32)


def _stepped(bits: Bits, profile: _Profile, rng: np.random.Generator) -> Bits:
    exponent = _exponent(bits)
    drawn = profile.first[exponent] + (rng.random(bits.size) * profile.count[exponent]).astype(np.int64)
    return _pattern(order(bits) + profile.outward[drawn] * _away_from_zero(bits))
