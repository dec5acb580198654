"""The SkyRL backend in SkyRL's own tables and config classes, from its wheel; `test_skyrl_sync.py` has the syncs."""

from __future__ import annotations
import __future__

import ast
import dataclasses
import pickle
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from sparserl.errors import SessionError
from tests.integrations.wheels import calls, definition, parameters, wheel

VERSION = "0.4.0"
TRAIN = "skyrl.backends.skyrl_train"
SYNC = "skyrl/backends/skyrl_train/weight_sync/__init__.py"
SENDERS = "skyrl/backends/skyrl_train/weight_sync/weight_senders.py"
WORKER = "skyrl/backends/skyrl_train/workers/worker.py"
CONFIG = "skyrl/train/config/config.py"
UTILS = "skyrl/train/utils/utils.py"
ENGINE = {"weight_sync_backend": "sparserl", "sparserl": {"url": "s3://bucket/run"}}


def run(name: str, path: str, wanted: set[str] | None = None, **known: Any) -> ModuleType:
    """A module of SkyRL from its wheel; or only some functions of it, with the names that these need."""
    tree = ast.parse(wheel("skyrl", VERSION).text(path))
    if wanted is not None:
        tree.body = [node for node in tree.body if getattr(node, "name", None) in wanted]
    module = ModuleType(name)
    module.__dict__.update(known, __package__=name)
    sys.modules[name] = module
    flags = 0 if wanted is None else __future__.annotations.compiler_flag
    exec(compile(tree, path, "exec", flags, dont_inherit=True), module.__dict__)
    return module


def forgotten() -> dict[str, ModuleType]:
    """Take away all that the tests put among the modules; returns what was there."""
    packages = ("omegaconf", "skyrl", "skyrl_gym")
    names = [n for n in sys.modules if n.split(".")[0] in packages or n.startswith("sparserl.integrations.skyrl")]
    return {name: sys.modules.pop(name) for name in names}


def stand_in(name: str, **contents: Any) -> None:
    """A module of another package, which is not installed here; nothing of it is used but its names."""
    sys.modules[name] = ModuleType(name)
    sys.modules[name].__dict__.update(contents)


@pytest.fixture(name="skyrl")
def _skyrl() -> Any:
    """SkyRL's table of backends, its config classes and its checks, with the backend added to them."""
    before = forgotten()
    for name in ("skyrl", "skyrl.backends", TRAIN, "skyrl.train", "skyrl.train.config", "skyrl.train.utils"):
        stand_in(name)
    stand_in(f"{TRAIN}.inference_servers")
    stand_in("omegaconf", DictConfig=dict, OmegaConf=None)
    stand_in("skyrl_gym.envs.search.env", SearchEnvConfig=SimpleNamespace)
    stand_in("skyrl_gym.envs.sql.env", Text2SQLEnvConfig=SimpleNamespace)
    run(f"{TRAIN}.weight_sync.base", "skyrl/backends/skyrl_train/weight_sync/base.py")
    sync = run(f"{TRAIN}.weight_sync", SYNC)
    sys.modules[TRAIN].weight_sync = sync  # type: ignore[attr-defined]
    config = run("skyrl.train.config.config", CONFIG)
    checks = {"validate_megatron_cfg", "validate_inference_engine_cfg"}
    utils = run("skyrl.train.utils.utils", UTILS, checks, WIRE_FORMATS=(), AUTO_FP8="auto", is_fp8_enabled=bool)
    sys.modules["skyrl.train.utils"].utils = utils  # type: ignore[attr-defined]
    servers = run(
        f"{TRAIN}.inference_servers.utils",
        "skyrl/backends/skyrl_train/inference_servers/utils.py",
        {"_uses_lora_weight_sync"},
        get_transfer_strategy=sync.get_transfer_strategy,
    )
    import sparserl.integrations.skyrl as integration

    yield SimpleNamespace(sync=sync, config=config, utils=utils, servers=servers, integration=integration)
    forgotten()
    sys.modules.update(before)


def generator(skyrl: Any, **engine: Any) -> Any:
    """SkyRL's part of the config, as it is built from what a user wrote."""
    return skyrl.config.build_nested_dataclass(skyrl.config.GeneratorConfig, {"inference_engine": engine})


def whole(skyrl: Any, strategy: str = "fsdp", lora: int = 0, colocate: bool = False, **engine: Any) -> Any:
    """What the checks read."""
    merge = SimpleNamespace(lora_config=SimpleNamespace(merge_lora=True))
    policy = SimpleNamespace(model=SimpleNamespace(lora=SimpleNamespace(rank=lora)), megatron_config=merge)
    placement = SimpleNamespace(colocate_all=colocate)
    trainer = SimpleNamespace(placement=placement, policy=policy, strategy=strategy)
    return SimpleNamespace(trainer=trainer, generator=generator(skyrl, **ENGINE | engine))


def test_the_backend_is_in_the_tables(skyrl):
    """Both sides are told `sparserl`, also by modules that had imported the function; other backends are as before."""
    assert skyrl.sync.get_vllm_receive_backend("sparserl", False) == "sparserl"
    for module in (skyrl.sync, skyrl.servers):
        assert module.get_transfer_strategy("sparserl", False) == "sparserl"
        assert module.get_transfer_strategy("nccl", True) == "ipc"
        assert module.get_transfer_strategy("delta", False) == "delta"


def test_options_are_built(skyrl):
    """They stand in the config, under their names."""
    engine = generator(
        skyrl, **ENGINE | {"sparserl": {"url": "runs/7", "publisher": {"new_run": True}}}
    ).inference_engine
    assert (engine.sparserl.url, engine.sparserl.publisher) == ("runs/7", {"new_run": True})
    assert engine.tensor_parallel_size == 1
    assert dataclasses.asdict(engine)["sparserl"]["profile"] == "auto"
    assert generator(skyrl, weight_sync_backend="nccl").inference_engine.sparserl is None


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        ({"weight_sync_backend": "sparserl"}, r"sparserl\.url"),
        ({"sparserl": {"url": "runs/7"}}, "weight_sync_backend=nccl"),
        (ENGINE | {"sparserl": {"url": "runs/7", "profil": "ctx"}}, "profil"),
        (ENGINE | {"sparserl": {"url": "runs/7", "publisher": {"new_runs": True}}}, "new_runs"),
        (ENGINE | {"sparserl": {"url": "runs/7", "publisher": {"writers": 1}}}, "writers"),
        (ENGINE | {"sparserl": {}}, "url"),
    ],
)
def test_options_that_are_none(skyrl, engine, message):
    """An option that is missing, unknown or without effect is refused by its name."""
    with pytest.raises((SessionError, ValueError, TypeError), match=message):
        generator(skyrl, **engine)


def test_without_the_backend_the_config_is_refused():
    """SkyRL alone would take `sparserl` for `nccl`; it refuses the options, without which nothing is synced."""
    tree = wheel("skyrl", VERSION).tree(SYNC)
    last = definition(tree, "get_transfer_strategy").body[-1]  # type: ignore[attr-defined]
    assert ast.unparse(last) == "return 'nccl'"
    assert len(calls(definition(wheel("skyrl", VERSION).tree(CONFIG), "build_nested_dataclass"), "fields")) == 1


def test_the_config_brings_the_backend_along(skyrl):
    """A process that unpickles it imports the integration."""
    pickled = pickle.dumps(generator(skyrl, **ENGINE).inference_engine)
    del sys.modules["sparserl.integrations.skyrl"]
    assert pickle.loads(pickled).sparserl.url == "s3://bucket/run"
    assert "sparserl.integrations.skyrl" in sys.modules


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"colocate": True}, "colocate_all"),
        ({"offload_kv_for_weight_sync": True}, "offload_kv_for_weight_sync"),
        ({"lora": 8}, "LoRA"),
    ],
)
def test_what_would_not_be_synced_is_refused(skyrl, changes, message):
    """Engines that drop weights, and adapters, are refused before anything starts."""
    with pytest.raises(SessionError, match=message):
        skyrl.utils.validate_inference_engine_cfg(whole(skyrl, **changes))


def test_megatron_is_checked_as_before(skyrl):
    """SkyRL's list of backends does not stop this one; its other checks are made, and the config is as it was."""
    cfg = whole(skyrl, "megatron", lora=8, backend="other")
    with pytest.raises(AssertionError, match="only vllm"):
        skyrl.utils.validate_megatron_cfg(cfg)
    assert cfg.generator.inference_engine.weight_sync_backend == "sparserl"


def test_skyrl_still_builds_senders_so():
    """A sender asks for its backend, then for what it is made from; the parameters have these names."""
    senders = wheel("skyrl", VERSION).tree(SENDERS)
    build = definition(senders, "build_trainer_engine")
    order = [getattr(call.func, "id", "") for call in ast.walk(build) if isinstance(call, ast.Call)]
    assert {"get_transfer_strategy", "_build_sender_init_info", "SkyrlWeightSyncClient"} <= {*order}
    assert calls(build, "get_transfer_strategy")[0].lineno < calls(build, "_build_sender_init_info")[0].lineno
    assert {"backend", "ie_cfg", "rank", "server_urls"} <= {*parameters(definition(senders, "_build_sender_init_info"))}
    assert "skyrl_set_reset_prefix_cache" in ast.unparse(definition(senders, "maybe_set_reset_prefix_cache"))
    assert "engine.skyrl_draft_source = draft_source" in ast.unparse(build)


def test_skyrl_still_syncs_so():
    """Workers leave resets to senders that say they do them; validation calls what is replaced, by its name."""
    worker = definition(wheel("skyrl", VERSION).tree(WORKER), "_sync_weights_to_inference_engines")
    assert "if not engine.skyrl_handles_prefix_cache_reset" in ast.unparse(worker)
    assert len(calls(worker, "maybe_set_reset_prefix_cache")) == 1
    validate = definition(wheel("skyrl", VERSION).tree(UTILS), "validate_generator_cfg")
    for name in ("validate_megatron_cfg", "validate_inference_engine_cfg"):
        assert len(calls(validate, name)) == 1
    main = definition(wheel("skyrl", VERSION).tree("skyrl/train/entrypoints/main_base.py"), "main")
    assert "import_module(override_entrypoint).main()" in ast.unparse(main)


def test_the_entry_point_is_skyrls(skyrl, monkeypatch):
    """The option that names this one is taken away, and SkyRL's own runs."""
    seen: list[list[str]] = []
    stand_in("skyrl.train.entrypoints")
    stand_in("skyrl.train.entrypoints.main_base", main=lambda: seen.append(sys.argv[1:]))
    arguments = ["trainer.override_entrypoint=sparserl.integrations.skyrl", "trainer.seed=1"]
    monkeypatch.setattr(sys, "argv", ["main_base", *arguments])
    skyrl.integration.main()
    assert seen == [["trainer.seed=1"]]


def test_without_skyrl_it_says_so(monkeypatch):
    """Asked for and missing is an error that says what is missing."""
    monkeypatch.setitem(sys.modules, "skyrl", None)
    monkeypatch.delitem(sys.modules, "sparserl.integrations.skyrl", raising=False)
    with pytest.raises(SessionError, match="SkyRL is not installed"):
        import sparserl.integrations.skyrl  # noqa: F401
