"""What NeMo-RL adds to a worker of vLLM: its own class, from a checkout, or one that makes the same calls."""

from __future__ import annotations

import asyncio

import torch

from tests.integrations.nemo_source import checkout, engine_class, provide, without_gpu


class StandIn:
    """The methods that NeMo-RL calls on all workers at once, and what they call in turn."""

    checkpoint_engine = None

    def init_checkpoint_engine(self, backend, bucket_size_bytes, engine_kwargs):
        if self.checkpoint_engine is None:
            self.checkpoint_engine = engine_class()(bucket_size=bucket_size_bytes, **engine_kwargs)

    def prepare_checkpoint_engine(self):
        return self.checkpoint_engine.prepare() | {"rank": torch.distributed.get_rank()}

    def init_checkpoint_engine_process_group(self, rank_prefix, train_world_size, rollout_world_size, metadata):
        self.checkpoint_engine.init_rollout_process_group(
            rollout_rank=rank_prefix + torch.distributed.get_rank(),
            train_world_size=train_world_size,
            rollout_world_size=rollout_world_size,
            metadata=metadata,
        )

    def finalize_checkpoint_engine(self):
        self.checkpoint_engine.finalize()

    def update_weights_from_checkpoint_engine(self):
        async def update():
            async for batch in self.checkpoint_engine.receive_weight_batches():
                self.model_runner.model.load_weights(weights=batch)

        asyncio.run(update())
        return True


if checkout() is None:
    Extension = StandIn
else:
    provide(checkout())
    without_gpu()
    from nemo_rl.models.generation.vllm import vllm_backend

    Extension = vllm_backend.VllmInternalWorkerExtensionWithCheckpointEngine
    # NeMo-RL is made for vLLM 0.25, of which workers have no such method
    del vllm_backend.VllmInternalWorkerExtension.synchronize_device
