"""Workers for verl's real manager, on Ray: a trainer without a model, and rollouts that keep what they are given."""

from __future__ import annotations

import torch
from verl.checkpoint_engine import CheckpointEngineRegistry, CheckpointEngineWorker
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, register
from verl.utils.import_utils import import_external_libs


class Trainer(Worker):
    """Makes its engine and sends its weights as verl's `ActorRolloutRefWorker` does."""

    def __init__(self, config, weights) -> None:
        super().__init__()
        torch.distributed.init_process_group("gloo")
        import_external_libs(config.custom_backend_module)
        self._weights = weights
        self.checkpoint_engine = CheckpointEngineRegistry.new(
            config.backend,
            is_master=torch.distributed.get_rank() == 0,
            bucket_size=config.update_weights_bucket_megabytes << 20,
            **config.engine_kwargs.get(config.backend, {}),
        )

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    async def update_weights(self, global_steps=None, mode="auto"):
        weights = self._weights(global_steps).items()
        return await self.checkpoint_engine.send_weights(iter(weights), global_steps=global_steps)

    @register(dispatch_mode=Dispatch.DP_COMPUTE, blocking=False)
    def execute_checkpoint_engine(self, method, *args, **kwargs):
        return getattr(self.checkpoint_engine, method)(*args, **kwargs)


class Kept:
    """In the place of an engine's server: keeps the bits it is given."""

    held: dict[str, bytes]

    async def update_weights(self, weights, global_steps=None, wire_format="named_tensors", **_):
        assert wire_format == "named_tensors"
        self.held = {name: t.reshape(-1).view(torch.uint8).numpy().tobytes() async for name, t in weights}


class Rollout(CheckpointEngineWorker):
    """The worker that verl puts beside a rollout's GPU."""

    def __init__(self, rollout_config) -> None:
        super().__init__(rollout_config, None, Kept())

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def held(self) -> dict[str, bytes]:
        return self.server_adapter.held


class Replica:
    """A rollout that has nothing to pause."""

    def __init__(self, workers) -> None:
        self.workers, self.calls = workers, []

    def __getattr__(self, name):
        async def noted(**_) -> None:
            self.calls.append(name)

        return noted
