"""Where the weights of a rollout live: modules, adapters, engines, checkpoint folders."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..lazy import lister, loader

if TYPE_CHECKING:
    from .adapters import AdapterTarget, MergedTarget, lora
    from .checkpoint import PatchedCheckpoint, apply_to_checkpoint
    from .checkpoint_folder import FolderTarget, folder
    from .modules import ModuleTarget, module, renamed
    from .target import Change, Prepared, Target

__all__ = [
    "AdapterTarget",
    "Change",
    "FolderTarget",
    "MergedTarget",
    "ModuleTarget",
    "PatchedCheckpoint",
    "Prepared",
    "Target",
    "apply_to_checkpoint",
    "folder",
    "lora",
    "module",
    "renamed",
]

_NAMES = {
    "adapters": ("AdapterTarget", "MergedTarget", "lora"),
    "checkpoint": ("PatchedCheckpoint", "apply_to_checkpoint"),
    "checkpoint_folder": ("FolderTarget", "folder"),
    "modules": ("ModuleTarget", "module", "renamed"),
    "target": ("Change", "Prepared", "Target"),
}

if not TYPE_CHECKING:  # type checkers would take it for a promise that every name exists
    __getattr__ = loader(__name__, _NAMES)
    __dir__ = lister(__name__, __all__)
