"""The kernels on a GPU: exact on large data, and how long each pass takes beside what memory allows.

    python -m benchmarks.gpu --out gpu.json [--gib 8] [--traces FILE] [--expected FILE] [--only NAME,NAME] [--sweep]

Everything is checked bit for bit first, with poisoned buffers; nothing is timed on a red gate. Times are medians, from
device events; what waits for the host is timed by the host. Where the CPU kernels cannot be imported (no Numba), their
bytes come from a file that `--write-expected FILE` made elsewhere, and patches are not coded by the CPU. A machine
without the traces reads a share of them from a file that `--write-traces FILE` made. `--sweep` times every kernel in
several shapes (what a program handles together, and its warps). Without a GPU it says so and ends.
"""

from __future__ import annotations

import argparse
import json
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import gpu_quantize, gpu_scenes
from benchmarks.gpu_data import (
    buckets_of,
    cpu_streams,
    limits_of,
    parts_of,
    synthetic,
    trace_pair,
    trace_plan,
    write_traces,
)
from benchmarks.gpu_scenes import decoded, milliseconds, peak_over, require

_SRC = Path(__file__).resolve().parents[1] / "src"
POISON = 0xA5


def _import_kernels() -> bool:
    """Make `sparserl.kernels.gpu.changes` importable. Says whether the CPU kernels are there as well."""
    sys.path.insert(0, str(_SRC))
    try:
        import sparserl.kernels.cpu.changes  # noqa: F401
    except ImportError:
        for name in [n for n in sys.modules if n.partition(".")[0] == "sparserl"]:
            del sys.modules[name]
        for name, folder in (("sparserl", "sparserl"), ("sparserl.kernels", "sparserl/kernels")):
            package = types.ModuleType(name)
            package.__path__ = [str(_SRC / folder)]
            sys.modules[name] = package
        return False
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--gib", type=float, default=8.0)
    parser.add_argument("--traces", type=Path)
    parser.add_argument("--expected", type=Path)
    parser.add_argument("--only", default="kernels,traces,training,quantize,crossover,nccl,library,small,7b")
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--write-expected", type=Path)
    parser.add_argument("--write-traces", type=Path)
    args = parser.parse_args()
    if args.write_expected or args.write_traces:
        _import_kernels()
        if args.write_traces:
            write_traces(args.write_traces)
        if args.write_expected:
            np.savez_compressed(args.write_expected, **cpu_streams(*trace_pair(args.traces)))
        return
    if not torch.cuda.is_available():
        print("There is no GPU here: nothing to measure.")
        return
    has_cpu = _import_kernels()
    expected = dict(np.load(args.expected)) if args.expected else None
    _measure(args, has_cpu, cpu_streams(*trace_pair(args.traces)) if has_cpu else expected)


def _measure(args: argparse.Namespace, has_cpu: bool, expected: dict[str, Any] | None) -> None:
    """Check, then measure what was asked for; what fails is written down, and the rest goes on."""
    import triton

    device, versions = torch.cuda.get_device_name(), {"torch": torch.__version__, "triton": triton.__version__}
    results: dict[str, Any] = {"device": device, **versions, "numba": has_cpu}
    failed = []

    def keep(name: str, work: Callable[[], Any]) -> None:
        torch.cuda.empty_cache()
        try:
            results[name] = work()
        except Exception as error:  # noqa: BLE001
            results[name] = {"failed": f"{type(error).__name__}: {error}"}
            failed.append(name)
        print(name, json.dumps(results[name]), flush=True)
        if args.out:
            args.out.write_text(json.dumps(results, indent=1))

    results["checked"] = check(expected, args.traces)
    nbytes = int(args.gib * 2**30)
    scenes: dict[str, Callable[[], Any]] = {"kernels": lambda: time_all(*synthetic(nbytes, 0.006))}
    if args.sweep:
        scenes["sweep"] = lambda: sweep(*synthetic(nbytes, 0.006))
    if args.traces:
        scenes["traces"] = lambda: gpu_scenes.time_traces(args.traces, nbytes, results["kernels"]["ms"])
    scenes["training"] = gpu_scenes.training_step
    if has_cpu:
        scenes["quantize"] = gpu_quantize.quantizing
        scenes |= {"crossover": gpu_scenes.crossover, "nccl": gpu_scenes.one_rank}
        scenes |= {"library": gpu_scenes.library, "small": gpu_scenes.small}
    scenes["7b"] = gpu_scenes.sync_7b
    for name, work in scenes.items():
        if name == "sweep" or name in args.only.split(","):
            keep(name, work)
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


# -- checks -----------------------------------------------------------------------------------------------------------


def _poisoned(self: Any, size: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.full((size * dtype.itemsize,), POISON, dtype=torch.uint8, device=self.device).view(dtype)


def check(expected: dict[str, Any] | None, traces: Path | None) -> dict[str, Any]:
    """Every kernel on large random data, held against PyTorch, NumPy and the CPU's bytes; raises where bits differ."""
    from sparserl.kernels import gpu

    plain = gpu.changes.Blocks.empty
    gpu.changes.Blocks.empty = _poisoned
    try:
        done = {f"{kind} {width}": _check_width(width, kind) for width, kind in _KINDS}
        done["cast"] = _check_mark()
        done["same bytes as the CPU"] = _check_bytes(expected, traces) if expected else "not checked"
    finally:
        gpu.changes.Blocks.empty = plain
    return done


_KINDS = ((1, "float"), (2, "float"), (4, "float"), (8, "float"), (1, "signed"), (2, "signed"), (4, "plain"))


def _check_width(width: int, kind: str) -> int:
    """Returns how many changes were found, coded, decoded and landed."""
    from sparserl.kernels import gpu, reference

    torch.manual_seed(width)
    rng = np.random.default_rng(width)
    ints = gpu.ints.INTS[width]
    sizes = [40_000_003, 1, 8192, 0, 24_000_000, 65_537, 31]
    buffers = [torch.randint(0, 256, (width * (n + 8),), dtype=torch.uint8, device="cuda").view(ints) for n in sizes]
    olds = [b[1 : n + 1] if kind == "signed" else b[:n] for b, n in zip(buffers, sizes, strict=True)]
    news = [o.clone() for o in olds]
    for i, new in enumerate(news):
        flip = torch.rand(new.numel(), device="cuda") < (0.01 if i != 1 else 2.0)
        noise = torch.randint(0, 256, (width * new.numel(),), dtype=torch.uint8, device="cuda").view(ints)
        new[flip] = noise[flip]
        if new.numel() < 40:
            new ^= 1
    keys = rng.integers(0, 2**64, (len(sizes), 2), dtype=np.uint64)
    blocks = gpu.changes.Blocks(width, sizes, "cuda", keys)
    old, new = blocks.side(olds), blocks.side(news)
    words, counts = gpu.changes.diff(blocks, old, new)
    wanted = [(a != b).nonzero().squeeze(1) for a, b in zip(olds, news, strict=True)]
    per = torch.tensor([w.numel() for w in wanted], device="cuda")
    total = int(per.sum())
    require(torch.equal(gpu.streams.part_changes(blocks, counts), per), "changes per part")
    positions, after, before, sums = gpu.changes.compact(blocks, old, new, words, counts, total, keep_old=True)
    require(torch.equal(positions.to(torch.int64) & 0xFFFFFFFF, torch.cat(wanted)), "positions")
    require(torch.equal(after, torch.cat([b[w] for b, w in zip(news, wanted, strict=True)])), "new bits")
    require(torch.equal(before, torch.cat([a[w] for a, w in zip(olds, wanted, strict=True)])), "old bits")
    sign = kind == "float"
    _, steps, _, _ = gpu.changes.compact(blocks, old, new, words, counts, total, steps=True, sign_magnitude=sign)
    uint = np.dtype(f"u{width}")
    some = slice(0, 1 << 20)
    told = reference.steps(*(t[some].cpu().numpy().view(uint) for t in (before, after)), sign)
    require(np.array_equal(told, steps[some].cpu().numpy().view(uint)), "steps")
    moved = gpu.changes.sum_slots(sums)
    require(torch.equal(gpu.changes.digest(blocks, old) + moved, gpu.changes.digest(blocks, new)), "the digest's way")
    small = gpu.changes.Blocks(width, [300_001], "cuda", keys[:1], [7])
    first = reference.digest(keys[0], 7, olds[0][:300_001].cpu().numpy().view(uint))
    got = gpu.changes.digest(small, small.side([olds[0][:300_001]])).cpu().numpy().view(np.uint64).tolist()
    require(list(first) == got, "digest")
    bad = torch.zeros(1, dtype=torch.int32, device="cuda")
    changes, parts = per.cpu().numpy(), [0, 0, 0, 0, 1, 1, 1]
    ulp = gpu.streams.StreamPlan.of(blocks, parts, 16, sign_magnitude=sign)
    sent = gpu.streams.encode(ulp, old, new)
    for locate in (
        lambda side: gpu.cells.locate(blocks, side, changes, positions, after, bad),
        lambda side: decoded(ulp, side, sent, bad),
    ):
        target = blocks.side([a.clone() for a in olds])
        found = locate(target)
        same = torch.equal(found.old, before) and torch.equal(found.new, after)
        require(int(bad) == 0 and same and torch.equal(gpu.changes.sum_slots(found.sums), moved), "located")
        gpu.classes.write(target, found, found.new, bad)
        require(all(map(torch.equal, target.owners, new.owners)), "landed")
    broken = positions.clone()
    broken[total // 2] = broken[total // 2 - 1]
    gpu.cells.locate(blocks, target, changes, broken, after, bad)
    require(int(bad) == 1, "positions that do not rise are refused")
    bits = 8 * width
    limits = np.array([[1 << (bits - 4), 1 << (bits - 3), (1 << (bits - 2)) - 1]] * len(sizes), np.uint64)
    plan = gpu.streams.StreamPlan.of(blocks, parts, 16, limits, sign_magnitude=sign, signed=kind == "signed")
    encoded = gpu.streams.encode(plan, old, new)
    require(torch.equal(encoded.digest_delta, moved), "the digest's way, by classes")
    target = blocks.side([a.clone() for a in olds])
    bad.zero_()
    found = decoded(plan, target, encoded, bad)
    require(int(bad) == 0 and torch.equal(gpu.changes.sum_slots(found.sums), moved), "decoded")
    gpu.classes.write(target, found, found.new, bad)
    require(all(map(torch.equal, target.owners, new.owners)), "landed by classes")
    return total


def _check_mark() -> int:
    from sparserl.kernels import gpu

    torch.manual_seed(7)
    sizes = [30_000_001, 5, 8192]
    patterns = [torch.randint(-(2**31), 2**31, (n,), dtype=torch.int32, device="cuda") for n in sizes]
    masters = [p.view(torch.float32) for p in patterns]  # every kind of NaN, infinity and subnormal
    cast = [m.to(torch.bfloat16).view(torch.int16) for m in masters]
    olds = [torch.where(torch.rand(n, device="cuda") < 0.99, c, 5) for n, c in zip(sizes, cast, strict=True)]
    blocks = gpu.changes.Blocks(2, sizes, "cuda")
    weights = blocks.side([o.clone() for o in olds])
    words = blocks.bitmap()
    counts = blocks.empty(blocks.count, torch.int32)
    gpu.changes.mark(blocks, gpu.changes.Blocks(4, sizes, "cuda").side(masters), weights, words, counts)
    require(all(map(torch.equal, weights.owners, cast)), "cast and copied")
    wanted, _ = gpu.changes.diff(blocks, blocks.side(olds), blocks.side(cast))
    require(torch.equal(words, wanted), "marks")
    gpu.changes.mark(blocks, blocks.side(olds), weights, words, counts)
    require(all(map(torch.equal, weights.owners, olds)) and torch.equal(words, wanted), "marks, copied back")
    return int(counts.sum())


def _check_bytes(expected: dict[str, Any], traces: Path | None) -> int:
    """Returns how many bytes of the trace's streams are those that the CPU writes."""
    from sparserl.kernels import gpu

    olds, news = trace_pair(traces)
    blocks = gpu.changes.Blocks(2, [o.size for o in olds], "cuda")
    old, new = (blocks.side([torch.from_numpy(a.view(np.int16)).cuda() for a in side]) for side in (olds, news))
    plan = trace_plan(blocks)
    encoded = gpu.streams.encode(plan, old, new)
    d, data = encoded.directory, encoded.data.cpu().numpy()
    keys = [f"{b} {s} {c}" for b, s, c in zip(d.bucket.tolist(), d.stream.tolist(), d.coder.tolist(), strict=True)]
    require(set(keys) >= {k for k in expected if k.split()[1] not in "45"}, "streams")
    same = 0
    for name, bytes_ in expected.items():
        rows = [i for i, k in enumerate(keys) if k == name]
        if not rows and name.split()[1] in "45":
            continue  # the CPU took zstd for counts of tiles
        mine = np.concatenate([data[d.offset[i] : d.offset[i] + d.length[i]] for i in rows])
        require(np.array_equal(mine, bytes_), f"bytes of stream {name}")
        same += mine.size
    return same


# -- times ------------------------------------------------------------------------------------------------------------


def kernels_of(work: Callable[[], Any]) -> dict[str, float]:
    """Milliseconds of each kernel of one run."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        work()
        torch.cuda.synchronize()
    rows = [(e.key[:60], e.device_time_total / 1000) for e in seen.key_averages()]
    return {name: round(ms, 3) for name, ms in sorted(rows, key=lambda r: -r[1])[:24] if ms > 0.004}


def _floor_kernels() -> tuple[Any, Any]:
    import triton
    import triton.language as tl

    @triton.jit
    def read(a, out, B: tl.constexpr):  # noqa: ANN001, ANN202, N803
        i = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B)
        tl.store(out + tl.program_id(0), tl.max(tl.load(a + i), axis=0))

    @triton.jit
    def read2(a, b, out, B: tl.constexpr):  # noqa: ANN001, ANN202, N803
        i = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B)
        tl.store(out + tl.program_id(0), tl.max(tl.load(a + i) ^ tl.load(b + i), axis=0))

    return read, read2


def floors(old: torch.Tensor, new: torch.Tensor) -> dict[str, float]:
    """What memory allows: one copy read, both read, one copied."""
    read, read2 = _floor_kernels()
    a, b = old.view(torch.int32), new.view(torch.int32)
    n = a.numel() // 4096
    out = torch.empty(n, dtype=torch.int32, device="cuda")
    into = torch.empty_like(old)
    return {
        "read one": milliseconds(lambda: read[(n,)](a, out, 4096)),
        "read both": milliseconds(lambda: read2[(n,)](a, b, out, 4096)),
        "copy": milliseconds(lambda: into.copy_(old)),
    }


def time_all(old_flat: torch.Tensor, new_flat: torch.Tensor) -> dict[str, Any]:
    """All passes on one pair, beside the floors and the PyTorch way."""
    from sparserl.kernels import gpu

    out: dict[str, Any] = {
        "GiB": old_flat.numel() * 2 / 2**30,
        "ms": {},
        "times floor": {},
        "peak MiB": {},
        "kernels": {},
    }
    ms = out["ms"]
    ms |= floors(old_flat, new_flat)
    olds, news = parts_of(old_flat), parts_of(new_flat)
    sizes = [t.numel() for t in olds]
    rng = np.random.default_rng(0)
    blocks = gpu.changes.Blocks(2, sizes, "cuda", rng.integers(0, 2**64, (len(sizes), 2), dtype=np.uint64))
    old, new = blocks.side(olds), blocks.side(news)
    words, counts = gpu.changes.diff(blocks, old, new)
    changes = gpu.streams.part_changes(blocks, counts).cpu().numpy()
    total = int(changes.sum())
    out["changed"], out["density"] = total, total / old_flat.numel()
    bucket = buckets_of(sizes)
    ulp = gpu.streams.StreamPlan.of(blocks, bucket, 18)
    ctx = gpu.streams.StreamPlan.of(blocks, bucket, 18, limits_of(len(sizes)))
    bad = torch.zeros(1, dtype=torch.int32, device="cuda")

    def raw() -> Any:
        words, counts = gpu.changes.diff(blocks, old, new)
        ends = torch.cumsum(counts, 0, dtype=torch.int64)
        return gpu.changes.compact(blocks, old, new, words, counts, int(ends[-1]), ends=ends)

    positions, after, _, sums = raw()
    moved = gpu.changes.sum_slots(sums)
    sent = {"ulp": gpu.streams.encode(ulp, old, new), "ctx": gpu.streams.encode(ctx, old, new)}
    for name, encoded in sent.items():
        out[f"{name} bits per change"] = round(8 * encoded.data.numel() / total, 3)

    def land(name: str, side: gpu.changes.Side, back: bool = True) -> None:  # old bits, to be repeatable
        if name == "raw":
            found = gpu.cells.locate(blocks, side, changes, positions, after, bad)
        else:
            found = decoded(ctx if name == "ctx" else ulp, side, sent[name], bad)
        wrong = bad | (gpu.changes.sum_slots(found.sums) != moved).any().to(torch.int32)
        gpu.classes.write(side, found, found.old if back else found.new, wrong)

    works: dict[str, tuple[Callable[[], Any], str]] = {
        "diff": (lambda: gpu.changes.diff(blocks, old, new), "read both"),
        "diff + raw": (raw, "read both"),
        "diff + ulp": (lambda: gpu.streams.encode(ulp, old, new), "read both"),
        "diff + ctx": (lambda: gpu.streams.encode(ctx, old, new), "read both"),
        "raw: check + apply": (lambda: land("raw", old), "read one"),
        "ulp: decode + apply": (lambda: land("ulp", old), "read one"),
        "ctx: decode + apply": (lambda: land("ctx", old), "read one"),
        "digest": (lambda: gpu.changes.digest(blocks, old), "read one"),
    }
    for name, (work, floor) in works.items():
        ms[name] = milliseconds(work)
        out["times floor"][name] = round(ms[name] / ms[floor], 2)
        out["peak MiB"][name] = peak_over(work)
        out["kernels"][name] = kernels_of(work)
    ms["PyTorch: ne, nonzero, gather, per tensor"] = milliseconds(lambda: _torch_way(olds, news), 3)
    for name in ("raw", "ulp", "ctx"):
        target = blocks.side([t.clone() for t in olds])
        land(name, target, back=False)
        require(int(bad) == 0 and all(map(torch.equal, target.owners, new.owners)), f"{name} landed")
    del words, counts
    torch.cuda.empty_cache()
    out |= _time_tracking(old_flat, new_flat)
    return out


def _torch_way(olds: list[torch.Tensor], news: list[torch.Tensor]) -> list[Any]:
    found = []
    for a, b in zip(olds, news, strict=True):
        where = torch.ne(a, b).nonzero().squeeze(1)
        found.append((where.to(torch.int32), b[where]))
    return found


def _tracking(old_flat: torch.Tensor, new_flat: torch.Tensor) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """A step that changes a share of the bf16 weights: cast and copy; and cast, compare, mark and copy."""
    from sparserl.kernels import gpu

    half = old_flat.numel() // 2
    sides = [flat[:half].view(torch.bfloat16).to(torch.float32) for flat in (old_flat, new_flat)]
    sizes = [t.numel() for t in parts_of(old_flat[:half])]
    blocks, wide = gpu.changes.Blocks(2, sizes, "cuda"), gpu.changes.Blocks(4, sizes, "cuda")
    weights = old_flat[:half].clone().view(torch.bfloat16)
    side = blocks.side(parts_of(weights))
    masters = [wide.side(parts_of(s)) for s in sides]
    words, counts = blocks.bitmap(), blocks.empty(blocks.count, torch.int32)
    turn = iter(range(10**6))
    return (
        lambda: weights.copy_(sides[next(turn) % 2]),
        lambda: gpu.changes.mark(blocks, masters[next(turn) % 2], side, words, counts),
    )


def _time_tracking(old_flat: torch.Tensor, new_flat: torch.Tensor) -> dict[str, Any]:
    """What marks cost beside the plain cast and copy."""
    plain, marked = (milliseconds(work, 20) for work in _tracking(old_flat, new_flat))
    ms = {"track: cast and copy": plain, "track: cast, compare, mark, copy": marked}
    return {"tracking ms": ms, "tracking ratio": round(marked / plain, 3)}


# -- shapes -----------------------------------------------------------------------------------------------------------

_WAYS = {
    "diff": ("raw", "_diff_kernel", ((2048, 4), (8192, 4), (8192, 8))),
    "compact": ("raw", "_compact_kernel", ((32, 1), (64, 1))),
    "diff and count": ("ctx", "_count_kernel", ((128, 4), (256, 8), (64, 4))),
    "classify": ("ctx", "_classify_kernel", ((64, 1), (64, 2))),
    "sort": ("ctx", "_sort_kernel", ((32, 1), (64, 1))),
    "pack": ("ctx", "_pack_kernel", ((2048, 4), (2048, 8), (4096, 8))),
    "count": ("decode", "_count_kernel", ((128, 4), (256, 8), (64, 4))),
    "unpack": ("decode", "_unpack_kernel", ((2048, 4), (2048, 8), (4096, 8))),
    "positions": ("decode", "_class_positions_kernel", ((32, 1), (64, 1), (64, 2))),
    "write": ("decode", "_write_kernel", ((128, 4), (512, 4), (1024, 8))),
    "locate": ("ulp decode", "_locate_kernel", ((128, 1), (64, 2), (128, 4))),
    "mark": ("mark", "_mark_kernel", ((32, 2), (64, 4), (64, 8), (128, 8), (256, 8))),
}


def sweep(old_flat: torch.Tensor, new_flat: torch.Tensor) -> dict[str, Any]:
    """Milliseconds of each kernel in its shape and in others."""
    from sparserl.kernels import gpu

    olds, news = parts_of(old_flat), parts_of(new_flat)
    sizes = [t.numel() for t in olds]
    blocks, bucket = gpu.changes.Blocks(2, sizes, "cuda"), buckets_of(sizes)
    old, new = blocks.side(olds), blocks.side(news)
    plan = gpu.streams.StreamPlan.of(blocks, bucket, 18, limits_of(len(sizes)))
    sent, bad = gpu.streams.encode(plan, old, new), torch.zeros(1, dtype=torch.int32, device="cuda")

    def decode() -> None:
        found = decoded(plan, old, sent, bad)
        gpu.classes.write(old, found, found.old, bad)

    def raw() -> None:
        words, counts = gpu.changes.diff(blocks, old, new)
        gpu.changes.compact(blocks, old, new, words, counts, int(sent.changes.sum()))

    ulp = gpu.streams.StreamPlan.of(blocks, bucket, 18)
    short = gpu.streams.encode(ulp, old, new)
    works = {"raw": raw, "ctx": lambda: gpu.streams.encode(plan, old, new), "decode": decode}
    works["ulp decode"] = lambda: decoded(ulp, old, short, bad)
    works["mark"] = _tracking(old_flat, new_flat)[1]
    out: dict[str, Any] = {}
    for module in (gpu.changes, gpu.cells, gpu.classes, gpu.rans):
        for name, usual in list(module.SHAPES.items()):
            way, kernel, others = _WAYS[name]
            for shape in (usual, *others):
                module.SHAPES[name] = shape
                works[way]()
                times = [kernels_of(works[way])[kernel] for _ in range(3)]
                out.setdefault(name, {})[f"{shape[0]} × {shape[1]}"] = min(times)
            module.SHAPES[name] = usual
    return out


if __name__ == "__main__":
    main()
