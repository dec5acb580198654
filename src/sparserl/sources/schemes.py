"""How a rollout holds its quantized weights: elements, blocks, scales, the names of all three, and the config.

| scheme | elements | a scale for | scales | reference |
| --- | --- | --- | --- | --- |
| `fp8_per_tensor`, `fp8_per_channel`, `fp8_blockwise` | e4m3 | tensor, row, block | float32, largest / 448 | `FP8*` |
| `int8` | int8 | row, or tensor | float32, largest / 127.5 | `INT8` |
| `mxfp8`, `mxfp4` | e4m3, two e2m1 a byte | 32 columns | a power of two (E8M0) | `MXFP8`, `MXFP4` |
| `nvfp4` | two e2m1 a byte | 16 columns | e4m3, and one float32 for a tensor | `NVFP4` |

The reference is what compressed-tensors makes of float32 weights by its preset of that name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from ..errors import UnsupportedTensor
from ..weights.region import Shape
from ..weights.table import TensorSpec

FLOATS = frozenset(("bfloat16", "float16", "float32"))
LIMITS = {"float8_e4m3fn": 448.0, "int8": 127.5, "float4_e2m1": 6.0}
"""By the format of elements, what the largest magnitude of a block is divided by to get its scale."""
SCALES = ("float32", "float8_e8m0fnu", "float8_e4m3fn")
_STORED = {"float32": "float32", "float8_e8m0fnu": "uint8", "float8_e4m3fn": "float8_e4m3fn"}
_FUSED = {
    "q_proj": "qkv_proj",
    "k_proj": "qkv_proj",
    "v_proj": "qkv_proj",
    "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
    "w1": "w13",
    "w3": "w13",
    "q_a_proj": "qkv_a_proj",
    "kv_a_proj_with_mqa": "qkv_a_proj",
}
"""Layers that engines fuse into one, which then has one global scale."""


def linear_weights(spec: TensorSpec) -> bool:
    """Whether a tensor is the weight of a linear layer, by its name and shape.

    Embeddings, norms, the output layer and routers of experts are not: quantized checkpoints keep them as they are.

    Args:
        spec: a row of the tensor table.

    Returns:
        Whether the schemes of this module quantize the tensor by default.
    """
    *_, layer, last = ("", *spec.name.split("."))
    excluded = layer in ("lm_head", "wte", "wpe", "shared", "score", "classifier")
    excluded = excluded or layer.endswith(("gate", "router")) or "embed" in layer or "norm" in layer
    return last == "weight" and len(spec.shape) == 2 and spec.dtype.name in FLOATS and not excluded


Names = Callable[[TensorSpec], bool]


@dataclass(frozen=True)
class Blockwise:
    """A scheme: blocks of the last two dimensions, with one scale each. `quantized` also takes its own schemes by name.

    Args:
        dtype: the format of the quantized elements: `float8_e4m3fn`, `int8`, or `float4_e2m1`, of which a byte has two,
            the first in its lower half.
        block: rows and columns of a block; None for all rows or all columns.
        suffix: appended to the name of a tensor to name its scales.
        names: which tensors are quantized.
        scale_dtype: the format of scales: `float32`; `float8_e8m0fnu`, powers of two, for blocks of 32 columns; or
            `float8_e4m3fn`, for blocks of 16 columns, with one more scale for each matrix.

    Raises:
        ValueError: a block has no elements, or the formats do not go together.
    """

    dtype: str
    block: tuple[int | None, int | None]
    suffix: str
    names: Names = linear_weights
    scale_dtype: str = "float32"

    def __post_init__(self) -> None:
        if self.dtype not in LIMITS:
            raise ValueError(f"elements of {self.dtype!r} are not supported; supported are {', '.join(LIMITS)}")
        if self.scale_dtype not in SCALES:
            raise ValueError(f"scales of {self.scale_dtype!r} are not supported; supported are {', '.join(SCALES)}")
        if not callable(self.names):
            raise TypeError(f"names is {self.names!r}; it must be a function from a row of the tensor table to a bool")
        if not isinstance(self.block, tuple | list) or [*map(type, self.block)].count(str) or len(self.block) != 2:
            raise ValueError(f"a block is {self.block!r}; it must be a number of rows and one of columns")
        if any(n is not None and n < 1 for n in self.block):
            raise ValueError(f"a block of {self.block} has no elements")
        columns = {"float8_e8m0fnu": 32, "float8_e4m3fn": 16}.get(self.scale_dtype)
        if columns is not None and (self.block != (1, columns) or self.dtype == "int8"):
            raise ValueError(
                f"scales of {self.scale_dtype!r} are for floats in blocks of (1, {columns}), "
                f"not for {self.dtype!r} in blocks of {self.block}"
            )
        if self.dtype == "float4_e2m1" and columns is None:
            raise ValueError("'float4_e2m1' takes scales of 'float8_e8m0fnu' or 'float8_e4m3fn'")

    @property
    def is_packed(self) -> bool:
        """Whether a byte has two elements."""
        return self.dtype == "float4_e2m1"

    @property
    def has_global_scale(self) -> bool:
        """Whether each matrix has a scale for its scales."""
        return self.scale_dtype == "float8_e4m3fn"

    @property
    def element_dtype(self) -> str:
        """The dtype of the tensor of quantized elements."""
        return "uint8" if self.is_packed else self.dtype

    @property
    def stored_scale_dtype(self) -> str:
        """The dtype of the tensor of scales."""
        return _STORED[self.scale_dtype]

    def element_name(self, name: str) -> str:
        """The name of the quantized elements of a tensor."""
        return name + "_packed" if self.is_packed else name

    def scale_name(self, name: str) -> str:
        """The name of the scales of a tensor."""
        return name + self.suffix

    def global_scale_name(self, name: str) -> str:
        """The name of the scale for the scales of a tensor."""
        return name + "_global_scale"

    def block_of(self, spec: TensorSpec) -> Shape:
        """The shape of a block of a tensor.

        Raises:
            UnsupportedTensor: the tensor cannot be quantized by this scheme.
        """
        if len(spec.shape) < 2 or spec.dtype.name not in FLOATS:
            raise UnsupportedTensor(
                f"{spec} cannot be quantized in blocks: it must have two dimensions or more, and floats"
            )
        rows, columns = (n or d for n, d in zip(self.block, spec.shape[-2:], strict=True))
        if self.scale_dtype != "float32" and spec.shape[-1] % columns:
            raise UnsupportedTensor(
                f"{spec} cannot be quantized to {self.dtype}: its {spec.shape[-1]} columns are no multiple of "
                f"{columns}; leave it out with `names=`"
            )
        return (*(1 for _ in spec.shape[:-2]), rows, columns)

    def config(self, unquantized: Iterable[str] = ()) -> dict[str, Any]:
        """The `quantization_config` of a checkpoint with these weights, as vLLM and SGLang read it.

        Args:
            unquantized: the linear layers that are not quantized.
        """
        ignored = sorted(unquantized)
        if self.suffix == "_scale_inv":
            config = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
            return {**config, "weight_block_size": list(self.block), "modules_to_not_convert": ignored}
        group = {"targets": ["Linear"], "weights": self._weights_config(), "input_activations": self._inputs_config()}
        return {
            "quant_method": "compressed-tensors",
            "format": self._format(),
            "quantization_status": "compressed",
            "ignore": ignored,
            "config_groups": {"group_0": group},
        }

    def _format(self) -> str:
        if self.has_global_scale:
            return "nvfp4-pack-quantized"
        if self.scale_dtype == "float8_e8m0fnu":
            return "mxfp4-pack-quantized" if self.is_packed else "mxfp8-quantized"
        return "int-quantized" if self.dtype == "int8" else "float-quantized"

    def _weights_config(self) -> dict[str, Any]:
        kind = {
            "num_bits": 4 if self.is_packed else 8,
            "type": "int" if self.dtype == "int8" else "float",
            "symmetric": True,
            "dynamic": False,
        }
        if self.has_global_scale:
            return {**kind, "strategy": "tensor_group", "group_size": 16, "scale_dtype": "torch.float8_e4m3fn"}
        if self.scale_dtype == "float8_e8m0fnu":
            return {**kind, "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}
        if self.block == (None, None):
            return {**kind, "strategy": "tensor"}
        if self.block == (1, None):
            return {**kind, "strategy": "channel"}
        return {**kind, "strategy": "block", "block_structure": list(self.block)}

    def _inputs_config(self) -> dict[str, Any] | None:
        """Engines quantize activations themselves where no calibration is needed for it."""
        kind = {"num_bits": 8, "type": "int" if self.dtype == "int8" else "float", "symmetric": True, "dynamic": True}
        if self.is_packed:
            return None
        if self.scale_dtype == "float8_e8m0fnu":
            return {**kind, "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}
        return {**kind, "strategy": "token"}


def fp8_blockwise(block: tuple[int, int] = (128, 128), names: Names = linear_weights) -> Blockwise:
    """`float8_e4m3fn` in blocks, as DeepSeek-V3 has it, with float32 scales called `<name>_scale_inv` to multiply by.

    Args:
        block: rows and columns of a block.
        names: which tensors are quantized; by default the weights of linear layers.

    Returns:
        A scheme for `quantized`.
    """
    return Blockwise("float8_e4m3fn", block, "_scale_inv", names)


def fp8_per_channel(names: Names = linear_weights) -> Blockwise:
    """`float8_e4m3fn` with a float32 scale for each row, called `<name>_scale`.

    Args:
        names: which tensors are quantized; by default the weights of linear layers.

    Returns:
        A scheme for `quantized`.
    """
    return Blockwise("float8_e4m3fn", (1, None), "_scale", names)


def fp8_per_tensor(names: Names = linear_weights) -> Blockwise:
    """`float8_e4m3fn` with one float32 scale for each tensor, called `<name>_scale`.

    Args:
        names: which tensors are quantized; by default the weights of linear layers.

    Returns:
        A scheme for `quantized`.
    """
    return Blockwise("float8_e4m3fn", (None, None), "_scale", names)


def mxfp8(names: Names = linear_weights) -> Blockwise:
    """`float8_e4m3fn` with a power of two for each 32 columns, called `<name>_scale`: its exponent plus 127, as uint8.

    Args:
        names: which tensors are quantized; by default the weights of linear layers.

    Returns:
        A scheme for `quantized`.
    """
    return Blockwise("float8_e4m3fn", (1, 32), "_scale", names, "float8_e8m0fnu")


def mxfp4(names: Names = linear_weights) -> Blockwise:
    """Two e2m1 numbers in a byte of `<name>_packed`, with the scales of `mxfp8`.

    Args:
        names: which tensors are quantized; by default the weights of linear layers.

    Returns:
        A scheme for `quantized`.
    """
    return Blockwise("float4_e2m1", (1, 32), "_scale", names, "float8_e8m0fnu")


def nvfp4(names: Names = linear_weights) -> Blockwise:
    """Two e2m1 numbers in a byte of `<name>_packed`, and a `float8_e4m3fn` scale for each 16 columns.

    Scales are called `<name>_scale`. They are multiplied by the float32 number `<name>_global_scale`, of which layers
    that engines fuse (`q_proj`, `k_proj` and `v_proj`; `gate_proj` and `up_proj`) have the same.

    Args:
        names: which tensors are quantized; by default the weights of linear layers.

    Returns:
        A scheme for `quantized`.
    """
    return Blockwise("float4_e2m1", (1, 16), "_scale", names, "float8_e4m3fn")


def int8(per_channel: bool = True, names: Names = linear_weights) -> Blockwise:
    """Symmetric `int8` with float32 scales called `<name>_scale`.

    Args:
        per_channel: whether each row has a scale; else the whole tensor has one.
        names: which tensors are quantized; by default the weights of linear layers.

    Returns:
        A scheme for `quantized`.
    """
    return Blockwise("int8", (1 if per_channel else None, None), "_scale", names)


SCHEMES: dict[str, Callable[[], Blockwise]] = {
    "fp8_blockwise": fp8_blockwise,
    "fp8_per_channel": fp8_per_channel,
    "fp8_per_tensor": fp8_per_tensor,
    "int8": int8,
    "mxfp4": mxfp4,
    "mxfp8": mxfp8,
    "nvfp4": nvfp4,
}


def scheme_named(name: str) -> Blockwise:
    """The scheme of a name, for the weights of linear layers.

    Raises:
        ValueError: there is none of this name.
    """
    if name not in SCHEMES:
        raise ValueError(f"there is no scheme {name!r}; there are {', '.join(SCHEMES)}")
    return SCHEMES[name]()


def fused_name(name: str) -> str:
    """The name that tensors have in common which engines fuse: these need the same global scale.

    >>> fused_name("layers.0.q_proj.weight") == fused_name("layers.0.v_proj.weight")
    True
    """
    *path, layer, last = ("", *name.split("."))
    return ".".join((*path, _FUSED.get(layer, layer), last))
