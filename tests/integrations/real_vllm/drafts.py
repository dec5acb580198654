"""An engine with a drafter: its weights are committed with the policy's, or stay as they are if the run lacks them."""

from __future__ import annotations

from . import engine, faults, models

METHODS = {  # a tensor of the run, and what the drafter calls it
    "mtp": ("model.mtp_layers.0.final_layernorm.weight", "model.mtp_layers.2.final_layernorm.weight"),
    "eagle": ("draft_model.layers.0.post_attention_layernorm.weight", "model.layers.0.post_attention_layernorm.weight"),
    "draft_model": ("draft_model.model.norm.weight", "model.norm.weight"),
}


def speculating(method, drafter):
    """The option that starts an engine with a drafter."""
    own = {} if method == "mtp" else {"model": str(drafter)}
    return {"speculative_config": {"method": method, "num_speculative_tokens": 1, **own}}


def follow(model, drafter, folder, method, ranks):
    """A run without the drafter, then one with it, in which something writes to the drafter."""
    models.register_mimo()
    weights = models.load(model)
    drafted = {name: tensor for name, tensor in weights.items() if name.startswith(models.MTP)}
    if method != "mtp":
        drafted = {f"draft_model.{name}": tensor for name, tensor in models.load(drafter).items()}
    policy = {name: tensor for name, tensor in weights.items() if name not in drafted}
    llm = engine.following(model, ranks, **speculating(method, drafter))

    before = engine.live(llm)
    trainer = engine.Trainer(llm, policy, f"file://{folder}/policy")
    trainer.sync()
    out = {"without": changed(before, engine.live(llm))}
    trainer.engine.shutdown()

    before = engine.live(llm)
    trainer = engine.Trainer(llm, policy | drafted, f"file://{folder}/run", ahead=False)
    trainer.sync()
    out["with"] = changed(before, engine.live(llm))
    tensor, live_name = METHODS[method]
    out |= faults.poked(trainer, ranks - 1, tensor, live_name, is_drafter=True)
    version = trainer.publish()
    llm.start_draft_weight_update()  # of vLLM; the same version of both
    llm.update_weights({"update_info": {"version": version, "audit": True}})
    llm.finish_weight_update()
    llm.reset_prefix_cache()
    out |= {"generations": engine.generate(llm), "live": engine.live(llm)}
    models.save(policy | (drafted if method == "mtp" else {}), model, folder / "new")
    if method != "mtp":
        own = {name.removeprefix("draft_model."): tensor for name, tensor in drafted.items()}
        models.save(own, drafter, folder / "new-drafter")
    return out


def changed(before, after):
    """Which tensors of the first rank have changed, of the policy and of its drafter."""
    names = [name for name, found in after[0].items() if before[0][name] != found]
    return {"policy": [n for n in names if " " not in n], "drafter": [n for n in names if " " in n]}


def fresh(folder, method, ranks):
    """What vLLM makes of the new checkpoints without sparserl."""
    models.register_mimo()
    return engine.fresh(folder / "new", ranks, **speculating(method, folder / "new-drafter"))


def unfollowed(model, drafter, folder):
    """A drafter with something that is computed from its weights when they are loaded."""
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod

    process = UnquantizedLinearMethod.process_weights_after_loading

    def and_more(self, layer):
        process(self, layer)
        if layer.prefix.endswith("fc"):
            layer.doubled = layer.weight * 2

    UnquantizedLinearMethod.process_weights_after_loading = and_more
    llm = engine.following(model, **speculating("eagle", drafter))
    own = models.load(drafter)
    fc = llm.collective_rpc(lambda worker: worker.get_draft_model().model.fc.weight.detach())[0]
    weights = models.load(model) | {f"draft_model.{name}": tensor for name, tensor in own.items()}
    return {
        "as it was": fc.equal(own["fc.weight"]),
        "supported": llm.collective_rpc("supports_draft_weight_updates"),
        "refused": faults.attempt(lambda: engine.Trainer(llm, weights, f"file://{folder}/unfollowed")),
        "folder": str(folder),
    }
