"""vLLM, worker side: where a model keeps its checkpoint. See docs/how-to/integrations/vllm.md.

vLLM's own load, watched ──► pieces ──► compare. Where that load does not explain all:
made-up numbers, watched as the model loads them ──► pieces ──► the checkpoint again, summed up ──► compare
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_leaves
from vllm.logger import init_logger
from vllm.model_executor.model_loader import get_model_loader
from vllm.model_executor.model_loader.reload import layerwise

from ..errors import UnsupportedTensor
from ..sources import tying
from ..targets.attributes import attribute_tensors
from ..targets.engine_layout import changed_names, digests_of, find_pieces
from ..targets.first_load import NotExplained
from ..targets.model_copy import Derived
from ..targets.pieces import CheckpointTensor, Piece, by_tensor, moved_name, parts_of
from ..weights.digest import Digest, digest
from .vllm_first_load import ENGINE_TYPES, take_first_load
from .vllm_reload import reload_weights

logger = init_logger(__name__)


def tied_names(model_config: Any, names: Iterable[str]) -> dict[str, str]:
    """Checkpoint tensors that the model need not load, and the tensors, among these names, that they are equal to."""
    return tying.tied_names((model_config.hf_config, model_config.hf_text_config), names)


class LoadedModel:
    """A model of vLLM, and the checkpoint that it was loaded from.

    Args:
        model: The model.
        model_config: vLLM's configuration of it.
        weights: Returns the tensors of the checkpoint, anew at each call.
    """

    def __init__(
        self, model: torch.nn.Module, model_config: Any, weights: Callable[[], Iterable[tuple[str, torch.Tensor]]]
    ) -> None:
        self.model = model
        self.model_config = model_config
        self.weights = weights

    @classmethod
    def of_checkpoint(cls, model: torch.nn.Module, model_config: Any, load_config: Any) -> LoadedModel:
        """A model, and the checkpoint that vLLM itself loaded it from.

        Raises:
            UnsupportedTensor: vLLM cannot load the checkpoint again.
        """
        loader: Any = get_model_loader(load_config)
        if not hasattr(loader, "get_all_weights"):
            raise UnsupportedTensor(f"weights of load format {load_config.load_format!r} cannot be loaded again")
        return cls(model, model_config, lambda: loader.get_all_weights(model_config, model))

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Let the model load tensors, given under their checkpoint names, with all postprocessing."""
        reload_weights(self.model, self.model_config, tensors)

    def learn_pieces(self) -> list[Piece]:
        """Find out where the checkpoint is in the model's tensors.

        The load with which the model was made shows it, if it was watched and explains all tensors. Otherwise the model
        loads made-up numbers, and then the checkpoint, so that the weights are what they were before, or this raises.
        """
        model = self.model
        if empty := empty_names(model):
            raise UnsupportedTensor(
                f"{empty[0]!r} is empty: vLLM packs it when it is loaded, and changes cannot be written to the packed "
                "copy. On a CPU, start it with SPARSERL_VLLM_CPU=plain"
            )
        live = parts_of(model)
        first_load = take_first_load(model)
        if first_load is not None:
            try:
                pieces = first_load.find_pieces(live, attribute_tensors(model, live, ENGINE_TYPES))
            except NotExplained as reason:
                logger.info("sparserl: made-up weights are loaded, then the checkpoint once more: %s", reason)
            else:
                logger.info("sparserl: learnt from the load with which the engine started")
                return pieces
        before = digests_of(live)
        derived_before = derived_of(model, live)

        digests: dict[str, Digest] = {}

        def check() -> None:
            if changed := derived_before.changes(derived_of(model, live)):
                raise UnsupportedTensor(
                    f"{changed[0]!r} is computed from the weights when they are loaded, so that it would not change "
                    "with them"
                )

        def restore(pieces: Iterable[Piece]) -> None:
            self.load(_with_digests(self.weights(), pieces, live, digests))

        tensors = [CheckpointTensor(name, tuple(tensor.shape), tensor.dtype) for name, tensor in self.weights()]
        with without_warnings():
            pieces = find_pieces(tensors, live, self.load, restore, check=check)
        if changed := changed_tensor(live, before, model):
            raise UnsupportedTensor(f"{changed!r} is not the same after the checkpoint was loaded again")
        _compare(pieces, live, digests)
        return pieces


def derived_tensors(model: torch.nn.Module, live: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors that may have been computed from the weights: neither these, nor caches of keys and values."""
    caches = tree_leaves([getattr(module, "kv_cache", None) for module in model.modules()])
    cache_tensors = {str(i): cache for i, cache in enumerate(caches) if isinstance(cache, torch.Tensor)}
    return attribute_tensors(model, live | cache_tensors, ENGINE_TYPES)


def derived_of(model: torch.nn.Module, live: dict[str, torch.Tensor]) -> Derived:
    """What may have been computed from the weights, as it is now."""
    return Derived.of(model, derived_tensors(model, live), ENGINE_TYPES)


def empty_names(model: torch.nn.Module) -> list[str]:
    """Parameters that vLLM has packed when they were loaded, and emptied."""
    return [name for name, tensor in model.named_parameters() if not tensor.numel()]


def changed_tensor(live: dict[str, torch.Tensor], digests: dict[str, Digest], model: torch.nn.Module) -> str | None:
    """The first tensor of a model that has moved, or has other bits than before."""
    now = parts_of(model)
    return moved_name(live, now) or next(iter(changed_names(digests, digests_of(now))), None)


def _with_digests(
    weights: Iterable[tuple[str, torch.Tensor]],
    pieces: Iterable[Piece],
    live: dict[str, torch.Tensor],
    digests: dict[str, Digest],
) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a checkpoint; as each is loaded, the digest is taken of what pieces should have of it."""
    pieces_of = by_tensor(pieces)
    for name, tensor in weights:
        own = enumerate(pieces_of.get(name, ()))
        digests[name] = digest({str(i): tensor[p.region.slices].to(live[p.live].dtype) for i, p in own})
        yield name, tensor


def _compare(pieces: Iterable[Piece], live: dict[str, torch.Tensor], digests: Mapping[str, Digest]) -> None:
    """Refuse pieces that do not have the bits of the checkpoint: what makes no difference to numbers may to weights."""
    for name, own in by_tensor(pieces).items():
        if digest({str(i): piece.view(live) for i, piece in enumerate(own)}) != digests[name]:
            raise UnsupportedTensor(f"{name!r} is not a copy in {own[0].live!r}: the engine computes it when it loads")


@contextlib.contextmanager
def without_warnings() -> Iterator[None]:
    """Leave out warnings of vLLM's loader, of layers that have nothing to load and the like: they are expected here."""
    reload_logger = logging.getLogger(layerwise.__name__)
    reload_logger.addFilter(_is_no_warning)
    try:
        yield
    finally:
        reload_logger.removeFilter(_is_no_warning)


def _is_no_warning(record: logging.LogRecord) -> bool:
    return record.levelno != logging.WARNING
