"""The ranks of an engine on a GPU, with parts of all shapes, and versions of their weights."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import sparserl
from sparserl import Region
from sparserl.integrations.ranks import _moved
from sparserl.patch import Patch, capture
from sparserl.patch.contents import BucketList, Contents
from sparserl.patch.slicing import PatchSlicer
from sparserl.targets.engine import EngineTarget
from sparserl.targets.pieces import Piece
from sparserl.targets.target import Change
from sparserl.weights.dtypes import BY_NAME, Bits
from sparserl.weights.holdings import Holdings
from sparserl.weights.region import row_major, whole
from sparserl.weights.shards import Part, Shards
from sparserl.weights.tensors import memories, table_of
from tests.patch.gpu.gpu_weights import CUDA, gpu_tensor, host_bits

pytest.importorskip("torch")

BF16 = BY_NAME["bfloat16"]
MANY = 100 if CUDA else 1
# By the dimension along which ranks have shares; they all have what has None.
SHAPES = {
    "down": ((2, 9 * MANY, 25), 2),
    "norm": ((70,), None),
    "o": ((21, 26 * MANY), 1),
    "q": ((13 * MANY, 30), 0),
    "scale": ((), None),
    "thin": ((40, 5), 1),
    "up": ((2, 25, 9 * MANY), 1),
}
COUNTS = "counts"  # of another dtype


def versions(count, share=0.04):
    """Versions of the weights in host memory, each with small steps from the one before."""
    rng = np.random.default_rng(0)
    weights = {name: Bits(rng.integers(0, 1 << 15, shape, np.uint16), BF16) for name, (shape, _) in SHAPES.items()}
    weights[COUNTS] = Bits(rng.integers(0, 1 << 30, (10, 7), np.uint32), BY_NAME["float32"])
    every = [weights]
    for _ in range(count - 1):
        weights = {}
        for name, bits in every[-1].items():
            moved = (rng.random(bits.array.shape) < share).astype(bits.dtype.uint)
            weights[name] = Bits(np.asarray(bits.array + moved * 3), bits.dtype)
        every.append(weights)
    return every


def region_of(name, shape, axis, rank, ranks):
    """The share of a rank, which is not as large as those of others where it does not come out even."""
    if axis is None:
        return whole(shape)
    edges = np.linspace(0, shape[axis], ranks + 1).astype(int).tolist()
    start = [0] * len(shape)
    start[axis] = edges[rank]
    size = [*shape]
    size[axis] = edges[rank + 1] - edges[rank]
    return Region(tuple(start), tuple(size))


def cut(bits, region):
    """A region of a tensor on the device."""
    return gpu_tensor(Bits(np.array(bits.array[region.slices], order="C"), bits.dtype))


class Rank:
    """One rank of an engine: all of its parts lie one behind the other, from an odd address on.

    tied: two names of the same memory. turned: parts whose dimensions lie in memory in the opposite order.
    """

    def __init__(self, weights, rank, ranks, tied=(), turned=()):
        self.regions = {}
        for name, bits in weights.items():
            _, axis = SHAPES.get(name, (None, 0))
            self.regions[name] = region_of(name, bits.array.shape, axis, rank, ranks)
        self.pieces = []
        at = {"float32": 1, "bfloat16": 1}
        for name, region in self.regions.items():
            room = weights[name].dtype.name
            strides = row_major(region.size[::-1])[::-1] if name in turned else row_major(region.size)
            self.pieces.append(Piece(name, region, room, at[room], strides))
            at[room] += region.numel
        if tied:
            (first,) = (piece for piece in self.pieces if piece.tensor == tied[0])
            self.pieces = [replace(first, tensor=p.tensor) if p.tensor == tied[1] else p for p in self.pieces]
        self.live = {
            name: gpu_tensor(Bits(np.zeros(n + 1, BY_NAME[name].uint), BY_NAME[name])) for name, n in at.items()
        }
        self.load(weights)
        self.target = EngineTarget(self.pieces, lambda: self.live, threads=1)
        self.target.attach(table_of(memories(weights)))

    def load(self, weights):
        for piece in self.pieces:
            piece.view(self.live).copy_(cut(weights[piece.tensor], piece.region))

    @property
    def places(self):
        return self.target.local_weights.places

    def fresh(self, weights):
        """Parts of its own of some version, on the device."""
        table = table_of(memories(weights))
        return Shards(table, [Part(p.tensor, p.region, cut(weights[p.tensor], p.region)) for p in self.pieces])

    def has(self, weights):
        return all(
            np.array_equal(host_bits(piece.view(self.live)).array, weights[piece.tensor].array[piece.region.slices])
            for piece in self.pieces
        )


class Ranks:
    """All ranks of an engine, which know what the others have."""

    def __init__(self, weights, ranks, **options):
        self.weights = weights
        self.table = table_of(memories(weights))
        self.ranks = [Rank(weights, rank, ranks, **options) for rank in range(ranks)]
        members = {}
        for rank, one in enumerate(self.ranks):
            for place in one.places:
                members[place] = (*members.get(place, ()), rank)
        for one in self.ranks:
            one.target.share(members)

    @property
    def holdings(self):
        return Holdings(self.table, {str(i): one.places for i, one in enumerate(self.ranks)})

    def patch(self, old, new, profile, holdings=None):
        return capture(old, new, profile=profile, holdings=holdings or self.holdings).encode()

    def prepare(self, new, patches, base=None, **fields):
        """What every rank has staged; together it leads to the digest of the new version."""
        digest = sparserl.digest(new)
        prepared = []
        for rank, one in enumerate(self.ranks):
            own = [fetched(one, patch) for patch in patches]
            given = {name: values[rank] for name, values in fields.items()}
            prepared.append(one.target.prepare(Change("run", 0.0, 1, digest, own, **given)))
        if len(self.ranks) > 1:
            sums = {rank: one.sums for rank, one in enumerate(prepared)}
            assert _moved(sums, sparserl.digest(self.weights if base is None else base)) == digest
        return prepared

    def has(self, weights):
        return all(one.has(weights) for one in self.ranks)

    def commit(self, prepared, old, new):
        """They have the new version afterwards, and have the old one when the commits are undone."""
        assert self.has(old)
        undos = [one.commit() for one in prepared]
        assert self.has(new)
        for undo in undos:
            undo()
        assert self.has(old)


def fetched(rank, patch):
    """The buckets of a patch that change something in the parts of a rank, which are those that it fetches."""
    contents = patch.contents
    if rank.target.local_weights.complete:
        return patch
    slicer = PatchSlicer(rank.target.local_weights)
    buckets = [contents.bucket(i) for i, head in enumerate(contents.heads) if slicer.touches(head)]
    return Patch(Contents(contents.table, contents.ends, BucketList.of(buckets), is_partial=True))
