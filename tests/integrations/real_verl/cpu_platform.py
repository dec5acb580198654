"""A CPU as one of verl's platforms, through its plugin seam: so its real workers and FSDP engine run without a GPU.

`VERL_USE_EXTERNAL_MODULES` names this module, and `VERL_PLATFORM=cpu` chooses it; engines are registered for `cuda`,
which `VERL_ENGINE_DEVICE` says.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry


def _answer(value: Any = None) -> Callable[..., Any]:
    """A function, or a method, that has one answer."""
    return lambda *_, **__: value


MODULE = SimpleNamespace(  # in the place of torch.cuda
    **{name: getattr(torch.cpu, name) for name in ("current_device", "device_count", "is_available", "synchronize")},
    **dict.fromkeys(("empty_cache", "ipc_collect", "set_device", "manual_seed", "manual_seed_all"), _answer()),
    **dict.fromkeys(("max_memory_allocated", "max_memory_reserved", "memory_allocated", "memory_reserved"), _answer(0)),
    mem_get_info=_answer((0, 0)),
)


@PlatformRegistry.register(platform="cpu")
class PlatformCPU(PlatformBase):
    """Everything that verl asks of a platform."""

    device_name = "cpu"
    vendor_name = "cpu"
    device_module = MODULE
    current_device = _answer("cpu")  # which `to` takes; a number would mean an accelerator
    device_count = _answer(1)
    is_available = is_platform_available = _answer(True)
    set_device = synchronize = manual_seed = manual_seed_all = set_allocator_settings = empty_cache = _answer()
    profiler_start = profiler_stop = cudart = _answer()
    get_device_capability = _answer((None, None))
    communication_backend_name = _answer("gloo")
    visible_devices_envvar = _answer("CPU_VISIBLE_DEVICES")
    ray_resource_name = _answer("CPU")
    ray_noset_envvars = _answer([])
    is_ipc_supported = _answer(False)

    @contextlib.contextmanager
    def nvtx_range(self, _msg: str):
        yield
