"""vLLM, trainer side: a server that follows a run, and generates with the version that was committed last.

    commit(version) ──► follow the run, commit
    ask(a request) ──► demands that version ──► made with it? ──► the answer
       └── the server was restarted, and has another: follow and commit again, then ask again

Nothing here imports vLLM, so trainers need not have it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import requests
from requests.adapters import HTTPAdapter
from urllib3.util.retry import Retry

from ..errors import SessionError, WrongVersion
from ..session.options import require_timeout
from .engine_server import require_address
from .vllm_client import HTTPClient, WeightUpdates, weight_version
from .vllm_versions import END_VERSION, MIN_VERSION, START_VERSION, VersionMiddleware

_log = logging.getLogger("sparserl.vllm")
_ATTEMPTS = 3  # a server may be restarted while it is asked again
_CONNECTIONS = 64  # that a trainer may open at a time
_POLL_SECONDS = 0.5
_Answer = TypeVar("_Answer")


class FollowingServer:
    """A vLLM server that follows the run of a trainer.

    It must have been started with VLLM_SERVER_DEV_MODE=1, the weight-transfer backend `sparserl` and the
    `VersionMiddleware`.

    Args:
        url: The address of the server. It is waited for.
        timeout: How many seconds to wait for it to start, and to start again.

    Attributes:
        session: Send generation requests with this session: it demands the version that was committed last.
        config: The configuration of vLLM.

    Raises:
        SessionError: The server does not answer, or was not started so.

    Example:
        >>> server = FollowingServer("http://localhost:8000")                                      # doctest: +SKIP
        >>> server.commit({"url": "s3://bucket/run"}, publisher.run, publisher.version)            # doctest: +SKIP
        >>> server.ask(lambda: server.session.post(f"{server.url}/v1/completions", json=prompt))   # doctest: +SKIP
    """

    def __init__(self, url: str, timeout: float = 600.0) -> None:
        self.url = require_address("url", url)
        require_timeout("timeout", timeout)
        self.session = requests.Session()
        self.session.hooks["response"].append(self._check_versions)
        retries = Retry(total=3, connect=0, read=0, status_forcelist=[502, 503], allowed_methods=None, backoff_factor=2)
        for scheme in ("http://", "https://"):
            self.session.mount(scheme, HTTPAdapter(max_retries=retries, pool_maxsize=_CONNECTIONS))
        self._timeout = timeout
        self._client = HTTPClient(self.url)
        self._updates = WeightUpdates(self._client)
        self._init_info: dict[str, Any] = {}
        self._run: str | None = None
        self._version: int | None = None
        self._is_following = False  # whether the server is known to follow the run
        self._has_version = False  # whether it is known to have committed the version
        self._wait_until_healthy()
        self.config = self._read_config()
        self._require_middleware()

    def commit(self, init_info: Mapping[str, Any], run: str | None, version: int) -> None:
        """Let the server commit a version, which requests then demand.

        Args:
            init_info: The `url` of the store, and other options of the workers; see `SparserlInitInfo`.
            run: The id of the run.
            version: The version.

        Raises:
            SessionError: The server cannot commit it, and was told to begin anew in vain.
        """
        if dict(init_info) != self._init_info:
            self._is_following = False  # it follows another store, or otherwise
        self._init_info = dict(init_info)
        self._run = run
        self._version = version
        self._has_version = False
        self.session.headers[MIN_VERSION] = weight_version(run, version)
        self.ask(lambda: None)

    def ask(self, request: Callable[[], _Answer]) -> _Answer:
        """Send a request to the server, which must have the version; if it was restarted, it follows the run again.

        Args:
            request: Sends it with `session`, perhaps several times.

        Returns:
            What the request returned.
        """
        for attempts_left in reversed(range(_ATTEMPTS)):
            try:
                self._follow()
                return request()
            except (requests.RequestException, SessionError) as error:
                if not attempts_left:
                    raise
                _log.warning("%s is to follow the run again: %s", self.url, error)
            self._is_following = self._has_version = False
            self._wait_until_healthy()
        raise AssertionError

    def _follow(self) -> None:
        """Let the server follow the run and commit the version, if it is not known to have done so."""
        if self._has_version or self._version is None:
            return
        if not self._is_following:
            self._client.init_weight_transfer_engine(self._init_info)
            self._is_following = True
        self._updates.commit(self._version, self._run)
        self._has_version = True

    def _check_versions(self, response: requests.Response, **_: Any) -> None:
        """Refuse an answer that was made with another version than the one that was demanded."""
        demanded = response.request.headers.get(MIN_VERSION)
        if demanded is None or response.request.method != "POST":
            return
        start = response.headers.get(START_VERSION)
        end = response.headers.get(END_VERSION, start)
        if not start == end == demanded:
            raise WrongVersion(f"{self.url} had {start} and then {end}, but {demanded!s} is demanded")

    def _wait_until_healthy(self) -> None:
        deadline = time.monotonic() + self._timeout
        is_logged = False
        while True:
            try:
                if requests.get(f"{self.url}/health", timeout=10 * _POLL_SECONDS).ok:
                    return
                reason = "it is not healthy"
            except requests.RequestException as error:
                reason = str(error)
            if time.monotonic() > deadline:
                raise SessionError(f"{self.url} does not answer within {self._timeout:g} s: {reason}")
            if not is_logged:
                _log.warning("waiting up to %g s for %s: %s", self._timeout, self.url, reason)
                is_logged = True
            time.sleep(_POLL_SECONDS)

    def _read_config(self) -> dict[str, Any]:
        """The configuration of vLLM, in which there must be the backend."""
        answer = requests.get(f"{self.url}/server_info", params={"config_format": "json"}, timeout=60)
        if not answer.ok:
            raise SessionError(f"{self.url} does not let itself be controlled: start vLLM with VLLM_SERVER_DEV_MODE=1")
        config: dict[str, Any] = answer.json()["vllm_config"]
        backend = (config["weight_transfer_config"] or {}).get("backend")
        if backend != "sparserl":
            option = """--weight-transfer-config '{"backend": "sparserl"}'"""
            raise SessionError(f"{self.url} has the weight-transfer backend {backend}: start vLLM with {option}")
        return config

    def _require_middleware(self) -> None:
        """Demand what is no version, which the middleware refuses; without it, vLLM refuses an empty request."""
        answer = requests.post(f"{self.url}/v1/completions", json={}, headers={MIN_VERSION: "?"}, timeout=60)
        if START_VERSION not in answer.headers:
            option = f"--middleware {VersionMiddleware.__module__}.{VersionMiddleware.__name__}"
            raise SessionError(f"{self.url} does not tell its version: start vLLM with {option}")
