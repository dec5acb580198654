"""verl: a checkpoint engine that sends only the bits that changed, through a store.

    get_per_tensor_param() ──► host copy ──► Publisher ──► store ──► Subscriber ──► named tensors ──► server adapter
    └─ send_weights, on the trainer's ranks                          └─ receive_weights, beside every rollout GPU

verl imports this module where `checkpoint_engine.custom_backend_module` names it, and finds the backend "sparserl".
The manager of verl calls, at every sync: `prepare` on all workers, `build_topology`, `init_process_group` on all, then
`send_weights` and `receive_weights` at the same time, then `finalize`. What the two sides must agree on is which
version to wait for: rank 0 says in `prepare` where the store's head is, and rollouts wait until it is elsewhere.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from ..errors import NotFound, PeerLost, SessionError
from ..session import Publisher, Subscriber, SyncReport
from ..session.anchors import zeros
from ..session.store.retention import read_head
from ..sources import open_checkpoint
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

_LOOK = 0.1  # seconds between looks at the folder that another worker writes

Place = tuple[str, int] | None  # run and version


@CheckpointEngineRegistry.register("sparserl")
class SparserlEngine(CheckpointEngine):  # type: ignore[misc]
    """One end of the way from verl's trainer to its rollouts; verl makes one in every worker.

    bucket_size, is_master: what verl says to every backend. Rank 0 of the trainer is the master.
    url: the store; all workers can reach it, the trainer can write to it.
    rollout_dtype: floating-point weights are rounded to it before they are compared; None to send them as they are.
        An RL step moves nearly every float32 number, and few of the rounded ones.
    spread: True to have every rank of the trainer publish its share of the tensors, instead of rank 0 all of them. The
        trainer's backend must then yield whole tensors on every rank, as FSDP's does.
    folder: a folder of the rollout's node in which one worker keeps a checkpoint for all workers of the node. Without
        it every worker has a copy of the weights in host memory.
    device: where rollouts get the weights; by default the GPU of the worker, if there is one.
    timeout: seconds to wait for the other side.
    key: a secret key to sign with (trainer), `public_key`: the only one to be believed (rollouts).
    options: more for the `Publisher`.
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
        key: str | None = None,
        public_key: str | None = None,
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
        self._key = key
        self._public = public_key
        self._options = dict(options or {})
        self._host: dict[str, torch.Tensor] = {}
        self._source = _Sent()
        self._publisher: Publisher | None = None
        self._subscriber: Subscriber | None = None
        self._target: _Host | FolderTarget
        self._before: Place = None
        self._leads = True

    # -- what verl's manager calls around a sync -----------------------------------------------------------------------

    def prepare(self) -> dict[str, Any]:
        """Say which machine this is; rank 0 of the trainer also says which version the store is at."""
        said: dict[str, Any] = {"node": socket.gethostname()}
        if self.is_master:
            said["before"] = self._place()
        return said

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Tell all workers which version is the one before; on each node the first rollout leads."""
        before = metadata[0]["before"]
        nodes = [said["node"] for said in metadata[actor_wg_world_size:]]
        leads = [node not in nodes[:i] for i, node in enumerate(nodes)]
        trainer = {"before": [before] * actor_wg_world_size, "leads": [True] * actor_wg_world_size}
        return trainer, {"before": [before] * rollout_world_size, "leads": leads}

    def init_process_group(self, before: Place, leads: bool) -> None:
        """Remember what `build_topology` has found; no group is made."""
        self._before = None if before is None else (before[0], before[1])
        self._leads = leads
        if self._folder is not None and not leads and self._subscriber is not None:
            self._subscriber.close()  # another worker writes the folder from now on
            self._subscriber = None

    def finalize(self) -> None:
        """Nothing is held beyond what the next sync needs."""

    # -- the trainer's side --------------------------------------------------------------------------------------------

    async def send_weights(
        self, weights: Iterable[tuple[str, torch.Tensor]], global_steps: int | None = None
    ) -> dict[str, float]:
        """Publish the next version; on all ranks, since to yield a tensor takes all of them. Returns metrics."""
        ranks = torch.distributed.get_world_size() if self._spread else 1
        rank = torch.distributed.get_rank() if self._spread else 0 if self.is_master else -1
        self._source.now = self._captured(weights, rank, ranks)
        if rank < 0:
            return {}
        if self._publisher is None:
            group = torch.distributed.group.WORLD if self._spread else None
            self._publisher = Publisher(
                self._store, self._source, signing_key=self._key, writers=group, timeout=self._timeout, **self._options
            )
        report = await asyncio.to_thread(self._publisher.publish, step=global_steps if self._spread else None)
        return {} if report is None or not self.is_master else _metrics(report)

    def _captured(self, weights: Iterable[tuple[str, torch.Tensor]], rank: int, ranks: int) -> Weights | Shards:
        """Copy to host memory what this rank publishes, one tensor at a time; the GPU needs room for no more."""
        specs = []
        held = {}
        load = [0] * ranks
        for name, tensor in weights:
            if self._dtype is not None and tensor.is_floating_point():
                tensor = tensor.to(self._dtype)
            owner = load.index(min(load))
            load[owner] += tensor.nbytes
            specs.append(TensorSpec(name, BY_NAME[str(tensor.dtype).removeprefix("torch.")], tuple(tensor.shape)))
            if owner == rank:
                held[name] = self._copied(name, tensor)
        self._host = held
        return Shards.of(TensorTable(specs), held) if ranks > 1 else held

    def _copied(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        mine = self._host.get(name)
        if mine is None or mine.shape != tensor.shape or mine.dtype != tensor.dtype:
            mine = torch.empty(tensor.shape, dtype=tensor.dtype)
        return mine.copy_(tensor.detach())

    # -- the rollout's side --------------------------------------------------------------------------------------------

    async def receive_weights(self, global_steps: int | None = None) -> AsyncIterator[tuple[str, torch.Tensor]]:  # noqa: ARG002
        """Wait for the next version, verify it, and yield all its tensors."""
        for name, data in (await asyncio.to_thread(self._received)).items():
            assert isinstance(data, Bits)
            yield name, _tensor(data).to(self._device)

    def _received(self) -> Weights:
        if self._folder is not None and not self._leads:
            return self._read_folder(Path(self._folder))
        if self._subscriber is None:
            self._target = _Host() if self._folder is None else folder(self._folder, keep=1)
            self._subscriber = Subscriber(self._url, self._target, trusted_keys=self._public)
        held = self._subscriber

        def arrived() -> bool:
            return held.version is not None and self._is_next((held.run or "", held.version))

        held.follow(timeout=self._timeout, stop=arrived)
        if not arrived():
            raise self._late()
        target = self._target
        return open_checkpoint(target.current) if isinstance(target, FolderTarget) else target.weights()

    def _read_folder(self, path: Path) -> Weights:
        """Wait until the worker that leads on this node has the next version in the folder."""
        end = time.monotonic() + self._timeout
        target = folder(path)
        while time.monotonic() < end:
            if (found := target.held()) is not None and self._is_next((found[0], found[2])):
                return open_checkpoint(target.current.resolve())
            time.sleep(_LOOK)
        raise self._late()

    def _is_next(self, held: Place) -> bool:
        """Whether this is what the store's head is at, and the head has moved since the sync began."""
        return held == self._place() != self._before

    def _place(self) -> Place:
        """Run and version that the store's head is at; None if there is none yet."""
        try:
            head, _ = read_head(self._store, self._public)
        except NotFound:
            return None
        return head.run, head.version

    def _late(self) -> PeerLost:
        at = "no version" if self._before is None else f"version {self._before[1]} of run {self._before[0]}"
        return PeerLost(f"{self._url} was at {at}, and nothing newer came in {self._timeout:.0f} s")


class _Sent:
    """What was captured last."""

    now: Weights | Shards

    def weights(self) -> Weights | Shards:
        return self.now


class _Host(ModuleTarget):
    """Weights in host memory, which are made when the tensors of the run are known."""

    def __init__(self) -> None:
        self._held: dict[str, Bits] = {}
        super().__init__(lambda: self._held)

    def attach(self, table: TensorTable) -> Weights:
        if tensor_table(self._held) != table:
            self._held = zeros(table)
        return super().attach(table)


def _tensor(bits: Bits) -> torch.Tensor:
    """Bits as a torch tensor: the same memory, or a copy of it where it cannot be written to."""
    array = bits.array if bits.array.flags.writeable else bits.array.copy()
    return torch.from_numpy(array).view(getattr(torch, bits.dtype.name))


def _metrics(report: SyncReport) -> dict[str, float]:
    """What verl's trainer logs of a sync."""
    return {
        "sparserl/version": report.version,
        "sparserl/bytes": report.bytes,
        "sparserl/dense_bytes": report.dense_bytes,
        "sparserl/density": report.density,
        "sparserl/seconds": sum(report.seconds.values()),
    }
