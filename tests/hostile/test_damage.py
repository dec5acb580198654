"""Bytes that were damaged on the way: cut short, flipped, put in the wrong place. None of it may get through."""

from __future__ import annotations

import pytest

from sparserl import Patch, SparserlError
from sparserl.errors import FormatError, InvalidField, RegionOverlap, Truncated
from tests.hostile import forged_patch
from tests.hostile.samples import ALL, PROFILES, sample


@pytest.mark.parametrize("name", ALL)
def test_the_samples_are_valid(name):
    """What is attacked here is a patch that applies, also when taken apart and put together again."""
    it = sample(name)
    assert it.run(it.data).already is False
    assert it.run(forged_patch.Patch.parse(it.data).encode()).already is False


@pytest.mark.parametrize("name", ALL)
def test_truncation_at_every_offset(name):
    """A patch that ends too early, anywhere, is refused when it is opened."""
    it = sample(name)
    for end in range(len(it.data)):
        with pytest.raises(FormatError):
            Patch.from_bytes(it.data[:end])


@pytest.mark.long
@pytest.mark.parametrize("name", ALL)
def test_every_single_bit_flipped(name):
    """No flip of one bit gets through to the weights, wherever it is.

    Patches differ in what lies under checksums alone: of others than the first, a bit of every byte is flipped.
    """
    it = sample(name)
    size = len(it.data)
    bits = range(8 * size) if name == ALL[0] else [8 * at + at % 8 for at in range(size)]
    survivors = []
    for bit in bits:
        data = bytearray(it.data)
        data[bit >> 3] ^= 1 << (bit & 7)
        try:
            it.run(bytes(data))
        except FormatError:
            continue
        survivors.append(bit)
    assert survivors == []


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.long) for name in ("ctx", "rans")])
def test_every_single_bit_flipped_under_checksums_that_hold(name):
    """What a bucket says is checked for itself: no flip of one bit of it does anything but what the patch promises."""
    it = sample(name)
    parts = forged_patch.Patch.parse(it.data)
    header, buckets = parts.header.encode(), [b.encode() for b in parts.buckets]
    survivors = 0
    for bit in range(8 * (len(buckets[1]) - 16)):
        body = bytearray(buckets[1][:-16])
        body[bit >> 3] ^= 1 << (bit & 7)
        mixed = [buckets[0], forged_patch.seal(bytes(body)), *buckets[2:]]
        try:
            it.run(header + b"".join(mixed) + parts.footer.encode(header, mixed))
        except SparserlError:
            continue
        survivors += 1
    assert survivors < 60  # estimates, and tiles and chunks that are larger than need be


@pytest.mark.parametrize("name", ALL)
def test_appended_and_prepended_bytes(name):
    """A patch with anything before or behind it is refused."""
    it = sample(name)
    for extra in (b"\0", b"\n", forged_patch.END, bytes(16), it.data):
        with pytest.raises(FormatError):
            it.run(it.data + extra)
        with pytest.raises(FormatError):
            it.run(extra + it.data)


@pytest.mark.parametrize("name", ALL)
def test_removed_and_repeated_bytes(name):
    """Bytes lost from or doubled in the middle shift everything behind them, and are noticed."""
    it = sample(name)
    for at in range(0, len(it.data), 7):
        for size in (1, 16):
            with pytest.raises(FormatError):
                it.run(it.data[:at] + it.data[at + size :])
            with pytest.raises(FormatError):
                it.run(it.data[: at + size] + it.data[at:])


@pytest.mark.parametrize("name", PROFILES)
def test_swapped_buckets(name):
    """Buckets in an order other than the footer's are refused."""
    it = sample(name)
    parts = forged_patch.Patch.parse(it.data)
    first, second, *rest = (b.encode() for b in parts.buckets)
    parts.buckets, parts.sealed = [], [first, second, *rest]
    assert it.run(parts.encode()).already is False
    parts.footer.sizes = [len(b) for b in parts.sealed]
    parts.footer.checksums = [b[-16:] for b in parts.sealed]
    parts.sealed = [second, first, *rest]
    with pytest.raises(FormatError):
        it.run(parts.encode())


def test_buckets_that_only_differ_in_place():
    """Two buckets of one length that change places are refused by name, not by luck."""
    it = sample("gap")
    parts = forged_patch.Patch.parse(it.data)
    twin = forged_patch.Patch.parse(it.data).buckets[1]
    twin.estimates = [(1, 101), (2, 90)]
    one, two = parts.buckets[1].encode(), twin.encode()
    assert len(one) == len(two)
    parts.buckets, parts.sealed = [], [two]
    parts.footer.checksums = [one[-16:]]
    with pytest.raises(InvalidField, match="bucket 0 is not the bucket that the footer lists"):
        it.run(parts.encode())


@pytest.mark.parametrize(("name", "other"), [("raw", "gap"), ("gap", "ulp"), ("ulp", "ctx"), ("ctx", "raw")])
def test_buckets_and_footers_of_another_patch(name, other):
    """The footer holds header and buckets together: none of the three can come from elsewhere."""
    it, that = sample(name), sample(other)
    mine, its = forged_patch.Patch.parse(it.data), forged_patch.Patch.parse(that.data)
    header, foreign = mine.header.encode(), [b.encode() for b in its.buckets]
    own = [b.encode() for b in mine.buckets]
    for index in range(len(own)):
        mixed = [*own[:index], foreign[index], *own[index + 1 :]]
        with pytest.raises(FormatError):
            it.run(header + b"".join(mixed) + mine.footer.encode(header, own))
    with pytest.raises(FormatError):
        it.run(header + b"".join(own) + its.footer.encode(header, foreign))


def test_a_footer_of_another_table():
    """A footer written for another header is refused even where everything else would fit."""
    it = sample("gap")
    parts, renamed = forged_patch.Patch.parse(it.data), forged_patch.Patch.parse(it.data)
    renamed.header.table.names[0] = b"attm"
    parts.footer.seal = renamed.header.encode()[-16:]
    with pytest.raises(InvalidField, match="belongs to another header"):
        it.run(parts.encode())


def test_a_bucket_sent_twice():
    """The same entries twice would be applied twice: refused, although every checksum holds."""
    it = sample("ulp")
    parts = forged_patch.Patch.parse(it.data)
    parts.sealed = [parts.buckets[1].encode()]
    parts.footer.changed = int(parts.footer.changed) + sum(int(v) >> 2 for v in parts.buckets[1].columns.values)
    with pytest.raises(RegionOverlap, match="'big'"):
        it.run(parts.encode())


@pytest.mark.parametrize("name", PROFILES)
def test_a_bucket_left_out(name):
    """A patch without one of its buckets is refused, also by a footer that does not mention it."""
    it = sample(name)
    for index in range(4):
        parts = forged_patch.Patch.parse(it.data)
        del parts.buckets[index]
        with pytest.raises(InvalidField, match="the footer says"):
            it.run(parts.encode())


@pytest.mark.parametrize("name", ALL)
def test_files_are_refused_like_bytes(name, tmp_path):
    """Reading from disk meets the same checks; a refused file is closed again."""
    it = sample(name)
    path = tmp_path / "patch"
    for end in range(0, len(it.data), 29):
        path.write_bytes(it.data[:end])
        with pytest.raises(FormatError):
            Patch.open(path)


def test_a_file_cut_while_it_is_open(tmp_path):
    """A file that shrinks after it was opened ends in an error, not in a wrong result."""
    it = sample("gap")
    path = tmp_path / "patch"
    path.write_bytes(it.data)
    patch = Patch.open(path)
    with path.open("r+b") as file:
        file.truncate(200)
    with pytest.raises(Truncated):
        list(patch)
    with pytest.raises(SparserlError):
        patch.to_bytes()
