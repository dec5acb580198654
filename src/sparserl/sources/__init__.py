"""Where the trainer's bits come from."""

from __future__ import annotations

from .checkpoint import Checkpoint, open_checkpoint

__all__ = ["Checkpoint", "open_checkpoint"]
