"""What bounds the clients of a server: how long they may be silent, how long they may take, and how many there are."""

from __future__ import annotations

import asyncio
import functools
import re
import sys
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

ADMIT = "sparserl.admit"  # key of an ASGI scope: a function to call when the request may be answered
MAX_HEADER_BYTES = 1 << 14
MAX_CONNECTIONS = 4096
_REQUEST_SECONDS = 10.0  # for the headers of a request, and for a TLS handshake before it
_LENGTH = re.compile(rb"^(?:content-length|transfer-encoding):(.*)$", re.IGNORECASE | re.MULTILINE)
_STALL_SECONDS = 30.0  # that a client may read nothing of its answer


class StrictConnection(h11.Connection):
    """h11, but the length of a request is said once, and a question mark with nothing behind it stays in the name."""

    def next_event(self) -> Any:
        received, _ = self.trailing_data
        event = super().next_event()
        if not isinstance(event, h11.Request):
            return event
        head = received[: len(received) - len(self.trailing_data[0])]
        if b"," in b",".join(
            _LENGTH.findall(head)
        ):  # a proxy might take another one of them, and what follows for ours
            raise h11.RemoteProtocolError("the length of the request is said twice")
        if event.target.endswith(b"?") and event.target.count(b"?") == 1:
            target = event.target[:-1] + b"%3F"  # splitting the target would drop it without a trace
            return h11.Request(
                method=event.method, target=target, headers=list(event.headers), http_version=event.http_version
            )
        return event


class Connections:
    """The connections of a server: busy ones, whose request was admitted, and idle ones, in the order they came."""

    def __init__(self, most: int = MAX_CONNECTIONS) -> None:
        self._most = most
        self._idle: dict[BoundedProtocol, None] = {}
        self._busy: set[BoundedProtocol] = set()

    def add(self, connection: BoundedProtocol) -> bool:
        """Add a connection, if need be in the place of the one that has been idle longest; False if all are busy."""
        if len(self._idle) + len(self._busy) >= self._most:
            oldest = next(iter(self._idle), None)
            if oldest is None:
                return False
            self.remove(oldest)
            oldest.transport.abort()
        self._idle[connection] = None
        return True

    def remove(self, connection: BoundedProtocol) -> None:
        """Forget a connection that is closed or about to be."""
        self._idle.pop(connection, None)
        self._busy.discard(connection)

    def admit(self, connection: BoundedProtocol) -> None:
        """Let a connection keep its place until its request is answered."""
        if self._idle.pop(connection, self) is None:
            self._busy.add(connection)

    def release(self, connection: BoundedProtocol) -> None:
        """The request of a connection is answered."""
        if connection in self._busy:
            self._busy.remove(connection)
            self._idle[connection] = None


class BoundedProtocol(H11Protocol):
    """uvicorn's protocol, but clients that are slow to send a request or to read an answer are disconnected."""

    request_timer: asyncio.TimerHandle | None = None  # runs while a request is awaited or incomplete
    stall_timer: asyncio.TimerHandle | None = None  # runs while the client reads nothing

    def __init__(self, *args: Any, connections: Connections, **options: Any) -> None:
        super().__init__(*args, **options)
        self.all_connections = connections
        self.conn = StrictConnection(h11.SERVER, MAX_HEADER_BYTES)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(1)  # an answer goes on when the client has taken what was sent of it
        if self.all_connections.add(self):
            self.request_timer = self.loop.call_later(_REQUEST_SECONDS, transport.abort)
        else:
            transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self.all_connections.remove(self)
        for timer in (self.request_timer, self.stall_timer):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def handle_events(self) -> None:
        super().handle_events()
        if self.cycle is not None and not self.cycle.response_complete:
            admit = functools.partial(self.all_connections.admit, self)
            self.scope[ADMIT] = admit  # type: ignore[literal-required]

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        answering = self.cycle is not None and not self.cycle.response_complete
        if answering and self.request_timer is not None:
            self.request_timer.cancel()
            self.request_timer = None
        elif not answering and self.request_timer is None:
            self.request_timer = self.loop.call_later(_REQUEST_SECONDS, self.transport.abort)

    def on_response_complete(self) -> None:
        self.all_connections.release(self)
        super().on_response_complete()
        if self.transport.is_closing():
            self.all_connections.remove(self)

    def shutdown(self) -> None:
        try:
            super().shutdown()
        except h11.LocalProtocolError:  # the request was refused already
            self.transport.close()

    def pause_writing(self) -> None:
        super().pause_writing()
        self.stall_timer = self.loop.call_later(_STALL_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        if self.stall_timer is not None:
            self.stall_timer.cancel()
            self.stall_timer = None
        super().resume_writing()

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self.loop.call_later(_STALL_SECONDS, self.transport.abort)  # if the client does not read what is buffered


class EventLoop(asyncio.SelectorEventLoop):
    """An event loop with a time limit for TLS handshakes."""

    async def create_server(self, *args: Any, **options: Any) -> asyncio.Server:
        if options.get("ssl") is not None:
            options["ssl_handshake_timeout"] = _REQUEST_SECONDS
            if sys.version_info >= (3, 11):
                options["ssl_shutdown_timeout"] = 1.0
        return await super().create_server(*args, **options)
