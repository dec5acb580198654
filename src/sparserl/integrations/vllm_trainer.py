"""vLLM, trainer side: publish to a store, then have vLLM's workers commit. See docs/how-to/integrations/vllm.md.

publish ──► store ──► (workers stage it by themselves)
pause ──► start, update, finish ──► reset caches ──► resume
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch.distributed.tensor import Replicate, Shard
from vllm.distributed.weight_transfer.base import TrainerInitInfo, TrainerWeightTransferEngine, WeightSource

from ..errors import SessionError
from ..session import Publisher, SyncReport
from ..session.options import require_count
from ..sources.dtensors import is_replica, shard_regions
from ..weights.memory import Weights
from ..weights.shards import Part, Shards
from ..weights.tensors import tensor_table
from .checkpoint_engine import publisher_options
from .vllm_client import HTTPClient, WeightUpdates, paused
from .vllm_options import SparserlInitInfo, require_worker_options

_HAS_MODES = hasattr(WeightSource, "iter_full")  # until vLLM 0.32, sources are iterated, and tell what a rank holds

__all__ = ["AdapterTrainer", "HTTPClient", "OfflineClient", "SparserlTrainer", "SparserlTrainerInitInfo"]


@dataclass
class SparserlTrainerInitInfo(TrainerInitInfo):
    """Where to publish, and how.

    Args:
        profile: As for a `Publisher`; of what the engines take, if they do not take it.
        publisher: Further options of the `Publisher`, `writers` and `signing_key` among them.
        worker: Further options of the workers; see `SparserlInitInfo`.
    """

    backend: ClassVar[str] = "sparserl"

    url: str
    profile: str = "auto"
    publisher: dict[str, Any] | None = None
    worker: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        publisher_options(self.publisher, "publisher", {"url", "source", "profile"})
        require_worker_options(self.worker or {})
        SparserlInitInfo(**self.worker_info())

    def worker_info(self) -> dict[str, Any]:
        """All options of the workers."""
        return {"url": self.url, **(self.worker or {})}


class SparserlTrainer(TrainerWeightTransferEngine[SparserlTrainerInitInfo]):
    """Publishes weights, and drives vLLM through a client.

    Args:
        source: A `WeightSource` of vLLM, which is iterated on every rank and published by the first; with `writers`,
            each rank publishes what `iter_local` yields there (vLLM 0.33). Or a source of sparserl, of which each rank
            publishes its own parts if `writers` are given.
        client: An object with the four methods of `VLLMWeightSyncClient`. If it also has `pause`, `resume` and
            `reset_caches`, as the clients below have, these are called around a commit; otherwise the caller must do
            that. With `collective_rpc` and `update_weight_version`, the engine has a version before the first commit.

    Raises:
        SessionError: The first rank does not have all of the source, or the source has no parts for `writers`.
    """

    init_info_cls = SparserlTrainerInitInfo

    def __init__(self, *, client: Any, source: Any, init_info: SparserlTrainerInitInfo) -> None:
        super().__init__(client=client, source=source, is_sender=init_info.is_sender)
        self.rank = init_info.rank  # vLLM keeps it from 0.33 on
        self._info = init_info
        self._publisher: Publisher | None = None
        self._updates = WeightUpdates(client)
        options = init_info.publisher or {}
        weights = source
        is_gathered = False
        if isinstance(source, WeightSource):
            is_gathered = options.get("writers") is None
            _require(source, is_gathered)
            weights = self._whole if is_gathered else self._parts
        if init_info.is_sender or not is_gathered:
            self._publisher = Publisher(init_info.url, weights, profile=init_info.profile, **options)

    @classmethod
    def trainer_init(cls, init_info: SparserlTrainerInitInfo, *, client: Any, source: Any = None) -> SparserlTrainer:
        """Publish the weights as they are, and let the workers follow the run."""
        if source is None:
            raise SessionError("source is missing: give source=ModuleSource(model), or a source of sparserl")
        trainer = cls(client=client, source=source, init_info=init_info)
        trainer.publish()
        if trainer.is_sender:
            trainer.follow()
        return trainer

    def follow(self) -> None:
        """Let the workers follow the run; once more after an engine was restarted.

        The engine's version is then the one that its bits are, if they are of a version of the run.
        """
        self._updates.follow(self._info.worker_info())

    def publish(self) -> SyncReport | None:
        """On all ranks of the trainer: publish the weights as they are now. None on ranks that do not publish."""
        if self._publisher is None:
            for _ in _tensors_of(self.source):
                pass  # all ranks must take part in gathering
            return None
        return self._publisher.publish()

    def _whole(self) -> Weights:
        return {name: self.capture(name, tensor) for name, tensor in _tensors_of(self.source)}

    def capture(self, name: str, tensor: torch.Tensor) -> torch.Tensor:  # noqa: ARG002  # other trainers need the name
        """What is published of a tensor that vLLM's source yields."""
        return tensor.detach()

    def _parts(self) -> Shards:
        source: Any = self.source
        metas = {meta.name: meta for meta in source.metadata}
        table = tensor_table({name: torch.empty(m.shape, dtype=m.dtype, device="meta") for name, m in metas.items()})
        local = ((metas[name], tensor.detach()) for name, tensor in source.iter_local())
        return Shards(table, [part for meta, tensor in local for part in _parts_of(meta, tensor, self.rank)])

    def commit(self, version: int, *, audit: bool = False) -> None:
        """Let all workers commit a version. If one fails, this raises, and the engine is told what all of them have."""
        run = None if self._publisher is None else self._publisher.run
        self._updates.commit(version, run, audit=audit)

    def send_weights(self) -> SyncReport | None:
        """On all ranks of the trainer: publish a version, and commit it."""
        report = self.publish()
        if self.is_sender:
            assert report is not None
            self.commit(report.version)
        return report

    def shutdown(self) -> None:
        if self._publisher is not None:
            self._publisher.close()


class AdapterTrainer:
    """Publishes a LoRA adapter, and lets vLLM's workers follow it under the id that requests name.

    vLLM must have been started with `--enable-lora` and
    `--worker-extension-cls sparserl.integrations.vllm_plugin.AdapterWorker`.

    Args:
        url: Where to publish.
        source: The adapter, as `sources.lora(peft_model)`. With another source, `adapter_config.json` must be among the
            `files` of the publisher.
        client: An object with the method `collective_rpc(method, **arguments)`. If it also has `pause`, `resume` and
            `reset_caches`, these are called around a commit; otherwise the caller must do that.
        lora_id: The id of the adapter in vLLM, `LoRARequest.lora_int_id`, 1 or more.
        publisher: Further options of the `Publisher`.
        worker: Further options of the workers' `Subscriber`s, such as `trusted_keys`.

    Example:
        >>> trainer = AdapterTrainer(url, sparserl.sources.lora(model), OfflineClient(llm))       # doctest: +SKIP
        >>> trainer.send_weights()                                                                # doctest: +SKIP
    """

    def __init__(
        self,
        url: str,
        source: Any,
        client: Any,
        lora_id: int = 1,
        publisher: dict[str, Any] | None = None,
        worker: dict[str, Any] | None = None,
    ) -> None:
        require_count("lora_id", lora_id)
        options = publisher_options(publisher, "publisher", {"url", "source"})
        self.client = client
        self.lora_id = lora_id
        self._publisher = Publisher(url, source, **options)
        self._publisher.publish()
        client.collective_rpc("sparserl_follow_adapter", lora_id=lora_id, url=url, **(worker or {}))

    def publish(self) -> SyncReport:
        """Publish the adapter as it is now."""
        return self._publisher.publish()

    def commit(self, version: int | None = None) -> None:
        """Let all workers commit a version, by default the newest. If one fails, this raises, and all keep theirs."""
        with paused(self.client):
            run = self._publisher.run
            self.client.collective_rpc("sparserl_commit_adapter", lora_id=self.lora_id, version=version, run=run)

    def send_weights(self) -> SyncReport:
        """Publish a version, and commit it."""
        report = self.publish()
        self.commit(report.version)
        return report

    def shutdown(self) -> None:
        self._publisher.close()


def metadata_of(source: WeightSource) -> list[Any]:
    """What a source of vLLM says of its parameters."""
    metadata = source.metadata
    return list(metadata() if callable(metadata) else metadata)  # a method until vLLM 0.32


def _tensors_of(source: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """The whole tensors that a source of vLLM has on this rank."""
    return iter(source.iter_full() if _HAS_MODES else source)


def _require(source: Any, is_gathered: bool) -> None:
    """Refuse a source of which rank 0, which publishes it, does not have all; one without parts where ranks publish."""
    if not is_gathered:
        if not (_HAS_MODES and source.implements_iter_local()):
            raise SessionError(
                f"{type(source).__name__} has no iter_local (vLLM 0.33): leave `writers` out, or give a source of "
                "sparserl, such as sparserl.sources.fsdp(model)"
            )
        return
    if _HAS_MODES:
        is_split = any(meta.owners is not None and 0 not in meta.owners for meta in source.metadata)
    else:
        is_split = source.held_names() is not None
    if is_split:
        raise SessionError(
            "rank 0 does not have all tensors of the source: give publisher={'writers': process_group}, and a source "
            "with iter_local (vLLM 0.33) or one of sparserl"
        )


def _parts_of(meta: Any, shard: torch.Tensor, rank: int) -> Iterator[Part]:
    """What a rank publishes of a parameter: its shard, unless it is a replica."""
    owners = meta.owners or (0,)
    if rank not in owners:
        return
    placements: list[Any] = [Replicate()]
    mesh_shape = (len(owners),)
    if 0 in meta.shape:
        shard = shard.new_empty(meta.shape)
    elif meta.placements is not None:
        placements = [Shard(p.dim) if hasattr(p, "dim") else Replicate() for p in meta.placements]
        mesh_shape = meta.mesh_shape
    coordinate = [int(index) for index in np.unravel_index(owners.index(rank), mesh_shape)]
    if not is_replica(placements, coordinate):
        for region, data in shard_regions(meta.name, meta.shape, shard, placements, mesh_shape, coordinate):
            yield Part(meta.name, region, data)


class OfflineClient:
    """Calls an `LLM` in this process."""

    def __init__(self, llm: Any) -> None:
        self.llm = llm

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self.llm.init_weight_transfer_engine({"init_info": init_info})

    def start_weight_update(self) -> None:
        self.llm.start_weight_update()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.llm.update_weights({"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.llm.finish_weight_update(weight_version)

    def update_weight_version(self, version: str) -> None:
        """Tell the engine what its weights are."""
        self.llm.update_weight_version(version)

    def collective_rpc(self, method: str, **arguments: Any) -> list[Any]:
        """Call a method of all workers, and return what each answers."""
        return list(self.llm.collective_rpc(method, kwargs=arguments))

    def reset_caches(self) -> None:
        """Drop what was computed with the old weights."""
        if not self.llm.reset_prefix_cache(reset_running_requests=True):
            raise SessionError("vLLM could not reset its prefix cache: it has entries of the old weights")
        self.llm.llm_engine.reset_encoder_cache()  # of images
