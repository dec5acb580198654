"""Formats of quantized checkpoints: bit for bit what compressed-tensors makes, under its names, with its config."""

from __future__ import annotations

import json

import pytest

import sparserl
from sparserl import Part, Region, Shards
from sparserl.errors import TensorMismatch, UnsupportedTensor
from sparserl.sources import Blockwise, mxfp4, mxfp8, nvfp4, quantized
from sparserl.sources.schemes import SCHEMES
from tests.sources.quantized_reference import GOLDEN, PRESETS, as_compressed_tensors, load, weight
from tests.sources.small_trainer import Fixed

torch = pytest.importorskip("torch")


def same_bits(a, b):
    """Whether two tensors have the same dtype, shape and bits."""
    is_alike = a.dtype is b.dtype and a.shape == b.shape
    return is_alike and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def require_same(weights, expected, suffix="_scale"):
    """The tensors of a layer `fc` are those expected, under the same names."""
    expected = {f"fc.{key}".replace("_scale", suffix): tensor for key, tensor in expected.items()}
    assert weights.keys() == expected.keys()
    for name, tensor in expected.items():
        assert same_bits(weights[name], tensor), name


def suffix_of(name):
    return "_scale_inv" if name == "fp8_blockwise" else "_scale"


@pytest.mark.parametrize("name", SCHEMES)
def test_golden_vectors(name):
    """Elements and scales are those that compressed-tensors made when the vectors were written."""
    golden = json.loads(GOLDEN.read_text())
    assert golden["made_by"].startswith("compressed-tensors ")
    w = load(golden["weight"])
    expected = {key: load(saved) for key, saved in golden["schemes"][name].items()}
    require_same(quantized({"fc.weight": w}, name).weights(), expected, suffix_of(name))


@pytest.mark.parametrize("name", SCHEMES)
def test_what_compressed_tensors_makes_today(name):
    """The same with the package itself, where it is installed, for a larger matrix."""
    pytest.importorskip("compressed_tensors")
    w = weight(130, 160, seed=1)
    require_same(quantized({"fc.weight": w}, name).weights(), as_compressed_tensors(name, w), suffix_of(name))


@pytest.mark.parametrize("name", PRESETS)
def test_the_config_is_read_by_compressed_tensors(name):
    """It takes the `quantization_config` for what its own preset says about the weights."""
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.quantization import QuantizationConfig, preset_name_to_scheme

    if name == "fp8_blockwise":
        pytest.skip("is in the older format of DeepSeek")
    config = QuantizationConfig.model_validate(SCHEMES[name]().config(["lm_head"]))
    wanted = preset_name_to_scheme(PRESETS[name], ["Linear"]).weights
    weights = config.config_groups["group_0"].weights
    fields = ("num_bits", "type", "strategy", "group_size", "symmetric", "dynamic", "scale_dtype")
    assert {field: getattr(weights, field) for field in fields} == {field: getattr(wanted, field) for field in fields}
    assert config.ignore == ["lm_head"]


class Model:
    """A source with a config."""

    def __init__(self, weights):
        self._weights = weights

    def weights(self):
        return self._weights

    def files(self):
        return {"config.json": b'{"model_type": "llama"}', "generation_config.json": b"{}"}


def test_files_say_how_the_weights_are_quantized():
    """The config names the scheme and the matrices that are left as they are; other files come as they are."""
    weights = {"q_proj.weight": torch.ones(4, 32), "lm_head.weight": torch.ones(4, 32), "norm.weight": torch.ones(4)}
    files = quantized(Model(weights), "mxfp4").files()
    assert files["generation_config.json"] == b"{}"
    config = json.loads(files["config.json"])
    assert config["model_type"] == "llama"
    assert config["quantization_config"]["format"] == "mxfp4-pack-quantized"
    assert config["quantization_config"]["ignore"] == ["lm_head"]
    blocks = json.loads(quantized(Model(weights), "fp8_blockwise").files()["config.json"])["quantization_config"]
    assert blocks["weight_block_size"] == [128, 128]
    assert blocks["modules_to_not_convert"] == ["lm_head"]
    assert quantized({"q_proj.weight": torch.ones(4, 32)}, "mxfp4").files() == {}


def test_layers_that_engines_fuse_have_one_global_scale():
    """It is that of the largest; each layer is then quantized as if it were a slice of the fused one."""
    names = ("q_proj", "k_proj", "v_proj")
    w = {f"attn.{name}.weight": weight(12, 32, seed=i) * 4**i for i, name in enumerate(names)}
    w["attn.o_proj.weight"] = weight(12, 32, seed=9)
    out = quantized(w, nvfp4()).weights()
    fused = quantized({"attn.qkv.weight": torch.cat([w[f"attn.{name}.weight"] for name in names])}, nvfp4()).weights()
    for suffix in ("_packed", "_scale"):
        parts = torch.cat([out[f"attn.{name}.weight{suffix}"].view(torch.uint8) for name in names])
        assert torch.equal(parts, fused["attn.qkv.weight" + suffix].view(torch.uint8))
    scales = {name: float(out[f"attn.{name}.weight_global_scale"]) for name in (*names, "o_proj")}
    assert scales["q_proj"] == scales["k_proj"] == scales["v_proj"] == float(fused["attn.qkv.weight_global_scale"])
    assert scales["o_proj"] != scales["q_proj"]


@pytest.mark.parametrize("name", ["mxfp8", "mxfp4", "nvfp4"])
def test_blocks_with_nan_infinity_or_zeros(name):
    """A broken block has the scale NaN and zeros, and spoils no other; a block of zeros has a scale that is no zero."""
    w = weight(12, 64)
    w[5] = weight(12, 64, seed=3)[0]
    clean = {key: tensor.clone() for key, tensor in quantized({"fc.weight": w}, name).weights().items()}
    w[0, 1] = float("nan")
    w[1, 33] = float("-inf")
    w[2] = 0
    out = quantized({"fc.weight": w}, name).weights()
    key = "fc.weight" if name == "mxfp8" else "fc.weight_packed"
    scales = out["fc.weight_scale"].view(torch.uint8)
    codes = out[key].view(torch.uint8)
    per_block = codes.shape[1] // scales.shape[1]
    nan = {"nvfp4": 0x7F}.get(name, 255)
    for row, block in ((0, 0), (1, scales.shape[1] // 2)):
        assert int(scales[row, block]) == nan
        assert not codes[row, block * per_block : (block + 1) * per_block].any()
    assert int((scales == nan).sum()) == 2
    assert not codes[2].any()
    assert (scales[2] == (0x20 if name == "nvfp4" else 0)).all()
    assert torch.equal(codes[3:], clean[key].view(torch.uint8)[3:])
    assert torch.equal(scales[3:], clean["fc.weight_scale"].view(torch.uint8)[3:])


@pytest.mark.parametrize("name", SCHEMES)
def test_a_stack_is_as_good_as_its_matrices(name):
    """Every matrix of stacked experts has its own scales."""
    stack = torch.stack([weight(20, 64, seed=i) * 3**i for i in range(3)])
    scheme = SCHEMES[name](names=lambda _: True)
    out = quantized({"experts.up.weight": stack}, scheme).weights()
    for i in range(3):
        one = quantized({"w": stack[i]}, scheme).weights()
        for key, tensor in one.items():
            part = out[key.replace("w", "experts.up.weight", 1)][i]
            assert torch.equal(part.contiguous().view(torch.uint8).ravel(), tensor.view(torch.uint8).ravel()), key


@pytest.mark.parametrize("name", SCHEMES)
def test_shards_of_one_process(name):
    """Parts that cut rows, columns and blocks give the elements and scales of the whole, each of them once."""
    w = weight(140, 160)
    table = sparserl.tensor_table({"fc.weight": w})
    boxes = [((0, 0), (60, 160)), ((60, 0), (80, 72)), ((60, 72), (80, 88))]
    parts = [Part("fc.weight", Region(*box), w[Region(*box).slices]) for box in boxes]
    shards = quantized(Fixed(Shards(table, parts)), name).weights()
    whole = quantized({"fc.weight": w}, name).weights()
    assert shards.table == sparserl.tensor_table(whole)
    for spec in shards.table.specs:
        joined = torch.zeros(spec.shape, dtype=whole[spec.name].dtype)
        seen = torch.zeros(spec.shape, dtype=torch.int64)
        for part in shards.parts:
            if part.tensor == spec.name:
                joined.view(torch.uint8 if joined.itemsize == 1 else torch.int32)[part.region.slices] = part.data.view(
                    torch.uint8 if joined.itemsize == 1 else torch.int32
                )
                seen[part.region.slices] += 1
        assert (seen == 1).all(), spec
        assert same_bits(joined, whole[spec.name]), spec


def test_a_global_scale_takes_all_of_a_matrix():
    """Rows of one process, or a layer without those that it is fused with, are refused if there is no group to ask."""
    w = {name: weight(12, 32) for name in ("k_proj.weight", "q_proj.weight")}
    table = sparserl.tensor_table(w)
    keys = Part("k_proj.weight", Region((0, 0), (12, 32)), w["k_proj.weight"])
    queries = Part("q_proj.weight", Region((0, 0), (12, 32)), w["q_proj.weight"])
    rows = Part("q_proj.weight", Region((0, 0), (8, 32)), w["q_proj.weight"][:8])
    assert len(quantized(Fixed(Shards(table, [keys, queries])), "nvfp4").weights().parts) == 6
    for parts, name in (([keys, rows], "k_proj"), ([queries], "q_proj")):
        with pytest.raises(TensorMismatch, match=f"'{name}.weight': other processes have the rest"):
            quantized(Fixed(Shards(table, parts)), "nvfp4").weights()
    assert len(quantized(Fixed(Shards(table, [rows])), "mxfp4").weights().parts) == 2


def test_what_does_not_fit_a_format_is_refused(tmp_path):
    """Unknown schemes and formats, columns that do not divide, bytes that parts share: by name; nothing is sent."""
    with pytest.raises(ValueError, match="no scheme 'nvfp5'; there are fp8_blockwise"):
        quantized({"a.weight": torch.ones(2, 32)}, "nvfp5")
    with pytest.raises(TypeError, match="scheme is a int"):
        quantized({"a.weight": torch.ones(2, 32)}, 8)
    with pytest.raises(ValueError, match="elements of 'int4' are not supported"):
        Blockwise("int4", (1, 32), "_scale")
    with pytest.raises(ValueError, match="scales of 'bfloat16' are not supported"):
        Blockwise("int8", (1, 32), "_scale", scale_dtype="bfloat16")
    with pytest.raises(ValueError, match=r"in blocks of \(1, 32\), not for 'float4_e2m1' in blocks of \(1, 64\)"):
        Blockwise("float4_e2m1", (1, 64), "_scale", scale_dtype="float8_e8m0fnu")
    with pytest.raises(ValueError, match="takes scales of"):
        Blockwise("float4_e2m1", (1, 32), "_scale")
    for scheme, columns in ((mxfp8(), 48), (mxfp4(), 48), (nvfp4(), 24)):
        with (
            sparserl.Publisher(tmp_path / scheme.dtype, quantized({"a.weight": torch.ones(2, columns)}, scheme)) as to,
            pytest.raises(UnsupportedTensor, match=rf"a.weight float32\[2, {columns}\].*no multiple of"),
        ):
            to.publish()
        assert not [*tmp_path.rglob("head*")]
    with pytest.raises(UnsupportedTensor, match=r"a.weight float64\[2, 32\] cannot be quantized"):
        quantized({"a.weight": torch.ones(2, 32, dtype=torch.float64)}, nvfp4(names=lambda _: True)).weights()
    w = weight(12, 64)
    table = sparserl.tensor_table({"a.weight": w})
    odd = Region((0, 0), (12, 33))
    with pytest.raises(UnsupportedTensor, match=r"'a.weight': region .* at an odd column"):
        quantized(Fixed(Shards(table, [Part("a.weight", odd, w[odd.slices])])), nvfp4()).weights()


@pytest.mark.parametrize("name", ["nvfp4", "mxfp8"])
def test_published_and_followed(tmp_path, name):
    """A rollout that holds the quantized tensors gets every version exactly."""
    w = {"fc.weight": weight(40, 64).to(torch.bfloat16), "norm.weight": torch.ones(64)}
    source = quantized(w, name)
    rollout = {key: torch.zeros_like(tensor) for key, tensor in source.weights().items()}
    with (
        sparserl.Publisher(tmp_path, source) as publisher,
        sparserl.Subscriber(tmp_path, rollout) as subscriber,
    ):
        for step in range(3):
            w["fc.weight"][step] *= 1.5
            publisher.publish()
            subscriber.sync()
            for key, tensor in source.weights().items():
                assert same_bits(rollout[key], tensor), key


@pytest.mark.parametrize(("name", "profile"), [*((name, "gap") for name in SCHEMES), ("mxfp4", "auto")])
def test_old_bits_take_the_place_of_a_baseline(tmp_path, name, profile):
    """With `track`, a publisher without a baseline sends just the codes and scales that changed, none of them dense."""
    w = {"fc.weight": weight(140, 160).to(torch.bfloat16)}
    source = quantized(w, name, track=True)
    rollout = {key: torch.zeros_like(tensor) for key, tensor in quantized(w, name).weights().items()}
    with (
        sparserl.Publisher(tmp_path, source, baseline="none", profile=profile) as publisher,
        sparserl.Subscriber(tmp_path, rollout) as subscriber,
    ):
        for step in range(3):
            before = {key: tensor.clone() for key, tensor in rollout.items()}
            w["fc.weight"][step, 7 * step : 7 * step + 5] *= -1.5
            report = publisher.publish()
            subscriber.sync()
            after = quantized(w, name).weights()
            assert all(same_bits(rollout[key], tensor) for key, tensor in after.items())
            if step:
                pairs = [(before[key].view(torch.uint8), after[key].view(torch.uint8)) for key in after]
                changed_bytes = sum(int((a != b).sum()) for a, b in pairs)
                assert 0 < report.changed <= changed_bytes < 140 * 160


def test_old_bits_of_shards_and_of_publishes_that_failed():
    """Old bits are those of the last commit, of all that has changed, also of parts that are no runs."""
    w = weight(40, 96)
    table = sparserl.tensor_table({"fc.weight": w})
    boxes = [Region((0, 0), (40, 32)), Region((0, 32), (40, 64))]
    parts = [Part("fc.weight", box, w[box.slices]) for box in boxes]
    source = quantized(Fixed(Shards(table, parts)), "mxfp4", track=True)
    assert all(part.marks is None for part in source.weights().parts)  # nothing was committed yet
    old = source.weights().map(lambda part: part.data.clone())
    source.committed()
    assert not any(part.marks.between(0, part.region.numel).size for part in source.weights().parts)
    for step in range(2):  # the first is not committed
        w[5 + step, 20:50] *= 3
        new = source.weights()
    for before, after in zip(old.parts, new.parts, strict=True):
        changed = (before.data != after.data).view(-1).nonzero().view(-1)
        positions, bits = after.marks.run(0, after.region.numel)
        assert positions.tolist() == changed.tolist()
        assert bits.tolist() == before.data.view(torch.uint8).view(-1)[changed].tolist()
    assert sum(part.marks.between(0, part.region.numel).size for part in new.parts) > 10
    with pytest.raises(ValueError, match="track=True takes a scheme"):
        quantized({"a": w}, lambda name, tensor: {name: tensor}, track=True)


def test_a_config_from_elsewhere_says_how_weights_are_quantized(tmp_path):
    """Files that are given to the publisher replace those of the source, but not what it says of its weights."""
    import json

    w = {"q_proj.weight": weight(32, 64), "experts.down_proj": torch.ones(2, 32, 64)}
    with sparserl.Publisher(tmp_path / "run", quantized(w, "mxfp8"), files={"config.json": b'{"a": 1}'}) as publisher:
        publisher.publish()
    with sparserl.Subscriber(tmp_path / "run", sparserl.targets.folder(tmp_path / "model")) as subscriber:
        subscriber.sync()
    config = json.loads((tmp_path / "model" / "current" / "config.json").read_text())
    assert config["a"] == 1
    assert config["quantization_config"]["ignore"] == ["experts"]


def test_what_is_no_scheme_is_refused_where_it_is_given():
    """Not when the first version is published."""
    w = {"q_proj.weight": weight(32, 64)}
    with pytest.raises(TypeError, match="call it"):
        quantized(w, sparserl.sources.nvfp4)
    with pytest.raises(TypeError, match="names is"):
        sparserl.sources.int8(names=["q_proj.weight"])
    for block in (128, "128", (1, 2, 3)):
        with pytest.raises(ValueError, match="number of rows and one of columns"):
            sparserl.sources.fp8_blockwise(block)
    with pytest.raises(sparserl.errors.TensorMismatch, match="rename what is quantized"):
        sparserl.sources.renamed(quantized(w, "int8"), {"q_proj.": "q."})


def test_old_bits_take_no_more_than_the_codes():
    """Where everything changes, all old codes are kept, without positions."""
    w = weight(32, 64)
    source = quantized({"q_proj.weight": w}, "int8", track=True)
    old = source.weights().parts[0].data.clone()
    source.committed()
    w.neg_()
    (piece,) = source.weights().parts[0].marks.pieces
    assert piece.positions is None
    assert piece.bits.tolist() == old.view(torch.uint8).view(-1).tolist()


def test_a_source_is_asked_once_for_every_version(tmp_path):
    """Its weights may take long to make; what the config says of them is known by then."""
    calls = []

    class Counted:
        def weights(self):
            calls.append(1)
            return {"q_proj.weight": w}

    w = weight(32, 64)
    source = quantized(Counted(), "mxfp8")
    with sparserl.Publisher(tmp_path / "run", source, files={"config.json": b"{}"}) as publisher:
        publisher.publish()
        calls.clear()
        publisher.publish()
    assert len(calls) == 1
