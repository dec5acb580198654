"""How much memory there is for weights that a store only claims to have."""

from __future__ import annotations

from pathlib import Path

from ..errors import LimitExceeded

_PROC = Path("/proc")
_GROUPS = Path("/sys/fs/cgroup")


def require_memory(nbytes: int) -> None:
    """Refuse weights that this machine has no memory for, before any of it is taken. Does nothing where none can tell.

    The bytes of a table are a claim: pages of zeros cost nothing until they are read, and then everything.
    """
    available = available_memory()
    if available is not None and nbytes > available:
        raise LimitExceeded(
            f"the weights are said to be {nbytes} bytes, and {available} bytes of memory are available; nothing was "
            "allocated. If the table is right, this needs a machine, or a limit of its group, with more memory"
        )


def available_memory() -> int | None:
    """Bytes that can be had without taking them from others, swap included; None where the system does not say."""
    bounds = [bound for bound in (_system(), _group()) if bound is not None]
    return min(bounds, default=None)


def _system() -> int | None:
    fields = _fields(_PROC / "meminfo")
    if "MemAvailable:" not in fields:
        return None
    return 1024 * (fields["MemAvailable:"] + fields.get("SwapFree:", 0))


def _group() -> int | None:
    """What the control group of this process may still take; pages of files can go, and do not count."""
    try:
        lines = (_PROC / "self/cgroup").read_text().splitlines()
        names = [line.removeprefix("0::/") for line in lines if line.startswith("0::/")]
        folder = _GROUPS / names[0]
        most, current = (int((folder / name).read_text()) for name in ("memory.max", "memory.current"))
    except (OSError, ValueError, IndexError):  # another version, another system, or no limit
        return None
    return max(0, most - current + _fields(folder / "memory.stat").get("file", 0))


def _fields(path: Path) -> dict[str, int]:
    """Lines of a name and a number."""
    try:
        rows = [line.split() for line in path.read_text().splitlines()]
        return {row[0]: int(row[1]) for row in rows if len(row) > 1}
    except (OSError, ValueError):
        return {}
