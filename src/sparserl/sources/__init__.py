"""Where the weights of a trainer come from: modules, shards, adapters, quantized weights, checkpoints on disk.

A source has a method `weights`. The functions here make sources; `track` makes one that knows what changed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..lazy import lister, loader

if TYPE_CHECKING:
    from .adapters import AdapterSource, MergedSource, lora
    from .checkpoint import Checkpoint, open_checkpoint
    from .dtensors import ShardedSource, fsdp
    from .layout import Layout, LayoutSource, Local, Slice, Span, joined, mapped, require_cover
    from .megatron_adapters import MegatronAdapterSource, megatron_lora
    from .megatron_core import Ranks
    from .megatron_map import Family, GroupRows, Row
    from .megatron_source import megatron
    from .modules import ModuleSource, PublishedSource, Source, module
    from .quantize import QuantizedSource, quantized
    from .renaming import RenamedSource, renamed
    from .schemes import (
        Blockwise,
        fp8_blockwise,
        fp8_per_channel,
        fp8_per_tensor,
        int8,
        linear_weights,
        mxfp4,
        mxfp8,
        nvfp4,
    )
    from .tracker import Tracker, track

__all__ = [
    "AdapterSource",
    "Blockwise",
    "Checkpoint",
    "Family",
    "GroupRows",
    "Layout",
    "LayoutSource",
    "Local",
    "MegatronAdapterSource",
    "MergedSource",
    "ModuleSource",
    "PublishedSource",
    "QuantizedSource",
    "Ranks",
    "RenamedSource",
    "Row",
    "ShardedSource",
    "Slice",
    "Source",
    "Span",
    "Tracker",
    "fp8_blockwise",
    "fp8_per_channel",
    "fp8_per_tensor",
    "fsdp",
    "int8",
    "joined",
    "linear_weights",
    "lora",
    "mapped",
    "megatron",
    "megatron_lora",
    "module",
    "mxfp4",
    "mxfp8",
    "nvfp4",
    "open_checkpoint",
    "quantized",
    "renamed",
    "require_cover",
    "track",
]

_NAMES = {
    "adapters": ("AdapterSource", "MergedSource", "lora"),
    "checkpoint": ("Checkpoint", "open_checkpoint"),
    "dtensors": ("ShardedSource", "fsdp"),
    "layout": ("Layout", "LayoutSource", "Local", "Slice", "Span", "joined", "mapped", "require_cover"),
    "megatron_adapters": ("MegatronAdapterSource", "megatron_lora"),
    "megatron_core": ("Ranks",),
    "megatron_map": ("Family", "GroupRows", "Row"),
    "megatron_source": ("megatron",),
    "modules": ("ModuleSource", "PublishedSource", "Source", "module"),
    "quantize": ("QuantizedSource", "quantized"),
    "renaming": ("RenamedSource", "renamed"),
    "schemes": (
        "Blockwise",
        "fp8_blockwise",
        "fp8_per_channel",
        "fp8_per_tensor",
        "int8",
        "linear_weights",
        "mxfp4",
        "mxfp8",
        "nvfp4",
    ),
    "tracker": ("Tracker", "track"),
}

if not TYPE_CHECKING:  # type checkers would take it for a promise that every name exists
    __getattr__ = loader(__name__, _NAMES)
    __dir__ = lister(__name__, __all__)
