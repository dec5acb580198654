"""sparserl: move a policy's weights by sending only the bits that changed.

>>> import numpy as np, sparserl
>>> old = {"w": np.zeros(1000, np.float16)}
>>> new = {"w": np.where(np.arange(1000) == 7, 1, 0).astype(np.float16)}
>>> patch = sparserl.diff(old, new)
>>> patch.apply(old).changed
1
>>> bool((old["w"] == new["w"]).all())
True
"""

from __future__ import annotations

from . import errors, sources, targets
from .errors import SparserlError
from .patch import Applied, Entry, Patch, Stats, diff, merge, squash
from .session import Publisher, Subscriber, SyncReport
from .weights.digest import Digest, digest
from .weights.dtypes import Bits, DType
from .weights.memory import tensor_table
from .weights.region import Region
from .weights.shards import Part, Shards
from .weights.table import TensorSpec, TensorTable

__version__ = "0.1.0"

__all__ = [
    "Applied",
    "Bits",
    "DType",
    "Digest",
    "Entry",
    "Part",
    "Patch",
    "Publisher",
    "Region",
    "Shards",
    "SparserlError",
    "Stats",
    "Subscriber",
    "SyncReport",
    "TensorSpec",
    "TensorTable",
    "diff",
    "digest",
    "errors",
    "merge",
    "sources",
    "squash",
    "targets",
    "tensor_table",
]
