"""Cut a small real trace for the tests from the full traces: `python -m research.cut_trace`.

It keeps leading rows of a few tensors and two syncs of each run, in the format of `benchmarks.traces`, with
counts and densities of the cut. `model_density` stays that of the whole model.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from benchmarks.traces import describe, runs

# Shapes that differ: an embedding, norms, wide and square matrices, from early and late layers.
ROWS = {
    "model.embed_tokens.weight": 40,
    "model.layers.0.input_layernorm.weight": 576,
    "model.layers.0.mlp.down_proj.weight": 12,
    "model.layers.0.self_attn.v_proj.weight": 32,
    "model.layers.15.post_attention_layernorm.weight": 576,
    "model.layers.15.self_attn.q_proj.weight": 32,
    "model.layers.29.self_attn.o_proj.weight": 32,
    "model.norm.weight": 576,
}
SYNCS = 2

_REPO = Path(__file__).resolve().parents[1]


def cut(source: Path, target: Path) -> None:
    """Write the cut of the traces in `source` to `target`."""
    target.mkdir(parents=True, exist_ok=True)
    base = {name: t[: ROWS[name]].clone() for name, t in load_file(source / "base.safetensors").items() if name in ROWS}
    save_file(base, target / "base.safetensors")
    sizes = {name: tensor.numel() for name, tensor in base.items()}
    for run in runs(source):
        description = _cut_run(source, target, run, sizes)
        (target / f"{run}.json").write_text(json.dumps(description, indent=1) + "\n")


def _cut_run(source: Path, target: Path, run: str, sizes: dict[str, int]) -> dict[str, Any]:
    """Write the change files of one run and return its description with the cut's own figures."""
    description = describe(source, run)
    elements = sum(sizes.values())
    kept = description["syncs"][:SYNCS]
    for entry, tag in [(description["warm"], "warm"), *((sync, f"{sync['sync']:03d}") for sync in kept)]:
        file = f"{run}-{tag}.safetensors"
        entry["changed"] = _cut_changes(source / file, target / file, sizes)
        entry["density"] = entry["changed"] / elements
    return description | {"elements": elements, "syncs": kept, "rows": ROWS}


def _cut_changes(source: Path, target: Path, sizes: dict[str, int]) -> int:
    """Keep the changes inside the leading rows, which are those below the cut's size; return their number."""
    changes = load_file(source)
    kept: dict[str, torch.Tensor] = {}
    for name, size in sizes.items():
        indices = changes.get(f"{name}.indices", torch.empty(0, dtype=torch.int32))
        inside = int((indices < size).sum())
        if inside:
            kept[f"{name}.indices"] = indices[:inside].clone()
            kept[f"{name}.values"] = changes[f"{name}.values"][:inside].clone()
    save_file(kept, target)
    return sum(tensor.numel() for name, tensor in kept.items() if name.endswith(".indices"))


if __name__ == "__main__":
    cut(_REPO.parent / "shared" / "traces", _REPO / "tests" / "data" / "trace")
