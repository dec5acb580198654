"""vLLM, trainer side: what reaches an engine. Nothing here imports vLLM, so trainers need not have it.

follow ──► which version do the workers have? ──► the engine's version
pause ──► start, update, finish ──► reset caches ──► resume
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator
from typing import Any

from ..errors import SessionError
from ..session.options import require_timeout
from .engine_server import require_address

_log = logging.getLogger(__name__)
VERSION = "sparserl_version"  # the method of workers that tells which version they have
END_UPDATE = "sparserl_end_update"  # the method of workers that ends an update which is open, if any is
_STOCK_SECONDS = 20.0  # that workers have for their answers after a failed update
_NO_VERSION = "default"  # what vLLM calls weights as it has loaded them


class WeightUpdates:
    """Commits versions in all workers of an engine.

    Args:
        client: An object with the methods of `HTTPClient`. If it lacks `pause`, `resume` and `reset_caches`, the caller
            must do that. If it lacks `collective_rpc` or `update_weight_version`, the engine has no version until the
            first commit.
    """

    def __init__(self, client: Any) -> None:
        self._client = client
        self._ask = getattr(client, "collective_rpc", None)
        self._tell = getattr(client, "update_weight_version", None)
        self._open = False  # whether an update has begun and is not finished

    def follow(self, init_info: dict[str, Any]) -> None:
        """Let all workers follow a run; the engine then has the version that its bits are, or none.

        Workers that do not say which it is, such as those of an older sparserl, follow the run all the same.
        """
        self._client.init_weight_transfer_engine(init_info)
        self._open = False
        self._tell_version()

    def _tell_version(self) -> None:
        """Tell the engine which version its workers have, if a client can."""
        if self._ask is None or self._tell is None:
            return
        try:
            version = self._common_version()
        except Exception as error:  # noqa: BLE001  # of any client; what matters is done
            _log.warning("the engine has no version until the first commit: its workers do not tell theirs: %r", error)
            version = _NO_VERSION
        self._tell(version)

    def _take_stock(self) -> None:
        """After a failed update, which may have written weights: what workers have now, if they still answer."""
        if self._ask is None or self._tell is None:
            return
        with contextlib.suppress(Exception):  # the error of the update is raised
            self._tell(self._common_version())
            if (reset := getattr(self._client, "reset_caches", None)) is not None:
                reset()

    def _common_version(self) -> str:
        """What to call the weights: the version that all workers have, if they have one."""
        assert self._ask is not None
        versions = {answer["version"] for answer in self._ask(VERSION)}
        version = versions.pop() if len(versions) == 1 else None
        return _NO_VERSION if version is None else version

    def commit(self, version: int, run: str | None = None, *, audit: bool = False) -> None:
        """Let all workers commit a version. If one fails, this raises, and the engine is told what all of them have."""
        with paused(self._client):
            if self._open and self._ask is not None:  # an answer was lost; to finish what is not open would be an error
                with contextlib.suppress(Exception):  # the next call says what is wrong
                    self._ask(END_UPDATE)
            self._open = True
            self._client.start_weight_update()
            try:
                self._client.update_weights({"version": version, "run": run, "audit": audit})
            except Exception:
                # On a thread that may be left behind: of an engine that has just died, vLLM waits for answers for ever.
                stock = threading.Thread(target=self._take_stock, name="sparserl-stock", daemon=True)
                stock.start()
                stock.join(_STOCK_SECONDS)
                raise
            self._client.finish_weight_update(weight_version(run, version))
            self._open = False


def weight_version(run: str | None, version: int) -> str:
    """What vLLM calls the weights: the run and the version.

    >>> weight_version("12e9e740decf9cd4", 42)
    '12e9e740decf9cd4:42'
    """
    return str(version) if run is None else f"{run}:{version}"


@contextlib.contextmanager
def paused(client: Any) -> Iterator[None]:
    """Pause vLLM for a commit, if a client can, and drop what was computed with the old weights."""
    pause, resume, reset = (getattr(client, name, None) for name in ("pause", "resume", "reset_caches"))
    if pause is not None:
        pause()
    try:
        yield
        if reset is not None:
            reset()
    finally:
        if resume is not None:
            resume()


class HTTPClient:
    """Calls a vLLM server that was started with VLLM_SERVER_DEV_MODE=1. Requests wait during a commit.

    Args:
        base_url: The address of the server.
        timeout: How many seconds to wait for an answer.
    """

    def __init__(self, base_url: str, timeout: float = 300) -> None:
        self.base_url = require_address("base_url", base_url)
        require_timeout("timeout", timeout)
        self.timeout = timeout

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._post("init_weight_transfer_engine", {"init_info": init_info})

    def start_weight_update(self) -> None:
        self._post("start_weight_update")

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self._post("update_weights", {"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._post("finish_weight_update", {"weight_version": weight_version})

    def update_weight_version(self, version: str) -> None:
        """Tell the engine what its weights are."""
        self._post("update_weight_version", {"new_version": version})

    def collective_rpc(self, method: str, **arguments: Any) -> list[Any]:
        """Call a method of all workers, and return what each answers."""
        return list(self._post("collective_rpc", {"method": method, "kwargs": arguments})["results"])

    def pause(self) -> None:
        """Stop the engine after its current step; requests are kept."""
        self._post("pause?mode=keep")

    def resume(self) -> None:
        self._post("resume")

    def reset_caches(self) -> None:
        """Drop what was computed with the old weights; running requests are computed again."""
        if not self._post("reset_prefix_cache?reset_running_requests=true&reset_external=true").get("success", True):
            raise SessionError("vLLM could not reset its prefix cache: it has entries of the old weights")
        self._post("reset_encoder_cache", is_optional=True)  # of images; older servers cannot be asked

    def _post(self, path: str, json: dict[str, Any] | None = None, *, is_optional: bool = False) -> dict[str, Any]:
        import requests

        answer = requests.post(f"{self.base_url}/{path}", json=json, timeout=self.timeout)
        if is_optional and answer.status_code == 404:
            return {}
        if not answer.ok:
            raise SessionError(f"vLLM answered {answer.status_code} to {path}: {answer.text[:2000]}")
        fields: dict[str, Any] = answer.json() if answer.content else {}
        return fields
