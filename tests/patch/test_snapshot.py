"""Snapshots: all weights as a patch of nothing, as they are or coded, and back."""

from __future__ import annotations

import numpy as np
import pytest

from sparserl import Bits, Part, Patch, Region, Shards, diff, digest, merge
from sparserl.errors import FormatError, InvalidField
from sparserl.patch.contents import BucketList, Contents
from sparserl.patch.snapshot import restore, snapshot
from sparserl.session.anchors import zeros
from sparserl.weights.dtypes import BY_NAME
from sparserl.weights.region import whole as whole_region
from sparserl.weights.tensors import memories, table_of
from tests.dtypes import long_if_rare


def some_weights(dtype_name: str = "bfloat16") -> dict[str, Bits]:
    """Tensors that are large, small, empty, all zero, and zero but for one element."""
    rng = np.random.default_rng(5)
    dtype = BY_NAME[dtype_name]
    most = np.iinfo(dtype.uint).max

    def bits(*shape: int) -> Bits:
        return Bits(rng.integers(0, most, shape, dtype.uint, endpoint=True), dtype)

    few = np.zeros((7, 90), dtype.uint)
    few[3, 4] = most
    large = bits(3, (5 << 20) // dtype.width)
    return {
        "large": large,
        "small": bits(3, 5),
        "one": bits(),
        "none": bits(0, 4),
        "zero": Bits(np.zeros(1000, dtype.uint), dtype),
        "few": Bits(few, dtype),
    }


def restored(contents: Contents, threads: int | None = None) -> dict[str, Bits]:
    weights = zeros(contents.table)
    restore(contents, weights, threads)
    return weights


def same(left: dict[str, Bits], right: dict[str, Bits]) -> bool:
    return left.keys() == right.keys() and all((left[name].array == right[name].array).all() for name in left)


@pytest.mark.parametrize("coded", [False, True])
@pytest.mark.parametrize(
    "dtype", [pytest.param(name, marks=long_if_rare(name)) for name in ("bfloat16", "float32", "float64", "int8")]
)
def test_a_snapshot_is_a_patch_of_zeros(dtype: str, coded: bool) -> None:
    """Both ends are those of the weights; whoever compares finds the same changes, and can apply it as any patch."""
    weights = some_weights(dtype)
    nothing = zeros(table_of(memories(weights)))
    contents = snapshot(weights, coded=coded, threads=2)
    assert contents.base == digest(nothing)
    assert contents.result == digest(weights)
    assert contents.changed == diff(nothing, weights).changed
    assert same(restored(contents, threads=2), weights)
    saved = Patch.from_bytes(Patch(contents).to_bytes())
    saved.apply(nothing)
    assert same(nothing, weights)


def test_coding_takes_less_and_plain_bits_are_stored() -> None:
    """The high bytes of bf16 weights repeat; without coding, a snapshot takes what the weights take."""
    rng = np.random.default_rng(1)
    floats = rng.normal(0, 0.02, 1 << 20).astype(np.float32)
    weights = {"w": Bits((floats.view(np.uint32) >> 16).astype(np.uint16), BY_NAME["bfloat16"])}
    plain = snapshot(weights, coded=False).nbytes
    assert 2 << 20 <= plain < (2 << 20) + 1000
    assert snapshot(weights, coded=True).nbytes < 0.75 * plain


@pytest.mark.parametrize("coded", [False, True])
def test_shards_make_one_snapshot_together(coded: bool) -> None:
    whole = some_weights()
    table = table_of(memories(whole))
    rows = whole["large"].array
    others = [Part(name, whole_region(bits.array.shape), bits) for name, bits in whole.items() if name != "large"]
    parts = []
    for shard, more in ((slice(0, 1), others), (slice(1, 3), [])):
        region = Region((shard.start, 0), (shard.stop - shard.start, rows.shape[1]))
        shards = Shards(table, [Part("large", region, Bits(rows[shard], whole["large"].dtype)), *more])
        parts.append(Patch(snapshot(shards, coded=coded)))
    joined = merge(*parts)
    assert joined.result == digest(whole)
    assert same(restored(joined.contents), whole)


def test_buckets_may_lie_on_disk() -> None:
    weights = some_weights()
    contents = snapshot(weights, to=BucketList(memory_bytes=0))
    assert same(restored(contents), weights)


def test_anchors_of_earlier_releases_are_restored() -> None:
    """They were compared with zeros, and have sparse entries where most elements are zero."""
    weights = some_weights()
    nothing = zeros(table_of(memories(weights)))
    for profile in ("auto", "raw", "ctx"):
        compared = diff(nothing, weights, profile=profile)
        assert any(head.layout.changes for head in compared.contents.heads)
        assert same(restored(compared.contents), weights)


def test_another_result_is_refused() -> None:
    """Bits that do not lead to the digest which the patch promises, and buckets that are damaged."""
    weights = some_weights()
    contents = snapshot(weights)
    lying = contents.ends._replace(result=contents.base)
    buckets = [bytes(contents.bucket(index)) for index in range(len(contents))]
    with pytest.raises(InvalidField, match="promises"):
        restored(Contents(contents.table, lying, BucketList.of(buckets)))
    damaged = bytearray(buckets[-1])
    damaged[len(damaged) // 2] ^= 1
    with pytest.raises(FormatError):
        restored(Contents(contents.table, contents.ends, BucketList.of([*buckets[:-1], bytes(damaged)])))
    with pytest.raises(FormatError):
        restored(Contents(contents.table, contents.ends, BucketList.of([*buckets, buckets[0]])))
