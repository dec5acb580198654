"""AReaL's own parser of options, run in a process of its own: its config classes, Hydra and OmegaConf.

    python -m tests.integrations.areal_options FOLDER --config FILE NAME=VALUE …

prints the three options of the page as JSON. FOLDER has FILES of AReaL; what else they import has stand-ins.
"""

from __future__ import annotations

import importlib
import json
import logging
import sys
from types import ModuleType
from typing import Any

FILES = ["areal/api/cli_args.py", "areal/utils/constants.py"]

# what areal/api/cli_args.py imports and does not need to read options
STAND_INS: dict[str, dict[str, Any]] = {
    "uvloop": {"install": lambda: None},
    "areal.engine.fsdp_utils.attn_impl": {
        "BUILTIN_ATTN_IMPLS": ["flash_attention_2"],
        "get_attn_impl_validation_error": None,
        "is_valid_attn_impl": lambda name: name == "flash_attention_2",
    },
    "areal.utils": {"logging": logging, "name_resolve": None, "pkg_version": None},
    "areal.utils.seqpack": {"PACKING_ALGORITHMS": ["ffd"]},
}


def main(folder: str, *argv: str) -> None:
    sys.path.insert(0, folder)
    for name, values in STAND_INS.items():
        module = ModuleType(name)
        vars(module).update(values)
        sys.modules[name] = module
    sys.modules["areal.utils"].__path__ = [f"{folder}/areal/utils"]
    options = importlib.import_module("areal.api.cli_args")
    given, _ = options.parse_cli_args(list(argv))
    config = options.OmegaConf.to_object(options.to_structured_cfg(given, options.GRPOConfig))
    actor, rollout = config.actor, config.rollout
    print(json.dumps([actor.weight_update_mode, actor.weight_written_hook, rollout.weight_read_hook]))


if __name__ == "__main__":
    main(*sys.argv[1:])
