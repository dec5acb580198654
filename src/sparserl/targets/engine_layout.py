"""Where an engine keeps the elements of a checkpoint: watched where that is possible, and found by numbers elsewhere.

one load, watched ──► pieces ──► what could not be followed: numbers, for those layers only
──► a load of awkward bits: are all pieces copies? ──► restored
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

import torch

from ..errors import UnsupportedTensor
from ..weights.digest import Digest, digest, place_sums
from ..weights.local import LocalWeights
from ..weights.region import first_overlap
from .made_up import Alphabet, awkward, zeros
from .numbering import number_pieces
from .pieces import CheckpointTensor, Load, Piece, by_tensor, layer_of, reach, span
from .watching import computed_pieces, watch_pieces

_log = logging.getLogger("sparserl.engine")


def find_pieces(
    tensors: Iterable[CheckpointTensor],
    live: Mapping[str, torch.Tensor],
    load: Load,
    restore: Callable[[Sequence[Piece]], None],
    unclear_names: dict[str, str] | None = None,
    *,
    restores_by_load: bool = True,
    check: Callable[[], None] = lambda: None,
) -> list[Piece]:
    """Find out where the elements of checkpoint tensors are in an engine's tensors.

    Args:
        tensors: the tensors of the checkpoint.
        live: the tensors of the engine. They have numbers, not weights, when this raises.
        load: lets the engine load some tensors, given under their checkpoint names, into `live`, with all
            postprocessing. The tensors of a layer come together.
        restore: brings back the engine's own weights. It is given the pieces, and may be called again with
            others.
        unclear_names: is filled with the tensors of the checkpoint or of the engine that are not plain copies of
            elements, and why; without it, the first of them is an error.
        restores_by_load: whether `restore` loads a checkpoint, which gives constants, such as padding, the values that
            every load gives them. Bits that are copied back need not have these: the engine may not have loaded them.
        check: is called when the engine has loaded made-up tensors, twice at least. It may change the engine's tensors.

    Raises:
        UnsupportedTensor: a tensor of the engine is not a plain copy of elements, and there is no `unclear_names`.
    """
    number = number_pieces if unclear_names is None else partial(_number_some, unclear_names)
    tensors = [*tensors]
    pieces, unclear = watch_pieces(tensors, live, load)
    check()
    if unclear:
        _log.info("%s: copies of %d tensors were lost sight of; numbers are loaded", min(unclear), len(unclear))
        # Whole layers: a loader may go by the values of one tensor when it decides where another of its layer goes, so
        # that what was watched for one set of values need not hold for others.
        layers = {*map(layer_of, unclear)}
        pieces = [piece for piece in pieces if layer_of(piece.tensor) not in layers]
        pieces += number([tensor for tensor in tensors if layer_of(tensor.name) in layers], live, load)

    computed: dict[str, str] = {}

    def load_all(alphabet: Callable[[torch.dtype], Alphabet]) -> None:
        """Let the engine load tensors of an alphabet, and note which pieces are no copies of them."""
        for piece in computed_pieces(tensors, pieces, live, load, alphabet):
            computed[piece.tensor] = (
                f"{piece.tensor!r} is not a copy in {piece.live!r}: the engine computes it when it loads"
            )
        if computed and unclear_names is None:
            raise UnsupportedTensor(next(iter(computed.values())))

    def changed_rest() -> list[str]:
        """Restore, and name the engine's tensors that have something else of the checkpoint than the pieces."""
        load_all(awkward)
        rest_digests = _rest_digests(pieces, live)
        check()
        if restores_by_load:
            restore(pieces)
            return changed_names(rest_digests, _rest_digests(pieces, live))
        load_all(zeros)
        changed = changed_names(rest_digests, _rest_digests(pieces, live))
        restore(pieces)
        return changed

    changed = changed_rest()
    if changed and not unclear_names:  # they were written to behind the watch's back
        _log.info("copies were made unseen; numbers are loaded for all tensors")
        pieces = number(tensors, live, load)
        changed = changed_rest()
    reason = "depends on the checkpoint, but where its elements come from is unclear"
    copies = _copies(pieces)
    if unclear_names is not None:
        unclear_names |= dict.fromkeys(changed, f"it {reason}") | copies | computed
        return [piece for piece in pieces if piece.tensor not in copies.keys() | computed.keys()]
    if changed:
        raise UnsupportedTensor(f"{changed[0]!r} {reason}")
    if copies:
        raise UnsupportedTensor(f"{next(iter(copies.values()))}, but changes are written to one place only")
    return pieces


def _copies(pieces: Iterable[Piece]) -> dict[str, str]:
    """Tensors of which the engine has some elements in several places, and which these are."""
    copies = {}
    for name, own in by_tensor(pieces).items():
        if (pair := first_overlap([piece.region for piece in own])) is not None:
            first, second = (own[index].live for index in pair)
            copies[name] = f"{first!r} and {second!r} both have some elements of {name!r}"
            if first == second:
                copies[name] = f"{first!r} has some elements of {name!r} twice"
    return copies


def _number_some(
    unclear_names: dict[str, str],
    tensors: Sequence[CheckpointTensor],
    live: Mapping[str, torch.Tensor],
    load: Load,
) -> list[Piece]:
    """The pieces of those layers in which all tensors are plain copies; the tensors of the others are named."""
    try:
        return number_pieces(tensors, live, load)
    except UnsupportedTensor as error:
        layers = sorted({layer_of(tensor.name) for tensor in tensors})
        if len(layers) == 1:
            unclear_names |= {tensor.name: str(error) for tensor in tensors}
            return []
    first_half = {*layers[: len(layers) // 2]}
    halves: tuple[list[CheckpointTensor], list[CheckpointTensor]] = ([], [])
    for tensor in tensors:
        halves[layer_of(tensor.name) not in first_half].append(tensor)
    return [piece for half in halves for piece in _number_some(unclear_names, half, live, load)]


def digests_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, Digest]:
    """The digest of every tensor."""
    if not tensors:
        return {}
    weights = LocalWeights.of(tensors)
    return {weights.table[tensor].name: sums for (tensor, _), sums in place_sums(weights).items()}


def changed_names(before: Mapping[str, Digest], after: Mapping[str, Digest]) -> list[str]:
    """The tensors whose digests have changed."""
    return [name for name, new in after.items() if before.get(name) != new]


def _rest_digests(pieces: Iterable[Piece], live: Mapping[str, torch.Tensor]) -> dict[str, Digest]:
    """Digests of what the engine's tensors have beside the pieces."""
    by_live: dict[str, list[Piece]] = {name: [] for name in live}
    for piece in pieces:
        by_live[piece.live].append(piece)
    digests = {}
    for name, own in by_live.items():
        if sum(piece.region.numel for piece in own) < reach(live[name]):
            rest = span(live[name]).clone()
            for piece in own:
                rest.as_strided(piece.region.size, piece.strides, piece.offset).zero_()
            digests[name] = digest({name: rest})
    return digests
