"""What checkpoint engines of frameworks have in common: tensors of a generator are published, whole versions received.

    (name, tensor), … ──► rounded, in host memory ──► Publisher ──► store                 WeightSender, in a trainer
    store ──► Subscriber ──► host memory, or a folder of the node ──► tensors by name    WholeReceiver, in a rollout

Both sides must agree which version a sync brings: the trainer's rank 0 reads the head before it (`head_version`), all
are told of that, and receivers wait for another head.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from ..errors import NotFound, PeerLost, SessionError, Unavailable
from ..session import Publisher, Subscriber, SyncReport
from ..session.anchors import zeros
from ..session.store.records import HEAD
from ..session.store.retention import read_head
from ..session.store.signing import PublicKeys
from ..sources import open_checkpoint
from ..targets import FolderTarget, ModuleTarget, folder
from ..transport.stores.base import Store
from ..weights.dtypes import BY_NAME, Bits
from ..weights.memory import Weights
from ..weights.shards import Shards
from ..weights.table import TensorSpec, TensorTable
from ..weights.tensors import tensor_table

_POLL_SECONDS = 0.1  # between checks of the folder that another worker writes
_WAIT_SECONDS = 1.0  # that a store is asked to wait for another head

_OWN_OPTIONS = frozenset({"url", "source", "writers", "timeout", "signing_key", "trusted_keys"})  # of engines

RunAndVersion = tuple[str, int]


def head_version(store: Store, trusted_keys: PublicKeys | None) -> RunAndVersion | None:
    """Run and version at a store's head; None if there is no head yet."""
    try:
        head, _ = read_head(store, trusted_keys)
    except NotFound:
        return None
    return head.run, head.version


class AwaitedVersion:
    """The version that a sync brings: the head of a store, once it is another than before the sync.

    Args:
        store: Where the trainer publishes.
        before: Run and version of the head before the sync; None if there was no head.
        timeout: How many seconds to wait for it.
        trusted_keys: Whose heads are trusted; None for all.
    """

    def __init__(
        self, store: Store, before: RunAndVersion | None, timeout: float, trusted_keys: PublicKeys | None
    ) -> None:
        self._store = store
        self._before = None if before is None else (before[0], before[1])  # frameworks may make a list of it
        self._timeout = timeout
        self._trusted_keys = trusted_keys
        self._end = time.monotonic() + timeout

    @property
    def seconds_left(self) -> float:
        return max(self._end - time.monotonic(), 0.0)

    def is_at(self, version: RunAndVersion | None) -> bool:
        """Whether this version is at the head now, and is another than before."""
        return version == head_version(self._store, self._trusted_keys) != self._before

    def wait(self) -> RunAndVersion:
        """Wait for it.

        Raises:
            PeerLost: It did not come in time.
        """
        tag: str | None = None
        while True:
            left = self.seconds_left
            try:
                stored = self._store.changed(HEAD, tag, min(_WAIT_SECONDS, left))
            except (NotFound, Unavailable):
                stored = None
                time.sleep(min(_POLL_SECONDS, left))
            if stored is not None:
                head, tag = read_head(self._store, self._trusted_keys, stored)
                if (head.run, head.version) != self._before:
                    return head.run, head.version
            if not left:
                raise self.timeout_error()

    def timeout_error(self) -> PeerLost:
        before = "no version" if self._before is None else f"version {self._before[1]} of run {self._before[0]}"
        return PeerLost(f"{self._store.url} was at {before}, and nothing newer came in {self._timeout:g} s")


class WeightSender:
    """Publishes the tensors that a framework yields on all ranks of a trainer.

    Args:
        store: Where to publish.
        rank: The number of this rank, which must drain the tensors even where it publishes none.
        dtype: Floating-point tensors are rounded to it before they are compared; None to send them as they are.
        spread: Whether every rank publishes a share of the tensors; otherwise rank 0 publishes all.
        options: Options of the `Publisher`.

    >>> sender = WeightSender(store, rank, dtype=torch.bfloat16, spread=False, options={})         # doctest: +SKIP
    >>> sender.capture(model.named_parameters())                                                   # doctest: +SKIP
    >>> report = sender.publish(step=7)                                                            # doctest: +SKIP
    """

    def __init__(
        self, store: Store, rank: int, *, dtype: torch.dtype | None, spread: bool, options: Mapping[str, Any]
    ) -> None:
        self._store = store
        self._rank = rank
        self._dtype = dtype
        self._spread = spread
        self._publishes = spread or rank == 0
        self._options = options
        self._copies: dict[str, torch.Tensor] = {}
        self._captured: Weights | Shards = {}
        self._publisher: Publisher | None = None

    def capture(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """On all ranks: copy the tensors that this one publishes to host memory, one by one, to need little on GPUs."""
        if not self._publishes:
            for _ in weights:
                pass  # all ranks take part in gathering a tensor
            return
        ranks = torch.distributed.get_world_size() if self._spread else 1
        specs = []
        copies = {}
        load = [0] * ranks
        for name, tensor in weights:
            if self._dtype is not None and tensor.is_floating_point():
                tensor = tensor.to(self._dtype)
            owner = load.index(min(load))
            load[owner] += tensor.nbytes
            specs.append(TensorSpec(name, BY_NAME[str(tensor.dtype).removeprefix("torch.")], tuple(tensor.shape)))
            if owner == self._rank:
                copies[name] = host_copy(tensor, self._copies.get(name))
        self._copies = copies
        self._captured = Shards.of(TensorTable(specs), copies) if ranks > 1 else copies

    def publish(self, *, step: int | None = None) -> SyncReport | None:
        """On all ranks: publish what was captured as the next version; None on ranks that publish nothing.

        Args:
            step: The training step, which the log of the run has.
        """
        if not self._publishes:
            return None
        if self._publisher is None:
            group = torch.distributed.group.WORLD if self._spread else None
            self._publisher = Publisher(self._store, lambda: self._captured, writers=group, **self._options)
        return self._publisher.publish(step=step)


class HostTarget(ModuleTarget):
    """Weights in host memory, which are allocated when the tensors of the run are known."""

    def __init__(self) -> None:
        self._tensors: dict[str, Bits] = {}
        super().__init__(lambda: self._tensors)

    def attach(self, table: TensorTable) -> Weights | None:
        if tensor_table(self._tensors) != table:
            self._tensors = zeros(table)
        return super().attach(table)


class WholeReceiver:
    """Holds whole versions: in host memory, or in a folder that the workers of a node share.

    Args:
        url: The store.
        path: The folder, which one worker of a node writes and the others read; None for host memory.
        trusted_keys: Whose versions are trusted; None for all.
        host_target: Makes the target in host memory.

    >>> receiver = WholeReceiver("s3://bucket/run", None, None)                                    # doctest: +SKIP
    >>> weights = receiver.receive(AwaitedVersion(store, before, 600.0, None))                     # doctest: +SKIP
    """

    def __init__(
        self,
        url: str,
        path: str | None,
        trusted_keys: PublicKeys | None,
        host_target: Callable[[], HostTarget] = HostTarget,
    ) -> None:
        self._url = url
        self._path = path
        self._trusted_keys = trusted_keys
        self._host_target = host_target
        self._leads = True
        self._target: HostTarget | FolderTarget | None = None
        self._subscriber: Subscriber | None = None

    def begin(self, *, leads: bool) -> None:
        """Before a sync, on all workers: who no longer writes the folder lets go of it, so that another one can.

        Args:
            leads: Whether this worker writes the folder of its node.
        """
        self._leads = leads
        if self._path is not None and not leads:
            self.close()

    def receive(self, awaited: AwaitedVersion) -> Weights:
        """Wait for a version, verify it, and return its weights; those of a folder are mapped.

        Raises:
            PeerLost: The version did not come in time.
        """
        if self._path is not None and not self._leads:
            return _read_folder(Path(self._path), awaited)
        if self._subscriber is None:
            self._target = self._host_target() if self._path is None else folder(self._path, keep=1)
            self._subscriber = Subscriber(self._url, self._target, trusted_keys=self._trusted_keys)
        subscriber = self._subscriber

        def has_it() -> bool:
            return subscriber.version is not None and awaited.is_at((subscriber.run or "", subscriber.version))

        try:
            subscriber.follow(timeout=awaited.seconds_left, stop=has_it)
        except Unavailable as error:
            raise awaited.timeout_error() from error
        if not has_it():
            raise awaited.timeout_error()
        target = self._target
        assert target is not None
        return open_checkpoint(target.current) if isinstance(target, FolderTarget) else target.weights()

    def close(self) -> None:
        """Let go of the folder, or of the host memory."""
        if self._subscriber is not None:
            self._subscriber.close()
        self._subscriber = None
        self._target = None


def _read_folder(path: Path, awaited: AwaitedVersion) -> Weights:
    """Wait until the worker that leads on this node has a version in the folder."""
    target = folder(path)
    while awaited.seconds_left:
        if (record := target.remembered_version()) is not None and awaited.is_at((record[0], record[2])):
            return open_checkpoint(target.current.resolve())
        time.sleep(_POLL_SECONDS)
    raise awaited.timeout_error()


def host_copy(tensor: torch.Tensor, last_copy: torch.Tensor | None) -> torch.Tensor:
    """A copy of a tensor in host memory: in that of its last copy, if it fits."""
    if last_copy is None or last_copy.shape != tensor.shape or last_copy.dtype != tensor.dtype:
        last_copy = torch.empty(tensor.shape, dtype=tensor.dtype)
    return last_copy.copy_(tensor.detach())


def as_tensor(bits: Any) -> torch.Tensor:
    """`Bits` as a torch tensor: the same memory, or a copy if it is read-only."""
    assert isinstance(bits, Bits)
    array = bits.array if bits.array.flags.writeable else bits.array.copy()
    return torch.from_numpy(array).view(getattr(torch, bits.dtype.name))


def rollout_dtype_named(name: str | None) -> torch.dtype | None:
    """The dtype of this name, to which weights are rounded: it must be one of floating point."""
    if name is None:
        return None
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise SessionError(f"rollout_dtype is {name!r}; it must be a floating-point dtype of torch, such as bfloat16")
    return dtype


def publisher_options(
    options: Mapping[str, Any] | None, name: str = "options", own: Collection[str] = _OWN_OPTIONS
) -> dict[str, Any]:
    """The options of the `Publisher`. Those that it does not have, or that are given elsewhere, are refused here.

    Args:
        options: What was given.
        name: The name under which it was given.
        own: Options that are given elsewhere.
    """
    given = dict(options or {})
    allowed = sorted(inspect.signature(Publisher).parameters.keys() - own)
    if unknown := sorted(given.keys() - {*allowed}):
        raise SessionError(f"{name} has {unknown[0]!r}; it may have {', '.join(allowed)}")
    return given
