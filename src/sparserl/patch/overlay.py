"""Bits, and where they go in weights: in host memory, or on a GPU."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ..codec.profile import Counts, Positions
from ..kernels import cpu
from ..kernels.cpu.arguments import InMemory
from ..weights.dtypes import UIntArray
from ..weights.geometry import Geometry
from ..weights.local import LocalWeights
from ..weights.shards import Place

if TYPE_CHECKING:
    from ..weights.gpu_elements import GpuElements


@dataclass(frozen=True)
class Overlay:
    """Bits and where they go: positions in regions of some tensors, and regions as a whole.

    Attributes:
        tag: An empty array of the unsigned integers that bits are read as.
        geometry: Where the regions are.
        count: How many positions each region has.
        positions: The positions, region by region.
        bits: The bits at these positions.
        dense: Regions as a whole, with their bits.
        on_gpu: Those of the positions that are on GPUs; None if none is.
    """

    tag: UIntArray
    geometry: Geometry
    count: Counts
    positions: Positions
    bits: UIntArray
    dense: list[tuple[Place, UIntArray]]
    on_gpu: GpuElements | None = None

    @property
    def nbytes(self) -> int:
        return self.positions.nbytes + self.bits.nbytes + sum(bits.nbytes for _, bits in self.dense)

    def write(self, weights: LocalWeights) -> None:
        """Write these bits, and nothing but them."""
        self.scatter()
        self.write_dense(weights)

    def scatter(self) -> None:
        """Write these bits but for the dense ones. Nothing is copied: it also undoes what failed for lack of memory."""
        counts, regions, positions, in_host_memory = self._in_host_memory()
        cpu.changes.scatter(self.tag, counts, regions, positions.ctypes.data, self.bits[in_host_memory])
        if self.on_gpu is not None:
            self.on_gpu.write(self.bits)

    def gather(self, out: UIntArray) -> None:
        """Read the bits that are at these positions."""
        counts, regions, positions, in_host_memory = self._in_host_memory()
        host_bits = out[in_host_memory]
        cpu.changes.gather(self.tag, counts, regions, positions, host_bits)
        if self.on_gpu is not None:
            out[in_host_memory] = host_bits
            self.on_gpu.read(out)

    def swap(self, out: UIntArray) -> None:
        """Write these bits but for the dense ones, some of them on a GPU, and read what was there."""
        self.gather(out)
        try:
            self.scatter()
        except BaseException:
            replace(self, bits=out).scatter()
            raise

    def _in_host_memory(self) -> tuple[Counts, InMemory, Positions, Any]:
        """Counts, regions and positions in host memory, and which of all positions these are."""
        regions = self.geometry.in_memory
        if self.on_gpu is None:
            return self.count, regions, self.positions, slice(None)
        entries = self.on_gpu.host_entries
        changes = self.on_gpu.host_changes
        return self.count[entries], InMemory(*(column[entries] for column in regions)), self.positions[changes], changes

    def write_dense(self, weights: LocalWeights) -> None:
        """Write the regions that are given as a whole."""
        write_regions(weights, self.dense)


def write_regions(weights: LocalWeights, regions: Iterable[tuple[Place, UIntArray]]) -> None:
    """Write the bits of regions as a whole."""
    for place, bits in regions:
        if weights.gpu_streams:
            from ..weights import on_gpu

            if on_gpu.write(weights, place, bits):
                continue
        view = weights.view(*place)
        view[...] = bits.reshape(view.shape)
