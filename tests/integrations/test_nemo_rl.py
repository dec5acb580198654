"""The NeMo-RL engine: its signatures, its options, and syncs between real processes in the order of NeMo-RL's calls.

Signatures were read in the commit that `nemo_source` names; with SPARSERL_NEMO_RL they are held against a checkout, and
NeMo-RL's own code makes the calls. `real_vllm/test_vllm_nemo_rl.py` has the engine in real workers of vLLM.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import inspect
import re
import signal
import sys
from pathlib import Path

import pytest
import torch

from sparserl.errors import PeerLost, SessionError, Untrusted
from tests.integrations.nemo_source import METHODS, TRANSPORT, checkout, engine_class, forget
from tests.integrations.wheels import calls, definition, fields, parameters
from tests.session.ranks import ranks, results

ROOT = Path(__file__).resolve().parents[2]
SHAPES = {"embed": (50, 16), "up": (40, 16), "gate": (), "norm": (16,), "none": (0, 4)}
BUCKET = 1200  # bytes: less than two of the tensors have


@pytest.fixture(name="engine")
def _engine():
    yield engine_class()
    forget()


@pytest.fixture(name="source")
def _source():
    if checkout() is None:
        pytest.skip("SPARSERL_NEMO_RL names no checkout of NeMo-RL, which is not on the package index")
    return checkout()


# -- what NeMo-RL calls, and with what ---------------------------------------------------------------------------------


def test_every_method_takes_what_the_base_class_says(engine):
    """What NeMo-RL declares abstract is there, under its names."""
    for name, expected in METHODS.items():
        assert [p for p in inspect.signature(getattr(engine, name)).parameters if p != "self"] == expected
    assert not inspect.isabstract(engine)
    assert engine.shard_expert_weights is False
    assert inspect.iscoroutinefunction(engine.send_weights)
    assert inspect.isasyncgenfunction(engine.receive_weight_batches)


def test_the_base_class_is_still_so(source):
    """The facts that the stand-in was written from: methods, and those that are abstract."""
    tree = ast.parse((source / "nemo_rl/utils/checkpoint_engines/base.py").read_text())
    base = definition(tree, "CheckpointEngine")
    for name, expected in METHODS.items():
        method = definition(base, name)
        assert parameters(method) == expected
        is_abstract = any(ast.unparse(decorator) == "abstractmethod" for decorator in method.decorator_list)
        assert is_abstract == (name != "finalize")
    create = definition(tree, "create_checkpoint_engine")
    made = [call for call in calls(create, "engine_cls") if {k.arg for k in call.keywords} == {"bucket_size", None}]
    assert len(made) == 1


def test_the_callers_are_still_so(source):
    """When NeMo-RL calls what, which no test can see without a GPU of its own."""
    sync = ast.parse((source / "nemo_rl/weight_sync/checkpoint_engine_weight_synchronizer.py").read_text())
    end = ast.unparse(definition(sync, "sync_weights")).partition("finally:")[2].split()
    assert end == ["if", "self._release_after_refit():", "self.shutdown()"]
    assert "self._checkpoint_engine_ready = False" in ast.unparse(definition(sync, "shutdown"))
    assert "policy_metadata + generation_metadata" in ast.unparse(definition(sync, "_ensure_checkpoint_engine_ready"))
    config = ast.parse((source / "nemo_rl/models/generation/vllm/config.py").read_text())
    plugin = definition(config, "VllmCheckpointEnginePluginConfig")
    assert fields(plugin) == {"update_weights_bucket_memory_ratio", "release_after_refit"}
    worker = (source / "nemo_rl/models/generation/vllm/vllm_worker.py").read_text()
    assert "VllmInternalWorkerExtensionWithCheckpointEngine" in worker


def documented() -> dict:
    """`policy.generation` of the page's configuration."""
    yaml = pytest.importorskip("yaml")
    page = (ROOT / "docs/how-to/integrations/nemo-rl.md").read_text()
    (block,) = re.findall(r"^```yaml\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    return yaml.safe_load(block)["policy"]["generation"]


def test_the_configuration_of_the_page(engine, tmp_path):
    """It makes an engine, as NeMo-RL would."""
    generation = documented()
    assert generation["refit_transport"] == TRANSPORT
    options = generation["refit_cfg"][TRANSPORT] | {"url": f"file://{tmp_path}/run"}
    assert engine(bucket_size=1 << 20, **options).prepare()["before"] is None


def test_the_configuration_under_nemo_rl(source, engine, tmp_path):
    """NeMo-RL's own code reads the page's configuration, and makes the engine of it."""
    pytest.importorskip("ray", reason="NeMo-RL's configuration imports Ray")
    from nemo_rl.utils.checkpoint_engines.base import CheckpointEngine, create_checkpoint_engine
    from nemo_rl.weight_sync.checkpoint_engine_config import checkpoint_engine_refit_config

    generation = documented()
    generation["refit_cfg"][TRANSPORT]["url"] = f"file://{tmp_path}/run"
    config = checkpoint_engine_refit_config(generation)
    options = config["engine_kwargs"][config["backend"]]
    made = create_checkpoint_engine(config["backend"], bucket_size_bytes=1 << 20, engine_kwargs=options)
    assert isinstance(made, CheckpointEngine)
    assert isinstance(made, engine)
    del options["release_after_refit"]
    with pytest.raises(SessionError, match="release_after_refit is false"):
        create_checkpoint_engine(config["backend"], bucket_size_bytes=1 << 20, engine_kwargs=options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"release_after_refit": False}, "release_after_refit is false; set it to true"),
        ({"in_place": "no"}, "in_place is 'no'; it must be true or false"),
        ({"timeout": 0}, "timeout is 0; it must be a positive number"),
        ({"audit_every": 0}, "audit_every is 0"),
        ({"rollout_dtype": "bf16"}, "rollout_dtype is 'bf16'; it must be a floating-point dtype"),
        ({"rollout_dtype": "int32"}, "rollout_dtype is 'int32'"),
        ({"options": {"profil": "ctx"}}, "options has 'profil'; it may have"),
        ({"options": {"signing_key": "00"}}, "options has 'signing_key'; it may have"),
        ({"trusted_keys": "no key", "signing_key_file": "key"}, "a public key reads sparserl-public-"),
        ({"trusted_keys": "sparserl-public-" + "00" * 32}, "trusted_keys are given without signing_key_file"),
    ],
)
def test_options_are_checked_where_they_are_given(engine, tmp_path, options, message):
    """What cannot be used is refused when NeMo-RL makes the engine, by name."""
    with pytest.raises(SessionError, match=message):
        engine(1 << 20, **({"url": f"file://{tmp_path}", "release_after_refit": True} | options))


def test_without_nemo_rl_it_says_so(monkeypatch):
    """Asked for and missing is an error that says what is missing."""
    monkeypatch.setitem(sys.modules, "nemo_rl", None)
    with pytest.raises(SessionError, match="NeMo-RL is not installed"):
        import sparserl.integrations.nemo_rl  # noqa: F401


# -- syncs between processes -------------------------------------------------------------------------------------------


def trained(step: int) -> dict[str, torch.Tensor]:
    """What the policy has after a step: bfloat16, one tensor in float32, and counters that are no floats."""
    generator = torch.Generator().manual_seed(1)
    weights = {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in SHAPES.items()}
    for earlier in range(step):
        for tensor in weights.values():
            tensor.view(-1)[earlier :: 7 + earlier] *= 1.5
    return weights | {"bias": torch.arange(5, dtype=torch.float32) / 3 + step, "count": torch.tensor([step, 7])}


def bits(weights: dict[str, torch.Tensor]) -> dict[str, bytes]:
    return {name: tensor.reshape(-1).view(torch.uint8).numpy().tobytes() for name, tensor in weights.items()}


def gathered(step, group):
    """The policy's generator: every tensor takes a collective, so that each rank must drain it."""
    for name, tensor in trained(step).items():
        whole = tensor.clone()
        torch.distributed.broadcast(whole, 0, group=group)
        yield name, whole


async def receive(engine):
    """How many tensors came at once, and the bits of all."""
    batches = [batch async for batch in engine.receive_weight_batches()]
    return [len(batch) for batch in batches], bits(dict(pair for batch in batches for pair in batch))


def worker(_rank, group, pipe, options):
    """A worker of NeMo-RL: it has an engine, and does what the synchronizer says."""
    engine = engine_class()(BUCKET, release_after_refit=True, **options)
    for method, arguments in iter(pipe.recv, None):
        try:
            if method == "send_weights":
                answer = asyncio.run(engine.send_weights(gathered(**arguments, group=group)))
            elif method == "receive_weight_batches":
                answer = asyncio.run(receive(engine))
            else:
                answer = getattr(engine, method)(**arguments)
            pipe.send((True, answer))
        except Exception as error:  # noqa: BLE001  # the test raises it
            pipe.send((False, error))


def tell(workers, method, arguments=None):
    """Have workers do something, each with arguments of its own."""
    for (_, pipe), own in zip(workers, arguments or [{}] * len(workers), strict=True):
        pipe.send((method, own))


def answers(workers):
    """What workers answer; raises what one of them raised."""
    found = []
    for _, pipe in workers:
        assert pipe.poll(120)
        found.append(pipe.recv())
    for is_right, answer in found:
        assert isinstance(is_right, bool), answer  # the worker has ended
        if not is_right:
            raise answer
    return [answer for _, answer in found]


def announce(policy, rollouts):
    """What NeMo-RL does before every sync."""
    tell([*policy, *rollouts], "prepare")
    metadata = answers([*policy, *rollouts])
    sizes = {"train_world_size": len(policy), "rollout_world_size": len(rollouts)}
    topology = {"metadata": metadata, **sizes}
    tell(policy, "init_policy_process_group", [{"worker_rank": i, **topology} for i in range(len(policy))])
    tell(rollouts, "init_rollout_process_group", [{"rollout_rank": i, **topology} for i in range(len(rollouts))])
    answers([*policy, *rollouts])


def sync(policy, rollouts, step):
    """One sync in the order of NeMo-RL's synchronizer; what rollouts got."""
    announce(policy, rollouts)
    tell(policy, "send_weights", [{"step": step}] * len(policy))
    tell(rollouts, "receive_weight_batches")
    answers(policy)
    received = answers(rollouts)
    tell([*policy, *rollouts], "finalize")
    answers([*policy, *rollouts])
    return received


def kill(one):
    """Let a worker have no time for anything more."""
    process, _ = one
    process.kill()
    process.join()
    assert process.exitcode == -signal.SIGKILL


def head(folder) -> tuple[str, int]:
    """Run and version at the head of a store."""
    from sparserl.integrations.checkpoint_engine import head_version
    from sparserl.transport.stores.opening import open_store

    return head_version(open_store(f"file://{folder}"), None)


@pytest.mark.long
def test_ranks_publish_and_workers_follow(tmp_path):
    """Bit for bit: also a worker that is killed and started again, and a policy that continues its run."""
    options = {"url": f"file://{tmp_path}", "timeout": 60.0, "in_place": False}
    with contextlib.ExitStack() as stack:
        policy = stack.enter_context(ranks(2, worker, options))
        first, second, joining = (stack.enter_context(ranks(1, worker, options))[0] for _ in range(3))
        for step in range(2):
            received = sync(policy, [first, second], step)
            assert [bits(trained(step))] * 2 == [weights for _, weights in received]
        assert received[0][0] == [2, 1, 3, 1]  # tensors at once: as many as a bucket holds, or one
        run, version = head(tmp_path)
        assert version == 1
        kill(second)
        assert [bits(trained(2))] * 2 == [weights for _, weights in sync(policy, [first, joining], 2)]
        later = stack.enter_context(ranks(2, worker, options))
        assert [bits(trained(3))] * 2 == [weights for _, weights in sync(later, [first, joining], 3)]
        assert head(tmp_path) == (run, 3)


@pytest.mark.long
def test_every_rank_publishes_and_a_node_has_one_folder(tmp_path):
    """Two ranks publish a share each, workers of a node use one folder: also who joins, and when its writer dies."""
    options = {"url": f"file://{tmp_path}/run", "timeout": 60.0, "in_place": False}
    with (
        ranks(2, worker, options | {"spread": True}) as policy,
        ranks(3, worker, options | {"folder": str(tmp_path / "node")}) as rollouts,
    ):
        for step, joined in enumerate((rollouts[:2], rollouts[:2], rollouts, rollouts[1:])):
            if joined[0] is not rollouts[0]:
                kill(rollouts[0])
            expected = [bits(trained(step))] * len(joined)
            assert expected == [weights for _, weights in sync(policy, joined, step)]


# -- what goes wrong ---------------------------------------------------------------------------------------------------


@pytest.fixture(name="policy_and_rollouts")
def _policy_and_rollouts(engine, tmp_path):
    """A policy and two rollouts in this process, the second of which waits for nothing."""
    options = {"url": f"file://{tmp_path}", "in_place": False, "release_after_refit": True}
    policy, rollout = (engine(BUCKET, timeout=60.0, **options) for _ in range(2))
    return policy, rollout, engine(BUCKET, timeout=0.2, **options)


def begin(policy, *rollouts):
    """Announce a sync."""
    metadata = [one.prepare() for one in (policy, *rollouts)]
    topology = {"metadata": metadata, "train_world_size": 1, "rollout_world_size": len(rollouts)}
    policy.init_policy_process_group(worker_rank=0, **topology)
    for rank, rollout in enumerate(rollouts):
        rollout.init_rollout_process_group(rollout_rank=rank, **topology)


def send(policy, step):
    asyncio.run(policy.send_weights(iter(trained(step).items())))


def test_a_version_of_an_earlier_sync_is_never_taken_for_the_next(policy_and_rollouts):
    """A worker that joins late, or missed a sync, waits for the policy to publish; what was there before is refused."""
    policy, rollout, impatient = policy_and_rollouts
    for step in range(2):
        begin(policy)
        send(policy, step)
    begin(policy, rollout, impatient)
    with pytest.raises(PeerLost, match=r"was at version 1 of run .*, and nothing newer came in 0.2 s"):
        asyncio.run(receive(impatient))
    send(policy, 2)
    assert bits(trained(2)) == asyncio.run(receive(rollout))[1]
    begin(policy, rollout, impatient)
    with pytest.raises(PeerLost, match=r"was at version 2 of run"):
        asyncio.run(receive(impatient))


def test_a_version_is_waited_for(engine, tmp_path):
    """As workers do that commit in place: until the head is another than before, and no longer than they have time."""
    from sparserl.integrations.checkpoint_engine import AwaitedVersion
    from sparserl.transport.stores.opening import open_store

    store = open_store(f"file://{tmp_path}")
    policy = engine(BUCKET, url=f"file://{tmp_path}", release_after_refit=True)
    before = None
    for step in range(2):
        with pytest.raises(PeerLost, match="was at no version" if before is None else "was at version 0 of run"):
            AwaitedVersion(store, before, 0.1, None).wait()
        begin(policy)
        send(policy, step)
        newest = AwaitedVersion(store, before, 60.0, None).wait()
        assert newest == head(tmp_path)
        before = newest


def test_a_send_that_fails(policy_and_rollouts):
    """Nothing is published, rollouts are told that nothing came, and the next sync is exact."""
    policy, rollout, impatient = policy_and_rollouts
    begin(policy, rollout)
    send(policy, 0)
    assert bits(trained(0)) == asyncio.run(receive(rollout))[1]
    begin(policy, impatient)

    def torn():
        yield from [*trained(1).items()][:2]
        raise RuntimeError("a rank of the policy is gone")

    with pytest.raises(RuntimeError, match="is gone"):
        asyncio.run(policy.send_weights(torn()))
    with pytest.raises(PeerLost, match=r"was at version 0 of run .*, and nothing newer came"):
        asyncio.run(receive(impatient))
    policy.finalize()
    begin(policy, rollout)
    send(policy, 1)
    assert bits(trained(1)) == asyncio.run(receive(rollout))[1]


def test_a_sync_that_was_not_announced(policy_and_rollouts):
    """Neither side guesses which version is the next one: not at the start, not twice, not after the end."""
    policy, rollout, _ = policy_and_rollouts
    for is_second in (False, True):
        begin(policy, rollout)
        if not is_second:
            send(policy, 0)
            asyncio.run(receive(rollout))
        else:
            policy.finalize()
            rollout.finalize()
        with pytest.raises(SessionError, match="this sync was not announced"):
            send(policy, 1)
        with pytest.raises(SessionError, match="this sync was not announced"):
            asyncio.run(receive(rollout))


def test_keys(engine, tmp_path):
    """Rollouts believe no other key than those they trust; the secret one is read from a file."""
    from sparserl.session.store.signing import keygen

    secret, public = keygen()
    (tmp_path / "key").write_text(secret + "\n")
    options = {"url": f"file://{tmp_path}/signed", "in_place": False, "release_after_refit": True}
    keys = {"trusted_keys": [keygen()[1], public]}
    policy = engine(BUCKET, signing_key_file=str(tmp_path / "key"), **keys, **options)
    options["signing_key_file"] = str(tmp_path / "not on this node")
    rollout = engine(BUCKET, timeout=60.0, **keys, **options)
    begin(policy, rollout)
    send(policy, 0)
    assert bits(trained(0)) == asyncio.run(receive(rollout))[1]
    stranger = engine(BUCKET, trusted_keys=keygen()[1], **options)
    with pytest.raises(Untrusted, match="signed by another key"):
        stranger.prepare()


def test_weights_are_rounded_where_that_is_asked_for(engine, tmp_path):
    """By default NeMo-RL's dtypes stay; `rollout_dtype` rounds floats, and nothing else."""
    options = {"url": f"file://{tmp_path}/rounded", "in_place": False, "release_after_refit": True}
    policy = engine(BUCKET, rollout_dtype="bfloat16", **options)
    rollout = engine(BUCKET, timeout=60.0, **options)
    begin(policy, rollout)
    send(policy, 0)
    rounded = {n: t.bfloat16() if t.is_floating_point() else t for n, t in trained(0).items()}
    assert bits(rounded) == asyncio.run(receive(rollout))[1]


# -- NeMo-RL's own code ------------------------------------------------------------------------------------------------


def sync_by_mixins(_rank, _group, _pipe, url):
    """Two syncs between a policy and a worker in one process; whether the worker then has what was sent."""
    from tests.integrations import nemo_workers

    engine_class()
    policy = nemo_workers.make_policy(0, trained)
    rollout = nemo_workers.make_worker()
    options = {"url": url, "release_after_refit": True, "in_place": False}

    def call(method, **arguments):
        return asyncio.run(policy.checkpoint_engine_rpc(method, arguments))

    call("init_checkpoint_engine", backend=TRANSPORT, bucket_size_bytes=BUCKET, engine_kwargs=options)
    rollout.init_checkpoint_engine(TRANSPORT, BUCKET, options)
    same = []
    for policy.step in range(2):
        metadata = [call("prepare_checkpoint_engine"), rollout.prepare_checkpoint_engine()]
        sizes = {"train_world_size": 1, "rollout_world_size": 1}
        call("init_checkpoint_engine_process_group", metadata=metadata, **sizes)
        rollout.init_checkpoint_engine_process_group(0, 1, 1, metadata)
        call("send_weights_via_checkpoint_engine")
        assert rollout.update_weights_from_checkpoint_engine()
        same.append(bits(trained(policy.step)) == rollout.held)
        call("finalize_checkpoint_engine")
        rollout.finalize_checkpoint_engine()
    return same


def test_under_the_mixins_of_nemo_rl(source, tmp_path):
    """With a checkout, what NeMo-RL adds to workers of the policy and of vLLM makes the calls."""
    pytest.importorskip("ray", reason="NeMo-RL's workers import Ray")
    assert source is not None
    with ranks(1, sync_by_mixins, f"file://{tmp_path}") as started:
        assert results(started) == [[True, True]]


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")  # Ray's own, of which it has many
def test_under_the_synchronizer_of_nemo_rl(source, tmp_path, monkeypatch):
    """With a checkout and Ray, its synchronizer and the mixins of its workers do the syncs."""
    ray = pytest.importorskip("ray")
    from tests.integrations import nemo_workers

    assert source is not None
    monkeypatch.setenv("PYTHONPATH", ":".join(path for path in sys.path if path))
    ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False)
    try:
        generation = documented()
        generation["vllm_cfg"] = {"async_engine": False}
        generation["refit_cfg"][TRANSPORT] |= {"url": f"file://{tmp_path}/run", "timeout": 60.0, "in_place": False}
        synchronizer, policy, rollouts = nemo_workers.synchronizer(generation, trained)
        synchronizer.init_communicator()
        for step in range(3):
            ray.get([actor.train.remote(step) for actor in policy])
            synchronizer.sync_weights()
            assert not synchronizer.is_stale
            assert [bits(trained(step))] * 2 == ray.get([actor.held.remote() for actor in rollouts])
        ray.get([actor.train.remote(-1) for actor in policy])
        with pytest.raises(Exception, match="the policy has no such step"):
            synchronizer.sync_weights()
        assert synchronizer.is_stale
    finally:
        ray.shutdown()
