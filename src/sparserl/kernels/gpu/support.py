"""Which GPUs the kernels run on. On others, plain operations of torch do what must be done there."""

from __future__ import annotations

import os
import shutil
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

from ...humanize import switch

LEAST_CAPABILITY = (8, 0)  # of NVIDIA's GPUs: Ampere has the instructions


def obstacle(device: Any) -> str | None:
    """Why the kernels do not run on a device of torch; None if they do.

    Raises:
        SparserlError: SPARSERL_GPU is set to an unknown word.
    """
    if switch("SPARSERL_GPU", "on", "off") == "off":
        return "SPARSERL_GPU is off"
    return _obstacle(device) if device.type == "cuda" else None  # Triton's interpreter runs them on a CPU


@lru_cache
def _obstacle(device: Any) -> str | None:
    import torch

    if torch.version.hip is not None:
        return "the kernels are for NVIDIA's GPUs"
    capability = torch.cuda.get_device_capability(device)
    if capability < LEAST_CAPABILITY:
        return f"its compute capability is {capability[0]}.{capability[1]}, the kernels need 8.0"
    return missing_tool()


def missing_tool() -> str | None:
    """What Triton lacks to compile kernels; None if it lacks nothing."""
    if find_spec("triton") is None:
        return "Triton is not installed"
    if os.environ.get("CC") is None and shutil.which("gcc") is None and shutil.which("clang") is None:
        return "Triton finds no C compiler: neither gcc nor clang, nor one that CC names"
    return None
