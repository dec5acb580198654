"""verl: its backend `delta_sharded`, through a store. Trainers gather nothing, and engines load only what changed.

    training engine ──► shards of every rank ──► Publisher ──► store ──► Subscriber ──► changed positions ──► flushes
    └─ send_weights, on the trainer's ranks                              └─ receive_weights ──► vLLM or SGLang

verl gives the training engine itself to the backend of this name alone, and gets vLLM and SGLang ready for flushes of
positions and values. So this module registers its engine under that name, if `checkpoint_engine.custom_backend_module`
names it. verl refuses at the start what its receivers cannot do (see `require_vllm_delta_support` there).

A flush holds elements of one dtype. Receivers mark what does not change with NaN, and positions have 32 bits; so a sync
that sets an element to NaN, or changes integers or a tensor of 2**31 elements, is dense. So are a worker's first sync,
one after a load that failed, and one that replaces most weights. No sync mixes both kinds: vLLM refuses that.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from ..errors import SessionError
from ..patch import Application
from ..session import Publisher
from ..targets import Change
from ..targets.modules import PreparedModule
from ..targets.target import Undo
from ..weights.dtypes import Bits
from ..weights.memory import Weights
from ..weights.table import TensorTable
from .checkpoint_engine import HostTarget, WholeReceiver, as_tensor
from .verl import SparserlEngine
from .verl_shards import EngineShards

try:
    from verl.checkpoint_engine import CheckpointEngineRegistry
    from verl.checkpoint_engine.delta_sync.encode import DeltaParam, checksum
except ImportError as missing:
    raise SessionError("verl is not installed, or too old: its sparse flushes came with 0.9") from missing

_log = logging.getLogger("sparserl.verl")

_POSITION_BYTES = 4
_MOST_ELEMENTS = 1 << 31  # of a tensor: positions are signed integers of 32 bits
_MOST_CHANGES = 64 << 20  # of an entry: receivers widen its positions to 64 bits
_SPARSE_DTYPES = ("bfloat16", "float16", "float32", "float64")  # that have the NaN which receivers mark with

Positions = npt.NDArray[np.int64]
Flush = tuple[list[tuple[str, torch.Tensor]], bool]


@CheckpointEngineRegistry.register("delta_sharded")
class SparserlDeltaEngine(SparserlEngine):
    """Publishes the shards of verl's training engine, and yields sparse flushes to its server adapters.

    Args:
        bucket_size: Bytes of a flush at most, unless one tensor is larger; verl's `update_weights_bucket_megabytes`.
        is_master: Passed by verl to every backend: whether this is rank 0 of the trainer.
        shards: Whether every rank of the trainer publishes its own shards. False for what `sparserl.sources.fsdp` and
            `sparserl.sources.megatron` cannot read: verl then gathers tensor by tensor, as for other backends.
        options: Those of `SparserlEngine`, but for `folder`.

    Raises:
        SessionError: An option cannot be used.
    """

    wire_format = "delta_flush"

    def __init__(self, bucket_size: int, is_master: bool = False, *, shards: bool = True, **options: Any) -> None:
        if options.get("folder") is not None:
            raise SessionError("folder= is for dense loads: a worker that sends flushes has a copy of its own")
        if shards and options.get("spread"):
            raise SessionError("spread= is for tensors that verl gathers: give it with shards=False")
        super().__init__(bucket_size, is_master, **options)
        self._shards = shards
        self._engine_shards: EngineShards | None = None
        self._publisher: Publisher | None = None
        self._target = _WatchedTarget()
        self._receiver = WholeReceiver(self._url, None, self._trusted_keys, lambda: self._target)
        self._is_loaded = False  # whether the rollout has all flushes so far

    async def send_weights(self, weights: Any, global_steps: int | None = None) -> dict[str, float]:
        """Publish the next version; on all ranks. Returns metrics.

        Args:
            weights: The training engine, which verl hands over instead of its tensors.
            global_steps: The training step.
        """
        engine = weights
        if not self._shards:
            tensors, _ = engine.get_per_tensor_param()
            return await super().send_weights(tensors, global_steps)
        if self._engine_shards is None:
            self._engine_shards = EngineShards(engine, self._dtype)
        with self._engine_shards.in_memory():
            if self._publisher is None:
                group = torch.distributed.group.WORLD
                self._publisher = Publisher(self._store, self._engine_shards, writers=group, **self._options)
            return self._metrics(await asyncio.to_thread(self._publisher.publish, step=global_steps))

    def receive_weights(  # type: ignore[override]  # verl has one name for both wire formats
        self,
        global_steps: int | None = None,  # noqa: ARG002
    ) -> Iterator[Flush]:
        """Wait for the next version, verify it, and yield what changed since the last one, in flushes.

        It is no coroutine, since SGLang's adapter iterates over it as it stands.
        """
        weights = self._receive()
        changes = self._target.take_changes()
        if not self._is_loaded:
            changes = None
        elif (reason := _reason_for_dense(weights, changes)) is not None:
            _log.info("a dense sync: %s", reason)
            changes = None
        self._is_loaded = False
        yield from flushes(weights, changes, self.bucket_size, self._device)
        self._is_loaded = True


class _WatchedTarget(HostTarget):
    """Weights in host memory, and where they changed since somebody asked."""

    def __init__(self) -> None:
        super().__init__()
        self._changes: dict[str, list[Positions]] | None = None  # None: everywhere

    def attach(self, table: TensorTable) -> Weights | None:
        before = self.weights()
        weights = super().attach(table)
        if weights is not before:
            self._changes = None
        return weights

    def take_changes(self) -> dict[str, Positions] | None:
        """The flat positions of all changes by tensor, which rise; None for everything. They are forgotten here."""
        changes = self._changes
        self._changes = {}
        return None if changes is None else {name: _union(parts) for name, parts in changes.items()}

    def prepare(self, change: Change) -> _WatchedChange:  # type: ignore[override]  # all that a target promises
        """Stage a change, and see where it is."""
        prepared = super().prepare(change)
        application = prepared.application
        positions = application.changed_positions() if isinstance(application, Application) else None
        return _WatchedChange(self, prepared, positions)

    def note(self, positions: Mapping[str, list[Positions]] | None) -> None:
        """Remember changes that were committed; None for everything."""
        if self._changes is None or positions is None:
            self._changes = None
            return
        for name, parts in positions.items():
            self._changes.setdefault(name, []).extend(parts)


class _WatchedChange:
    """A change that is staged on a watched target."""

    def __init__(
        self, target: _WatchedTarget, prepared: PreparedModule, positions: dict[str, list[Positions]] | None
    ) -> None:
        self._target = target
        self._prepared = prepared
        self._positions = positions
        self.changed = prepared.changed

    def commit(self) -> Undo:
        """Write the change, and note where it is."""
        undo_change = self._prepared.commit()
        self._target.note(self._positions)

        def undo() -> None:
            undo_change()
            self._target.note(None)

        return undo

    def finish(self) -> None:
        self._prepared.finish()

    def discard(self) -> None:
        self._prepared.discard()


class _Entry(NamedTuple):
    """What one flush has of one tensor."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    positions: Positions | None  # None: the whole tensor
    values: torch.Tensor

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + (0 if self.positions is None else self.positions.size * _POSITION_BYTES)


def flushes(
    weights: Weights, changes: Mapping[str, Positions] | None, most_bytes: int, device: str = "cpu"
) -> Iterator[Flush]:
    """Weights, or the changes in them, as verl's adapters take them: `(named tensors, whether it is the last)`.

    Args:
        weights: All weights, after the changes.
        changes: The flat positions of the changes by tensor; None for all of every tensor.
        most_bytes: Bytes of a flush, unless one whole tensor has more.
        device: Where the tensors of a flush go.
    """
    pending = None
    for entries in _batches(_entries(weights, changes, most_bytes), most_bytes):
        if pending is not None:
            yield pending, False
        pending = _flush(entries, device)
    if pending is not None:
        yield pending, True


def _reason_for_dense(weights: Weights, changes: Mapping[str, Positions] | None) -> str | None:
    """Why verl's receivers cannot take these changes as positions and values; None if they can."""
    if changes is None:
        return "all weights were replaced"
    for name, positions in changes.items():
        bits = weights[name]
        assert isinstance(bits, Bits)
        if bits.dtype.name not in _SPARSE_DTYPES:
            return f"{name!r} is of {bits.dtype.name}, and has changed"
        if bits.array.size >= _MOST_ELEMENTS:
            return f"{name!r} has {bits.array.size} elements: too many for positions of 32 bits"
        if bool(torch.isnan(_values(bits, positions)).any()):
            return f"{name!r} has become NaN somewhere, which receivers take for unchanged"
    return None


def _entries(weights: Weights, changes: Mapping[str, Positions] | None, most_bytes: int) -> Iterator[_Entry]:
    """Everything that is sent, with the tensors of one dtype together."""
    names = sorted(weights if changes is None else changes, key=lambda name: weights[name].dtype.name)
    for name in names:
        bits = weights[name]
        assert isinstance(bits, Bits)
        shape = tuple(bits.array.shape)
        if changes is None:
            yield _Entry(name, bits.dtype.name, shape, None, as_tensor(bits).reshape(-1))
            continue
        most = min(_MOST_CHANGES, max(most_bytes // (_POSITION_BYTES + bits.dtype.width), 1))
        for start in range(0, changes[name].size, most):
            positions = changes[name][start : start + most]
            yield _Entry(name, bits.dtype.name, shape, positions, _values(bits, positions))


def _batches(entries: Iterable[_Entry], most_bytes: int) -> Iterator[list[_Entry]]:
    """Entries of one dtype, up to some bytes."""
    batch: list[_Entry] = []
    nbytes = 0
    for entry in entries:
        if batch and (batch[0].dtype != entry.dtype or nbytes + entry.nbytes > most_bytes):
            yield batch
            batch = []
            nbytes = 0
        batch.append(entry)
        nbytes += entry.nbytes
    if batch:
        yield batch


def _flush(entries: list[_Entry], device: str) -> list[tuple[str, torch.Tensor]]:
    """The tensors of one flush."""
    params = []
    start = 0
    is_sparse = entries[0].positions is not None
    for entry in entries:
        end = start + entry.values.numel()
        pos_start, pos_end = (start * _POSITION_BYTES, end * _POSITION_BYTES) if is_sparse else (0, 0)
        shape = list(entry.shape)
        params.append(vars(DeltaParam(entry.name, entry.dtype, shape, pos_start, pos_end, _POSITION_BYTES, start, end)))
        start = end
    values = torch.cat([entry.values for entry in entries]).to(device)
    blob = [entry.positions.astype("<i4").view(np.uint8) for entry in entries if entry.positions is not None]
    positions = torch.from_numpy(np.concatenate([np.empty(0, np.uint8), *blob])).to(device)
    spec = {
        "encoding": "indices" if is_sparse else "dense",
        "params": params,
        "checksum": checksum(positions, values),
    }
    text = torch.frombuffer(bytearray(json.dumps(spec).encode()), dtype=torch.uint8).to(device)
    named = [("__delta_spec__", text), ("__values__", values)]
    if is_sparse:
        named.insert(1, ("__positions__", positions))
    return named


def _values(bits: Bits, positions: Positions) -> torch.Tensor:
    """The elements at some positions."""
    return as_tensor(Bits(bits.array.reshape(-1)[positions], bits.dtype))


def _union(parts: list[Positions]) -> Positions:
    """Positions that rise; each once."""
    positions = parts[0] if len(parts) == 1 else np.concatenate(parts)
    return positions if bool((positions[1:] > positions[:-1]).all()) else np.unique(positions)
