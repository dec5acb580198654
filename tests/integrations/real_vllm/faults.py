"""What goes wrong, each on an engine: what it says, what it holds then, and whether it can go on."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

from .engine import following, fresh, generate, live, start, told

NORM = "model.norm.weight"


def attempt(work):
    """What some work raised, in words."""
    try:
        work()
    except Exception as error:  # noqa: BLE001
        return f"{type(error).__name__}: {error}"
    return None


def held(llm):
    """Live weights, and what they generate."""
    return live(llm), [found for found, _ in generate(llm)]


def poke(worker, rank=0, name=NORM, is_drafter=False):
    """Something else writes to a weight of a rank, which the next version changes too."""
    from sparserl.targets.pieces import span

    if worker.rank == rank:
        model = worker.get_draft_model() if is_drafter else worker.get_model()
        span(model.get_parameter(name))[3] += 1


def one_rank(trainer, run):
    """A damaged bucket, a weight that was written by something else, and one that was replaced."""
    engine, llm, out = trainer.engine, trainer.llm, {}

    version = trainer.publish()
    bucket = newest_bucket(run)
    whole = bucket.read_bytes()
    bucket.write_bytes(whole[:-9] + bytes(9))
    before = held(llm)
    out["damaged"] = attempt(lambda: engine.commit(version))
    out["damaged left as it was"] = held(llm) == before
    bucket.write_bytes(whole)
    engine.commit(version, audit=True)

    out |= poked(trainer, 0)
    llm.collective_rpc(poke)
    out["audited"] = attempt(lambda: engine.commit(int(llm.get_weight_version().rpartition(":")[2]), audit=True))
    out["audited version"] = llm.get_weight_version()
    trainer.sync()

    version = trainer.publish()
    llm.collective_rpc(replaced)
    before = held(llm)
    out["replaced"] = attempt(lambda: engine.commit(version))
    out["replaced left as it was"] = held(llm) == before
    llm.collective_rpc(put_back)
    engine.commit(version, audit=True)

    out["another run"] = attempt(lambda: engine._updates.commit(version - 1, "0" * 16))
    out["another run's version"] = llm.get_weight_version()
    llm.start_weight_update()  # by a trainer that ends then
    trainer.restart()
    return out


def one_of_two(trainer):
    """Of two ranks, the weights of one are written by something else; trainers end after that, or ask for nonsense."""
    out = poked(trainer, 1)
    trainer.weights[NORM][3] += 0.25
    version = trainer.publish()
    trainer.llm.collective_rpc(poke, args=(1,))
    out["refused"] = attempt(lambda: trainer.engine.commit(version))
    trainer.restart()
    info = {"init_info": {"url": "file:///nowhere", "ahaed": False}}
    out["unknown option"] = attempt(lambda: trainer.llm.init_weight_transfer_engine(info))
    trainer.sync()
    trainer.llm.collective_rpc(lose_store)
    out["no store"] = attempt(trainer.engine.follow)
    out["no store then"] = attempt(trainer.sync)
    trainer.llm.collective_rpc(lose_store, args=(False,))
    trainer.restart()
    return out


def lose_store(worker, is_lost=True):
    """Rank 0 can open no store, or can again."""
    from sparserl.session.store import subscriber
    from sparserl.transport.stores.opening import store_at

    def fail(*_, **__):
        raise OSError("no credentials on this host")

    if worker.rank == 0:
        subscriber.store_at = fail if is_lost else store_at


def poked(trainer, rank, tensor=NORM, live_name=NORM, is_drafter=False):
    """Something else writes to a weight that a staged version changes: what a commit says, and whether it goes on."""
    trainer.weights[tensor][3] += 0.25
    version = trainer.publish()
    trainer.llm.collective_rpc(stage)
    trainer.llm.collective_rpc(poke, args=(rank, live_name, is_drafter))
    before = live(trainer.llm)
    out = {"poked": attempt(lambda: trainer.engine.commit(version))}
    out["poked left as it was"] = live(trainer.llm) == before
    out["recovered"] = attempt(lambda: trainer.engine.commit(version, audit=True))
    return out


def stage(worker):
    """Have the newest version staged, as the thread would."""
    worker.weight_transfer_engine.subscriber.stage_newest()


def replaced(worker):
    """A parameter is another tensor from now on, as where someone assigns to its data."""
    norm = worker.get_model().get_parameter("model.norm.weight")
    worker.before = norm.data
    norm.data = norm.data.clone()


def put_back(worker):
    worker.get_model().get_parameter("model.norm.weight").data = worker.before


def newest_bucket(run):
    return max((path for path in Path(run).rglob("buckets/*/*")), key=lambda path: path.stat().st_mtime_ns)


def die_in_commit(worker):
    """The next commit of rank 1 is killed when some of it is written."""
    if worker.rank != 1:
        return
    from sparserl.targets import engine as target

    def commit(self):
        for apply in self._applications[:1]:
            apply()
        os.kill(os.getpid(), signal.SIGKILL)

    target.PreparedEngine.commit = commit


def killed(trainer):
    """One of two ranks is killed while it commits."""
    trainer.llm.collective_rpc(die_in_commit)
    version = trainer.publish()
    commit = attempt(lambda: trainer.engine.commit(version))
    return {"killed": commit, "serve": attempt(lambda: generate(trainer.llm))}


def packed(folder):
    """Weights that vLLM packs, so that nothing can be written into them."""
    os.environ.pop("SPARSERL_VLLM_CPU")
    return {"start": attempt(lambda: following(folder))}


def packed_and_verified(folder):
    """The same in an engine that follows nothing."""
    os.environ.pop("SPARSERL_VLLM_CPU")
    llm = start(folder)
    before = held(llm)
    from sparserl.integrations.verify import verify_engine

    return {"verified": told(verify_engine(llm, folder)), "left as it was": held(llm) == before}


def derived(folder):
    """Weights of which something else is computed when they are loaded."""
    compute_more()
    return {"start": attempt(lambda: following(folder))}


def compute_more():
    """From now on, layers compute something else from their weights when they are loaded."""
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod

    process = UnquantizedLinearMethod.process_weights_after_loading

    def and_more(self, layer):
        process(self, layer)
        layer.doubled = layer.weight * 2

    UnquantizedLinearMethod.process_weights_after_loading = and_more


def fresh_with_more(folder, run, version):
    """What vLLM makes of a checkpoint then, without the backend, and how it compares."""
    compute_more()
    return fresh(folder, 1, run, version)


def copied_halves(folder):
    """Latent attention that keeps copies of the halves of a projection, instead of views, beside it."""
    from vllm.model_executor.layers.attention import mla_attention

    split = mla_attention.split_kv_b_proj
    mla_attention.split_kv_b_proj = lambda *args: [half.clone() for half in split(*args)]
    return {"start": attempt(lambda: following(folder))}


def raised_beside_an_engine(folder, answers):
    """An error of the program that has an engine of two ranks."""
    llm = start(folder, 2)
    pids = llm.collective_rpc(lambda _: os.getpid())
    (answers / "pids.json").write_text(json.dumps(pids))
    raise ValueError("this is no answer")
