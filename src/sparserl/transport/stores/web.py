"""A store behind http(s), to read: what `sparserl serve` offers, or any web server.

Nothing that a server says is taken on trust: a body is read to its limit and no further, whatever its headers promise;
a redirect is followed to the same server alone, so a token goes nowhere else; a request that takes too long ends.
Connections are kept for the next request. Proxies are those of the environment (`http_proxy`, `no_proxy` and so on).
"""

from __future__ import annotations

import base64
import contextlib
import functools
import hashlib
import http.client
import io
import ipaddress
import os
import re
import select
import socket
import ssl
import time
import urllib.request
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar
from urllib.parse import SplitResult, quote, unquote, urljoin, urlsplit

from ...errors import LimitExceeded, NotFound, SparserlError, StoreError, Truncated, Unavailable
from .base import MOST_WATCHED, Found, Listed, Retry, require_name
from .deadline import SLICE, Deadline, apart, current

R = TypeVar("R")
_POLL = 0.2  # seconds between looks at a head where the server does not hold requests
_HOLD = 20.0  # seconds that a server is asked to hold a request for the head, at most
_LATE = 30.0  # seconds that the answer to a held request may be late
_REQUEST = 120.0  # seconds without a byte, and for a request besides what its bytes take
_SLOWEST = 4096  # bytes a second that a request may be as slow as: many share a link
_CONNECT = 5.0
_REDIRECTS = 5
_IDLE = 32  # connections that are kept
_FRAME = 1 << 20  # bytes of an answer that are not its body: headers, and what lies between chunks
_CHUNK = 8 << 20  # bytes that are made room for at a time
_MOVED = (301, 302, 303, 307, 308)
_PORTS = {"http": 80, "https": 443}
_TAG = re.compile(r"[!-~]{1,1000}")
_VALUE = re.compile(r"[ -~]*")
_PART = re.compile(r"bytes (\d{1,18})-(\d{1,18})/(?:\d{1,18}|\*)")


class Origin(NamedTuple):
    """What a token is for."""

    scheme: str
    host: str
    port: int


@dataclass(frozen=True)
class Answer:
    """What a server said; its body only if it is what was wanted."""

    status: int
    reason: str
    headers: http.client.HTTPMessage
    body: bytes


@dataclass(frozen=True)
class Wanted:
    """What is asked for: the status of a good answer, the most bytes it may have, until when, and with which pauses."""

    status: int
    most: int
    deadline: Deadline
    quiet: float  # seconds without a byte


class WebStore:
    """A folder of a web server."""

    writable = False

    def __init__(self, url: str, *, token: str | None, retry: Retry, options: dict[str, Any]) -> None:
        self.url = url
        self.retry = retry
        place = _split(url)
        client = _client_options(url, options)
        self._origin = _origin(place, url)
        self._path = quote(place.path.rstrip("/"), safe="/%~:@!$&'()*+,;=") + "/"
        self._request = _seconds(url, client.get("timeout"), _REQUEST)
        self._connect = _seconds(url, client.get("connect_timeout"), _CONNECT)
        self._tls = _tls(url, client) if self._origin.scheme == "https" else None
        self._proxy = _proxy(self._origin)
        self._headers = _headers(self._origin, place, token, client.get("default_headers") or {})
        if self._proxy is not None and self._tls is None:
            self._headers |= _proxy_headers(self._proxy)
        self._idle: list[socket.socket] = []
        self._process = os.getpid()
        weakref.finalize(self, _close, self._idle)

    def get(self, name: str, most: int) -> Found:
        found = self.retry.run(self._what(name), functools.partial(self._get, name, most, None, 0))
        assert found is not None
        return found

    def read(self, name: str, start: int, size: int) -> bytes:
        headers = {"Range": f"bytes={start}-{start + size - 1}"}

        def once() -> bytes:
            answer = self._ask(name, self._wanted(206, size, self._request + size / _SLOWEST, self._request), headers)
            what = self._what(name)
            if answer.status == 416:
                raise Truncated(f"{what} ends before the part that is asked for")
            if answer.status == 200:
                raise StoreError(f"{what}: the server sends all of an object where a part is asked for")
            self._require(answer, 206, what)
            part = _PART.fullmatch(answer.headers.get("Content-Range", ""))
            if part is None or int(part[1]) != start or int(part[2]) - start + 1 != len(answer.body):
                raise Unavailable(f"{what}: the server sent another part than it was asked for")
            if len(answer.body) != size:
                raise Truncated(f"{what} ends {size - len(answer.body)} bytes too early")
            return answer.body

        return self.retry.run(self._what(name), once)

    def changed(self, name: str, tag: str | None, timeout: float) -> Found | None:
        end = time.monotonic() + timeout
        while True:
            asked = time.monotonic()
            hold = int(min(_HOLD, end - asked + _POLL, current().left)) if tag is not None else 0
            try:
                found = self.retry.run(
                    self._what(name), functools.partial(self._get, name, MOST_WATCHED, tag, max(0, hold))
                )
                if found is not None and found.tag != tag:
                    return found
            except NotFound:
                if tag is not None:
                    raise
            left = min(end - time.monotonic(), current().left)
            if left <= 0:
                return None
            if time.monotonic() - asked < max(hold, 1):  # it does not hold requests, or there is no head yet
                current().sleep(min(_POLL, left))

    def put(self, name: str, data: bytes | memoryview) -> None:  # noqa: ARG002  # a store's signature
        raise self._refusal()

    def swap(self, name: str, data: bytes, tag: str | None) -> str:  # noqa: ARG002  # a store's signature
        raise self._refusal()

    def list(self, prefix: str) -> Iterator[Listed]:  # noqa: ARG002  # a store's signature
        raise self._refusal()

    def delete(self, names: Iterable[str]) -> None:  # noqa: ARG002  # a store's signature
        raise self._refusal()

    def close(self) -> None:
        """Close the connections that are kept."""
        _close(self._idle)

    # -- requests ------------------------------------------------------------------------------------------------------

    def _get(self, name: str, most: int, tag: str | None, hold: int) -> Found | None:
        """An object; None if it has the tag that is known. `hold`: how long the server may wait for another one."""
        headers = {"If-None-Match": tag} if tag is not None and _VALUE.fullmatch(tag) else {}
        if hold:
            headers["Prefer"] = f"wait={hold}"
        quiet = hold + _LATE if hold else self._request
        seconds = quiet if hold else quiet + most / _SLOWEST
        answer = self._ask(name, self._wanted(200, most, seconds, quiet), headers)
        if answer.status == 304 and tag is not None:
            return None
        self._require(answer, 200, self._what(name))
        given = answer.headers.get("ETag", "")
        return Found(answer.body, given if _TAG.fullmatch(given) else hashlib.sha256(answer.body).hexdigest())

    @staticmethod
    def _wanted(status: int, most: int, seconds: float, quiet: float) -> Wanted:
        return Wanted(status, most, Deadline(seconds, around=current()), quiet)

    def _ask(self, name: str, wanted: Wanted, headers: dict[str, str]) -> Answer:
        """The answer to a GET, at this server, wherever it has moved the object to."""
        what = self._what(name)
        path = self._path + require_name(name)
        try:
            for _ in range(_REDIRECTS + 1):
                answer = self._once(path, headers, wanted, what)
                if answer.status not in _MOVED:
                    return answer
                path = self._moved(path, answer, what)
        except SparserlError:
            raise
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise Unavailable(f"{what}: {_short(error)}") from error
        raise StoreError(f"{what} is redirected more than {_REDIRECTS} times")

    def _once(self, path: str, headers: dict[str, str], wanted: Wanted, what: str) -> Answer:
        """One request, on a connection that is kept, or on a new one where there is none that still lives."""
        target = path
        if self._proxy is not None and self._tls is None:
            target = f"http://{self._headers['Host']}{path}"
        lines = (f"{key}: {value}" for key, value in {**self._headers, **headers}.items())
        request = "\r\n".join([f"GET {target} HTTP/1.1", *lines, "", ""]).encode("ascii")
        if self._process != os.getpid():  # the process that we were forked off from uses those connections
            _close(self._idle)
            self._process = os.getpid()
        while (kept := _alive(self._idle)) is not None:
            try:
                return self._exchange(kept, request, wanted, what)
            except (http.client.RemoteDisconnected, ConnectionError):
                continue  # it was closed while nobody used it
        return self._exchange(self._connected(wanted.deadline, what), request, wanted, what)

    def _exchange(self, connection: socket.socket, request: bytes, wanted: Wanted, what: str) -> Answer:
        """Send a request, read its answer, and keep the connection if it can be used again."""
        keep = False
        body = b""
        try:
            _send(connection, request, wanted.deadline, what)
            with _respond(connection, wanted, what) as response:
                if response.status == wanted.status:
                    coding = response.headers.get("Content-Encoding", "identity")
                    if coding != "identity":
                        raise StoreError(f"{what} is sent as {coding[:40]!r}, which was not asked for")
                    body = _body(response, wanted.most, what)
                keep = not response.will_close and (response.isclosed() or response.length == 0)
        finally:
            if keep and len(self._idle) < _IDLE:
                self._idle.append(connection)
            else:
                connection.close()
        return Answer(response.status, response.reason, response.headers, body)

    def _moved(self, path: str, answer: Answer, what: str) -> str:
        """Where a redirect leads, if that is this server."""
        place = answer.headers.get("Location", "")
        scheme, host, port = self._origin
        try:
            there = urlsplit(urljoin(f"{scheme}://{self._headers['Host']}{path}", place))
            same = there.scheme in _PORTS and _origin(there, place) == self._origin
        except (ValueError, StoreError):
            same = False
        if not same:
            raise StoreError(
                f"{what} is redirected to {place[:200]!r}; a store is read from {scheme}://{host}:{port} alone. "
                "If that is where it lies now, give its URL"
            )
        found = quote(there.path, safe="/%~:@!$&'()*+,;=") or "/"
        return f"{found}?{quote(there.query, safe='/%~:@!$&()*+,;=?')}" if there.query else found

    def _connected(self, deadline: Deadline, what: str) -> socket.socket:
        """A new connection. Names are looked up on a thread that need not be waited for: that has no timeout."""
        place = self._origin if self._proxy is None else _origin(self._proxy, "the proxy")
        address = place.host, place.port
        future, abandon = apart(lambda: socket.create_connection(address, self._connect), socket.socket.close)
        try:
            plain = deadline.result(future, what)
        except BaseException:
            abandon()
            raise
        try:
            plain.settimeout(SLICE)
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            plain.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            return plain if self._tls is None else self._secured(plain, self._tls, deadline, what)
        except BaseException:
            plain.close()
            raise

    def _secured(self, plain: socket.socket, tls: ssl.SSLContext, deadline: Deadline, what: str) -> socket.socket:
        if self._proxy is not None:
            place = f"{_bracketed(self._origin.host)}:{self._origin.port}"
            lines = (f"{key}: {value}" for key, value in {"Host": place, **_proxy_headers(self._proxy)}.items())
            request = "\r\n".join([f"CONNECT {place} HTTP/1.1", *lines, "", ""]).encode("ascii")
            _send(plain, request, deadline, what)
            with _respond(plain, Wanted(200, 0, deadline, self._request), what, "CONNECT") as response:
                if response.status != 200:
                    raise Unavailable(f"{what}: the proxy answered {response.status} {response.reason[:80]!r}")
        secure = tls.wrap_socket(plain, server_hostname=self._origin.host, do_handshake_on_connect=False)
        try:
            _patiently(secure.do_handshake, deadline, what)
        except BaseException:
            secure.close()
            raise
        return secure

    def _require(self, answer: Answer, status: int, what: str) -> None:
        if answer.status == status:
            return
        if answer.status in (404, 410):
            raise NotFound(f"{what} is not there")
        said = f"{what}: the server answered {answer.status} {answer.reason[:80]!r}"
        if answer.status in (401, 403):
            raise StoreError(f"{said}; does the token fit?")
        raise Unavailable(said)

    def _what(self, name: str) -> str:
        return f"{self.url}: {name}"

    def _refusal(self) -> StoreError:
        return StoreError(f"{self.url} can only be read")


class _Wire(io.RawIOBase):
    """What a server sends, as a file, for as long as there is time, and up to a limit."""

    def __init__(self, connection: socket.socket, wanted: Wanted, what: str) -> None:
        self._connection = connection
        self._deadline = wanted.deadline
        self._quiet = wanted.quiet
        self._left = 2 * wanted.most + _FRAME
        self._what = what

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if self._left <= 0:
            raise LimitExceeded(f"{self._what}: the server sends more than an answer can have")
        deadline = Deadline(self._quiet, around=self._deadline)
        size = _patiently(lambda: self._connection.recv_into(buffer), deadline, self._what)
        self._left -= size
        return size

    def makefile(self, _mode: str) -> io.BufferedReader:
        """As http.client asks a socket for it."""
        return io.BufferedReader(self, 1 << 16)


def _patiently(step: Callable[[], R], deadline: Deadline, what: str) -> R:
    """What a socket does, tried again at each slice of time in which it could not."""
    while True:
        deadline.require(what)
        try:
            return step()
        except TimeoutError as error:
            if error.errno is not None:  # the connection's own, not that of a slice
                raise


def _send(connection: socket.socket, data: bytes, deadline: Deadline, what: str) -> None:
    left = memoryview(data)
    while left:
        left = left[_patiently(lambda part=left: connection.send(part), deadline, what) :]  # type: ignore[misc]


def _respond(connection: socket.socket, wanted: Wanted, what: str, method: str = "GET") -> http.client.HTTPResponse:
    wire: Any = _Wire(connection, wanted, what)
    response = http.client.HTTPResponse(wire, method=method)
    try:
        response.begin()
    except BaseException:
        response.close()
        raise
    return response


def _body(response: http.client.HTTPResponse, most: int, what: str) -> bytes:
    """All of it, if that is no more than it may be. Only what was made room for is ever read."""
    promised = response.length
    if promised is not None and promised > most:
        raise LimitExceeded(f"{what}: {promised} bytes, at most {most} were expected")
    expected = most + 1 if promised is None else promised
    parts = []
    size = 0
    while size < expected:
        room = memoryview(bytearray(min(_CHUNK, expected - size)))
        count = response.readinto(room)
        if not count:
            break
        parts.append(room[:count])
        size += count
    if size > most:
        raise LimitExceeded(f"{what}: more than the {most} bytes that were expected")
    if promised is not None and size != promised:
        raise Unavailable(f"{what}: {size} bytes came, {promised} were promised")
    return b"".join(parts)


def _alive(idle: list[socket.socket]) -> socket.socket | None:
    """A connection that is kept and on which nothing has come: neither its end nor what nobody asked for."""
    while True:
        try:
            connection = idle.pop()
        except IndexError:
            return None
        look = select.poll()
        look.register(connection, select.POLLIN)
        if not look.poll(0):
            return connection
        connection.close()


def _close(idle: list[socket.socket]) -> None:
    while idle:
        idle.pop().close()


# -- what a URL, the options and the environment say -------------------------------------------------------------------


def _split(url: str) -> SplitResult:
    try:
        place = urlsplit(url)
    except ValueError as error:
        raise StoreError(f"{url!r} is not a URL: {error}") from error
    if place.query or place.fragment:
        raise StoreError(f"{url!r}: a store is a folder; write https://host/path")
    return place


def _origin(place: SplitResult, url: str) -> Origin:
    try:
        host, port = place.hostname, place.port
    except ValueError as error:
        raise StoreError(f"{url!r} is not a URL: {error}") from error
    if not host or not host.isascii() or not _VALUE.fullmatch(host):
        raise StoreError(f"{url!r} names no host")
    return Origin(place.scheme, host, _PORTS[place.scheme] if port is None else port)


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _headers(origin: Origin, place: SplitResult, token: str | None, extra: dict[str, str]) -> dict[str, str]:
    """What every request says."""
    host = _bracketed(origin.host)
    headers = {
        "Host": host if origin.port == _PORTS[origin.scheme] else f"{host}:{origin.port}",
        "Accept-Encoding": "identity",
        "User-Agent": "sparserl",
        **{str(name).title(): str(value) for name, value in extra.items()},
    }
    if token is not None:
        headers["Authorization"] = f"Bearer {token}"
    elif place.username is not None:
        headers["Authorization"] = _basic(place)
    for name, value in headers.items():
        if not _TAG.fullmatch(name) or not _VALUE.fullmatch(value):
            raise StoreError(f"{name[:80]!r} cannot be sent as a header; write visible ASCII")
    return headers


def _basic(place: SplitResult) -> str:
    pair = f"{unquote(place.username or '')}:{unquote(place.password or '')}"
    return "Basic " + base64.b64encode(pair.encode()).decode()


def _proxy(origin: Origin) -> SplitResult | None:
    """The proxy that the environment names for a server."""
    proxies = urllib.request.getproxies()
    url = proxies.get(origin.scheme) or proxies.get("all")
    if not url or _bypassed(origin, proxies.get("no", "")):
        return None
    place = _split(url if "://" in url else f"http://{url}")
    if place.scheme != "http":
        raise StoreError(f"the environment names a proxy of scheme {place.scheme!r}; http proxies are known")
    return place


def _bypassed(origin: Origin, exceptions: str) -> bool:
    """Whether a server is asked without a proxy: by its name, or by a network that its address is in."""
    if urllib.request.proxy_bypass(f"{_bracketed(origin.host)}:{origin.port}"):
        return True
    try:
        address = ipaddress.ip_address(origin.host)
    except ValueError:
        return False
    for exception in exceptions.split(","):
        with contextlib.suppress(ValueError):  # the name of a host
            if address in ipaddress.ip_network(exception.strip(), strict=False):
                return True
    return False


def _proxy_headers(proxy: SplitResult) -> dict[str, str]:
    return {} if proxy.username is None else {"Proxy-Authorization": _basic(proxy)}


def _client_options(url: str, options: dict[str, Any]) -> dict[str, Any]:
    client = dict(options.get("client_options") or {})
    known = {"allow_http", "allow_invalid_certificates", "connect_timeout", "default_headers", "root_certificate"}
    strange = sorted((options.keys() - {"client_options"}) | (client.keys() - known - {"timeout"}))
    if strange:
        raise StoreError(f"{url}: an http(s) store has no option {strange[0]!r}")
    return client


def _seconds(url: str, value: object, otherwise: float) -> float:
    if value is None:
        return otherwise
    if isinstance(value, timedelta):
        return value.total_seconds()
    raise StoreError(f"{url}: {value!r} is not a timeout; give a timedelta")


def _tls(url: str, client: dict[str, Any]) -> ssl.SSLContext:
    context = ssl.create_default_context()
    context.set_alpn_protocols(["http/1.1"])
    if client.get("allow_invalid_certificates"):
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    if (root := client.get("root_certificate")) is not None:
        try:
            context.load_verify_locations(cadata=root.decode() if isinstance(root, bytes) else root)
        except (ValueError, ssl.SSLError) as error:
            raise StoreError(f"{url}: the root certificate cannot be used: {_short(error)}") from error
    return context


def _short(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__} {error}".split())[:300]
