"""Which classes of positions a GPU chooses, and the tables that it keeps for them."""

from __future__ import annotations

import gc

import numpy as np
import pytest

import sparserl
from sparserl import codec
from sparserl.kernels import cpu, gpu
from sparserl.patch import capture, gpu_changes, gpu_compare, gpu_encode
from sparserl.weights import memory
from sparserl.weights import on_gpu as device
from sparserl.weights.dtypes import BY_NAME, Bits
from sparserl.weights.local import LocalWeights
from tests.patch.gpu.gpu_weights import (
    CUDA,
    DEVICE,
    gpu_tensor,
    needs_gpu,
    needs_kernels,
    on_gpu,
    on_host,
    profiles_of,
    same_bits,
    two_versions,
)

pytest.importorskip("triton")
torch = pytest.importorskip("torch")


def renamed(weights):
    weights["a"], weights["b"] = weights["b"], weights["a"]


@needs_gpu
@pytest.mark.long
def test_nothing_is_taken_for_what_it_was():
    """Tables are kept from sync to sync. Weights that lie elsewhere, or are others by the same name, have their own."""
    old, new = two_versions("bfloat16", {"a": (90, 100), "b": (90, 100)}, changes=20)
    _, other = two_versions("bfloat16", {"a": (90, 100), "b": (90, 100)}, changes=20, seed=1)
    more = two_versions("bfloat16", {"c": (77,)}, changes=5)
    was, now, rollout = on_gpu(old), on_gpu(new), on_gpu(old)
    changes = (
        lambda: None,
        lambda: now.update(a=gpu_tensor(other["a"])),  # another tensor of the same shape
        lambda: setattr(rollout["b"], "data", rollout["b"].clone()),  # the same tensor in other memory
        lambda: [renamed(weights) for weights in (was, now, rollout)],
        lambda: [w.update({name: t.view(torch.float16) for name, t in w.items()}) for w in (was, now, rollout)],
        lambda: [w.update(on_gpu(bits)) for w, bits in zip((was, now, rollout), (*more, more[0]), strict=True)],
        lambda: [w.pop("a") for w in (was, now, rollout)],
    )
    for change in changes:
        change()
        patch = sparserl.diff(was, now, profile="raw", base_digest=sparserl.digest(on_host(was)))
        assert patch.result == sparserl.digest(on_host(now))
        patch.apply(rollout, digest=patch.base)
        assert same_bits(rollout, now)
        for name, tensor in was.items():
            rollout[name].copy_(tensor)


@needs_kernels
def test_sums_that_are_kept_are_of_where_tensors_are_now():
    """A digest is taken again and again with the same tables, until a tensor moves."""
    old, _ = two_versions("bfloat16", {"a": (90, 100), "b": (7,)})
    weights = on_gpu(old)
    local = LocalWeights.of(weights)  # whose tables are kept, while it lives
    changes = (
        lambda: None,
        weights["b"].zero_,
        lambda: setattr(weights["a"], "data", weights["a"].data.flip(0).contiguous()),
        lambda: setattr(weights["a"], "data", weights["a"].data[1:]),
    )
    for change in changes:
        change()
        assert sparserl.digest(weights) == sparserl.digest(on_host(weights))
    assert len(local.table) == 2


@needs_kernels
def test_sums_that_are_kept_keep_no_memory():
    """A tensor that is moved away frees its memory, whatever was summed up before."""
    weights = on_gpu(two_versions("bfloat16", {"a": (90, 100), "b": (7,)})[0])
    local = LocalWeights.of(weights)
    before = sparserl.digest(weights)
    storage = torch.multiprocessing.reductions.StorageWeakRef(weights["a"].untyped_storage())
    weights["a"].data = weights["a"].data.clone()
    gc.collect()  # Triton's interpreter leaves cycles of references behind
    assert storage.expired()
    assert sparserl.digest(weights) == before
    assert len(local.table) == 2


@needs_kernels
def test_tables_are_kept():
    """The same parts have the same blocks again, and few tables are kept with them; other addresses have others."""
    old, _ = two_versions("bfloat16", {"a": (90, 100), "b": (7,)})
    held = [LocalWeights.of(on_gpu(old)) for _ in range(12)]
    made = []
    for one in held:
        (runs,) = device.groups(device.split_by_gpu(one.places, one)[1])
        with device.on_stream(one, runs.device):
            blocks, (side,) = runs.blocks()
        made.append((blocks, side))
        found = side.at.cpu().numpy() * 2 + side.base.data_ptr()
        assert np.array_equal(found, runs.address[0])
    assert all(blocks is made[0][0] for blocks, _ in made)
    assert len(blocks._cache) <= 8


@needs_kernels
@pytest.mark.parametrize("begins", [(8, 8), (8, 9), (9, 8), (9, 9)])
def test_versions_are_aligned_alike(begins):
    """Kernels are compiled for versions that all begin at 16-byte boundaries, and for those that do not."""
    memory = torch.zeros(64, dtype=torch.bfloat16, device=DEVICE)
    versions = [LocalWeights.of({"w": memory[begin:][:40]}) for begin in begins]
    (runs,) = device.groups(device.split_by_gpu(versions[0].places, *versions)[1])
    with device.on_stream(versions[0], runs.device):
        _, sides = runs.blocks()
    assert [side.aligned for side in sides] == [begins == (8, 8)] * 2


@needs_kernels
def test_classes_that_do_not_pay(monkeypatch):
    """Where telling elements apart saves nothing, `ctx` becomes `ulp`."""
    monkeypatch.setattr(gpu_encode, "classes_from_histogram", lambda *_: (None, 0.0))
    old, new = two_versions("bfloat16", {"w": (9000,)})
    patch, weights = sparserl.diff(on_gpu(old), on_gpu(new), profile="ctx"), on_gpu(old)
    assert profiles_of(patch) == {"ulp"}
    patch.apply(weights, digest=patch.base)
    assert same_bits(weights, new)


@needs_kernels
@pytest.mark.parametrize("profile", ["ulp", pytest.param("auto", marks=pytest.mark.long)])
def test_compacted_only_where_it_is_needed(profile, monkeypatch):
    """A patch has the same bytes whether its changes were compacted too, for other profiles, or not."""
    old, new = map(on_gpu, two_versions("bfloat16", {"w": (9000,)}))
    compacted, made = gpu_changes.ComparedRuns.compacted, []
    monkeypatch.setattr(gpu_changes.ComparedRuns, "compacted", lambda self: made.append(1) or compacted(self))
    patch = sparserl.diff(old, new, profile=profile)
    assert not made
    assert capture(old, new, profile=profile).encode().to_bytes() == patch.to_bytes()
    assert made
    monkeypatch.setattr(gpu_encode.GpuDraft, "settled", False)
    assert sparserl.diff(old, new, profile=profile).to_bytes() == patch.to_bytes()
    assert len(made) == 2


@needs_kernels
def test_histograms_are_those_of_the_cpu():
    """The keys of a sample are counted as the CPU counts them, so that classes are the same."""
    for name, shift in (("bfloat16", 6), ("int32", 20), ("float8_e4m3fn", 0)):
        old, _ = two_versions(name, {"a": (5000,), "b": (3,), "c": (900,)})
        dtype, held = BY_NAME[name], LocalWeights.of(on_gpu(old))
        (runs,) = device.groups(device.split_by_gpu(held.places, held)[1])
        blocks, (side,) = runs.blocks()
        kind = 0 if dtype.sign_magnitude else 1
        every, row = np.array([3, 2]), np.array([0, 0, 1])
        found = gpu.cells.key_histogram(blocks, side, kind, row, every, np.array([shift, shift])).cpu().numpy()
        sample, keep = codec.ctx.magnitude(dtype)
        for r, parts in enumerate((["a", "b"], ["c"])):
            wanted = np.zeros(512, np.int64)
            address = np.array([old[p].array.ctypes.data for p in parts])
            numel = np.array([old[p].array.size for p in parts])
            cpu.classes.key_histogram(sample, address, numel, keep, np.uint64(shift), int(every[r]), wanted)
            assert np.array_equal(found[r], wanted)


@needs_kernels
def test_ctx_is_weighed_where_gap_is_smaller_than_ulp():
    """Small weights that move through zero take long steps: the profile is that of the CPU."""
    rng = np.random.default_rng(0)
    value = rng.normal(0, 0.02, 30_000).astype(np.float32)
    moved = np.where(abs(value) < 0.001, rng.normal(0, 0.01, value.size), value).astype(np.float32)
    bits = ((v.view(np.uint32) >> 16).astype(np.uint16) for v in (value, moved))
    old, new = ({"w": Bits(b, BY_NAME["bfloat16"])} for b in bits)
    mine, theirs = sparserl.diff(on_gpu(old), on_gpu(new)), sparserl.diff(old, new)
    assert profiles_of(mine) == profiles_of(theirs) == {"ctx"}
    weights = on_gpu(old)
    mine.apply(weights)
    assert same_bits(weights, new)


@needs_gpu
@pytest.mark.long
def test_classes_are_chosen(monkeypatch):
    """Where small weights change and large ones do not, classes pay, and what is chosen says so."""
    monkeypatch.undo()
    if not CUDA:
        monkeypatch.setattr(memory, "is_on_gpu", lambda _: True)
    monkeypatch.setattr(gpu_compare, "FEW_CHANGES", 0)
    monkeypatch.setattr("sparserl.plan.classes._TABLE_BITS", 0)  # there are few changes to pay for tables
    rng = np.random.default_rng(0)
    value = rng.normal(0, 0.02, 30000).astype(np.float32)
    old = (value.view(np.uint32) >> 16).astype(np.uint16)
    new = old.copy()
    new[rng.permutation(np.flatnonzero(abs(value) < 0.001))[:64]] += 1
    was, now = ({"w": Bits(bits, BY_NAME["bfloat16"])} for bits in (old, new))
    mine, theirs = sparserl.diff(on_gpu(was), on_gpu(now)), sparserl.diff(was, now)
    assert profiles_of(mine) == profiles_of(theirs) == {"ctx"}
    assert mine.contents.heads[0].estimates == theirs.contents.heads[0].estimates
    weights = on_gpu(was)
    mine.apply(weights)
    assert same_bits(weights, now)
