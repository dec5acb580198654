"""The directory of a bucket, read at once: the numbers that the cursor reads one by one, or nothing."""

from __future__ import annotations

import numpy as np
import pytest

from sparserl.kernels.cpu.directory import read_directory
from sparserl.wire.cursor import varint

STREAMS = [(0, 1, [5]), (4, 2, [300, 0, 70_000]), (64, 0, [1] * 40)]


def encoded(streams):
    return b"".join(
        bytes((id, coder)) + varint(len(lengths)) + b"".join(map(varint, lengths)) for id, coder, lengths in streams
    )


def read(data, at=0, streams=3, room=100):
    rows, lengths = np.zeros((streams, 4), np.uint64), np.zeros(room, np.uint64)
    end = read_directory(np.frombuffer(data, np.uint8), at, rows, lengths)
    return end, rows.tolist(), lengths.tolist()


def test_all_rows_and_lengths():
    """Ids, coders, numbers of chunks, what their lengths add up to, and all lengths; whatever stands around it."""
    data = encoded(STREAMS)
    end, rows, lengths = read(b"\xff\xff" + data + bytes(80_000), 2)
    assert end == 2 + len(data)
    assert rows == [[id, coder, len(each), sum(each)] for id, coder, each in STREAMS]
    every = [n for *_, each in STREAMS for n in each]
    assert lengths[: len(every)] == every


@pytest.mark.parametrize(
    ("data", "streams", "room"),
    [
        (encoded(STREAMS)[:-1], 3, 100),  # ends too early
        (encoded(STREAMS) + bytes(80_000), 3, 43),  # more chunks than there is room for
        (b"\x80\x01\x00\x01\x05" + bytes(9), 1, 100),  # an id above 127
        (b"\x00\x00\x81\x00\x05" + bytes(9), 1, 100),  # a number that is not canonical
        (b"\x00\x00\x01\x7f" + bytes(9), 1, 100),  # a chunk that is longer than all there is
        (b"", 1, 100),
    ],
)
def test_anything_else_is_refused(data, streams, room):
    """Where a number is missing, not canonical or too large, there is no directory."""
    assert read(data, 0, streams, room)[0] == -1
