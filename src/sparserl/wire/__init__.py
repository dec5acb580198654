"""Tables, buckets and patches as bytes: writing, bounded reading, limits. docs/reference/format.md is the contract."""

from __future__ import annotations

from . import limits
from .bucket import (
    LINK,
    EncodedStreams,
    Entries,
    Estimates,
    Head,
    begin_bucket,
    bucket_body,
    decode_bucket,
    encode_bucket,
    read_bucket,
)
from .check import HeadGatherer
from .file_section import FileSection, SourceSlice, encode_files, section_bytes
from .patchfile import Bytes, BytesInMemory, BytesOnDisk, Footer, PatchReader, PatchWriter, encode_footer, encode_header
from .table import EncodedTable, decode_table, decompress_table, encode_table, encoded_table, table_hash

__all__ = [
    "LINK",
    "Bytes",
    "BytesInMemory",
    "BytesOnDisk",
    "EncodedStreams",
    "EncodedTable",
    "Entries",
    "Estimates",
    "FileSection",
    "Footer",
    "Head",
    "HeadGatherer",
    "PatchReader",
    "PatchWriter",
    "SourceSlice",
    "begin_bucket",
    "bucket_body",
    "decode_bucket",
    "decode_table",
    "decompress_table",
    "encode_bucket",
    "encode_files",
    "encode_footer",
    "encode_header",
    "encode_table",
    "encoded_table",
    "limits",
    "read_bucket",
    "section_bytes",
    "table_hash",
]
