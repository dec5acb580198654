"""Small valid patches to attack: every profile and coder, dense entries, regions, several dtypes, several buckets."""

from __future__ import annotations

import io
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np

import sparserl
from sparserl import Bits, Patch, Region, codec
from sparserl.codec import Classes, Stream, value
from sparserl.codec.coders import Rans, Stored
from sparserl.plan import steps_between
from sparserl.weights.digest import digest
from sparserl.weights.dtypes import BY_NAME
from sparserl.weights.local import LocalWeights
from sparserl.weights.tensors import memories, require_like
from sparserl.wire import Entries, Head, PatchWriter, encode_bucket
from tests.boxed_shards import diff_shards

PROFILES = ("raw", "gap", "ulp", "ctx")
ALL = (*PROFILES, "rans", "part")  # `ctx` in the other coder, and a patch for some regions
BF16 = BY_NAME["bfloat16"]
Place = tuple[str, Region | None, bool]  # tensor, region, dense

BUCKETS: tuple[tuple[Place, ...], ...] = (
    (
        ("attn", Region((0, 0), (10, 20)), False),
        ("attn", Region((10, 5), (14, 10)), False),
        ("one", None, False),
    ),
    (("big", None, False),),
    (("f64", Region((0, 0, 0), (1, 3, 4)), False), ("f64", Region((1, 0, 0), (1, 3, 4)), True)),
    (("i8", None, True),),
)
TILE_LOG = 10
CLASSES = {2: Classes(7, (100, 200)), 4: Classes(22, (251, 254)), 8: Classes(53, (511,)), 1: Classes(0, (50,))}
STORED = frozenset((3, 5, 7, 9, *range(65, 96, 2)))  # streams that may take no other coder


@cache
def _base() -> dict[str, np.ndarray]:
    random = np.random.default_rng(7)
    return {
        "attn": random.integers(0, 1 << 16, (24, 20), np.uint16),
        "big": random.standard_normal(2100).astype(np.float32),
        "f64": random.standard_normal((2, 3, 4)),
        "i8": random.integers(-128, 127, 30, np.int8),
        "none": np.empty((0, 4), np.float32),
        "one": np.array(0x3F80, np.uint16),
    }


def weights() -> dict[str, Any]:
    """Weights with all that is awkward: bf16, a scalar, an empty tensor, a tensor of several tiles."""
    return {n: Bits(a.copy(), BF16) if a.dtype == np.uint16 else a.copy() for n, a in _base().items()}


def views(held: dict[str, Any]) -> dict[str, np.ndarray]:
    """Unsigned views that share the weights' memory."""
    return {name: memory.view() for name, memory in memories(held).items()}


def changed() -> dict[str, Any]:
    """The result: the weights after some changes in each of the regions above."""
    out = weights()
    bits = views(out)
    random = np.random.default_rng(8)
    for places in BUCKETS:
        for name, region, dense in places:
            part = bits[name] if region is None else bits[name][region.slices]
            some = random.permutation(part.size)[: part.size if dense else min(part.size, 12)]
            where = np.zeros(part.size, bool)
            where[some] = True
            part[where.reshape(part.shape)] += random.integers(1, 4, some.size).astype(part.dtype)
    bits["big"][[0, 1023, 1024, 2047, 2099]] ^= 1  # the edges of its tiles
    bits["f64"][0, 0, 0] ^= np.uint64(1 << 63)  # a step that needs all of its bits
    return out


def snapshot(held: dict[str, Any]) -> bytes:
    """All bits of weights, to see whether any was touched."""
    return b"".join((a.array if isinstance(a, Bits) else a).tobytes() for a in held.values())


@dataclass(frozen=True)
class Sample:
    """A valid patch and what it must do."""

    name: str
    data: bytes
    result: bytes

    def run(self, data: bytes) -> sparserl.Applied:
        """Everything a reader does, on bytes that may be anything. A refusal must leave the weights alone."""
        held = weights()
        before = snapshot(held)
        try:
            patch = Patch.from_bytes(data)
            assert len(patch.contents.heads) == patch.buckets
            require_like(patch.table, memories(held))
            for index in range(patch.buckets):
                part = patch.contents.decode(index, LocalWeights.of(held, patch.table))
                assert part.positions.size == part.sparse_count.sum()
            return self._checked(patch.apply(held, threads=1), held, patch)
        except sparserl.SparserlError:
            assert snapshot(held) == before
            raise

    def _checked(self, applied: sparserl.Applied, held: dict[str, Any], patch: Patch) -> sparserl.Applied:
        """What was applied is what was promised, and the truth where the patch promises that."""
        after = snapshot(held)
        if patch.result == Patch.from_bytes(self.data).result:
            assert after == self.result
        if patch.complete:
            assert digest(held, threads=1) == patch.result
        return applied


@cache
def sample(profile: str) -> Sample:
    """A valid patch, read once, so that what is compiled for it does not count against the time of a test."""
    it = _sample(profile)
    it.run(it.data)
    return it


def _sample(profile: str) -> Sample:
    """The patch of all buckets, in one profile.

    Streams are stored as they are; those of `rans` are of profile `ctx` and go through that coder, where they may.
    `part` is a patch that covers only some regions.
    """
    if profile == "part":
        return _part()
    old, new = weights(), changed()
    table = sparserl.tensor_table(old)
    file = io.BytesIO()
    writer = PatchWriter(file, table)
    total = 0
    for places in BUCKETS:
        bucket, count = _bucket(profile, table, places, views(old), views(new), writer.hash)
        writer.add(bucket)
        total += count
    writer.finish(digest(old), digest(new), total, None)
    return Sample(profile, file.getvalue(), snapshot(new))


def _bucket(
    name: str, table: sparserl.TensorTable, places: tuple[Place, ...], old: Any, new: Any, hash: bytes
) -> tuple[bytes, int]:
    profile, dtype = codec.profile_by_name("ctx" if name == "rans" else name), table[table.index[places[0][0]]].dtype
    counts, numel, positions, words, dense, before = [], [], [], [], [], []
    for tensor, region, is_dense in places:
        a, b = ((w[tensor] if region is None else w[tensor][region.slices]).ravel() for w in (old, new))
        where = np.flatnonzero(a != b)
        counts.append(where.size)
        numel.append(a.size)
        if is_dense:
            dense.append(b)
        else:
            before.append(a.copy())
            positions.append(where.astype(np.uint32))
            words.append(b[where] if profile.absolute else steps_between(dtype, a[where], b[where]))
    entries = Entries(
        np.array([table.index[t] for t, _, _ in places], np.int64),
        np.array(counts, np.int64),
        np.array([d for _, _, d in places], bool),
        [r for _, r, _ in places],
        np.array(numel, np.int64),
    )
    head = Head(profile, dtype, TILE_LOG, 8, ((1, 100), (2, 90)), entries)
    streams: codec.Chunks = {}
    addresses = np.array([a.ctypes.data for a in before], np.int64)
    layout = replace(head.layout, old_addresses=addresses, classes=CLASSES[dtype.width])
    if positions:
        streams |= profile.encode(layout, positions, words)
    if dense:
        write, stream = (
            (value.write_planes, Stream.DENSE_PLANE) if profile.planar else (value.write_words, Stream.DENSE)
        )
        streams |= write(head.layout, np.concatenate(dense), stream)
    coded = {}
    for id, chunks in streams.items():
        coder = Rans() if name == "rans" and id not in STORED and not Stream.is_dense(id) else Stored()
        if any(map(len, chunks)):
            coded[id] = coder, [coder.encode(chunk) for chunk in chunks]
    return encode_bucket(head, coded, hash), sum(counts)


def _part() -> Sample:
    """A patch that covers a box of one tensor and all of another."""
    old, new = views(weights()), views(changed())
    box = Region((0, 0), (10, 20))
    shards = [{"attn": Bits(w["attn"][box.slices].copy(), BF16), "i8": w["i8"].view(np.int8)} for w in (old, new)]
    patch = diff_shards(*shards, table=sparserl.tensor_table(weights()), regions={"attn": box}, profile="gap")
    held = weights()
    views(held)["attn"][box.slices] = new["attn"][box.slices]
    views(held)["i8"][...] = new["i8"]
    return Sample("part", patch.to_bytes(), snapshot(held))
