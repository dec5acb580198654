"""Whether kernels work on a device: one is run, and its sums are compared with those of the specification."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import numpy as np
import torch

from .. import reference
from . import changes, sums

_NUMEL = 3 * changes.BLOCK + 5
_START = 1 << 33  # of the part in its tensor, whose positions need more than 32 bits


def sums_are_right(device: Any) -> bool:
    """Run a kernel on a device of torch; what torch or Triton cannot do raises their errors."""
    bits = np.random.default_rng(0).integers(0, 1 << 16, _NUMEL, np.uint16)
    keys = np.array([[0x0123456789ABCDEF, 0xFEDCBA9876543210]], np.uint64)
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        blocks = changes.Blocks(2, [_NUMEL], device, keys, [_START])
        weights = torch.from_numpy(bits.view(np.int16)).to(device)
        results = sums.digests(blocks, blocks.side([weights])).cpu().numpy().view(np.uint64)
    return tuple(results[0].tolist()) == reference.digest(keys[0], _START, bits)
