"""TRL, server mode: a trainer generates through a vLLM server, which follows the trainer's run by patches.

    sync_weights ──► publish ──► store ──► workers of the server commit
    generate ──► the server, which must have that version ──► completions, and the version that made them

TRL opens an NCCL group in the constructor of a trainer with `use_vllm=True`. So the trainer is made without, and
`use_server` then sets its `use_vllm` and its `vllm_generation`. Neither vLLM nor CUDA is needed where it trains.
"""

from __future__ import annotations

import atexit
import logging
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar

from ..errors import SessionError, WrongVersion
from ..session import Publisher, SyncReport
from ..transport.stores.base import Store
from .trl import default_source, open_publisher
from .vllm_client import HTTPClient, WeightUpdates, weight_version
from .vllm_versions import END_VERSION, MIN_VERSION, START_VERSION, VersionMiddleware

try:
    import requests
    import torch
    from requests.adapters import HTTPAdapter
    from transformers import TrainerCallback
    from trl.generation.vllm_client import VLLMClient
    from trl.generation.vllm_generation import VLLMGeneration
    from urllib3.util.retry import Retry
except ImportError as missing:
    raise ImportError(f"TRL 1.16 or newer is not installed: pip install 'sparserl[trl]' ({missing})") from missing

_log = logging.getLogger("sparserl.trl")
_ATTEMPTS = 3  # a server may be restarted while it is asked again
_CONNECTIONS = 64  # as many as TRL opens at a time
_POLL_SECONDS = 0.5
_Answer = TypeVar("_Answer")


def use_server(
    trainer: Any,
    url: str | Store,
    *,
    source: Callable[[Any, Any], Any] | None = None,
    worker: Mapping[str, Any] | None = None,
    **options: Any,
) -> ServerGeneration:
    """Let a trainer generate through a vLLM server that follows it by patches.

    >>> trainer = GRPOTrainer(model, ..., args=GRPOConfig(vllm_server_base_url=...))               # doctest: +SKIP
    >>> use_server(trainer, "s3://bucket/run")                                                     # doctest: +SKIP
    >>> trainer.train()                                                                            # doctest: +SKIP

    Args:
        trainer: A `GRPOTrainer` or `RLOOTrainer` that was made with `use_vllm=False`. The `vllm_server_*` settings and
            those of the generation are taken from it.
        url: The store, as for a `Publisher`, which also gets all other options. Trainer and server must reach it.
        source: A function that makes the source from the model and the optimizer. By default all weights are published
            in the dtype of the server; of a peft model, the base weights with the active adapters merged in.
        worker: Further options of the server's workers; see `SparserlInitInfo`.

    Returns:
        What is now the trainer's `vllm_generation`.

    Raises:
        SessionError: The trainer already uses vLLM or cannot, the server cannot be reached, or it does not follow runs.
    """
    if getattr(trainer, "use_vllm", None) is not False:
        raise SessionError(
            "make the trainer with use_vllm=False: TRL would open its NCCL group with the server"
            if getattr(trainer, "use_vllm", False)
            else f"{type(trainer).__name__} has no server mode"
        )
    if options.get("writers") is not None and source is None:
        raise SessionError("writers publish their own parts: give the source of these, see sparserl.sources.fsdp")
    generation = ServerGeneration(trainer, url, source, worker or {}, options)
    trainer.vllm_generation = generation
    trainer.vllm_mode = generation.mode
    trainer.use_vllm = True
    trainer._last_loaded_step = -1  # noqa: SLF001  # TRL compares it with the step, to sync once a step
    trainer.add_callback(_SyncAtEnd(generation))
    return generation


class ServerGeneration(VLLMGeneration):
    """TRL's generation through a server, with patches in the place of NCCL. `use_server` makes it.

    Attributes:
        publisher: The publisher of the run; None before the first sync, and on ranks that do not publish.
        report: What the last sync published.
    """

    def __init__(
        self,
        trainer: Any,
        url: str | Store,
        source: Callable[[Any, Any], Any] | None,
        worker: Mapping[str, Any],
        options: Mapping[str, Any],
    ) -> None:
        self._trainer = trainer
        self._url = url
        self._source = source
        self._worker = worker
        self._options = options
        self.publisher: Publisher | None = None
        self.report: SyncReport | None = None
        args = trainer.args
        super().__init__(
            trainer.model,
            trainer.accelerator,
            trainer.processing_class,
            mode="server",
            structured_outputs_regex=args.vllm_structured_outputs_regex,
            server_base_url=args.vllm_server_base_url,
            server_host=args.vllm_server_host,
            server_port=args.vllm_server_port,
            server_timeout=args.vllm_server_timeout,
            repetition_penalty=trainer.repetition_penalty,
            temperature=trainer.temperature,
            top_p=trainer.top_p,
            top_k=trainer.top_k,
            min_p=trainer.min_p,
            max_completion_length=trainer.max_completion_length,
            logprobs=0,
            generation_kwargs=args.generation_kwargs,
        )

    def _init_vllm(self) -> None:
        """Reach the server, and check that it follows runs; TRL's own opens an NCCL group here."""
        if self.accelerator.is_main_process:
            base_url = self.server_base_url or f"http://{self.server_host}:{self.server_port}"
            self.vllm_client = ServerClient(base_url, self.server_timeout)
            self.vllm_client.require_backend()
        self.accelerator.wait_for_everyone()

    def sync_weights(self) -> None:
        """Publish the weights as they are now, and let the server commit them. On all ranks of the trainer."""
        is_main = self.accelerator.is_main_process
        if self.publisher is None and (is_main or self._options.get("writers") is not None):
            self.publisher = self._open()
            atexit.register(self.publisher.close)
        if self.publisher is None:
            return
        self.report = self.publisher.publish(step=self._trainer.state.global_step)
        if is_main:
            init_info = {"url": self.publisher.store.url, **self._worker}
            self.vllm_client.commit(init_info, self.publisher.run, self.report.version)

    def _open(self) -> Publisher:
        """The publisher; there is an optimizer by now, whose changes are tracked if they are cast."""
        make_source = self._source or partial(default_source, cast=self._cast())
        return open_publisher(
            self._url, self.model, self._trainer.optimizer, self.processing_class, make_source, self._options
        )

    def _cast(self) -> torch.dtype | None:
        """The dtype of the server, if the trainer's weights have another."""
        dtype = self.vllm_client.dtype
        parameters = self.model.parameters()
        return dtype if any(p.is_floating_point() and p.dtype != dtype for p in parameters) else None


class ServerClient(VLLMClient):
    """TRL's client of a vLLM server, which demands versions and lets the server follow a run.

    A server that was restarted follows the run again before it generates: it is waited for.

    Args:
        base_url: The address of the server.
        timeout: How many seconds to wait for it to start.
    """

    def __init__(self, base_url: str, timeout: float) -> None:
        # TRL's own constructor demands that vLLM is installed, which only its NCCL group needs.
        self.base_url = base_url.rstrip("/")
        self.session = requests.Session()
        self.session.hooks["response"].append(self._check_versions)
        retries = Retry(total=3, connect=0, read=0, status_forcelist=[502, 503], allowed_methods=None, backoff_factor=2)
        for scheme in ("http://", "https://"):
            self.session.mount(scheme, HTTPAdapter(max_retries=retries, pool_maxsize=_CONNECTIONS))
        self._timeout = timeout
        self._control = HTTPClient(self.base_url)
        self._updates = WeightUpdates(self._control)
        self._init_info: dict[str, Any] = {}
        self._run: str | None = None
        self._version: int | None = None
        self._is_following = False  # whether the server is known to follow the run
        self._has_version = False  # whether it is known to have committed the version
        self._wait_until_healthy()
        self.model = self._get(f"{self.base_url}/v1/models")["data"][0]["id"]
        self._config = self.get_server_info()

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the server's weights."""
        return getattr(torch, self._config["model_config"]["dtype"].removeprefix("torch."))

    def require_backend(self) -> None:
        """Raise unless the server was started with the weight-transfer backend and the middleware of sparserl."""
        backend = (self._config["weight_transfer_config"] or {}).get("backend")
        if backend != "sparserl":
            raise SessionError(
                f"{self.base_url} has the weight-transfer backend {backend}: start vLLM with --weight-transfer-config "
                """'{"backend": "sparserl"}'"""
            )
        probe = requests.post(f"{self.base_url}/v1/completions", json={}, headers={MIN_VERSION: "?"}, timeout=60)
        if START_VERSION not in probe.headers:
            middleware = f"{VersionMiddleware.__module__}.{VersionMiddleware.__name__}"
            raise SessionError(f"{self.base_url} does not tell its version: start vLLM with --middleware {middleware}")
        mode = self._config["model_config"]["logprobs_mode"]
        if mode != "processed_logprobs":
            _log.warning("%s has --logprobs-mode %s: TRL expects processed_logprobs", self.base_url, mode)

    def commit(self, init_info: Mapping[str, Any], run: str | None, version: int) -> None:
        """Let the server commit a version, which generations then demand."""
        self._init_info = dict(init_info)
        self._run = run
        self._version = version
        self._has_version = False
        self.session.headers[MIN_VERSION] = weight_version(run, version)
        self._until_it_follows(lambda: None)

    def generate(self, *args: Any, **options: Any) -> dict[str, Any]:
        """As TRL's, with the version that was committed last and no other."""
        return self._until_it_follows(partial(super().generate, *args, **options))

    def chat(self, *args: Any, **options: Any) -> dict[str, Any]:
        """As TRL's, with the version that was committed last and no other."""
        return self._until_it_follows(partial(super().chat, *args, **options))

    def _until_it_follows(self, ask: Callable[[], _Answer]) -> _Answer:
        """Ask the server, which must have the version; if it was restarted, let it follow the run again."""
        for attempts_left in reversed(range(_ATTEMPTS)):
            try:
                self._follow()
                return ask()
            except (requests.RequestException, SessionError) as error:
                if not attempts_left:
                    raise
                _log.warning("%s is to follow the run again: %s", self.base_url, error)
            self._is_following = self._has_version = False
            self._wait_until_healthy()
        raise AssertionError

    def _follow(self) -> None:
        """Let the server follow the run and commit the version, if it is not known to have done so."""
        if self._has_version or self._version is None:
            return
        if not self._is_following:
            self._control.init_weight_transfer_engine(self._init_info)
            self._is_following = True
        self._updates.commit(self._version, self._run)
        self._has_version = True

    def _check_versions(self, response: requests.Response, **_: Any) -> None:
        """Refuse an answer that was made with another version than the one that was demanded."""
        demanded = response.request.headers.get(MIN_VERSION)
        if demanded is None:
            return
        start = response.headers.get(START_VERSION)
        end = response.headers.get(END_VERSION, start)
        if not start == end == demanded:
            raise WrongVersion(f"{self.base_url} had {start} and then {end}, but {demanded} is demanded")

    def _wait_until_healthy(self) -> None:
        deadline = time.monotonic() + self._timeout
        while True:
            try:
                if requests.get(f"{self.base_url}/health", timeout=_POLL_SECONDS * 10).ok:
                    return
                reason = "it is not healthy"
            except requests.RequestException as error:
                reason = str(error)
            if time.monotonic() > deadline:
                raise SessionError(f"{self.base_url} does not answer within {self._timeout:g} s: {reason}")
            time.sleep(_POLL_SECONDS)


class _SyncAtEnd(TrainerCallback):
    """Publishes what the last optimizer step made, which nothing was generated with."""

    def __init__(self, generation: ServerGeneration) -> None:
        self._generation = generation

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        self._generation.sync_weights()
