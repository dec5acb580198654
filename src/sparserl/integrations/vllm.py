"""vLLM, worker side: the weight-transfer backend `sparserl`. See docs/how-to/integrations/vllm.md.

    vLLM loads the model ──► watch how it loads made-up numbers ──► load the checkpoint again ──► compare ──► serve
    init_weight_transfer_engine ──► which version do all ranks have?      (meanwhile, on a thread: stage new versions)
    update_weights ──► stage on all ranks ──► commit on all, or on none

A worker whose weights cannot be updated in place does not start. vLLM makes these calls between two steps of the
engine, on all ranks at once.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import types
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from vllm.config import set_current_vllm_config
from vllm.distributed.parallel_state import get_world_group
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.logger import init_logger
from vllm.model_executor.model_loader import get_model_loader
from vllm.model_executor.model_loader.reload import layerwise as reload

from ..errors import SessionError, UnsupportedTensor
from ..session.store.signing import PublicKeys
from ..targets.engine import EngineTarget
from ..targets.engine_layout import changed_names, find_pieces
from ..targets.pieces import CheckpointTensor, Load, Piece, moved_name, parts_of
from ..weights.digest import Digest, digest, place_sums
from ..weights.local import LocalWeights
from .ranks import EngineSubscriber, gather_over

logger = init_logger(__name__)
_WAIT_SECONDS = 1.0  # that the staging thread waits for a new version before it checks whether to end


@dataclass
class SparserlInitInfo(WeightTransferInitInfo):
    """The store of the run; `trusted_keys`, `run` and `token` as for a `Subscriber`.

    Args:
        ahead: Whether new versions are staged as they are published, instead of when they are to be committed.
    """

    url: str
    trusted_keys: PublicKeys | None = None
    run: str | None = None
    token: str | None = None
    audit_every: int | None = None
    ahead: bool = True


@dataclass
class SparserlUpdateInfo(WeightTransferUpdateInfo):
    """The version to commit, by default the newest; with `audit`, all bits are then compared with its digest."""

    version: int | None = None
    audit: bool = False


class SparserlEngine(WeightTransferEngine[SparserlInitInfo, SparserlUpdateInfo]):
    """Follows a run on one worker of vLLM."""

    init_info_cls = SparserlInitInfo
    update_info_cls = SparserlUpdateInfo
    supports_draft_weight_update = False

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module) -> None:
        super().__init__(config, vllm_config, device, model)
        self._world = get_world_group()
        self._subscriber: EngineSubscriber | None = None
        self._lock = threading.Lock()  # the engine and the staging thread take turns with the subscriber
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        with set_current_vllm_config(vllm_config):
            self._pieces = learn_pieces(vllm_config, model)
        logger.info(
            "sparserl: %d pieces of %d checkpoint tensors", len(self._pieces), len({p.tensor for p in self._pieces})
        )

    @property
    def pieces(self) -> list[Piece]:
        """Where the checkpoint is in the model."""
        return self._pieces

    @property
    def subscriber(self) -> EngineSubscriber:
        if self._subscriber is None:
            raise SessionError("call init_weight_transfer_engine first, with the url of a run")
        return self._subscriber

    def parse_init_info(self, init_dict: dict[str, Any]) -> SparserlInitInfo | None:
        with self._raise_on_last_rank():
            info: SparserlInitInfo = super().parse_init_info(init_dict)
            return info
        return None

    def init_transfer_engine(self, init_info: SparserlInitInfo | None) -> None:
        """Follow a run from now on. All bits of the weights are read, to identify their version."""
        self.shutdown()
        if init_info is None:
            return
        target = EngineTarget(
            self._pieces,
            lambda: parts_of(self.model),
            tied_names(self.model_config, (piece.tensor for piece in self._pieces)),
        )
        options = {"trusted_keys": init_info.trusted_keys, "run": init_info.run, "token": init_info.token}
        rank = self._world.rank_in_group
        gather = gather_over(self._world)
        with self._raise_on_last_rank():
            subscriber = EngineSubscriber(
                init_info.url, target, rank, gather, audit_every=init_info.audit_every, **options
            )
            subscriber.refresh()
            self._subscriber = subscriber
        if init_info.ahead and self._subscriber is not None:
            self._ended.clear()
            self._thread = threading.Thread(target=self._stage_ahead, name="sparserl-ahead", daemon=True)
            self._thread.start()

    def start_weight_update(self) -> None:
        """Do nothing: versions are staged as they are published, or when they are committed."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Commit a version. If it raises, the weights are what they were."""
        with self._raise_on_last_rank():
            self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: SparserlUpdateInfo) -> None:
        subscriber = self.subscriber
        with self._lock:
            _synchronize(self.device)  # steps that have begun still read the weights
            report = subscriber.commit_version(update_info.version)
            _synchronize(self.device)
            if update_info.audit:
                subscriber.audit()
        logger.info("sparserl: %s", report or f"the engine has version {subscriber.version} already")

    def finish_weight_update(self) -> None:
        """Do nothing: a commit has written the weights in place."""

    def shutdown(self) -> None:
        """Stop following the run; the weights stay as they are."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._subscriber is not None:
            self._subscriber.close()
            self._subscriber = None

    @contextlib.contextmanager
    def _raise_on_last_rank(self) -> Iterator[None]:
        """Raise an error that all ranks have on the last rank only.

        vLLM reads the answers of workers in order up to the first failure, and takes those after it for answers to
        its next call (vllm-project/vllm#57846).
        """
        ranks = self.parallel_config.world_size
        try:
            yield
        except Exception as error:
            if self._world.rank_in_group % ranks == ranks - 1:
                raise
            logger.warning("sparserl: %s: %s", type(error).__name__, error)

    def _stage_ahead(self) -> None:
        subscriber = self.subscriber
        while not self._ended.is_set():
            with self._lock:
                subscriber.stage_newest()
            subscriber.wait(_WAIT_SECONDS)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def tied_names(model_config: Any, names: Iterable[str]) -> dict[str, str]:
    """Checkpoint tensors that the model need not load, and the tensors, among these names, that they are equal to."""
    if not getattr(model_config.hf_text_config, "tie_word_embeddings", False):
        return {}
    embeddings = {name for name in names if name.endswith("embed_tokens.weight")}
    return {f"{name.removesuffix('model.embed_tokens.weight')}lm_head.weight": name for name in embeddings}


def learn_pieces(vllm_config: Any, model: torch.nn.Module) -> list[Piece]:
    """Find out where the checkpoint of a model is in its tensors by watching how the model loads made-up numbers.

    The checkpoint itself is loaded last, so that the weights are what they were before, or this raises.
    """
    loader = get_model_loader(vllm_config.load_config)
    if not hasattr(loader, "get_all_weights"):
        raise UnsupportedTensor(
            f"weights of load format {vllm_config.load_config.load_format!r} cannot be loaded again"
        )

    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        yield from loader.get_all_weights(vllm_config.model_config, model)

    if empty := empty_names(model):
        raise UnsupportedTensor(
            f"{empty[0]!r} is empty: vLLM packs it when it is loaded, and changes cannot be written to the packed copy"
            ". On a CPU, start it with SPARSERL_VLLM_CPU=plain"
        )
    load = reload_of(vllm_config, model)
    live = parts_of(model)
    before = digests_of(live)
    derived_before = digests_of(derived_tensors(model, live))

    def restore() -> None:
        if changed := changed_names(derived_before, digests_of(derived_tensors(model, live))):
            raise UnsupportedTensor(
                f"{changed[0]!r} is computed from the weights when they are loaded, so that it would not change with "
                "them"
            )
        load(weights())

    tensors = [CheckpointTensor(name, tuple(tensor.shape), tensor.dtype) for name, tensor in weights()]
    with without_warnings():
        pieces = find_pieces(tensors, live, load, restore)
    after = parts_of(model)
    if moved := moved_name(live, after) or next(iter(changed_names(before, digests_of(after))), None):
        raise UnsupportedTensor(f"{moved!r} is not the same after the checkpoint was loaded again")
    _compare(pieces, live, weights())
    return pieces


def reload_of(vllm_config: Any, model: torch.nn.Module) -> Load:
    """What lets a model load tensors again, in place, with all postprocessing, as vLLM's own reload does."""

    def load(tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        _process_again(model)
        reload.initialize_layerwise_reload(model)
        cast("Any", model).load_weights(tensors)
        reload.finalize_layerwise_reload(model, vllm_config.model_config)

    return load


def empty_names(model: torch.nn.Module) -> list[str]:
    """Parameters that vLLM has packed when they were loaded, and emptied."""
    return [name for name, tensor in model.named_parameters() if not tensor.numel()]


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
def without_warnings() -> Iterator[None]:
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


def derived_tensors(model: torch.nn.Module, live: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
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


def digests_of(tensors: dict[str, torch.Tensor]) -> dict[str, Digest]:
    if not tensors:
        return {}
    weights = LocalWeights.of(tensors)
    return {weights.table[tensor].name: sums for (tensor, _), sums in place_sums(weights).items()}
