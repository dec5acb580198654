"""Workers for NeMo-RL's real synchronizer, on Ray: its own mixins, on a policy without a model and without vLLM."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from tests.integrations.nemo_source import checkout, engine_class, provide, without_gpu
from tests.session.ranks import port


def join(rank, size, at):
    """Begin to work as one of several ranks, as NeMo-RL's workers do."""
    torch.distributed.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{at}", rank=rank, world_size=size)
    engine_class()


def make_policy(rank, weights):
    """A worker of the policy."""
    from nemo_rl.models.policy.workers.checkpoint_engine import PolicyCheckpointEngineMixin

    class Policy(PolicyCheckpointEngineMixin):
        step = 0

        def _checkpoint_engine_weight_iterator(self, kv_scales=None):
            for name, tensor in weights(max(self.step, 0)).items():
                torch.distributed.broadcast(tensor, 0)
                yield name, tensor
            if self.step < 0:
                raise RuntimeError("the policy has no such step")

    policy = Policy()
    policy.rank = rank
    return policy


def make_worker():
    """A worker of vLLM, which keeps what it is to load."""
    without_gpu()
    from nemo_rl.models.generation.vllm.checkpoint_engine import VllmCheckpointEngineMixin

    class Loader:
        def __init__(self):
            self.held = {}

        def _load_weights(self, weights):
            self.held |= {name: t.reshape(-1).view(torch.uint8).numpy().tobytes() for name, t in weights}

        def _maybe_process_fp8_kv_cache(self):
            """Nothing is in FP8."""

    class Worker(VllmCheckpointEngineMixin, Loader):
        pass

    return Worker()


class PolicyActor:
    """Ray's actor around a worker of the policy."""

    def __init__(self, rank, size, at, weights):
        join(rank, size, at)
        self._policy = make_policy(rank, weights)

    async def checkpoint_engine_rpc(self, **arguments):
        return await self._policy.checkpoint_engine_rpc(**arguments)

    async def train(self, step):
        self._policy.step = step


class RolloutActor:
    """Ray's actor with an engine of vLLM that has one worker."""

    def __init__(self, at):
        join(0, 1, at)
        self._worker = make_worker()
        from nemo_rl.models.generation.vllm.checkpoint_engine import VllmCheckpointEngineRpcMixin

        self._engine = VllmCheckpointEngineRpcMixin()
        self._engine.llm = SimpleNamespace(
            collective_rpc=lambda method, args=(): [getattr(self._worker, method)(*args)]
        )

    def checkpoint_engine_rpc(self, **arguments):
        return self._engine.checkpoint_engine_rpc(**arguments)

    def held(self):
        return self._worker.held


class WorkerGroup:
    """Calls a method of all actors."""

    def __init__(self, workers):
        self.workers = workers

    def run_all_workers_single_data(self, method, run_rank_0_only_axes=None, **arguments):
        return [getattr(worker, method).remote(**arguments) for worker in self.workers]

    def run_all_workers_multiple_data(self, method, run_rank_0_only_axes, common_kwargs, **lists):
        rows = [dict(zip(lists, row, strict=True)) for row in zip(*lists.values(), strict=True)]
        return [
            getattr(worker, method).remote(**row, **common_kwargs)
            for worker, row in zip(self.workers, rows, strict=True)
        ]


def synchronizer(generation, weights):
    """NeMo-RL's synchronizer, and the actors: two ranks of a policy, and two engines of one worker each."""
    import ray

    provide(checkout())
    from nemo_rl.weight_sync.checkpoint_engine_config import checkpoint_engine_refit_config
    from nemo_rl.weight_sync.checkpoint_engine_weight_synchronizer import CheckpointEngineWeightSynchronizer

    at = port()
    policy = [ray.remote(PolicyActor).remote(rank, 2, at, weights) for rank in range(2)]
    rollouts = [ray.remote(RolloutActor).remote(port()) for _ in range(2)]
    sides = (
        SimpleNamespace(worker_group=WorkerGroup(policy), prepare_refit_info=dict),
        SimpleNamespace(
            worker_group=WorkerGroup(rollouts), dp_size=2, cfg=generation, prepare_refit_info=lambda info: None
        ),
    )
    config = checkpoint_engine_refit_config(generation)
    # the size of buckets is given, which NeMo-RL would compute from the memory of GPUs
    made = CheckpointEngineWeightSynchronizer(*sides, config, _bucket_size_bytes=1200)
    return made, policy, rollouts
