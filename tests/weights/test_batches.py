"""Batches: small tensors together, large ones in pieces, in an order that patches depend on."""

from __future__ import annotations

import numpy as np
import pytest

from sparserl.weights.batches import batches
from sparserl.weights.dtypes import BY_NAME
from sparserl.weights.region import Region, whole
from sparserl.weights.table import TensorSpec, TensorTable

DTYPES = [BY_NAME[name] for name in ("int8", "bfloat16", "float32")]


def expected_batches(table, places, limit):
    """One place after the other: dtype, places and the offset of every batch."""
    drafts = {}
    for tensor, region in places:
        spec = table[tensor]
        box = region or whole(spec.shape)
        most = limit // spec.dtype.width
        if box.numel > most:
            offset = 0
            for piece in box.split(most):
                yield spec.dtype, [(tensor, piece)], offset
                offset += piece.numel
            continue
        if not box.numel:
            continue
        draft = drafts.setdefault(spec.dtype, [])
        if sum((r or whole(table[t].shape)).numel for t, r in draft) + box.numel > most:
            yield spec.dtype, draft, 0
            drafts[spec.dtype] = draft = []
        draft.append((tensor, region))
    for dtype, draft in drafts.items():
        yield dtype, draft, 0


@pytest.mark.parametrize("seed", range(20))
def test_batches_are_what_one_place_after_the_other_gives(seed):
    rng = np.random.default_rng(seed)
    sizes = rng.choice([0, 1, 5, 30, 64, 65, 200], int(rng.integers(0, 60)))
    specs = [TensorSpec(f"w{i:02}", DTYPES[int(rng.integers(3))], (int(n), 2)) for i, n in enumerate(sizes)]
    table = TensorTable(specs)
    places = [(i, Region((0, 0), (n, 1)) if n and rng.random() < 0.2 else None) for i, n in enumerate(sizes.tolist())]
    limit = int(rng.choice([8, 64, 256, 100_000]))
    actual = list(batches(table, iter(places), limit))
    expected = list(expected_batches(table, places, limit))
    assert [
        (batch.dtype, [*zip(batch.tensor.tolist(), batch.region, strict=True)], batch.offset) for batch in actual
    ] == expected
    for batch in actual:
        pairs = zip(batch.tensor.tolist(), batch.region, strict=True)
        boxes = [region or whole(table[tensor].shape) for tensor, region in pairs]
        assert batch.numel.tolist() == [box.numel for box in boxes]
        assert batch.elements * batch.dtype.width <= limit
