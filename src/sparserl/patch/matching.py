"""Whether weights are those that a patch applies to, and whether its changes lead where it promises."""

from __future__ import annotations

from ..errors import InvalidField, TensorMismatch, WrongBase
from ..parallel import Progress
from ..weights.digest import Digest, element_sums, table_digest
from ..weights.local import LocalWeights
from ..weights.memory import Weights
from ..weights.shards import Shards
from .contents import Contents


def matching_weights(patch: Contents, weights: Weights | Shards | LocalWeights) -> LocalWeights:
    """The weights, once they are known to have the tensors and regions that a patch is about."""
    local = LocalWeights.of(weights, patch.table, "the patch", "the weights")
    if not local.complete and (len(local.places) != len(patch.covers) or set(local.places) != set(patch.covers)):
        raise TensorMismatch("the patch covers other regions than the shards at hand")
    return local


def digest_of(
    patch: Contents, weights: LocalWeights, threads: int | None = None, progress: Progress | None = None
) -> Digest:
    """The digest of weights over what a patch covers: to be compared with its base and its result."""
    elements = element_sums(weights, patch.covers, threads, progress)
    return elements + table_digest(patch.table) if patch.complete else elements


def require_base(patch: Contents, current: Digest) -> None:
    """Refuse weights with another digest than the patch's base."""
    if current != patch.base:
        raise WrongBase(
            f"the weights have digest {current}; the patch turns {patch.base} into {patch.result}. "
            "Nothing was touched: fetch the patch that starts from these weights, or a full copy"
        )


def require_result(patch: Contents, result: Digest) -> None:
    """Refuse changes that lead to another digest than the patch's result."""
    if result != patch.result:
        raise InvalidField(
            f"the changes lead to digest {result}, the patch promises {patch.result}; the weights are as they were"
        )


def require_touched_writable(patch: Contents, weights: LocalWeights) -> None:
    """Refuse weights that the patch changes and that cannot be written."""
    weights.require_writable({tensor for head in patch.heads for tensor in head.entries.tensor.tolist()})
