"""From changes to buckets: what goes dense, which profile suits, where a bucket ends."""

from __future__ import annotations

from .buckets import cut, write
from .changes import Changes, Dense, advance, steps_between
from .estimate import candidates
from .route import route

__all__ = ["Changes", "Dense", "advance", "candidates", "cut", "route", "steps_between", "write"]
