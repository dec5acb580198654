"""What bounds the clients of a server: how long they may be silent, how long they may take, and how many there are."""

from __future__ import annotations

import asyncio
import functools
import sys
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

ADMIT = "sparserl.admit"  # of a scope: to be called when its request may be answered
MOST_HEADERS = 1 << 14
MOST_CONNECTIONS = 4096
_REQUEST_SECONDS = 10.0  # for the headers of a request, and for a TLS handshake before it
_STALL_SECONDS = 30.0  # that a client may take nothing of its answer


class Literal(h11.Connection):
    """h11, for which a question mark with nothing behind it is a part of the name, as it was sent."""

    def next_event(self) -> Any:
        event = super().next_event()
        if isinstance(event, h11.Request) and event.target.endswith(b"?") and event.target.count(b"?") == 1:
            target = event.target[:-1] + b"%3F"  # or whoever splits it would leave no trace of it
            return h11.Request(
                method=event.method, target=target, headers=list(event.headers), http_version=event.http_version
            )
        return event


class Room:
    """The connections of a server: those whose request was admitted, and the others, silent longest first."""

    def __init__(self) -> None:
        self._silent: dict[Guarded, None] = {}
        self._busy: set[Guarded] = set()

    def enter(self, connection: Guarded) -> bool:
        """Whether one more fits, if need be in the place of a silent one, which goes."""
        if len(self._silent) + len(self._busy) >= MOST_CONNECTIONS:
            oldest = next(iter(self._silent), None)
            if oldest is None:
                return False
            self.leave(oldest)
            oldest.transport.abort()
        self._silent[connection] = None
        return True

    def leave(self, connection: Guarded) -> None:
        """It is gone, or about to."""
        self._silent.pop(connection, None)
        self._busy.discard(connection)

    def admit(self, connection: Guarded) -> None:
        """It has a request that may be answered: it keeps its place until that is done."""
        if self._silent.pop(connection, self) is None:
            self._busy.add(connection)

    def release(self, connection: Guarded) -> None:
        """Its request is answered."""
        if connection in self._busy:
            self._busy.remove(connection)
            self._silent[connection] = None


class Guarded(H11Protocol):
    """uvicorn's protocol, with an end to the patience it has with clients that are slow to ask or to take."""

    late: asyncio.TimerHandle | None = None  # runs while a request is awaited or incomplete
    stalled: asyncio.TimerHandle | None = None  # runs while the client takes nothing

    def __init__(self, *args: Any, room: Room, **options: Any) -> None:
        super().__init__(*args, **options)
        self.room = room
        self.conn = Literal(h11.SERVER, MOST_HEADERS)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if self.room.enter(self):
            self.late = self.loop.call_later(_REQUEST_SECONDS, transport.abort)
        else:
            transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self.room.leave(self)
        for timer in (self.late, self.stalled):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def handle_events(self) -> None:
        super().handle_events()
        if self.cycle is not None and not self.cycle.response_complete:
            self.scope[ADMIT] = functools.partial(self.room.admit, self)  # type: ignore[literal-required]

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        answering = self.cycle is not None and not self.cycle.response_complete
        if answering and self.late is not None:
            self.late.cancel()
            self.late = None
        elif not answering and self.late is None:
            self.late = self.loop.call_later(_REQUEST_SECONDS, self.transport.abort)

    def on_response_complete(self) -> None:
        self.room.release(self)
        super().on_response_complete()
        if self.transport.is_closing():
            self.room.leave(self)

    def shutdown(self) -> None:
        try:
            super().shutdown()
        except h11.LocalProtocolError:  # it was refused already
            self.transport.close()

    def pause_writing(self) -> None:
        super().pause_writing()
        self.stalled = self.loop.call_later(_STALL_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        if self.stalled is not None:
            self.stalled.cancel()
            self.stalled = None
        super().resume_writing()

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self.loop.call_later(_STALL_SECONDS, self.transport.abort)  # if it does not even take what is left


class Loop(asyncio.SelectorEventLoop):
    """An event loop in which TLS is no way to be slow."""

    async def create_server(self, *args: Any, **options: Any) -> asyncio.Server:
        if options.get("ssl") is not None:
            options["ssl_handshake_timeout"] = _REQUEST_SECONDS
            if sys.version_info >= (3, 11):
                options["ssl_shutdown_timeout"] = 1.0
        return await super().create_server(*args, **options)
