"""Where the rollout's bits live."""

from __future__ import annotations

from .checkpoint import Landed, apply_to_checkpoint
from .folder import FolderTarget, folder
from .module import ModuleTarget, module
from .target import Change, Prepared, Target

__all__ = [
    "Change",
    "FolderTarget",
    "Landed",
    "ModuleTarget",
    "Prepared",
    "Target",
    "apply_to_checkpoint",
    "folder",
    "module",
]
