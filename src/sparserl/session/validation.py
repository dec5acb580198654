"""Validation: what the targets hold is compared, bit for bit, with the full weights of a source."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from ..errors import ChecksumMismatch, WeightsError
from ..parallel import ordered
from ..patch.cpu_compare import scan
from ..patch.decode import flatten
from ..sources.modules import as_source, weights_of
from ..targets import Target
from ..weights.batches import Batch, batches
from ..weights.local import LocalWeights
from ..weights.region import Region, intersection, whole
from ..weights.shards import Place
from ..weights.table import TensorTable


class Difference(NamedTuple):
    """An element that differs; differences are in the order of the table, and of positions in each tensor."""

    tensor: int
    position: int
    target_bits: int
    source_bits: int


class Validation:
    """Compares targets with a source.

    Args:
        source: As a `Publisher` takes it.
        threads: How many threads to use; None for one a core.
    """

    def __init__(self, source: Any, threads: int | None) -> None:
        try:
            self._source = as_source(source)
        except WeightsError as error:
            raise WeightsError(f"validate: {error}") from error
        self._threads = threads

    def require_same_bits(self, version: int, targets: Sequence[Target], table: TensorTable) -> None:
        """Raise `ChecksumMismatch` unless all targets have the bits of the source, and name the first that differs."""
        source = LocalWeights.of(weights_of(self._source, table), table, "the run", "the source of validate")
        for number, target in enumerate(targets):
            weights = target.attach(table)
            if weights is None:
                raise ChecksumMismatch(f"version {version}: target {number} holds no weights to validate")
            local = LocalWeights.of(weights, table, "the run", "the target")
            common = batches(table, _common_places(local, source))
            differing = 0
            firsts: list[Difference] = []
            for count, batch_firsts in ordered(partial(_compare, local, source), common, self._threads):
                differing += count
                firsts += batch_firsts
            if firsts:
                raise ChecksumMismatch(_message(version, number, table, differing, min(firsts)))


def _common_places(target: LocalWeights, source: LocalWeights) -> Iterator[Place]:
    """The places that both have; a rank may have parts of tensors alone."""
    if target.places == source.places:
        yield from target.places
        return
    regions: dict[int, list[Region]] = {}
    for tensor, region in source.places:
        regions.setdefault(tensor, []).append(region or whole(source.table.specs[tensor].shape))
    for tensor, region in target.places:
        outer = region or whole(target.table.specs[tensor].shape)
        for other in regions.get(tensor, []):
            if (common := intersection(outer, other)) is not None:
                yield tensor, None if common == whole(target.table.specs[tensor].shape) else common


def _compare(target: LocalWeights, source: LocalWeights, batch: Batch) -> tuple[int, list[Difference]]:
    """How many elements of a batch differ, and the first one of each region that has any."""
    target_addresses, target_owners = target.read(batch)
    source_addresses, source_owners = source.read(batch)
    changes = scan(np.empty(0, batch.dtype.uint), target_addresses, source_addresses, batch.numel)
    del target_owners, source_owners  # copies may go only now
    begin = np.cumsum(changes.counts) - changes.counts
    firsts = []
    for row in np.flatnonzero(changes.counts).tolist():
        at = int(begin[row])
        tensor = int(batch.tensor[row])
        position = flatten(target.table, (tensor, batch.region[row]), changes.positions[at : at + 1])
        firsts.append(Difference(tensor, int(position[0]), int(changes.before[at]), int(changes.after[at])))
    return int(changes.counts.sum()), firsts


def _message(version: int, number: int, table: TensorTable, differing: int, first: Difference) -> str:
    spec = table.specs[first.tensor]
    digits = 2 * spec.dtype.width
    index = [int(i) for i in np.unravel_index(first.position, spec.shape)] if spec.shape else []
    return (
        f"version {version}: target {number} differs from the source in {differing} element(s), first in tensor "
        f"{spec.name!r} at {index} (position {first.position}): the target has {first.target_bits:#0{digits + 2}x}, "
        f"the source {first.source_bits:#0{digits + 2}x}. The next sync reads all bits of the targets first"
    )
