"""Sessions: a publisher and any number of subscribers, over a store or over a process group."""

from __future__ import annotations

from .callbacks import Callback
from .report import SyncReport
from .store.publisher import Publisher
from .store.subscriber import Subscriber

__all__ = ["Callback", "Publisher", "Subscriber", "SyncReport"]
