"""Which experts change, and how often tensors change where they changed before."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np
import numpy.typing as npt

from .kinds import expert, expert_group
from .recording import Recording, Sync

QUANTILES = {"min": 0.0, "25%": 0.25, "median": 0.5, "75%": 0.75, "max": 1.0}


def expert_changes(recording: Recording, precision: str) -> dict[tuple[str, int], npt.NDArray[np.int64]]:
    """Changed elements by expert and sync.

    An expert is known by the layer's name and its number. It may have tensors of its own, or a share of tensors that
    have all experts of a layer.
    """
    syncs = recording.of(precision)
    changes: dict[tuple[str, int], npt.NDArray[np.int64]] = defaultdict(lambda: np.zeros(len(syncs), np.int64))
    for tensor, name in enumerate(recording.tensors[precision].names):
        if (key := expert(name)) is not None:
            changes[key] += [sync.changed[tensor] for sync in syncs]
    for column, sync in enumerate(syncs):
        for name, counts in sync.experts.items():
            for number, count in enumerate(counts):
                changes[expert_group(name), number][column] += count
    return dict(changes)


def expert_activity(recording: Recording, precision: str) -> dict[str, Any] | None:
    """How many experts changed in no sync, in some, and in all; None where there are no experts.

    `never_names` and `share` say which never changed, and in how many of the syncs an expert changes: quantiles.
    """
    changes = expert_changes(recording, precision)
    if not changes:
        return None
    shares = {key: float((counts > 0).mean()) for key, counts in changes.items()}
    never = sorted(key for key, share in shares.items() if not share)
    always = sum(share == 1.0 for share in shares.values())
    return {
        "experts": len(shares),
        "never": len(never),
        "sometimes": len(shares) - len(never) - always,
        "always": always,
        "never_names": [f"{group}.{number}" for group, number in never],
        "share": quantiles(list(shares.values())),
    }


def locality(sync: Sync) -> dict[str, float] | None:
    """Of the changes of a tensor, the share at elements that changed before: quantiles over tensors that change.

    None where the recording does not say, or nothing changed.
    """
    shares = [again / changed for again, changed in zip(sync.again_by_tensor, sync.changed, strict=False) if changed]
    return quantiles(shares) if shares else None


def quantiles(values: list[float]) -> dict[str, float]:
    """The extremes and quartiles of some numbers."""
    return {
        name: float(value) for name, value in zip(QUANTILES, np.quantile(values, [*QUANTILES.values()]), strict=True)
    }
