"""OpenRLHF: the actor publishes to a store, and vLLM's workers commit. See docs/how-to/integrations/openrlhf.md.

publish (each rank of ZeRO-3 its shards, or rank 0 all) ──► store ──► (workers stage it by themselves)
rank 0 ──► every engine, through Ray: start, update, finish ──► reset the prefix cache

The page has the change to OpenRLHF that calls this.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from ..errors import PeerLost, SessionError
from ..session import Publisher, SyncReport
from ..sources import fsdp, module
from ..sources.flat_shards import sharding_of
from . import environment
from .vllm_client import WeightUpdates

T = TypeVar("T")


class WeightSync:
    """Publishes the weights of an actor, and has OpenRLHF's engines commit them; one on every rank of the actor.

    Args:
        args: OpenRLHF's arguments; `vllm.sync_url` is the store.
        model: The module of the actor's DeepSpeed engine.
        engines: The actors of Ray that have the engines; rank 0 calls them.
        options: Further options of the `Publisher`.
    """

    def __init__(self, args: Any, model: torch.nn.Module, engines: Sequence[Any], **options: Any) -> None:
        _require_whole_layers(args)
        url: str = args.vllm.sync_url
        is_sharded = sharding_of(model) is not None
        self._is_first = torch.distributed.get_rank() == 0
        self._publisher: Publisher | None = None
        self._updates = WeightUpdates(RayEngines(engines, resets_cache=args.vllm.enable_prefix_caching))
        if is_sharded or self._is_first:
            source = (fsdp if is_sharded else module)(model, cast=torch.bfloat16)  # what OpenRLHF's engines compute in
            writers = torch.distributed.group.WORLD if is_sharded else None
            options = environment.publisher_options() | options
            self._publisher = Publisher(url, source, writers=writers, **options)

        def begin() -> None:
            if self._publisher is not None:
                self._publisher.publish()
            if self._is_first:
                init_info = {"url": url, "trusted_keys": environment.trusted_keys()}
                RayEngines(engines).init_weight_transfer_engine(init_info)

        _together(begin)

    def send_weights(self) -> SyncReport | None:
        """On all ranks: publish a version; rank 0 has all engines commit it. None on ranks that do not publish.

        Raises:
            PeerLost: Rank 0 failed, which raises the error itself.
        """
        return _together(self._send)

    def _send(self) -> SyncReport | None:
        if self._publisher is None:
            return None
        report = self._publisher.publish()
        if self._is_first:
            self._updates.commit(report.version, self._publisher.run)
        return report

    def close(self) -> None:
        if self._publisher is not None:
            self._publisher.close()


class RayEngines:
    """A client of all engines at once, by the method `weight_transfer` of their actors.

    Args:
        resets_cache: Whether to drop what was computed with the old weights, after each commit.
    """

    def __init__(self, engines: Sequence[Any], *, resets_cache: bool = False) -> None:
        self._engines = engines
        if resets_cache:
            self.reset_caches = self._reset_caches

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._call("init_weight_transfer_engine", init_info=init_info)

    def start_weight_update(self) -> None:
        self._call("start_weight_update")

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self._call("update_weights", update_info=update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:  # noqa: ARG002  # OpenRLHF asks for none
        self._call("finish_weight_update")

    def _reset_caches(self) -> None:
        import ray

        ray.get([engine.reset_prefix_cache.remote() for engine in self._engines])

    def _call(self, method: str, **arguments: Any) -> None:
        import ray

        ray.get([engine.weight_transfer.remote(method, **arguments) for engine in self._engines])


def _together(work: Callable[[], T]) -> T:
    """Do something on all ranks. All raise if rank 0 fails: the others would wait for it at OpenRLHF's next barrier."""
    failure: Exception | None = None
    try:
        result = work()
    except Exception as error:  # noqa: BLE001  # it is raised below, once the others know of it
        failure = error
    is_first = torch.distributed.get_rank() == 0
    message = [f"{type(failure).__name__}: {failure}" if is_first and failure is not None else None]
    torch.distributed.broadcast_object_list(message, src=0)
    if failure is not None:
        raise failure
    if message[0] is not None:
        raise PeerLost(f"rank 0 failed: {message[0]}")
    return result


def _require_whole_layers(args: Any) -> None:
    """Refuse actors whose parameters are not those of the checkpoint that the engines have loaded."""
    if args.vllm.sync_url is None:
        raise SessionError("--vllm.sync_backend sparserl needs --vllm.sync_url, the store of the run")
    if args.ds.tensor_parallel_size > 1:
        raise SessionError(
            "--ds.tensor_parallel_size is more than 1: only ZeRO's shards can be published, not DeepSpeed's TP"
        )
    if args.ds.lora.rank > 0:
        raise SessionError("--ds.lora.rank is more than 0: adapters have other names than the engines' weights")
