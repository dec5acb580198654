"""The plugin that vLLM loads in each of its processes (entry point `vllm.general_plugins`), and its worker extension.

It registers the weight-transfer backend `sparserl`, gives workers methods that tell their version, and their digests
for `sparserl verify-engine`, and has prime-rl's method commit versions. It imports neither torch nor Numba: vLLM 0.32
on a CPU cannot start a worker in a process that has loaded llvmlite.
"""

from __future__ import annotations

from typing import Any

from ..humanize import switch
from .vllm_client import END_UPDATE, VERSION
from .vllm_workers import close_update, workers

SUMS = "sparserl_sums"  # the method of workers that `sparserl verify-engine` calls
PRIME_RL = "update_weights_from_path"  # the method of prime-rl's workers that its server calls


def register() -> None:
    """Register both sides of the backend, and the method of workers. They are imported when they are first used.

    Raises:
        SparserlError: SPARSERL_VLLM_CPU is set to an unknown word.
    """
    try:
        from vllm.distributed.weight_transfer import factory
        from vllm.v1.worker.worker_base import WorkerWrapperBase
    except ImportError:
        return  # vLLM before 0.16 transfers no weights, and must start where sparserl is installed

    for registry, module, name in (
        ("WeightTransferEngineFactory", "vllm", "SparserlEngine"),
        ("WeightTransferTrainerFactory", "vllm_trainer", "SparserlTrainer"),
    ):
        if not hasattr(factory, registry):
            continue  # vLLM 0.25 has no trainers, and must start where sparserl is installed
        try:
            getattr(factory, registry).register_engine("sparserl", f"sparserl.integrations.{module}", name)
        except ValueError:
            continue  # vLLM may load plugins more than once
    setattr(WorkerWrapperBase, SUMS, _worker_sums)
    setattr(WorkerWrapperBase, VERSION, _worker_version)
    setattr(WorkerWrapperBase, END_UPDATE, _end_update)
    setattr(WorkerWrapperBase, PRIME_RL, _update_weights_from_path)
    WorkerWrapperBase.load_model = _load_model
    if switch("SPARSERL_VLLM_CPU", "plain"):
        keep_cpu_weights()


def _worker_sums(wrapper: Any, layout: str) -> dict[str, Any]:
    """Digests of the weights that a worker has; see `vllm_verify.worker_sums`."""
    from .vllm_verify import worker_sums

    return worker_sums(wrapper.worker, layout)


def _worker_version(wrapper: Any) -> dict[str, str | None]:
    """Which version of a run a worker has, if it follows one."""
    return {"version": wrapper.worker.weight_transfer_engine.weight_version if _has_backend(wrapper) else None}


def _end_update(wrapper: Any) -> None:
    """End an update that a worker has begun."""
    if _has_backend(wrapper):
        close_update(wrapper.worker.weight_transfer_engine)


def _update_weights_from_path(wrapper: Any, weight_dir: str) -> None:
    """With the backend, commit the step that prime-rl asks for; otherwise let its worker load the folder."""
    if not _has_backend(wrapper):
        wrapper.worker.update_weights_from_path(weight_dir)
        return
    from .prime_rl import commit_broadcast

    commit_broadcast(wrapper.worker.weight_transfer_engine, weight_dir)


def _has_backend(wrapper: Any) -> bool:
    config = wrapper.worker.vllm_config.weight_transfer_config
    return config is not None and config.backend == "sparserl"


def _load_model(wrapper: Any, **options: Any) -> None:
    """Let a worker load its models; with the backend, these loads are watched (see `vllm_first_load`)."""
    workers.add(wrapper.worker)
    if not _has_backend(wrapper):
        wrapper.worker.load_model(**options)
        return
    from .vllm_first_load import watched_loads

    with watched_loads():
        wrapper.worker.load_model(**options)


def keep_cpu_weights() -> None:
    """Make vLLM's CPU backend compute with the weights as they were loaded.

    By default it packs them for oneDNN or AMX and keeps nothing that changes could be written to. vLLM has no option
    for this.
    """
    import torch
    import vllm._custom_ops as ops

    ops._supports_onednn = False  # noqa: SLF001
    torch.cpu._is_amx_tile_supported = lambda: False  # noqa: SLF001


class AdapterWorker:
    """What `--worker-extension-cls sparserl.integrations.vllm_plugin.AdapterWorker` adds to the workers of vLLM.

    `AdapterTrainer` calls it through `collective_rpc`, on all ranks at once, between two steps of the engine.
    """

    def sparserl_follow_adapter(self, lora_id: int, url: str, **options: Any) -> None:
        """Let the adapter with this id follow a run; options as for a `Subscriber`."""
        from .vllm_adapters import follow_adapter

        follow_adapter(self, lora_id, url, **options)

    def sparserl_commit_adapter(self, lora_id: int, version: int | None = None, run: str | None = None) -> None:
        """Commit a version, by default the newest, on all ranks or on none. The prefix cache must be reset then."""
        from .vllm_adapters import commit_adapter

        commit_adapter(self, lora_id, version, run)
