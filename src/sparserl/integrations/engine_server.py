"""The HTTP server of an engine: requests and answers are JSON."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any

from ..errors import SessionError
from ..session.options import require_timeout


def require_address(name: str, url: Any) -> str:
    """Refuse what is not the address of a server; returns it without a slash at its end."""
    if not isinstance(url, str) or not url.startswith(("http://", "https://")):
        raise SessionError(f"{name} is {url!r}; it must be the address of a server, such as http://localhost:8000")
    return url.rstrip("/")


class ServerError(SessionError):
    """The server of an engine has refused a request, with this HTTP status code."""

    def __init__(self, text: str, code: int) -> None:
        super().__init__(text)
        self.code = code


class EngineServer:
    """The server of an engine.

    Args:
        url: Its address.
        api_key: A key that it requires.
        timeout: How many seconds to wait for an answer.
    """

    def __init__(self, url: str, api_key: str | None = None, timeout: float = 600.0) -> None:
        self.url = require_address("url", url)
        require_timeout("timeout", timeout)
        self._timeout = timeout
        self._headers = {"Content-Type": "application/json"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"

    def ask(self, path: str, fields: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Post some fields, or get a path; returns the fields of the answer."""
        body = self.read(path, fields)
        try:
            answer: dict[str, Any] = json.loads(body)
        except ValueError as error:
            raise SessionError(f"{self.url}/{path}: the answer is not JSON: {error}") from error
        return answer

    def read(self, path: str, fields: Mapping[str, Any] | None = None) -> bytes:
        """Post some fields, or get a path; returns the body of the answer."""
        data = None if fields is None else json.dumps(fields).encode()
        request = urllib.request.Request(  # noqa: S310  # the user's own server
            f"{self.url}/{path}", data, self._headers
        )
        try:
            with urllib.request.urlopen(request, timeout=self._timeout) as response:  # noqa: S310
                body: bytes = response.read()
        except urllib.error.HTTPError as error:
            text = error.read().decode(errors="replace")[:500]
            raise ServerError(f"{self.url}/{path}: {error.code} {text}", error.code) from error
        except OSError as error:
            raise SessionError(f"{self.url}/{path}: {error}") from error
        return body
