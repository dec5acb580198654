"""slime and miles: ranks of Megatron publish their own shards, and engines commit them at the update point.

Neither is on the package index. SPARSERL_SLIME and SPARSERL_MILES name checkouts of github.com/THUDM/slime and
github.com/radixark/miles, whose own actors are then run; the tests were written with commits
624b824a898ab0ec1fcb4d373004c7f3852bf515 and 31f1ca961a94cb860cec3b2dea34ec332bfa8f76 (21 August 2026).
"""

from __future__ import annotations

import math
import os
import re
import sys
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest

from sparserl.errors import SessionError, UnsupportedTensor
from sparserl.integrations import slime_megatron
from sparserl.integrations.sglang_plugin import LOADER
from sparserl.session.store.retention import read_head
from sparserl.session.store.signing import keygen
from sparserl.transport.stores.opening import open_store
from tests.integrations import miles_checkout, slime_checkout, slime_trainer
from tests.integrations.sglang_server import changed_element, expected, running
from tests.integrations.wheels import ROOT, wheel
from tests.session.ranks import port, ranks, results

OPTION = re.compile(r"(--[\w-]+) ([^-\\\s]\S*)")
SGLANG = {"slime": "0.5.15.post1", "miles": "0.5.23"}  # slime has this release; miles a branch with update sessions

needs_megatron = pytest.mark.skipif(find_spec("megatron") is None, reason="Megatron-core is not installed")


@pytest.fixture(name="folder")
def _folder(tmp_path):
    pytest.importorskip("transformers")
    slime_trainer.save_checkpoint(tmp_path / "model")
    return tmp_path / "model"


class Trainer:
    """The ranks of a trainer."""

    def __init__(self, started) -> None:
        self._pipes = [pipe for _, pipe in started]

    def ask(self, *order):
        """The answers of all ranks."""
        for pipe in self._pipes:
            pipe.send(order)
        answers = []
        for pipe in self._pipes:
            assert pipe.poll(240), "a rank does not answer"
            answers.append(pipe.recv())
            assert not isinstance(answers[-1], tuple), answers[-1][1]  # why the rank has ended
        return answers

    def update(self, version, *servers):
        """Train to a version, and update the engines; returns metrics, or raises an error that all ranks must have."""
        assert set(self.ask("fill", version)) == {None}
        answers = self.ask("update", [getattr(server, "url", server) for server in servers])
        if isinstance(answers[0], Exception):
            assert {str(answer) for answer in answers} == {str(answers[0])}
            raise answers[0]
        return answers[0]


@contextmanager
def trainer(folder, work=slime_trainer.train, *args, environment=None, **sizes):
    """A trainer with as many ranks as its kinds of parallelism need."""
    size = math.prod(sizes.values())
    environment = {"SPARSERL_URL": url(folder)} | (environment or {})
    with ranks(size, work, environment, folder, sizes, *args) as started:
        yield Trainer(started)


def url(folder):
    return f"file://{folder.parent}/store"


def serving(framework, size=2):
    """An engine with the SGLang of a framework."""
    return running(wheel("sglang", SGLANG[framework]), size)


def require_version(server, version):
    """All ranks have the bits that they would have loaded of this version."""
    size = len(server.started)
    assert [bits for bits, _ in server.ask("bits")] == [expected(version, rank, size) for rank in range(size)]


@needs_megatron
@pytest.mark.long
def test_engines_follow_a_trainer(folder):
    """All have the bits of the version that was trained, or all ranks of the trainer hear why one has not."""
    with serving("slime") as server, trainer(folder, slime_trainer.train, "slime", tp=2) as megatron:
        metrics = megatron.update(0, server)
        require_version(server, 0)
        assert server.version == "1"
        assert metrics["perf/update_weights_density"] > 0.9

        with serving("slime", 1) as late:
            metrics = megatron.update(1, server, late)
            assert 0 < metrics["perf/update_weights_density"] < 0.3
            assert metrics["perf/update_weights_wire_bytes"] > 0
            for engine in (server, late):
                require_version(engine, 1)
                assert engine.version == "2"
                assert not engine.paused

        with pytest.raises(SessionError, match=rf"version 2 is published, but {late.url}"):
            megatron.update(2, server, late)
        require_version(server, 2)

        name = "model.layers.0.mlp.down_proj.weight"
        server.ask("spoil", (name, changed_element(name, 3)), only=1)
        with pytest.raises(SessionError, match=r"still has the weights that it had before: failed: ChecksumMismatch"):
            megatron.update(3, server)
        assert server.version == "3"
        megatron.update(4, server)
        require_version(server, 4)
        assert server.version == "5"


@needs_megatron
@pytest.mark.long
def test_restarts(folder, tmp_path):
    """A trainer that was restarted, as other ranks, continues its run; new engines follow. All believe one key."""
    secret, public = keygen()
    (tmp_path / "key").write_text(secret)
    environment = {
        "SPARSERL_STATE": str(tmp_path / "state"),
        "SPARSERL_SIGNING_KEY_FILE": str(tmp_path / "key"),
        "SPARSERL_TRUSTED_KEYS": public,
    }
    other = environment | {"SPARSERL_TRUSTED_KEYS": keygen()[1]}
    with serving("miles") as server:
        with trainer(folder, slime_trainer.train, "miles", environment=other, tp=2) as megatron:
            with pytest.raises(SessionError, match="signed by another key"):
                megatron.update(1, server)
            require_version(server, 0)
        with trainer(folder, slime_trainer.train, "miles", environment=environment, dp=2) as megatron:
            megatron.update(2, server)
            require_version(server, 2)
            assert server.version == "1"
    with (
        serving("miles") as server,
        trainer(folder, slime_trainer.train, "miles", environment=environment, pp=2) as megatron,
    ):
        megatron.update(3, server)
        require_version(server, 3)
    assert read_head(open_store(url(folder)), public)[0].version == 2


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.fixture(name="args", params=["slime", "miles"])
def _args(request, monkeypatch):
    """The hook of a framework, and options that it takes."""
    monkeypatch.setenv("SPARSERL_URL", "file:///nowhere")
    before = dict(sys.modules)
    slime_trainer.stand_in(request.param, None)
    yield getattr(slime_megatron, f"publish_in_{request.param}"), SimpleNamespace(**slime_trainer.OPTIONS)
    sys.modules.clear()
    sys.modules.update(before)


@pytest.mark.parametrize("option", ["colocate", "offload_train", "offload_rollout", "check_weight_update_equal"])
def test_options_that_do_not_go_with_it(args, option):
    """They are refused by name, when the trainer starts."""
    hook, options = args
    hook(options)
    setattr(options, option, True)
    with pytest.raises(SessionError, match="cannot publish from this trainer with --" + option.replace("_", "-")):
        hook(options)


def test_another_transport(args):
    """Whoever asks for another way than NCCL gets an error, not the other way."""
    hook, options = args
    options.update_weight_transport = "disk"
    options.update_weight_transfer_mode = "p2p"
    with pytest.raises(SessionError, match=r"--update-weight-trans\S+ (disk|p2p)"):
        hook(options)


def test_a_critic_that_takes_turns(args):
    """The trainer is awake at an update in slime, and asleep in miles."""
    hook, options = args
    options.offload_train = options.use_critic = True
    if hook is slime_megatron.publish_in_slime:
        hook(options)
    else:
        with pytest.raises(SessionError, match="--offload-train"):
            hook(options)


def test_a_release_without_the_class(args):
    """Weights are not broadcast behind the user's back where there is nothing to replace."""
    hook, options = args
    framework = hook.__name__.removeprefix("publish_in_")
    del sys.modules[f"{framework}.backends.megatron_utils.actor"].UpdateWeightFromDistributed
    with pytest.raises(SessionError, match="has no UpdateWeightFromDistributed to replace"):
        hook(options)


def test_no_store(args, monkeypatch):
    """The trainer does not start without one."""
    hook, options = args
    monkeypatch.delenv("SPARSERL_URL")
    with pytest.raises(SessionError, match="SPARSERL_URL is not set"):
        hook(options)


@pytest.mark.parametrize(
    ("said", "error"),
    [
        ({"quantization_config": {"quant_method": "fp8"}}, "model is quantized"),
        ({"is_lora": True}, "adapters are not published"),
    ],
)
def test_weights_that_engines_do_not_have(said, error):
    """Where engines have other tensors than the trainer, it is said before anything is published."""
    with pytest.raises(UnsupportedTensor, match=error):
        slime_megatron.WeightPublisher(None, SimpleNamespace(hf_checkpoint="model"), [], **said)


def test_addresses(monkeypatch):
    """Those of miles's engines are put together from what the servers say."""
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(get=lambda refs: refs))
    hosts = ["10.0.0.7", "fd00::7", "[fd00::7]"]
    engines = [SimpleNamespace(get_server_info=slime_checkout.remote({"host": h, "port": 80})) for h in hosts]
    assert slime_megatron._urls_in_miles(engines) == ["http://10.0.0.7:80", *["http://[fd00::7]:80"] * 2]


# -- the frameworks' own code ------------------------------------------------------------------------------------------


@pytest.fixture(name="slime")
def _slime() -> str:
    if "SPARSERL_SLIME" not in os.environ:
        pytest.skip("SPARSERL_SLIME names no checkout of slime, which is not on the package index")
    return os.environ["SPARSERL_SLIME"]


@pytest.fixture(name="miles")
def _miles() -> str:
    if "SPARSERL_MILES" not in os.environ:
        pytest.skip("SPARSERL_MILES names no checkout of miles, which is not on the package index")
    return os.environ["SPARSERL_MILES"]


@needs_megatron
@pytest.mark.parametrize("given", [{}, {"offload_train": True, "use_critic": True}], ids=["alone", "critic"])
def test_slimes_own_actor(slime, folder, given):
    """It loads the hook, makes the updater and calls it.

    With a critic it gives back the model's memory after every update, and destroys all process groups.
    """
    with (
        serving("slime") as server,
        trainer(folder, slime_checkout.train, slime, port(), given, tp=2) as megatron,
    ):
        for version in range(3):
            assert megatron.update(version, server)
            require_version(server, version)
            assert server.version == str(version + 1)


@needs_megatron
def test_miles_own_actor(miles, folder):
    """It loads the hook, makes the updater and calls it."""
    with serving("miles") as server, trainer(folder, miles_checkout.train, miles, port(), tp=2) as megatron:
        for version in range(3):
            assert megatron.update(version, server)
            require_version(server, version)
            assert server.version == str(version + 1)


def page_options():
    """The options that the page names, with their values."""
    page = (ROOT / "docs" / "how-to" / "integrations" / "slime.md").read_text()
    return [
        option for block in re.findall(r"```console\n(.*?)```", page, re.DOTALL) for option in OPTION.findall(block)
    ]


def test_functions_that_the_page_names():
    """All are there."""
    paths = [value for _, value in page_options() if value.startswith("sparserl.")]
    assert LOADER in paths
    assert len(paths) == 4
    for path in paths:
        assert callable(slime_trainer.load(path))


def test_options_that_the_page_names(slime):
    """All are options of slime, or of the servers that it starts."""
    known = (Path(slime) / "slime" / "utils" / "arguments.py").read_text()
    added = (Path(slime) / "docker" / "patch" / "latest" / "sglang-pull_weights.patch").read_text()
    for option, _ in page_options():
        if option.startswith("--sglang-"):
            name = option.removeprefix("--sglang-").replace("-", "_")
            assert name == "custom_weight_loader" or f"+    {name}" in added
        else:
            assert f'"{option}"' in known


@pytest.mark.parametrize("framework", ["slime", "miles"])
def test_engines_get_the_loader(request, framework):
    """Their servers are started with the option that names it."""
    checkout = request.getfixturevalue(framework)
    with ranks(1, slime_checkout.server_options, checkout, framework) as started:
        assert results(started) == [[LOADER]]
