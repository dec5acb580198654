"""Patches: finding changes, landing them, and making patches from patches.

diff ──► plan (route, cut, estimate) ──► assemble ──► Patch ──► apply
                  ▲                                     │
                  └────────── squash, invert ◄──────────┤
                                              merge ◄───┘
"""

from __future__ import annotations

from .apply import Applied, Landing, stage_all
from .compare import Captured, capture, diff
from .compose import merge, squash
from .measuring import measure
from .patch import Entry, Patch
from .stats import BucketStats, Stats, TensorStats
from .tracked import Marked, capture_marked

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
