"""One vLLM engine and its trainer, alone in a process: `python -m tests.integrations.real_vllm.engine JOB FOLDER …`.

It writes down what it saw, as JSON, for tests to judge.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from pathlib import Path

PROMPTS = [[1, 5, 9, 30], [1, 44, 7], [1, *range(5, 75)]]  # the last fills blocks of the prefix cache


def start(folder, ranks=1, **options):
    """An engine on a model; sparserl must not be imported before it is there (see `sparserl_vllm`)."""
    from vllm import LLM

    assert ranks > 1 or "llvmlite" not in sys.modules
    common = {"max_model_len": 96, "block_size": 32, "enable_prefix_caching": True, "enforce_eager": True, "seed": 0}
    common["dtype"] = json.loads((Path(folder) / "config.json").read_text())["dtype"]
    return LLM(str(folder), tensor_parallel_size=ranks, skip_tokenizer_init=True, **common, **options)


def generate(llm):
    """The tokens that follow on some prompts, and how likely they are."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=8, logprobs=0, detokenize=False, ignore_eos=True)
    found = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], sampling, use_tqdm=False)
    return [
        [list(one.outputs[0].token_ids), [next(iter(p.values())).logprob for p in one.outputs[0].logprobs]]
        for one in found
    ]


def hashes(worker):
    """Of all live parameters and buffers of a worker."""
    import torch

    model = worker.get_model()
    both = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {
        name: hashlib.sha256(tensor.detach().reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()
        for name, tensor in both.items()
        if tensor.numel()
    }


def live(llm):
    """Hashes of all live weights, by rank."""
    return llm.collective_rpc(hashes)


class Trainer:
    """Weights that are trained, and vLLM following them."""

    def __init__(self, llm, weights, url, **worker):
        from sparserl.integrations.vllm_trainer import OfflineClient, SparserlTrainer, SparserlTrainerInitInfo

        self.weights, self.seed = weights, 0
        info = SparserlTrainerInitInfo(rank=0, url=url, publisher={"ladder": None}, worker=worker)
        self.engine = SparserlTrainer.trainer_init(info, client=OfflineClient(llm), source=weights)

    def step(self):
        from .models import step

        self.seed += 1
        step(self.weights, self.seed)

    def publish(self):
        self.step()
        return self.engine.publish().version


def follow(folder, kind, ranks, syncs):
    """Some syncs, each audited; then the new checkpoint is saved, and vLLM loads it by itself."""
    from . import models

    weights = models.make(folder / "model", kind)
    began = time.perf_counter()
    llm = start(folder / "model", ranks, weight_transfer_config={"backend": "sparserl"})
    out = {"start": time.perf_counter() - began, "before": generate(llm), "generations": [], "seconds": []}
    trainer = Trainer(llm, weights, f"file://{folder}/run")
    for i in range(1, syncs + 1):
        version = trainer.publish()
        began = time.perf_counter()
        trainer.engine.commit(version)
        out["seconds"].append(time.perf_counter() - began)
        trainer.engine.commit(version, audit=True)
        if i % 4 == 0 or i == syncs:
            out["generations"].append(generate(llm))
    out |= {"live": live(llm), "version": llm.get_weight_version()}
    models.save(weights, folder / "model", folder / "new")
    llm.collective_rpc(load_again, args=(str(folder / "new"),))
    llm.reset_prefix_cache()
    return out | {"reloaded": {"live": live(llm), "generations": generate(llm)}}


def load_again(worker, folder):
    """Overwrite all weights, and have vLLM load a checkpoint."""
    from sparserl.integrations.vllm import _process_again

    for parameter in worker.get_model().parameters():
        parameter.data.zero_()
    _process_again(worker.get_model())
    worker.reload_weights(weights_path=folder)


def fresh(folders, ranks):
    """What vLLM makes of checkpoints without sparserl."""
    out = {}
    for folder in folders:
        llm = start(folder, ranks)
        out[str(folder)] = {"generations": generate(llm), "live": live(llm)}
        del llm
    return out


def main():
    job, folder, *rest = sys.argv[1:]
    folder = Path(folder)
    if job == "follow":
        ranks, syncs, *kinds = rest
        out = {kind: follow(folder / kind, kind, int(ranks), int(syncs)) for kind in kinds}
    elif job == "fresh":
        ranks, *folders = rest
        out = fresh(folders, int(ranks))
    elif job == "make":
        from . import models

        out = sorted(models.make(folder / "model", "llama"))
    else:
        from . import faults, served

        out = (served.served if job == "served" else getattr(faults, job))(folder)
    (folder / f"{job}.json").write_text(json.dumps(out))


if __name__ == "__main__":
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
    main()
