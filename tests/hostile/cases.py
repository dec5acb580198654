"""Lists of forged patches: a change to a valid one, and the error that must refuse it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from sparserl import SparserlError
from sparserl.kernels import reference
from tests.hostile.forged_patch import Patch, Stream
from tests.hostile.samples import PROFILES, sample

Change = Callable[[Patch], None]
MOST = (1 << 64) - 1
ELEVEN = b"\xff" * 10 + b"\x01"  # a number of eleven bytes
SECONDS = 2.0
TILE_TOKENS, TILE_LOWS, GAP_TOKENS, GAP_LOWS, STEP_TOKENS, STEP_LOWS = 4, 5, 6, 7, 8, 9


class Cases(list[Any]):
    """Parameters for a test."""

    def forged(self, error: type[SparserlError], match: str, *profiles: str) -> Callable[[Change], Change]:
        """A change, and how it must be refused; to patches of every profile unless some are named."""

        def register(change: Change) -> Change:
            self._add(change.__name__, change, error, match, profiles)
            return change

        return register

    def each(
        self, values: dict[str, Any], error: type[SparserlError], match: str, *profiles: str
    ) -> Callable[[Callable[[Patch, Any], None]], Callable[[Patch, Any], None]]:
        """The same for a change that takes one of several values."""

        def register(change: Callable[[Patch, Any], None]) -> Callable[[Patch, Any], None]:
            for label, value in values.items():
                self._add(f"{change.__name__}-{label}", lambda p, v=value: change(p, v), error, match, profiles)
            return change

        return register

    def _add(
        self, name: str, change: Change, error: type[SparserlError], match: str, profiles: tuple[str, ...]
    ) -> None:
        for profile in profiles or PROFILES:
            self.append(pytest.param(profile, change, error, match, id=f"{name}-{profile}"))


def refuse(profile: str, change: Change, error: type[SparserlError], match: str) -> None:
    """The lie is named, the weights stay as they are, and it takes no time worth mentioning."""
    it = sample(profile)
    parts = Patch.parse(it.data)
    change(parts)
    data = parts.encode()
    assert data != it.data
    for last in (False, True):
        started = time.process_time()
        with pytest.raises(error, match=match):
            it.run(data)
        if time.process_time() - started < SECONDS:
            break
        assert not last, "it took long also when no kernel had to be compiled"


def replace_stream(bucket: Any, id: int, chunk: bytes) -> None:
    """Another chunk for a stream of a bucket; without bytes the stream is left out."""
    bucket.streams = [s for s in bucket.streams if s.id != id]
    if chunk:
        bucket.streams.append(Stream(id, [chunk]))
    bucket.streams.sort(key=lambda s: s.id)


def numbers_of(bucket: Any, id: int) -> list[int]:
    """The numbers of a pair of streams, token bytes and low bits, of one chunk."""
    lows = b"".join(c for s in bucket.streams if s.id == id + 1 for c in s.chunks)
    string, out = int.from_bytes(lows, "little"), []
    for token in bucket.stream(id).chunks[0]:
        width = max(0, (token - 16) // 4 + 2) if token >= 16 else 0
        out.append(reference.untoken(token, string & ((1 << width) - 1)))
        string >>= width
    return out


def replace_numbers(bucket: Any, id: int, values: list[int]) -> None:
    """Other numbers for such a pair."""
    tokens, lows = reference.pack(np.array(values, np.uint64))
    replace_stream(bucket, id, tokens)
    replace_stream(bucket, id + 1, lows)
