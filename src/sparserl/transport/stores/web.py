"""A store behind http(s), to read: what `sparserl serve` offers, or any web server.

The server is not trusted. A body is read up to its limit, whatever the headers say; a redirect is followed on the same
server only, so that a token goes nowhere else; a request that takes too long ends. Proxies are those of the environment
(`http_proxy`, `no_proxy` and so on).
"""

from __future__ import annotations

import functools
import hashlib
import http.client
import re
import time
from typing import Any, NoReturn
from urllib.parse import quote, urljoin, urlsplit

from ...errors import NotFound, SparserlError, StoreError, Truncated, Unavailable
from .base import MAX_WATCHED_BYTES, Retry, StoredObject, poll, require_name
from .deadline import Deadline, current
from .http_client import Answer, Expected, HttpClient
from .http_settings import HEADER_VALUE, PORTS, VISIBLE, describe, read_origin, read_settings, without_password

_POLL = 0.2  # seconds between looks at a head where the server does not hold requests
_MAX_HOLD = 20.0  # seconds that a server is asked to hold a request for the head
_HELD_ANSWER_SECONDS = 30.0  # that the answer to a held request may be late
_MIN_RATE = 4096  # bytes a second below which a request is too slow: many may share a link
_MAX_REDIRECTS = 5
_REDIRECTS = (301, 302, 303, 307, 308)
_CONTENT_RANGE = re.compile(r"bytes (\d{1,18})-(\d{1,18})/(?:\d{1,18}|\*)")


class WebStore:
    """A folder of a web server."""

    writable = False
    announces = True

    def __init__(self, url: str, *, token: str | None, retry: Retry, options: dict[str, Any]) -> None:
        self.url = without_password(url)
        self.retry = retry
        self._settings = read_settings(url, token, options)
        self._client = HttpClient(self._settings)

    def get(self, name: str, max_bytes: int) -> StoredObject:
        stored = self._get(name, max_bytes, None, 0)
        assert stored is not None
        return stored

    def read(self, name: str, start: int, size: int) -> bytes:
        return self.retry.run(self._label(name), functools.partial(self._read_once, name, start, size))

    def changed(self, name: str, tag: str | None, timeout: float) -> StoredObject | None:
        hold = 0
        requested = 0.0

        def look(left: float) -> StoredObject | None:
            nonlocal hold, requested
            requested = time.monotonic()
            hold = 0 if tag is None else max(0, int(min(_MAX_HOLD, left + _POLL, current().left)))
            return self._get(name, MAX_WATCHED_BYTES, tag, hold)

        def pause(left: float) -> None:
            if time.monotonic() - requested < max(hold, 1):  # the server does not hold requests, or has no head yet
                current().sleep(min(_POLL, left))

        return poll(look, tag, timeout, pause)

    def put(self, *_: Any, **__: Any) -> NoReturn:
        raise StoreError(f"{self.url} can only be read")

    swap = list = delete = put

    def close(self) -> None:
        """Close the connections that are kept open."""
        self._client.close()

    def _get(self, name: str, max_bytes: int, tag: str | None, hold: int) -> StoredObject | None:
        """An object; None if it still has this tag after the server has held the request for `hold` seconds."""
        return self.retry.run(self._label(name), functools.partial(self._get_once, name, max_bytes, tag, hold))

    def _get_once(self, name: str, max_bytes: int, tag: str | None, hold: int) -> StoredObject | None:
        headers = {"If-None-Match": tag} if tag is not None and HEADER_VALUE.fullmatch(tag) else {}
        if hold:
            headers["Prefer"] = f"wait={hold}"
            quiet = hold + _HELD_ANSWER_SECONDS
            expected = Expected(200, max_bytes, Deadline(quiet, around=current()), quiet)
        else:
            expected = self._expected(200, max_bytes)
        answer = self._request(name, expected, headers)
        if answer.status == 304 and tag is not None:
            return None
        self._require(answer, 200, self._label(name))
        new_tag = answer.headers.get("ETag", "")
        return StoredObject(answer.body, new_tag if VISIBLE.fullmatch(new_tag) else _hash(answer.body))

    def _read_once(self, name: str, start: int, size: int) -> bytes:
        headers = {"Range": f"bytes={start}-{start + size - 1}"}
        answer = self._request(name, self._expected(206, size), headers)
        label = self._label(name)
        if answer.status == 416:
            raise Truncated(f"{label} ends before the requested range")
        if answer.status == 200:
            raise StoreError(f"{label}: the server ignores ranges; it must answer them with status 206")
        self._require(answer, 206, label)
        content_range = _CONTENT_RANGE.fullmatch(answer.headers.get("Content-Range", ""))
        if (
            content_range is None
            or int(content_range[1]) != start
            or int(content_range[2]) - start + 1 != len(answer.body)
        ):
            raise Unavailable(f"{label}: the server sent another range than the requested one")
        if len(answer.body) != size:
            raise Truncated(f"{label} ends {size - len(answer.body)} bytes too early")
        return answer.body

    def _expected(self, status: int, max_bytes: int) -> Expected:
        quiet = self._settings.request_timeout
        return Expected(status, max_bytes, Deadline(quiet + max_bytes / _MIN_RATE, around=current()), quiet)

    def _request(self, name: str, expected: Expected, headers: dict[str, str]) -> Answer:
        """The answer to a GET, after redirects on the same server."""
        label = self._label(name)
        path = self._settings.path + require_name(name)
        try:
            for _ in range(_MAX_REDIRECTS + 1):
                answer = self._client.get(path, headers, expected, label)
                if answer.status not in _REDIRECTS:
                    return answer
                path = self._redirected(path, answer, label)
        except SparserlError:
            raise
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise Unavailable(f"{label}: {describe(error)}") from None
        raise StoreError(f"{label} is redirected more than {_MAX_REDIRECTS} times")

    def _redirected(self, path: str, answer: Answer, label: str) -> str:
        """The path that a redirect leads to, which must be on this server."""
        location = answer.headers.get("Location", "")
        origin = self._settings.origin
        try:
            place = urlsplit(urljoin(f"{origin.scheme}://{self._settings.headers['Host']}{path}", location))
            same = place.scheme in PORTS and read_origin(place, location) == origin
        except (ValueError, StoreError):
            same = False
        if not same:
            raise StoreError(
                f"{label} is redirected to {location[:200]!r}; a store is read only from "
                f"{origin.scheme}://{origin.host}:{origin.port}. If the store has moved, give its new URL"
            )
        new_path = quote(place.path, safe="/%~:@!$&'()*+,;=") or "/"
        return f"{new_path}?{quote(place.query, safe='/%~:@!$&()*+,;=?')}" if place.query else new_path

    def _require(self, answer: Answer, status: int, label: str) -> None:
        if answer.status == status:
            return
        if answer.status in (404, 410):
            raise NotFound(f"{label} does not exist")
        message = f"{label}: the server answered {answer.status} {answer.reason[:80]!r}"
        if answer.status in (401, 403):
            raise StoreError(f"{message}: {self._about_token()}")
        raise Unavailable(message)

    def _about_token(self) -> str:
        if "Authorization" in self._settings.headers:
            return "it does not accept this token or password"
        return "it wants an access token: --token-file FILE, or Subscriber(url, target, token=...)"

    def _label(self, name: str) -> str:
        return f"{self.url}: {name}"


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
