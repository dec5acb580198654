"""An engine of vLLM as NeMo-RL starts it, with made-up weights, and a policy that sends it weights."""

from __future__ import annotations

import asyncio
import os
import threading

from tests.integrations.nemo_source import TRANSPORT, engine_class

from . import models
from .engine import generate, live, start
from .faults import attempt, poke

EXTENSION = "tests.integrations.real_vllm.nemo_worker.Extension"


class Syncs:
    """Makes the calls of NeMo-RL's synchronizer: a policy of one rank in this process, and all workers of an engine."""

    def __init__(self, llm, ranks, **options):
        self.llm = llm
        self.ranks = ranks
        self.policy = engine_class()(bucket_size=1 << 20, release_after_refit=True, **options)
        llm.collective_rpc(
            "init_checkpoint_engine", args=(TRANSPORT, 1 << 20, {"release_after_refit": True, **options})
        )

    def announce(self):
        rollouts = self.llm.collective_rpc("prepare_checkpoint_engine")
        metadata = [self.policy.prepare(), *sorted(rollouts, key=lambda told: told["rank"])]
        self.policy.init_policy_process_group(
            worker_rank=0, train_world_size=1, rollout_world_size=self.ranks, metadata=metadata
        )
        self.llm.collective_rpc("init_checkpoint_engine_process_group", args=(0, 1, self.ranks, metadata))

    def sync(self, weights):
        self.announce()
        sending = threading.Thread(target=lambda: asyncio.run(self.policy.send_weights(iter(weights.items()))))
        sending.start()
        try:
            assert all(self.llm.collective_rpc("update_weights_from_checkpoint_engine"))
        finally:
            sending.join()
            self.policy.finalize()
            self.llm.collective_rpc("finalize_checkpoint_engine")


def forget_engine(worker):
    """Let NeMo-RL make another checkpoint engine."""
    worker.checkpoint_engine = None


def follow(model, folder, kind, ranks):
    """Syncs in place, one of them after something else wrote to a weight; then one through NeMo-RL's own loader."""
    weights = models.load(model, kind)
    llm = start(model, ranks, load_format="dummy", worker_extension_cls=EXTENSION)
    options = {"url": f"file://{folder}/run", "timeout": 60.0, "options": {"ladder": None}}
    syncs = Syncs(llm, ranks, audit_every=1, **options)
    out = {"model": str(model), "made up": live(llm), "live": []}
    for step in range(3):
        models.step(weights, step)
        syncs.sync(weights)
        out["live"].append(live(llm))
    llm.collective_rpc(poke)
    models.step(weights, 3)
    out["poked"] = attempt(lambda: syncs.sync(weights))
    syncs.sync(weights)
    out["generations"] = generate(llm)
    out["live"].append(live(llm))
    models.save(weights, model, folder / "new")
    models.step(weights, 4)
    llm.collective_rpc(forget_engine)
    whole = Syncs(llm, ranks, in_place=False, folder=str(folder / "node"), **options)
    whole.sync(weights)
    out["loaded"] = live(llm)
    models.save(weights, model, folder / "newer")
    return out


def packed(model, folder, kind):
    """Weights that vLLM packs, so that nothing can be written into them, twice."""
    os.environ.pop("SPARSERL_VLLM_CPU")
    weights = models.load(model, kind)
    llm = start(model, load_format="dummy", worker_extension_cls=EXTENSION)
    options = {"url": f"file://{folder}/run", "timeout": 60.0, "folder": str(folder / "node")}
    syncs = Syncs(llm, 1, **options)
    return {"refused": [attempt(lambda: syncs.sync(weights)) for _ in range(2)]}
