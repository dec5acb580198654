"""Runs pytest again and again, each time in a fork of a process that has imported everything but the code under test.

Reads a line of JSON for each run, {"args": […], "cache": folder or null, "seconds": limit, "output": file}, and
answers with the exit code on a line of its own.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
from importlib.metadata import entry_points
from pathlib import Path

IMPORTED = (  # by sparserl and its tests; the last one imports most of torch
    "cryptography.hazmat.primitives.asymmetric.ed25519",
    "hypothesis",
    "ml_dtypes",
    "safetensors.torch",
    "starlette.applications",
    "typer.testing",
    "uvicorn.config",
    "xxhash",
    "zstandard",
    "torch.distributed.fsdp",
)


def run(args: list[str], cache: str | None, seconds: int, output: str) -> int:
    """The exit code of pytest with these arguments; negative if a signal ended it, as that of the limit does."""
    if not (child := os.fork()):
        signal.alarm(seconds)
        with Path(output).open("wb") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        if cache is not None:
            os.environ["NUMBA_CACHE_DIR"] = cache
        numba.config.reload_config()
        code = int(pytest.main(args))
        sys.stdout.flush()
        os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


if __name__ == "__main__":
    import numba
    import pytest

    for module in IMPORTED:
        importlib.import_module(module)
    for plugin in entry_points(group="pytest11"):
        plugin.load()
    if "sparserl" in sys.modules:
        raise SystemExit("the code under test is imported before it is broken")
    sys.path.insert(0, str(Path.cwd()))
    for line in sys.stdin:
        print(run(**json.loads(line)), flush=True)
