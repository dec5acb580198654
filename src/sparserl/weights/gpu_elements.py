"""Single elements of weights on GPUs, in any memory layout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ..kernels import cpu, gpu
from ..kernels.cpu.arguments import InTensor
from ..kernels.gpu.ints import INTS
from .dtypes import UIntArray
from .geometry import Geometry
from .gpu_copies import fetch, upload
from .local import LocalWeights
from .on_gpu import on_stream
from .region import Numbers


class GpuElements:
    """The changed elements that lie on GPUs, in any memory layout: read and written one by one.

    Kernels take all memory of a GPU for one tensor. Plain operations of torch take one storage after the other.

    Attributes:
        host_entries: Which entries lie in host memory instead.
        host_changes: Which changes lie in host memory instead.
    """

    def __init__(
        self, weights: LocalWeights, tensors: Sequence[Any], geometry: Geometry, count: Numbers, positions: Any
    ) -> None:
        """`tensors` has the tensor on a GPU that each entry lies in; None for entries in host memory."""
        self._weights = weights
        self._parts = list[tuple[torch.Tensor, torch.Tensor, Any]]()  # base, offsets from it, change numbers
        entry = np.repeat(np.arange(count.size), count)  # of each change
        owner = np.array([-1 if tensor is None else _owner(tensor) for tensor in tensors], np.int64)
        for number in np.unique(owner[owner >= 0]).tolist():
            entries = owner == number
            base = _base(tensors[int(np.argmax(entries))])
            device = base.device
            which = np.flatnonzero(entries[entry])
            width = base.element_size()
            offsets = np.empty(which.size, np.int64)
            regions = InTensor(
                start=(geometry.address[entries] - base.data_ptr()) // width,
                dims=geometry.dims[entries],
                size=geometry.size[entries],
                stride=geometry.memory_strides[entries],
                keys=geometry.keys[entries],
            )
            cpu.changes.locate(count[entries], regions, positions[which], offsets)
            with on_stream(weights, device):
                self._parts.append((base, upload(offsets, device), which))
        self.host_entries = np.array([tensor is None for tensor in tensors], bool)
        self.host_changes = self.host_entries[entry]

    def read(self, out: UIntArray) -> None:
        """Read the bits on GPUs, each to the index of its change."""
        for base, offsets, which in self._parts:
            with on_stream(self._weights, base.device):
                bits = base[offsets] if gpu.support.obstacle(base.device) else gpu.cells.gather(base, offsets)
                out[which] = fetch(bits)().view(out.dtype)

    def write(self, bits: UIntArray) -> None:
        """Write the elements on GPUs, given the bits of all changes."""
        for base, offsets, which in self._parts:
            with on_stream(self._weights, base.device):
                new_bits = upload(bits[which], base.device)
                if gpu.support.obstacle(base.device):
                    base[offsets] = new_bits
                else:
                    gpu.cells.scatter(base, offsets, new_bits)
        self.finish()

    def finish(self) -> None:
        """Wait until every stream can see what was written."""
        for base, _, _ in self._parts:
            if (stream := self._weights.gpu_streams[base.device]) is not None:
                stream.synchronize()


def _owner(tensor: torch.Tensor) -> int:
    """A number that tensors have in common whose elements can be reached from one base."""
    if gpu.support.obstacle(tensor.device) is None:
        return tensor.device.index or 0
    return tensor.untyped_storage().data_ptr()


def _base(tensor: torch.Tensor) -> torch.Tensor:
    """What offsets count from: for kernels the origin of all memory of their GPU, otherwise the tensor's storage."""
    if gpu.support.obstacle(tensor.device) is None:
        return gpu.changes.origin(tensor.element_size(), tensor.device)
    dtype = INTS[tensor.element_size()]
    storage = tensor.untyped_storage()
    size = (storage.nbytes() // tensor.element_size(),)
    return torch.empty(0, dtype=dtype, device=tensor.device).set_(storage, 0, size, (1,))
