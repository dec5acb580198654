"""Which of the slow checks have their turn: CI runs some of them, and others after the next commit.

`python -m tests.turns N` prints which of N parts have it, as a number from 0.
"""

from __future__ import annotations

import subprocess
import sys
import zlib
from pathlib import Path

ROOT = Path(__file__).parents[1]


def turn() -> int:
    """A number that is another one after each commit; 0 without a history."""
    asking = ["git", "rev-parse", "--short=8", "HEAD"]
    try:
        commit = subprocess.run(asking, cwd=ROOT, capture_output=True, text=True, check=False).stdout
    except OSError:  # there is no git
        commit = ""
    return int(commit or "0", 16)


def has_turn(name: str, one_in: int, turn: int) -> bool:
    """Whether the check of this name is among the one in so many that have their turn."""
    return zlib.crc32(name.encode()) % one_in == turn % one_in


def one_in(text: str) -> int:
    """The number of an option; 1 for all checks."""
    number = int(text)
    if number < 1:
        raise ValueError(f"one in {number}")
    return number


if __name__ == "__main__":
    print(turn() % one_in(sys.argv[1]))
