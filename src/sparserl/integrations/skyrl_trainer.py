"""SkyRL, on the trainer's ranks: the sender. `skyrl` imports this where SkyRL has loaded its own senders, and vLLM.

Worker.init_weight_sync_state ──► build_trainer_engine ──► publish; servers follow the run
Worker.broadcast_to_inference_engines ──► publish ──► commit ──► reset prefix caches      (SkyRL pauses around it)
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from skyrl.backends.skyrl_train.weight_sync import weight_senders
from vllm.distributed.weight_transfer.base import WeightSource
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

from ..errors import SessionError
from .checkpoint_engine import host_copy
from .skyrl import BACKEND
from .vllm_client import HTTPClient
from .vllm_trainer import SparserlTrainer, SparserlTrainerInitInfo, metadata_of

_log = logging.getLogger("sparserl.skyrl")


@dataclass
class SkyrlTrainerInitInfo(SparserlTrainerInitInfo):
    """Where to publish, and the servers whose prefix caches are reset."""

    backend: ClassVar[str] = "skyrl_sparserl"

    server_urls: Sequence[str] = ()


class SkyrlTrainer(weight_senders.SkyrlTrainerCapabilities, SparserlTrainer):
    """The sender of one rank. All ranks gather the weights; the first one publishes them, and drives the servers."""

    init_info_cls = SkyrlTrainerInitInfo
    skyrl_handles_prefix_cache_reset = True

    def __init__(self, *, client: Any, source: WeightSource, init_info: SkyrlTrainerInitInfo) -> None:
        self._copies: dict[str, torch.Tensor] = {}
        super().__init__(client=client, source=source, init_info=init_info)
        self._servers = [HTTPClient(url) for url in init_info.server_urls]
        self._resets_prefix_cache = False
        self._draft_source: WeightSource | None = None

    def skyrl_set_reset_prefix_cache(self, reset: bool) -> None:
        """SkyRL says before each sync whether caches are to be reset."""
        self._resets_prefix_cache = reset

    @property
    def skyrl_draft_source(self) -> WeightSource | None:
        """The drafter's weights. They are among the policy's, which workers write to both in one commit."""
        return self._draft_source

    @skyrl_draft_source.setter
    def skyrl_draft_source(self, draft_source: WeightSource | None) -> None:
        if draft_source is not None:
            names = {parameter.name for parameter in metadata_of(self.source)}
            missing = sorted({parameter.name for parameter in metadata_of(draft_source)} - names)
            if missing:
                raise SessionError(
                    f"the policy does not have {len(missing)} tensors of the drafter, {missing[0]!r} among them: "
                    "the drafter would stay as it is; leave speculative_config out, or use another backend"
                )
        self._draft_source = draft_source

    def capture(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """A copy in host memory: gathered weights need not fit on a GPU all at once."""
        self._copies[name] = host_copy(tensor, self._copies.get(name))
        return self._copies[name]

    def commit(self, version: int, *, audit: bool = False) -> None:
        """Let all servers commit a version; one that was restarted follows the run again. Then reset caches."""
        try:
            super().commit(version, audit=audit)
        except RuntimeError as error:  # an answer that is an error; a server that cannot be reached is none
            _log.warning("sparserl: all servers are to follow the run again: %s", error)
            self.follow()
            super().commit(version, audit=audit)
        if self._resets_prefix_cache:
            for server in self._servers:  # SkyRL's own call does not reach running requests, nor notice a failure
                server.reset_caches()


_build_sender_init_info: Callable[..., Any] = weight_senders._build_sender_init_info  # noqa: SLF001


def build_sender_init_info(
    *, backend: str, ie_cfg: Any, rank: int, server_urls: Sequence[str], **others: Any
) -> tuple[Any, Any]:
    """As SkyRL's: what a sender is made from, and how servers differ (they do not)."""
    if backend != BACKEND:
        info: tuple[Any, Any] = _build_sender_init_info(
            backend=backend, ie_cfg=ie_cfg, rank=rank, server_urls=server_urls, **others
        )
        return info
    options = ie_cfg.sparserl
    return (
        SkyrlTrainerInitInfo(
            rank=rank,
            url=options.url,
            profile=options.profile,
            publisher=dict(options.publisher),
            worker=dict(options.worker),
            server_urls=tuple(server_urls),
        ),
        None,
    )


WeightTransferTrainerFactory.register_engine(SkyrlTrainerInitInfo.backend, SkyrlTrainer)
weight_senders._build_sender_init_info = build_sender_init_info  # noqa: SLF001
