"""Kernels by device: `reference` specifies, `cpu` runs. What stands above imports from here."""

from __future__ import annotations

from . import cpu, reference

__all__ = ["cpu", "reference"]
