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
import time
from collections.abc import AsyncIterator, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from ..errors import NotFound, PeerLost, SessionError, Unavailable
from ..session import Publisher, Subscriber, SyncReport
from ..session.anchors import zeros
from ..session.store.retention import read_head
from ..session.store.signing import PublicKeys
from ..sources import PublishedSource, open_checkpoint
from ..targets import FolderTarget, ModuleTarget, folder
from ..transport.stores.opening import open_store
from ..weights.dtypes import BY_NAME, Bits
from ..weights.memory import Weights
from ..weights.shards import Shards
from ..weights.table import TensorSpec, TensorTable
from ..weights.tensors import tensor_table

try:
    from verl.checkpoint_engine import CheckpointEngine, CheckpointEngineRegistry
except ImportError as missing:
    raise SessionError("verl is not installed, or too old: its checkpoint engines came with 0.7") from missing

_POLL_SECONDS = 0.1  # between checks of the folder that another worker writes

RunAndVersion = tuple[str, int]


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
        self.bucket_size = bucket_size
        self.is_master = is_master
        self._url = url
        self._store = open_store(url)
        self._dtype = None if rollout_dtype is None else getattr(torch, rollout_dtype)
        self._spread = spread
        self._folder = folder
        self._device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        self._timeout = timeout
        self._signing_key = signing_key
        self._trusted_keys = trusted_keys
        self._options = dict(options or {})
        self._host: dict[str, torch.Tensor] = {}
        self._source = _CapturedSource()
        self._publisher: Publisher | None = None
        self._subscriber: Subscriber | None = None
        self._target: HostTarget | FolderTarget
        self._before: RunAndVersion | None = None
        self._leads = True

    # -- calls of verl's manager around a sync ------------------------------------------------------------------------

    def prepare(self) -> dict[str, Any]:
        """Return the name of this node; on rank 0 of the trainer also the version at the store's head."""
        metadata: dict[str, Any] = {"node": socket.gethostname()}
        if self.is_master:
            metadata["before"] = self._head_version()
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
        self._before = None if before is None else (before[0], before[1])
        self._leads = leads
        if self._folder is not None and not leads and self._subscriber is not None:
            self._subscriber.close()  # another worker writes the folder from now on
            self._subscriber = None

    def finalize(self) -> None:
        """Do nothing: everything is needed by the next sync."""

    # -- the trainer's side --------------------------------------------------------------------------------------------

    async def send_weights(
        self, weights: Iterable[tuple[str, torch.Tensor]], global_steps: int | None = None
    ) -> dict[str, float]:
        """Publish the next version; on all ranks, since all take part in gathering a tensor. Returns metrics."""
        ranks = torch.distributed.get_world_size() if self._spread else 1
        rank = torch.distributed.get_rank() if self._spread else 0 if self.is_master else -1
        self._source.captured = self._capture(weights, rank, ranks)
        if rank < 0:
            return {}
        return await self._publish(self._source, torch.distributed.group.WORLD if self._spread else None, global_steps)

    async def _publish(self, source: PublishedSource, writers: Any, step: int | None) -> dict[str, float]:
        """Publish a version of the source, which is the same at every sync. Returns metrics, on rank 0."""
        if self._publisher is None:
            self._publisher = Publisher(
                self._store,
                source,
                signing_key=self._signing_key,
                writers=writers,
                timeout=self._timeout,
                **self._options,
            )
        report = await asyncio.to_thread(self._publisher.publish, step=step)
        return _metrics(report) if self.is_master else {}

    def _capture(self, weights: Iterable[tuple[str, torch.Tensor]], rank: int, ranks: int) -> Weights | Shards:
        """Copy the tensors that this rank publishes to host memory, one at a time, to need little GPU memory."""
        specs = []
        copies = {}
        load = [0] * ranks
        for name, tensor in weights:
            if self._dtype is not None and tensor.is_floating_point():
                tensor = tensor.to(self._dtype)
            owner = load.index(min(load))
            load[owner] += tensor.nbytes
            specs.append(TensorSpec(name, BY_NAME[str(tensor.dtype).removeprefix("torch.")], tuple(tensor.shape)))
            if owner == rank:
                copies[name] = self._copy(name, tensor)
        self._host = copies
        return Shards.of(TensorTable(specs), copies) if ranks > 1 else copies

    def _copy(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Copy a tensor into the memory of its last copy, if it fits."""
        copy = self._host.get(name)
        if copy is None or copy.shape != tensor.shape or copy.dtype != tensor.dtype:
            copy = torch.empty(tensor.shape, dtype=tensor.dtype)
        return copy.copy_(tensor.detach())

    # -- the rollout's side --------------------------------------------------------------------------------------------

    async def receive_weights(self, global_steps: int | None = None) -> AsyncIterator[tuple[str, torch.Tensor]]:  # noqa: ARG002
        """Wait for the next version, verify it, and yield all its tensors."""
        for name, data in (await asyncio.to_thread(self._receive)).items():
            assert isinstance(data, Bits)
            yield name, as_tensor(data).to(self._device)

    def _receive(self) -> Weights:
        """Wait until this worker, or the leader of its node, has the next version; return its weights."""
        if self._folder is not None and not self._leads:
            return self._read_folder(Path(self._folder))
        if self._subscriber is None:
            self._target = self._host_target() if self._folder is None else folder(self._folder, keep=1)
            self._subscriber = Subscriber(self._url, self._target, trusted_keys=self._trusted_keys)
        subscriber = self._subscriber

        def has_next() -> bool:
            return subscriber.version is not None and self._is_next((subscriber.run or "", subscriber.version))

        try:
            subscriber.follow(timeout=self._timeout, stop=has_next)
        except Unavailable as error:
            raise self._timeout_error() from error
        if not has_next():
            raise self._timeout_error()
        target = self._target
        return open_checkpoint(target.current) if isinstance(target, FolderTarget) else target.weights()

    def _host_target(self) -> HostTarget:
        return HostTarget()

    def _read_folder(self, path: Path) -> Weights:
        """Wait until the worker that leads on this node has the next version in the folder."""
        end = time.monotonic() + self._timeout
        target = folder(path)
        while time.monotonic() < end:
            if (record := target.remembered_version()) is not None and self._is_next((record[0], record[2])):
                return open_checkpoint(target.current.resolve())
            time.sleep(_POLL_SECONDS)
        raise self._timeout_error()

    def _is_next(self, version: RunAndVersion) -> bool:
        """Whether this version is at the store's head, and the head has changed since the sync began."""
        return version == self._head_version() != self._before

    def _head_version(self) -> RunAndVersion | None:
        """Run and version at the store's head; None if there is no head yet."""
        try:
            head, _ = read_head(self._store, self._trusted_keys)
        except NotFound:
            return None
        return head.run, head.version

    def _timeout_error(self) -> PeerLost:
        head = "no version" if self._before is None else f"version {self._before[1]} of run {self._before[0]}"
        return PeerLost(f"{self._url} was at {head}, and nothing newer came in {self._timeout:.0f} s")


class _CapturedSource:
    """A source with the weights that were captured last."""

    captured: Weights | Shards

    def weights(self) -> Weights | Shards:
        return self.captured


class HostTarget(ModuleTarget):
    """Weights in host memory, which are allocated when the tensors of the run are known."""

    def __init__(self) -> None:
        self._tensors: dict[str, Bits] = {}
        super().__init__(lambda: self._tensors)

    def attach(self, table: TensorTable) -> Weights:
        if tensor_table(self._tensors) != table:
            self._tensors = zeros(table)
        return super().attach(table)


def as_tensor(bits: Bits) -> torch.Tensor:
    """Bits as a torch tensor: the same memory, or a copy if it is read-only."""
    array = bits.array if bits.array.flags.writeable else bits.array.copy()
    return torch.from_numpy(array).view(getattr(torch, bits.dtype.name))


def _metrics(report: SyncReport) -> dict[str, float]:
    """The metrics of a sync that verl's trainer logs."""
    return {
        "sparserl/version": report.version,
        "sparserl/bytes": report.bytes,
        "sparserl/dense_bytes": report.dense_bytes,
        "sparserl/density": report.density,
        "sparserl/seconds": sum(report.seconds.values()),
    }
