"""Patches: finding changes, applying them, and making patches from patches.

    diff ──► plan (route, cut, estimate) ──► assemble ──► Patch ──► apply
                      ▲                                     │
                      └────────── squash, invert ◄──────────┤
                                                  merge ◄───┘

A patch is `Contents`: a tensor table, two ends and buckets; `Patch` is what users hold.
"""

from __future__ import annotations

from .application import Application, stage_all
from .apply import Applied
from .compare import Captured, capture, diff
from .measuring import measure
from .patch import Entry, Patch, merge, squash
from .replacement import Replacement
from .stats import BucketStats, Stats, TensorStats
from .tracked import TrackedChanges, capture_tracked

__all__ = [
    "Application",
    "Applied",
    "BucketStats",
    "Captured",
    "Entry",
    "Patch",
    "Replacement",
    "Stats",
    "TensorStats",
    "TrackedChanges",
    "capture",
    "capture_tracked",
    "diff",
    "measure",
    "merge",
    "squash",
    "stage_all",
]
