"""Checkpoints for tests: small weights in awkward dtypes and shapes, and the files and folders that hold them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from sparserl.weights.dtypes import BY_NAME, Bits

SHAPES: dict[str, tuple[str, tuple[int, ...]]] = {
    "embed.weight": ("bfloat16", (33, 65)),
    "empty": ("bfloat16", (0, 7)),
    "layers.0.down": ("bfloat16", (70, 129)),
    "layers.0.scale": ("float32", (70,)),
    "layers.1.flags": ("bool", (5, 3)),
    "layers.1.fp8": ("float8_e4m3fn", (64, 31)),
    "layers.1.up": ("float16", (2, 3, 40)),
    "router": ("float32", (4, 64)),
    "step": ("int64", ()),
}


def random_weights(seed: int = 0) -> dict[str, Bits]:
    """Any bit pattern may occur: NaNs, infinities and negative zeros among them."""
    rng = np.random.default_rng(seed)
    out = {}
    for name, (kind, shape) in SHAPES.items():
        dtype = BY_NAME[kind]
        high = 2 if kind == "bool" else 1 << (8 * dtype.width)
        out[name] = Bits(np.asarray(rng.integers(0, high, shape, dtype.uint)), dtype)
    return out


def stepped(weights: Mapping[str, Bits], seed: int, density: float = 0.05) -> dict[str, Bits]:
    """A copy in which some elements differ, often by a flip of the lowest bit."""
    rng = np.random.default_rng(seed)
    out = {}
    for name, bits in weights.items():
        flip = (rng.random(bits.array.shape) < density).astype(bits.dtype.uint)
        out[name] = Bits(np.asarray(bits.array ^ flip), bits.dtype)
    return out


def successive_versions(count: int) -> list[dict[str, Bits]]:
    """Weights, and what becomes of them in each of the steps that follow."""
    versions = [random_weights()]
    for seed in range(1, count):
        versions.append(stepped(versions[-1], seed))
    return versions


def safetensors_header(entries: object, pad: int = 0) -> bytes:
    raw = json.dumps(entries).encode() + b" " * pad
    return len(raw).to_bytes(8, "little") + raw


def safetensors_bytes(weights: Mapping[str, Bits], pad: int = 0) -> bytes:
    """A file with metadata; `pad` moves the tensors to any alignment."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, bits in weights.items():
        raw = bits.array.tobytes()
        offsets = [len(data), len(data) + len(raw)]
        shape = list(bits.array.shape)
        entries[name] = {"dtype": bits.dtype.safetensors, "shape": shape, "data_offsets": offsets}
        data += raw
    return safetensors_header(entries, pad) + data


def write_file(path: Path, weights: Mapping[str, Bits], pad: int = 0) -> Path:
    path.write_bytes(safetensors_bytes(weights, pad))
    return path


def write_folder(path: Path, weights: Mapping[str, Bits], shards: int = 3, stem: str = "model") -> Path:
    """A Hugging Face folder: shards, index, config, and something in a folder below."""
    path.mkdir(parents=True)
    weight_map = {}
    names = list(weights)
    for i in range(shards):
        shard = f"{stem}-{i + 1:05}-of-{shards:05}.safetensors"
        write_file(path / shard, {n: weights[n] for n in names[i::shards]}, pad=i)
        weight_map |= dict.fromkeys(names[i::shards], shard)
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (path / f"{stem}.safetensors.index.json").write_text(json.dumps(index))
    (path / "config.json").write_text('{"model_type": "tiny"}')
    (path / "assets").mkdir()
    (path / "assets" / "vocab.txt").write_text("a\nb\n")
    return path


def tree(path: Path) -> dict[str, bytes]:
    """Every file below a path (or the file itself) with its bytes, hidden ones too."""
    if path.is_file():
        return {"": path.read_bytes()}
    return {p.relative_to(path).as_posix(): p.read_bytes() for p in sorted(path.rglob("*")) if p.is_file()}


def equal(a: Mapping[str, Bits], b: Mapping[str, Bits]) -> bool:
    """The same names, dtypes, shapes and bits."""
    return a.keys() == b.keys() and all(
        a[n].dtype is b[n].dtype
        and a[n].array.shape == b[n].array.shape
        and bool(np.array_equal(a[n].array, b[n].array))
        for n in a
    )
