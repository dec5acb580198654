"""A LoRA adapter that follows a run inside vLLM, under the id that it was loaded with."""

from __future__ import annotations

import hashlib
import json

from . import engine, faults, models

EXTENSION = "sparserl.integrations.vllm_plugin.AdapterWorker"
LAYERS = {"self_attn.q_proj": (128, 128), "self_attn.v_proj": (64, 128), "mlp.down_proj": (128, 96)}
CONFIG = {"peft_type": "LORA", "r": 4, "lora_alpha": 6, "target_modules": [name.split(".")[1] for name in LAYERS]}
FILES = {"adapter_config.json": json.dumps(CONFIG).encode()}


def make():
    """An adapter in fp32 with a scaling of 1.5, and with none for k, which vLLM fuses with q and v."""
    import torch

    torch.manual_seed(0)
    tensors = {}
    for layer in range(2):
        for name, (rows, columns) in LAYERS.items():
            prefix = f"base_model.model.model.layers.{layer}.{name}"
            tensors[f"{prefix}.lora_A.weight"] = torch.randn(4, columns) * 0.2
            tensors[f"{prefix}.lora_B.weight"] = torch.randn(rows, 4) * 0.2
    return tensors


def save(tensors, folder):
    from safetensors.torch import save_file

    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    for name, data in FILES.items():
        (folder / name).write_bytes(data)
    return folder


def start(model, ranks, **options):
    """An engine with one slot for adapters, and room for two in host memory."""
    return engine.start(model, ranks, enable_lora=True, max_lora_rank=8, max_loras=1, max_cpu_loras=2, **options)


def loaded(worker, lora_id=1):
    """Hashes of what a worker has of an adapter: of its slot, and of the copy in host memory; and where the slot is."""
    import torch

    def hashed(tensors):
        bits = [t.detach().contiguous().view(torch.uint8).numpy().tobytes() for t in tensors if t is not None]
        return hashlib.sha256(b"".join(bits)).hexdigest()

    def flat(value):
        return value if isinstance(value, list | tuple) else [value]

    manager = worker.model_runner.lora_manager._adapter_manager
    layers = manager.list_adapters()[lora_id].loras
    stacked = [t for _, m in sorted(manager.modules.items()) for t in (*m.lora_a_stacked, *m.lora_b_stacked)]
    slot = manager.lora_index_to_id.index(lora_id)
    return {
        "slot": hashed([tensor[slot] for tensor in stacked]),
        "copy": hashed([t for _, w in sorted(layers.items()) for t in (*flat(w.lora_a), *flat(w.lora_b))]),
        "addresses": [tensor.data_ptr() for tensor in stacked],
        "adapters": sorted(manager.list_adapters()),
    }


def fail_in_commit(worker):
    """The next commit of the last rank fails when some layers are written."""
    if worker.rank != worker.parallel_config.world_size - 1:
        return
    module = worker.model_runner.lora_manager._adapter_manager.modules["model.layers.1.mlp.down_proj"]
    set_lora = module.set_lora

    def fail(*_):
        module.set_lora = set_lora
        raise RuntimeError("this layer cannot be written")

    module.set_lora = fail


def drop(llm, second, third):
    """Have vLLM load other adapters until the copy of the first has to go."""
    engine.generate(llm, second)
    engine.generate(llm, third)


def follow(model, folder, ranks):
    """Syncs, each after the prefix cache was filled; what goes wrong; an adapter that vLLM drops and loads again."""
    from vllm.lora.request import LoRARequest

    weights = make()
    old = str(save(weights, folder / "old"))
    llm = start(model, ranks, worker_extension_cls=EXTENSION, weight_transfer_config={"backend": "sparserl"})
    from sparserl.integrations.vllm_trainer import AdapterTrainer, OfflineClient

    policy, second, third = (LoRARequest(name, i, old) for i, name in enumerate(("policy", "second", "third"), 1))
    out = {"base": engine.generate(llm), "generations": [engine.generate(llm, policy)]}
    url = f"file://{folder}/run"
    trainer = AdapterTrainer(url, weights, OfflineClient(llm), publisher={"files": FILES, "ladder": None})
    out["before"] = llm.collective_rpc(loaded)
    for seed in range(3):
        models.step(weights, seed, share=0.05)
        out["kind"] = trainer.send_weights().kind
        out["generations"].append(engine.generate(llm, policy))

    models.step(weights, 3)
    version = trainer.publish().version
    before = llm.collective_rpc(loaded)
    bucket = faults.newest_bucket(folder / "run")
    data = bucket.read_bytes()
    bucket.write_bytes(data[:-9] + bytes(9))
    out["damaged"] = faults.attempt(trainer.commit)
    bucket.write_bytes(data)
    llm.collective_rpc(fail_in_commit)
    out["failed"] = faults.attempt(trainer.commit)
    out["left as it was"] = llm.collective_rpc(loaded) == before
    trainer.commit(version)

    out["generations"].append(engine.generate(llm, policy))
    engine.generate(llm, second)  # takes the slot
    out["from the copy"] = engine.generate(llm, policy)
    trainer.shutdown()
    trainer = AdapterTrainer(url, weights, OfflineClient(llm), publisher={"files": FILES, "ladder": None})
    drop(llm, second, third)
    out["from the run"] = engine.generate(llm, policy)
    drop(llm, second, third)
    out["dropped"] = llm.collective_rpc(loaded, args=(3,))[0]["adapters"]
    models.step(weights, 4)
    trainer.send_weights()  # of an adapter that is not loaded
    out["generations"].append(engine.generate(llm, policy))

    options = {"files": FILES, "ladder": None}
    AdapterTrainer(f"file://{folder}/other", weights, OfflineClient(llm), lora_id=7, publisher=options).shutdown()

    base = engine.Trainer(llm, models.load(model), f"file://{folder}/base")
    base.sync()  # vLLM drops all adapters when weights have changed
    out["generations"].append(engine.generate(llm, policy))
    out["after"] = llm.collective_rpc(loaded)
    models.save(base.weights, model, folder / "new-base")
    save(weights, folder / "new")
    return out


def fresh(folder, ranks):
    """What vLLM makes of the new weights and the new adapter without sparserl."""
    from vllm.lora.request import LoRARequest

    llm = start(folder / "new-base", ranks)
    return {
        "generations": engine.generate(llm, LoRARequest("policy", 1, str(folder / "new"))),
        "after": llm.collective_rpc(loaded),
    }
