"""NeMo-RL, inside a worker of vLLM: versions are committed into the live weights, in place.

    first sync:   a whole version ──► vLLM loads it, watched ──► where is each element? ──► all bits compared
    later syncs:  patches ──► staged on all ranks ──► committed on all, or on none

NeMo-RL starts vLLM with made-up weights and has the policy send the first ones, so that there is no checkpoint load to
watch: the first version takes its place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from vllm.config import set_current_vllm_config
from vllm.distributed.parallel_state import get_world_group
from vllm.logger import init_logger

from ..errors import SessionError, UnsupportedTensor
from ..session.store.signing import PublicKeys
from ..targets.engine import EngineTarget
from ..targets.pieces import parts_of
from .checkpoint_engine import AwaitedVersion
from .ranks import EngineSubscriber, gather_over, make_subscriber, on_all_ranks, together
from .vllm import raise_on_last_rank, synchronize
from .vllm_layout import LoadedModel, tied_names, without_warnings
from .vllm_workers import workers

logger = init_logger(__name__)
_ALTERNATIVE = "Set in_place: false, to have NeMo-RL load all tensors at every sync"


def find_worker(engine: Any) -> Any:
    """The worker of vLLM that has a checkpoint engine. NeMo-RL makes the engine without telling it the worker."""
    for worker in workers:
        if getattr(worker, "checkpoint_engine", None) is engine:
            return worker
    raise SessionError(
        "no worker of vLLM in this process has this checkpoint engine, or vLLM has not loaded the plugin sparserl "
        f"(VLLM_PLUGINS). {_ALTERNATIVE}"
    )


class LiveReceiver:
    """Commits versions into the live weights of one worker of vLLM.

    Args:
        worker: The worker.
        url: The store.
        trusted_keys: Whose versions are trusted; None for all.
        audit_every: After so many commits all bits are read; None for never.

    Raises:
        SessionError: The worker also has weights that cannot be followed.
    """

    def __init__(self, worker: Any, url: str, *, trusted_keys: PublicKeys | None, audit_every: int | None) -> None:
        if worker.vllm_config.speculative_config is not None:
            raise SessionError(f"weights of a drafter cannot be written in place with NeMo-RL. {_ALTERNATIVE}")
        self._worker = worker
        self._url = url
        self._options = {"trusted_keys": trusted_keys, "audit_every": audit_every}
        self._world = get_world_group()
        self._gather = gather_over(self._world)
        self._subscriber: EngineSubscriber | None = None

    @property
    def is_following(self) -> bool:
        """Whether it knows where a version is in the model, so that patches are enough."""
        return self._subscriber is not None

    def receive(self, awaited: AwaitedVersion, receive_whole: Callable[[], dict[str, torch.Tensor]]) -> None:
        """On all ranks at once: wait for a version and commit it. If this raises later than at the first sync, the
        weights are what they were.

        Args:
            awaited: The version.
            receive_whole: Receives all its tensors; called where the layout is not known yet.

        Raises:
            PeerLost: The version did not come in time.
            UnsupportedTensor: Changes cannot be written into a tensor of the model.
        """
        with raise_on_last_rank(self._worker.vllm_config.parallel_config):
            self._receive(awaited, receive_whole)

    def _receive(self, awaited: AwaitedVersion, receive_whole: Callable[[], dict[str, torch.Tensor]]) -> None:
        versions = on_all_ranks(awaited.wait, self._gather)
        if any(self._gather(self._subscriber is None)):
            self._begin(receive_whole)
        subscriber = self._subscriber
        assert subscriber is not None
        synchronize(self._worker.device)  # steps that have begun still read the weights
        report = subscriber.commit_version(versions[0][1])
        synchronize(self._worker.device)
        logger.info("sparserl: %s", report or f"the engine has version {subscriber.version}")

    def _begin(self, receive_whole: Callable[[], dict[str, torch.Tensor]]) -> None:
        """On all ranks at once: load a whole version, find out where it is in the model, and follow its run."""
        if self._subscriber is not None:
            self._subscriber.close()
            self._subscriber = None
        target = together(lambda: self._learn(receive_whole()), self._gather)
        self._subscriber = make_subscriber(self._url, target, self._world, **self._options)

    def _learn(self, tensors: dict[str, torch.Tensor]) -> EngineTarget:
        """Load a version, and find out where it is in the model; its weights are then those of the version."""
        config = self._worker.vllm_config
        model = self._worker.get_model()
        tied = tied_names(config.model_config, tensors)
        untied = {name: tensor for name, tensor in tensors.items() if name not in tied}
        loaded = LoadedModel(model, config.model_config, untied.items)
        with set_current_vllm_config(config), without_warnings():
            loaded.load(loaded.weights())
            try:
                pieces = loaded.learn_pieces()
            except UnsupportedTensor as error:
                loaded.load(loaded.weights())  # in the place of made-up numbers
                raise UnsupportedTensor(f"{error}. {_ALTERNATIVE}") from error
        return EngineTarget(pieces, lambda: parts_of(model), tied)
