"""Estimates of what things would cost in bits, in Numba: planning must not take longer than coding."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from .cpu import tokenize
from .llvm import inline, kernel


@inline
def _xlogx(x: Any) -> Any:
    return x * math.log2(x) if x > 0 else 0.0


@kernel
def index_bits(numel: Any, count: Any, out: Any) -> None:
    """Bits to say which `count` of `numel` elements changed, were all choices alike; a code takes one per gap."""
    for e in range(numel.size):
        n, k = float(numel[e]), float(count[e])
        out[e] = max(_xlogx(n) - _xlogx(k) - _xlogx(n - k), k) if k < n else 0.0


@kernel
def number_bits(values: Any, every: Any) -> Any:
    """Bits per number in token form, judged by one in `every`: entropy of the tokens, plus the low bits.

    The entropy is never more than eight, with the Miller-Madow correction for small samples.
    """
    counts = np.zeros(256, np.int64)
    lows, seen, kinds, entropy = np.uint64(0), 0, 0, 0.0
    for i in range(0, values.size, every):
        head, _, width = tokenize(np.uint64(values[i]))
        counts[head] += 1
        lows += width
        seen += 1
    for c in counts:
        kinds += 1 if c > 0 else 0
        entropy -= _xlogx(c / max(seen, 1))
    return min(8.0, entropy + max(kinds - 1, 0) / (2 * math.log(2) * max(seen, 1))) + float(lows) / max(seen, 1)


@inline
def _class_bits(members: Any, counts: Any) -> Any:
    """Bits of a class: which of its members change, and by which step."""
    changed, steps = 0.0, 0.0
    for count in counts:
        changed += count
        steps -= _xlogx(count)
    index = _xlogx(members) - _xlogx(changed) - _xlogx(members - changed)
    return max(index, 0.0) + steps + _xlogx(changed)


@kernel
def cuts(members: Any, changed: Any, edges: Any, each: Any, worth: Any, most: Any) -> Any:
    """Where to cut keys into classes so that they cost least, by dynamic programming over the candidate edges.

    A class costs its bits and `each`; one more than there are must save the share `worth` of all. Returns the bits
    and the inner edges of at most `most` classes.
    """
    n, columns = edges.size, changed.shape[1]
    size, count = np.zeros(n), np.zeros((n, columns))
    for i in range(1, n):
        size[i], count[i] = size[i - 1], count[i - 1]
        for key in range(edges[i - 1], edges[i]):
            size[i] += members[key]
            count[i] += changed[key]
    cost = np.full((n, n), np.inf)
    for i in range(n):
        for j in range(i + 1, n):
            cost[i, j] = _class_bits(size[j] - size[i], count[j] - count[i]) + each
    total, back = cost[0].copy(), np.zeros((most, n), np.int64)
    best, inner = total[n - 1], np.empty(0, np.int64)
    for classes in range(2, most + 1):
        longer = np.full(n, np.inf)
        for j in range(n):
            for i in range(j):
                if total[i] + cost[i, j] < longer[j]:
                    longer[j], back[classes - 1, j] = total[i] + cost[i, j], i
        total = longer
        if total[n - 1] < best - worth * best * (classes - 1 - inner.size):
            best, at = total[n - 1], n - 1
            inner = np.empty(classes - 1, np.int64)
            for c in range(classes - 1, 0, -1):
                at = back[c, at]
                inner[c - 1] = edges[at]
    return best, inner
