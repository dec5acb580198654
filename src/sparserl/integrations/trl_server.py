"""TRL, server mode: a trainer generates through a vLLM server, which follows the trainer's run by patches.

    sync_weights ──► publish ──► store ──► workers of the server commit
    generate ──► the server, which must have that version ──► completions, and the version that made them

TRL opens an NCCL group in the constructor of a trainer with `use_vllm=True`. So the trainer is made without, and
`use_server` then sets its `use_vllm` and its `vllm_generation`. Neither vLLM nor CUDA is needed where it trains.
"""

from __future__ import annotations

import atexit
import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from ..errors import SessionError
from ..session import Publisher, SyncReport
from ..transport.stores.base import Store
from .trl import default_source, open_publisher

try:
    import torch
    from transformers import TrainerCallback
    from trl.generation.vllm_client import VLLMClient
    from trl.generation.vllm_generation import VLLMGeneration

    from .vllm_server import FollowingServer
except ImportError as missing:
    raise ImportError(f"TRL 1.16 or newer is not installed: pip install 'sparserl[trl]' ({missing})") from missing

_log = logging.getLogger("sparserl.trl")


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
        url: The store, as for a `Publisher`. Trainer and server must reach it.
        source: A function that makes the source from the model and the optimizer. By default all weights are published
            in the dtype of the server; of a peft model, the base weights with the active adapters merged in.
        worker: Further options of the server's workers; see `SparserlInitInfo`.
        **options: Further options of the `Publisher`.

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
            self.vllm_client.server.commit(init_info, self.publisher.run, self.report.version)

    def _open(self) -> Publisher:
        """The publisher; there is an optimizer by now, whose changes are tracked if they are cast."""
        make_source = self._source or partial(default_source, cast=self._cast())
        return open_publisher(
            self._url, self.model, self._trainer.optimizer, self.processing_class, make_source, self._options
        )

    def _cast(self) -> torch.dtype | None:
        """The dtype of the server, if the trainer's weights have another; adapters are merged in that of their base."""
        if hasattr(self.model, "peft_config"):
            return None
        dtype = self.vllm_client.dtype
        parameters = self.model.parameters()
        return dtype if any(p.is_floating_point() and p.dtype != dtype for p in parameters) else None


class ServerClient(VLLMClient):
    """TRL's client of a vLLM server, whose answers are made with the version that was committed last and no other.

    Args:
        base_url: The address of the server.
        timeout: How many seconds to wait for it to start, and to start again.
    """

    def __init__(self, base_url: str, timeout: float) -> None:
        # TRL's own constructor demands that vLLM is installed, which only its NCCL group needs.
        self.server = FollowingServer(base_url, timeout)
        self.base_url = self.server.url
        self.session = self.server.session
        self.model = self._get(f"{self.base_url}/v1/models")["data"][0]["id"]
        mode = self.server.config["model_config"]["logprobs_mode"]
        if mode != "processed_logprobs":
            _log.warning("%s has --logprobs-mode %s: TRL expects processed_logprobs", self.base_url, mode)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the server's weights."""
        dtype: torch.dtype = getattr(torch, self.server.config["model_config"]["dtype"].removeprefix("torch."))
        return dtype

    def generate(self, *args: Any, **options: Any) -> dict[str, Any]:
        """As TRL's."""
        answer: dict[str, Any] = self.server.ask(partial(super().generate, *args, **options))
        return answer

    def chat(self, *args: Any, **options: Any) -> dict[str, Any]:
        """As TRL's."""
        answer: dict[str, Any] = self.server.ask(partial(super().chat, *args, **options))
        return answer


class _SyncAtEnd(TrainerCallback):
    """Publishes what the last optimizer step made, which nothing was generated with."""

    def __init__(self, generation: ServerGeneration) -> None:
        self._generation = generation

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        self._generation.sync_weights()
