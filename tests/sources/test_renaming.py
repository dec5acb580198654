"""Names that differ between trainer and engine, and tied tensors that are published once."""

from __future__ import annotations

import numpy as np
import pytest

import sparserl
from sparserl import Part, Region, Shards
from sparserl.errors import TensorMismatch, UnsupportedTensor, WeightsError
from sparserl.sources import renamed
from sparserl.testing import SourceConformance

torch = pytest.importorskip("torch")
TRAINER = {"model.language_model.": "language_model.model.", "model.visual.": "visual.", "lm_head.": "lm_head."}


def vision_model():
    """The names that transformers has for vision-language models, and tied embeddings."""
    torch.manual_seed(0)
    language = torch.nn.ModuleDict({"embed_tokens": torch.nn.Embedding(20, 8), "norm": torch.nn.LayerNorm(8)})
    inner = torch.nn.ModuleDict({"language_model": language, "visual": torch.nn.Linear(6, 8)})
    model = torch.nn.ModuleDict({"model": inner, "lm_head": torch.nn.Linear(8, 20, bias=False)})
    model["lm_head"].weight = language["embed_tokens"].weight
    return model


def bits(weights):
    return {name: tensor.detach().reshape(-1).view(torch.uint8).tolist() for name, tensor in weights.items()}


def test_prefixes_and_names():
    """The longest rule counts; prefixes may be added and removed; what no rule matches keeps its name."""
    weights = {name: np.zeros(2, np.float32) for name in ("a.b.c", "a.b", "a.bc", "d")}
    source = renamed(weights, {"a.": "x.", "a.b.": "", "d": "a.b"})
    assert [*source.weights()] == ["c", "x.b", "x.bc", "a.b"]
    assert source.weights()["a.b"] is weights["d"]
    assert [*renamed(weights, {"": "p."}).weights()] == ["p.a.b.c", "p.a.b", "p.a.bc", "p.d"]


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({}, "rules are {}"),
        ({"a.": "b"}, "does not end in a dot"),
        ({"a.w": "b."}, "takes a name to a prefix"),
        ({"a.w": None}, "not from text to text"),
        ({"z.": "y."}, r"rule 'z\.' renames nothing; the names are 'a\.w', 'b\.w'"),
        ({"a": "y"}, "rule 'a' renames nothing"),
        ({"": "c.", "a.": "d.", "b.": "e."}, "rule '' renames nothing"),
        ({"a.": "b."}, r"'a\.w' and 'b\.w' would both be called 'b\.w', and are not the same memory"),
    ],
)
def test_rules_that_cannot_be_meant(rules, message):
    """They are refused by name, for whole weights and for shards."""
    weights = {"a.w": np.zeros(4, np.float32), "b.w": np.zeros(4, np.float32)}
    region = Region((0,), (2,))
    shards = Shards(sparserl.tensor_table(weights), [Part(name, region, w[:2]) for name, w in weights.items()])
    for given in (weights, shards):
        with pytest.raises(TensorMismatch, match=message):
            renamed(given, rules).weights()
    with pytest.raises(TensorMismatch, match=message):
        sparserl.targets.renamed(weights, rules).weights()


def test_what_cannot_be_renamed(tmp_path):
    """A tracker, whose digests depend on names; a folder, which has the names of its run; what is no source."""
    model = vision_model()
    tracker = sparserl.sources.track(torch.optim.SGD(model.parameters(), lr=0.1), model)
    with pytest.raises(TensorMismatch, match=r"track\(optimizer, renamed\(model, rules\)\)"):
        renamed(tracker, {"": "x."})
    tracker.weights()
    tracker.committed()
    with pytest.raises(TensorMismatch, match=r"track\(optimizer, renamed\(model, rules\)\)"):
        renamed(tracker.weights, {"": "x."}).weights()
    with pytest.raises(UnsupportedTensor, match="FolderTarget cannot be renamed; rename the source"):
        sparserl.targets.renamed(sparserl.targets.folder(tmp_path), {"": "x."})
    with pytest.raises(WeightsError, match="source is of type int"):
        renamed(3, {"": "x."})


@pytest.mark.parametrize("tracked", [False, True])
def test_an_engine_with_other_names(tmp_path, tracked):
    """A tied head is published once; targets under the trainer's names and under their own get every version."""
    model = vision_model()
    rules = {
        "model.language_model.": "language_model.model.",
        "model.visual.": "visual.",
        "lm_head.weight": "language_model.model.embed_tokens.weight",
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    source = renamed(model, rules)
    if tracked:
        source = sparserl.sources.track(optimizer, source, cast=torch.bfloat16)
    dtype = torch.bfloat16 if tracked else torch.float32
    rollout = vision_model().to(dtype)
    engine = {
        "language_model.model.embed_tokens.weight": torch.zeros(20, 8, dtype=dtype),
        "language_model.model.norm.weight": torch.zeros(8, dtype=dtype),
        "language_model.model.norm.bias": torch.zeros(8, dtype=dtype),
        "visual.weight": torch.zeros(8, 6, dtype=dtype),
        "visual.bias": torch.zeros(8, dtype=dtype),
    }
    engine["lm_head.weight"] = engine["language_model.model.embed_tokens.weight"]
    targets = [engine, sparserl.targets.renamed(rollout, rules)]
    with sparserl.Publisher(tmp_path, source) as publisher, sparserl.Subscriber(tmp_path, targets) as subscriber:
        for version in range(3):
            report = publisher.publish()
            assert report.elements == 20 * 8 + 8 + 8 + 8 * 6 + 8
            subscriber.sync()
            assert subscriber.version == version
            expected = {name: tensor.to(dtype) for name, tensor in model.state_dict().items()}
            assert bits(rollout.state_dict()) == bits(expected)
            assert bits(engine)["lm_head.weight"] == bits(expected)["lm_head.weight"]
            loss = model["lm_head"](model["model"]["visual"](torch.ones(2, 6))).square().mean()
            loss.backward()
            optimizer.step()


def test_a_run_without_the_tied_head(tmp_path):
    """A module with a tied head follows a checkpoint that has it once; a head of its own is refused by name."""
    model = vision_model()
    weights = {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    rollout = vision_model()
    with torch.no_grad():
        rollout["lm_head"].weight += 1
    with sparserl.Publisher(tmp_path, weights) as publisher:
        publisher.publish()
    with sparserl.Subscriber(tmp_path, rollout) as subscriber:
        subscriber.sync()
        subscriber.audit()
    assert bits(rollout.state_dict()) == bits(model.state_dict())
    untied = vision_model()
    untied["lm_head"].weight = torch.nn.Parameter(torch.zeros(20, 8))
    with (
        pytest.raises(TensorMismatch, match=r"lm_head\.weight"),
        sparserl.Subscriber(tmp_path, untied) as subscriber,
    ):
        subscriber.sync()


def test_tied_shards():
    """Tied shards are published once; where one of them lies elsewhere, both names are refused."""
    table = sparserl.tensor_table({name: np.zeros((4, 2), np.float32) for name in ("embed", "head")})
    upper = Region((0, 0), (2, 2))
    data = np.ones((2, 2), np.float32)
    tied = Shards(table, [Part("embed", upper, data), Part("head", upper, data)])
    shards = renamed(tied, {"head": "embed"}).weights()
    assert [(part.tensor, part.region) for part in shards.parts] == [("embed", upper)]
    assert [spec.name for spec in shards.table.specs] == ["embed"]
    apart = Shards(table, [Part("embed", upper, data), Part("head", upper, data.copy())])
    with pytest.raises(TensorMismatch, match="'embed' and 'head' would both be called 'embed'"):
        renamed(apart, {"head": "embed"}).weights()


def test_the_config_travels():
    """The files of a transformers model come along, with the dtype that a tracker publishes."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=16
    )
    model = transformers.LlamaForCausalLM(config)
    source = renamed(model, {"model.": "language_model.model."})
    assert source.files().keys() == sparserl.sources.module(model).files().keys()
    tracked = sparserl.sources.track(torch.optim.SGD(model.parameters(), lr=0.1), source, cast=torch.bfloat16)
    assert b'"dtype": "bfloat16"' in tracked.files()["config.json"]


class TestRenamed(SourceConformance):
    """A renamed source passes the suite of all sources."""

    @pytest.fixture
    def source(self):
        self.model = vision_model().to(torch.bfloat16)
        return renamed(self.model, TRAINER)

    def step(self, source):
        with torch.no_grad():
            self.model["model"]["visual"].weight += 0.5


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch itself
def test_wrappers_are_not_in_names():
    """A compiled module is published under the names of the module inside."""
    model = torch.nn.Linear(3, 2)
    compiled = torch.compile(model)
    assert sparserl.sources.module(compiled).weights().keys() == {"weight", "bias"}
    assert sparserl.sources.module(compiled).weights()["weight"].data_ptr() == model.weight.data_ptr()
