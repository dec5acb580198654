"""GET requests over connections that are kept open, with a limit on time and bytes for each of them."""

from __future__ import annotations

import http.client
import io
import os
import select
import socket
import ssl
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from ...errors import LimitExceeded, StoreError, Unavailable
from .base import untrusted_certificate
from .deadline import SLICE, Deadline, run_detached
from .http_settings import Settings, proxy_headers, read_origin

R = TypeVar("R")
_MAX_IDLE = 32  # connections that are kept open
_FRAMING_BYTES = 1 << 20  # of an answer besides its body: headers, and what separates chunks
_CHUNK = 8 << 20  # bytes of memory that are allocated at a time


@dataclass(frozen=True)
class Answer:
    """What a server answered; its body only if the status is the expected one."""

    status: int
    reason: str
    headers: http.client.HTTPMessage
    body: bytes


@dataclass(frozen=True)
class Expected:
    """The status of a good answer, how long its body may be, and how long a client waits for it."""

    status: int
    max_bytes: int
    deadline: Deadline
    quiet_seconds: float  # without a byte


class HttpClient:
    """Requests to one server."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._idle: list[socket.socket] = []
        self._process = os.getpid()
        weakref.finalize(self, _close, self._idle)

    def get(self, path: str, headers: dict[str, str], expected: Expected, label: str) -> Answer:
        """One request: on a connection that was kept open, or on a new one if none of those is still alive."""
        request = self._request(path, headers)
        if self._process != os.getpid():  # this process was forked, and its parent uses those connections
            _close(self._idle)
            self._process = os.getpid()
        while (connection := _pop_alive(self._idle)) is not None:
            try:
                return self._exchange(connection, request, expected, label)
            except (http.client.RemoteDisconnected, ConnectionError):
                continue  # the server closed it while it was idle
        return self._exchange(self._connect(expected.deadline, label), request, expected, label)

    def close(self) -> None:
        """Close the connections that are kept open."""
        _close(self._idle)

    def _request(self, path: str, headers: dict[str, str]) -> bytes:
        settings = self._settings
        target = path
        if settings.proxy is not None and settings.tls is None:
            target = f"http://{settings.headers['Host']}{path}"
        return _head("GET", target, {**settings.headers, **headers})

    def _exchange(self, connection: socket.socket, request: bytes, expected: Expected, label: str) -> Answer:
        """Send a request, read its answer, and keep the connection if it can be used again."""
        reusable = False
        body = b""
        try:
            _send(connection, request, expected.deadline, label)
            with _receive(connection, expected, label) as response:
                if response.status == expected.status:
                    coding = response.headers.get("Content-Encoding", "identity")
                    if coding != "identity":
                        raise StoreError(f"{label}: the server sent it as {coding[:40]!r}, which was not requested")
                    body = _body(response, expected.max_bytes, label)
                reusable = not response.will_close and (response.isclosed() or response.length == 0)
        finally:
            if reusable and len(self._idle) < _MAX_IDLE:
                self._idle.append(connection)
            else:
                connection.close()
        return Answer(response.status, response.reason, response.headers, body)

    def _connect(self, deadline: Deadline, label: str) -> socket.socket:
        """A new connection. Names are resolved on a detached thread: the system has no timeout for that."""
        settings = self._settings
        server = settings.origin if settings.proxy is None else read_origin(settings.proxy, "the proxy")
        address = (server.host, server.port)
        future, abandon = run_detached(
            lambda: socket.create_connection(address, settings.connect_timeout), socket.socket.close
        )
        try:
            plain = deadline.result(future, label)
        except BaseException:
            abandon()
            raise
        try:
            plain.settimeout(SLICE)
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            plain.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            return plain if settings.tls is None else self._secure(plain, settings.tls, deadline, label)
        except BaseException:
            plain.close()
            raise

    def _secure(self, plain: socket.socket, tls: ssl.SSLContext, deadline: Deadline, label: str) -> socket.socket:
        """TLS on a connection to the server, or to a proxy, which is asked to connect to the server first."""
        settings = self._settings
        if settings.proxy is not None:
            address = settings.origin.address
            _send(plain, _head("CONNECT", address, {"Host": address, **proxy_headers(settings.proxy)}), deadline, label)
            expected = Expected(200, 0, deadline, settings.request_timeout)
            with _receive(plain, expected, label, "CONNECT") as response:
                if response.status != 200:
                    raise Unavailable(f"{label}: the proxy answered {response.status} {response.reason[:80]!r}")
        secure = tls.wrap_socket(plain, server_hostname=settings.origin.host, do_handshake_on_connect=False)
        try:
            _until(secure.do_handshake, deadline, label)
        except ssl.SSLCertVerificationError as error:
            secure.close()
            raise untrusted_certificate(settings.origin.host, error.verify_message) from error
        except BaseException:
            secure.close()
            raise
        return secure


class _Stream(io.RawIOBase):
    """What a server sends, as a file, until the deadline and up to a number of bytes."""

    def __init__(self, connection: socket.socket, expected: Expected, label: str) -> None:
        self._connection = connection
        self._deadline = expected.deadline
        self._quiet_seconds = expected.quiet_seconds
        self._bytes_left = 2 * expected.max_bytes + _FRAMING_BYTES
        self._label = label

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if self._bytes_left <= 0:
            raise LimitExceeded(f"{self._label}: the server sends more than an answer can have")
        deadline = Deadline(self._quiet_seconds, around=self._deadline)
        size = _until(lambda: self._connection.recv_into(buffer), deadline, self._label)
        self._bytes_left -= size
        return size

    def makefile(self, _mode: str) -> io.BufferedReader:
        """What http.client calls on a socket."""
        return io.BufferedReader(self, 1 << 16)


def _until(step: Callable[[], R], deadline: Deadline, label: str) -> R:
    """Repeat an operation on a socket, whose timeout is a slice of time, until it succeeds or the deadline passes."""
    while True:
        deadline.require(label)
        try:
            return step()
        except TimeoutError as error:
            if error.errno is not None:  # of the connection itself, not of a slice
                raise


def _head(method: str, target: str, headers: dict[str, str]) -> bytes:
    lines = (f"{name}: {value}" for name, value in headers.items())
    return "\r\n".join([f"{method} {target} HTTP/1.1", *lines, "", ""]).encode("ascii")


def _send(connection: socket.socket, data: bytes, deadline: Deadline, label: str) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[_until(lambda part=rest: connection.send(part), deadline, label) :]  # type: ignore[misc]


def _receive(
    connection: socket.socket, expected: Expected, label: str, method: str = "GET"
) -> http.client.HTTPResponse:
    """An answer whose headers have been read."""
    stream: Any = _Stream(connection, expected, label)
    response = http.client.HTTPResponse(stream, method=method)
    try:
        response.begin()
    except BaseException:
        response.close()
        raise
    return response


def _body(response: http.client.HTTPResponse, max_bytes: int, label: str) -> bytes:
    """The whole body, if it is not longer than it may be. Memory is allocated as the bytes arrive."""
    announced = response.length
    if announced is not None and announced > max_bytes:
        raise LimitExceeded(f"{label} has {announced} bytes; at most {max_bytes} were expected")
    expected = max_bytes + 1 if announced is None else announced
    chunks = []
    size = 0
    while size < expected:
        chunk = memoryview(bytearray(min(_CHUNK, expected - size)))
        count = response.readinto(chunk)
        if not count:
            break
        chunks.append(chunk[:count])
        size += count
    if size > max_bytes:
        raise LimitExceeded(f"{label} has more than the {max_bytes} bytes that were expected")
    if announced is not None and size != announced:
        raise Unavailable(f"{label}: {size} of {announced} announced bytes arrived")
    return b"".join(chunks)


def _pop_alive(idle: list[socket.socket]) -> socket.socket | None:
    """A connection on which nothing has arrived since its last answer: neither its end nor anything else."""
    while True:
        try:
            connection = idle.pop()
        except IndexError:
            return None
        poll = select.poll()
        poll.register(connection, select.POLLIN)
        if not poll.poll(0):
            return connection
        connection.close()


def _close(idle: list[socket.socket]) -> None:
    while idle:
        idle.pop().close()
