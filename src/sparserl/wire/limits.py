"""Hard limits of the format. They bound what a reader allocates before it has seen whether the bytes are true."""

from __future__ import annotations

FORMAT_VERSION = 1

NAME_BYTES = 1 << 12
RANK = 32
TENSORS = 1 << 20
TENSOR_ELEMENTS = 1 << 48
TABLE_BYTES = 1 << 26
TABLE_DIMENSIONS = 1 << 22  # of all tensors
TABLE_ELEMENTS = 1 << 56  # of all tensors: sums over the table fit 64 bits

REGION_ELEMENTS = 1 << 31  # a position inside a region fits 32 bits; larger tensors take several regions
REGIONS_PER_TENSOR = 1 << 16
REGIONS_COVERED = 1 << 20
BUCKET_BYTES = 1 << 28
BUCKET_CHANGES = 1 << 24
BUCKET_DENSE_BYTES = 1 << 24
ENTRIES = 1 << 20
ENTRY_BYTES = 1 << 23
TILES = 1 << 20
STREAMS = 64
CHUNKS = 1 << 16  # of all streams of a bucket

MIN_TILE_LOG = 10
MAX_TILE_LOG = 31
MIN_CHUNK_LOG = 8
MAX_CHUNK_LOG = 24
FOOTER_BYTES = 1 << 26
BUCKETS = 1 << 20
PATCH_ENTRIES = 1 << 21  # of all buckets
PATCH_FILES = 1 << 12  # behind a patch, and as many that it removes
PATCH_FILE_BYTES = 1 << 28  # of all of them
FILE_DIRECTORY_BYTES = 1 << 24
COMPARISONS = 1 << 21  # of entries with the covered regions of their tensor
