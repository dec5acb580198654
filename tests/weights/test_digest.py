"""The digest: what changes it, what does not, and that it adds up."""

from __future__ import annotations

import itertools

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import sparserl
from sparserl import Digest, digest
from sparserl.kernels import reference
from sparserl.weights.digest import element_sums, table_digest
from sparserl.weights.dtypes import BY_NAME, DTYPES, Bits
from sparserl.weights.local import LocalWeights
from sparserl.weights.region import Region, whole
from sparserl.weights.shards import Shards
from sparserl.weights.tensors import memories, table_of
from tests.effort import examples

BF16 = BY_NAME["bfloat16"]


def bf16(*patterns):
    return Bits(np.array(patterns, np.uint16), BF16)


def weights(seed=0):
    """Tensors of several dtypes and ranks, an empty one and a scalar among them."""
    rng = np.random.default_rng(seed)
    return {
        "a": rng.integers(0, 2**32, (7, 5), np.uint32).view(np.float32),
        "b": Bits(rng.integers(0, 2**16, (33,), np.uint16), BF16),
        "c": rng.integers(0, 256, (3, 4, 5), np.uint8),
        "d": rng.integers(0, 2**63, (), np.int64),
        "e": np.zeros((0, 4), np.float16),
        "f": rng.integers(0, 2**16, (70,), np.uint16),
    }


def specified(held):
    """The digest by the specification: one element after the other, through the table's keys."""
    memory = memories(held)
    table = table_of(memory)
    total = Digest()
    for spec, key in zip(table.specs, table.keys, strict=True):
        total += Digest(*reference.digest(key, 0, memory[spec.name].view()))
        term = reference.mix(key, np.array([2**64 - 1], np.uint64), np.zeros(1, np.uint8))
        total += Digest(*(int(x[0]) for x in term))
    return total


def test_it_is_what_the_specification_says():
    """Elements through the reference mix, and one term per tensor for its name, dtype and shape."""
    assert digest(weights()) == specified(weights())


def test_it_stays_what_it_was():
    """The digest is on the wire: these values hold for ever."""
    assert digest({}).hex == "00000000000000000000000000000000"
    assert digest({"w": np.arange(5, dtype=np.float32)}) == specified({"w": np.arange(5, dtype=np.float32)})
    assert digest({"w": np.arange(5, dtype=np.float32)}).hex == "1e6ae17addede70300c42199653d757c"


DIFFERENT = {
    "two elements swapped": ({"w": bf16(1, 2, 3)}, {"w": bf16(1, 3, 2)}),
    "two elements of different tensors swapped": ({"v": bf16(1), "w": bf16(2)}, {"v": bf16(2), "w": bf16(1)}),
    "a name": ({"w": bf16(1, 2)}, {"x": bf16(1, 2)}),
    "names swapped": ({"v": bf16(1, 2), "w": bf16(3, 4)}, {"w": bf16(1, 2), "v": bf16(3, 4)}),
    "a shape": ({"w": np.zeros((2, 3), np.float32)}, {"w": np.zeros((3, 2), np.float32)}),
    "a rank": ({"w": np.zeros((6,), np.float32)}, {"w": np.zeros((1, 6), np.float32)}),
    "a scalar's rank": ({"w": np.zeros((), np.float32)}, {"w": np.zeros((1,), np.float32)}),
    "a dtype of the same width": ({"w": np.zeros(4, np.float32)}, {"w": np.zeros(4, np.int32)}),
    "a dtype of another width": ({"w": np.zeros(4, np.float32)}, {"w": np.zeros(4, np.float64)}),
    "bf16 and fp16": ({"w": bf16(0, 1)}, {"w": np.array([0, 1], np.uint16).view(np.float16)}),
    "an empty tensor's presence": ({"w": bf16(1)}, {"w": bf16(1), "x": bf16()}),
    "an empty tensor's shape": ({"w": np.zeros((0, 3))}, {"w": np.zeros((3, 0))}),
    "an empty tensor's dtype": ({"w": np.zeros(0, np.float32)}, {"w": np.zeros(0, np.float64)}),
    "the sign of zero": ({"w": np.zeros(3, np.float32)}, {"w": np.array([0.0, -0.0, 0.0], np.float32)}),
    "a NaN's payload": ({"w": bf16(0x7FC0)}, {"w": bf16(0x7FC1)}),
    "a NaN's sign": ({"w": bf16(0x7FC0)}, {"w": bf16(0xFFC0)}),
    "a zero more": ({"w": bf16(0, 0)}, {"w": bf16(0, 0, 0)}),
    "weights and none": ({"w": bf16()}, {}),
    "where one name ends": ({"a": bf16(1), "ab": bf16(2)}, {"a": bf16(2), "ab": bf16(1)}),
    "the same change twice": ({"w": bf16(5, 5)}, {"w": bf16(6, 6)}),
    "elements rotated": ({"w": bf16(1, 2, 3, 4)}, {"w": bf16(2, 3, 4, 1)}),
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_it_tells_apart(what):
    """Each of these changes both sums."""
    a, b = (digest(w) for w in DIFFERENT[what])
    assert a.first != b.first
    assert a.second != b.second


def test_every_single_bit_counts():
    """Each one-bit change of some weights has a digest of its own."""
    some = {name: weights()[name] for name in ("b", "c", "d")}
    seen = {digest(some)}
    changes = 0
    for memory in memories(some).values():
        data = np.ndarray(memory.view().nbytes, np.uint8, memory.owner.data)
        for bit in range(8 * data.size):
            data[bit // 8] ^= 1 << (bit % 8)
            seen.add(digest(some, threads=1))
            data[bit // 8] ^= 1 << (bit % 8)
            changes += 1
    assert len(seen) == changes + 1 == 33 * 16 + 60 * 8 + 64 + 1


def test_the_order_of_the_mapping_is_irrelevant():
    """Names decide, not the order in which they come."""
    expected = digest(weights())
    for order in itertools.islice(itertools.permutations(weights()), 0, 720, 37):
        assert digest({name: weights()[name] for name in order}) == expected


def test_the_layout_in_memory_is_irrelevant():
    """Transposed, strided, reversed and unaligned memory with the same elements has the same digest."""
    values = weights()["a"]
    wide = np.zeros((14, 10), np.float32)
    wide[::2, ::2] = values
    shifted = np.ndarray((7, 5), np.float32, np.zeros(7 * 5 * 4 + 1, np.uint8), offset=1)
    shifted[...] = values
    expected = digest({"a": values})
    for other in (
        np.asfortranarray(values),
        np.ascontiguousarray(values[::-1, ::-1])[::-1, ::-1],
        wide[::2, ::2],
        shifted,
        torch.from_numpy(values.copy()),
        torch.from_numpy(np.ascontiguousarray(values.T)).T,
    ):
        assert digest({"a": other}) == expected


@pytest.mark.parametrize("dtype", DTYPES, ids=repr)
def test_torch_numpy_and_bits_agree(dtype):
    """The same patterns have the same digest in whatever they are held."""
    rng = np.random.default_rng(3)
    bits = rng.integers(0, 256, 6 * dtype.width, np.uint8).view(dtype.uint).reshape(2, 3)
    expected = digest({"w": Bits(bits, dtype)})
    assert digest({"w": torch.from_numpy(bits.copy()).view(getattr(torch, dtype.name))}) == expected
    kind = getattr(ml_dtypes, dtype.name, None) or getattr(np, dtype.name, None)
    if kind is not None:
        assert digest({"w": bits.view(kind)}) == expected
    assert digest({"w": Bits(bits, dtype)}) == specified({"w": Bits(bits, dtype)})


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_threads_and_pieces_are_irrelevant(threads, monkeypatch):
    """However the work is cut, the sums are the same."""
    expected = digest(weights())
    for limit in (8, 40, 64, 1000):
        monkeypatch.setattr("sparserl.weights.batches.PIECE_BYTES", limit)
        assert digest(weights(), threads=threads) == expected


def test_progress_counts_all_bytes():
    """The bytes reported add up to the dense size."""
    seen = []
    digest(weights(), progress=seen.append)
    assert sum(seen) == table_of(memories(weights())).dense_bytes


@st.composite
def partitions(draw, region, depth=4):
    """Random boxes that together are a region, each once: cut in two, again and again."""
    axes = [d for d, n in enumerate(region.size) if n > 1]
    if not axes or depth == 0 or draw(st.integers(0, 4)) == 0:
        return [region]
    axis = draw(st.sampled_from(axes))
    at = draw(st.integers(1, region.size[axis] - 1))
    low = list(region.size)
    low[axis] = at
    high, start = list(region.size), list(region.start)
    high[axis] -= at
    start[axis] += at
    left, right = Region(region.start, tuple(low)), Region(tuple(start), tuple(high))
    return draw(partitions(left, depth - 1)) + draw(partitions(right, depth - 1))


@given(st.data(), st.lists(st.integers(1, 9), min_size=1, max_size=4).map(tuple), st.sampled_from(DTYPES))
@settings(deadline=None, max_examples=examples(120))
def test_shards_add_up(data, shape, dtype):
    """The sums over any partition into boxes, each held as memory of its own, add up to those of the whole."""
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    bits = rng.integers(0, 256, int(np.prod(shape)) * dtype.width, np.uint8).view(dtype.uint).reshape(shape)
    every = {"w": Bits(bits, dtype)}
    table = table_of(memories(every))
    parts = data.draw(partitions(whole(shape)))
    total = table_digest(table)
    for part in parts:
        shard = {"w": Bits(bits[part.slices].copy(), dtype)}
        held = LocalWeights.of(Shards.of(table, shard, {"w": part}))
        total += element_sums(held, held.places)
    assert total == digest(every)
    held = LocalWeights.of(every, table)
    assert table_digest(table) + element_sums(held, [(0, part) for part in parts]) == digest(every)


@given(st.integers(0, 2**32), st.sampled_from(DTYPES), st.sampled_from([0.0, 0.01, 0.3, 1.0]))
@settings(deadline=None, max_examples=examples(80))
def test_an_update_in_the_changed_elements_equals_a_full_read(seed, dtype, density):
    """The digest that a diff tracks is the one that a full read of the new weights gives."""
    rng = np.random.default_rng(seed)
    old = rng.integers(0, 256, 300 * dtype.width, np.uint8).view(dtype.uint).reshape(20, 15)
    flips = rng.integers(0, 256, old.nbytes, np.uint8).view(dtype.uint).reshape(old.shape)
    new = np.where(rng.random(old.shape) < density, old ^ flips, old)
    patch = sparserl.diff({"w": Bits(old, dtype)}, {"w": Bits(new, dtype)})
    assert patch.base == digest({"w": Bits(old, dtype)})
    assert patch.result == digest({"w": Bits(new, dtype)})
    held = digest({"w": Bits(old, dtype)})
    assert sparserl.diff({"w": Bits(old, dtype)}, {"w": Bits(new, dtype)}, base_digest=held).result == patch.result


def test_as_text_and_bytes():
    """32 hexadecimal digits or 16 bytes, there and back; sums wrap at 64 bits."""
    value = digest(weights())
    assert Digest.from_hex(value.hex) == Digest.from_bytes(value.to_bytes()) == value
    assert str(value) == value.hex
    assert len(value.hex) == 32
    assert value + Digest() == value
    assert value - value == Digest()
    most = Digest(2**64 - 1, 2**64 - 1)
    assert most + Digest(1, 2) == Digest(0, 1)
    assert Digest(0, 0) - Digest(1, 2) == Digest(2**64 - 1, 2**64 - 2)
    for text in ("", "00", value.hex + "00", "zz" * 16):
        with pytest.raises(ValueError, match=r"hex|digits"):
            Digest.from_hex(text)
