"""SGLang: a weight loader that fetches and commits by itself, on every rank of an engine, and a client that drives it.

    client: pause ──► begin ──► update_weights_from_tensor, with a URL for a tensor ──► end ──► check ──► continue
    loader: on the first call find out where the checkpoint is in the model ──► what do all ranks hold?
            on every call staged on all ranks ──► commit on all, or on none      (meanwhile, on a thread: stage ahead)

The server is started with `--custom-weight-loader sparserl.integrations.sglang.load`. See its page in docs.

What a loader returns is lost, and what it raises ends the server. So it raises nothing, and leaves a mark: a buffer of
the model, whose name says which version is held, or what went wrong. `/weights_checker` tells the names of all buffers.
"""

from __future__ import annotations

import base64
import json
import pickle
import threading
import urllib.error
import urllib.request
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from os import PathLike, fspath
from typing import Any, TypeVar

import torch

from ..errors import SessionError, UnsupportedTensor
from ..session.store.retention import read_head, read_run
from ..targets.engine import EngineTarget
from ..targets.engine_layout import CheckpointTensor, Piece, find_pieces, parts_of
from ..transport.stores.opening import open_store
from ..weights.digest import digest
from .ranks import EngineSubscriber, over

T = TypeVar("T")
Tensors = dict[str, torch.Tensor]

LOADER = f"{__name__}.load"
_MARK = "sparserl: "
_LOOK = 1.0  # seconds that a thread waits for a new version before it sees whether it is to end


# -- inside the engine -------------------------------------------------------------------------------------------------

_followers: weakref.WeakKeyDictionary[torch.nn.Module, _Follower] = weakref.WeakKeyDictionary()


def load(model: torch.nn.Module, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Commit the version that a control tensor asks for, on all ranks or on none; SGLang calls this on every rank."""
    try:
        (said,) = (json.loads(t.cpu().numpy().tobytes()) for name, t in named_tensors if name == "sparserl")
        if model not in _followers:
            _followers[model] = _Follower(model)
        mark = _followers[model].hold(said.pop("version"), said.pop("ahead"), said)
    except Exception as error:  # noqa: BLE001  # SGLang's scheduler would end
        mark = f"failed: {type(error).__name__}: {error}"
    _leave(model, mark)


def _leave(model: torch.nn.Module, mark: str) -> None:
    """Replace the mark of a model."""
    for name in [name for name, _ in model.named_buffers(recurse=False) if name.startswith(_MARK)]:
        delattr(model, name)
    device = next(model.parameters()).device
    name = _MARK + mark[:1000].replace(".", "·")  # a dot in a buffer's name would be part of a path
    model.register_buffer(name, torch.zeros(4, dtype=torch.uint8, device=device), persistent=False)


class _Follower:
    """What follows a run on one rank, into one model."""

    def __init__(self, model: torch.nn.Module) -> None:
        from sglang.srt.distributed import get_tp_group

        group = get_tp_group()
        self._model: Any = weakref.proxy(model)
        self._rank = group.rank_in_group
        self._gather = over(group)
        self._pieces: list[Piece] = []
        self._layout: dict[str, Any] = {}
        self._from: dict[str, Any] = {}
        self._subscriber: EngineSubscriber | None = None
        self._stale = False  # whether the model has yet to compute what it makes of its weights
        self._lock = threading.Lock()  # either the engine or the thread is at work on the subscriber
        self._thread: threading.Thread | None = None

    def hold(self, version: int | None, ahead: bool, store: dict[str, Any]) -> str:
        """On all ranks at once: commit a version. Returns the mark for it."""
        with self._lock:
            if self._subscriber is None or store != self._from:
                self._subscriber = self._follow(**store)
                self._from = store
            self._agreed(self._require_layout)
            _settle()  # steps that were begun still read the weights
            self._stale |= self._subscriber.hold(version) is not None
            if self._stale:
                _refresh(self._model)
                self._stale = False
            _settle()
            mark = f"{self._subscriber.run} {self._subscriber.version}"
        if ahead and self._thread is None:
            self._thread = threading.Thread(target=_stage_ahead, args=(weakref.ref(self),), daemon=True)
            self._thread.start()
        return mark

    def ahead(self) -> None:
        """Stage what is new, and wait a while for more."""
        with self._lock:
            if (subscriber := self._subscriber) is not None:
                subscriber.ahead()
        if subscriber is not None:
            subscriber.wait(_LOOK)

    def _follow(self, url: str, key: str | None, **options: Any) -> EngineSubscriber:
        if self._subscriber is not None:
            self._subscriber.close()
            self._subscriber = None
        if not self._pieces:
            learnt_now = self._agreed(lambda: self._learn(url, key, options["token"]))
            self._pieces, self._layout = learnt_now, _layout(self._model)
        target = EngineTarget(self._pieces, lambda: tensors_of(self._model), tied_names(self._model))
        return self._agreed(
            lambda: EngineSubscriber(url, target, self._rank, self._gather, trusted_keys=key, **options)
        )

    def _learn(self, url: str, key: str | None, token: str | None) -> list[Piece]:
        with closing(open_store(url, token=token)) as store:
            table = read_run(store, read_head(store, key)[0]).table
        tensors = [CheckpointTensor(spec.name, spec.shape, getattr(torch, spec.dtype.name)) for spec in table.specs]
        return learnt(self._model, tensors)

    def _require_layout(self) -> None:
        if _layout(self._model) != self._layout:
            raise UnsupportedTensor("the model's tensors are laid out otherwise than when they were learnt")

    def _agreed(self, work: Callable[[], T]) -> T:
        """Do some work; if it fails on any rank, all raise."""
        try:
            made = work()
        except Exception as error:
            self._gather(f"{type(error).__name__}: {error}")
            raise
        for rank, failed in enumerate(self._gather(None)):
            if failed is not None:
                raise SessionError(f"rank {rank} of the engine: {failed}")
        return made


def _stage_ahead(follower: Callable[[], _Follower | None]) -> None:
    while (found := follower()) is not None:
        found.ahead()
        del found


def learnt(model: Any, tensors: Sequence[CheckpointTensor]) -> list[Piece]:
    """Where checkpoint tensors lie in a model, found by having it load some more times; it then is what it was."""
    live = tensors_of(model)
    made = _made(model)
    kept = {name: tensor.to("cpu", copy=True) for name, tensor in live.items()}
    before = {at: (tensor, tensor.to("cpu", copy=True)) for at, tensor in made.items()}
    try:
        pieces = find_pieces(tensors, live, model.load_weights)
        changed = [at[1] for at, tensor in _made(model).items() if at not in before or not _same(tensor, before[at][1])]
    finally:
        for name, tensor in live.items():
            tensor.copy_(kept[name])
        for (module, label), (tensor, bits) in before.items():
            setattr(module, label, tensor.copy_(bits))
        _refresh(model)
    if changed and not hasattr(model, "post_load_weights"):
        raise UnsupportedTensor(f"{changed[0]!r} is computed of the weights when they are loaded: it would not follow")
    return pieces


def tensors_of(model: torch.nn.Module) -> Tensors:
    """What a model consists of; marks are no part of it."""
    return {name: tensor for name, tensor in parts_of(model).items() if not name.startswith(_MARK)}


def tied_names(model: torch.nn.Module) -> dict[str, str]:
    """Checkpoint tensors that are left out when weights are loaded, and those that they are the same as."""
    tied = getattr(getattr(model, "config", None), "tie_word_embeddings", False)
    return {"lm_head.weight": "model.embed_tokens.weight"} if tied else {}


def _made(model: torch.nn.Module) -> dict[tuple[torch.nn.Module, str], torch.Tensor]:
    """Tensors that modules keep beside parameters and buffers, and that are not views of those."""
    known = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    return {
        (module, label): value
        for module in model.modules()
        for label, value in vars(module).items()
        if isinstance(value, torch.Tensor) and value.numel() and value.untyped_storage().data_ptr() not in known
    }


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors have the same bits."""
    return digest({"": a.detach().contiguous()}) == digest({"": b.detach().contiguous()})


def _refresh(model: Any) -> None:
    """Have the model compute what it makes of its weights, as SGLang does after other ways than its own loading."""
    if hasattr(model, "post_load_weights"):
        model.post_load_weights()


def _layout(model: torch.nn.Module) -> dict[str, Any]:
    return {name: (t.dtype, tuple(t.shape), t.stride()) for name, t in tensors_of(model).items()}


def _settle() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


# -- outside of it -----------------------------------------------------------------------------------------------------


def request(
    store: str,
    version: int | None = None,
    *,
    ranks: int = 1,
    key: str | None = None,
    run: str | None = None,
    token: str | None = None,
    ahead: bool = True,
    flush_cache: bool = True,
) -> dict[str, Any]:
    """What to post to `/update_weights_from_tensor`, between begin and end; for those who have a client of their own.

    ranks: the tensor-parallel size of the engine. The rest is as for `Client.update`.
    """
    said = {"url": store, "key": key, "run": run, "token": token, "version": version, "ahead": ahead}
    control = torch.frombuffer(bytearray(json.dumps(said).encode()), dtype=torch.uint8)
    payload = base64.b64encode(pickle.dumps([("sparserl", control)])).decode()
    return {
        "serialized_named_tensors": [payload] * ranks,
        "load_format": LOADER,
        "flush_cache": flush_cache,
        "selector": "target",
    }


class Client:
    """Brings a running server to versions of a run.

    >>> client = Client("http://localhost:30000")                                                  # doctest: +SKIP
    >>> client.update("s3://bucket/run")                                                           # doctest: +SKIP
    ('12e9e740decf9cd4', 42)

    url: of the server. `api_key`: its admin key, if it asks for one.
    mode: what becomes of requests that are running: they are computed anew (`retract`), ended (`abort`), or go on with
        what the old weights have left in the cache (`in_place`), which is then not flushed.
    """

    def __init__(self, url: str, *, api_key: str | None = None, mode: str = "retract", timeout: float = 600.0) -> None:
        self.url = url.rstrip("/")
        self._mode = mode
        self._timeout = timeout
        self._headers = {"Content-Type": "application/json"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"

    def update(
        self,
        store: str,
        version: int | None = None,
        *,
        key: str | None = None,
        run: str | None = None,
        token: str | None = None,
        ahead: bool = True,
    ) -> tuple[str, int]:
        """Have the engine commit a version (the newest, if none is given) in a pause; returns run and version.

        store, key, run, token: as for a `Subscriber`; the engine's ranks fetch from the store themselves.
        ahead: whether they go on to stage what is published, so that the next pause is shorter.
        """
        ranks = int(self._ask("server_info")["tp_size"])
        flush = self._mode != "in_place"
        said = request(store, version, ranks=ranks, key=key, run=run, token=token, ahead=ahead, flush_cache=flush)
        self._ask("pause_generation", mode=self._mode)
        try:
            self._ask("begin_weight_update", selector="target")
        except SessionError:
            self._ask("continue_generation")
            raise
        failed = None
        try:
            self._ask("update_weights_from_tensor", **said)
        except SessionError as error:
            failed = error
        self._ask("end_weight_update")
        marks = self.marks()
        held, *others = {_held(mark) for mark in marks}
        if others:
            raise SessionError(f"ranks of {self.url} hold different versions, generation stays paused: {marks}")
        if held is not None:
            self._ask("update_weight_version", new_version=f"{held[0]}:{held[1]}", abort_all_requests=False)
        self._ask("continue_generation")
        if failed is not None:
            raise failed
        if held is None:
            raise SessionError(f"{self.url} has kept the weights that it had: {'; '.join(dict.fromkeys(marks))}")
        return held

    def reload(self, path: str | PathLike[str], version: str | None = None) -> None:
        """Have the engine load a checkpoint folder, in a pause: what `sparserl follow` has written, say."""
        self._ask("pause_generation", mode=self._mode)
        try:
            self._ask(
                "update_weights_from_disk",
                model_path=fspath(path),
                weight_version=version,
                flush_cache=self._mode != "in_place",
            )
        finally:
            self._ask("continue_generation")

    def marks(self) -> list[str]:
        """What each rank of the engine says of the last update."""
        found = self._check(skip_tensor_list=["."])  # of all tensors, marks alone have no dot in their names
        marks = [[name for name in rank["checksums"] if name.startswith(_MARK)] for rank in found["ranks"]]
        return [one[0].removeprefix(_MARK).replace("·", ".") if one else "never updated" for one in marks]

    def checksum(self) -> str:
        """SGLang's own checksum over the weights of all ranks, by which replicas can be compared."""
        return str(self._check(skip_tensor_list=[_MARK])["per_engine_checksum"])

    def _check(self, **options: Any) -> dict[str, Any]:
        return self._ask("weights_checker", action="checksum", selector="target", **options)

    def _ask(self, path: str, **said: Any) -> dict[str, Any]:
        data = json.dumps(said).encode() if said or path != "server_info" else None
        asked = urllib.request.Request(f"{self.url}/{path}", data, self._headers)  # noqa: S310  # the user's own server
        try:
            with urllib.request.urlopen(asked, timeout=self._timeout) as answer:  # noqa: S310
                body = answer.read()
        except urllib.error.HTTPError as error:
            raise SessionError(
                f"{self.url}/{path}: {error.code} {error.read().decode(errors='replace')[:500]}"
            ) from error
        except OSError as error:
            raise SessionError(f"{self.url}/{path}: {error}") from error
        found: dict[str, Any] = json.loads(body)
        if found.get("success") is False:
            raise SessionError(f"{self.url}/{path}: {found.get('message')}")
        return found


def _held(mark: str) -> tuple[str, int] | None:
    """Run and version, if that is what a mark says."""
    run, _, version = mark.partition(" ")
    return (run, int(version)) if version.isdecimal() else None
