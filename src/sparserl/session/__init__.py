"""Sessions: a publisher and any number of subscribers, over a store or over a process group."""

from __future__ import annotations

from .background import BackgroundPublish
from .callbacks import Callback
from .group.publisher import GroupPublisher
from .group.relay import Relay
from .group.subscriber import GroupSubscriber
from .report import SyncReport
from .store.pinning import pin, pins, unpin
from .store.pins import Pin
from .store.publisher import Publisher
from .store.subscriber import Subscriber

__all__ = [
    "BackgroundPublish",
    "Callback",
    "GroupPublisher",
    "GroupSubscriber",
    "Pin",
    "Publisher",
    "Relay",
    "Subscriber",
    "SyncReport",
    "pin",
    "pins",
    "unpin",
]
