"""Where the rollout's bits live."""

from __future__ import annotations

from .checkpoint import Landed, apply_to_checkpoint

__all__ = ["Landed", "apply_to_checkpoint"]
