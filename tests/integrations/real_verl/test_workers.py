"""verl's own manager, actor, FSDP2 engine, checkpoint manager and callback, on Ray and a CPU: `make test-verl`."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

if importlib.util.find_spec("verl") is None:
    pytest.skip("verl is not installed: make test-verl", allow_module_level=True)

CPU = {  # before verl is imported, here and in every worker
    "VERL_USE_EXTERNAL_MODULES": "tests.integrations.real_verl.cpu_platform",
    "VERL_PLATFORM": "cpu",
    "VERL_ENGINE_DEVICE": "cuda",  # what its engines are registered for
    "HF_HUB_OFFLINE": "1",
    "PYTHONPATH": ":".join(path for path in sys.path if path),
}
VLLM = {
    "OMP_NUM_THREADS": "1",
    "SPARSERL_VLLM_CPU": "plain",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
}
ROOT = Path(__file__).parents[3]
os.environ |= CPU
pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # Ray's and verl's own, of which they have many
    pytest.mark.timeout(900),
]

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import ray
    import torch
    from hydra import compose, initialize_config_module
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig
    from verl.checkpoint_engine import CheckpointEngineManager, CheckpointEngineRegistry
    from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
    from verl.trainer.ppo.checkpoint_callback import build_checkpoint_callback
    from verl.utils.config import omega_conf_to_dataclass
    from verl.utils.import_utils import import_external_libs

    import sparserl
    from tests.integrations.real_verl import workers

MODEL = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}
OVERRIDES = (
    "+actor_rollout_ref.model.load_tokenizer=False",
    "actor_rollout_ref.model.use_remove_padding=False",
    "+actor_rollout_ref.model.override_config.attn_implementation=eager",
    "actor_rollout_ref.actor.strategy=fsdp2",
    "actor_rollout_ref.actor.use_torch_compile=False",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1",
    "actor_rollout_ref.actor.checkpoint.save_contents=[model,hf_model]",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=1",
    "actor_rollout_ref.rollout.name=vllm",
    "trainer.checkpoint_callback_class=sparserl.integrations.verl_callback.PublishCheckpoints",
)


@pytest.fixture(name="model", scope="module")
def _model(tmp_path_factory):
    """A model whose experts transformers packs, and verl unpacks for its rollouts."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("model")
    AutoModelForCausalLM.from_config(Qwen3MoeConfig(**MODEL)).save_pretrained(folder)
    return folder


@pytest.fixture(name="cluster", scope="module")
def _cluster():
    ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


def group(cls, **arguments):
    """Two workers of a class, on Ray."""
    pool = RayResourcePool([2], use_gpu=False, max_colocate_count=1)
    made = RayClassWithInitArgs(ray.remote(cls), **arguments)
    return RayWorkerGroup(resource_pool=pool, ray_cls_with_init=made, device_name="cpu")


def config_of(model: Path, store: Path, backend: str, module: str):
    engine = "actor_rollout_ref.rollout.checkpoint_engine"
    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose(
            "ppo_trainer",
            overrides=[
                *OVERRIDES,
                f"actor_rollout_ref.model.path={model}",
                f"{engine}.backend={backend}",
                f"{engine}.custom_backend_module={module}",
                f"+{engine}.engine_kwargs.{backend}={{url: 'file://{store}/run', device: cpu, timeout: 600}}",
                f"+trainer.sparserl.url=file://{store}/checkpoints",
            ],
        )


@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize(
    ("backend", "module"),
    [("sparserl", "sparserl.integrations.verl"), ("delta_sharded", "sparserl.integrations.verl_delta")],
)
def test_syncs_of_a_training_run(model, tmp_path, backend, module):
    """Two ranks train, two rollouts hold what verl itself would gather: bit for bit, after every step.

    With `delta_sharded` each rank publishes its own shards, and rollouts load only what changed after the first sync.
    """
    config = config_of(model, tmp_path, backend, module)
    actors = group(workers.Actor, config=config.actor_rollout_ref)
    actors.init_model()
    rollout_config = omega_conf_to_dataclass(config.actor_rollout_ref.rollout)
    rollouts = group(workers.Rollout, rollout_config=rollout_config)
    replica = workers.Replica(rollouts.workers)
    manager = CheckpointEngineManager(rollout_config.checkpoint_engine, actors, [replica])
    for step in range(3):
        if step:
            actors.train(step)
        metrics = manager.update_weights(global_steps=step)
        assert step == metrics["sparserl/version"]
        wanted, _ = actors.exported()
        assert [wanted] * 2 == rollouts.held()
        changed = [sum(elements) for elements in rollouts.flushes()]
        if backend == "delta_sharded":
            elements = sum(len(bits) // 2 for bits in wanted.values())
            assert changed == [elements] * 2 if step == 0 else 0 < changed[0] == changed[1] < elements / 2
        else:
            assert changed == [0, 0]
    assert (replica.calls[0], replica.calls[-1]) == ("abort_all_requests", "resume_generation")
    _checkpoints_are_published(config, actors, tmp_path)
    for worker in (*actors.workers, *rollouts.workers):
        ray.kill(worker)


def test_the_settings_of_the_page(tmp_path):
    """Every setting that the page names is one of verl's config, and verl's own code accepts it."""
    page = (ROOT / "docs/how-to/integrations/verl.md").read_text()
    overrides = re.findall(r"^ +(\S+=\S+)", page, re.MULTILINE)
    assert len(overrides) == 6
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", overrides=[line.replace("s3://", f"file://{tmp_path}/") for line in overrides])
    backend = omega_conf_to_dataclass(config.actor_rollout_ref.rollout.checkpoint_engine)
    import_external_libs(backend.custom_backend_module)
    engine = CheckpointEngineRegistry.new(backend.backend, 1 << 20, **backend.engine_kwargs[backend.backend])
    assert engine.wire_format == "delta_flush"
    assert type(build_checkpoint_callback(config)).__name__ == "PublishCheckpoints"


def test_flushes_in_the_receiver_for_vllm(tmp_path):
    """The receiver that verl gives vLLM, and the loader of vLLM that it calls, write our flushes bit for bit."""
    command = [sys.executable, "-m", "tests.integrations.real_verl.vllm_receiver", str(tmp_path)]
    done = subprocess.run(
        command, env=os.environ | VLLM, cwd=ROOT, capture_output=True, text=True, check=False, timeout=600
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]


def _checkpoints_are_published(config, actors, tmp_path: Path) -> None:
    """What verl's checkpoint manager saves is in the store, rounded, with config; patches follow the first."""
    callback = build_checkpoint_callback(config)
    folder = tmp_path / "followed"
    for step, kind in ((10, "anchor"), (20, "patch")):
        saved = tmp_path / f"global_step_{step}"
        actors.train(step)
        actors.save_checkpoint(str(saved / "actor"), None, step)
        callback.on_save(trainer=None, global_step=step, checkpoint_dir=str(saved), async_save=False)
        assert (kind, step // 10 - 1) == (callback.report.kind, callback.report.version)
        sparserl.Subscriber(f"file://{tmp_path}/checkpoints", sparserl.targets.folder(folder)).sync()
        on_disk = load_file(saved / "actor" / "huggingface" / "model.safetensors")
        wanted = {name: workers.bits_of(tensor.to(torch.bfloat16)) for name, tensor in on_disk.items()}
        followed = load_file(next((folder / "current").glob("*.safetensors")))
        assert wanted == {name: workers.bits_of(tensor) for name, tensor in followed.items()}
        assert (folder / "current" / "config.json").exists()
