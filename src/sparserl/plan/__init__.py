"""From changes to buckets: which entries are dense, which profile and size a bucket has, how long a sync takes."""

from __future__ import annotations

from .buckets import Boundary, Draft, EncodedBucket, begin, cut, write
from .changes import Changes, Dense, RestoredBase, advance, steps_between
from .cost import (
    AnchorEstimate,
    AnchorSpeed,
    Chooser,
    Estimate,
    Link,
    Speed,
    Speeds,
    Work,
    best,
    predict,
    predict_anchor,
)
from .estimates import candidates, estimate
from .routing import route

__all__ = [
    "AnchorEstimate",
    "AnchorSpeed",
    "Boundary",
    "Changes",
    "Chooser",
    "Dense",
    "Draft",
    "EncodedBucket",
    "Estimate",
    "Link",
    "RestoredBase",
    "Speed",
    "Speeds",
    "Work",
    "advance",
    "begin",
    "best",
    "candidates",
    "cut",
    "estimate",
    "predict",
    "predict_anchor",
    "route",
    "steps_between",
    "write",
]
