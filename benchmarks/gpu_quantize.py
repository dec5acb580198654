"""Quantized codes and what changed of them, timed by `benchmarks.gpu --only quantize`: in one pass, and in two."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch

from benchmarks.gpu_scenes import milliseconds, peak_over, require

_ROWS = 16384  # and columns, of the matrix that is quantized: 512 MiB of bf16


def _versions(density: float) -> list[torch.Tensor]:
    """A bf16 matrix, and the same with the lowest bit of some elements flipped."""
    old = torch.randn(_ROWS, _ROWS, device="cuda", dtype=torch.float32).mul_(0.02).to(torch.bfloat16)
    new = old.clone()
    new.view(torch.int16).bitwise_xor_((torch.rand(_ROWS, _ROWS, device="cuda") < density).to(torch.int16))
    return [old, new]


class _Quantizer:
    """One scheme's codes of a matrix, written in turn from two versions of it."""

    def __init__(self, name: str, versions: list[torch.Tensor]) -> None:
        from sparserl.kernels import gpu
        from sparserl.sources.schemes import LIMITS, SCHEMES

        scheme = SCHEMES[name]()
        rows, columns = (n or _ROWS for n in scheme.block)
        self._kernels = gpu.quantize
        self._kind = gpu.quantize.Format(scheme.dtype, scheme.scale_dtype, LIMITS[scheme.dtype])
        self._block = (rows, columns)
        self._is_one = scheme.block == (None, None)
        self._is_measured = self._is_one or scheme.has_global_scale
        self._versions: Iterator[torch.Tensor] = itertools.cycle(versions)
        numel = _ROWS * _ROWS
        self.codes = torch.zeros(numel // (2 if scheme.is_packed else 1), dtype=torch.uint8, device="cuda")
        scale = torch.int32 if scheme.scale_dtype == "float32" else torch.uint8
        self._scales = torch.zeros(numel // (rows * columns), dtype=scale, device="cuda")
        self._global_scale = torch.full((1,), 0.5, device="cuda")

    def quantize(self, difference: torch.Tensor | None = None) -> torch.Tensor | None:
        """Write the codes of the next version."""
        weights = next(self._versions)
        largest = None
        if self._is_measured:
            largest = self._kernels.run_magnitudes(weights, 64 if self._is_one else self._block[1])
            largest = largest.amax().view(1) if self._is_one else largest
        return self._kernels.quantize(
            weights, self.codes, self._scales, self._kind, self._block, largest, self._global_scale, difference
        )

    def in_two(self) -> torch.Tensor:
        """Where codes have changed, by comparing them with a copy of the old ones."""
        before = self.codes.clone()
        self.quantize()
        return (before != self.codes).nonzero()

    def in_one(self) -> torch.Tensor:
        """The same, by the pass that writes them."""
        difference = torch.empty_like(self.codes)
        counts = self.quantize(difference)
        assert counts is not None
        return difference.nonzero() if int(counts.sum()) else difference[:0].nonzero()


def quantizing(density: float = 0.003) -> dict[str, Any]:
    """Milliseconds and MiB of each scheme: codes alone, and with what changed, in two passes and in one."""
    versions = _versions(density)
    out: dict[str, Any] = {"elements": _ROWS * _ROWS, "density": density}
    for name in ("fp8_blockwise", "fp8_per_channel", "fp8_per_tensor", "int8", "mxfp8", "mxfp4", "nvfp4"):
        quantizer = _Quantizer(name, versions)
        quantizer.quantize()
        # The way there and the way back change the same codes.
        expected = quantizer.in_two()
        require(torch.equal(quantizer.in_one(), expected), f"what changed of {name} in one pass")
        out[name] = {
            "changed": expected.shape[0],
            "codes alone ms": milliseconds(quantizer.quantize),
            "two passes ms": milliseconds(quantizer.in_two),
            "one pass ms": milliseconds(quantizer.in_one),
            "two passes MiB": peak_over(quantizer.in_two),
            "one pass MiB": peak_over(quantizer.in_one),
        }
    return out
