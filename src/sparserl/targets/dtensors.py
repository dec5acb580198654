"""Sharded tensors as a target: what this rank has of DTensors, or of whole tensors, by the names of the run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from ..sources.dtensors import regions_here
from .engine import EngineTarget
from .pieces import Piece


def dtensors(tensors: Mapping[str, Any], threads: int | None = None) -> EngineTarget:
    """The parts of DTensors that this rank has, replicas included. Their memory must not move.

    Args:
        tensors: DTensors with any placements but partial ones, and tensors that every rank has whole, by name. Those
            that the run does not have are left alone.
        threads: how many threads decode and write; by default as many as there are cores, up to 16.

    Returns:
        A target for an `EngineSubscriber`, which all ranks have.

    Raises:
        UnsupportedTensor: A tensor has a placement that is not supported.

    >>> target = dtensors(model.state_dict())                                                      # doctest: +SKIP
    """
    local = {name: _local(tensor) for name, tensor in tensors.items()}
    return EngineTarget(_pieces(tensors), lambda: local, threads=threads)


def _local(tensor: Any) -> torch.Tensor:
    """The part of a tensor in this process: the same memory."""
    local: torch.Tensor = tensor.detach()
    return local.to_local() if hasattr(local, "to_local") else local


def _pieces(tensors: Mapping[str, Any]) -> Iterator[Piece]:
    """Where the regions are in the local tensors, under the same names."""
    for name, tensor in tensors.items():
        first = _local(tensor).storage_offset()
        for region, view in regions_here(name, tensor):
            yield Piece(name, region, name, view.storage_offset() - first, tuple(view.stride()))
