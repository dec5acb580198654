"""The plugin that SGLang loads in each of its processes (entry point `sglang.srt.plugins`); it imports no torch.

It adds the loader of sparserl to the servers' option `custom_weight_loader`, which only names who may load: nothing is
imported before the first update.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

LOADER = "sparserl.integrations.sglang.load"


def register() -> None:
    """Have SGLang call `add_loader` where it decides on the options that concern loading.

    Releases such as 0.5.15 have no such place; their servers take the option `--custom-weight-loader`.
    """
    try:
        from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook
    except ImportError:
        return
    register_resolution_hook("handle_load_format")(add_loader)


def add_loader(server_args: Any, previous: Callable[[Any], None]) -> None:
    """Add the loader to those that the user has named, unless the server would not start with any.

    Args:
        server_args: The options of the server.
        previous: SGLang's own decisions, which come first.
    """
    from sglang.srt.arg_groups.overrides import declare_resolution, resolving_view

    previous(server_args)
    options = resolving_view(server_args)
    loaders = options.custom_weight_loader or []
    if LOADER in loaders or options.startup_weight_load_mode == "overlap":
        return
    declare_resolution(server_args, "sparserl", custom_weight_loader=[*loaders, LOADER])
