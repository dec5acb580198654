"""fp32 weights on a GPU that are published in bf16: kernels cast them where they read them."""

from __future__ import annotations

import numpy as np
import pytest

import sparserl
from sparserl.kernels import gpu, reference
from sparserl.patch.compare import diff
from sparserl.session.baseline import choose_baseline
from sparserl.session.options import BaselineOptions
from sparserl.weights.staging import lazy_bits
from tests.patch.gpu.gpu_weights import CUDA, DEVICE, needs_gpu, needs_kernels, profiles_of, same_bits

pytest.importorskip("triton")
torch = pytest.importorskip("torch")

SHAPES = {"w": (300, 9), "odd": (7, 41), "number": (), "none": (0, 3), "counts": (20,)}


class Trainer(torch.nn.Module):
    """A model with fp32 parameters, and integers, on the device."""

    def __init__(self, seed=0):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        for name, shape in SHAPES.items():
            values = torch.randn(shape, generator=generator)
            tensor = values.to(DEVICE) if name != "counts" else (values * 9).int().to(DEVICE)
            self.register_parameter(name, torch.nn.Parameter(tensor, requires_grad=False))

    def move(self, seed, every=499):
        """Change some elements by so much that their bf16 changes, and all others by less."""
        with torch.no_grad():
            for name, tensor in self.named_parameters():
                if name == "counts":
                    tensor.view(-1)[seed] += 1
                    continue
                bits = tensor.view(-1).view(torch.int32)
                bits ^= 1
                bits[seed::every] ^= 3 << 16

    def cast(self):
        """What engines get."""
        return {
            name: tensor.detach().bfloat16() if name != "counts" else tensor.detach().clone()
            for name, tensor in self.named_parameters()
        }


def side_of(width, arrays, shift):
    """Bit patterns on the device, each of which begins `shift` elements behind an aligned address."""
    tensors = []
    for bits in arrays:
        room = torch.zeros(bits.size + 16, dtype=gpu.ints.INTS[width], device=DEVICE)
        begin = -(room.data_ptr() // width) % (16 // width) + shift
        tensors.append(room[begin : begin + bits.size].copy_(torch.from_numpy(bits.view(f"i{width}"))))
    return gpu.changes.Blocks(width, [bits.size for bits in arrays], DEVICE).side(tensors)


@needs_kernels
@pytest.mark.parametrize("shift", [0, 1])
def test_kernels_cast_what_they_read(shift):
    """Comparing bf16 with fp32 finds, samples, compacts and codes what comparing with its cast does."""
    rng = np.random.default_rng(0)
    sizes = [2051, 0, 49, 1024]
    wide = [rng.integers(0, 2**32, n, dtype=np.uint32) for n in sizes]
    wide[0][:8] = [0, 0x80000000, 0x7F800000, 0xFF800001, 0x7F7FFFFF, 1, 0x3F808000, 0x3F818000]
    news = [reference.to_bf16(bits, gpu.changes.nan_of(DEVICE)) for bits in wide]
    olds = [bits.copy() for bits in news]
    for bits in olds:
        bits[::97] ^= 1
    blocks = gpu.changes.Blocks(2, sizes, DEVICE, block=1024)
    old, narrow = side_of(2, olds, shift), side_of(2, news, shift)
    new = side_of(4, wide, shift)
    assert new.aligned == (shift == 0)
    words, counts = gpu.changes.diff(blocks, old, new)
    assert all(map(torch.equal, (words, counts), gpu.changes.diff(blocks, old, narrow)))
    total = int(counts.sum())
    assert total == sum(len(bits[::97]) for bits in olds)
    which = torch.arange(0, total, 3, device=DEVICE)
    limits = np.tile(np.array([6000, 19200], np.uint64), (len(sizes), 1))
    classification = gpu.classes.Classification.of(blocks, limits, 11, True)
    order = {"sign_magnitude": True, "signed": False}

    def results(side):
        yield from gpu.changes.compact(blocks, old, side, words, counts, total)[:2]
        yield gpu.cells.sample(blocks, old, side, words, counts, which)
        yield from gpu.classes.diff_with_class_ranks(blocks, classification, old, side)[:2]
        for classes in (None, limits):
            plan = gpu.streams.StreamPlan.of(blocks, [0] * len(sizes), 11, classes, chunk=256, **order)
            encoded = gpu.streams.encode(plan, old, side, (words, counts))
            yield encoded.data
            yield encoded.digest_delta

    assert all(map(torch.equal, results(new), results(narrow)))


@needs_gpu
@pytest.mark.parametrize("profile", [pytest.param("auto", marks=pytest.mark.long), "raw", "ulp", "ctx", "gap"])
def test_published(tmp_path, profile):
    """Every version is what torch casts, in all profiles; bits that the cast drops are no changes."""
    trainer = Trainer()
    rollout = trainer.cast()  # it holds the first version
    if profile in ("auto", "raw"):  # it fetches the anchor, which takes long, and is the same in all profiles but `raw`
        rollout = {name: torch.zeros_like(tensor) for name, tensor in rollout.items()}
    source = sparserl.sources.module(trainer, cast=torch.bfloat16)
    with (
        sparserl.Publisher(tmp_path / "run", source, baseline="device", profile=profile, threads=1) as publisher,
        sparserl.Subscriber(tmp_path / "run", rollout, threads=1) as subscriber,
    ):
        publisher.publish()
        assert "where the weights are" in publisher.baseline
        for seed in (3, 5):
            old = trainer.cast()
            trainer.move(seed)
            new = trainer.cast()
            report = publisher.publish()
            assert report.changed == sum(
                int((old[name].view(torch.int16) != new[name].view(torch.int16)).sum())
                if name != "counts"
                else int((old[name] != new[name]).sum())
                for name in new
            )
            synced = subscriber.sync()
            assert synced.kind == ("anchor" if profile in ("auto", "raw") and seed == 3 else "patch")
            assert same_bits(rollout, new)


@needs_gpu
def test_shards_and_columns(nothing_leaves_the_gpu):
    """Shards of rows are cast where they lie; what is neither fp32 to bf16 nor a run goes through host memory."""
    wide = torch.randn(40, 6, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    table = sparserl.tensor_table({"w": wide.bfloat16()})
    region = sparserl.Region((10, 0), (20, 6))

    def shards():
        return sparserl.Shards(table, [sparserl.Part("w", region, lazy_bits(wide[10:30], torch.bfloat16))])

    kept, _ = choose_baseline(shards(), BaselineOptions("device", None))
    rollout = sparserl.Shards(table, [sparserl.Part("w", region, wide[10:30].bfloat16())])
    wide.view(torch.int32)[11::7, 2] ^= 1 << 16
    changes = kept.capture(shards())
    patch = changes.encode()
    assert patch.changed == 3
    patch.apply(rollout)
    kept.advance(patch, changes)
    assert torch.equal(rollout.parts[0].data.view(torch.int16), wide[10:30].bfloat16().view(torch.int16))


@needs_gpu
@pytest.mark.parametrize(("wide", "narrow"), [(torch.float32, torch.float16), (torch.float64, torch.bfloat16)])
def test_other_casts(wide, narrow):
    """Casts that kernels do not make are made by torch, and compared in host memory."""
    weights = torch.randn(50, 4, dtype=wide, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    kept, _ = choose_baseline({"w": lazy_bits(weights, narrow)}, BaselineOptions("device", None))
    rollout = {"w": weights.to(narrow)}
    weights[7] = -weights[7]
    patch = kept.capture({"w": lazy_bits(weights, narrow)}).encode()
    assert patch.changed == 4
    patch.apply(rollout)
    assert torch.equal(rollout["w"], weights.to(narrow))


@needs_kernels
def test_dense_and_sparse_agree_on_a_nan():
    """A tensor that goes dense is read once more: it has the NaN that was compared."""
    if not CUDA:
        pytest.skip("which NaN torch makes on a CPU depends on how it is vectorized")
    wide = torch.randn(1000, device=DEVICE)
    rollout = {"w": wide.bfloat16()}
    old = {"w": rollout["w"].clone()}
    wide.neg_()
    wide[::2] = float("nan")
    patch = diff(old, {"w": lazy_bits(wide, torch.bfloat16)})
    assert any(head.dense_elements for head in patch.contents.heads)
    patch.apply(rollout)
    assert torch.equal(rollout["w"].view(torch.int16), wide.bfloat16().view(torch.int16))


@needs_kernels
def test_groups_of_casts(monkeypatch, nothing_leaves_the_gpu):
    """Weights of several groups, cut into pieces, give the buckets that their cast gives; none leave the GPU."""
    monkeypatch.setattr("sparserl.weights.on_gpu.GROUP_BYTES", 1 << 11)
    monkeypatch.setattr("sparserl.weights.on_gpu.LARGE_BYTES", 1 << 10)
    trainer = Trainer()
    old = trainer.cast()
    trainer.move(1)
    source = sparserl.sources.module(trainer, cast=torch.bfloat16)
    patch = diff(old, source.weights(), profile="ulp")
    assert profiles_of(patch) == {"ulp"}
    again = diff(old, trainer.cast(), profile="ulp")
    buckets, same = ({bytes(p.contents.bucket(i)) for i in range(p.buckets)} for p in (patch, again))
    assert buckets == same
    assert (patch.base, patch.result) == (again.base, again.result)
