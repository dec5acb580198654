"""Figures from a process of its own, in which nothing else has been compiled, cached or allocated."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

_HOME = Path(__file__).parent.parent


def told(module: str, *arguments: str, **environment: str) -> dict[str, Any]:
    """The line of JSON that `python -m MODULE ARGUMENTS` prints."""
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        cwd=_HOME,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(done.stderr)
    return dict(json.loads(done.stdout))
