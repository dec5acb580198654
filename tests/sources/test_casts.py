"""A cast applies to floating-point parameters, and never to buffers, whatever the source."""

from __future__ import annotations

import pytest

import sparserl
from sparserl import sources
from sparserl.errors import WeightsError
from sparserl.integrations.saved_checkpoints import LatestCheckpoint
from sparserl.weights.shards import Shards
from sparserl.weights.tensors import tensor_table
from tests.sources.small_trainer import Fixed

torch = pytest.importorskip("torch")
BF16 = torch.bfloat16


class Router(torch.nn.Module):
    """A layer, a bias that no optimizer sees and that routing depends on, and a parameter of whole numbers."""

    def __init__(self):
        super().__init__()
        self.gate = torch.nn.Linear(8, 8)
        self.register_buffer("e_score_correction_bias", torch.full((3,), 1 / 3))
        self.steps = torch.nn.Parameter(torch.zeros(2, dtype=torch.int64), requires_grad=False)


def dtypes(source):
    weights = source.weights()
    table = weights.table if isinstance(weights, Shards) else tensor_table(weights)
    return {spec.name: spec.dtype.name for spec in table.specs}


def tracked(model, source, **options):
    return sources.track(torch.optim.SGD([*model.gate.parameters()]), source, **options)


SOURCES = {
    "module": lambda m, cast: sources.module(m, cast=cast),
    "fsdp": lambda m, cast: sources.fsdp(m, cast=cast),
    "tracked module": lambda m, cast: tracked(m, m, cast=cast),
    "tracked shards": lambda m, cast: tracked(m, sources.fsdp(m), cast=cast),
    "tracked shards that are cast": lambda m, cast: tracked(m, sources.fsdp(m, cast=cast)),
    "tracked, renamed module": lambda m, cast: tracked(
        m, sources.renamed(m, {"gate.weight": "gate.weight"}), cast=cast
    ),
    "quantized module": lambda m, cast: sources.quantized(
        sources.module(m, cast=cast), sources.fp8_blockwise(names=lambda _spec: False)
    ),
}


@pytest.mark.parametrize("make", SOURCES.values(), ids=SOURCES)
def test_buffers_are_published_as_they_are(make, tmp_path):
    """The bits of a float32 buffer arrive, whether the cast is a dtype or a function, which is not asked for it."""
    model = Router()
    expected = {"gate.weight": "bfloat16", "gate.bias": "bfloat16", "e_score_correction_bias": "float32"}
    assert dtypes(make(model, BF16)) == expected | {"steps": "int64"}
    asked = []
    by_name = make(model, lambda name: asked.append(name) or (None if name == "gate.bias" else BF16))
    assert dtypes(by_name) == expected | {"steps": "int64", "gate.bias": "float32"}
    assert set(asked) == {"gate.weight", "gate.bias"}
    rollout = {"e_score_correction_bias": torch.zeros(3), "steps": torch.zeros(2, dtype=torch.int64)}
    rollout |= {"gate.weight": torch.zeros(8, 8, dtype=BF16), "gate.bias": torch.zeros(8, dtype=BF16)}
    with sparserl.Publisher(tmp_path, make(model, BF16)) as publisher, sparserl.Subscriber(tmp_path, rollout) as other:
        publisher.publish()
        model.e_score_correction_bias[1] += 1e-6
        assert publisher.publish().kind == "patch"
        other.sync()
    assert torch.equal(rollout["e_score_correction_bias"], model.e_score_correction_bias)


def test_names_that_a_renaming_gives_to_buffers():
    """They are still buffers."""
    model = Router()
    source = tracked(model, sources.renamed(model, {"e_score_correction_bias": "bias"}), cast=BF16)
    assert dtypes(source)["bias"] == "float32"


def test_a_cast_makes_nothing_wider():
    """Of a dtype, all sources take the same: parameters that are wider."""
    model = Router().half()
    for make in (sources.module, sources.fsdp):
        assert dtypes(make(model, cast=BF16))["gate.weight"] == "float16"
        assert dtypes(make(model, cast=torch.float32))["gate.weight"] == "float16"
        with pytest.raises(WeightsError, match=r"it must be a floating-point dtype such as torch\.bfloat16"):
            make(model, cast="bfloat16")


def test_mappings_and_files_have_no_buffers(tmp_path):
    """Nobody can tell which of their tensors are buffers: all floating-point ones are cast, but for exceptions."""
    safetensors = pytest.importorskip("safetensors.torch")
    tensors = {name: tensor.detach() for name, tensor in Router().state_dict().items()}
    safetensors.save_file(tensors, tmp_path / "model.safetensors")
    plain = tracked(Router(), Fixed(tensors), cast=BF16)
    saved = LatestCheckpoint(BF16)
    saved.path = tmp_path
    for source in (plain, saved):
        assert dtypes(source)["e_score_correction_bias"] == "bfloat16"
        assert dtypes(source)["steps"] == "int64"
