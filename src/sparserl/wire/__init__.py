"""Tables, buckets and patches as bytes: writing, bounded reading, limits. docs/reference/format.md is the contract."""

from __future__ import annotations

from . import limits
from .bucket import (
    LINK,
    Entries,
    Estimates,
    Head,
    Laid,
    begin_bucket,
    decode_bucket,
    encode_bucket,
    read_bucket,
    unsealed,
)
from .check import gather_heads
from .patchfile import Bytes, Footer, InMemory, InParts, OnDisk, PatchReader, PatchWriter
from .table import compress_table, decode_table, decompress_table, encode_table, table_hash

__all__ = [
    "LINK",
    "Bytes",
    "Entries",
    "Estimates",
    "Footer",
    "Head",
    "InMemory",
    "InParts",
    "Laid",
    "OnDisk",
    "PatchReader",
    "PatchWriter",
    "begin_bucket",
    "compress_table",
    "decode_bucket",
    "decode_table",
    "decompress_table",
    "encode_bucket",
    "encode_table",
    "gather_heads",
    "limits",
    "read_bucket",
    "table_hash",
    "unsealed",
]
