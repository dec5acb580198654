"""The integers of torch that bits are read as, by their bytes."""

from __future__ import annotations

import torch

INTS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
