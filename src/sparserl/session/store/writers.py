"""The processes that publish together: the ranks of a sharded trainer, or one process alone.

All ranks go through a publish in step. What each must do for itself (encode and upload its own buckets) it does
`together`: if one fails, all do. What must happen once (the manifest, the head) rank 0 does, and the others get its
result: `lead`.
"""

from __future__ import annotations

import builtins
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Protocol, TypeVar

from ...errors import SessionError, SparserlError, StoreError
from ...weights.local import LocalWeights
from ...weights.shards import dump_places, load_places, require_whole
from ...weights.table import TensorTable
from ..baseline import Baseline
from ..options import BaselineOptions

T = TypeVar("T")
_DONE = b"+"
_FAILED = b"-"


class Exchange(Protocol):
    """A way for some ranks to tell each other a few bytes, call by call and stage by stage."""

    rank: int
    size: int

    def begin(self) -> None:
        """A call begins on this rank."""
        ...

    def leave(self, why: str) -> None:
        """Leave the call in the middle."""
        ...

    def all_gather(self, label: str, data: bytes) -> list[bytes]:
        """What every rank has to say, by rank, at a stage of the call."""
        ...

    def close(self) -> None: ...


class Writers:
    """Ranks that publish one run. Without an exchange: one process alone."""

    def __init__(self, exchange: Exchange | None = None) -> None:
        self._exchange = exchange
        self.rank = 0 if exchange is None else exchange.rank
        self.size = 1 if exchange is None else exchange.size

    def own_folder(self, folder: Path) -> Path:
        """The folder of this rank in one that all are given."""
        return folder if self.size == 1 else folder / f"rank-{self.rank}"

    @contextmanager
    def call(self, begin: bool = True) -> Iterator[None]:
        """Goes around a publish, or around what is left of one: whoever leaves it by an error does not leave alone."""
        if self._exchange is None:
            yield
            return
        if begin:
            self._exchange.begin()
        try:
            yield
        except BaseException as error:
            self._exchange.leave(f"{type(error).__name__}: {error}")
            raise

    def together(self, label: str, work: Callable[[], bytes]) -> list[bytes]:
        """What `work` gave on every rank; raises on all of them where it failed on one."""
        if self._exchange is None:
            return [work()]
        failure: BaseException | None = None
        try:
            message = _DONE + work()
        except BaseException as error:  # noqa: BLE001  # raised again when the others know
            failure = error
            message = _FAILED + _dump_error(error)
        try:
            messages = self._exchange.all_gather(label, message)
        except SessionError as lost:
            if failure is not None:
                raise failure from lost
            raise
        if failure is not None:
            raise failure
        for rank, data in enumerate(messages):
            if data[:1] != _DONE:
                raise _load_error(rank, data[1:])
        return [data[1:] for data in messages]

    def gather(
        self, label: str, work: Callable[[], T], dump: Callable[[T], bytes], load: Callable[[bytes], T]
    ) -> list[T]:
        """What `work` gave on every rank, by rank; a process alone hands it over as it is."""
        if self._exchange is None:
            return [work()]
        return [load(data) for data in self.together(label, lambda: dump(work()))]

    def lead(self, label: str, work: Callable[[], T], dump: Callable[[T], bytes], load: Callable[[bytes], T]) -> T:
        """What `work` gave on rank 0, where alone it is done; its error is raised on all ranks."""
        if self._exchange is None:
            return work()
        if self.rank != 0:
            return load(self.together(label, bytes)[0])
        results: list[T] = []

        def once() -> bytes:
            results.append(work())
            return dump(results[0])

        self.together(label, once)
        return results[0]

    def choose_alike(self, options: BaselineOptions, choose: Callable[[BaselineOptions], Baseline]) -> Baseline:
        """Choose a baseline on every rank: where one has no room for it, none has one, so that all do the same."""
        chosen: list[Baseline] = []

        def kind(options: BaselineOptions) -> bytes:
            chosen[:] = [choose(options)]
            return b"none" if chosen[0].weights is None else b"host"

        kinds = self.together("capture", lambda: kind(options))
        if len(set(kinds)) > 1:
            self.together("capture", lambda: kind(replace(options, kind="none")))
        return chosen[0]

    def require_whole(self, local: LocalWeights, table: TensorTable) -> None:
        """All ranks must have the same tensor table, and every element of it must come from just one of them."""

        def places() -> bytes:
            table.require(local.table, "rank 0", f"rank {self.rank}")
            return json.dumps(dump_places(local.places)).encode()

        rows = self.together("compare parts", places)
        require_whole(table, [load_places(json.loads(row)) for row in rows])

    def close(self) -> None:
        if self._exchange is not None:
            self._exchange.close()


def _dump_error(error: BaseException) -> bytes:
    return json.dumps([type(error).__name__, str(error)[:2000]]).encode()


def _load_error(rank: int, data: bytes) -> SparserlError:
    """Another rank's error, of the same kind where it is one of ours."""
    name, text = json.loads(data)
    kind = _kinds(SparserlError).get(name, SessionError)
    if isinstance(builtin := getattr(builtins, name, None), type) and issubclass(builtin, OSError):
        kind = StoreError
    return kind(f"rank {rank}: {name}: {text}")


def _kinds(root: type[SparserlError]) -> dict[str, type[SparserlError]]:
    """Every kind of error below one, by its name."""
    kinds = {root.__name__: root}
    for kind in root.__subclasses__():
        kinds |= _kinds(kind)
    return kinds
