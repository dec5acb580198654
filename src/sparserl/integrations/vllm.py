"""vLLM, worker side: the weight-transfer backend `sparserl`. See docs/how-to/integrations/vllm.md.

    vLLM loads the model, watched ──► where is each element of the checkpoint? ──► compare all bits ──► serve
    init_weight_transfer_engine ──► which version do all ranks have?      (meanwhile, on a thread: stage new versions)
    update_weights ──► stage on all ranks ──► commit on all, or on none

A worker whose weights cannot be updated in place does not start. vLLM makes these calls between two steps of the
engine, on all ranks at once.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch
from vllm.config import set_current_vllm_config
from vllm.distributed.parallel_state import get_world_group
from vllm.distributed.weight_transfer.base import WeightTransferEngine
from vllm.logger import init_logger

from ..errors import SessionError
from ..targets.engine import EngineTarget
from .ranks import EngineSubscriber, gather_over, make_subscriber, together
from .vllm_client import weight_version
from .vllm_drafter import EngineLayout, learn_layout, warn_of_missing
from .vllm_options import SparserlInitInfo, SparserlUpdateInfo
from .vllm_workers import close_update

logger = init_logger(__name__)
_WAIT_SECONDS = 1.0  # that the staging thread waits for a new version before it checks whether to end


class SparserlEngine(WeightTransferEngine[SparserlInitInfo, SparserlUpdateInfo]):
    """Follows a run on one worker of vLLM."""

    init_info_cls = SparserlInitInfo
    update_info_cls = SparserlUpdateInfo
    supports_draft_weight_update = False

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module) -> None:
        super().__init__(config, vllm_config, device, model)
        self._world = get_world_group()
        self._gather = gather_over(self._world)
        self._subscriber: EngineSubscriber | None = None
        self._lock = threading.Lock()  # the engine and the staging thread take turns with the subscriber
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        with set_current_vllm_config(vllm_config):
            self._layout = learn_layout(vllm_config, model)
        self.supports_draft_weight_update = bool(self._layout.drafted)
        pieces = self._layout.pieces
        logger.info("sparserl: %d pieces of %d checkpoint tensors", len(pieces), len({p.tensor for p in pieces}))

    @property
    def layout(self) -> EngineLayout:
        """Where the checkpoint is in the model, and in its drafter."""
        return self._layout

    @property
    def is_following(self) -> bool:
        """Whether a run is being followed, since `init_transfer_engine`."""
        return self._subscriber is not None

    @property
    def subscriber(self) -> EngineSubscriber:
        if self._subscriber is None:
            raise SessionError("call init_weight_transfer_engine first, with the url of a run")
        return self._subscriber

    @property
    def weight_version(self) -> str | None:
        """The run and the version that all ranks have, after each has read its bits; None if they are of no version."""
        subscriber = self._subscriber
        if subscriber is None or subscriber.version is None:
            return None
        return weight_version(subscriber.run, subscriber.version)

    def parse_init_info(self, init_dict: dict[str, Any]) -> SparserlInitInfo | Exception:
        """The options; an error is raised by `init_transfer_engine`, which vLLM calls next, on all ranks."""
        try:
            info: SparserlInitInfo = super().parse_init_info(init_dict)
        except Exception as error:  # noqa: BLE001  # a rank that raised here would leave the others waiting
            return error
        return info

    def init_transfer_engine(self, init_info: SparserlInitInfo | Exception) -> None:
        """Follow a run from now on. All bits of the weights are read, to identify their version.

        If the options cannot be used, the run that was followed is followed on.
        """
        close_update(self)
        with raise_on_last_rank(self.parallel_config):
            if isinstance(init_info, Exception):
                raise init_info
            self.shutdown()
            self._follow(init_info)

    def _follow(self, init_info: SparserlInitInfo) -> None:
        target = self._target()
        options = {"trusted_keys": init_info.trusted_keys, "run": init_info.run, "token": init_info.token}
        subscriber = make_subscriber(init_info.url, target, self._world, audit_every=init_info.audit_every, **options)
        subscriber.refresh()
        warn_of_missing(self._layout.drafted, target.local_weights.table.index)
        self._subscriber = subscriber
        if init_info.ahead:
            self._ended.clear()
            self._thread = threading.Thread(target=self._stage_ahead, name="sparserl-ahead", daemon=True)
            self._thread.start()

    def _target(self) -> EngineTarget:
        return EngineTarget(self._layout.pieces, self._layout.live, self._layout.tied)

    def start_weight_update(self) -> None:
        """Do nothing: versions are staged as they are published, or when they are committed."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Commit a version. If it raises, `weight_version` says which one the workers have."""
        try:
            self.receive_weights(self.parse_update_info(update_info))
        except Exception:
            close_update(self)  # on the ranks that do not raise, too
            with raise_on_last_rank(self.parallel_config):
                raise

    def receive_weights(self, update_info: SparserlUpdateInfo) -> None:
        subscriber = together(lambda: self.subscriber, self._gather)  # none waits for a rank that has none
        with self._lock:
            synchronize(self.device)  # steps that have begun still read the weights
            if update_info.step is None:
                report = subscriber.commit_version(update_info.version, update_info.run)
            else:
                report = subscriber.commit_step(update_info.step, update_info.timeout)
            synchronize(self.device)
            if update_info.audit:
                subscriber.audit()
        logger.info("sparserl: %s", report or f"the engine has version {subscriber.version} already")

    def finish_weight_update(self) -> None:
        """Do nothing: a commit has written the weights in place."""

    def shutdown(self) -> None:
        """Stop following the run; the weights stay as they are."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._subscriber is not None:
            self._subscriber.close()
            self._subscriber = None

    def _stage_ahead(self) -> None:
        subscriber = self.subscriber
        while not self._ended.is_set():
            with self._lock:
                subscriber.stage_newest()
            subscriber.wait(_WAIT_SECONDS)


@contextlib.contextmanager
def raise_on_last_rank(parallel_config: Any) -> Iterator[None]:
    """Raise an error that all ranks have on the last rank only.

    vLLM reads the answers of workers in order up to the first failure, and takes those after it for answers to its
    next call (vllm-project/vllm#57846).
    """
    ranks = parallel_config.world_size
    try:
        yield
    except Exception as error:
        if get_world_group().rank_in_group % ranks == ranks - 1:
            raise
        logger.warning("sparserl: %s: %s", type(error).__name__, error)


def synchronize(device: torch.device) -> None:
    """Wait for all work on a GPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
