"""The endpoints of an SGLang server that concern weights, in releases with update sessions and in older ones.

Releases such as 0.5.15, which slime has, know no sessions: weights may be updated in any pause. If such a server cannot
flush its cache after an update, because requests are still there, it ends. So the cache is flushed before the update.
"""

from __future__ import annotations

import time
from typing import Any

from ..errors import SessionError, UnsupportedTensor
from .engine_server import EngineServer, ServerError

_FLUSH_SECONDS = 60.0  # that requests which were aborted may take to end
_PAUSE_SECONDS = 0.5  # between two attempts to flush the cache
_NOT_FOUND = 404


class SGLangServer:
    """An SGLang server.

    Args:
        url: Its address.
        api_key: Its admin key, if it requires one.
        timeout: How many seconds to wait for an answer.
    """

    def __init__(self, url: str, api_key: str | None = None, timeout: float = 600.0) -> None:
        self._server = EngineServer(url, api_key, timeout)
        self.url = self._server.url
        self._has_sessions = True

    def ask(self, path: str, **fields: Any) -> dict[str, Any]:
        """Post some fields; returns the fields of the answer."""
        answer = self._server.ask(path, fields)
        if answer.get("success") is False:
            raise SessionError(f"{self.url}/{path}: {answer.get('message')}")
        return answer

    def ranks(self) -> int:
        """The tensor-parallel size of the engine.

        Raises:
            UnsupportedTensor: The engine has a pipeline, whose stages the loader does not know.
        """
        info = self._server.ask("server_info")
        if int(info.get("pp_size") or 1) > 1:
            raise UnsupportedTensor(f"{self.url} has pp_size={info['pp_size']}; engines with a pipeline cannot follow")
        return int(info["tp_size"])

    def begin_update(self, *, flush_cache: bool) -> None:
        """In a pause: begin a session, or else flush the cache, if that is to be done.

        Raises:
            SessionError: The server has refused it, or still has requests.
        """
        try:
            self.ask("begin_weight_update", selector="target")
        except ServerError as error:
            if error.code != _NOT_FOUND:
                self._begin_anew(error)
                return
            self._has_sessions = False
            if flush_cache:
                self._flush_cache()

    def _begin_anew(self, refusal: ServerError) -> None:
        """End the session that a client which is gone has left open, if that is why another one is refused."""
        try:
            self.ask("end_weight_update")
        except ServerError:
            raise refusal from None
        self.ask("begin_weight_update", selector="target")

    def load(self, body: dict[str, Any]) -> None:
        """Call a loader of the engine with the body of a request."""
        if not self._has_sessions:
            body = body | {"flush_cache": False, "disable_draft_model": True}
            del body["selector"]
        self.ask("update_weights_from_tensor", **body)

    def end_update(self) -> None:
        """End the session, if there is one."""
        if self._has_sessions:
            self.ask("end_weight_update")

    def _flush_cache(self) -> None:
        end = time.monotonic() + _FLUSH_SECONDS
        while True:
            try:
                self._server.read("flush_cache", {})
            except ServerError as error:
                if time.monotonic() > end:
                    raise SessionError(
                        f"{self.url} cannot flush its cache, since it still has requests; this release needs "
                        f"mode='abort' or 'in_place': {error}"
                    ) from error
                time.sleep(_PAUSE_SECONDS)
            else:
                return
