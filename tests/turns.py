"""Which of the slow checks have their turn: CI runs some of them, and others after the next commit."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

ROOT = Path(__file__).parents[1]
T = TypeVar("T")


def in_turn(checks: Sequence[T], one_in: int) -> list[T]:
    """One in so many checks, and after each commit the next ones; without a history, the first."""
    counting = ["git", "rev-list", "--count", "HEAD"]
    count = subprocess.run(counting, cwd=ROOT, capture_output=True, text=True, check=False).stdout
    return [*checks[int(count or 0) % one_in :: one_in]]
