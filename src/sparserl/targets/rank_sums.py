"""The digests of the weights that one rank of an engine has, in the coordinates of a checkpoint. Nothing is written."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from ..weights.digest import place_sums
from ..weights.dtypes import BY_NAME, dtype_of_torch
from ..weights.engine_sums import RankSums
from ..weights.local import LocalWeights
from ..weights.region import first_overlap
from ..weights.shards import Part, Shards
from ..weights.table import TensorTable
from .pieces import CheckpointTensor, Piece, by_tensor


def checkpoint_tensors(table: TensorTable) -> list[CheckpointTensor]:
    """The tensors of a table, to be loaded into an engine."""
    return [CheckpointTensor(spec.name, spec.shape, getattr(torch, spec.dtype.name)) for spec in table.specs]


def rank_sums(
    table: TensorTable,
    pieces: Iterable[Piece],
    live: Mapping[str, torch.Tensor],
    parameters: Iterable[str],
    tied: Mapping[str, str],
    unclear_names: Mapping[str, str],
) -> RankSums:
    """Read all bits that one rank has of the tensors of a table.

    Args:
        table: The tensors to compare with.
        pieces: Where they are in the engine.
        live: The engine's tensors by name.
        parameters: The names of those that are weights.
        tied: Checkpoint tensors that the engine does not load, since they are the same as others, by name.
        unclear_names: What could not be found in the engine, and why.
    """
    uncompared = dict(unclear_names)
    pieces_of = by_tensor(pieces)
    reached = {piece.live for own in pieces_of.values() for piece in own}
    uncompared |= {
        name: "no tensor of the checkpoint is loaded into this parameter of the engine"
        for name in parameters
        if name not in reached and name not in uncompared
    }
    specs = []
    parts = []
    dtypes = {}
    for spec in table.specs:
        own = pieces_of.get(spec.name) or pieces_of.get(tied.get(spec.name, ""), [])
        if (reason := _why_not(own, live)) is not None:
            uncompared[spec.name] = reason
            own = []
        for dtype in {live[piece.live].dtype for piece in own} - {getattr(torch, spec.dtype.name)}:
            dtypes[spec.name] = str(dtype).removeprefix("torch.")
        specs.append(spec._replace(dtype=BY_NAME[dtypes.get(spec.name, spec.dtype.name)]))
        parts += [Part(spec.name, piece.region, piece.view(live)) for piece in own]
    shards = Shards(TensorTable(specs), parts)
    return RankSums(place_sums(LocalWeights.of(shards)), dtypes, uncompared)


def _why_not(pieces: Sequence[Piece], live: Mapping[str, torch.Tensor]) -> str | None:
    """Why the pieces of a tensor cannot be compared with it; None if they can."""
    names = [*dict.fromkeys(piece.live for piece in pieces)]
    dtypes = {live[name].dtype for name in names}
    if len(dtypes) > 1 or first_overlap([piece.region for piece in pieces]) is not None:
        return f"the engine has copies of the same elements in {', '.join(map(repr, names))}"
    if any(dtype_of_torch(dtype) is None for dtype in dtypes):
        return f"{dtypes.pop()} is not supported"
    return None
