"""Where the rollout's bits live."""

from __future__ import annotations

from .adapters import AdapterTarget, MergedTarget, lora
from .checkpoint import Landed, apply_to_checkpoint
from .checkpoint_folder import FolderTarget, folder
from .modules import ModuleTarget, module
from .target import Change, Prepared, Target

__all__ = [
    "AdapterTarget",
    "Change",
    "FolderTarget",
    "Landed",
    "MergedTarget",
    "ModuleTarget",
    "Prepared",
    "Target",
    "apply_to_checkpoint",
    "folder",
    "lora",
    "module",
]
