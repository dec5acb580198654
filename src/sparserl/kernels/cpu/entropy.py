"""Estimates of what things would cost in bits, in Numba: planning must not take longer than coding."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from .changes import tokenize
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
def _class_bits(members: Any, upto: Any, i: Any, j: Any) -> Any:
    """Bits of the class between two edges: which of its members change, and by which step."""
    changed, steps = 0.0, 0.0
    for column in range(upto.shape[1]):
        count = upto[j, column] - upto[i, column]
        changed += count
        steps -= _xlogx(count)
    index = _xlogx(members) - _xlogx(changed) - _xlogx(members - changed)
    return max(index, 0.0) + steps + _xlogx(changed)


@inline
def _add_up(members: Any, changed: Any, edges: Any, size: Any, count: Any) -> None:
    """How many members have keys below each edge, and how many of them change, by step."""
    for i in range(edges.size):
        size[i] = size[i - 1] if i else 0.0
        for column in range(changed.shape[1]):
            count[i, column] = count[i - 1, column] if i else 0.0
        for key in range(edges[i - 1] if i else edges[0], edges[i]):
            size[i] += members[key]
            for column in range(changed.shape[1]):
                count[i, column] += changed[key, column]


@kernel
def class_edges(members: Any, changed: Any, edges: Any, each: Any, worth: Any, most: Any) -> Any:
    """Where to cut keys into classes so that they cost least, by dynamic programming over the candidate edges.

    A class costs its bits and `each`; one more than there are must save the share `worth` of all. Returns the bits
    and the inner edges of at most `most` classes.
    """
    n = edges.size
    size, count, cost = np.empty(n), np.empty((n, changed.shape[1])), np.empty((n, n))
    _add_up(members, changed, edges, size, count)
    for i in range(n):
        for j in range(i + 1, n):
            cost[i, j] = _class_bits(size[j] - size[i], count, i, j) + each
    # total[c, j]: what the keys below edge j cost in c + 1 classes
    total, back = np.empty((most, n)), np.empty((most, n), np.int64)
    best, classes = cost[0, n - 1], np.int64(1)
    for c in range(most):
        for j in range(n):
            total[c, j], back[c, j] = np.inf if c or not j else cost[0, j], 0
            for i in range(j if c else 0):
                if total[c - 1, i] + cost[i, j] < total[c, j]:
                    total[c, j], back[c, j] = total[c - 1, i] + cost[i, j], i
        if total[c, n - 1] < best - worth * best * (c + 1 - classes):
            best, classes = total[c, n - 1], np.int64(c + 1)
    inner, at = np.empty(classes - 1, np.int64), n - 1
    for c in range(classes - 1, 0, -1):
        at = back[c, at]
        inner[c - 1] = edges[at]
    return best, inner
