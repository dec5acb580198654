"""Tests that every store, source and target must pass, for pytest: subclass one and say how yours is made.

StoreConformance    objects under names, swaps under a condition, and a run that goes through it
SourceConformance   weights that are the same until they change, and arrive bit for bit
TargetConformance   two phases: nothing is seen before a commit, all of it after, and it can be taken back
"""

from __future__ import annotations

try:
    import pytest
except ImportError as missing:
    raise ImportError("sparserl.testing needs pytest: pip install 'sparserl[testing]'") from missing

for _room in ("sources", "stores", "targets", "weights"):
    pytest.register_assert_rewrite(f"{__name__}.{_room}")

from .sources import SourceConformance  # noqa: E402  # after pytest knows whose assertions to explain
from .stores import StoreConformance  # noqa: E402
from .targets import TargetConformance  # noqa: E402

__all__ = ["SourceConformance", "StoreConformance", "TargetConformance"]
