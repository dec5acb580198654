"""Patches: finding changes, landing them, and making patches from patches.

diff ──► plan (route, cut, estimate) ──► assemble ──► Patch ──► apply
                  ▲                                     │
                  └────────── squash, invert ◄──────────┤
                                              merge ◄───┘
"""

from __future__ import annotations

from .apply import Applied, Landing, stage_all
from .compose import merge, squash
from .diff import Captured, capture, diff
from .marked import Marked, capture_marked
from .measure import measure
from .patch import Entry, Patch
from .stats import BucketStats, Stats, TensorStats

__all__ = [
    "Applied",
    "BucketStats",
    "Captured",
    "Entry",
    "Landing",
    "Marked",
    "Patch",
    "Stats",
    "TensorStats",
    "capture",
    "capture_marked",
    "diff",
    "measure",
    "merge",
    "squash",
    "stage_all",
]
