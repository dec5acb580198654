"""An engine whose workers are asked for steps, as prime-rl's orchestrator asks; jobs return what they saw."""

from __future__ import annotations

import os

from safetensors.torch import save_file

from . import engine, models
from .faults import attempt

METHOD = "update_weights_from_path"  # of prime-rl's workers


def follow(model, folder, ranks):
    """Commits of broadcast steps, and requests that are refused; the last checkpoint is saved."""
    os.environ |= {"SPARSERL_URL": f"file://{folder}/run"}
    llm = engine.following(model, ranks)
    from sparserl.integrations.prime_rl import BroadcastPublisher

    weights = models.load(model)
    publisher = BroadcastPublisher(folder / "trainer", os.environ["SPARSERL_URL"])
    out = {"before": engine.generate(llm), "generations": []}
    for step in (1, 2, 3):
        models.step(weights, step)
        broadcast = folder / f"trainer/broadcasts/step_{step}"
        broadcast.mkdir(parents=True)
        save_file(weights, broadcast / "model.safetensors")
        (broadcast / "STABLE").touch()
        publisher.publish_new()
        llm.collective_rpc(METHOD, args=(f"/elsewhere/broadcasts/step_{step}",))
        llm.reset_prefix_cache()
        out["generations"].append(engine.generate(llm))
    out["refused"] = attempt(lambda: llm.collective_rpc(METHOD, args=("/elsewhere/model",)))
    out["live"] = engine.live(llm)
    models.save(weights, model, folder / "new")
    return out
