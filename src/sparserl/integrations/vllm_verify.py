"""vLLM, worker side: digests of the weights as they are, in an engine that gets them by any means.

    once, as `vllm` does: find out where the checkpoint is in the model, while the weights wait in host memory
    then: read all bits ──► digests

vLLM calls this between two steps of the engine. Whatever happens, the model is afterwards what it was.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from vllm.config import set_current_vllm_config
from vllm.model_executor.model_loader.reload import layerwise as reload

from ..errors import SessionError
from ..session.store.records import parse_layout
from ..targets.engine_layout import changed_names, digests_of, find_pieces
from ..targets.model_copy import ModelCopy
from ..targets.pieces import Piece, parts_of
from ..targets.rank_sums import checkpoint_tensors, rank_sums
from ..weights.engine_sums import RankSums
from ..weights.table import TensorTable
from .vllm import SparserlEngine, synchronize
from .vllm_first_load import ENGINE_TYPES
from .vllm_layout import LoadedModel, derived_of, derived_tensors, empty_names, tied_names, without_warnings

_PLAIN = "On a CPU, start it with SPARSERL_VLLM_CPU=plain"
Layout = tuple[list[Piece], dict[str, str]]  # where tensors are, and which are not found, and why

_layouts: weakref.WeakKeyDictionary[torch.nn.Module, tuple[Any, Layout]] = weakref.WeakKeyDictionary()


def worker_sums(worker: Any, layout: str) -> dict[str, Any]:
    """The digests of the parts that a worker has of the tensors of a table, which `layout_to_bytes` wrote."""
    try:
        table = parse_layout(layout.encode(), "the table")
        with torch.no_grad(), set_current_vllm_config(worker.vllm_config):
            synchronize(worker.device)  # steps that have begun still read the weights
            return _sums(worker, table).record()
    except Exception as error:  # noqa: BLE001  # vLLM would take answers after it for those of its next call
        return {"error": f"{type(error).__name__}: {error}"}


def _sums(worker: Any, table: TensorTable) -> RankSums:
    model = worker.get_model()
    if empty := empty_names(model):
        reason = f"vLLM has packed its weights when it loaded them: {empty[0]!r} is empty. {_PLAIN}"
        return RankSums({}, {}, dict.fromkeys((*table.index, *empty), reason))
    engine = getattr(worker, "weight_transfer_engine", None)
    pieces, unclear_names = (
        ([piece for piece in engine.layout.pieces if piece.tensor not in engine.layout.drafted], {})
        if isinstance(engine, SparserlEngine)
        else _layout(worker.vllm_config, model, table)
    )
    parameters = {name for name, _ in model.named_parameters()}
    live = parts_of(model)
    tied = tied_names(worker.vllm_config.model_config, table.index)
    parallel = worker.vllm_config.parallel_config
    if (replicas := parallel.data_parallel_size) > 1:  # vLLM passes on the answers of the first one alone
        others = f"data-parallel replicas of {replicas}, other than {parallel.data_parallel_rank}"
        unclear_names = unclear_names | {others: "vLLM does not ask them"}
    return rank_sums(table, pieces, live, parameters & live.keys(), tied, unclear_names)


def _layout(vllm_config: Any, model: torch.nn.Module, table: TensorTable) -> Layout:
    """Where the tensors of a table are in a model; found out again if either has changed."""
    tensors = {name: (tensor.dtype, tuple(tensor.shape), tensor.stride()) for name, tensor in parts_of(model).items()}
    key = table, tensors
    if model not in _layouts or _layouts[model][0] != key:
        _layouts[model] = key, _learn(vllm_config, model, table)
    return _layouts[model][1]


def _learn(vllm_config: Any, model: torch.nn.Module, table: TensorTable) -> Layout:
    """Find out where tensors are by watching how the model loads made-up ones; it is then put back as it was."""
    live = parts_of(model)
    derived = derived_tensors(model, live)
    before = digests_of(live)
    derived_before = derived_of(model, live)
    copy = ModelCopy(model, live | derived, ENGINE_TYPES)
    tied = tied_names(vllm_config.model_config, table.index)  # one of two would take the other's place
    tensors = [tensor for tensor in checkpoint_tensors(table) if tensor.name not in tied]
    unclear_names: dict[str, str] = {}

    def put_back() -> None:
        copy.put_back()
        for module in model.modules():
            reload.get_layerwise_info(module).reset()  # of a load that was not finished

    def check() -> None:
        changed = derived_before.changes(derived_of(model, live))
        reason = "the engine computes it from the weights when it loads them"
        unclear_names.update((name, reason) for name in changed)

    def restore(_: object) -> None:
        check()
        put_back()

    try:
        with without_warnings():
            load = LoadedModel.of_checkpoint(model, vllm_config.model_config, vllm_config.load_config).load
            pieces = find_pieces(tensors, live, load, restore, unclear_names, restores_by_load=False, check=check)
    finally:
        put_back()
    after = parts_of(model)
    changed = [*changed_names(before, digests_of(after)), *derived_before.changes(derived_of(model, after))]
    if changed:
        raise SessionError(f"{changed[0]!r} is not what it was: restart the engine")
    return pieces, unclear_names
