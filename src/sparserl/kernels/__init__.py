"""Kernels by device: `reference` specifies them in NumPy, `cpu` and `gpu` run. Neither is loaded before it is used."""

from __future__ import annotations

MOST_CLASSES = 8  # magnitude classes of a bucket
