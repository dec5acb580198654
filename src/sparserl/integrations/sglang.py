"""SGLang: a weight loader that fetches and commits by itself, on every rank of an engine, and a client that drives it.

    client: pause ──► begin ──► update_weights_from_tensor, with a URL for a tensor ──► end ──► check ──► continue
    loader: on the first call find out where the checkpoint is in the model ──► which version do all ranks have?
            on every call stage on all ranks ──► commit on all, or on none   (meanwhile, on a thread: stage new ones)

SGLang knows the loader by the plugin of this package. See docs/how-to/integrations/sglang.md.

SGLang ignores what a loader returns, and an exception of a loader ends the server. So the loader raises nothing, and
registers a status buffer in the model. Its name has the version that the model has, or the error. `/weights_checker`
lists the names of all buffers.
"""

from __future__ import annotations

import base64
import json
import pickle
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing, suppress
from os import PathLike, fspath
from typing import Any

import torch

from ..errors import SessionError, UnsupportedTensor
from ..session.options import require_choice, require_count, require_flag
from ..session.store.records import layout_to_bytes, parse_layout
from ..session.store.retention import read_head, read_run
from ..session.store.signing import PublicKeys
from ..sources import tying
from ..targets.attributes import attribute_tensors
from ..targets.engine import EngineTarget
from ..targets.engine_layout import find_pieces
from ..targets.model_copy import Trial
from ..targets.pieces import CheckpointTensor, Load, Piece, moved_name, parts_of
from ..targets.rank_sums import checkpoint_tensors, rank_sums
from ..transport.stores.opening import open_store
from ..weights.engine_sums import EngineSums, RankSums
from ..weights.table import TensorTable
from .ranks import EngineSubscriber, gather_over, make_subscriber, together
from .sglang_plugin import LOADER
from .sglang_server import SGLangServer

Tensors = dict[str, torch.Tensor]

MODES = ("retract", "abort", "in_place")
_MARK = "sparserl: "
_ANSWER = _MARK + "sums "
_WAIT_SECONDS = 1.0  # that the staging thread waits for a new version before it checks whether to end


# -- inside the engine -------------------------------------------------------------------------------------------------

_followers: weakref.WeakKeyDictionary[torch.nn.Module, _RankFollower] = weakref.WeakKeyDictionary()


def load(model: torch.nn.Module, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Commit the version that a control tensor asks for, on all ranks or on none; SGLang calls this on every rank."""
    try:
        (command,) = (json.loads(t.cpu().numpy().tobytes()) for name, t in named_tensors if name == "sparserl")
        if model not in _followers:
            _followers[model] = _RankFollower(model)
        if "layout" in command:
            _set_answer(model, _followers[model].sums(command["layout"]))
            return
        mark = _followers[model].commit(command.pop("version"), command.pop("ahead"), command)
    except Exception as error:  # noqa: BLE001  # SGLang's scheduler would end
        is_stale = model in _followers and _followers[model].is_stale
        mark = f"{'stale' if is_stale else 'failed'}: {type(error).__name__}: {error}"
    _set_mark(model, mark)


def _set_mark(model: torch.nn.Module, mark: str) -> None:
    """Replace the mark of a model."""
    _remove_buffers(model, _MARK)
    _add_buffer(model, _MARK + mark[:1000])


def _set_answer(model: torch.nn.Module, answer: str | None) -> None:
    """Put an answer beside the mark of a model, instead of the last one; None for none."""
    _remove_buffers(model, _ANSWER)
    if answer is not None:
        _add_buffer(model, _ANSWER + answer)


def _remove_buffers(model: torch.nn.Module, prefix: str) -> None:
    for name in [name for name, _ in model.named_buffers(recurse=False) if name.startswith(prefix)]:
        delattr(model, name)


def _add_buffer(model: torch.nn.Module, name: str) -> None:
    """Register a buffer of this name. Dots would be part of a path, and are written otherwise."""
    device = next(model.parameters()).device
    buffer = torch.zeros(4, dtype=torch.uint8, device=device)
    model.register_buffer(name.replace(".", "·"), buffer, persistent=False)


class _RankFollower:
    """Follows a run on one rank, with one model."""

    def __init__(self, model: torch.nn.Module) -> None:
        from sglang.srt.distributed import get_tp_group

        self._group = get_tp_group()
        self._model: Any = weakref.proxy(model)
        self._gather = gather_over(self._group)
        self._pieces: list[Piece] = []
        self._layout: dict[str, Any] = {}
        self._known: tuple[Any, list[Piece], dict[str, str]] | None = None  # of models that follow no run
        self._store_options: dict[str, Any] = {}
        self._subscriber: EngineSubscriber | None = None
        self.is_stale = False  # whether the model must still recompute the tensors that it derives from its weights
        self._lock = threading.Lock()  # the engine and the staging thread take turns with the subscriber
        self._thread: threading.Thread | None = None

    def commit(self, version: int | None, ahead: bool, store: dict[str, Any]) -> str:
        """On all ranks at once: commit a version. Returns the mark for it."""
        with self._lock:
            if self._subscriber is None or store != self._store_options:
                self._subscriber = self._follow(**store)
                self._store_options = store
            together(self._require_layout, self._gather)
            _synchronize()  # steps that have begun still read the weights
            self.is_stale |= self._subscriber.commit_version(version) is not None
            if self.is_stale:
                _refresh(self._model)
                self.is_stale = False
            _synchronize()
            mark = f"{self._subscriber.run} {self._subscriber.version}"
        if ahead and self._thread is None:
            self._thread = threading.Thread(target=_stage_ahead, args=(weakref.ref(self),), daemon=True)
            self._thread.start()
        return mark

    def sums(self, layout: str | None) -> str | None:
        """On all ranks at once: the digests of the weights by the tensors of a table, as JSON; None without a table."""
        if layout is None:
            return None
        with self._lock:
            _synchronize()  # steps that have begun still read the weights
            answers = self._gather(self._rank_sums(layout))
        failures = [f"rank {rank}: {answer['error']}" for rank, answer in enumerate(answers) if "error" in answer]
        if failures:
            return json.dumps({"error": failures[0]})
        if self._group.rank_in_group > 0:
            return "{}"
        table = parse_layout(layout.encode(), "the table")
        return json.dumps(EngineSums.combine(table, map(RankSums.of, answers)).record(table))

    def _rank_sums(self, layout: str) -> dict[str, Any]:
        """The digests of this rank, or its error."""
        try:
            table = parse_layout(layout.encode(), "the table")
            pieces, unclear_names = self._located(table)
            live = tensors_of(self._model)
            parameters = {name for name, _ in self._model.named_parameters()} & live.keys()
            tied = tied_names(self._model, table.index)
            return rank_sums(table, pieces, live, parameters, tied, unclear_names).record()
        except Exception as error:  # noqa: BLE001  # the other ranks must not wait for this one
            return {"error": f"{type(error).__name__}: {error}"}

    def _located(self, table: TensorTable) -> tuple[list[Piece], dict[str, str]]:
        """Where tensors are, and which are not found, and why; found out again if they or the model have changed."""
        layout = _layout(self._model)
        if self._pieces and layout == self._layout:
            return self._pieces, {}
        if self._known is None or self._known[0] != (table, layout):
            unclear_names: dict[str, str] = {}
            pieces = learn_pieces(self._model, checkpoint_tensors(table), unclear_names)
            self._known = (table, layout), pieces, unclear_names
        return self._known[1:]

    def stage_newest(self) -> None:
        """Stage the newest version, and wait a while for the next."""
        with self._lock:
            if (subscriber := self._subscriber) is not None:
                subscriber.stage_newest()
        if subscriber is not None:
            subscriber.wait(_WAIT_SECONDS)

    def _follow(self, url: str, trusted_keys: PublicKeys | None, **options: Any) -> EngineSubscriber:
        if self._subscriber is not None:
            self._subscriber.close()
            self._subscriber = None
        if not self._pieces:
            self._pieces = together(lambda: self._learn(url, trusted_keys, options["token"]), self._gather)
            self._layout = _layout(self._model)
        tied = tied_names(self._model, [piece.tensor for piece in self._pieces])
        target = EngineTarget(self._pieces, lambda: tensors_of(self._model), tied)
        return make_subscriber(url, target, self._group, trusted_keys=trusted_keys, **options)

    def _learn(self, url: str, trusted_keys: PublicKeys | None, token: str | None) -> list[Piece]:
        with closing(open_store(url, token=token)) as store:
            table = read_run(store, read_head(store, trusted_keys)[0]).table
        return learn_pieces(self._model, checkpoint_tensors(table))

    def _require_layout(self) -> None:
        if _layout(self._model) != self._layout:
            raise UnsupportedTensor(
                "the model's tensors have another layout than at the first update; restart the server"
            )


def _stage_ahead(follower: Callable[[], _RankFollower | None]) -> None:
    """Stage new versions while the follower, a weak reference, exists."""
    while (current := follower()) is not None:
        current.stage_newest()
        del current


def learn_pieces(
    model: Any, tensors: Sequence[CheckpointTensor], unclear_names: dict[str, str] | None = None
) -> list[Piece]:
    """Find out where checkpoint tensors are in a model by watching how it loads; its weights are then restored.

    Tensors that are tied to others are left out, unless the model has memory of its own for them.
    unclear_names: as for `find_pieces`; what the model computes from its weights is named there too.
    """
    live = tensors_of(model)
    trial = Trial(model, live, lambda: derived_tensors(model), lambda: _refresh(model))

    def check() -> None:
        if (moved := moved_name(live, tensors_of(model))) is not None:
            raise UnsupportedTensor(f"{moved!r} is replaced when the model loads, instead of written to")
        trial.check()

    def restore(_: object) -> None:
        check()
        trial.put_back()

    def find(some: Sequence[CheckpointTensor], load: Load) -> list[Piece]:
        return find_pieces(some, live, load, restore, unclear_names, restores_by_load=False, check=check)

    def load_known(weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        with suppress(KeyError):  # of a name that the model does not know
            model.load_weights(weights)

    tied = tied_names(model, [tensor.name for tensor in tensors])
    try:
        trial.begin()
        # Tied tensors come by themselves: one of two would take the other's place.
        pieces = find([tensor for tensor in tensors if tensor.name not in tied], model.load_weights)
        if others := [tensor for tensor in tensors if tensor.name in tied]:
            reached = {piece.live for piece in pieces}
            pieces += [piece for piece in find(others, load_known) if piece.live not in reached]
    except BaseException:
        trial.put_back()
        raise
    if unclear_names is not None:
        unclear_names |= dict.fromkeys(
            sorted(trial.computed), "the engine computes it from the weights when it loads them"
        )
    elif trial.stale:
        raise UnsupportedTensor(
            f"{min(trial.stale)!r} is computed from the weights when they are loaded, so that it would not change with "
            "them"
        )
    return pieces


def tensors_of(model: torch.nn.Module) -> Tensors:
    """The parameters and buffers of a model, without marks."""
    return {name: tensor for name, tensor in parts_of(model).items() if not name.startswith(_MARK)}


def derived_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Tensors that may have been computed from the weights."""
    return attribute_tensors(model, parts_of(model))


def tied_names(model: torch.nn.Module, names: Iterable[str]) -> dict[str, str]:
    """Checkpoint tensors that the model need not load, and the tensors, among these names, that they are equal to."""
    return tying.tied_names(tying.configs_of(model), names)


def _refresh(model: Any) -> None:
    """Let the model recompute what it derives from its weights, as SGLang does after updates that bypass its loader."""
    if hasattr(model, "post_load_weights"):
        model.post_load_weights()


def _layout(model: torch.nn.Module) -> dict[str, Any]:
    """Dtypes, shapes and strides of a model's tensors."""
    return {name: (t.dtype, tuple(t.shape), t.stride()) for name, t in tensors_of(model).items()}


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


# -- outside the engine ------------------------------------------------------------------------------------------------


def request(
    store: str,
    version: int | None = None,
    *,
    ranks: int = 1,
    trusted_keys: PublicKeys | None = None,
    run: str | None = None,
    token: str | None = None,
    ahead: bool = True,
    flush_cache: bool = True,
) -> dict[str, Any]:
    """The body to post to `/update_weights_from_tensor`, between begin and end, for users with a client of their own.

    Args:
        store: The URL of the store, which the ranks of the engine open themselves.
        version: The version to commit; None for the newest.
        ranks: The tensor-parallel size of the engine.
        trusted_keys: The public keys to trust, as for a `Subscriber`.
        run: The only run to follow, as for a `Subscriber`.
        token: The token for the store, as for a `Subscriber`.
        ahead: Whether the engine stages new versions as they are published, so that the next pause is shorter.
        flush_cache: Whether SGLang drops the cache of the old weights.
    """
    require_count("ranks", ranks)
    if version is not None:
        require_count("version", version, 0)
    require_flag("ahead", ahead)
    require_flag("flush_cache", flush_cache)
    keys = trusted_keys if trusted_keys is None or isinstance(trusted_keys, str) else list(trusted_keys)
    command = {"url": store, "trusted_keys": keys, "run": run, "token": token, "version": version, "ahead": ahead}
    return _body(command, ranks, flush_cache)


def _body(command: dict[str, Any], ranks: int, flush_cache: bool) -> dict[str, Any]:
    """The body of a request that gives the loader a command."""
    control = torch.frombuffer(bytearray(json.dumps(command).encode()), dtype=torch.uint8)
    payload = base64.b64encode(pickle.dumps([("sparserl", control)])).decode()
    return {
        "serialized_named_tensors": [payload] * ranks,
        "load_format": LOADER,
        "flush_cache": flush_cache,
        "selector": "target",
    }


class Client:
    """Updates a running server to versions of a run.

    >>> client = Client("http://localhost:30000")                                                  # doctest: +SKIP
    >>> client.update("s3://bucket/run")                                                           # doctest: +SKIP
    ('12e9e740decf9cd4', 42)

    Args:
        url: The address of the server.
        api_key: Its admin key, if it requires one.
        mode: What happens to running requests: they are computed again (`retract`), ended (`abort`), or continue with
            the cache of the old weights (`in_place`), which is then not flushed. Releases without update sessions,
            such as 0.5.15, cannot flush while requests wait, and refuse `retract` then.
        timeout: How many seconds to wait for an answer of the server.
    """

    def __init__(self, url: str, *, api_key: str | None = None, mode: str = "retract", timeout: float = 600.0) -> None:
        require_choice("mode", mode, MODES)
        self._server = SGLangServer(url, api_key, timeout)
        self.url = self._server.url
        self._mode = mode

    def update(
        self,
        store: str,
        version: int | None = None,
        *,
        trusted_keys: PublicKeys | None = None,
        run: str | None = None,
        token: str | None = None,
        ahead: bool = True,
        label: str | None = None,
    ) -> tuple[str, int]:
        """Pause the engine and let it commit a version, by default the newest; returns run and version.

        Args:
            store: The URL of the store, which the ranks of the engine open themselves.
            version: The version to commit; None for the newest.
            trusted_keys: The public keys to trust, as for a `Subscriber`.
            run: The only run to follow, as for a `Subscriber`.
            token: The token for the store, as for a `Subscriber`.
            ahead: Whether the engine stages new versions as they are published, so that the next pause is shorter.
            label: What the server then gives as its weight version; by default `RUN:VERSION`.
        """
        ranks = self._server.ranks()
        flush = self._mode != "in_place"
        body = request(
            store, version, ranks=ranks, trusted_keys=trusted_keys, run=run, token=token, ahead=ahead, flush_cache=flush
        )
        self._server.ask("pause_generation", mode=self._mode)
        try:
            self._server.begin_update(flush_cache=flush)
        except SessionError:
            self._server.ask("continue_generation")
            raise
        failure = None
        try:
            self._server.load(body)
        except SessionError as error:
            failure = error
        self._server.end_update()
        marks = self.marks()
        current, *different = {_parse_mark(mark) for mark in marks}
        if different or any(mark.startswith("stale") for mark in marks):
            raise SessionError(f"{self.url} is between two versions, so that generation stays paused: {marks}")
        if current is not None:
            name = f"{current[0]}:{current[1]}" if label is None or failure is not None else label
            self._server.ask("update_weight_version", new_version=name, abort_all_requests=False)
        self._server.ask("continue_generation")
        if failure is not None:
            raise failure
        if current is None:
            raise SessionError(
                f"{self.url} still has the weights that it had before: {'; '.join(dict.fromkeys(marks))}"
            )
        return current

    def reload(self, path: str | PathLike[str], version: str | None = None) -> None:
        """Pause the engine and let it load a checkpoint folder, such as one that `sparserl follow` writes."""
        self._server.ask("pause_generation", mode=self._mode)
        try:
            self._server.ask(
                "update_weights_from_disk",
                model_path=fspath(path),
                weight_version=version,
                flush_cache=self._mode != "in_place",
            )
        finally:
            self._server.ask("continue_generation")

    def sums(self, table: TensorTable) -> EngineSums:
        """The digests that all ranks have of the tensors of a table. The engine is paused, and nothing changes."""
        ranks = self._server.ranks()
        self._server.ask("pause_generation", mode="in_place")
        try:
            self._load(_body({"layout": layout_to_bytes(table).decode()}, ranks, flush_cache=False))
            texts = [names[-1].removeprefix(_ANSWER) for names in self._buffers(_ANSWER) if names]
            self._load(_body({"layout": None}, ranks, flush_cache=False))
        finally:
            self._server.ask("continue_generation")
        if not texts:
            raise SessionError(f"{self.url} has not answered: its sparserl is older than this one")
        answer = json.loads(texts[0])
        if "error" in answer:
            raise SessionError(f"{self.url}: {answer['error']}")
        return EngineSums.of(table, answer)

    def _load(self, body: dict[str, Any]) -> None:
        """Call the loader."""
        self._server.begin_update(flush_cache=False)
        try:
            self._server.load(body)
        finally:
            self._server.end_update()

    def marks(self) -> list[str]:
        """The mark of each rank of the engine: run and version of the last update, or its error."""
        marks = [[name for name in names if not name.startswith(_ANSWER)] for names in self._buffers(_MARK)]
        return [names[0].removeprefix(_MARK) if names else "never updated" for names in marks]

    def _buffers(self, prefix: str) -> list[list[str]]:
        """The names of the loader's buffers that begin so, on each rank."""
        answer = self._check(skip_tensor_list=["."])  # of all tensors, only these have no dot in their names
        names = [[name for name in rank["checksums"] if name.startswith(prefix)] for rank in answer["ranks"]]
        return [[name.replace("·", ".") for name in own] for own in names]

    def checksum(self) -> str:
        """SGLang's own checksum over the weights of all ranks, by which replicas can be compared."""
        return str(self._check(skip_tensor_list=[_MARK])["per_engine_checksum"])

    def _check(self, **options: Any) -> dict[str, Any]:
        return self._server.ask("weights_checker", action="checksum", selector="target", **options)


def _parse_mark(mark: str) -> tuple[str, int] | None:
    """The run and version of a mark; None if it has an error."""
    run, _, version = mark.partition(" ")
    return (run, int(version)) if version.isdecimal() else None
