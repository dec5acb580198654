"""The workers of vLLM in this process, whose models a backend needs beside the one that it is given."""

from __future__ import annotations

import weakref
from typing import Any

workers: weakref.WeakSet[Any] = weakref.WeakSet()  # all that have begun to load a model, where the plugin was loaded


def close_update(engine: Any) -> None:
    """End an update that a worker has begun with this engine, so that the next one can begin.

    vLLM leaves it open where a trainer died in the middle of one, or where an error was raised on another rank alone.
    """
    for worker in workers:
        own = getattr(worker, "weight_transfer_engine", None)
        if own is not None and own is engine and getattr(worker, "_weight_update_active", False):
            worker._weight_update_active = False  # noqa: SLF001  # vLLM has no way for this but to finish the update
            own.reset_weight_update_target()
