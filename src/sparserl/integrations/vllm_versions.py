"""vLLM: requests that demand a version of the weights, and answers that say which versions made them.

    POST, X-Sparserl-Min-Version: RUN:12 ──► RUN:12 or later in the engine? ──► generate ──► answer with
                                               └── no: 412, both versions          X-Sparserl-Start-Version: RUN:12
                                                                                   X-Sparserl-End-Version: RUN:13

A server is started with `--middleware sparserl.integrations.vllm_versions.VersionMiddleware`. See
docs/how-to/integrations/vllm.md. The engine itself is asked, before and after each generation, and `SparserlTrainer`
tells it a version only when all workers have committed it. So, as long as versions rise, all tokens of an answer come
from versions between the two, these included.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from ..errors import SessionError, WrongVersion

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]

MIN_VERSION = "X-Sparserl-Min-Version"
START_VERSION = "X-Sparserl-Start-Version"
END_VERSION = "X-Sparserl-End-Version"
_VERSION = re.compile(r"(?:([^\s:]+):)?([0-9]{1,18})", re.ASCII)
_UNKNOWN = "unknown"
_GENERATING = (  # where vLLM generates, scores or embeds
    *("/v1", "/v2", "/inference", "/cohere", "/invocations"),
    *("/generative_scoring", "/pooling", "/classify", "/score", "/rerank"),
)
_log = logging.getLogger(__name__)


def require_version(engine_version: str, min_version: str | int) -> None:
    """Raise unless an engine has a version or a later one of the same run; for engines that are called in process.

    >>> require_version("12e9e740decf9cd4:42", "12e9e740decf9cd4:41")
    >>> require_version("12e9e740decf9cd4:42", 43)
    Traceback (most recent call last):
      ...
    sparserl.errors.WrongVersion: the engine has 12e9e740decf9cd4:42, but 43 or later is demanded

    Args:
        engine_version: What `llm.get_weight_version()` returns, or `await engine.get_weight_version()`.
        min_version: `RUN:VERSION`, or only the version if any run will do.

    Raises:
        WrongVersion: The engine has an older version, one of another run, or weights of no known version.
        SessionError: `min_version` is no version.
    """
    demanded_run, demanded = _parse_demand(str(min_version))
    actual = _VERSION.fullmatch(engine_version)
    reason = ""
    if actual is None or actual[1] is None:
        reason = ": its weights are no version of a run"
    elif demanded_run is not None and actual[1] != demanded_run:
        reason = ": it follows another run"
    elif int(actual[2]) >= demanded:
        return
    raise WrongVersion(f"the engine has {engine_version}, but {min_version} or later is demanded{reason}")


def _parse_demand(min_version: str) -> tuple[str | None, int]:
    match = _VERSION.fullmatch(min_version)
    if match is None:
        raise SessionError(f"{min_version!r} is no version: write RUN:VERSION or VERSION, such as 12e9e740decf9cd4:42")
    return match[1], int(match[2])


class VersionMiddleware:
    """Refuses requests that demand a version which the engine does not have, and adds versions to answers.

    Answers have the version before and after the generation as headers. Streams begin before the second is known:
    they have it in a comment before their end, `: X-Sparserl-End-Version: RUN:13`.

    >>> app.add_middleware(VersionMiddleware)                                                      # doctest: +SKIP
    """

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        name = MIN_VERSION.lower().encode()
        demands = [value.decode("latin-1") for key, value in scope["headers"] if key == name]
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        if not demands and not path.startswith(_GENERATING):
            await self._app(scope, receive, send)
            return
        engine = getattr(scope["app"].state, "engine_client", None)  # servers that only render have none
        start = await _version(engine)
        for demand in demands:
            try:
                require_version(start, demand)
            except SessionError as error:
                await _refuse(send, 412 if isinstance(error, WrongVersion) else 400, error, start)
                return
        await self._app(scope, receive, _Answer(engine, start, send).send)


class _Answer:
    """Adds versions to one answer."""

    def __init__(self, engine: Any, start: str, send: Send) -> None:
        self._engine = engine
        self._start = start
        self._send = send
        self._needs_comment = False

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = [*message.get("headers", ()), _header(START_VERSION, self._start)]
            content_type = dict(headers).get(b"content-type", b"")
            self._needs_comment = content_type.startswith(b"text/event-stream")
            if not self._needs_comment:  # generated already
                headers.append(_header(END_VERSION, await _version(self._engine)))
            message = {**message, "headers": headers}
        elif self._needs_comment and message["type"] == "http.response.body":
            body = message.get("body", b"")
            if body.startswith(b"data: [DONE]") or not message.get("more_body", False):
                comment = f": {END_VERSION}: {await _version(self._engine)}\n\n"
                message = {**message, "body": comment.encode() + body}
                self._needs_comment = False
        await self._send(message)


async def _version(engine: Any) -> str:
    """The version that an engine, all its replicas, has now."""
    try:
        version = str(await engine.get_weight_version())
    except Exception as error:  # noqa: BLE001  # the engine is dead, or replicas differ: answers say so
        _log.warning("sparserl: the engine does not tell its version: %s: %s", type(error).__name__, error)
        return _UNKNOWN
    return version if version.isascii() and version.isprintable() else _UNKNOWN


def _header(name: str, value: str) -> tuple[bytes, bytes]:
    return name.lower().encode(), value.encode()


async def _refuse(send: Send, status: int, error: SessionError, version: str) -> None:
    """Answer with an error in the form of vLLM's own."""
    fields = {"message": str(error), "type": type(error).__name__, "param": MIN_VERSION, "code": status}
    body = json.dumps({"error": fields}).encode()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        _header(START_VERSION, version),
    ]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
