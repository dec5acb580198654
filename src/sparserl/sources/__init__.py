"""Where the trainer's bits come from."""

from __future__ import annotations

from .checkpoint import Checkpoint, open_checkpoint
from .module import ModuleSource, Source, module

__all__ = ["Checkpoint", "ModuleSource", "Source", "module", "open_checkpoint"]
