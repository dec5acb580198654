"""Changes for profiles to encode, and a way there and back."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from sparserl import codec
from sparserl.codec import BucketLayout, Classes, DecodedChanges, Reader


def full(count, dtype):
    """An array to be filled that is full of a pattern."""
    out = np.empty(count, dtype)
    out.view(np.uint8)[:] = 0xA5
    return out


@dataclass(frozen=True)
class Placed(BucketLayout):
    """A layout with the old bits that it names."""

    bits: list = field(default_factory=list)


def random_classes(rng, dtype):
    """One to seven thresholds that fit the dtype."""
    shift = int(rng.integers(0, 8 * dtype.width - 6))
    most = min(511, ((1 << (8 * dtype.width)) - 1) >> shift)
    picked = rng.choice(np.arange(1, most + 1), min(most, int(rng.integers(1, 8))), replace=False)
    return Classes(shift, tuple(sorted(picked.tolist())))


def made(seed, dtype, sizes, density, tile_log=10, chunk_log=8):
    """Random changes in regions of the given sizes, and the layout that both sides know."""
    rng = np.random.default_rng(seed)
    bits = [rng.integers(0, 256, n * dtype.width, np.uint8).view(dtype.uint) for n in sizes]
    old = np.array([b.ctypes.data for b in bits], np.int64)
    where = [np.flatnonzero(rng.random(n) < density) for n in sizes]
    where = [w if w.size else np.array([n - 1]) for w, n in zip(where, sizes, strict=True)]
    positions = np.concatenate(where).astype(np.uint32)
    words = rng.integers(0, 256, positions.size * dtype.width, np.uint8).view(dtype.uint)
    small = rng.integers(1, 5, positions.size).astype(dtype.uint)
    words = np.where(rng.random(positions.size) < 0.5, words, small)
    counts = np.array([w.size for w in where], np.int64)
    known = np.array(sizes, np.int64), counts, tile_log, chunk_log, old, random_classes(rng, dtype)
    return Placed(dtype, *known, allocate=full, bits=bits), positions, words


def there_and_back(profile, layout, positions, words):
    coded = codec.encode_streams(profile.encode(layout, [positions], [words]))
    coded = {id: (c, [bytes(chunk) for chunk in chunks]) for id, (c, chunks) in coded.items()}
    reader = Reader(coded)
    out = profile.decode(replace(layout, classes=None), reader)
    reader.finish()
    return coded, in_order(layout, out) if profile.conditional else out


def in_order(layout, found):
    """The changes of each entry by position; `ctx` finds them in another order."""
    order = np.lexsort((found.positions, np.repeat(np.arange(layout.count.size), layout.count)))
    return DecodedChanges(*(column[order] for column in found))
