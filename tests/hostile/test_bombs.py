"""Small files that ask for much memory or time. What the limits promise is measured, in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from sparserl import Patch
from sparserl.errors import InvalidField, Truncated
from tests.hostile.bombs import BOMBS
from tests.hostile.samples import sample
from tests.hostile.watched_runs import ways

pytestmark = pytest.mark.alone

MEMORY = 768 << 20  # what docs/reference/format.md promises
SMALL = 8192

ENDS = {
    "table_of_zeros": "InvalidField: tensor table: names are not in strictly rising order",
    "table_longer_than_it_says": "InvalidField: a zstd chunk does not decode to 100 bytes",
    "table_shorter_than_it_says": "InvalidField: a zstd chunk holds 1 bytes instead of 67108864",
    "table_of_a_million_tensors": "valid: 0 buckets, 1048576 tensors",
    "table_of_many_tensors": "valid: 0 buckets, 65536 tensors",
    "table_of_a_million_equal_names": "InvalidField: tensor table: names are not in strictly rising order",
    "table_frame_with_a_huge_window": "InvalidField: a zstd chunk",
    "table_frame_with_a_huge_content_size": "InvalidField: a zstd chunk carries fields",
    "entries_all_alike": "LimitExceeded: bucket 0: entry table: 1048576 regions of one tensor",
    "entries_in_many_buckets": "LimitExceeded: bucket 0: entry table: 1048576 regions of one tensor",
    "entries_of_many_tensors_in_many_buckets": "LimitExceeded: bucket 32: 2162688 entries in the patch",
    "entries_with_boxes": "LimitExceeded: bucket 0: entry table: 1048576 regions of one tensor",
    "entries_with_boxes_of_many_dimensions": "LimitExceeded: bucket 0: entry table: 127100 regions of one tensor",
    "entries_side_by_side": "Truncated: bucket 0: stream 1",
    "entries_in_pairs": "Truncated: bucket 0: stream 1",
    "entries_at_corners": "Truncated: bucket 0: stream 1",
    "entries_entangled": "LimitExceeded: 64827 regions of a tensor are interleaved so closely",
    "entries_entangled_in_many_tensors": "LimitExceeded: 64800 regions of a tensor are interleaved so closely",
    "boxes_of_many_dimensions_in_many_buckets": "valid: 4 buckets, 4 tensors",
    "boxes_and_changes_in_one_bucket": "valid: 1 buckets, 16 tensors",
    "buckets_of_one_change": "valid: 2048 buckets, 1 tensors",
    "dense_entries_of_one_element": "valid: 1 buckets, 16 tensors",
    "windows_of_nothing": "valid: 1 buckets, 4 tensors",
    "changes_in_no_bytes": "valid: 1 buckets",
    "changes_without_streams": "Truncated: bucket 0: stream 6",
    "changes_past_the_limit": "LimitExceeded: bucket 0: 16777217 changes",
    "raw_words_in_a_frame": "InvalidField: bucket 0: sparse entry 0: positions",
    "tokens_longer_than_due": "InvalidField: bucket 0: stream 6: a zstd chunk does not decode to 256 bytes",
    "tiles_in_no_bytes": "valid: 1 buckets",
    "classes_in_no_bytes": "valid: 1 buckets",
    "classes_in_many_tiles": "valid: 1 buckets",
    "classes_past_the_tiles": "LimitExceeded: bucket 0: 1048577 tiles",
    "classes_without_streams": "Truncated: bucket 0: stream 4",
    "classes_of_many_entries": "InvalidField: bucket 0: the changes of all tiles do not add up",
    "symbols_that_end_too_early": "InvalidField: bucket 0: stream 6: a rans chunk has no valid table",
    "symbols_of_a_table_without_end": "InvalidField: bucket 0: stream 6: a rans chunk has no valid table",
    "dense_of_zeros": "valid: 1 buckets",
    "chunks_of_nothing": "InvalidField: bucket 0: stream 6",
    "chunks_of_nothing_in_every_stream": "LimitExceeded: bucket 0: chunk count of stream 17",
    "covers_all_alike": "LimitExceeded: patch footer: 1048576 regions of one tensor",
    "covers_of_many_dimensions": "valid: 0 buckets, 2 tensors",
    "covers_side_by_side": "LimitExceeded: patch footer: 1048576 regions of one tensor",
    "footer_of_a_million_buckets": "InvalidField: bucket 0 is not the bucket that the footer lists",
}


def watch(*options):
    """What each way of reading each bomb took, and how much slower than it should be this processor is."""
    environment = {**os.environ, "SPARSERL_THREADS": "1", "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    command = [sys.executable, "-m", "tests.hostile.watched_runs", *options]
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout.splitlines()
    first, *records = map(json.loads, done)
    return first["slowness"], {(record["name"], record["way"]): record for record in records}


@pytest.fixture(scope="module")
def reads():
    return watch("--reads")


@pytest.fixture(scope="module")
def other_ways():
    return watch()


def test_every_bomb_has_an_end():
    """No bomb goes unwatched."""
    assert ENDS.keys() == BOMBS.keys()


@pytest.mark.parametrize("name", ENDS)
def test_a_bomb_is_refused_for_what_is_wrong_with_it(reads, name):
    """It says so, or it is valid."""
    assert reads[1][name, "read"]["ended"].startswith(ENDS[name])


@pytest.mark.parametrize("name", ENDS)
def test_reading_a_bomb_is_bounded(reads, name):
    """It ends within a second and 2 µs a byte, and within 768 MiB, or what the weights take."""
    require_bounded(reads[0], reads[1][name, "read"])


@pytest.mark.long
@pytest.mark.parametrize(("name", "way"), [(name, way) for name in ENDS for way in ways(name) if way != "read"])
def test_whatever_is_done_with_a_bomb_is_bounded(other_ways, name, way):
    """As reading it is."""
    require_bounded(other_ways[0], other_ways[1][name, way])


def require_bounded(slowness, record):
    assert not record["ended"].startswith("died")
    assert record["seconds"] < slowness * (1 + 2e-6 * record["size"] + record["weights"])
    assert record["grown"] < MEMORY + record["bytes"]


def test_small_files_stay_small(reads):
    """A file of a few kilobytes cannot make the reader take more than a bucket or a table may hold."""
    small = [record for record in reads[1].values() if record["size"] <= SMALL]
    assert len(small) > 10
    assert max(record["grown"] for record in small) < MEMORY


def test_a_file_of_a_tebibyte_of_nothing(tmp_path):
    """Only the two ends of a file are read before it is refused."""
    path = tmp_path / "patch"
    with path.open("wb") as file:
        try:
            file.truncate(1 << 40)
        except OSError:
            pytest.skip("this filesystem has no files of a tebibyte")
    with pytest.raises(InvalidField, match="not a sparserl patch"):
        Patch.open(path)
    path.write_bytes(sample("gap").data)
    with path.open("r+b") as file:
        file.truncate(1 << 40)
    with pytest.raises(Truncated, match="end mark"):
        Patch.open(path)
