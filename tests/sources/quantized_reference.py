"""Quantized weights as compressed-tensors makes them, and golden vectors from it.

    python -m tests.sources.quantized_reference

writes `quantized_golden.json` with the version of the package that made it. The tests need the package only to compare
with its present version.
"""

from __future__ import annotations

import base64
import json
from pathlib import Path

import torch

GOLDEN = Path(__file__).with_name("quantized_golden.json")
PRESETS = {
    "fp8_per_tensor": "FP8",
    "fp8_per_channel": "FP8_DYNAMIC",
    "fp8_blockwise": "FP8_BLOCK",
    "int8": "INT8",
    "mxfp8": "MXFP8A16",
    "mxfp4": "MXFP4A16",
    "nvfp4": "NVFP4A16",
}
"""By the name of a scheme here, the preset of compressed-tensors."""


def weight(rows=130, columns=160, seed=0):
    """A float32 matrix, made without a generator that could change: all magnitudes, ties, and zeros with both signs."""
    i = torch.arange(rows * columns, dtype=torch.int64)
    bits = (i * 2654435761 + seed * 40503) % (1 << 32)
    bits = (bits ^ (bits >> 15)) * 2246822519 % (1 << 32)
    spread = (bits >> 9).to(torch.float64) / (1 << 23) - 0.5
    w = (spread * 2.0 ** ((bits & 7) - 9).to(torch.float64)).to(torch.float32).view(rows, columns)
    w[3, ::5] = 0.0
    w[4, ::7] = -0.0
    w[5, :32] = torch.arange(-16, 16) / 16  # ties in many formats
    w[6, :32] = torch.arange(-16, 16) * 0.25 + 0.125
    w[7] *= 2.0**-30
    w[8] *= 2.0**20
    return w


def as_compressed_tensors(name, w):
    """The tensors of a layer whose weight is `w`, by the last part of their names."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import preset_name_to_scheme
    from compressed_tensors.quantization.utils.helpers import calculate_qparams, generate_gparam

    scheme = preset_name_to_scheme(PRESETS[name], ["Linear"])
    args = scheme.weights
    state = {"weight": w.clone()}
    if name == "nvfp4":
        state["weight_global_scale"] = generate_gparam(w.min(), w.max())
    low, high = _extremes(name, w)
    state["weight_scale"], _ = calculate_qparams(low, high, args, global_scale=state.get("weight_global_scale"))
    kinds = {"nvfp4": "nvfp4-pack-quantized", "mxfp4": "mxfp4-pack-quantized", "mxfp8": "mxfp8-quantized"}
    compressor = BaseCompressor.get_value_from_registry(kinds.get(name, "naive-quantized"))
    out = compressor.compress(state, scheme)
    return {key: value for key, value in out.items() if key != "weight_zero_point"}


def _extremes(name, w):
    """The least and the largest number of each block."""
    if name == "fp8_per_tensor":
        return w.min().view(1), w.max().view(1)
    if name in ("fp8_per_channel", "int8"):
        return w.amin(1, keepdim=True), w.amax(1, keepdim=True)
    height, width = {"fp8_blockwise": (128, 128), "nvfp4": (1, 16)}.get(name, (1, 32))
    rows, columns = (-(-d // n) for d, n in zip(w.shape, (height, width), strict=True))
    padded = torch.zeros(rows * height, columns * width)
    padded[: w.shape[0], : w.shape[1]] = w
    cells = padded.view(rows, height, columns, width)
    return cells.amin((1, 3)), cells.amax((1, 3))


def dump(tensor):
    """A tensor as values for JSON."""
    bits = tensor.contiguous().view(torch.uint8).numpy().tobytes()
    dtype = str(tensor.dtype).removeprefix("torch.")
    return {"dtype": dtype, "shape": list(tensor.shape), "bits": base64.b64encode(bits).decode()}


def load(saved):
    """The tensor that `dump` wrote."""
    bits = torch.frombuffer(bytearray(base64.b64decode(saved["bits"])), dtype=torch.uint8)
    return bits.view(getattr(torch, saved["dtype"])).view(saved["shape"])


def make():
    """Write the golden vectors."""
    import compressed_tensors

    w = weight(SMALL_ROWS, SMALL_COLUMNS)
    schemes = {name: {key: dump(t) for key, t in as_compressed_tensors(name, w).items()} for name in PRESETS}
    made_by = f"compressed-tensors {compressed_tensors.__version__}"
    GOLDEN.write_text(json.dumps({"made_by": made_by, "weight": dump(w), "schemes": schemes}, indent=1) + "\n")


SMALL_ROWS = 12
SMALL_COLUMNS = 64

if __name__ == "__main__":
    make()
