"""Sessions: a publisher and any number of subscribers, over a store or over a process group."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..lazy import lister, loader

if TYPE_CHECKING:
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

_NAMES = {
    "background": ("BackgroundPublish",),
    "callbacks": ("Callback",),
    "group.publisher": ("GroupPublisher",),
    "group.relay": ("Relay",),
    "group.subscriber": ("GroupSubscriber",),
    "report": ("SyncReport",),
    "store.pinning": ("pin", "pins", "unpin"),
    "store.pins": ("Pin",),
    "store.publisher": ("Publisher",),
    "store.subscriber": ("Subscriber",),
}

if not TYPE_CHECKING:  # type checkers would take it for a promise that every name exists
    __getattr__ = loader(__name__, _NAMES)
    __dir__ = lister(__name__, __all__)
