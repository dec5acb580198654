"""vLLM, worker side: where a model keeps its checkpoint. See docs/how-to/integrations/vllm.md.

made-up numbers, watched as the model loads them ──► pieces ──► the checkpoint again ──► compare
"""

from __future__ import annotations

import contextlib
import logging
import types
from collections.abc import Iterable, Iterator
from typing import Any, cast

import torch
from vllm.model_executor.model_loader import get_model_loader
from vllm.model_executor.model_loader.reload import layerwise as reload

from ..errors import UnsupportedTensor
from ..targets.engine_layout import changed_name, find_pieces
from ..targets.pieces import CheckpointTensor, Piece, moved_name, parts_of
from ..weights.digest import Digest, digest, place_sums
from ..weights.local import LocalWeights


def tied_names(model_config: Any, pieces: Iterable[Piece]) -> dict[str, str]:
    """Checkpoint tensors that the model does not load, and the tensors that they are equal to."""
    if not getattr(model_config.hf_text_config, "tie_word_embeddings", False):
        return {}
    embeddings = {piece.tensor for piece in pieces if piece.tensor.endswith("embed_tokens.weight")}
    return {f"{name.removesuffix('model.embed_tokens.weight')}lm_head.weight": name for name in embeddings}


class LoadedModel:
    """A model of vLLM, and the checkpoint that it was loaded from.

    Raises:
        UnsupportedTensor: vLLM cannot load the checkpoint again.
    """

    def __init__(self, model: torch.nn.Module, model_config: Any, load_config: Any) -> None:
        self.model = model
        self.model_config = model_config
        self._loader: Any = get_model_loader(load_config)
        if not hasattr(self._loader, "get_all_weights"):
            raise UnsupportedTensor(f"weights of load format {load_config.load_format!r} cannot be loaded again")

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors of the checkpoint."""
        yield from self._loader.get_all_weights(self.model_config, self.model)

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Let the model load tensors, given under their checkpoint names, with all postprocessing."""
        _process_again(self.model)
        reload.initialize_layerwise_reload(self.model)
        cast("Any", self.model).load_weights(tensors)
        reload.finalize_layerwise_reload(self.model, self.model_config)

    def learn_pieces(self) -> list[Piece]:
        """Find out where the checkpoint is in the model's tensors by watching how the model loads made-up numbers.

        The checkpoint itself is loaded last, so that the weights are what they were before, or this raises.
        """
        model = self.model
        packed = next((name for name, tensor in model.named_parameters() if not tensor.numel()), None)
        if packed is not None:
            raise UnsupportedTensor(
                f"{packed!r} is empty: vLLM packs it when it is loaded, and changes cannot be written to the packed "
                "copy. On a CPU, start it with SPARSERL_VLLM_CPU=plain"
            )
        live = parts_of(model)
        before = tensor_digests(live)
        derived_before = tensor_digests(_derived_tensors(model, live))

        def restore() -> None:
            if changed := changed_name(derived_before, tensor_digests(_derived_tensors(model, live))):
                raise UnsupportedTensor(
                    f"{changed!r} is computed from the weights when they are loaded, so that it would not change with "
                    "them"
                )
            self.load(self.weights())

        tensors = [CheckpointTensor(name, tuple(tensor.shape), tensor.dtype) for name, tensor in self.weights()]
        with _without_warnings():
            pieces = find_pieces(tensors, live, self.load, restore)
        if changed := changed_tensor(live, before, model):
            raise UnsupportedTensor(f"{changed!r} is not the same after the checkpoint was loaded again")
        _compare(pieces, live, self.weights())
        return pieces


def changed_tensor(live: dict[str, torch.Tensor], digests: dict[str, Digest], model: torch.nn.Module) -> str | None:
    """The first tensor of a model that has moved, or has other bits than before."""
    now = parts_of(model)
    return moved_name(live, now) or changed_name(digests, tensor_digests(now))


def _compare(
    pieces: Iterable[Piece], live: dict[str, torch.Tensor], weights: Iterable[tuple[str, torch.Tensor]]
) -> None:
    """Refuse pieces that do not have the bits of the checkpoint: what makes no difference to numbers may to weights."""
    by_tensor: dict[str, list[Piece]] = {}
    for piece in pieces:
        by_tensor.setdefault(piece.tensor, []).append(piece)
    for name, tensor in weights:
        for piece in by_tensor.get(name, ()):
            view = piece.view(live)
            if digest({name: tensor[piece.region.slices].to(view.dtype)}) != digest({name: view}):
                raise UnsupportedTensor(
                    f"{name!r} {piece.region} is not a copy in {piece.live!r}: the engine computes it when it loads"
                )


@contextlib.contextmanager
def _without_warnings() -> Iterator[None]:
    """Leave out warnings of vLLM's loader, of layers that have nothing to load and the like: they are expected here."""
    reload_logger = logging.getLogger(reload.__name__)
    reload_logger.addFilter(_is_no_warning)
    try:
        yield
    finally:
        reload_logger.removeFilter(_is_no_warning)


def _is_no_warning(record: logging.LogRecord) -> bool:
    return record.levelno != logging.WARNING


def _process_again(model: torch.nn.Module) -> None:
    """Let vLLM process weights as at the first load; on the CPU it would otherwise not pack experts again."""
    for module in model.modules():
        method: Any = getattr(module, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None and next(module.parameters()).device.type == "cpu":
            method.moe_kernel = None


def _derived_tensors(model: torch.nn.Module, live: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors of modules and of their attributes that are neither parameters nor buffers nor views of these."""
    addresses = {tensor.untyped_storage().data_ptr() for tensor in live.values()}
    out: dict[str, torch.Tensor] = {}
    for name, module in model.named_modules():
        for label, value in _attribute_tensors(name, module):
            if value.numel() and not value.is_meta and value.untyped_storage().data_ptr() not in addresses:
                out[label] = value.detach()
    return out


def _attribute_tensors(label: str, owner: object, deep: bool = True) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors in the attributes of an object, in closures of its functions, and one level deeper."""
    for name, value in vars(owner).items():
        path = f"{label}.{name}"
        if isinstance(value, torch.Tensor):
            yield path, value
        elif isinstance(value, types.FunctionType):
            for i, cell in enumerate(value.__closure__ or ()):
                with contextlib.suppress(ValueError):  # an empty cell
                    if isinstance(cell.cell_contents, torch.Tensor):
                        yield f"{path}[{i}]", cell.cell_contents
        elif deep and hasattr(value, "__dict__") and not isinstance(value, torch.nn.Module | type | types.ModuleType):
            yield from _attribute_tensors(path, value, deep=False)


def tensor_digests(tensors: dict[str, torch.Tensor]) -> dict[str, Digest]:
    """The digest of every tensor."""
    if not tensors:
        return {}
    weights = LocalWeights.of(tensors)
    return {weights.table[tensor].name: sums for (tensor, _), sums in place_sums(weights).items()}
