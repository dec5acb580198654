"""Where the weights of a rollout live: modules, adapters, engines, checkpoint folders."""

from __future__ import annotations

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
