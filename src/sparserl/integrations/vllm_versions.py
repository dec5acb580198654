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
_TELLABLE = re.compile(r"[!-~]([ -~]*[!-~])?")  # in a header
_UNKNOWN = "unknown"
_OURS = {name.lower().encode() for name in (START_VERSION, END_VERSION)}
_STARTS = ("http.response.start", "websocket.accept", "websocket.http.response.start")
_HEALTH = ("/health", "/ping", "/metrics")
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
    they have it in a comment before their end, `: X-Sparserl-End-Version: RUN:13`. A demand counts for every method,
    and for a websocket when it is opened. Nobody else's headers pass for versions.

    >>> app.add_middleware(VersionMiddleware)                                                      # doctest: +SKIP
    """

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        name = MIN_VERSION.lower().encode()
        demands = [value.decode("latin-1") for key, value in scope["headers"] if key == name]
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        generates = path.startswith(_GENERATING)
        if path in _HEALTH:
            demands = []  # a client that sends them with every request may ask whether the engine lives
        engine = getattr(scope["app"].state, "engine_client", None)  # servers that only render have none
        start = None
        if demands or (scope.get("method") == "POST" and generates):
            start = await _version(engine)
        if demands:
            try:
                require_version(start or _UNKNOWN, ", ".join(demands))  # as a proxy joins several: that is no version
            except SessionError as error:
                await _refuse(scope, send, error, start or _UNKNOWN)
                return
        await self._app(scope, receive, _Answer(engine, start, send).send)


class _Answer:
    """Adds versions to one answer, unless there is none to begin with; those that the app may have set are left out."""

    def __init__(self, engine: Any, start: str | None, send: Send) -> None:
        self._engine = engine
        self._start = start
        self._send = send
        self._needs_comment = False

    async def send(self, message: Message) -> None:
        if message["type"] in _STARTS:
            headers = [header for header in message.get("headers", ()) if header[0].lower() not in _OURS]
            if self._start is not None:
                headers.append(_header(START_VERSION, self._start))
            if self._start is not None and message["type"] == "http.response.start":
                fields = {name.lower(): value for name, value in headers}
                self._needs_comment = fields.get(b"content-type", b"").lower().startswith(b"text/event-stream")
                if self._needs_comment:
                    headers = [header for header in headers if header[0].lower() != b"content-length"]
                else:  # generated already
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
        version = await engine.get_weight_version()
    except Exception as error:  # noqa: BLE001  # the engine is dead, or replicas differ: answers say so
        _log.warning("sparserl: the engine does not tell its version: %s: %s", type(error).__name__, error)
        return _UNKNOWN
    return version if isinstance(version, str) and _TELLABLE.fullmatch(version) else _UNKNOWN


def _header(name: str, value: str) -> tuple[bytes, bytes]:
    return name.lower().encode(), value.encode()


async def _refuse(scope: Message, send: Send, error: SessionError, version: str) -> None:
    """Answer with an error in the form of vLLM's own."""
    kind = "http.response"
    if scope["type"] == "websocket":
        kind = "websocket.http.response"
        if kind not in (scope.get("extensions") or {}):  # the server can only answer 403
            await send({"type": "websocket.close", "code": 1008})
            return
    status = 412 if isinstance(error, WrongVersion) else 400
    fields = {"message": str(error), "type": type(error).__name__, "param": MIN_VERSION, "code": status}
    body = json.dumps({"error": fields}).encode()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        _header(START_VERSION, version),
    ]
    await send({"type": f"{kind}.start", "status": status, "headers": headers})
    await send({"type": f"{kind}.body", "body": body})
