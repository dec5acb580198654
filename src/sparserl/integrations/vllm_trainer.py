"""vLLM, trainer side: publish to a store, then have vLLM's workers commit. See docs/how-to/integrations/vllm.md.

publish ──► store ──► (workers stage it by themselves)
pause ──► start, update, finish ──► reset caches ──► resume
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from vllm.distributed.weight_transfer.base import TrainerInitInfo, TrainerWeightTransferEngine, WeightSource

from ..errors import SessionError
from ..session import Publisher, SyncReport
from ..session.options import require_count
from ..sources import Source
from ..weights.memory import Weights
from ..weights.shards import Shards
from .checkpoint_engine import publisher_options
from .vllm_client import HTTPClient, WeightUpdates, paused
from .vllm_options import SparserlInitInfo, require_worker_options

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
        source: A `WeightSource` of vLLM, which is iterated on every rank and published by the first; or a source of
            sparserl, of which each rank publishes its own parts if `writers` are given.
        client: An object with the four methods of `VLLMWeightSyncClient`. If it also has `pause`, `resume` and
            `reset_caches`, as the clients below have, these are called around a commit; otherwise the caller must do
            that. With `collective_rpc` and `update_weight_version`, the engine has a version before the first commit.
    """

    init_info_cls = SparserlTrainerInitInfo

    def __init__(self, *, client: Any, source: Any, init_info: SparserlTrainerInitInfo) -> None:
        super().__init__(client=client, source=source, is_sender=init_info.is_sender)
        self._info = init_info
        self._publisher: Publisher | None = None
        self._updates = WeightUpdates(client)
        if init_info.is_sender or not isinstance(source, WeightSource):
            weights = _VLLMSource(source) if isinstance(source, WeightSource) else source
            self._publisher = Publisher(
                init_info.url, weights, profile=init_info.profile, **(init_info.publisher or {})
            )

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
            for _ in self.source or ():
                pass  # all ranks must take part in gathering
            return None
        return self._publisher.publish()

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


class _VLLMSource(Source):
    """The tensors that vLLM's source yields."""

    def __init__(self, source: WeightSource) -> None:
        self._source = source

    def weights(self) -> Weights | Shards:
        return {name: tensor.detach() for name, tensor in self._source}


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
