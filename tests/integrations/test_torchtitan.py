"""torchtitan RL: what the adapter relies on, in its wheel; and its controller, trainer and generators, which sync.

The second part starts Monarch's processes: `make test-torchtitan` installs what it needs, and runs it.
"""

from __future__ import annotations

import ast
import asyncio
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integrations.wheels import calls, definition, parameters, wheel

VERSION = "0.3.0"
RL = "torchtitan/experiments/rl"


@pytest.fixture(name="files", scope="module")
def _files():
    return wheel("torchtitan", VERSION)


def test_a_config_builds_its_own_controller(files):
    """`train.py` takes any config that is one of the controller's, and the controller that the config belongs to."""
    main = definition(files.tree(f"{RL}/train.py"), "main")
    assert "isinstance(config, Controller.Config)" in ast.unparse(main)
    assert "config.build()" in ast.unparse(main)
    assert parameters(definition(files.tree(f"{RL}/controller.py"), "setup_async")) == [
        "trainer_mesh",
        "generator_meshes",
    ]


def test_actors_are_started_on_meshes(files):
    """The controller starts both by their class, with a config first, and everything else by name."""
    setup = definition(files.tree(f"{RL}/controller.py"), "Controller", "setup_async")
    started = {ast.unparse(call.args[1]): call for call in calls(setup, "spawn")}
    assert {"PolicyTrainer", "VLLMGenerator"} <= started.keys()
    for call in (started["PolicyTrainer"], started["VLLMGenerator"]):
        assert len(call.args) == 3
        assert "store" not in [keyword.arg for keyword in call.keywords]


def test_the_methods_that_are_replaced(files):
    """Push and close are endpoints of the trainer, and the pull of all ranks a method of the generator."""
    trainer = files.tree(f"{RL}/actors/trainer.py")
    for name in ("push_model_state_dict", "close"):
        method = definition(trainer, "PolicyTrainer", name)
        assert "concurrent_endpoint" in [ast.unparse(decorator) for decorator in method.decorator_list]
        assert parameters(method) == []
    assert "self._transfer_dtype = " in ast.unparse(definition(trainer, "PolicyTrainer", "__init__"))
    generator = files.tree(f"{RL}/actors/generator.py")
    assert parameters(definition(generator, "VLLMGenerator", "_pull_model_state_dict")) == ["version"]
    text = ast.unparse(definition(generator, "VLLMGenerator", "_pull_model_state_dict"))
    for name in ("_pull_model_state_dict_future", "_model_state_dict_pull_request", "_rank", "_engine", "_get_model"):
        assert f"self.{name}" in text
    closing = definition(trainer, "PolicyTrainer", "close")
    assert not [node for node in ast.walk(closing) if isinstance(node, ast.Await)]  # there is nothing to close


def test_one_push_and_one_pull_at_a_time(files):
    """A pull follows its push, and the next push follows the pull: the newest version is the right one."""
    sync = definition(files.tree(f"{RL}/components/weight_sync.py"), "WeightSyncManager")
    pull = definition(sync, "_generator_pull_and_release_buffer_slots")
    assert ast.unparse(pull.body[0]) == "await push_task"
    loop = files.text(f"{RL}/controller.py")
    assert loop.index("_weight_sync.wait_prev_pull()") < loop.index("_weight_sync.start_async_push_pull(")


needs_torchtitan = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("torchtitan", "monarch", "vllm")),
    reason="torchtitan RL is not installed: make test-torchtitan",
)


@needs_torchtitan
@pytest.mark.long
@pytest.mark.parametrize(("trainer_ranks", "generator_ranks"), [(2, 2)])
def test_generators_have_the_bits_of_the_trainer(tmp_path, trainer_ranks, generator_ranks):
    """A sharded trainer steps, and the ranks of a generator have its parameters in bf16, bit for bit, every time.

    Then all of it is started again, and the run goes on.
    """
    program = [sys.executable, "-m", "tests.integrations.test_torchtitan", str(tmp_path)]
    for first in (0, 4):
        command = [*program, *map(str, (trainer_ranks, generator_ranks, first))]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
        assert "every version was exact" in done.stdout, done.stdout[-2000:] + done.stderr[-6000:]


@needs_torchtitan
@pytest.mark.long
@pytest.mark.filterwarnings("ignore")  # those of torchtitan and vLLM
def test_the_registry_of_the_page():
    """A config of torchtitan's own, as the page makes it."""
    from sparserl.integrations.torchtitan import StoreController

    page = Path(__file__).parents[2] / "docs/how-to/integrations/torchtitan.md"
    registry: dict = {}
    exec(page.read_text().split("```python\n")[1].split("```")[0], registry)
    config = registry["through_a_store"]()
    assert type(config) is StoreController.Config
    assert (config.store.url, config.store.state) == ("s3://bucket/run", "/scratch/state")


@needs_torchtitan
@pytest.mark.long
@pytest.mark.filterwarnings("ignore")  # those of torchtitan and vLLM
def test_other_controllers_are_refused(tmp_path):
    from sparserl.errors import SessionError
    from sparserl.integrations.torchtitan import StoreConfig, with_store
    from tests.integrations.torchtitan_actors import small_config

    store = StoreConfig(url="file:///nowhere")
    config = with_store(small_config(tmp_path, 1, 1), store)
    assert config.store is store
    with pytest.raises(SessionError, match=r"StoreController\.Config; it must be a Controller\.Config"):
        with_store(config, store)


async def _run(folder: Path, trainer_ranks: int, generator_ranks: int, first: int) -> None:
    """Four syncs; the versions of the run are counted from `first`."""
    from sparserl.integrations.torchtitan import StoreConfig, with_store
    from tests.integrations import torchtitan_actors as actors

    store = StoreConfig(url=f"file://{folder}/store", state=str(folder / "state"))
    config = with_store(actors.small_config(folder, trainer_ranks, generator_ranks), store)
    controller = actors.CpuController(config)
    mesh = actors.Processes(generator_ranks)
    try:
        await controller.setup_async(trainer_mesh=actors.Processes(trainer_ranks), generator_meshes=[mesh])
        generator = mesh.actors["generator"]
        for version in range(4):
            if version:
                await controller.trainer.gradients.call(version)
                await controller.trainer.optim_step.call()
                await controller.trainer.push_model_state_dict.call()
                await controller.generator_router.pull_model_state_dict.call_one(version)
            wanted = (await controller.trainer.fingerprints.call()).get(0)
            for rank, there in (await generator.fingerprints.call()).items():
                extra = there.keys() - wanted.keys()
                assert all("_k_scale" in name for name in extra), extra
                assert {name: there[name] for name in wanted} == wanted, (version, rank)
            for synced in (await generator.synced.call()).values():
                assert synced == (version, first + version, version + 1)
        sizes = {path.name: path.stat().st_size for path in (folder / "store").rglob("*") if path.is_file()}
        print("every version was exact", sum(sizes.values()))
    finally:
        await controller.close()


if __name__ == "__main__":
    asyncio.run(_run(Path(sys.argv[1]), *map(int, sys.argv[2:])))
