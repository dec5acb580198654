"""Patches as files: literal bytes of the smallest one, round trips of header and footer, both ways to read."""

from __future__ import annotations

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparserl import Digest, Patch, Region, TensorSpec, TensorTable
from sparserl.errors import FormatError, InvalidField, RegionOverlap, Truncated
from sparserl.weights.dtypes import BY_NAME
from sparserl.wire import BytesInMemory, BytesOnDisk, PatchReader, PatchWriter
from sparserl.wire.cursor import checksum
from tests.hostile.samples import PROFILES, sample

F32 = BY_NAME["float32"]
TABLE = TensorTable([TensorSpec("a", F32, (4, 5)), TensorSpec("b", F32, (0, 2)), TensorSpec("c", F32, ())])
BASE, RESULT = Digest(1, 2), Digest((1 << 64) - 1, 3)


def written(buckets=(), covers=None, changed=0, table=TABLE):
    """A patch of buckets that are any bytes that end in a checksum."""
    file = io.BytesIO()
    writer = PatchWriter(file, table)
    for bucket in buckets:
        writer.add(bucket)
    writer.finish(BASE, RESULT, changed, covers)
    return file.getvalue()


def test_the_smallest_patch_is_these_bytes():
    """No tensors, no buckets: magic, an empty table, digests, the end."""
    header = b"SRLPATCH\x01\x00\x01\x06" + b"\x00\x00\x09\x00\x00\x00"
    header += checksum(header)
    footer = header[-16:] + bytes.fromhex("00000000000000010000000000000002ffffffffffffffff0000000000000003")
    footer += b"\x01\x00\x00"
    footer += checksum(footer)
    expected = header + footer + (67).to_bytes(8, "little") + b"SRLPEND\n"
    assert written(table=TensorTable([])) == expected
    patch = Patch.from_bytes(expected)
    assert (patch.base, patch.result, patch.changed, patch.buckets, len(patch.table)) == (BASE, RESULT, 0, 0, 0)
    assert patch.nbytes == len(expected)
    assert patch.table_nbytes == len(header)


@given(st.lists(st.binary(max_size=200), max_size=5), st.integers(0, 21))
def test_header_and_footer_round_trip(bodies, changed):
    """Table, digests, count and buckets come back as they were written, whatever is in the buckets."""
    buckets = [body + checksum(body) for body in bodies]
    reader = PatchReader(BytesInMemory(written(buckets, None, changed)))
    assert reader.table == TABLE
    assert (reader.footer.base, reader.footer.result, reader.footer.changed) == (BASE, RESULT, changed)
    assert reader.footer.covers is None
    assert [bytes(reader.bucket(i)) for i in range(len(reader))] == buckets


@pytest.mark.parametrize(
    "covers",
    [
        [],
        [(0, None)],
        [(1, None), (2, None)],
        [(0, Region((0, 0), (2, 5))), (0, Region((2, 0), (2, 4))), (2, None)],
        [(0, None), (1, None), (2, None)],
    ],
)
def test_covered_regions_round_trip(covers):
    """A patch for part of the weights says which."""
    patch = Patch.from_bytes(written(covers=covers))
    assert not patch.complete
    assert patch.covers == covers


@pytest.mark.parametrize(
    "covers",
    [[(0, None), (0, None)], [(2, None), (2, None)], [(0, Region((0, 0), (2, 5))), (0, Region((1, 4), (1, 1)))]],
)
def test_covered_regions_do_not_overlap(covers):
    """An element that is covered twice would count twice in the digest."""
    with pytest.raises(RegionOverlap):
        Patch.from_bytes(written(covers=covers))


@pytest.mark.parametrize("profile", PROFILES)
def test_memory_and_disk_read_alike(profile, tmp_path):
    """From bytes, from a view of bytes that can be written, and from a file: the same patch, byte for byte."""
    data = sample(profile).data
    path = tmp_path / "patch"
    path.write_bytes(data)
    for patch in (Patch.from_bytes(data), Patch.from_bytes(memoryview(bytearray(data))), Patch.open(path)):
        assert patch.to_bytes() == data
        assert [bytes(patch.contents.bucket(i)) for i in range(patch.buckets)] == [
            bytes(Patch.from_bytes(data).contents.bucket(i)) for i in range(4)
        ]
        patch.save(tmp_path / "again")
        assert (tmp_path / "again").read_bytes() == data


def test_a_file_may_be_unlinked_and_is_closed(tmp_path):
    """An open patch outlives its name, and lets go of its file when it goes."""
    data = sample("gap").data
    path = tmp_path / "patch"
    path.write_bytes(data)
    patch = Patch.open(path)
    path.unlink()
    assert patch.to_bytes() == data
    del patch  # a file left open would warn here, and warnings are errors


def test_what_is_no_patch_at_all(tmp_path):
    """Nothing, text, and other files are refused in words."""
    for data, match in ((b"", "magic needs 8 bytes, 0 are left"), (b"SRLP", "magic needs 8 bytes, 4 are left")):
        with pytest.raises(Truncated, match=match):
            Patch.from_bytes(data)
    with pytest.raises(InvalidField, match="not a sparserl patch"):
        Patch.from_bytes(b"PK\x03\x04 an archive, say, and quite a long one")
    path = tmp_path / "patch"
    path.write_bytes(b"")
    with pytest.raises(FormatError):
        Patch.open(path)
    with pytest.raises(FileNotFoundError):
        Patch.open(tmp_path / "nothing")


def test_buckets_are_read_by_name():
    """A reader gives out only the buckets that the footer names."""
    reader = PatchReader(BytesInMemory(written([b"x" + checksum(b"x")])))
    assert len(reader) == 1
    with pytest.raises(IndexError):
        reader.bucket(1)


def test_reading_a_file_needs_only_its_ends(tmp_path):
    """Opening reads header and footer, not the buckets between them."""
    body = bytes(1 << 20)
    path = tmp_path / "patch"
    path.write_bytes(written([body + checksum(body)]))

    class Watched(BytesOnDisk):
        total = 0

        def read(self, at: int, size: int) -> bytes:
            self.total += size
            return super().read(at, size)

    source = Watched(path)
    PatchReader(source)
    assert source.total < 1000
