"""vLLM, worker side: the drafter of speculative decoding, whose weights are committed with those of the policy.

    pieces of the policy ─┐
    pieces of the drafter ┴─► one target: a version is written to both, or to none

A drafter in the policy's checkpoint (MTP) has the names of that checkpoint in a run. One with a checkpoint of its own
(EAGLE, a draft model) has the names of its own behind `draft_model.`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Any

import torch
from vllm.logger import init_logger

from ..errors import UnsupportedTensor
from ..targets.engine_layout import digests_of
from ..targets.pieces import Piece, parts_of
from .vllm_layout import LoadedModel, changed_tensor, tied_names
from .vllm_workers import workers

logger = init_logger(__name__)
PREFIX = "draft_model."


@dataclass(frozen=True)
class EngineLayout:
    """Where one worker keeps the tensors of a run: those of the policy, and of its drafter, if it has one.

    Attributes:
        pieces: Where each region of a tensor is.
        tied: Tensors that the models do not load, since they are equal to others.
        live: Returns the tensors of the models by name.
        drafted: The tensors of a run that only the drafter has.
    """

    pieces: list[Piece]
    tied: dict[str, str]
    live: Callable[[], dict[str, torch.Tensor]]
    drafted: frozenset[str] = frozenset()


def learn_layout(vllm_config: Any, model: torch.nn.Module) -> EngineLayout:
    """Find out where a worker keeps the tensors of checkpoints.

    Raises:
        UnsupportedTensor: changes cannot be written into a tensor of the policy.
    """
    model_config = vllm_config.model_config
    pieces = LoadedModel.of_checkpoint(model, model_config, vllm_config.load_config).learn_pieces()
    tied = tied_names(model_config, [piece.tensor for piece in pieces])
    layout = EngineLayout(pieces, tied, lambda: parts_of(model))
    speculative = vllm_config.speculative_config
    if speculative is None or speculative.draft_model_config is None:
        return layout
    draft_model = find_draft_model(model)
    if draft_model is None:
        logger.warning("sparserl: the drafter (%s) is out of reach; its weights stay as they are", speculative.method)
        return layout
    try:
        draft_pieces = _learn_draft_pieces(vllm_config, draft_model)
        return _with_drafter(layout, model_config, draft_model, speculative, draft_pieces)
    except UnsupportedTensor as error:
        logger.warning("sparserl: the drafter's weights stay as they are, since they cannot be followed: %s", error)
        return layout


def find_draft_model(model: torch.nn.Module) -> torch.nn.Module | None:
    """The drafter beside a model. vLLM gives a backend the model alone, and has both in the worker."""
    for worker in workers:
        runner = getattr(worker, "model_runner", None)  # a worker of an earlier engine has none any longer
        if runner is not None and runner.get_model() is model:
            get_draft_model = getattr(runner, "get_draft_model", None)
            draft_model: torch.nn.Module | None = None if get_draft_model is None else get_draft_model()
            return draft_model
    return None


def _learn_draft_pieces(vllm_config: Any, draft_model: torch.nn.Module) -> list[Piece]:
    """Find out where a drafter keeps its checkpoint; if that cannot be done, its weights are what they were."""
    speculative = vllm_config.speculative_config
    load_config = getattr(speculative, "draft_load_config", None) or vllm_config.load_config
    drafter = LoadedModel.of_checkpoint(draft_model, speculative.draft_model_config, load_config)
    live = parts_of(draft_model)
    before = digests_of(live)
    try:
        return drafter.learn_pieces()
    except UnsupportedTensor:
        if changed_tensor(live, before, draft_model):
            drafter.load(drafter.weights())
            if changed := changed_tensor(live, before, draft_model):
                raise RuntimeError(f"the drafter could not be loaded again: {changed!r} is not the same") from None
        raise


def _with_drafter(
    layout: EngineLayout, model_config: Any, draft_model: torch.nn.Module, speculative: Any, pieces: list[Piece]
) -> EngineLayout:
    """The layout of a policy together with that of its drafter."""
    draft_config = speculative.draft_model_config
    has_own_checkpoint = speculative.method == "draft_model" or draft_config.model != model_config.model
    prefix = PREFIX if has_own_checkpoint else ""
    policy = layout.live()
    live_names = {tensor.data_ptr(): name for name, tensor in policy.items()}  # it may share embeddings with the policy
    own = parts_of(draft_model)
    names = {name: live_names.get(tensor.data_ptr(), PREFIX + name) for name, tensor in own.items()}
    known = {(piece.tensor, piece.live) for piece in layout.pieces}
    loaded = {tensor for tensor, _ in known}
    draft_pieces = []
    for piece in pieces:
        moved = replace(piece, tensor=prefix + piece.tensor, live=names[piece.live])
        if moved.tensor not in loaded:
            draft_pieces.append(moved)
        elif (moved.tensor, moved.live) not in known:
            raise UnsupportedTensor(f"the drafter has a copy of its own of {moved.tensor!r}")

    def live() -> dict[str, torch.Tensor]:
        return layout.live() | {
            names[name]: tensor for name, tensor in parts_of(draft_model).items() if names[name] not in policy
        }

    draft_tied = tied_names(draft_config, [piece.tensor for piece in pieces])
    tied = {prefix + name: prefix + equal for name, equal in draft_tied.items()}
    drafted = frozenset(piece.tensor for piece in draft_pieces)
    return EngineLayout([*layout.pieces, *draft_pieces], layout.tied | tied, live, drafted)


def warn_of_missing(drafted: Collection[str], published: Collection[str]) -> None:
    """Say, once, which tensors of a drafter a run does not have."""
    missing = sorted(set(drafted) - set(published))
    if missing:
        logger.warning_once(
            "sparserl: %s of the drafter's %d tensors are not in the run and stay as they are, %r among them",
            "all" if len(missing) == len(drafted) else len(missing),
            len(drafted),
            missing[0],
        )
