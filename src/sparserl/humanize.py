"""Sizes and times for people."""

from __future__ import annotations


def size(count: float) -> str:
    """Bytes for people."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} B" if unit == "B" else f"{count:.2f} {unit}"
        count /= 1000
    return f"{count:.2f} TB"


def duration(seconds: float) -> str:
    """Seconds for people."""
    if seconds < 1:
        return f"{1000 * seconds:,.3g} ms"
    return f"{seconds:,.2f} s" if seconds < 100 else f"{seconds:,.0f} s"
