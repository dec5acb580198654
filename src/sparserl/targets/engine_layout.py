"""Where an engine keeps the elements of a checkpoint: watched where that is possible, and found by numbers elsewhere.

one load, watched ──► pieces ──► what could not be followed: numbers, for those layers only ──► restored
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping

import torch

from ..errors import UnsupportedTensor
from ..weights.digest import Digest, digest
from ..weights.region import first_overlap
from .numbering import number_pieces
from .pieces import CheckpointTensor, Load, Piece, layer_of, span
from .watching import watch_pieces

_log = logging.getLogger("sparserl.engine")


def find_pieces(
    tensors: Iterable[CheckpointTensor],
    live: Mapping[str, torch.Tensor],
    load: Load,
    restore: Callable[[], None],
) -> list[Piece]:
    """Find out where the elements of checkpoint tensors are in an engine's tensors.

    Args:
        tensors: the tensors of the checkpoint.
        live: the tensors of the engine. They have numbers, not weights, when this raises.
        load: lets the engine load some tensors, given under their checkpoint names, into `live`, with all
            postprocessing. The tensors of a layer come together.
        restore: brings back the engine's own weights.

    Raises:
        UnsupportedTensor: a tensor of the engine is not a plain copy of elements.
    """
    tensors = [*tensors]
    pieces, unclear = watch_pieces(tensors, live, load)
    if unclear:
        layers = {layer_of(name) for name in unclear}
        pieces = [piece for piece in pieces if layer_of(piece.tensor) not in layers]
        rest = [tensor for tensor in tensors if layer_of(tensor.name) in layers]
        _log.info("%s: copies of %d tensors were lost sight of; numbers are loaded", min(unclear), len(unclear))
        pieces += number_pieces(rest, live, load, is_all=len(rest) == len(tensors))
    rest_digests = _rest_digests(pieces, live)
    restore()
    if _rest_digests(pieces, live) != rest_digests:  # it was written to behind the watch's back
        _log.info("copies were made unseen; numbers are loaded for all tensors")
        pieces = number_pieces(tensors, live, load)
        rest_digests = _rest_digests(pieces, live)
        restore()
        if (changed := changed_name(rest_digests, _rest_digests(pieces, live))) is not None:
            raise UnsupportedTensor(
                f"{changed!r} depends on the checkpoint, but where its elements come from is unclear"
            )
    _refuse_copies(pieces)
    return pieces


def _refuse_copies(pieces: Iterable[Piece]) -> None:
    """Refuse elements that the engine has in several places: changes would be written to one of them."""
    by_tensor: dict[str, list[Piece]] = {}
    for piece in pieces:
        by_tensor.setdefault(piece.tensor, []).append(piece)
    for name, own in by_tensor.items():
        if (pair := first_overlap([piece.region for piece in own])) is not None:
            first, second = (own[index].live for index in pair)
            places = f"{first!r} has some elements of {name!r} twice"
            if first != second:
                places = f"{first!r} and {second!r} both have some elements of {name!r}"
            raise UnsupportedTensor(f"{places}, but changes are written to one place only")


def changed_name(before: Mapping[str, Digest], after: Mapping[str, Digest]) -> str | None:
    """The first tensor whose digest has changed."""
    return next((name for name, new in after.items() if before.get(name) != new), None)


def _rest_digests(pieces: Iterable[Piece], live: Mapping[str, torch.Tensor]) -> dict[str, Digest]:
    """Digests of what the engine's tensors have beside the pieces."""
    by_tensor: dict[str, list[Piece]] = {name: [] for name in live}
    for piece in pieces:
        by_tensor[piece.live].append(piece)
    digests = {}
    for name, own in by_tensor.items():
        memory = span(live[name])
        if sum(piece.region.numel for piece in own) < memory.numel():
            rest = memory.clone()
            for piece in own:
                rest.as_strided(piece.region.size, piece.strides, piece.offset).zero_()
            digests[name] = digest({name: rest})
    return digests
