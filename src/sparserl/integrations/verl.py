"""verl: a checkpoint engine that sends only the bits that changed, through a store.

    get_per_tensor_param() ──► host copy ──► Publisher ──► store ──► Subscriber ──► named tensors ──► server adapter
    └─ send_weights, on the trainer's ranks                          └─ receive_weights, beside every rollout GPU

verl imports this module if `checkpoint_engine.custom_backend_module` names it, and finds the backend "sparserl"; in
`verl_delta` is one that gathers nothing and has engines load only what changed.
The manager of verl calls, at every sync: `prepare` on all workers, `build_topology`, `init_process_group` on all, then
`send_weights` and `receive_weights` at the same time, then `finalize`. Both sides must agree which version to wait for:
rank 0 reads the store's head in `prepare`, and rollouts wait until the head has changed.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Iterable, Mapping
from typing import Any

import torch

from ..errors import SessionError
from ..session import SyncReport
from ..session.options import require_timeout
from ..session.store.signing import PublicKeys, public_keys
from ..transport.stores.opening import open_store
from ..weights.memory import Weights
from .checkpoint_engine import (
    AwaitedVersion,
    RunAndVersion,
    WeightSender,
    WholeReceiver,
    as_tensor,
    head_version,
    publisher_options,
    rollout_dtype_named,
)

try:
    from verl.checkpoint_engine import CheckpointEngine, CheckpointEngineRegistry
except ImportError as missing:
    raise SessionError("verl is not installed, or too old: its checkpoint engines came with 0.7") from missing


@CheckpointEngineRegistry.register("sparserl")
class SparserlEngine(CheckpointEngine):  # type: ignore[misc]
    """Sends weights on verl's trainer and receives them on its rollouts; verl makes one object in every worker.

    Args:
        bucket_size: Passed by verl to every backend; not used here.
        is_master: Passed by verl to every backend: whether this is rank 0 of the trainer.
        url: The store; all workers must be able to read it, and the trainer to write to it.
        rollout_dtype: Floating-point weights are rounded to it before they are compared; None to send them as they are.
            An RL step changes nearly all float32 elements, and few of the rounded ones.
        spread: True if every rank of the trainer is to publish a share of the tensors; otherwise rank 0 publishes all.
            The trainer's backend must then yield whole tensors on every rank, as FSDP's does.
        folder: A folder of the rollout's node in which one worker keeps a checkpoint for all workers of the node.
            Without it every worker has a copy of the weights in host memory.
        device: Where rollouts get the weights; by default the GPU of the worker, if there is one.
        timeout: Seconds to wait for the other side.
        signing_key: The secret key with which the trainer signs.
        trusted_keys: The public keys that rollouts trust, one or several.
        options: Further options of the `Publisher`.
    """

    def __init__(
        self,
        bucket_size: int,
        is_master: bool = False,
        *,
        url: str,
        rollout_dtype: str | None = "bfloat16",
        spread: bool = False,
        folder: str | None = None,
        device: str | None = None,
        timeout: float = 600.0,
        signing_key: str | None = None,
        trusted_keys: PublicKeys | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        require_timeout("timeout", timeout)
        public_keys(trusted_keys)
        self.bucket_size = bucket_size
        self.is_master = is_master
        self._url = url
        self._store = open_store(url)
        self._dtype = rollout_dtype_named(rollout_dtype)
        self._spread = spread
        self._device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        self._timeout = timeout
        self._trusted_keys = trusted_keys
        self._options = publisher_options(options) | {"signing_key": signing_key, "timeout": timeout}
        self._sender: WeightSender | None = None
        self._receiver = WholeReceiver(url, folder, trusted_keys)
        self._before: RunAndVersion | None = None

    # -- calls of verl's manager around a sync ------------------------------------------------------------------------

    def prepare(self) -> dict[str, Any]:
        """Return the name of this node; on rank 0 of the trainer also the version at the store's head."""
        metadata: dict[str, Any] = {"node": socket.gethostname()}
        if self.is_master:
            metadata["before"] = head_version(self._store, self._trusted_keys)
        return metadata

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Send all workers the version before this sync; the first rollout of each node leads."""
        before = metadata[0]["before"]
        nodes = [worker["node"] for worker in metadata[actor_wg_world_size:]]
        leads = [node not in nodes[:i] for i, node in enumerate(nodes)]
        trainer = {"before": [before] * actor_wg_world_size, "leads": [True] * actor_wg_world_size}
        return trainer, {"before": [before] * rollout_world_size, "leads": leads}

    def init_process_group(self, before: RunAndVersion | None, leads: bool) -> None:
        """Remember what `build_topology` returned; no group is made."""
        self._before = before
        self._receiver.begin(leads=leads)

    def finalize(self) -> None:
        """Do nothing: everything is needed by the next sync."""

    # -- the trainer's side --------------------------------------------------------------------------------------------

    async def send_weights(
        self, weights: Iterable[tuple[str, torch.Tensor]], global_steps: int | None = None
    ) -> dict[str, float]:
        """Publish the next version; on all ranks, since all take part in gathering a tensor. Returns metrics."""
        if self._sender is None:
            rank = torch.distributed.get_rank() if self._spread else 0 if self.is_master else -1
            self._sender = WeightSender(
                self._store, rank, dtype=self._dtype, spread=self._spread, options=self._options
            )
        self._sender.capture(weights)
        return self._metrics(await asyncio.to_thread(self._sender.publish, step=global_steps))

    def _metrics(self, report: SyncReport | None) -> dict[str, float]:
        """The metrics of a sync that verl's trainer logs; on rank 0."""
        if report is None or not self.is_master:
            return {}
        return {
            "sparserl/version": report.version,
            "sparserl/bytes": report.bytes,
            "sparserl/dense_bytes": report.dense_bytes,
            "sparserl/density": report.density,
            "sparserl/seconds": sum(report.seconds.values()),
        }

    # -- the rollout's side --------------------------------------------------------------------------------------------

    async def receive_weights(self, global_steps: int | None = None) -> AsyncIterator[tuple[str, torch.Tensor]]:  # noqa: ARG002
        """Wait for the next version, verify it, and yield all its tensors."""
        for name, data in (await asyncio.to_thread(self._receive)).items():
            yield name, as_tensor(data).to(self._device)

    def _receive(self) -> Weights:
        """Wait until this worker, or the leader of its node, has the next version; return its weights."""
        return self._receiver.receive(AwaitedVersion(self._store, self._before, self._timeout, self._trusted_keys))
