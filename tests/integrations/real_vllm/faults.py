"""What goes wrong, each on an engine: what it says, what it holds then, and whether it can go on."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from .engine import Trainer, generate, live, load_again, start


def attempt(work):
    """What some work raised, in words."""
    try:
        work()
    except Exception as error:  # noqa: BLE001
        return f"{type(error).__name__}: {error}"
    return None


def tokens(llm):
    return [found for found, _ in generate(llm)]


def poke(worker):
    """Something else writes to a weight, which the next version changes too."""
    from sparserl.targets.learn import span

    span(worker.get_model().get_parameter("model.norm.weight"))[3] += 1


def faults(folder):
    """A weight that was written by something else, and a damaged bucket."""
    from . import models

    weights = models.make(folder / "model", "llama")
    llm = start(folder / "model", weight_transfer_config={"backend": "sparserl"})
    trainer = Trainer(llm, weights, f"file://{folder}/run", ahead=False)
    trainer.engine.commit(trainer.publish())
    out = {}

    version = trainer.publish()
    bucket = newest_bucket(folder / "run")
    whole = bucket.read_bytes()
    bucket.write_bytes(whole[:-9] + bytes(9))
    before = live(llm), tokens(llm)
    out["damaged"] = attempt(lambda: trainer.engine.commit(version))
    out["damaged left as it was"] = (live(llm), tokens(llm)) == before
    bucket.write_bytes(whole)
    trainer.engine.commit(version, audit=True)

    weights["model.norm.weight"][3] += 0.25
    version = trainer.publish()
    llm.collective_rpc(stage)
    llm.collective_rpc(poke)
    before = live(llm)
    out["poked"] = attempt(lambda: trainer.engine.commit(version))
    out["poked left as it was"] = live(llm) == before
    trainer.engine.commit(version, audit=True)
    llm.collective_rpc(poke)
    out["audited"] = attempt(lambda: trainer.engine.commit(version, audit=True))
    trainer.engine.commit(trainer.publish(), audit=True)
    held = live(llm), tokens(llm)
    models.save(weights, folder / "model", folder / "new")
    llm.collective_rpc(load_again, args=(str(folder / "new"),))
    llm.reset_prefix_cache()
    return out | {"in the end": held == (live(llm), tokens(llm)), "version": llm.get_weight_version()}


def stage(worker):
    """Have the newest version staged, as the thread would."""
    worker.weight_transfer_engine.subscriber.ahead()


def newest_bucket(run):
    return max((path for path in Path(run).rglob("buckets/*/*")), key=lambda path: path.stat().st_mtime_ns)


def die_in_commit(worker):
    """The next commit of rank 1 is killed when some of it is written."""
    if worker.rank != 1:
        return
    from sparserl.targets import live as target

    def commit(self):
        for landing in self._landings[:1]:
            landing()
        os.kill(os.getpid(), signal.SIGKILL)

    target.PreparedLive.commit = commit


def killed(folder):
    """One rank of two whose weights something else wrote to; then it is killed while it commits."""
    from . import models

    weights = models.make(folder / "model", "llama")
    llm = start(folder / "model", 2, weight_transfer_config={"backend": "sparserl"})
    trainer = Trainer(llm, weights, f"file://{folder}/run", ahead=False)
    trainer.engine.commit(trainer.publish(), audit=True)
    weights["model.norm.weight"][3] += 0.25
    version = trainer.publish()
    llm.collective_rpc(stage)
    llm.collective_rpc(poke_the_second)
    before = live(llm)
    out = {"poked": attempt(lambda: trainer.engine.commit(version)), "poked left as it was": live(llm) == before}
    out["recovered"] = attempt(lambda: trainer.engine.commit(version, audit=True))
    llm.collective_rpc(die_in_commit)
    version = trainer.publish()
    return out | {"commit": attempt(lambda: trainer.engine.commit(version)), "serve": attempt(lambda: generate(llm))}


def poke_the_second(worker):
    if worker.rank == 1:
        poke(worker)


def packed(folder):
    """Weights that vLLM packs, so that nothing can be written into them."""
    from . import models

    os.environ.pop("SPARSERL_VLLM_CPU")
    models.make(folder / "model", "llama")
    return {"start": attempt(lambda: start(folder / "model", weight_transfer_config={"backend": "sparserl"}))}


def derived(folder):
    """Weights of which something else is computed when they are loaded."""
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod

    from . import models

    process = UnquantizedLinearMethod.process_weights_after_loading

    def and_more(self, layer):
        process(self, layer)
        layer.doubled = layer.weight * 2

    UnquantizedLinearMethod.process_weights_after_loading = and_more
    models.make(folder / "model", "llama")
    return {"start": attempt(lambda: start(folder / "model", weight_transfer_config={"backend": "sparserl"}))}
