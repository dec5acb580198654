"""What the limits promise one another: no sum of things within their limits overflows or surprises."""

from __future__ import annotations

from sparserl.plan.buckets import CHUNK_LOG
from sparserl.plan.routing import BUCKET_CHANGES, BUCKET_PAYLOAD_BYTES
from sparserl.wire import limits


def test_sums_fit_64_bits():
    """Elements of a table in bytes, elements of a bucket's entries, lengths of all buckets: all are below 2^63."""
    assert limits.TABLE_ELEMENTS * 8 < 1 << 63
    assert limits.ENTRIES * limits.REGION_ELEMENTS * 8 < 1 << 63
    assert limits.BUCKETS * limits.BUCKET_BYTES < 1 << 63
    assert limits.ENTRIES * limits.TENSORS < 1 << 63


def test_positions_fit_32_bits():
    """Positions and gaps are held in 32 bits."""
    assert limits.REGION_ELEMENTS <= 1 << 32
    assert 1 << limits.MAX_TILE_LOG <= limits.REGION_ELEMENTS


def test_every_table_can_be_changed_in_one_bucket():
    """As many entries as tensors fit a bucket and a patch."""
    assert limits.TENSORS <= limits.ENTRIES <= limits.PATCH_ENTRIES
    assert 2 * limits.ENTRIES <= limits.ENTRY_BYTES


def test_the_planner_stays_inside():
    """What the planner fills a bucket with is well within what a reader takes."""
    assert BUCKET_CHANGES <= limits.BUCKET_CHANGES
    assert BUCKET_PAYLOAD_BYTES <= limits.BUCKET_DENSE_BYTES
    assert BUCKET_PAYLOAD_BYTES <= limits.BUCKET_BYTES
    assert limits.MIN_CHUNK_LOG <= CHUNK_LOG <= limits.MAX_CHUNK_LOG
    streams_of_chunks = 12 * (limits.BUCKET_CHANGES >> CHUNK_LOG)
    assert streams_of_chunks <= limits.CHUNKS
