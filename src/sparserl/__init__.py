"""Move a policy's weights from trainer to rollout by sending only the bits that changed.

>>> import numpy as np, sparserl
>>> old = {"w": np.zeros(1000, np.float16)}
>>> new = {"w": np.where(np.arange(1000) == 7, 1, 0).astype(np.float16)}
>>> patch = sparserl.diff(old, new)
>>> patch.apply(old).changed
1
>>> bool((old["w"] == new["w"]).all())
True

What to call for what:

Two versions in one process
    `diff` makes a `Patch`; `Patch.apply` writes it, `Patch.save` and `Patch.open` keep it in a file, `Patch.stats` says
    what it holds. `squash` joins patches that follow one another, `merge` joins the patches of several shards.
A trainer and its rollout workers, through a folder, object storage or HTTP
    `Publisher` and `Subscriber`; `pin`, `pins` and `unpin` for versions that must stay in the store.
A trainer and its rollout workers as ranks of one process group, by broadcast
    `GroupPublisher` and `GroupSubscriber`; a `Relay` hands on what it fetches from a store.
Where the weights of a trainer come from, and where those of a rollout worker live
    `sparserl.sources` and `sparserl.targets`: modules, shards, adapters, quantized weights, checkpoint folders.
Whether two sets of weights are the same
    `digest`, which depends on names, dtypes, shapes and bits alone.
Weights that no dict of tensors describes
    `Bits` for bit patterns with a dtype of their own, `Shards` of `Part`s for what one rank holds of a `TensorTable`.
What can go wrong
    `sparserl.errors`; every error is a `SparserlError`.
What a session does over time
    `SyncReport`, `sparserl.metrics`.
Your own store, source or target
    `sparserl.testing` has the tests that it must pass.

A name is loaded when it is first used, so that `import sparserl` costs next to nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .lazy import lister, loader

if TYPE_CHECKING:
    from . import errors, metrics, sources, targets
    from .errors import SparserlError
    from .patch import Applied, Entry, Patch, Stats, diff, merge, squash
    from .session import (
        BackgroundPublish,
        GroupPublisher,
        GroupSubscriber,
        Pin,
        Publisher,
        Relay,
        Subscriber,
        SyncReport,
        pin,
        pins,
        unpin,
    )
    from .weights.digest import Digest, digest
    from .weights.dtypes import Bits, DType
    from .weights.region import Region
    from .weights.shards import Part, Shards
    from .weights.table import TensorSpec, TensorTable
    from .weights.tensors import tensor_table

__version__ = "0.1.0"

__all__ = [
    "Applied",
    "BackgroundPublish",
    "Bits",
    "DType",
    "Digest",
    "Entry",
    "GroupPublisher",
    "GroupSubscriber",
    "Part",
    "Patch",
    "Pin",
    "Publisher",
    "Region",
    "Relay",
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
    "metrics",
    "pin",
    "pins",
    "sources",
    "squash",
    "targets",
    "tensor_table",
    "unpin",
]

_MODULES = ("errors", "metrics", "sources", "targets", "testing")
_NAMES = {
    "errors": ("SparserlError",),
    "patch": ("Applied", "Entry", "Patch", "Stats", "diff", "merge", "squash"),
    "session": (
        "BackgroundPublish",
        "GroupPublisher",
        "GroupSubscriber",
        "Pin",
        "Publisher",
        "Relay",
        "Subscriber",
        "SyncReport",
        "pin",
        "pins",
        "unpin",
    ),
    "weights.digest": ("Digest", "digest"),
    "weights.dtypes": ("Bits", "DType"),
    "weights.region": ("Region",),
    "weights.shards": ("Part", "Shards"),
    "weights.table": ("TensorSpec", "TensorTable"),
    "weights.tensors": ("tensor_table",),
}

if not TYPE_CHECKING:  # type checkers would take it for a promise that every name exists
    __getattr__ = loader(__name__, _NAMES, _MODULES)
    __dir__ = lister(__name__, [*__all__, *_MODULES])
