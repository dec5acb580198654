"""vLLM, worker side: LoRA adapters that follow a run, each under the id that it was loaded with.

    fetch ──► the adapter as it is published ──► vLLM's own loader (ranks, scaling, packing) ──► stage
    commit ──► vLLM's copy in host memory, and the slot if the adapter is active ── on all ranks, or on none

An adapter that vLLM has dropped from memory is loaded again from its last version, not from its old folder.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from vllm.distributed.parallel_state import get_world_group
from vllm.logger import init_logger
from vllm.lora.request import LoRARequest

from ..errors import SessionError, UnsupportedTensor
from ..sources.adapters import CONFIG
from ..targets.engine import EngineTarget, PreparedEngine
from ..targets.modules import ModuleTarget
from ..targets.target import Change, Undo
from ..weights.dtypes import dtype_of_torch
from ..weights.region import whole
from ..weights.shards import Part
from ..weights.table import TensorTable
from .ranks import EngineSubscriber, gather_over, make_subscriber, together
from .vllm import raise_on_last_rank, synchronize

logger = init_logger(__name__)
_DTYPES = {dtype_of_torch(dtype): dtype for dtype in (torch.float32, torch.bfloat16, torch.float16)}
_LIBRARY = "sparserl_library"  # an attribute of vLLM's manager of adapters


class AdapterLibrary:
    """The adapters of one worker that follow runs. vLLM loads these from here, and others from their folders."""

    def __init__(self, manager: Any) -> None:
        self._load_from_folder = manager._load_adapter  # noqa: SLF001  # vLLM has no seam for other places
        self._subscribers: dict[int, EngineSubscriber] = {}
        self._targets: dict[int, LoadedAdapter] = {}
        self._manager = manager
        manager._load_adapter = self._load  # noqa: SLF001

    @classmethod
    def of(cls, worker: Any) -> AdapterLibrary:
        """The library of a worker."""
        manager = getattr(worker.model_runner, "lora_manager", None)
        if manager is None:
            raise SessionError("vLLM was started without adapters; start it with --enable-lora")
        library: AdapterLibrary | None = getattr(manager, _LIBRARY, None)
        if library is None:
            library = cls(manager)
            setattr(manager, _LIBRARY, library)
        return library

    def follow(self, lora_id: int, url: str, **options: Any) -> None:
        """On all ranks at once: let an adapter follow a run; see `Subscriber` for the options."""
        world = get_world_group()
        previous = self._targets.get(lora_id)
        target = LoadedAdapter(self._manager, self._load_from_folder, lora_id, previous)
        subscriber = make_subscriber(url, target, world, **options)
        subscriber.refresh()
        if world.rank_in_group == 0:
            self._warn_if_unknown(lora_id)
        if lora_id in self._subscribers:
            self._subscribers[lora_id].close()
        self._subscribers[lora_id] = subscriber
        self._targets[lora_id] = target

    def _warn_if_unknown(self, lora_id: int) -> None:
        """Say if vLLM has no such adapter: it may still load it, or its id is wrong."""
        known = sorted(self._manager._adapter_manager.list_adapters())  # noqa: SLF001
        if lora_id not in known:
            logger.warning(
                "sparserl: vLLM has loaded no adapter %d (it has %s): commits show once a request names this id",
                lora_id,
                ", ".join(map(str, known)) or "none",
            )

    def commit(self, lora_id: int, version: int | None = None, run: str | None = None) -> None:
        """On all ranks at once: commit a version, by default the newest. If it raises, the adapter is what it was."""
        subscriber = together(lambda: self._subscriber(lora_id), gather_over(get_world_group()))
        report = subscriber.commit_version(version, run)
        logger.info("sparserl: adapter %d: %s", lora_id, report or f"has version {subscriber.version} already")

    def _subscriber(self, lora_id: int) -> EngineSubscriber:
        if lora_id not in self._subscribers:
            raise SessionError(f"adapter {lora_id} follows no run; call sparserl_follow_adapter first")
        return self._subscribers[lora_id]

    def _load(self, request: LoRARequest) -> Any:
        target = self._targets.get(request.lora_int_id)
        committed = None if target is None else target.committed
        return self._load_from_folder(request) if committed is None else committed.load()


class LoadedAdapter(EngineTarget):
    """One adapter of vLLM: its tensors as they are published, of which vLLM makes those that it computes with.

    Args:
        manager: vLLM's manager of the adapters of a worker.
        load_from_folder: How vLLM loads an adapter.
        lora_id: The adapter's id.
        previous: The same adapter as it followed a run before; its tensors are taken over if the run has such.
    """

    keeps_files = True
    exchanges_fresh = False

    def __init__(
        self, manager: Any, load_from_folder: Any, lora_id: int, previous: LoadedAdapter | None = None
    ) -> None:
        super().__init__((), lambda: self._weights)
        self.lora_id = lora_id
        self.config: bytes | None = None if previous is None else previous.config  # None before the first commit
        self._previous = None if previous is None else previous.committed
        self._manager = manager._adapter_manager  # noqa: SLF001  # the tensors; vLLM has no public way to them
        self._load_from_folder = load_from_folder
        self._weights: dict[str, torch.Tensor] = {} if previous is None else previous._weights  # noqa: SLF001

    @property
    def committed(self) -> LoadedAdapter | None:
        """The adapter with the version that was committed last, perhaps of the run that it followed before."""
        return self._previous if self.config is None else self

    def attach(self, table: TensorTable) -> Any:
        forms = {name: (tuple(tensor.shape), dtype_of_torch(tensor.dtype)) for name, tensor in self._weights.items()}
        if forms != {spec.name: (spec.shape, spec.dtype) for spec in table.specs}:
            self.config = None
            for spec in table.specs:
                if spec.dtype not in _DTYPES:
                    raise UnsupportedTensor(f"{spec.name!r} is {spec.dtype.name}; vLLM's adapters have floats")
            self._weights = {spec.name: torch.zeros(spec.shape, dtype=_DTYPES[spec.dtype]) for spec in table.specs}
        return super().attach(table)

    def _parts(self, name: str) -> Iterable[Part]:
        tensor = self.tensors.get(name)
        return () if tensor is None else (Part(name, whole(tuple(tensor.shape)), tensor),)

    def prepare(self, change: Change) -> PreparedEngine:
        """Build the new adapter beside the old one, and let vLLM load it; nothing in use is written."""
        weights = {name: tensor.clone() for name, tensor in self._weights.items()}
        prepared = ModuleTarget(weights, self._threads).prepare(change)
        prepared.commit()
        config = self.config if change.files is None else change.files.get(CONFIG)
        if config is None:
            raise SessionError(f"the run has no {CONFIG}; publish it with the adapter: Publisher(..., files=…)")
        lora = self.load(weights, config)
        self._manager._create_merged_loras_inplace(lora)  # noqa: SLF001
        return PreparedEngine(self, [lambda: self._commit(weights, config, lora)], None, prepared.changed)

    def load(self, weights: dict[str, torch.Tensor] | None = None, config: bytes | None = None) -> Any:
        """What vLLM loads from an adapter, by default from the version that was committed last."""
        weights = weights or self._weights
        config = config or self.config
        assert config is not None
        registered = self._manager.list_adapters().get(self.lora_id)
        with tempfile.TemporaryDirectory(prefix="sparserl-") as folder:
            save_file(weights, Path(folder) / "adapter_model.safetensors")
            (Path(folder) / CONFIG).write_bytes(config)
            request = LoRARequest(f"adapter {self.lora_id}", self.lora_id, folder)
            if getattr(registered, "is_3d_lora_weight", False):
                request.is_3d_lora_weight = True
            lora = self._load_from_folder(request)
        if modules := getattr(lora, "modules_to_save", None):  # vLLM until 0.30 refuses such adapters itself
            raise UnsupportedTensor(f"{next(iter(modules))!r} is a whole module, which cannot be followed")
        return lora

    def _commit(self, weights: dict[str, torch.Tensor], config: bytes, lora: Any) -> Undo:
        """Let vLLM have a new adapter in place of the old one."""
        registered = self._manager.list_adapters().get(self.lora_id)
        old_loras = None if registered is None else registered.loras
        old = self._weights, self.config

        def undo() -> None:
            self._hold(*old)
            self._show(registered, old_loras)

        try:
            self._hold(weights, config)
            self._show(registered, lora.loras)
        except BaseException:
            undo()
            raise
        return undo

    def _hold(self, weights: dict[str, torch.Tensor], config: bytes | None) -> None:
        table = self.local_weights.table
        self._weights = weights
        self.config = config
        self.attach(table)

    def _show(self, registered: Any, loras: Any) -> None:
        """Write to an adapter that vLLM has loaded: to its copy in host memory, and to its slot, if it has one."""
        if registered is None:
            return  # vLLM will load it from here
        registered.loras = loras
        manager = self._manager
        if self.lora_id not in manager.lora_index_to_id:
            return
        slot = manager.lora_index_to_id.index(self.lora_id)
        for name, module in manager.modules.items():
            layer = manager._get_lora_layer_weights(registered, name)  # noqa: SLF001
            if layer is None:
                module.reset_lora(slot)
            else:
                module.set_lora(slot, layer.lora_a, layer.lora_b)


def follow_adapter(worker: Any, lora_id: int, url: str, **options: Any) -> None:
    """On one worker of all that are called: let an adapter follow a run."""
    with raise_on_last_rank(worker.parallel_config):
        AdapterLibrary.of(worker).follow(lora_id, url, **options)


def commit_adapter(worker: Any, lora_id: int, version: int | None, run: str | None = None) -> None:
    """On one worker of all that are called: commit a version of an adapter."""
    with raise_on_last_rank(worker.parallel_config):
        synchronize(worker.device)  # steps that have begun still read the adapter
        AdapterLibrary.of(worker).commit(lora_id, version, run)
        synchronize(worker.device)
