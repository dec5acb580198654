"""Shards for tests: one box of each tensor."""

from __future__ import annotations

import sparserl
from sparserl import Patch, Shards


def diff_shards(old, new, *, table, regions=None, **more) -> Patch:
    """The patch of some boxes of tensors; `regions` names those that are not whole."""
    return sparserl.diff(Shards.of(table, old, regions), Shards.of(table, new, regions), **more)
