"""Quantized weights: the bits that a rollout holds, whoever has which part of the tensors."""

from __future__ import annotations

import socket
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import sparserl
import sparserl.weights.dtypes
import sparserl.weights.memory
from sparserl import Part, Region, Shards
from sparserl.errors import TensorMismatch, UnsupportedTensor, WeightsError
from sparserl.sources import fp8_blockwise, fsdp, int8, linear_weights, quantized
from sparserl.weights.digest import table_digest
from sparserl.weights.table import TensorSpec
from tests.session.ranks import together

torch = pytest.importorskip("torch")


def bits(tensor) -> np.ndarray:
    """The bit patterns of a tensor."""
    return np.array(sparserl.weights.tensors.memory_of("", tensor.contiguous()).view())


def same(a, b) -> bool:
    """Whether two sets of weights have the same names, dtypes, shapes and bits."""
    return sparserl.tensor_table(a) == sparserl.tensor_table(b) and all((bits(a[n]) == bits(b[n])).all() for n in a)


def reference(tensor, block: tuple[int, int], limit: float, dtype) -> tuple[np.ndarray, np.ndarray]:
    """The specification, block by block in NumPy; for blocks without NaN and infinity."""
    x = tensor.to(torch.float32).numpy()
    rows, columns = (n or d for n, d in zip(block, x.shape, strict=True))
    grid = -(-x.shape[0] // rows), -(-x.shape[1] // columns)
    out, scales = np.empty(x.shape, dtype), np.empty(grid, np.float32)
    for i, j in np.ndindex(*grid):
        box = slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns)
        scale = np.abs(x[box]).max() / np.float32(limit)
        scales[i, j] = scale if scale >= np.finfo(np.float32).tiny else 1
        y = x[box] / scales[i, j]
        out[box] = (np.rint(np.clip(y, -128, 127)) if dtype is np.int8 else y).astype(dtype)
    return out, scales


def matrix(rows: int, columns: int, dtype=torch.bfloat16, seed: int = 0):
    return (torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * 0.02).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", [(256, 384), (300, 200), (1, 129), (129, 1), (128, 128), (3000, 130)])
def test_every_scheme_does_what_the_specification_says(shape: tuple[int, int], dtype) -> None:
    """Elements and scales have the bits of the block by block computation, for blocks that end early too."""
    w = matrix(*shape, dtype)
    w[0, 0] = -0.0
    weights = {"fc.weight": w}
    for block in ((128, 128), (64, 32), (1, 128)):
        out = quantized(weights, fp8_blockwise(block)).weights()
        q, scales = reference(w, block, 448, ml_dtypes.float8_e4m3fn)
        assert (bits(out["fc.weight"]) == q.view(np.uint8)).all()
        assert (bits(out["fc.weight_scale_inv"]) == scales.view(np.uint32)).all()
    for per_channel, block in ((True, (1, None)), (False, (None, None))):
        out = quantized(weights, int8(per_channel)).weights()
        q, scales = reference(w, block, 127.5, np.int8)
        assert (out["fc.weight"].numpy() == q).all()
        assert tuple(out["fc.weight_scale"].shape) == ((shape[0], 1) if per_channel else (1,))
        assert (bits(out["fc.weight_scale"]).ravel() == scales.view(np.uint32).ravel()).all()


def test_dequantized_elements_are_near() -> None:
    """Multiplied by its scale, an element is off by at most half a step of the format."""
    w = matrix(256, 300, torch.float32)
    out = quantized({"fc.weight": w}, fp8_blockwise()).weights()
    scale = out["fc.weight_scale_inv"].repeat_interleave(128, 0).repeat_interleave(128, 1)[:256, :300]
    error = (out["fc.weight"].float() * scale - w).abs()
    assert (error <= torch.maximum(w.abs() * 2**-4, scale * 2**-10) * (1 + 2**-20)).all()
    assert error.max() > 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_zeros_tiny_numbers_nan_and_infinity(dtype) -> None:
    """No scale is zero or subnormal; a block that is broken has the scale NaN and zeros, and spoils no other."""
    w = matrix(64, 48, dtype)
    w[:16] = 0
    w[:16, 3] = -0.0
    w[16:32] = 1e-40
    w[32, 5], w[33, 20], w[34, 40] = float("nan"), float("inf"), float("-inf")
    for scheme, suffix in ((fp8_blockwise((16, 16)), "_scale_inv"), (int8(), "_scale")):
        out = quantized({"fc.weight": w}, scheme).weights()
        q, scales = out["fc.weight"].float(), out["fc.weight" + suffix]
        height = 64 // scales.shape[0]
        assert (scales[: 32 // height] == 1).all()
        assert (q[:32] == 0).all()
        broken = scales.isnan()
        assert broken.sum() == 3
        assert (bits(scales)[broken.numpy()] == 0x7FC00000).all()
        assert (scales[~broken] >= torch.finfo(torch.float32).tiny).all()
        spread = broken.repeat_interleave(height, 0).repeat_interleave(48 // scales.shape[1], 1)
        assert (q[spread] == 0).all()
        assert (q[48:] != 0).any()
        assert not q.isnan().any()
    fp8 = quantized({"fc.weight": w}, fp8_blockwise((16, 16))).weights()["fc.weight"]
    assert (bits(fp8)[:16, 3] == 0x80).all()  # the sign of a zero stays


def test_stacked_experts_are_quantized_each_by_itself() -> None:
    """Blocks are of the last two dimensions; with the right predicate a stack is as good as its matrices."""
    stack = torch.stack([matrix(70, 90, seed=i) for i in range(3)])
    scheme = fp8_blockwise((32, 32), names=lambda spec: spec.name == "experts.up")
    out = quantized({"experts.up": stack, "norm.weight": matrix(4, 4)}, scheme).weights()
    assert out["norm.weight"].dtype is torch.bfloat16
    for i in range(3):
        q, scales = reference(stack[i], (32, 32), 448, ml_dtypes.float8_e4m3fn)
        assert (bits(out["experts.up"][i]) == q.view(np.uint8)).all()
        assert (bits(out["experts.up_scale_inv"][i]) == scales.view(np.uint32)).all()


@pytest.mark.parametrize(
    ("name", "shape", "dtype", "is_one"),
    [
        ("model.layers.0.self_attn.q_proj.weight", (8, 8), "bfloat16", True),
        ("model.layers.0.mlp.gate_proj.weight", (8, 8), "float32", True),
        ("model.layers.0.mlp.experts.7.down_proj.weight", (8, 8), "float16", True),
        ("model.layers.0.mlp.gate.weight", (8, 8), "bfloat16", False),
        ("model.layers.0.mlp.shared_expert_gate.weight", (1, 8), "bfloat16", False),
        ("model.layers.0.block_sparse_moe.router.weight", (8, 8), "bfloat16", False),
        ("model.embed_tokens.weight", (8, 8), "bfloat16", False),
        ("transformer.wte.weight", (8, 8), "bfloat16", False),
        ("model.norm.weight", (8,), "bfloat16", False),
        ("lm_head.weight", (8, 8), "bfloat16", False),
        ("model.layers.0.self_attn.q_proj.bias", (8,), "bfloat16", False),
        ("model.layers.0.self_attn.q_proj.weight", (8, 8), "float8_e4m3fn", False),
        ("weight", (8, 8), "bfloat16", True),
    ],
)
def test_which_tensors_are_linear_weights(name: str, shape: tuple[int, ...], dtype: str, is_one: bool) -> None:
    """By default just the weights of linear layers are quantized."""
    assert linear_weights(TensorSpec(name, sparserl.weights.dtypes.BY_NAME[dtype], shape)) == is_one


def test_memory_is_reused_and_the_source_untouched() -> None:
    """The second call writes into the tensors of the first, and the weights that are read stay as they are."""
    model = torch.nn.Sequential(torch.nn.Linear(40, 30), torch.nn.LayerNorm(30))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    source = quantized(model, fp8_blockwise((16, 16)))
    first = source.weights()
    first_bits = {name: bits(tensor) for name, tensor in first.items()}
    second = source.weights()
    assert {n: t.data_ptr() for n, t in first.items()} == {n: t.data_ptr() for n, t in second.items()}
    assert all((bits(second[n]) == first_bits[n]).all() for n in second)
    assert same(model.state_dict(), before)
    assert first["1.weight"].data_ptr() == model[1].weight.data_ptr()


def test_a_function_of_the_user() -> None:
    """Any function that makes tensors of a tensor is a scheme, for whole tensors; two names must not meet."""
    weights = {"a.weight": matrix(4, 4), "b": torch.ones(3)}

    def halves(name, tensor):
        return {name: tensor} if tensor.ndim == 1 else {name + ".hi": tensor.to(torch.float8_e5m2), name + ".n": tensor}

    assert set(quantized(weights, halves).weights()) == {"a.weight.hi", "a.weight.n", "b"}
    with pytest.raises(TensorMismatch, match="returned 'x' for 'b'"):
        quantized(weights, lambda _name, tensor: {"x": tensor}).weights()
    table = sparserl.tensor_table(weights)
    shards = Shards.of(table, weights)
    with pytest.raises(UnsupportedTensor, match="whole tensors"):
        quantized(_Fixed(shards), halves).weights()


class _Fixed:
    """A source that has what it was given."""

    def __init__(self, weights) -> None:
        self.held = weights

    def weights(self):
        return self.held


def test_what_cannot_be_quantized_is_refused() -> None:
    """NumPy arrays, vectors, names that meet, shards that lack a part of a block: each by its name."""
    with pytest.raises(UnsupportedTensor, match=r"'a.weight': only torch tensors"):
        quantized({"a.weight": np.ones((2, 2), np.float32)}, int8()).weights()
    with pytest.raises(UnsupportedTensor, match=r"b float32\[3\] cannot be quantized"):
        quantized({"b": torch.ones(3)}, int8(names=lambda _: True)).weights()
    with pytest.raises(TensorMismatch, match="occurs twice"):
        quantized({"a.weight": matrix(2, 2), "a.weight_scale": torch.ones(2)}, int8()).weights()
    with pytest.raises(ValueError, match="no elements"):
        fp8_blockwise((0, 128))
    with pytest.raises(UnsupportedTensor, match="expected a torch module"):
        quantized(7, int8())
    w = matrix(8, 8)
    table = sparserl.tensor_table({"a.weight": w})

    def rows(stop: int) -> _Fixed:
        return _Fixed(Shards(table, [Part("a.weight", Region((0, 0), (stop, 8)), w[:stop])]))

    assert len(quantized(rows(4), fp8_blockwise((4, 4))).weights().parts) == 2
    with pytest.raises(
        TensorMismatch, match=r"'a.weight': other processes have the rest of some blocks .*process group"
    ):
        quantized(rows(5), fp8_blockwise((4, 4))).weights()
    with pytest.raises(TensorMismatch, match="cannot be"):
        quantized(_Fixed(Shards(table, [Part("a.weight", Region((0, 0), (4, 8)), w)])), int8()).weights()


def test_only_what_changed_for_the_rollout_is_sent(tmp_path: Path) -> None:
    """After a small step far fewer fp8 elements change than bf16 ones, and just the scales of blocks that grew."""
    generator = torch.Generator().manual_seed(1)
    master = {f"layers.{i}.fc.weight": torch.randn(512, 640, generator=generator) * 0.02 for i in range(2)}
    live = {name: tensor.to(torch.bfloat16) for name, tensor in master.items()}
    source = quantized(live, fp8_blockwise())
    rollout = {name: torch.zeros_like(tensor) for name, tensor in source.weights().items()}
    with (
        sparserl.Publisher(f"file://{tmp_path}", source) as publisher,
        sparserl.Subscriber(f"file://{tmp_path}", rollout) as subscriber,
    ):
        publisher.publish()
        subscriber.sync()
        for _ in range(3):
            before = {name: tensor.clone() for name, tensor in live.items()}
            held = {name: bits(tensor) for name, tensor in rollout.items()}
            for name, tensor in master.items():
                tensor += 2e-6 * torch.randn(tensor.shape, generator=generator).sign()
                tensor[:128, :128] *= 1 + 2**-7 * (tensor[:128, :128].abs() == tensor[:128, :128].abs().max())
                live[name].copy_(tensor)
            dense = sparserl.diff(before, live)
            report = publisher.publish()
            changed = {name: bits(tensor) != held[name] for name, tensor in source.weights().items()}
            assert report.changed == sum(int(where.sum()) for where in changed.values())
            assert 0 < 4 * report.changed < dense.changed
            assert 2 * report.bytes < len(dense.to_bytes())
            for name in live:
                (_, was), (_, now) = (
                    reference(w[name], (128, 128), 448, ml_dtypes.float8_e4m3fn) for w in (before, live)
                )
                assert (changed[name + "_scale_inv"] == (was != now)).all()
                assert changed[name + "_scale_inv"][0, 0]
            subscriber.sync()
            assert same(rollout, source.weights())


# -- shards of real processes ------------------------------------------------------------------------------------------

SCHEMES = {
    "fp8": fp8_blockwise((16, 16)),
    "narrow": fp8_blockwise((7, 50)),
    "int8": int8(),
    "tensor": int8(per_channel=False),
}
BOXES = {  # of each tensor, the boxes of the two ranks
    "rows.weight": ([((0, 0), (37, 90))], [((37, 0), (63, 90))]),
    "columns.weight": ([((0, 0), (100, 33))], [((0, 33), (100, 57))]),
    "tiles.weight": (
        [((0, 0), (41, 29)), ((41, 29), (59, 61)), ((0, 80), (5, 10))],
        [((41, 0), (59, 29)), ((0, 29), (41, 51)), ((5, 80), (36, 10))],
    ),
    "first.weight": ([((0, 0), (100, 90))], []),
    "second.weight": ([], [((0, 0), (100, 90))]),
    "norm.bias": ([((0,), (30,))], [((30,), (70,))]),
}


def whole_weights(step: int):
    """All tensors, the same in every process; one block has a NaN and one an infinity."""
    out = {name: matrix(100, 90, seed=i) for i, name in enumerate(BOXES) if name != "norm.bias"}
    out["norm.bias"] = torch.arange(100, dtype=torch.float32)
    out["rows.weight"][36, 3] = float("nan")
    out["columns.weight"][50, 34] = float("inf")
    for i, tensor in enumerate(out.values()):
        tensor.view(-1)[step * 1000 + i : step * 1000 + 20 * i : 7] *= 1.5
    return out


def shards_of(rank: int, step: int) -> Shards:
    weights = whole_weights(step)
    parts = []
    for name, boxes in BOXES.items():
        for box in boxes[rank]:
            region = Region(*box)
            data = weights[name][region.slices]
            parts.append(Part(name, region, data if name != "columns.weight" else data.T.contiguous().T))
    return Shards(sparserl.tensor_table(weights), parts)


def policy():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(50, 37), torch.nn.LayerNorm(37), torch.nn.Linear(37, 21))


def one_rank(rank: int, port: int, folder: str) -> None:
    """Quantize two versions by every scheme, and leave patch, digest and places behind."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    for name, scheme in SCHEMES.items():
        source = _Fixed(shards_of(rank, 0))
        wrapped = quantized(source, scheme, dist.group.WORLD if name == "fp8" else None)
        old = wrapped.weights()
        copy = Shards(old.table, [Part(p.tensor, p.region, p.data.clone()) for p in old.parts])
        source.held = shards_of(rank, 1)
        new = wrapped.weights()
        saved = {
            "table": old.table,
            "digests": (sparserl.digest(copy), sparserl.digest(new)),
            "patch": sparserl.diff(copy, new).to_bytes(),
            "places": [(p.tensor, p.region) for p in new.parts],
        }
        torch.save(saved, Path(folder) / f"{name}-{rank}.pt")
    model = fully_shard(policy(), mesh=init_device_mesh("cpu", (2,)))
    torch.save(sparserl.digest(quantized(fsdp(model), SCHEMES["fp8"]).weights()), Path(folder) / f"fsdp-{rank}.pt")
    _agrees_on_global_scales(rank, dist.group.WORLD)
    _fails_alone(rank, dist.group.WORLD)
    dist.destroy_process_group()


def _agrees_on_global_scales(rank: int, group) -> None:
    """Of layers that engines fuse each rank has one, and of a matrix the columns to the middle of a block."""
    weights = {f"{name}_proj.weight": matrix(40, 96, seed=i) * 3**i for i, name in enumerate("kqo")}
    first = ("k_proj.weight", Region((0, 0), (40, 96))), ("o_proj.weight", Region((0, 0), (40, 40)))
    second = ("q_proj.weight", Region((0, 0), (40, 96))), ("o_proj.weight", Region((0, 40), (40, 56)))
    own = [Part(name, box, weights[name][box.slices]) for name, box in (first, second)[rank]]
    for scheme in ("nvfp4", "mxfp4"):
        whole = quantized(weights, scheme).weights()
        parts = quantized(_Fixed(Shards(sparserl.tensor_table(weights), own)), scheme, group).weights().parts
        assert len(parts) == {"nvfp4": 6 - rank, "mxfp4": 4}[scheme]
        for part in parts:
            assert (bits(part.data) == bits(whole[part.tensor][part.region.slices])).all(), part.tensor


class _Broken:
    """A source that cannot say what the weights are."""

    def weights(self):
        raise MemoryError("no room to gather")


def _fails_alone(rank: int, group) -> None:
    """Rank 1 fails in one way or another: rank 0 raises too, at once, and the next time all is well."""
    narrow = {"a.weight": matrix(3, 4)}
    arrays = [Part("rows.weight", Region((37, 0), (63, 90)), np.zeros((63, 90), np.uint16).view(ml_dtypes.bfloat16))]
    table = sparserl.tensor_table(whole_weights(0))
    for bad, error, heard in (
        (_Broken(), MemoryError, "rank 1 could not quantize"),
        (_Fixed(Shards(table, arrays)), UnsupportedTensor, "rank 1 could not quantize"),
        (_Fixed(Shards.of(sparserl.tensor_table(narrow), narrow)), TensorMismatch, "not quantize the same tensors"),
    ):
        wrapped = quantized(_Fixed(shards_of(rank, 0)) if rank == 0 else bad, SCHEMES["fp8"], group)
        with pytest.raises(WeightsError if rank == 0 else error, match=heard if rank == 0 else None):
            wrapped.weights()
        wrapped = quantized(_Fixed(shards_of(rank, 0)), SCHEMES["fp8"], group)
        known = sparserl.digest(wrapped.weights())
        if rank == 1:
            wrapped._source = bad
        with pytest.raises(WeightsError if rank == 0 else error):
            wrapped.weights()
        wrapped._source = _Fixed(shards_of(rank, 0))
        assert sparserl.digest(wrapped.weights()) == known


@pytest.mark.long
def test_two_processes_agree_on_the_scales_of_cut_blocks(tmp_path: Path) -> None:
    """Whoever has which boxes, elements and scales are those of the whole, each of them once, and patches merge.

    The same with FSDP2, which cuts rows without regard to blocks. If one process fails, both raise.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    together(one_rank, (port, str(tmp_path)), 2)
    for name, scheme in SCHEMES.items():
        source = _Fixed(whole_weights(0))
        wrapped = quantized(source, scheme)
        old = {n: t.clone() for n, t in wrapped.weights().items()}
        source.held = whole_weights(1)
        new = wrapped.weights()
        ranks = [torch.load(tmp_path / f"{name}-{rank}.pt", weights_only=False) for rank in range(2)]
        table = sparserl.tensor_table(new)
        assert all(rank["table"] == table for rank in ranks)
        for version, weights in enumerate((old, new)):
            total = table_digest(table) + ranks[0]["digests"][version] + ranks[1]["digests"][version]
            assert total == sparserl.digest(weights)
        for spec in table.specs:
            seen = np.zeros(spec.shape, int)
            for tensor, region in ranks[0]["places"] + ranks[1]["places"]:
                if tensor == spec.name:
                    seen[region.slices] += 1
            assert (seen == 1).all(), spec
        patch = sparserl.merge(*(sparserl.Patch.from_bytes(rank["patch"]) for rank in ranks))
        assert patch.changed == sparserl.diff(old, new).changed > 0
        patch.apply(old)
        assert same(old, new)
    whole = quantized(policy(), SCHEMES["fp8"]).weights()
    shards = [torch.load(tmp_path / f"fsdp-{rank}.pt", weights_only=False) for rank in range(2)]
    assert table_digest(sparserl.tensor_table(whole)) + shards[0] + shards[1] == sparserl.digest(whole)
