"""OpenRLHF: the change to it applies to its wheel, and its actor then publishes what engines commit.

`make test-openrlhf` runs the test with a real DeepSpeed, Ray and vLLM, which `make test` skips. The change also fits
commit 3c3be6234e0cb353e76bb8019947db9dfe99fca7 (13 August 2026).
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import sparserl
from sparserl.errors import SessionError, SparserlError
from tests.integrations.absent import leave_out
from tests.integrations.wheels import ROOT, calls, definition, parameters, wheel
from tests.session.ranks import port, ranks, results
from tests.sources import zero3_engine

VERSION = "0.11.2"
PAGE = ROOT / "docs/how-to/integrations/openrlhf.md"
DIFF = ROOT / "docs/how-to/integrations/diffs/openrlhf.diff"
PURE = f"openrlhf-{VERSION}.data/purelib/"  # where the wheel has its modules
PARTS = ("deepspeed", "ray", "vllm")
UNUSED = ("aiohttp", "flash_attn", "peft", "pylatexenc", "torchdata")


@pytest.fixture(name="patched", scope="module")
def _patched(tmp_path_factory) -> Path:
    """The modules of the wheel with the change of the page."""
    folder = tmp_path_factory.mktemp("openrlhf")
    found = wheel("openrlhf", VERSION, "--platform", "manylinux1_x86_64", "--python-version", "3.12")
    for name in found.names():
        if name.startswith(PURE) and name.endswith(".py"):
            path = folder / name.removeprefix(PURE)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(found.text(name))
    for options in (["--check"], []):
        subprocess.run(["git", "apply", *options, str(DIFF)], cwd=folder, check=True)
    return folder


def test_the_page_names_the_version():
    """The page names the wheel and the commit that the change is for."""
    assert f"OpenRLHF {VERSION}" in PAGE.read_text()
    assert re.findall(r"`([0-9a-f]{12})`", PAGE.read_text())[0] in __doc__


def test_a_checkout(tmp_path):
    """The change applies to the newest commit that was read, too."""
    if "SPARSERL_OPENRLHF" not in os.environ:
        pytest.skip("SPARSERL_OPENRLHF names no checkout of OpenRLHF")
    for name in re.findall(r"^--- a/(.*)$", DIFF.read_text(), re.MULTILINE):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text((Path(os.environ["SPARSERL_OPENRLHF"]) / name).read_text())
    subprocess.run(["git", "apply", "--check", str(DIFF)], cwd=tmp_path, check=True)


def test_options_reach_the_engines(patched):
    """The command has the options of the page; engines get the backend, and a method that calls their workers."""
    command = ast.parse((patched / "openrlhf/cli/train_ppo_ray.py").read_text())
    flags = {ast.unparse(call.args[0]).strip("'") for call in calls(command, "add_argument")}
    assert set(re.findall(r"--[a-z]+\.[a-z_]+", PAGE.read_text())) <= flags
    (engines,) = calls(command, "create_vllm_engines")
    assert "weight_transfer_backend" in {keyword.arg for keyword in engines.keywords}
    module = ast.parse((patched / "openrlhf/trainer/ray/vllm_engine.py").read_text())
    assert "weight_transfer_backend" in parameters(definition(module, "create_vllm_engines"))
    assert parameters(definition(module, "RolloutRayActor", "weight_transfer")) == ["method"]


class Remote:
    """A method of an actor of Ray that is in this process."""

    def __init__(self, method):
        self.remote = method


class Engine:
    """Takes the calls that an engine gets, and follows the run as its workers do."""

    def __init__(self, weights):
        self.weights, self.calls = weights, []
        self.weight_transfer = Remote(self._weight_transfer)
        self.reset_prefix_cache = Remote(lambda: self.calls.append("reset"))

    def _weight_transfer(self, method, init_info=None, update_info=None):
        self.calls.append(method)
        if init_info is not None:
            self.subscriber = sparserl.Subscriber(init_info["url"], self.weights)
        if update_info is not None:
            self.subscriber.sync(update_info["version"])


def arguments(url: str | None, **ds: int) -> SimpleNamespace:
    """The arguments of OpenRLHF that its actor's trainer reads."""
    vllm = SimpleNamespace(sync_backend="sparserl", sync_url=url, enable_prefix_caching=True)
    train = SimpleNamespace(max_epochs=1, colocate_all=False, async_enable=False, dynamic_batch_enable=False)
    correction = ("is_correction_level", "is_correction_mode", "is_correction_gating", "is_correction_threshold")
    advantage = SimpleNamespace(**dict(zip(correction, ("off", "mask", "ratio", [0.5, 5.0]), strict=True)))
    actor = SimpleNamespace(eps_clip_low_high=(0.2, 0.2), dual_clip=None, policy_loss_type="ppo", aux_loss_coef=0.0)
    actor.loss_agg_mode = "token-mean"
    lora = SimpleNamespace(rank=ds.pop("lora_rank", 0))
    options = SimpleNamespace(packing_samples=False, lora=lora, **{"tensor_parallel_size": 1, "zero_stage": 3} | ds)
    return SimpleNamespace(vllm=vllm, train=train, actor=actor, ds=options, algo=SimpleNamespace(advantage=advantage))


def trainer_of(checkout: str, args, model, engines):
    """OpenRLHF's trainer of an actor, on a CPU, without the kernels of flash-attention."""
    sys.path.insert(0, checkout)
    leave_out(*(name for name in (*UNUSED, *PARTS) if find_spec(name) is None))
    torch.cuda.synchronize = lambda: None
    torch.cuda.current_device = lambda: 0
    import ray
    from openrlhf.trainer.ray.ppo_actor import ActorPPOTrainer

    if any(isinstance(engine, Engine) for engine in engines):
        ray.get = list  # they have answered at once
    actor = SimpleNamespace(model=SimpleNamespace(module=model))
    return ActorPPOTrainer(SimpleNamespace(args=args), actor, None, None, None, vllm_engines=engines)


def _broadcast(rank, group, pipe, checkout: str, url: str):
    """Two ranks that have the whole model each, as in ZeRO-1 and -2."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(30, 20), torch.nn.Linear(20, 5))
    engine = Engine({name: torch.zeros_like(t, dtype=torch.bfloat16) for name, t in model.state_dict().items()})
    trainer = trainer_of(checkout, arguments(url, zero_stage=2), model, [engine])
    for _ in range(2):
        with torch.no_grad():
            model[0].weight[:3] *= 1.5
        trainer.broadcast_to_vllm()
    exact = all(torch.equal(engine.weights[name], t.bfloat16()) for name, t in model.state_dict().items())
    return engine.calls, exact


@pytest.mark.long
def test_an_actor_publishes(patched, tmp_path):
    """OpenRLHF's trainer, with the change: rank 0 publishes, and engines commit what the actor has."""
    with ranks(2, _broadcast, str(patched), f"file://{tmp_path}/run") as started:
        (first, exact), (second, _) = results(started)
    commit = ["start_weight_update", "update_weights", "finish_weight_update", "reset"]
    assert first == ["init_weight_transfer_engine", *commit, *commit]
    assert exact
    assert second == []


class BrokenEngine(Engine):
    """Begins to follow, and cannot commit."""

    def _weight_transfer(self, method, init_info=None, update_info=None):
        if update_info is not None:
            raise RuntimeError("no room")


def _fail(rank, group, pipe, url: str):
    """Two ranks, of which the first cannot have its engine commit."""
    sys.modules["ray"] = SimpleNamespace(get=list)
    from sparserl.integrations.openrlhf import WeightSync

    sync = WeightSync(arguments(url, zero_stage=2), torch.nn.Linear(3, 3), [BrokenEngine({})])
    try:
        sync.send_weights()
    except (RuntimeError, SparserlError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.long
def test_all_ranks_raise_what_fails_on_the_first(tmp_path):
    """The others would wait for it for ever, at the barrier that comes next."""
    with ranks(2, _fail, f"file://{tmp_path}/run") as started:
        first, second = results(started)
    assert first == "RuntimeError: no room"
    assert second == "PeerLost: rank 0 failed: RuntimeError: no room"


@pytest.mark.parametrize(
    ("args", "refusal"),
    [
        (arguments(None), "needs --vllm.sync_url"),
        (arguments("file:///run", tensor_parallel_size=2), r"--ds.tensor_parallel_size is more than 1"),
        (arguments("file:///run", lora_rank=8), r"--ds.lora.rank is more than 0"),
    ],
)
def test_refusals(args, refusal):
    """What cannot be published exactly is refused before anything is."""
    from sparserl.integrations.openrlhf import WeightSync

    with pytest.raises(SessionError, match=refusal):
        WeightSync(args, torch.nn.Linear(2, 2), [])


def _started_engines(checkout: str, model: str) -> list:
    """An engine of vLLM that OpenRLHF starts in an actor of Ray, which has room for another."""
    import ray

    from tests.integrations.real_vllm.test_vllm import ENVIRONMENT

    sys.path.insert(0, checkout)
    environment = ENVIRONMENT | {"PYTHONPATH": os.pathsep.join((checkout, str(ROOT / "src"), str(ROOT)))}
    ray.init(num_cpus=2, num_gpus=2, include_dashboard=False, runtime_env={"env_vars": environment})
    leave_out(*(name for name in UNUSED if find_spec(name) is None))
    return [_engine_on(model)]


def _engine_on(model: str):
    """An engine that loads a folder, as OpenRLHF starts it."""
    from openrlhf.trainer.ray.vllm_engine import create_vllm_engines

    common = {"seed": 0, "full_determinism": True, "enable_prefix_caching": True, "enforce_eager": True}
    sizes = {"max_model_len": 64, "gpu_memory_utilization": 0.1}
    (engine,) = create_vllm_engines(1, 1, model, weight_transfer_backend="sparserl", **common, **sizes)
    return engine


def _zero3(rank, group, pipe, checkout: str, folder: str, model_path: str, at: int, with_vllm: bool):
    """Two ranks of DeepSpeed's ZeRO-3 train, and broadcast."""
    import transformers

    args = arguments(f"file://{folder}/run")
    zero3_engine.join(rank, at)
    model = transformers.AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.bfloat16)
    whole = {name: torch.zeros_like(tensor) for name, tensor in model.state_dict().items()}
    engines = [Engine(whole)] if not with_vllm else _started_engines(checkout, model_path) if rank == 0 else []
    engine = zero3_engine.engine_of(model, 1e-3)
    trainer = trainer_of(checkout, args, engine.module, engines)
    at_first = _hashes(engines[0]) if with_vllm and rank == 0 else None
    for step in range(3):
        tokens = torch.arange(1, 17).reshape(1, 16) + step
        engine.backward(engine(input_ids=tokens, labels=tokens).loss)
        engine.step()
        trainer.broadcast_to_vllm()
    gathered = zero3_engine.whole_weights(model)
    if rank > 0:
        return True
    if with_vllm:
        import ray

        _audit(engines[0], whole, args.vllm.sync_url)
        followed = _followed(args.vllm.sync_url, Path(folder), Path(model_path))
        assert _hashes(_engine_on(followed)) == _hashes(engines[0]) != at_first
        ray.shutdown()
    return all(torch.equal(whole[name], tensor) for name, tensor in gathered.items())


def _audit(engine, whole, url: str) -> None:
    """Read all bits of an engine, which must be those of the newest version; read this version."""
    import ray

    version = sparserl.Subscriber(url, whole).sync().version
    for method, options in (
        ("start_weight_update", {}),
        ("update_weights", {"update_info": {"version": version, "audit": True}}),
        ("finish_weight_update", {}),
    ):
        ray.get(engine.weight_transfer.remote(method, **options), timeout=300)


def _hashes(engine) -> list:
    """Those of all weights that the worker of an engine has."""
    import ray

    from tests.integrations.real_vllm import engine as functions

    ray.cloudpickle.register_pickle_by_value(functions)  # actors have the `tests` of OpenRLHF
    return ray.get(engine.weight_transfer.remote(functions.hashes), timeout=300)


def _followed(url: str, folder: Path, model: Path) -> str:
    """A folder that follows the run, with the files that do not travel: config and tokenizer."""
    command = [sys.executable, "-m", "sparserl", "follow", url, "-o", str(folder / "followed"), "--once"]
    subprocess.run(command, check=True, cwd=ROOT, timeout=300)
    current = folder / "followed/current"
    for file in model.glob("*.json"):
        shutil.copy(file, current)
    return str(current)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("with_vllm", [False, True])
def test_zero3(patched, tmp_path, with_vllm):
    """ZeRO-3 shards of two ranks arrive bit for bit; with Ray and vLLM, in an engine that OpenRLHF has started.

    Another engine, which OpenRLHF starts from a folder that followed the run, has the same bits.
    """
    if missing := [name for name in (PARTS if with_vllm else ("deepspeed",)) if find_spec(name) is None]:
        pytest.skip(f"{', '.join(missing)} is not installed; see `make test-openrlhf`")
    program = "import sys; from tests.integrations.real_vllm import models; models.make(sys.argv[1], 'llama')"
    subprocess.run([sys.executable, "-c", program, str(tmp_path / "model")], check=True, cwd=ROOT)
    work = (str(patched), str(tmp_path), str(tmp_path / "model"), port(), with_vllm)
    with ranks(2, _zero3, *work) as started:
        assert results(started, wait=600) == [True, True]
