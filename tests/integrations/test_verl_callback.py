"""verl's checkpoint callback: what the trainer saves is published, and what could not be is refused at the start.

verl's own code makes the callback, from its wheel; `make test-verl` has its checkpoint manager save what is published.
"""

from __future__ import annotations

import inspect
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from safetensors.torch import load_file, save_file

import sparserl
from sparserl.errors import CheckpointError, SessionError
from tests.integrations.test_verl import VERSION
from tests.integrations.wheels import definition, parameters, wheel

CALLBACK = "verl.trainer.ppo.checkpoint_callback"
NAMES = ("verl", "verl.utils", "verl.utils.import_utils", "verl.trainer", "verl.trainer.ppo", CALLBACK)
OURS = "sparserl.integrations.verl_callback"


class Config(dict):
    """Like verl's config: keys are attributes too."""

    __getattr__ = dict.__getitem__


def config(store: Path, save_contents=("model", "hf_model"), async_save=False, **options) -> Config:
    checkpoint = Config(save_contents=[*save_contents], async_save=async_save)
    trainer = Config(
        checkpoint_callback_class=f"{OURS}.PublishCheckpoints", sparserl=Config(url=f"file://{store}", **options)
    )
    return Config(trainer=trainer, actor_rollout_ref=Config(actor=Config(checkpoint=checkpoint)))


@pytest.fixture(name="build")
def _build(monkeypatch):
    """The function of verl that makes the callback which a config names."""
    monkeypatch.delitem(sys.modules, OURS, raising=False)
    for name in NAMES:
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    for name in ("verl.utils.import_utils", CALLBACK):
        path = f"{name.replace('.', '/')}.py"
        exec(compile(wheel("verl", VERSION).text(path), path, "exec"), sys.modules[name].__dict__)
    yield sys.modules[CALLBACK].build_checkpoint_callback
    sys.modules.pop(OURS, None)


def saved(root: Path, step: int, folder: str = "huggingface", dtype=torch.float32) -> Path:
    """A save as verl's FSDP and Megatron workers leave it."""
    place = root / f"global_step_{step}" / "actor" / folder
    place.mkdir(parents=True)
    generator = torch.Generator().manual_seed(0)
    weights = {name: torch.randn(40, 30, generator=generator) for name in "ab"} | {"n": torch.arange(3)}
    weights["a"][step % 40] += 1
    save_file({n: t.to(dtype) if t.is_floating_point() else t for n, t in weights.items()}, place / "model.safetensors")
    (place / "config.json").write_text(f'{{"step": {step}}}')
    return root / f"global_step_{step}"


def bits(tensors) -> dict[str, bytes]:
    return {name: tensor.reshape(-1).view(torch.uint8).numpy().tobytes() for name, tensor in tensors.items()}


@pytest.mark.parametrize("folder", ["huggingface", "model/huggingface"])
def test_saves_are_published(build, tmp_path, folder):
    """Each save is a version, rounded to bf16, with its config and its step; the second one is a patch."""
    callback = build(config(tmp_path / "store"))
    target = tmp_path / "followed"
    for step, kind in ((5, "anchor"), (10, "patch")):
        checkpoint = saved(tmp_path, step, folder)
        callback.on_save(trainer=None, global_step=step, checkpoint_dir=str(checkpoint), async_save=False, more=1)
        assert kind == callback.report.kind
        sparserl.Subscriber(f"file://{tmp_path}/store", sparserl.targets.folder(target)).sync()
        on_disk = load_file(checkpoint / "actor" / folder / "model.safetensors")
        wanted = {n: t.bfloat16() if t.is_floating_point() else t for n, t in on_disk.items()}
        assert bits(wanted) == bits(load_file(next((target / "current").glob("*.safetensors"))))
        assert (target / "current" / "config.json").read_text() == f'{{"step": {step}}}'


def test_the_bits_on_disk(build, tmp_path):
    """Without a dtype nothing is rounded; the signing key is read from a file, other options are the publisher's."""
    keys = tmp_path / "key"
    keys.write_text(f"sparserl-secret-{'11' * 32}\n")
    options = {"rollout_dtype": None, "signing_key_file": str(keys), "ladder": [8, 16]}
    callback = build(config(tmp_path / "store", **options))
    callback.on_save(None, 5, str(saved(tmp_path, 5)))
    weights = {
        n: torch.zeros_like(t)
        for n, t in load_file(tmp_path / "global_step_5/actor/huggingface/model.safetensors").items()
    }
    sparserl.Subscriber(f"file://{tmp_path}/store", weights).sync()
    assert weights["a"].dtype == torch.float32
    assert bits(weights) == bits(load_file(tmp_path / "global_step_5/actor/huggingface/model.safetensors"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"save_contents": ["model"]}, "add 'hf_model'"),
        ({"async_save": True}, "async_save is on"),
        ({"url": ""}, "trainer.sparserl.url is not set"),
        ({"kepp_anchors": 1}, "kepp_anchors"),
    ],
)
def test_refused_before_training(build, tmp_path, options, message):
    """A run whose saves could not be published does not begin."""
    made = config(tmp_path, **{name: value for name, value in options.items() if name != "url"})
    if "url" in options:
        made.trainer.sparserl["url"] = options["url"]
    with pytest.raises(SessionError, match=message):
        build(made)


def test_a_save_without_weights(build, tmp_path):
    """It is named, and so is one that is still being written."""
    callback = build(config(tmp_path / "store"))
    (tmp_path / "global_step_1" / "actor").mkdir(parents=True)
    with pytest.raises(CheckpointError, match="no safetensors in huggingface or model/huggingface"):
        callback.on_save(trainer=None, global_step=1, checkpoint_dir=str(tmp_path / "global_step_1"))
    with pytest.raises(SessionError, match="still being written"):
        callback.on_save(trainer=None, global_step=1, checkpoint_dir=str(tmp_path), async_save=True)


def test_verl_still_calls_it_so(build):
    """The hook has verl's parameters, and the trainer calls it with keywords."""
    base = definition(wheel("verl", VERSION).tree("verl/trainer/ppo/checkpoint_callback.py"), "CheckpointCallback")
    build(config(Path("/tmp/none")))
    mine = inspect.signature(sys.modules[OURS].PublishCheckpoints.on_save).parameters
    assert parameters(definition(base, "on_save")) == [name for name in mine if name not in ("self", "kwargs")]
