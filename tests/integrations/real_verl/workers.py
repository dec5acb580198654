"""Workers for verl's manager, on Ray: its actor with FSDP2 on a CPU, and rollouts whose server keeps what it gets."""

from __future__ import annotations

import torch
from verl.checkpoint_engine import CheckpointEngineWorker
from verl.single_controller.base.decorator import Dispatch, register
from verl.workers.engine_workers import ActorRolloutRefWorker
from verl.workers.rollout.sglang_rollout.delta_loader import apply_delta


def bits_of(tensor: torch.Tensor) -> bytes:
    return tensor.detach().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes()


class Actor(ActorRolloutRefWorker):
    """The worker that verl trains with."""

    def __init__(self, config) -> None:
        super().__init__(config, role="actor")
        torch.distributed.init_process_group("gloo")  # verl's own call asks for a second device beside the CPU

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def train(self, step: int) -> float:
        """One step of the optimizer, on tokens of this rank."""
        engine = self.actor.engine
        torch.manual_seed(100 * step + self.rank)
        tokens = torch.randint(0, engine.module.config.vocab_size, (2, 12))
        with engine.train_mode():
            engine.optimizer_zero_grad()
            loss = engine.module(input_ids=tokens, labels=tokens).loss
            loss.backward()
            engine.optimizer_step()
        return float(loss)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def exported(self) -> dict[str, bytes]:
        """What verl itself gathers for its rollouts, rounded as they hold it."""
        tensors, _ = self.actor.engine.get_per_tensor_param()
        return {name: bits_of(tensor.to(torch.bfloat16)) for name, tensor in tensors}


class Server(torch.nn.Module):
    """In the place of an engine's server: keeps the tensors it gets, or has verl's receiver write flushes to them."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors: dict[str, torch.Tensor] = {}
        self.flushes: list[int] = []  # elements of each

    def load_weights(self, weights) -> None:
        for name, tensor in weights:
            self.tensors.setdefault(name, torch.zeros_like(tensor)).copy_(tensor)

    async def update_weights(self, weights, global_steps=None, wire_format="named_tensors", **_) -> None:
        self.flushes = []
        if wire_format == "named_tensors":
            self.tensors = {name: tensor async for name, tensor in weights}
            return
        for flush, _is_last in weights:
            apply_delta(self, flush)
            self.flushes.append(dict(flush)["__values__"].numel())


class Rollout(CheckpointEngineWorker):
    """The worker that verl puts beside a rollout's GPU."""

    def __init__(self, rollout_config) -> None:
        super().__init__(rollout_config, None, Server())

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def held(self) -> dict[str, bytes]:
        return {name: bits_of(tensor) for name, tensor in self.server_adapter.tensors.items()}

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def flushes(self) -> list[int]:
        return self.server_adapter.flushes


class Replica:
    """A rollout that has nothing to pause."""

    def __init__(self, workers) -> None:
        self.workers, self.calls = workers, []

    def __getattr__(self, name):
        async def noted(**_) -> None:
            self.calls.append(name)

        return noted
