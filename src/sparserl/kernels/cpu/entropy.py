"""Estimates of sizes in bits, in Numba: planning must not take longer than coding."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from .changes import tokenize
from .compiling import inline, kernel


@inline
def _xlogx(x: Any) -> Any:
    return x * math.log2(x) if x > 0 else 0.0


@kernel
def index_bits(numel: Any, count: Any, out: Any) -> None:
    """Bits to encode which `count` of `numel` elements changed if all choices are equally likely; at least one each."""
    for e in range(numel.size):
        n = float(numel[e])
        k = float(count[e])
        out[e] = max(_xlogx(n) - _xlogx(k) - _xlogx(n - k), k) if k < n else 0.0


@kernel
def number_bits(values: Any, every: Any) -> Any:
    """Bits per number in token form, estimated from one in `every`: entropy of the tokens, plus the low bits.

    The entropy is never more than eight, with the Miller-Madow correction for small samples.
    """
    counts = np.zeros(256, np.int64)
    lows = np.uint64(0)
    sampled = 0
    kinds = 0
    entropy = 0.0
    for i in range(0, values.size, every):
        head, _, width = tokenize(np.uint64(values[i]))
        counts[head] += 1
        lows += width
        sampled += 1
    for c in counts:
        kinds += 1 if c > 0 else 0
        entropy -= _xlogx(c / max(sampled, 1))
    return min(8.0, entropy + max(kinds - 1, 0) / (2 * math.log(2) * max(sampled, 1))) + float(lows) / max(sampled, 1)


@inline
def _class_bits(members: Any, upto: Any, i: Any, j: Any) -> Any:
    """Bits of the class between two edges: which of its members change, and by which step."""
    changed = 0.0
    steps = 0.0
    for column in range(upto.shape[1]):
        count = upto[j, column] - upto[i, column]
        changed += count
        steps -= _xlogx(count)
    index = _xlogx(members) - _xlogx(changed) - _xlogx(members - changed)
    return max(index, 0.0) + steps + _xlogx(changed)


@inline
def _accumulate(members: Any, changed: Any, edges: Any, size: Any, count: Any) -> None:
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
    """The edges that divide keys into classes at the lowest cost, by dynamic programming over the candidates.

    A class costs its bits and `each`; an additional class must save the share `worth` of all bits. Returns the bits and
    the inner edges of at most `most` classes.
    """
    n = edges.size
    size = np.empty(n)
    count = np.empty((n, changed.shape[1]))
    cost = np.empty((n, n))
    _accumulate(members, changed, edges, size, count)
    for i in range(n):
        for j in range(i + 1, n):
            cost[i, j] = _class_bits(size[j] - size[i], count, i, j) + each
    # total[c, j]: what the keys below edge j cost in c + 1 classes
    total = np.empty((most, n))
    back = np.empty((most, n), np.int64)
    best = cost[0, n - 1]
    classes = np.int64(1)
    for c in range(most):
        for j in range(n):
            total[c, j] = np.inf if c or not j else cost[0, j]
            back[c, j] = 0
            for i in range(j if c else 0):
                if total[c - 1, i] + cost[i, j] < total[c, j]:
                    total[c, j] = total[c - 1, i] + cost[i, j]
                    back[c, j] = i
        if total[c, n - 1] < best - worth * best * (c + 1 - classes):
            best = total[c, n - 1]
            classes = np.int64(c + 1)
    inner = np.empty(classes - 1, np.int64)
    at = n - 1
    for c in range(classes - 1, 0, -1):
        at = back[c, at]
        inner[c - 1] = edges[at]
    return best, inner
