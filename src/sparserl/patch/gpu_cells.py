"""Cells that are no runs of memory, such as columns, on a GPU: the tensors are compared whole, the changes are cut.

Old bits stay on the GPU, so that what is cut is never written in `ctx`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from .. import plan
from ..plan import Changes, Draft
from ..weights.digest import Digest
from ..weights.local import LocalWeights
from ..weights.on_gpu import split_by_gpu
from ..weights.region import Region, intersection, whole
from ..weights.shards import Place
from .cpu_compare import Compared
from .decode import flatten
from .gpu_compare import compare_to_host
from .slicing import positions_within

_Groups = list[list[Place]]


def slice_columns(
    old: LocalWeights, new: LocalWeights, groups: _Groups, names: Sequence[str], digest_base: bool
) -> tuple[_Groups, list[list[Changes | Draft]], Compared]:
    """Compare the parts of weights that have such cells.

    Args:
        old: The version before.
        new: The version now.
        groups: Cells, in groups.
        names: The profiles that may be used.
        digest_base: Whether the element sums of the old bits are wanted.

    Returns:
        The groups without these cells, the changes in them by group, and what comparing the parts gave besides.
    """
    _, runs = split_by_gpu(_parts_with_columns(old, new, groups), old, new)
    parts = {place for part_runs in runs for place in part_runs.places}
    changes: list[Changes] = []
    sums = Digest()
    moved = Digest()
    nbytes = 0
    for compared in compare_to_host(old, new, runs, digest_base):
        changes += [part for part in compared.routed if isinstance(part, Changes)]
        sums += compared.old_sums
        moved += compared.moved
        nbytes += compared.nbytes
    by_tensor: dict[int, list[Changes]] = {}
    for part in changes:
        by_tensor.setdefault(int(part.tensor[0]), []).append(part)
    rest: _Groups = []
    sliced: list[list[Changes | Draft]] = []
    for cells in groups:
        is_cut = [old.parts[old.part_index(*cell)][0] in parts for cell in cells]
        rest.append([cell for cell, cut in zip(cells, is_cut, strict=True) if not cut])
        sliced.append(
            [
                routed
                for cell, cut in zip(cells, is_cut, strict=True)
                if cut
                for part in by_tensor.get(cell[0], ())
                for piece in _slice(part, cell, new)
                for routed in plan.route(piece, names, new.table)
            ]
        )
    return rest, sliced, Compared([], sums, moved, nbytes)


def _parts_with_columns(old: LocalWeights, new: LocalWeights, groups: _Groups) -> list[Place]:
    """The parts of weights that lie on a GPU, and have a cell there that is no run."""
    strided, _ = split_by_gpu((cell for cells in groups for cell in cells), old, new)
    return [*dict.fromkeys(old.parts[old.part_index(*cell)][0] for cell in strided)]


def _slice(changes: Changes, cell: Place, new: LocalWeights) -> Iterator[Changes]:
    """The changes of one region that are in a cell."""
    tensor, box = cell
    shape = new.table[tensor].shape
    outer = changes.region[0] or whole(shape)
    region = intersection(outer, box or whole(shape))
    if region is None:
        return
    flat = flatten(new.table, (tensor, changes.region[0]), changes.positions)
    inside, positions = positions_within(flat, shape, region)
    if positions.size:
        yield _entry(changes, region, positions, inside, new)


def _entry(
    changes: Changes, region: Region, positions: np.ndarray, inside: slice | np.ndarray, new: LocalWeights
) -> Changes:
    tensor = int(changes.tensor[0])
    columns = changes.select_changes(inside) | {"positions": positions}
    return replace(
        changes,
        region=[region],
        numel=np.array([region.numel], np.int64),
        count=np.array([positions.size], np.int64),
        covered=region.numel,
        bits=lambda _: new.bits(tensor, region),
        **columns,
    )
