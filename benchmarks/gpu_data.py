"""Weights for `benchmarks.gpu`: synthetic pairs and traces tiled to any size, on the device; and the CPU's bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

THRESHOLDS, SHIFT = (230, 234, 238, 244), 6  # what `plan.classes` chooses for the synthetic pair at 0.6%
PART = 8 << 20  # elements: large tensors are cut into parts as large as those of a patch
BUCKET = 32 << 20  # elements of a bucket, at this density
_TRACE_LOG, _TRACE_BUCKET = 18, 6 << 20
_SHARE = 0.3  # of every tensor of a trace: what travels to a machine without the traces

Array = np.ndarray[Any, Any]


def synthetic(nbytes: int, density: float, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """`benchmarks.traces.synthetic`, drawn on the device."""
    from benchmarks import traces

    folder = traces.find_traces()
    profile = min(
        (traces._measure(folder, run) for run in traces.runs(folder)),  # noqa: SLF001
        key=lambda p: abs(np.log(p.density / density)),
    )
    pool = np.concatenate([bits.ravel() for bits in traces.load(folder / "base.safetensors").values()])
    population = traces._tiled_population(np.resize(pool, pool.size), pool.size)  # noqa: SLF001
    chance = torch.from_numpy(traces._scaled(profile.chance, population, density)).cuda()  # noqa: SLF001
    outward, first = torch.from_numpy(profile.outward).cuda(), torch.from_numpy(profile.first).cuda()
    count = torch.from_numpy(profile.count).cuda()
    torch.manual_seed(seed)
    old = tiled(pool, nbytes // 2)
    new = old.clone()
    for at in range(0, old.numel(), 1 << 26):
        part = new[at : at + (1 << 26)]
        exponent = (part.to(torch.int32) >> 7) & 0xFF
        hit = (torch.rand(part.numel(), device="cuda") < chance[exponent]).nonzero().squeeze(1)
        exponent = exponent[hit]
        drawn = first[exponent] + (torch.rand(hit.numel(), device="cuda", dtype=torch.float64) * count[exponent]).long()
        wide = part[hit].to(torch.int32) & 0xFFFF
        sign = torch.where(wide >= 0x8000, -1, 1)
        order = torch.where(wide >= 0x8000, 0x7FFF - wide, wide) + outward[drawn] * sign
        part[hit] = torch.where(order < 0, 0x7FFF - order, order).to(torch.int16)
    return old, new


def tiled(bits: Array, numel: int) -> torch.Tensor:
    """Bits on the device, again and again."""
    out = torch.empty(numel, dtype=torch.int16, device="cuda")
    tile = torch.from_numpy(bits.view(np.int16)).cuda()
    for at in range(0, numel, tile.numel()):
        out[at : at + tile.numel()] = tile[: numel - at]
    return out


def parts_of(flat: torch.Tensor) -> list[torch.Tensor]:
    return list(flat.split(PART))


def buckets_of(sizes: list[int], each: int = BUCKET) -> Array:
    """The bucket of each part, about as large as told."""
    ends = np.cumsum(sizes)
    return np.unique((ends - 1) // each, return_inverse=True)[1]


def limits_of(parts: int, shift: int = SHIFT, thresholds: Any = THRESHOLDS) -> Array:
    return np.tile(np.asarray(thresholds, np.uint64) << np.uint64(shift), (parts, 1))


# -- traces -----------------------------------------------------------------------------------------------------------


def write_traces(path: Path) -> None:
    """A share of one sync of each run, with the classes that suit it, for a machine that has no traces."""
    from benchmarks import traces

    folder, out = traces.find_traces(), {}
    first: Array | None = None
    for run in traces.runs(folder):
        old, new = ([_cut(bits) for bits in side.values()] for side in next(iter(traces.syncs(folder, run))))
        before, after = np.concatenate(old), np.concatenate(new)
        classes = _chosen(before, after)
        first = before if first is None else first
        for name, (a, b) in {"old": (first, before), "new": (before, after)}.items():
            at = np.flatnonzero(a != b)
            out[f"{run}.{name}.at"], out[f"{run}.{name}.bits"] = at.astype(np.int32), b[at]
        out[f"{run}.classes"] = np.array([classes.shift, *classes.thresholds])
    assert first is not None
    np.savez_compressed(path, low=first.astype(np.uint8), high=(first >> 8).astype(np.uint8), **out)


def read_traces(path: Path) -> dict[str, tuple[Array, Array, Array]]:
    """Old bits, new bits and classes (shift, then thresholds) of each run."""
    with np.load(path) as file:
        base = file["low"].astype(np.uint16) | (file["high"].astype(np.uint16) << 8)
        out = {}
        for run in sorted(name[: -len(".classes")] for name in file if name.endswith(".classes")):
            sides = [base]
            for name in ("old", "new"):
                sides.append(sides[-1].copy())
                sides[-1][file[f"{run}.{name}.at"]] = file[f"{run}.{name}.bits"]
            out[run] = (sides[1], sides[2], file[f"{run}.classes"])
        return out


def _cut(bits: Array) -> Array:
    return bits.ravel()[: int(bits.size * _SHARE)]


def _chosen(old: Array, new: Array) -> Any:
    """The classes that a writer chooses for these changes."""
    from sparserl.kernels import reference
    from sparserl.plan.changes import Changes
    from sparserl.plan.classes import choose_classes
    from sparserl.weights.dtypes import BY_NAME

    positions, before, after = reference.diff(old, new)
    changes = Changes(
        BY_NAME["bfloat16"],
        *(np.array([0]), [None], np.array([old.size]), np.array([positions.size]), positions.astype(np.uint32), after),
        *(reference.steps(before, after, True), old.size),
        before=before,
    )
    where, numel = np.array([old.ctypes.data]), np.array([old.size])
    classes, _ = choose_classes(changes.dtype, where, numel, [changes], -(-old.size >> _TRACE_LOG))
    return classes


def trace_pair(path: Path | None) -> tuple[list[Array], list[Array]]:
    """Tensors of one sync of a trace, flat; from a file of `write_traces`, in pieces, where there is one."""
    from benchmarks import traces

    if path is not None:
        old, new, _ = list(read_traces(path).values())[-1]
        sides = [np.split(bits, (1_000_003, 2_000_000, 2_000_577)) for bits in (old, new)]
        return sides[0], sides[1]
    folder = traces.find_traces()
    old, new = next(iter(traces.syncs(folder, traces.runs(folder)[-1])))
    return [old[k].ravel() for k in sorted(old)], [new[k].ravel() for k in sorted(old)]


def trace_plan(blocks: Any) -> Any:
    """How the streams are cut that are held against the CPU's."""
    from sparserl.kernels import gpu

    sizes = blocks.sizes.tolist()
    return gpu.streams.StreamPlan.of(blocks, buckets_of(sizes, _TRACE_BUCKET), _TRACE_LOG, limits_of(len(sizes)))


def cpu_streams(olds: list[Array], news: list[Array]) -> dict[str, Any]:
    """What the CPU kernels make of the trace: all chunks of the `ctx` streams, by bucket and stream."""
    from sparserl import codec
    from sparserl.codec.profile import BucketLayout, Classes
    from sparserl.kernels import reference
    from sparserl.weights.dtypes import BY_NAME

    sizes = [o.size for o in olds]
    bucket, out = buckets_of(sizes, _TRACE_BUCKET), {}
    for b in range(int(bucket.max()) + 1):
        parts = [i for i in np.flatnonzero(bucket == b).tolist() if (olds[i] != news[i]).any()]
        found = [reference.diff(olds[i], news[i]) for i in parts]
        layout = BucketLayout(
            BY_NAME["bfloat16"],
            np.array([sizes[i] for i in parts]),
            np.array([f[0].size for f in found]),
            _TRACE_LOG,
            16,
            old_addresses=np.array([olds[i].ctypes.data for i in parts]),
            classes=Classes(SHIFT, THRESHOLDS),
        )
        positions, before, after = (np.concatenate(c) for c in zip(*found, strict=True))
        streams = codec.encode_streams(
            codec.profile_by_name("ctx").encode(layout, [positions], [reference.steps(before, after, True)])
        )
        for id, (coder, chunks) in streams.items():
            if id != codec.Stream.CLASSES:
                out[f"{b} {int(id)} {coder.id}"] = np.frombuffer(b"".join(chunks), np.uint8)
    return out
