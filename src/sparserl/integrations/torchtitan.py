"""torchtitan RL: a controller whose trainer publishes to a store that its generators follow, in place of TorchStore.

    PolicyTrainer.push_model_state_dict ──► every rank publishes its shards ──► store
    VLLMGenerator.pull_model_state_dict ◄── every rank commits its parts, all or none ◄──┘

torchtitan builds the controller that a config belongs to, so that a config is all there is to change:
`with_store` makes one of any other. See docs/how-to/integrations/torchtitan.md.
"""

from __future__ import annotations

import asyncio
import gc
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ..errors import SessionError
from ..session import Publisher
from ..sources.casting import buffers_among, cast_of
from ..sources.dtensors import shards_of
from ..targets.dtensors import dtensors
from ..weights.shards import Shards
from .ranks import EngineSubscriber

try:
    from monarch.actor import concurrent_endpoint
    from torchtitan.distributed.spmd_types import plain_tensor_to_dtensor_state_dict
    from torchtitan.distributed.utils import get_spmd_backend
    from torchtitan.experiments.rl.actors.generator import VLLMGenerator
    from torchtitan.experiments.rl.actors.trainer import PolicyTrainer
    from torchtitan.experiments.rl.controller import Controller
except ImportError as missing:
    raise ImportError(f"torchtitan RL cannot be imported; it came with torchtitan 0.3: {missing}") from missing


@dataclass(kw_only=True, frozen=True)
class StoreConfig:
    """The store between the trainer and its generators.

    Args:
        url: A folder on a shared disk, or an `s3://`, `gs://` or `az://` URL, which all processes can reach.
        state: A folder in which each rank of the trainer keeps what it needs to go on with the run after a restart.
        baseline: Where the trainer keeps the bits of the last version, as for a `Publisher`: `host`, or `device`.
        signing_key_file: A file with the secret key with which the trainer signs.
        trusted_keys: The public keys that generators trust.
    """

    url: str
    state: str | None = None
    baseline: str = "auto"
    signing_key_file: str | None = None
    trusted_keys: tuple[str, ...] | None = None


class PublishingTrainer(PolicyTrainer):  # type: ignore[misc]
    """A trainer that publishes a version where torchtitan's puts its state dict into TorchStore."""

    def __init__(self, config: Any, *, store: StoreConfig, **options: Any) -> None:
        super().__init__(config, **options)
        self._store = store
        self._publisher: Publisher | None = None
        self._shards: Shards | None = None

    @concurrent_endpoint  # type: ignore[untyped-decorator]
    async def push_model_state_dict(self) -> None:
        """On all ranks at once: publish the weights in the dtype of the generators."""
        # The state dict is made here, not on the thread: FSDP reshards for it, and no forward pass may run then.
        tensors = self.model.state_dict(keep_vars=True)
        buffers = buffers_among(self.model, tensors)
        self._shards = shards_of(tensors, cast=cast_of(self._transfer_dtype), buffers=buffers)
        if self._publisher is None:
            self._publisher = self._open_publisher()
        await asyncio.to_thread(self._publisher.publish, step=self.policy_version)

    @concurrent_endpoint  # type: ignore[untyped-decorator]
    async def close(self) -> None:
        """Close the publisher; torchtitan's own method releases nothing."""
        if self._publisher is not None:
            self._publisher.close()
            self._publisher = None

    def _open_publisher(self) -> Publisher:
        store = self._store
        key_file = store.signing_key_file
        return Publisher(
            store.url,
            self._captured,
            signing_key=None if key_file is None else Path(key_file).read_text().strip(),
            state=store.state,
            baseline=store.baseline,
            writers=dist.group.WORLD if dist.get_world_size() > 1 else None,
        )

    def _captured(self) -> Shards:
        assert self._shards is not None
        return self._shards


class FollowingGenerator(VLLMGenerator):  # type: ignore[misc]
    """A generator that commits the newest version where torchtitan's copies a state dict from TorchStore."""

    _pull_model_state_dict_future: Any

    def __init__(self, config: Any, *, store: StoreConfig, **options: Any) -> None:
        super().__init__(config, **options)
        self._store = store
        self._state: dict[str, Any] = {}
        self._subscriber: EngineSubscriber | None = None

    async def _pull_model_state_dict(self, version: int) -> None:
        """On all ranks at once, between two steps of the engine: commit the newest version of the store."""
        if self._subscriber is None:
            self._subscriber = self._open_subscriber()
        await asyncio.to_thread(self._subscriber.commit_version)
        # Parts of fused parameters are copies in a state dict; loading it writes them to the parameters.
        self._get_model().model.load_state_dict(self._state, strict=False)
        self.policy_version = version
        if self.config.reset_prefix_cache_on_weight_sync:
            self._engine.reset_prefix_cache(reset_running_requests=self.config.reset_running_requests_on_weight_sync)
        gc.collect()
        future = self._pull_model_state_dict_future
        if self._rank == 0 and future is not None:
            self._pull_model_state_dict_future = None
            self._model_state_dict_pull_request = None
            future.set_result(version)

    def _open_subscriber(self) -> EngineSubscriber:
        """A subscriber of the model's state dict, which is kept: its tensors share memory with most parameters."""
        model = self._get_model()
        self._state = model.model.state_dict()
        sharded = self._state
        if get_spmd_backend() == "spmd_types":
            layouts = model.get_state_dict_layouts()
            sharded = plain_tensor_to_dtensor_state_dict(
                self._state, state_dict_layouts=layouts, parallel_dims=model.parallel_dims
            )
        group = dist.new_group(backend="gloo")

        def gather(value: Any) -> list[Any]:
            values = [value] * dist.get_world_size()
            dist.all_gather_object(values, value, group=group)
            return values

        keys = self._store.trusted_keys
        return EngineSubscriber(
            self._store.url,
            dtensors(sharded),
            self._rank,
            gather,
            trusted_keys=None if keys is None else [*keys],
        )


class StoreController(Controller):  # type: ignore[misc]
    """torchtitan's controller, with a trainer and generators that sync through a store. Made by `with_store`."""

    trainer_class: type[PublishingTrainer] = PublishingTrainer
    generator_class: type[FollowingGenerator] = FollowingGenerator

    @dataclass(kw_only=True, slots=True)
    class Config(Controller.Config):  # type: ignore[misc]
        """torchtitan's config and the store."""

        store: StoreConfig

    async def setup_async(self, *, trainer_mesh: Any, generator_meshes: list[Any]) -> None:
        """Start the actors, and sync once."""
        store = self.config.store
        await super().setup_async(
            trainer_mesh=_MeshOf(trainer_mesh, PolicyTrainer, self.trainer_class, store),
            generator_meshes=[_MeshOf(mesh, VLLMGenerator, self.generator_class, store) for mesh in generator_meshes],
        )


class _MeshOf:
    """A mesh of processes on which one class of actors is started in place of another."""

    def __init__(self, mesh: Any, replaced: type, actor: type, store: StoreConfig) -> None:
        self._mesh = mesh
        self._replaced = replaced
        self._actor = actor
        self._store = store

    def spawn(self, name: str, actor: type, *args: Any, **options: Any) -> Any:
        """Start actors; those of the replaced class get the store."""
        if actor is self._replaced:
            return self._mesh.spawn(name, self._actor, *args, store=self._store, **options)
        return self._mesh.spawn(name, actor, *args, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._mesh, name)


def with_store(config: Any, store: StoreConfig) -> StoreController.Config:
    """The same config, whose trainer and generators sync through a store.

    Args:
        config: A config of torchtitan's `Controller`, from a config registry.
        store: The store.

    Raises:
        SessionError: It is the config of another controller.

    >>> def my_config():                                                                            # doctest: +SKIP
    ...     return with_store(rl_grpo_qwen3_0_6b_varlen(), StoreConfig(url="s3://bucket/run"))
    """
    if type(config) is not Controller.Config:
        raise SessionError(f"the config is a {type(config).__qualname__}; it must be a Controller.Config of torchtitan")
    return StoreController.Config(store=store, **{field.name: getattr(config, field.name) for field in fields(config)})
