"""Bits, and where they go in the weights at hand: in host memory, or on a device."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ..codec.profile import Counts, Positions
from ..kernels import cpu
from ..weights.dtypes import UIntArray
from ..weights.geometry import Geometry
from ..weights.local import LocalWeights
from ..weights.shards import Place

if TYPE_CHECKING:
    from ..weights.on_gpu import GpuElements


@dataclass(frozen=True)
class Overlay:
    """Bits and where they go: positions in regions of some tensors, and regions as a whole."""

    tag: UIntArray
    geometry: Geometry
    count: Counts
    positions: Positions
    bits: UIntArray
    dense: list[tuple[Place, UIntArray]]
    far: GpuElements | None = None  # those of the positions that are on devices

    @property
    def nbytes(self) -> int:
        return self.positions.nbytes + self.bits.nbytes + sum(bits.nbytes for _, bits in self.dense)

    def write(self, held: LocalWeights) -> None:
        """Write these bits, and nothing but them."""
        self.scatter()
        self.write_dense(held)

    def scatter(self) -> None:
        """Write these bits but for the dense ones. Nothing is copied: it also undoes what failed for lack of memory."""
        args, here = self._near()
        cpu.changes.scatter(*args[:-1], args[-1].ctypes.data, self.bits[here])
        if self.far is not None:
            self.far.write(self.bits)

    def gather(self, out: UIntArray) -> None:
        """Read the bits that are at these positions."""
        args, here = self._near()
        found = out[here]
        cpu.changes.gather(*args, found)
        if self.far is not None:
            out[here] = found
            self.far.read(out)

    def swap(self, out: UIntArray) -> None:
        """Write these bits but for the dense ones, some of them on a device, and read what was there."""
        self.gather(out)
        try:
            self.scatter()
        except BaseException:
            replace(self, bits=out).scatter()
            raise

    def _near(self) -> tuple[tuple[Any, Any, Any, Any, Any, Any, Any], Any]:
        """What kernels are told about the positions in host memory, and which ones these are."""
        g = self.geometry
        if self.far is None:
            return (self.tag, self.count, g.address, g.dims, g.size, g.memory_strides, self.positions), slice(None)
        near, here = self.far.host_entries, self.far.host_changes
        where = g.address[near], g.dims[near], g.size[near], g.memory_strides[near]
        return (self.tag, self.count[near], *where, self.positions[here]), here

    def write_dense(self, held: LocalWeights) -> None:
        for place, bits in self.dense:
            if held.gpu_streams:
                from ..weights import on_gpu

                if on_gpu.write(held, place, bits):
                    continue
            there = held.view(*place)
            there[...] = bits.reshape(there.shape)
