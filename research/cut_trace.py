"""Cut real traces, given in full, to what the repository keeps: `python -m research.cut_trace FULL`.

The corpus has the first half of the rows of every matrix, and all syncs; its files are coded as `benchmarks.planes`
does. The small trace of the tests has leading rows of a few tensors and two syncs of each run, and can be cut from the
corpus: `python -m research.cut_trace`. Counts and densities are those of the cut; `model_density` stays that of the
whole model.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save

from benchmarks.planes import pack
from benchmarks.traces import describe, find_traces, load, runs

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
HALF = 2  # the rows of every matrix of the corpus, over those of the full traces

Numbers: TypeAlias = NDArray[Any]
_REPO = Path(__file__).resolve().parents[1]


def main(full: Path | None) -> None:
    """Cut the corpus from the full traces, where they are given, and the small trace from the corpus."""
    corpus = find_traces()
    if full is not None:
        rows = {n: len(b) // HALF if b.ndim > 1 else len(b) for n, b in load(full / "base.safetensors").items()}
        cut(full, corpus, rows, coded=True)
    cut(corpus, _REPO / "tests" / "data" / "trace", ROWS, SYNCS)


def cut(source: Path, target: Path, rows: Mapping[str, int], syncs: int | None = None, *, coded: bool = False) -> None:
    """Write a cut of the traces in `source` to `target`."""
    target.mkdir(parents=True, exist_ok=True)
    whole = load(source / "base.safetensors")
    base = {name: whole[name][:count] for name, count in rows.items()}
    _write(target / "base.safetensors", base, coded)
    sizes = {name: bits.size for name, bits in base.items()}
    for run in runs(source):
        description = describe(source, run)
        kept = description["syncs"][:syncs]
        for entry, tag in [(description["warm"], "warm"), *((sync, f"{sync['sync']:03d}") for sync in kept)]:
            changes = _inside(load(source / f"{run}-{tag}.safetensors"), sizes)
            _write(target / f"{run}-{tag}.safetensors", changes, coded)
            entry["changed"] = sum(numbers.size for name, numbers in changes.items() if name.endswith(".indices"))
            entry["density"] = entry["changed"] / sum(sizes.values())
        description |= {"elements": sum(sizes.values()), "syncs": kept, "rows": dict(rows)}
        (target / f"{run}.json").write_text(json.dumps(description, indent=1) + "\n")


def _inside(changes: Mapping[str, Numbers], sizes: Mapping[str, int]) -> dict[str, Numbers]:
    """The changes inside the leading rows, which are those below the cut's size."""
    kept = {}
    for name, size in sizes.items():
        indices = changes.get(f"{name}.indices", np.empty(0, np.int32))
        inside = int((indices < size).sum())
        if inside:
            kept[f"{name}.indices"] = indices[:inside]
            kept[f"{name}.values"] = changes[f"{name}.values"][:inside]
    return kept


def _write(path: Path, tensors: Mapping[str, Numbers], coded: bool) -> None:
    """Write a safetensors file, in which numbers of two bytes are bf16 bits."""
    held = {name: torch.from_numpy(np.ascontiguousarray(numbers)) for name, numbers in tensors.items()}
    data = save({name: t.view(torch.bfloat16) if t.dtype == torch.uint16 else t for name, t in held.items()})
    if coded:
        path.with_name(f"{path.name}.xz").write_bytes(pack(data))
    else:
        path.write_bytes(data)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else None)
