"""Statistics of fp32 masters and gradients, from a sample of their elements, by kind of tensor.

All figures are whole numbers, which add up over ranks exactly. Sizes are counted in bins, four to a power of two:
bin `b` has the numbers from 2^(b/4) up to, but not with, 2^((b+1)/4).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt

from ..sources.master_sample import Floats, MasterSample, MasterUpdate
from .kinds import place

BINS = 4  # to a power of two
_EDGES = np.exp2(np.arange(BINS) / BINS) / 2  # of the bins between 1/2 and 1
_SQUARE_UNIT = 298  # squares of fp32 numbers are whole multiples of 2^-298
_QUANTILES = {"1%": 0.01, "10%": 0.1, "median": 0.5, "90%": 0.9, "99%": 0.99}

Kinds = dict[str, dict[str, Any]]


def figures(update: MasterUpdate) -> dict[str, Kinds]:
    """What a line has of the masters and gradients of a sync; nothing of what is not at hand."""
    by_name = {"masters": _updates(update), "gradients": _gradients(update.after)}
    return {name: kinds for name, kinds in by_name.items() if kinds}


def merged(ranks: Sequence[Mapping[str, Mapping[str, Any]]]) -> Kinds:
    """The figures of all ranks together."""
    total: Kinds = {}
    for kinds in ranks:
        for kind, counts in kinds.items():
            _add(total, kind, counts)
    return _sorted(total)


def update_figures(syncs: Iterable[Mapping[str, Mapping[str, Any]]]) -> dict[str, Any]:
    """The updates of masters in some syncs, as a summary has them.

    `changed` and `visible` are shares of the sampled elements, `hidden` of those that changed; `steps` are quantiles of
    the size of updates, in steps of the published format from the old value to the next larger one.
    """
    total = _all_kinds(syncs)
    return {
        "sampled": total["sampled"],
        "changed": total["changed"] / max(1, total["sampled"]),
        "visible": total["visible"] / max(1, total["sampled"]),
        "hidden": total["hidden"] / max(1, total["changed"]),
        "steps": quantiles(_bins(total)),
    }


def gradient_figures(counts: Mapping[str, Any]) -> dict[str, Any]:
    """The gradients of a kind, as a summary has them; the norm is an estimate unless all elements were sampled."""
    sampled = counts["sampled"]
    squares = Fraction(counts["squares"], 1 << _SQUARE_UNIT) * Fraction(counts["elements"], max(1, sampled))
    return {
        "sampled": sampled,
        "elements": counts["elements"],
        "zero": counts["zero"] / max(1, sampled),
        "not_finite": counts["not_finite"],
        "norm": math.sqrt(squares),
        "size": quantiles(_bins(counts)),
    }


def norm(kinds: Mapping[str, Mapping[str, Any]]) -> float:
    """The norm of the gradients of all kinds."""
    return math.hypot(*(gradient_figures(counts)["norm"] for counts in kinds.values()))


def quantiles(bins: Mapping[int, int]) -> dict[str, float]:
    """Quantiles of binned numbers: the upper end of the bin, less than a fifth above the exact one."""
    keys = sorted(bins)
    total = sum(bins.values())
    if not total:
        return {}
    reached = np.cumsum([bins[key] for key in keys])
    at = {name: keys[int(np.searchsorted(reached, share * total))] for name, share in _QUANTILES.items()}
    return {name: 2.0 ** ((key + 1) / BINS) for name, key in at.items()}


def binned(values: npt.NDArray[np.float64]) -> dict[str, int]:
    """How many of some positive numbers are in each bin. Exact: no logarithm is rounded."""
    mantissa, exponent = np.frexp(values)
    keys = BINS * (exponent.astype(np.int64) - 1) + np.searchsorted(_EDGES, mantissa, side="right") - 1
    return {str(key): int(count) for key, count in zip(*np.unique(keys, return_counts=True), strict=True)}


def _updates(update: MasterUpdate) -> Kinds:
    if update.before is None:
        return {}
    kinds: Kinds = {}
    for key, after in update.after.items():
        before = update.before.get(key)
        if before is None or before.masters is None or after.masters is None:
            continue
        if before.masters.shape != after.masters.shape or before.published.dtype != after.published.dtype:
            continue
        changed = before.masters.view(np.uint32) != after.masters.view(np.uint32)
        visible = _bits(before.published) != _bits(after.published)
        old = before.masters[changed].astype(np.float64)
        sizes = np.abs(after.masters[changed].astype(np.float64) - old) / _steps(before.published)[changed]
        countable = np.isfinite(sizes) & (sizes > 0)  # from zero to minus zero is no distance
        counts = {
            "sampled": changed.size,
            "changed": int(changed.sum()),
            "visible": int(visible.sum()),
            "hidden": int((changed & ~visible).sum()),
            "bins": binned(sizes[countable]),
        }
        _add(kinds, place(key[0])[1], counts)
    return _sorted(kinds)


def _bits(values: Any) -> npt.NDArray[Any]:
    """The bits of a torch tensor."""
    import torch

    bits: npt.NDArray[Any] = values.view(getattr(torch, f"int{8 * values.itemsize}")).numpy()
    return bits


def _steps(values: Any) -> npt.NDArray[np.float64]:
    """From each number of a format to the next larger magnitude; of what has none, not a number."""
    import torch

    magnitude = values.abs()
    next_bits = magnitude.view(getattr(torch, f"int{8 * values.itemsize}")) + 1
    following = next_bits.view(values.dtype).double()
    following[~following.isfinite()] = torch.nan
    steps: npt.NDArray[np.float64] = (following - magnitude.double()).numpy()
    return steps


def _gradients(sample: MasterSample) -> Kinds:
    kinds: Kinds = {}
    for (name, _), part in sample.items():
        if part.gradients is None:
            continue
        finite = part.gradients[np.isfinite(part.gradients)]
        nonzero = finite[finite != 0]
        counts = {
            "sampled": part.gradients.size,
            "elements": part.elements,
            "zero": int(finite.size - nonzero.size),
            "not_finite": int(part.gradients.size - finite.size),
            "squares": sum_of_squares(nonzero),
            "bins": binned(np.abs(nonzero).astype(np.float64)),
        }
        _add(kinds, place(name)[1], counts)
    return _sorted(kinds)


def sum_of_squares(values: Floats) -> int:
    """The exact sum of the squares of finite fp32 numbers, in units of 2^-298. So the sums of ranks add up exactly."""
    bits = np.abs(values).view(np.uint32).astype(np.int64)
    exponent = np.maximum(bits >> 23, 1)
    mantissa = (bits & 0x7FFFFF) | ((bits >= 1 << 23).astype(np.int64) << 23)
    squares = mantissa * mantissa
    total = 0
    for power in np.unique(exponent).tolist():
        some = squares[exponent == power]
        high = int((some >> 24).sum())  # in two halves, which do not overflow
        low = int((some & 0xFFFFFF).sum())
        total += ((high << 24) + low) << (2 * (power - 1))
    return total


def _add(kinds: Kinds, kind: str, counts: Mapping[str, Any]) -> None:
    total = kinds.setdefault(kind, {})
    for name, count in counts.items():
        if isinstance(count, Mapping):
            total[name] = dict(Counter(total.get(name, {})) + Counter(count))
        else:
            total[name] = total.get(name, 0) + count


def _sorted(kinds: Kinds) -> Kinds:
    """In one order, whichever rank comes first."""
    return {
        kind: counts | {"bins": {key: counts["bins"][key] for key in sorted(counts["bins"], key=int)}}
        for kind, counts in sorted(kinds.items())
    }


def all_bins(syncs: Iterable[Mapping[str, Mapping[str, Any]]]) -> dict[int, int]:
    """How many numbers of all kinds are in each bin."""
    return _bins(_all_kinds(syncs))


def _all_kinds(syncs: Iterable[Mapping[str, Mapping[str, Any]]]) -> dict[str, Any]:
    total: Kinds = {}
    for kinds in syncs:
        for counts in kinds.values():
            _add(total, "all", counts)
    return total.get("all", {})


def _bins(counts: Mapping[str, Any]) -> dict[int, int]:
    return {int(key): count for key, count in counts.get("bins", {}).items()}
