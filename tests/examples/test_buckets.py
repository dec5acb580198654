"""research/buckets.md is what examples/buckets.py prints, but for the clock."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import sparserl

pytestmark = pytest.mark.long

HOME = Path(__file__).resolve().parents[2]


def without_timeline(page: str) -> tuple[str, str]:
    """The page without its figures of one run, and those."""
    found = re.search(r"```timeline\n(.*?)```", page, re.DOTALL)
    assert found
    return page.replace(found[1], ""), found[1]


def print_example() -> str:
    """What the example prints as a user runs it, with the sparserl under test and with warnings as errors."""
    source = str(Path(sparserl.__file__).parents[1])
    return subprocess.run(
        [sys.executable, "-W", "error", str(HOME / "examples" / "buckets.py")],
        env={**os.environ, "PYTHONPATH": source, "PYTHONIOENCODING": "utf-8"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        encoding="utf-8",
        timeout=900,
        check=True,
    ).stdout


@pytest.fixture(scope="module")
def printed() -> str:
    return print_example()


def test_the_page_is_what_the_example_prints(printed):
    """Tensors, buckets and bytes are those of this code; else run `examples/buckets.py > research/buckets.md`."""
    page = (HOME / "research" / "buckets.md").read_text(encoding="utf-8")
    used, here = (re.search(r"zstd\s([\d.]+);", text)[1] for text in (page, printed))
    if used != here:
        pytest.skip(f"the page was written with zstd {used}, this is {here}")
    assert without_timeline(page)[0] == without_timeline(printed)[0]


def test_the_timeline_tells_of_the_whole_run(printed):
    """Both kinds of work were seen on workers, and at the end all weights had been compared."""
    for _ in range(5):  # on a busy machine, work may go unseen between two looks
        _, timeline = without_timeline(printed)
        if all(re.search(rf"^sparserl_\d +.*{work}", timeline, re.MULTILINE) for work in "FE"):
            break
        printed = print_example()
    else:
        pytest.fail(timeline)
    told = re.search(r"Together ([\d.]+) MiB", printed)
    assert told
    assert timeline.split()[-2] == told[1]


def test_the_annotated_bucket_is_whole(printed):
    """The lines of the hexdump follow each other without a gap, and end where the bucket ends."""
    (dump,) = re.findall(r"```hexdump\n(.*?)```", printed, re.DOTALL)
    size = 0
    for line in dump.splitlines():
        offset, digits, note = re.fullmatch(r" *(\d+)  ((?:[0-9a-f]{2} ?)+) (\S.*)", line).groups()
        assert int(offset) == size
        assert note
        size += len(bytes.fromhex(digits))
    (number,) = re.findall(r"### Bucket (\d+), every byte", printed)
    assert f" | {size} | bucket {number} |" in printed
