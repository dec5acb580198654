"""Changes of weights on a GPU are found, coded, decoded and applied there, bit for bit as on the CPU."""

from __future__ import annotations

import numpy as np
import pytest

import sparserl
from sparserl import Part, Region, Shards, errors
from sparserl.patch import Patch, capture, gpu_compare, gpu_encode
from sparserl.patch import gpu_apply as device_apply
from sparserl.plan import buckets
from sparserl.weights import gpu_copies
from sparserl.weights import on_gpu as device
from sparserl.weights.dtypes import BY_NAME, Bits
from sparserl.weights.holdings import Holdings
from tests.patch.gpu.gpu_weights import (
    CUDA,
    DEVICE,
    TWO,
    gpu_tensor,
    host_bits,
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


SHAPES = {"empty": (0, 3), "one": (), "tiny": (5,), "odd": (7, 41), "large": (3, 600_001 if CUDA else 3001)}


def same_entries(a, b):
    """Patches with the same ends and entries, whatever their streams are."""
    told = [sorted((e.tensor, str(e.region), e.changed, e.dense) for e in patch) for patch in (a, b)]
    return told[0] == told[1] and (a.base, a.result, a.changed) == (b.base, b.result, b.changed)


@needs_gpu
@pytest.mark.parametrize(
    ("name", "profile"),
    [
        ("bfloat16", "ctx"),
        *(
            pytest.param(n, "ctx", marks=pytest.mark.long)
            for n in ("float32", "float8_e4m3fn", "int32", "float16", "int8", "int64")
        ),
        *(("bfloat16", p) for p in ("raw", "gap", "ulp")),
        *(pytest.param(n, p, marks=pytest.mark.long) for n, p in (("bfloat16", "auto"), ("int32", "ulp"))),
    ],
)
def test_round_trips(name, profile, nothing_leaves_the_gpu):
    """Whoever encodes and whoever decodes, the new bits come out; no weights come to the host."""
    every = (name, profile) == ("bfloat16", "ctx")
    old, new = two_versions(name, SHAPES if every else TWO if name == "bfloat16" else {"odd": TWO["large"]})
    known = None if every else sparserl.digest(old)
    mine, theirs = (sparserl.diff(f(old), f(new), profile=profile, base_digest=known) for f in (on_gpu, on_host))
    assert same_entries(mine, theirs)
    assert ("ctx" if profile == "auto" else profile) in profiles_of(mine)
    both = [(mine, on_gpu(old))] if name == "bfloat16" else []
    for patch, weights in ((mine, on_host(old)), *both, (theirs, on_gpu(old))):
        done = Patch.from_bytes(patch.to_bytes()).apply(weights, digest=known)
        assert (done.changed, done.already) == (patch.changed, False)
        assert same_bits(weights, new)
        assert not every or (sparserl.digest(weights) == patch.result and patch.apply(weights).already)


@needs_gpu
@pytest.mark.parametrize("profile", ["raw", "ulp", "ctx"])
def test_tensors_on_and_off_boundaries(profile):
    """Tensors at 16-byte boundaries have their own bits, though the first of all weights is not at one."""
    old, new = two_versions("bfloat16", {"off": (3, 41), "on": (64, 63), "also off": (5,)})
    begins = {"off": 1, "on": 128, "also off": 64 + 64 * 64 + 3}

    def in_one_tensor(weights):
        memory = torch.zeros(begins["also off"] + 8, dtype=torch.bfloat16, device=DEVICE)
        views = {}
        for name, bits in weights.items():
            views[name] = memory[begins[name] :][: bits.array.size].view(bits.array.shape)
            views[name].copy_(gpu_tensor(bits))
        return views

    live = in_one_tensor(old)
    assert [tensor.data_ptr() % 16 for tensor in live.values()] == [2, 0, 6]
    assert sparserl.digest(live) == sparserl.digest(old)
    patches = [
        sparserl.diff(on_gpu(old), on_gpu(new), profile=profile),
        sparserl.diff(live, in_one_tensor(new), profile=profile),
    ]
    assert same_entries(*patches)
    for patch in patches:
        live = in_one_tensor(old)
        patch.apply(live)
        assert same_bits(live, new)


@needs_gpu
@pytest.mark.long
def test_every_pattern():
    """Payloads of NaNs, signs of zeros, infinities and subnormals are bits like all others."""
    dtype = BY_NAME["bfloat16"]
    old = np.arange(1 << 16, dtype=np.uint16)[:: 1 if CUDA else 512].repeat(2)
    old[::2] = [0x7FC0, 0x7F81, 0xFFFF, 0x0000, 0x8000, 0x7F80, 0x0001, 0x8001] * (old.size // 16)
    new = old.copy()
    new[::16] ^= 0x8000
    new[1::16] ^= 0x0041
    was, now = {"w": Bits(old, dtype)}, {"w": Bits(new, dtype)}
    for profile in ("ulp", "ctx"):
        patch = sparserl.diff(on_gpu(was), on_gpu(now), profile=profile, base_digest=sparserl.digest(was))
        weights = on_gpu(was)
        patch.apply(weights, digest=patch.base)
        assert same_bits(weights, now)
        assert patch.changed == (old != new).sum()


@needs_gpu
@pytest.mark.long
def test_dense_entries_and_many_changes():
    """Tensors that change as a whole are sent dense, beside others that are not; both land on either side."""
    old, new = two_versions("bfloat16", {"all": (40,), "large": (9000,)})
    mine, theirs = (sparserl.diff(f(old), f(new), profile="ctx") for f in (on_gpu, on_host))
    assert any(e.dense for e in theirs)
    assert {e.tensor for e in mine if e.dense} == {e.tensor for e in theirs if e.dense}
    for patch in (mine, theirs):
        for weights in (on_gpu(old), on_host(old)):
            patch.apply(weights, digest=patch.base)
            assert same_bits(weights, new)


@needs_gpu
def test_bytes_are_sent_one_behind_the_other():
    """Whoever owns them, and whether they can be written to or not; none is nothing to send."""
    parts = [b"ab", memoryview(bytearray(b"cde")), b"", memoryview(b"xfghx")[1:-1]]
    assert bytes(gpu_copies.upload_parts(parts, DEVICE).cpu().numpy()) == b"abcdefgh"


@needs_gpu
def test_nothing_changed():
    """A patch of nothing lands on weights that stay as they are."""
    old, _ = two_versions("bfloat16", SHAPES)
    patch, weights = sparserl.diff(on_gpu(old), on_gpu(old)), on_gpu(old)
    assert (patch.changed, patch.buckets, patch.base) == (0, 0, sparserl.digest(old))
    assert patch.apply(weights).already
    assert same_bits(weights, old)


@needs_gpu
def test_small_weights_are_decoded_by_the_cpu(monkeypatch):
    """Below the crossover old bits are brought to the host, and the changes written back."""
    monkeypatch.setattr(device_apply, "FEW_BYTES", 1 << 30)
    monkeypatch.setattr(device_apply, "FEW_CHANGES", 1 << 30)
    monkeypatch.setattr(device_apply, "_locate", None)
    old, new = two_versions("bfloat16", TWO)
    for profile in ("ctx", "ulp"):
        weights = on_gpu(old)
        sparserl.diff(old, new, profile=profile).apply(weights)
        assert same_bits(weights, new)


@needs_gpu
def test_squashed_and_inverted():
    """Patches of patches are made with a base that is on the device."""
    old, new = two_versions("bfloat16", TWO)
    last = {name: Bits(bits.array[::-1].copy(), bits.dtype) for name, bits in new.items()}
    one, two = sparserl.diff(old, new, profile="ctx"), sparserl.diff(new, last)
    for patch, start, end in (
        (sparserl.squash(one, two, base=on_gpu(old)), old, last),
        (one.invert(on_gpu(old)), new, old),
    ):
        weights = on_gpu(start)
        patch.apply(weights)
        assert same_bits(weights, end)


@needs_kernels
def test_few_changes_are_left_to_the_cpu(monkeypatch, nothing_leaves_the_gpu):
    """Below the crossover nothing is coded on the device, and still no weights leave it."""
    monkeypatch.setattr(gpu_compare, "FEW_CHANGES", 1 << 30)
    monkeypatch.setattr(gpu_compare, "_FEW_FOR_CTX", 1 << 30)
    monkeypatch.setattr(gpu_encode, "_encode_together", None)
    old, new = two_versions("bfloat16", TWO)
    for profile in ("ctx", "auto"):
        patch, weights = sparserl.diff(on_gpu(old), on_gpu(new), profile=profile), on_gpu(old)
        assert profiles_of(patch) == {"ulp"}
        patch.apply(weights)
        assert same_bits(weights, new)


@needs_gpu
def test_mixed_weights():
    """Some tensors on the device, some not, also in one bucket; a side in host memory and one that is not."""
    old, new = two_versions("bfloat16", TWO)

    def mixed(weights):
        return {n: gpu_tensor(b) if n == "odd" else host_bits(b) for n, b in weights.items()}

    for profile in ("gap", "ctx"):
        for was, now in ((mixed(old), mixed(new)), (on_host(old), on_gpu(new)), (on_gpu(old), mixed(new))):
            patch = sparserl.diff(was, now, profile=profile)
            assert (patch.base, patch.result) == (sparserl.digest(old), sparserl.digest(new))
            patch.apply(was, digest=patch.base)
            assert same_bits(was, new)


@pytest.mark.long
@needs_gpu
def test_any_layout():
    """Transposed tensors and slices of columns are read and written where they are; so are shards of both kinds."""
    old, new = two_versions("bfloat16", {"w": (40, 30), "v": (20, 10)})
    for profile in ("ctx", "ulp"):
        patch = sparserl.diff(on_gpu(old), on_gpu(new), profile=profile)
        room = torch.zeros((40, 64), dtype=torch.bfloat16, device=DEVICE)
        room[:, 7:37] = gpu_tensor(old["w"])
        weights = {"w": room[:, 7:37], "v": gpu_tensor(Bits(old["v"].array.T.copy(), old["v"].dtype)).T}
        assert sparserl.digest(weights) == patch.base
        assert same_entries(sparserl.diff(weights, on_gpu(new), profile=profile), patch)
        patch.apply(weights)
        assert same_bits(weights, new)
        assert not room[:, :7].any()
        assert not room[:, 37:].any()
    table = sparserl.tensor_table(old)
    for box in (Region((10, 0), (20, 30)), Region((0, 5), (40, 9))):
        was, now, bare = (Shards(table, [Part("w", box, f(v["w"].array[box.slices].copy()))]) for v, f in (
            (old, lambda a: gpu_tensor(Bits(a, old["w"].dtype))),
            (new, lambda a: gpu_tensor(Bits(a, old["w"].dtype))),
            (new, lambda a: Bits(a, old["w"].dtype)),
        ))  # fmt: skip
        patch = sparserl.diff(was, now, profile="ctx")
        assert patch.result == sparserl.digest(bare)
        patch.apply(was)
        assert np.array_equal(host_bits(was.parts[0].data).array, bare.parts[0].data.array)


@needs_gpu
@pytest.mark.long
def test_tied_tensors():
    """Two names for one tensor change together, or not at all; tensors that share some elements are refused."""
    old, new = two_versions("bfloat16", {"a": (50, 20)})
    twice = [{"a": v["a"], "b": v["a"]} for v in (old, new)]
    patch = sparserl.diff(*map(on_gpu, twice), profile="ctx")
    shared = gpu_tensor(old["a"])
    patch.apply({"a": shared, "b": shared})
    assert same_bits({"a": shared}, new)
    split = sparserl.diff(on_gpu(twice[0]), on_gpu({"a": new["a"], "b": old["a"]}), profile="ctx")
    shared = gpu_tensor(old["a"])
    with pytest.raises(errors.TiedConflict):
        split.apply({"a": shared, "b": shared})
    assert same_bits({"a": shared}, old)
    flat = shared.reshape(-1)
    apart = sparserl.diff(*map(on_gpu, two_versions("bfloat16", {"a": (9,), "b": (9,)})), profile="raw")
    with pytest.raises(errors.SparserlError):
        apart.apply({"a": flat[:9], "b": flat[5:14]}, digest=apart.base)


@pytest.mark.long
@needs_gpu
def test_captured():
    """What was captured can be encoded in any profile after the weights went on, and turned round."""
    old, new = two_versions("bfloat16", TWO)
    was, now = on_gpu(old), on_gpu(new)
    found = capture(was, now)
    for tensor in now.values():
        tensor.zero_()
    for patch in (found.encode(), found.encode(link="100GB/s"), found.back()()):
        start, end = (new, old) if patch.base == sparserl.digest(new) else (old, new)
        weights = on_host(start)
        patch.apply(weights)
        assert same_bits(weights, end)
    assert profiles_of(found.encode(link="1Mbit")) == profiles_of(found.encode())  # the smallest
    for allowed in ({"raw"}, {"gap"}, {"ulp", "gap"}):
        patch, weights = Patch(found.stream(profiles=allowed)), on_gpu(old)
        assert profiles_of(patch) <= allowed
        patch.apply(weights)
        assert same_bits(weights, new)


@pytest.mark.long
@needs_kernels
def test_large_tensors_are_cut(monkeypatch):
    """Pieces, groups and buckets have bounds; the parts of a tensor are entries of their own, in any of them."""
    monkeypatch.setattr(device, "LARGE_BYTES", 6000)
    monkeypatch.setattr(device, "GROUP_BYTES", 20000)
    monkeypatch.setattr(device_apply, "GROUP_BYTES", 20000)
    monkeypatch.setattr(buckets, "GPU_COVER_BYTES", 10000)
    old, new = two_versions("bfloat16", {"a": (20, 500), "b": (77,)}, changes=20)
    patch, weights = sparserl.diff(on_gpu(old), on_gpu(new), profile="ctx"), on_gpu(old)
    assert len([*patch]) > 4
    assert patch.buckets > 2
    assert (patch.base, patch.result) == (sparserl.digest(old), sparserl.digest(new))
    patch.apply(weights, digest=patch.base)
    assert same_bits(weights, new)
    weights = on_host(old)
    patch.apply(weights)
    assert same_bits(weights, new)


@needs_gpu
@pytest.mark.parametrize("profile", ["ctx", "ulp", "raw"])
def test_cut_along_receivers(profile):
    """Rows are coded on the GPU; tensors of which receivers have columns are compared there, and then cut."""
    old, new = two_versions("bfloat16", {"rows": (40, 301), "columns": (30, 400), "norm": (77,)}, changes=80)
    table = sparserl.tensor_table(old)
    left, right = ([Region((20 * r, 0), (20, 301)), Region((0, 200 * r), (30, 200))] for r in range(2))
    names = [table.index["rows"], table.index["columns"]]
    holdings = Holdings(table, {"x": [*zip(names, left, strict=True)], "y": [*zip(names, right, strict=True)]})
    expected = sparserl.diff(old, new, profile="raw")
    for keep in (True, False):
        timed = None if keep else iter
        patch = capture(on_gpu(old), on_gpu(new), profile=profile, holdings=holdings, timed=timed).encode()
        assert (patch.base, patch.result, patch.changed) == (expected.base, expected.result, expected.changed)
        masks = set()
        for head in patch.contents.heads:
            touched = holdings.touched(head.entries.places())
            assert not touched.partly
            masks.add(touched.holdings)
        assert masks == {0b00, 0b01, 0b10}
    for target in (on_host(old), on_gpu(old)):
        patch.apply(target, threads=1)  # the interpreter runs one kernel at a time
        assert same_bits(target, new)
