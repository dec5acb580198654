"""The directory of a bucket, read in one call, in Numba: it has hundreds of numbers, and a patch has many buckets."""

from __future__ import annotations

from typing import Any

import numpy as np

from .changes import read_varints
from .compiling import kernel


@kernel
def read_directory(data: Any, at: Any, rows: Any, lengths: Any) -> Any:
    """A directory from offset `at` on: of each stream an id, a coder, a number of chunks, and their lengths.

    rows: streams × 4, for the first three and the sum of the lengths. Returns the offset behind the directory, or -1 if
    it is wrong or `lengths` is too short for its chunks.
    """
    used = np.int64(0)
    for i in range(rows.shape[0]):
        at = read_varints(data, at, np.uint64(127), rows[i, :2])
        if at >= 0:
            at = read_varints(data, at, np.uint64(lengths.size - used), rows[i, 2:3])
        if at >= 0:
            many = np.int64(rows[i, 2])
            at = read_varints(data, at, np.uint64(data.size), lengths[used : used + many])
            rows[i, 3] = 0
            for k in range(used, used + many):
                rows[i, 3] += lengths[k]
            used += many
        if at < 0:
            return -1
    return at
