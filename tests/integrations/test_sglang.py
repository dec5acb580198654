"""The loader for SGLang on two real ranks, the client that drives it over HTTP, and the seams that both stand on."""

from __future__ import annotations

import ast
import json
import sys
import time
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

import sparserl
from sparserl.cli.app import app
from sparserl.errors import SessionError, UnsupportedTensor
from sparserl.integrations import sglang as ours
from sparserl.integrations import sglang_plugin, sglang_server
from sparserl.plan import buckets
from sparserl.session.store.records import layout_to_bytes
from sparserl.targets import folder
from sparserl.weights.engine_sums import EngineSums
from tests.class_choice import always
from tests.integrations import sglang_real
from tests.integrations.sglang_plugins import weight_loaders
from tests.integrations.sglang_server import (
    REQUESTS,
    VOCAB,
    Folded,
    Refreshed,
    Scaled,
    Tied,
    bits,
    changed_element,
    checkpoint,
    control,
    expected,
    in_group,
    marks,
    running,
)
from tests.integrations.wheels import calls, definition, fields, parameters, wheel
from tests.session.ranks import ranks, results

VERSION = "0.5.23"
MADE = "the engine computes it from the weights when it loads them"
SLIMES_VERSION = "0.5.15.post1"


@pytest.fixture(name="sglang", scope="module")
def _sglang():
    return wheel("sglang", VERSION)


class Trainer:
    """Publishes versions of the checkpoint."""

    def __init__(self, path, profile="ulp") -> None:
        self.url, self._now = f"file://{path}/store", checkpoint()
        options = {"ladder": None, "files": {"config.json": b"{}"}}
        self._publisher = sparserl.Publisher(self.url, self._now, profile=profile, **options)

    def publish(self, version):
        for name, tensor in checkpoint(version).items():
            self._now[name].copy_(tensor)
        return self._publisher.publish()

    def last_patch(self):
        """The step of the newest patch."""
        return [step for step in self._publisher._committed.index.steps if step.base is not None][-1]


def held(server):
    """What the ranks of a server hold."""
    return [found for found, _ in server.ask("bits")]


def wanted(version, size=2):
    return [expected(version, rank, size) for rank in range(size)]


def verified(server, weights):
    """What `sparserl verify-engine` says of a server, and its exit code."""
    done = CliRunner().invoke(app, ["verify-engine", server.url, str(weights), "--json"])
    assert done.stdout, done.output
    return done.exit_code, json.loads(done.stdout)


def test_two_ranks_follow(sglang, tmp_path):
    """Versions, an older one too, are committed in a pause, on both ranks: bit for bit what they would have loaded."""
    trainer = Trainer(tmp_path)
    with running(sglang) as server:
        client = ours.Client(server.url)
        require_verified(server, tmp_path)
        assert client.marks() == ["never updated"] * 2
        server.calls.clear()
        for version in range(3):
            run = trainer.publish(version).run
            assert (run, version) == client.update(trainer.url)
            assert wanted(version) == held(server)
            assert server.version == f"{run}:{version}"
        sum_2 = client.checksum()
        assert client.update(trainer.url, 1) == (run, 1)
        assert wanted(1) == held(server)
        assert client.checksum() != sum_2
        client.update(trainer.url)
        assert client.checksum() == sum_2
        first = server.calls.index("pause_generation")
        assert server.calls[first : first + 7] == [
            "pause_generation",
            "begin_weight_update",
            "update_weights_from_tensor",
            "end_weight_update",
            "weights_checker",
            "update_weight_version",
            "continue_generation",
        ]
        assert not server.paused
        assert verified(server, f"{trainer.url}@2")[0] == 0
        code, answer = verified(server, f"{trainer.url}@1")
        assert (code, answer["answer"], answer["version"]) == (1, "different", 1)
        assert answer["different"] == sorted(
            n for n, t in checkpoint(2).items() if not torch.equal(t, checkpoint(1)[n])
        )
        assert client.marks() == [f"{run} 2"] * 2
        assert client.checksum() == sum_2


@pytest.mark.long
@pytest.mark.parametrize("profile", ["auto", "ctx", "ulp"])
def test_patches_are_cut_along_ranks(sglang, tmp_path, monkeypatch, profile):
    """At its first commit an engine says which parts its ranks have; then each fetches its share, in any profile."""
    monkeypatch.setattr(buckets, "choose_classes", always)
    trainer = Trainer(tmp_path, profile)
    with running(sglang) as server:
        client = ours.Client(server.url)
        trainer.publish(0)
        client.update(trainer.url, ahead=False)
        for version in range(1, 4):
            trainer.publish(version)
            client.update(trainer.url, ahead=False)
            assert wanted(version) == held(server)
            kinds, sizes = zip(*server.ask("report"), strict=True)
            step = trainer.last_patch()
            assert kinds == ("patch", "patch")
            assert ("ctx" in step.profiles) == bool(step.holdings) == (profile != "ulp")
            assert sum(sizes) >= step.bytes
            assert max(sizes) < 0.6 * step.bytes  # norms, biases, keys and values are for both


def require_verified(server, folder):
    """Of an engine that got its weights from elsewhere, the right ones are equal, and wrong ones are named."""
    path = folder / "checkpoint.safetensors"
    save_file(checkpoint(), path)
    before = held(server)
    code, answer = verified(server, path)
    assert (code, answer["answer"], answer["tensors"]) == (0, "equal", len(checkpoint()))
    assert answer["bytes"] == sum(tensor.nbytes for tensor in checkpoint().values())
    assert held(server) == before
    assert not server.paused
    buffers = {name for rank in server.ask("checksum", []) for name in rank["checksums"]}
    assert not any("sparserl" in name for name in buffers)

    server.ask("spoil", ("model.layers.1.self_attn.o_proj.weight", (0, 1)), only=1)
    server.ask("spoil", ("model.norm.weight", 3), only=0)  # which both ranks have
    spoilt = held(server)
    code, answer = verified(server, path)
    assert (code, answer["answer"]) == (1, "different")
    assert answer["different"] == ["model.layers.1.self_attn.o_proj.weight", "model.norm.weight"]
    save_file(checkpoint() | {"other": torch.ones(3)}, path)
    assert "KeyError" in CliRunner().invoke(app, ["verify-engine", server.url, str(path)]).output
    assert held(server) == spoilt


@pytest.mark.long
def test_what_fails(sglang, tmp_path):
    """Where anything fails on a rank, both keep what they have and say so; where they differ, nothing is generated."""
    trainer = Trainer(tmp_path)
    run = trainer.publish(0).run
    with running(sglang, model="Refreshed") as server:
        client = ours.Client(server.url)
        with pytest.raises(SessionError, match=r"still has the weights that it had before: failed: .*there is no head"):
            client.update(f"file://{tmp_path}/nowhere")
        assert wanted(0) == held(server)
        assert client.update(trainer.url) == (run, 0)

        trainer.publish(1)
        for broken in (1, None):  # one rank, or all
            server.ask("break", True, only=broken)
            with pytest.raises(SessionError, match=r"generation stays paused: .*stale: RuntimeError: broken"):
                client.update(trainer.url)
            assert server.paused
        server.ask("break", False)
        server.session = True  # a client has gone in the middle of an update
        assert client.update(trainer.url) == (run, 1)
        assert not server.paused
        for rank, (_, made) in enumerate(server.ask("bits")):
            fresh = Refreshed(rank, 2)
            fresh.load_weights(checkpoint(1).items())
            assert torch.equal(fresh.made, made)

        name = "model.layers.0.mlp.down_proj.weight"
        server.ask("spoil", (name, changed_element(name, 2)), only=1)
        spoilt = held(server)
        trainer.publish(2)
        with pytest.raises(SessionError, match="failed: ChecksumMismatch"):
            client.update(trainer.url)
        assert spoilt == held(server)
        assert client.update(trainer.url) == (run, 2)
        assert wanted(2) == held(server)

        server.ask("move", only=1)
        trainer.publish(3)
        with pytest.raises(SessionError, match=r"rank 1 of the engine: UnsupportedTensor.*have another layout"):
            client.update(trainer.url)
        assert wanted(2) == held(server)
        assert not server.paused


@pytest.mark.long
def test_a_release_without_update_sessions(tmp_path, monkeypatch):
    """Slime has such a one: the cache is flushed before the update, when requests have ended; drafts are left alone."""
    trainer = Trainer(tmp_path)
    with running(wheel("sglang", SLIMES_VERSION)) as server:
        client = ours.Client(server.url, mode="abort")
        server.requests = 1
        run = trainer.publish(0).run
        assert client.update(trainer.url, label="7") == (run, 0)
        assert server.version == "7"
        assert [name for name in server.calls if name != "server_info"] == [
            "pause_generation",
            "begin_weight_update",
            "flush_cache",
            "flush_cache",
            "update_weights_from_tensor",
            "weights_checker",
            "update_weight_version",
            "continue_generation",
        ]
        trainer.publish(1)
        monkeypatch.setattr(sglang_server, "_FLUSH_SECONDS", 0)
        server.requests = 100
        with pytest.raises(SessionError, match="cannot flush its cache, since it still has requests"):
            client.update(trainer.url)
        assert wanted(0) == held(server)
        assert not server.paused
        server.requests = 0
        assert client.update(trainer.url) == (run, 1)
        assert wanted(1) == held(server)
        assert verified(server, f"{trainer.url}@1")[0] == 0
        monkeypatch.setattr(server, "update_weights_from_tensor", lambda **_: (500, {}))
        with pytest.raises(SessionError, match="500"):
            client.update(trainer.url, label="9")
        assert server.version == f"{run}:1"  # not 9, which it has not got
        server.pp_size = 2
        with pytest.raises(UnsupportedTensor, match="pp_size=2"):
            client.update(trainer.url)


def test_the_plugin_in_a_release_without_hooks(monkeypatch):
    """It does nothing, and says nothing."""
    monkeypatch.setitem(sys.modules, "sglang.srt.arg_groups.resolution_hooks", None)
    assert sglang_plugin.register() is None


def test_the_folder_route(sglang, tmp_path):
    """What is followed into a folder, an engine loads from disk."""
    trainer = Trainer(tmp_path)
    with running(sglang, size=1) as server:
        client = ours.Client(server.url, mode="abort")

        def reload(report) -> None:
            client.reload((tmp_path / "model/current").resolve(), str(report.version))

        with sparserl.Subscriber(trainer.url, folder(tmp_path / "model")) as subscriber:
            for version in range(2):
                trainer.publish(version)
                subscriber.follow(once=True, on_commit=reload)
                assert wanted(version, 1) == held(server)
                assert server.version == str(version)
        with pytest.raises(SessionError, match=r"400 .*no /nothing"):
            client.reload("/nothing")
        assert server.calls[-1] == "continue_generation"


def sums_of(model, weights):
    """The digests that a model of one rank has."""
    table = sparserl.tensor_table(weights)
    said = json.dumps({"layout": layout_to_bytes(table).decode()})
    ours.load(model, [("sparserl", torch.frombuffer(bytearray(said.encode()), dtype=torch.uint8))])
    (answer,) = (name for name in marks(model) if name.startswith("sparserl: sums "))
    return EngineSums.of(table, json.loads(answer.removeprefix("sparserl: sums ").replace("·", ".")))


@pytest.fixture(name="alone")
def _alone(monkeypatch):
    for name in ("sglang", "sglang.srt", "sglang.srt.distributed"):
        monkeypatch.setitem(sys.modules, name, None)  # put back after the test
    in_group(0, 1, None)


@pytest.mark.usefixtures("alone")
def test_what_is_made_of_weights(tmp_path):
    """What a model computes of its weights is computed anew at every commit; else the model is refused."""
    trainer = Trainer(tmp_path)
    models = [made(0, 1) for made in (Refreshed, Folded)]
    for version in range(2):
        run = trainer.publish(version).run
        for model in models:
            if version == 0:
                model.load_weights(checkpoint(0).items())
            ours.load(model, control(trainer.url))
        assert marks(models[0]) == [f"sparserl: {run} {version}"]
        assert "computed from the weights" in marks(models[1])[0]
        fresh = Refreshed(0, 1)
        fresh.load_weights(checkpoint(version).items())
        assert torch.equal(fresh.made, models[0].made)
    names = sums_of(models[1], checkpoint()).uncompared
    assert names == {".made": MADE}
    first = Folded(0, 1)
    first.load_weights(checkpoint(0).items())
    assert bits(first) == bits(models[1])
    assert torch.equal(first.made, models[1].made)


@pytest.mark.usefixtures("alone")
def test_what_is_made_of_weights_out_of_sight(tmp_path):
    """Where an object of a module keeps it, it is found, too; the model is refused, and is what it was before."""
    trainer = Trainer(tmp_path)
    trainer.publish(1)
    model, fresh = Scaled(0, 1), Scaled(0, 1)
    for each in (model, fresh):
        each.load_weights(checkpoint(0).items())
    ours.load(model, control(trainer.url))
    (mark,) = marks(model)
    assert "UnsupportedTensor: '·quant_method·kernels·0·scales' is computed from the weights" in mark
    names = sums_of(model, checkpoint()).uncompared
    assert names == dict.fromkeys((".made", ".quant_method.kernels.0.scales"), MADE)
    assert bits(model) == bits(fresh)
    assert torch.equal(model.made, fresh.made)
    assert torch.equal(model.quant_method.kernels[0].scales, fresh.quant_method.kernels[0].scales)


@pytest.mark.usefixtures("alone")
def test_tied_embeddings(tmp_path):
    """A head that the model does not load follows the embeddings, if its language model is configured to tie them."""
    language = SimpleNamespace(tie_word_embeddings=True)
    weights = {name: tensor for name, tensor in checkpoint(0).items() if name != "lm_head.weight"}
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    with sparserl.Publisher(tmp_path, weights) as publisher:
        publisher.publish()
        model = Tied(0, 1)
        model.load_weights(weights.items())
        model.config.get_text_config = lambda: language
        weights["model.embed_tokens.weight"][1] += 1
        publisher.publish()
    ours.load(model, control(f"file://{tmp_path}"))
    assert marks(model)[0].endswith(" 1")
    assert torch.equal(model.model.embed_tokens.weight[:VOCAB], weights["model.embed_tokens.weight"])
    assert sums_of(model, weights).uncompared == {}


@pytest.mark.usefixtures("alone")
def test_a_model_that_moved(tmp_path):
    """Where the engine has put a parameter elsewhere since, the new place is written and the old one is not."""
    trainer, model = Trainer(tmp_path), Refreshed(0, 1)
    trainer.publish(0)
    ours.load(model, control(trainer.url))
    old = model.lm_head.weight.data
    model.lm_head.weight.data, kept = old.clone(), old.clone()
    trainer.publish(1)
    for _ in range(2):
        ours.load(model, control(trainer.url))
    assert marks(model)[0].endswith(" 1")
    assert torch.equal(model.lm_head.weight[:VOCAB], checkpoint(1)["lm_head.weight"])
    assert torch.equal(kept, old)


@pytest.mark.usefixtures("alone")
def test_staged_ahead(tmp_path):
    """While the engine serves, a thread stages what is published; a commit then fetches nothing."""
    trainer, model = Trainer(tmp_path), Refreshed(0, 1)
    trainer.publish(0)
    ours.load(model, control(trainer.url, ahead=True))
    trainer.publish(1)
    subscriber = ours._followers[model]._subscriber
    for _ in range(100):
        if subscriber._staged is not None:
            break
        time.sleep(0.1)
    report = subscriber._staged.report
    ours.load(model, control(trainer.url))
    assert report.seconds["commit"] > 0
    assert torch.equal(model.model.norm.weight, checkpoint(1)["model.norm.weight"])


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")  # SGLang's own
@pytest.mark.parametrize("architecture", ["Qwen2", "Qwen3Moe"])
def test_with_models_of_sglang(tmp_path, architecture):
    """Where SGLang is installed, its own models, groups, updater and checker do it, on two ranks."""
    sglang_real.declare_image_kernels()
    pytest.importorskip("sglang.srt.models.qwen2", reason="SGLang is not installed", exc_type=ImportError)
    sglang_real.saved(tmp_path / "model", architecture)
    url, versions = f"file://{tmp_path}/store", range(3)
    with ranks(2, sglang_real.follow, 2, tmp_path / "model", url, versions) as started:
        for seen in results(started, 240):
            for version, (mark, same) in zip(versions, seen, strict=True):
                assert mark.endswith(f" {version}")
                assert same


# -- what SGLang has ---------------------------------------------------------------------------------------------------


def test_the_plugin(sglang):
    """SGLang's own code finds the plugin, which adds the loader to those of every server that may have some."""
    other = ["a.loader"]
    loaded, decided = weight_loaders(
        sglang,
        {},
        {"custom_weight_loader": other},
        {"custom_weight_loader": [ours.LOADER]},
        {"startup_weight_load_mode": "overlap"},
    )
    assert loaded == []
    assert decided == [[ours.LOADER], [*other, ours.LOADER], [ours.LOADER], []]
    assert weight_loaders(sglang, {}, plugin=False)[1] == [[]]


def test_plugins_are_loaded_before_options_are_decided(sglang):
    """All ways to start a server load plugins first. In the mode that is left out, one with a loader does not start."""
    assert calls(definition(sglang.tree("sglang/cli/serve.py"), "serve"), "load_plugins")
    assert "load_plugins()" in sglang.text("sglang/launch_server.py")
    assert calls(definition(sglang.tree("sglang/srt/entrypoints/engine.py"), "Engine", "__init__"), "load_plugins")
    start = sglang.text("sglang/srt/model_executor/model_runner_components/startup_weight_load.py")
    assert "custom weight loaders are not supported" in start
    assert "--startup-weight-load-mode=overlap is not supported" in start


def test_loaders_are_called_so(sglang):
    """A path that `--custom-weight-loader` names is imported, and called with the model and the tensors."""
    tree = sglang.tree("sglang/srt/model_executor/model_runner_components/weight_updater.py")
    update = definition(tree, "WeightUpdater", "update_weights_from_tensor")
    (call,) = calls(update, "custom_loader")
    assert [ast.unparse(a) for a in call.args] == ["self.get_model()", "named_tensors"]
    assert [ast.unparse(c) for c in calls(update, "dynamic_import")] == ["dynamic_import(load_format)"]
    assert "custom_weight_loader" in fields(definition(sglang.tree("sglang/srt/arg_groups/fields/model.py"), "Model"))
    assert f"{ours.load.__module__}.{ours.load.__name__}" == ours.LOADER


def test_marks_are_told(sglang):
    """The checker takes the buffers of a model, under their names, but for those that a request leaves out."""
    tree = sglang.tree("sglang/srt/utils/weight_checker.py")
    assert "model.named_buffers()" in ast.unparse(definition(tree, "WeightChecker", "_model_state"))
    assert "any((pat in name for pat in skip_tensor_list or ()))" in ast.unparse(
        definition(tree, "_is_skip_weight_check")
    )
    assert {"checksums", "per_gpu_checksum"} <= fields(definition(tree, "ChecksumInfo"))


def test_models_compute_anew(sglang):
    """Other loaders have a model compute what it makes of its weights by a method of this name."""
    post = definition(sglang.tree("sglang/srt/model_loader/loader.py"), "post_load_weights")
    assert "model.post_load_weights()" in ast.unparse(post)


def test_groups_are_so(sglang):
    """Where the loader finds its rank, and a group for objects."""
    tree = sglang.tree("sglang/srt/distributed/parallel_state.py")
    assert parameters(definition(tree, "get_tp_group")) == []
    made = ast.unparse(definition(tree, "GroupCoordinator"))
    for name in ("rank_in_group", "world_size", "cpu_group"):
        assert f"self.{name} = " in made
    assert "parallel_state import *" in sglang.text("sglang/srt/distributed/__init__.py")


@pytest.mark.parametrize(
    "path",
    ["server_info", *REQUESTS],
)
def test_endpoints_are_there(sglang, path):
    """Every path that the client asks for is served."""
    routes = [
        ast.unparse(decorator)
        for node in ast.walk(sglang.tree("sglang/srt/entrypoints/http_server.py"))
        if isinstance(node, ast.AsyncFunctionDef)
        for decorator in node.decorator_list
    ]
    assert any(f"'/{path}'" in route for route in routes)
    assert not any("'/version'" in route for route in routes)  # by which vLLM is told apart
