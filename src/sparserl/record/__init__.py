"""Recordings: what the syncs of a run looked like, one line of JSON each, and the page that shows them."""

from __future__ import annotations

from .merging import merge
from .observer import Observer
from .recorder import Recorder
from .recording import Recording, Sync

__all__ = ["Observer", "Recorder", "Recording", "Sync", "merge"]
