"""vLLM, trainer side: publish to a store, then have vLLM's workers commit. See docs/how-to/integrations/vllm.md.

publish ──► store ──► (workers stage it by themselves)
pause ──► start, update, finish ──► reset caches ──► resume
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any, ClassVar

from vllm.distributed.weight_transfer.base import TrainerInitInfo, TrainerWeightTransferEngine, WeightSource

from ..errors import SessionError
from ..session import Publisher, SyncReport
from ..sources import Source
from ..weights.memory import Weights
from ..weights.shards import Shards


@dataclass
class SparserlTrainerInitInfo(TrainerInitInfo):
    """Where to publish, and how.

    profile: `ctx`, the smallest, and `auto`, which may choose it, can be taken by engines of one rank alone.
    publisher: further options of the `Publisher`, `writers` and `signing_key` among them.
    worker: further options of the workers; see `SparserlInitInfo`.
    """

    backend: ClassVar[str] = "sparserl"

    url: str
    profile: str = "ulp"
    publisher: dict[str, Any] | None = None
    worker: dict[str, Any] | None = None


class SparserlTrainer(TrainerWeightTransferEngine[SparserlTrainerInitInfo]):
    """Publishes weights, and drives vLLM through a client.

    source: a `WeightSource` of vLLM, which is gone through on every rank and published by the first; or a source of
        sparserl, whose ranks each publish their own parts if `writers` are given.
    client: the four methods of `VLLMWeightSyncClient`. Where it has `pause`, `resume` and `reset_caches` too, as those
        below, these are called around a commit; else whoever trains has to.
    """

    init_info_cls = SparserlTrainerInitInfo

    def __init__(self, *, client: Any, source: Any, init_info: SparserlTrainerInitInfo) -> None:
        super().__init__(client=client, source=source, is_sender=init_info.is_sender)
        self._info = init_info
        self._publisher: Publisher | None = None
        self._open = False  # whether an update was begun and not finished
        if init_info.is_sender or not isinstance(source, WeightSource):
            weights = _Gathered(source) if isinstance(source, WeightSource) else source
            self._publisher = Publisher(
                init_info.url, weights, profile=init_info.profile, **(init_info.publisher or {})
            )

    @classmethod
    def trainer_init(cls, init_info: SparserlTrainerInitInfo, *, client: Any, source: Any = None) -> SparserlTrainer:
        """Publish the weights as they are, and have the workers follow the run."""
        if source is None:
            raise SessionError("say what is to be published: source=ModuleSource(model), or a source of sparserl")
        trainer = cls(client=client, source=source, init_info=init_info)
        trainer.publish()
        if trainer.is_sender:
            client.init_weight_transfer_engine({"url": init_info.url, **(init_info.worker or {})})
        return trainer

    def publish(self) -> SyncReport | None:
        """On all ranks of the trainer: publish the weights as they are now. None where this rank has no part in it."""
        if self._publisher is None:
            for _ in self.source or ():
                pass  # gathering is work of all ranks
            return None
        return self._publisher.publish()

    def commit(self, version: int, *, audit: bool = False) -> None:
        """Have all workers commit a version. Raises what went wrong with it; they then hold what they held before."""
        pause, resume, reset = (getattr(self.client, name, None) for name in ("pause", "resume", "reset_caches"))
        if pause is not None:
            pause()
        try:
            if self._open:  # of workers that fail, one says so and has ended its update; those of the rest are open
                with contextlib.suppress(Exception):
                    self.client.finish_weight_update()
            self._open = True
            self.client.start_weight_update()
            self.client.update_weights({"version": version, "audit": audit})
            self.client.finish_weight_update(str(version))
            self._open = False
            if reset is not None:
                reset()
        finally:
            if resume is not None:
                resume()

    def send_weights(self) -> SyncReport | None:
        """On all ranks of the trainer: publish, and commit what was published."""
        report = self.publish()
        if self.is_sender:
            assert report is not None
            self.commit(report.version)
        return report

    def shutdown(self) -> None:
        if self._publisher is not None:
            self._publisher.close()


class _Gathered(Source):
    """What vLLM's source yields."""

    def __init__(self, source: WeightSource) -> None:
        self._source = source

    def weights(self) -> Weights | Shards:
        return {name: tensor.detach() for name, tensor in self._source}


class OfflineClient:
    """Reaches an `LLM` in this process."""

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

    def reset_caches(self) -> None:
        """Forget what was computed with other weights."""
        if not self.llm.reset_prefix_cache(reset_running_requests=True):
            raise SessionError("vLLM could not reset its prefix cache: it holds entries of the weights before")


class HTTPClient:
    """Reaches a vLLM server that was started with VLLM_SERVER_DEV_MODE=1, on which requests wait during a commit."""

    def __init__(self, base_url: str, timeout: float = 300) -> None:
        self.base_url = base_url.rstrip("/")
        self.timeout = timeout

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._post("init_weight_transfer_engine", {"init_info": init_info})

    def start_weight_update(self) -> None:
        self._post("start_weight_update")

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self._post("update_weights", {"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._post("finish_weight_update", {"weight_version": weight_version})

    def pause(self) -> None:
        """Let no step of the engine begin; requests are kept."""
        self._post("pause?mode=keep")

    def resume(self) -> None:
        self._post("resume")

    def reset_caches(self) -> None:
        """Forget what was computed with other weights; requests that were begun are computed anew."""
        if not self._post("reset_prefix_cache?reset_running_requests=true&reset_external=true").get("success", True):
            raise SessionError("vLLM could not reset its prefix cache: it holds entries of the weights before")

    def _post(self, path: str, json: dict[str, Any] | None = None) -> dict[str, Any]:
        import requests

        answer = requests.post(f"{self.base_url}/{path}", json=json, timeout=self.timeout)
        if not answer.ok:
            raise SessionError(f"vLLM answered {answer.status_code} to {path}: {answer.text[:2000]}")
        found: dict[str, Any] = answer.json()
        return found
