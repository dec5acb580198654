"""SkyRL: the weight-sync backend `sparserl`. See docs/how-to/integrations/skyrl.md.

    driver ──► config ──► trainer ranks: who unpickles it imports this module, which adds the backend to SkyRL's tables
    send_weights ──► publish ──► store ──► vLLM's workers commit        (`skyrl_trainer`, and the vLLM backend)

SkyRL takes a backend that it does not know for `nccl`. So the options stand in a part of the config that only this
module adds: a process in which the backend is missing refuses the config, or cannot unpickle it.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import sys
from collections.abc import Callable
from typing import Any

from ..errors import SessionError
from ..session import Publisher

try:
    from skyrl.backends.skyrl_train import weight_sync
    from skyrl.train.config.config import GeneratorConfig, InferenceEngineConfig
    from skyrl.train.utils import utils as validation
except ImportError as missing:
    raise SessionError(f"SkyRL is not installed, or older than 0.4 ({missing})") from missing

BACKEND = "sparserl"
_SENDERS = f"{weight_sync.__name__}.weight_senders"
_OVERRIDE = "trainer.override_entrypoint="


@dataclasses.dataclass
class SparserlOptions:
    """`generator.inference_engine.sparserl`, the options of the backend; unknown ones are refused by name.

    Args:
        url: The store. The first rank of the trainer writes to it; vLLM's workers read it.
        profile: As for a `Publisher`.
        publisher: Further options of the `Publisher`, such as `signing_key`, `state` and `new_run`.
        worker: Further options of vLLM's workers, such as `trusted_keys`; see `SparserlInitInfo`.
    """

    url: str
    profile: str = "auto"
    publisher: dict[str, Any] = dataclasses.field(default_factory=dict)
    worker: dict[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        options = inspect.signature(Publisher).parameters.keys() - {"url", "source", "profile", "writers"}
        if unknown := sorted(self.publisher.keys() - options):
            raise SessionError(f"generator.inference_engine.sparserl.publisher has no option {unknown[0]!r}")


@dataclasses.dataclass
class SparserlEngineConfig(InferenceEngineConfig):
    """SkyRL's `generator.inference_engine`, with the options of this backend."""

    sparserl: SparserlOptions | None = None

    def __post_init__(self) -> None:
        if self.weight_sync_backend == BACKEND and self.sparserl is None:
            raise SessionError(f"weight_sync_backend={BACKEND} needs generator.inference_engine.sparserl.url=URL")
        if self.weight_sync_backend != BACKEND and self.sparserl is not None:
            raise SessionError(
                f"generator.inference_engine.sparserl is given, and weight_sync_backend={self.weight_sync_backend}: "
                f"set it to {BACKEND}"
            )


def main() -> None:
    """What `trainer.override_entrypoint=sparserl.integrations.skyrl` runs: SkyRL's entry point, with the backend."""
    sys.argv = [argument for argument in sys.argv if not argument.startswith(_OVERRIDE)]
    importlib.import_module("skyrl.train.entrypoints.main_base").main()


def _register() -> None:
    """Add the backend to SkyRL's tables."""
    weight_sync._VLLM_RECEIVE_BACKENDS[BACKEND] = BACKEND  # noqa: SLF001
    (engine_field,) = (field for field in dataclasses.fields(SparserlEngineConfig) if field.name == "sparserl")
    engine_field.type = SparserlOptions  # SkyRL builds what the field says, and does not read text
    (generator_field,) = (field for field in dataclasses.fields(GeneratorConfig) if field.name == "inference_engine")
    generator_field.type = SparserlEngineConfig
    _replace(weight_sync.get_transfer_strategy, get_transfer_strategy)
    _replace(validation.validate_inference_engine_cfg, validate_inference_engine_cfg)
    _replace(validation.validate_megatron_cfg, validate_megatron_cfg)


def _replace(original: Callable[..., Any], replacement: Callable[..., Any]) -> None:
    """Put a function in the place of one of SkyRL's, also in modules that have imported it by name."""
    for module_name, module in [*sys.modules.items()]:
        if module_name.startswith("skyrl.") and vars(module).get(original.__name__) is original:
            setattr(module, original.__name__, replacement)


_get_transfer_strategy: Callable[[str, bool], str] = weight_sync.get_transfer_strategy
_validate_inference_engine_cfg: Callable[[Any], None] = validation.validate_inference_engine_cfg
_validate_megatron_cfg: Callable[[Any], None] = validation.validate_megatron_cfg


def get_transfer_strategy(weight_sync_backend: str, colocate_all: bool) -> str:
    """As SkyRL's, which says for a backend how weights are sent. Senders ask it before they are built."""
    if weight_sync_backend != BACKEND:
        return _get_transfer_strategy(weight_sync_backend, colocate_all)
    if colocate_all:
        raise SessionError(
            f"weight_sync_backend={BACKEND} needs trainer.placement.colocate_all=false: SkyRL puts colocated engines "
            "to sleep, and these lose the weights that patches change"
        )
    if _SENDERS in sys.modules:  # it loads vLLM, which drivers do without
        importlib.import_module(f"{__package__}.skyrl_trainer")
    return BACKEND


def validate_inference_engine_cfg(cfg: Any) -> None:
    """As SkyRL's; and with this backend, nothing may be configured that it would not sync."""
    engine = cfg.generator.inference_engine
    if engine.weight_sync_backend == BACKEND:
        get_transfer_strategy(BACKEND, cfg.trainer.placement.colocate_all)
        if engine.offload_kv_for_weight_sync:
            raise SessionError(
                f"weight_sync_backend={BACKEND} needs offload_kv_for_weight_sync=false: engines would drop the weights "
                "that patches change"
            )
        servers = importlib.import_module("skyrl.backends.skyrl_train.inference_servers.utils")  # it loads vLLM
        if servers._uses_lora_weight_sync(cfg):  # noqa: SLF001
            raise SessionError(
                f"weight_sync_backend={BACKEND} syncs all weights, and no LoRA adapters: set "
                "trainer.policy.model.lora.rank=0, or merge them (trainer.strategy=megatron, merge_lora=true)"
            )
    _validate_inference_engine_cfg(cfg)


def validate_megatron_cfg(cfg: Any) -> None:
    """As SkyRL's, which has a list of backends."""
    engine = cfg.generator.inference_engine
    backend = engine.weight_sync_backend
    if backend == BACKEND:
        engine.weight_sync_backend = "delta"  # SkyRL's own backend through a store: it gets the same weights
    try:
        _validate_megatron_cfg(cfg)
    finally:
        engine.weight_sync_backend = backend


_register()
