"""vLLM, worker side: the load with which a worker starts is watched, so that the checkpoint is loaded once.

    WorkerWrapperBase.load_model ──► BaseModelLoader.load_model: weights go through a `FirstLoad` ──► take_first_load

Loaders that do not give their tensors one by one, as of sharded states, are left alone.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from typing import Any

import torch
from vllm.config import CompilationConfig, VllmConfig
from vllm.model_executor.model_loader.base_loader import BaseModelLoader

from ..targets.attributes import attribute_tensors
from ..targets.first_load import FirstLoad, load_kernel
from ..targets.pieces import parts_of

ENGINE_TYPES = (CompilationConfig, VllmConfig)  # through which a model has the layers of all others of the engine

_first_loads: weakref.WeakKeyDictionary[torch.nn.Module, FirstLoad] = weakref.WeakKeyDictionary()


def take_first_load(model: torch.nn.Module) -> FirstLoad | None:
    """The load of a model, if it was watched; it is forgotten then."""
    return _first_loads.pop(model, None)


@contextlib.contextmanager
def watched_loads() -> Iterator[None]:
    """Watch the loads of models that begin meanwhile: of the policy, and of its drafter."""
    load_model = BaseModelLoader.load_model

    def load_watched(loader: Any, *args: Any, **kwargs: Any) -> Any:
        return _load_watched(loader, lambda: load_model(loader, *args, **kwargs))

    BaseModelLoader.load_model = load_watched
    try:
        yield
    finally:
        BaseModelLoader.load_model = load_model


def _load_watched(loader: Any, load_model: Callable[[], torch.nn.Module]) -> torch.nn.Module:
    if not hasattr(loader, "get_all_weights"):
        return load_model()
    load_weights = loader.load_weights
    get_all_weights = loader.get_all_weights
    first_load: FirstLoad | None = None
    on_gpu = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    kernels = [load_kernel(torch.device("cuda", torch.cuda.current_device()))] if on_gpu else []
    with contextlib.ExitStack() as stack:

        def load_watched(model: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
            nonlocal first_load
            wait(kernels)
            buffers = {name: buffer for name, buffer in model.named_buffers() if not buffer.is_meta}
            parameters = dict(model.named_parameters())
            first_load = FirstLoad(buffers | attribute_tensors(model, parameters, ENGINE_TYPES))
            stack.enter_context(first_load)
            load_weights(model, *args, **kwargs)

        def watched_weights(*args: Any, **kwargs: Any) -> Any:
            weights = get_all_weights(*args, **kwargs)
            return weights if first_load is None else first_load.watched(weights)

        loader.load_weights = load_watched
        loader.get_all_weights = watched_weights
        try:
            model = load_model()
        finally:
            del loader.load_weights, loader.get_all_weights
    if first_load is not None:
        first_load.ended_with(parts_of(model))
        _first_loads[model] = first_load
    return model
