"""From changes to buckets: what goes dense, which profile suits, where a bucket ends, how long a sync takes."""

from __future__ import annotations

from .buckets import Draft, Written, begin, cut, write
from .changes import Changes, Dense, advance, steps_between
from .cost import Chooser, Estimate, Link, Speed, Speeds, Work, best, predict
from .estimates import candidates, estimate
from .routing import route

__all__ = [
    "Changes",
    "Chooser",
    "Dense",
    "Draft",
    "Estimate",
    "Link",
    "Speed",
    "Speeds",
    "Work",
    "Written",
    "advance",
    "begin",
    "best",
    "candidates",
    "cut",
    "estimate",
    "predict",
    "route",
    "steps_between",
    "write",
]
