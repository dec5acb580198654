"""The kernels on a GPU: exact on large data, and how long each pass takes beside what memory allows.

    python -m benchmarks.gpu --out gpu.json [--gib 8] [--expected FILE]

Everything is checked bit for bit first, with poisoned buffers; nothing is timed on a red gate. Times are medians, from
device events; what waits for the host is timed by the host. Where the CPU kernels cannot be imported (no Numba), their
bytes come from a file that `--write-expected FILE` made elsewhere. Without a GPU it says so and ends.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

_SRC = Path(__file__).resolve().parents[1] / "src"
THRESHOLDS, SHIFT = (230, 234, 238, 244), 6  # what `plan.classes` chooses for the synthetic pair at 0.6%
PART = 8 << 20  # elements: large tensors are cut into parts as large as those of a patch
BUCKET = 32 << 20  # elements of a bucket, at this density
POISON = 0xA5


def _import_kernels() -> bool:
    """Make `sparserl.kernels.gpu` importable. Says whether the CPU kernels are there as well."""
    sys.path.insert(0, str(_SRC))
    try:
        import sparserl.kernels.cpu  # noqa: F401
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
    parser.add_argument("--expected", type=Path)
    parser.add_argument("--write-expected", type=Path)
    parser.add_argument("--skip-7b", action="store_true")
    args = parser.parse_args()
    if args.write_expected:
        _import_kernels()
        np.savez_compressed(args.write_expected, **_cpu_streams(*_trace_pair()))
        return
    if not torch.cuda.is_available():
        print("There is no GPU here: nothing to measure.")
        return
    has_cpu = _import_kernels()
    import triton

    results: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "numba": has_cpu,
    }

    def keep(name: str, value: Any) -> None:
        results[name] = value
        print(name, json.dumps(value), flush=True)
        if args.out:
            args.out.write_text(json.dumps(results, indent=1))

    expected = _cpu_streams(*_trace_pair()) if has_cpu else dict(np.load(args.expected)) if args.expected else None
    keep("checked", check(expected))
    pair = synthetic(int(args.gib * 2**30), 0.006)
    keep("kernels", time_all(*pair))
    if not args.skip_7b:
        del pair
        torch.cuda.empty_cache()
        keep("7b", sync_7b())


# -- data -------------------------------------------------------------------------------------------------------------


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
    old = torch.empty(nbytes // 2, dtype=torch.int16, device="cuda")
    tile = torch.from_numpy(pool.view(np.int16)).cuda()
    for at in range(0, old.numel(), tile.numel()):
        old[at : at + tile.numel()] = tile[: old.numel() - at]
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


def _trace_pair() -> tuple[list[np.ndarray[Any, Any]], list[np.ndarray[Any, Any]]]:
    """The tensors of one sync of a trace, flat, in order."""
    from benchmarks import traces

    folder = traces.find_traces()
    old, new = next(iter(traces.syncs(folder, traces.runs(folder)[-1])))
    return [old[k].ravel() for k in sorted(old)], [new[k].ravel() for k in sorted(old)]


def _buckets(sizes: list[int], each: int) -> np.ndarray[Any, Any]:
    """The bucket of each part, about as large as told."""
    ends = np.cumsum(sizes)
    return np.unique((ends - 1) // each, return_inverse=True)[1]


_TRACE_LOG, _TRACE_BUCKET = 18, 6 << 20


def _cpu_streams(olds: list[Any], news: list[Any]) -> dict[str, Any]:
    """What the CPU kernels make of the trace: all chunks of the `ctx` streams, by bucket and stream."""
    from sparserl import codec
    from sparserl.bits import BY_NAME
    from sparserl.codec.profile import Classes, Layout
    from sparserl.kernels import reference

    sizes = [o.size for o in olds]
    bucket, out = _buckets(sizes, _TRACE_BUCKET), {}
    for b in range(int(bucket.max()) + 1):
        parts = [i for i in np.flatnonzero(bucket == b).tolist() if (olds[i] != news[i]).any()]
        found = [reference.diff(olds[i], news[i]) for i in parts]
        layout = Layout(
            BY_NAME["bfloat16"],
            np.array([sizes[i] for i in parts]),
            np.array([f[0].size for f in found]),
            _TRACE_LOG,
            16,
            old=np.array([olds[i].ctypes.data for i in parts]),
            classes=Classes(SHIFT, THRESHOLDS),
        )
        positions, before, after = (np.concatenate(c) for c in zip(*found, strict=True))
        streams = codec.code(codec.profile("ctx").encode(layout, positions, reference.steps(before, after, True)))
        for id, (coder, chunks) in streams.items():
            if id != codec.Stream.CLASSES:
                out[f"{b} {int(id)} {coder.id}"] = np.frombuffer(b"".join(chunks), np.uint8)
    return out


# -- checks -----------------------------------------------------------------------------------------------------------


def _poisoned(self: Any, size: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.full((size * dtype.itemsize,), POISON, dtype=torch.uint8, device=self.device).view(dtype)


def check(expected: dict[str, Any] | None) -> dict[str, Any]:
    """Every kernel on large random data, held against PyTorch, NumPy and the CPU's bytes; raises where bits differ."""
    from sparserl.kernels import gpu

    plain = gpu.Blocks.empty
    gpu.Blocks.empty = _poisoned
    try:
        done = {f"{kind} {width}": _check_width(width, kind) for width, kind in _KINDS}
        done["cast"] = _check_mark()
        done["same bytes as the CPU"] = _check_bytes(expected) if expected else "not checked"
    finally:
        gpu.Blocks.empty = plain
    return done


_KINDS = ((1, "float"), (2, "float"), (4, "float"), (8, "float"), (1, "signed"), (2, "signed"), (4, "plain"))


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise SystemExit(f"wrong: {what}")


def _check_width(width: int, kind: str) -> int:
    """Returns how many changes were found, coded, decoded and landed."""
    from sparserl.kernels import gpu, gpu_classes, gpu_streams, reference

    torch.manual_seed(width)
    rng = np.random.default_rng(width)
    ints = gpu.INTS[width]
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
    blocks = gpu.Blocks(width, sizes, "cuda", keys)
    old, new = blocks.side(olds), blocks.side(news)
    words, counts = gpu.diff(blocks, old, new)
    wanted = [(a != b).nonzero().squeeze(1) for a, b in zip(olds, news, strict=True)]
    per = torch.tensor([w.numel() for w in wanted], device="cuda")
    total = int(per.sum())
    _require(torch.equal(gpu_streams.part_changes(blocks, counts), per), "changes per part")
    positions, after, before, sums = gpu.compact(blocks, old, new, words, counts, total, keep_old=True)
    _require(torch.equal(positions.to(torch.int64) & 0xFFFFFFFF, torch.cat(wanted)), "positions")
    _require(torch.equal(after, torch.cat([b[w] for b, w in zip(news, wanted, strict=True)])), "new bits")
    _require(torch.equal(before, torch.cat([a[w] for a, w in zip(olds, wanted, strict=True)])), "old bits")
    sign = kind == "float"
    _, steps, _, _ = gpu.compact(blocks, old, new, words, counts, total, steps=True, sign_magnitude=sign)
    uint = np.dtype(f"u{width}")
    some = slice(0, 1 << 20)
    told = reference.steps(*(t[some].cpu().numpy().view(uint) for t in (before, after)), sign)
    _require(np.array_equal(told, steps[some].cpu().numpy().view(uint)), "steps")
    moved = gpu.total(sums)
    _require(torch.equal(gpu.digest(blocks, old) + moved, gpu.digest(blocks, new)), "the digest's way")
    small = gpu.Blocks(width, [300_001], "cuda", keys[:1], [7])
    first = reference.digest(keys[0], 7, olds[0][:300_001].cpu().numpy().view(uint))
    got = gpu.digest(small, small.side([olds[0][:300_001]])).cpu().numpy().view(np.uint64).tolist()
    _require(list(first) == got, "digest")
    bad = torch.zeros(1, dtype=torch.int32, device="cuda")
    gpu.rising(blocks, per, positions, bad)
    for given, absolute in ((after, True), (steps, False)):
        target = blocks.side([a.clone() for a in olds])
        was, sums = gpu.exchange(
            blocks, target, per, positions, given.clone(), bad, absolute=absolute, sign_magnitude=sign
        )
        _require(int(bad) == 0 and torch.equal(was, before) and torch.equal(gpu.total(sums), moved), "exchange")
        _require(all(map(torch.equal, target.alive, new.alive)), "landed")
    broken = positions.clone()
    broken[total // 2] = broken[total // 2 - 1]
    gpu.rising(blocks, per, broken, bad)
    _require(int(bad) == 1, "positions that do not rise are refused")
    bits = 8 * width
    limits = np.array([[1 << (bits - 4), 1 << (bits - 3), (1 << (bits - 2)) - 1]] * len(sizes), np.uint64)
    plan = gpu_streams.Plan.of(blocks, [0, 0, 0, 0, 1, 1, 1], 16, limits, sign_magnitude=sign, signed=kind == "signed")
    encoded = gpu_streams.encode(plan, old, new)
    _require(torch.equal(encoded.moved, moved), "the digest's way, by classes")
    target = blocks.side([a.clone() for a in olds])
    bad.zero_()
    found = gpu_streams.decode(plan, target, encoded.data, encoded.directory, encoded.changes, bad)
    _require(int(bad) == 0 and torch.equal(gpu.total(found.sums), moved), "decoded")
    gpu_classes.land(target, found, found.new, bad)
    _require(all(map(torch.equal, target.alive, new.alive)), "landed by classes")
    return total


def _check_mark() -> int:
    from sparserl.kernels import gpu

    torch.manual_seed(7)
    sizes = [30_000_001, 5, 8192]
    patterns = [torch.randint(-(2**31), 2**31, (n,), dtype=torch.int32, device="cuda") for n in sizes]
    masters = [p.view(torch.float32) for p in patterns]  # every kind of NaN, infinity and subnormal
    cast = [m.to(torch.bfloat16).view(torch.int16) for m in masters]
    olds = [torch.where(torch.rand(n, device="cuda") < 0.99, c, 5) for n, c in zip(sizes, cast, strict=True)]
    blocks = gpu.Blocks(2, sizes, "cuda")
    weights = blocks.side([o.clone() for o in olds])
    words = blocks.bitmap()
    counts = blocks.empty(blocks.count, torch.int32)
    gpu.mark(blocks, gpu.Blocks(4, sizes, "cuda").side(masters), weights, words, counts)
    _require(all(map(torch.equal, weights.alive, cast)), "cast and copied")
    wanted, _ = gpu.diff(blocks, blocks.side(olds), blocks.side(cast))
    _require(torch.equal(words, wanted), "marks")
    gpu.mark(blocks, blocks.side(olds), weights, words, counts)
    _require(all(map(torch.equal, weights.alive, olds)) and torch.equal(words, wanted), "marks, copied back")
    return int(counts.sum())


def _check_bytes(expected: dict[str, Any]) -> int:
    """Returns how many bytes of the trace's streams are those that the CPU writes."""
    from sparserl.kernels import gpu, gpu_streams

    olds, news = _trace_pair()
    sizes = [o.size for o in olds]
    blocks = gpu.Blocks(2, sizes, "cuda")
    old, new = (blocks.side([torch.from_numpy(a.view(np.int16)).cuda() for a in side]) for side in (olds, news))
    limits = np.tile(np.array(THRESHOLDS, np.uint64) << np.uint64(SHIFT), (len(sizes), 1))
    plan = gpu_streams.Plan.of(blocks, _buckets(sizes, _TRACE_BUCKET), _TRACE_LOG, limits)
    encoded = gpu_streams.encode(plan, old, new)
    d, data = encoded.directory, encoded.data.cpu().numpy()
    keys = [f"{b} {s} {c}" for b, s, c in zip(d.bucket.tolist(), d.stream.tolist(), d.coder.tolist(), strict=True)]
    _require(set(keys) >= {k for k in expected if k.split()[1] not in "45"}, "streams")
    same = 0
    for name, bytes_ in expected.items():
        rows = [i for i, k in enumerate(keys) if k == name]
        if not rows and name.split()[1] in "45":
            continue  # the CPU took zstd for counts of tiles
        mine = np.concatenate([data[d.offset[i] : d.offset[i] + d.length[i]] for i in rows])
        _require(np.array_equal(mine, bytes_), f"bytes of stream {name}")
        same += mine.size
    return same


# -- times ------------------------------------------------------------------------------------------------------------


def milliseconds(work: Callable[[], Any], repeats: int = 10) -> float:
    """The median, by device events, after two warm-ups."""
    times = []
    for i in range(repeats + 2):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        work()
        end.record()
        end.synchronize()
        if i >= 2:
            times.append(start.elapsed_time(end))
    return round(statistics.median(times), 3)


def kernels_of(work: Callable[[], Any]) -> dict[str, float]:
    """Milliseconds of each kernel of one run."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        work()
        torch.cuda.synchronize()
    rows = [(e.key[:60], e.device_time_total / 1000) for e in seen.key_averages()]
    return {name: round(ms, 3) for name, ms in sorted(rows, key=lambda r: -r[1])[:24] if ms > 0.004}


def peak_over(work: Callable[[], Any]) -> int:
    """MiB of device memory that a run takes beside what is there before."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    work()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) >> 20


def parts_of(flat: torch.Tensor) -> list[torch.Tensor]:
    return list(flat.split(PART))


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
    from sparserl.kernels import gpu, gpu_classes, gpu_streams

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
    blocks = gpu.Blocks(2, sizes, "cuda", rng.integers(0, 2**64, (len(sizes), 2), dtype=np.uint64))
    old, new = blocks.side(olds), blocks.side(news)
    words, counts = gpu.diff(blocks, old, new)
    per = gpu_streams.part_changes(blocks, counts)
    total = int(per.sum())
    out["changed"], out["density"] = total, total / old_flat.numel()
    limits = np.tile(np.array(THRESHOLDS, np.uint64) << np.uint64(SHIFT), (len(sizes), 1))
    bucket = _buckets(sizes, BUCKET)
    ulp = gpu_streams.Plan.of(blocks, bucket, 18)
    ctx = gpu_streams.Plan.of(blocks, bucket, 18, limits)
    bad = torch.zeros(1, dtype=torch.int32, device="cuda")

    def raw() -> Any:
        words, counts = gpu.diff(blocks, old, new)
        changes = int(gpu_streams.part_changes(blocks, counts).sum())
        return gpu.compact(blocks, old, new, words, counts, changes)

    positions, after, _, sums = raw()
    moved = gpu.total(sums)
    target = blocks.side([t.clone() for t in olds])

    def land_raw() -> None:
        gpu.rising(blocks, per, positions, bad)
        gpu.exchange(blocks, target, per, positions, after, bad)

    encoded = gpu_streams.encode(ctx, old, new)
    out["ctx bits per change"] = round(8 * encoded.data.numel() / total, 3)
    out["ulp bits per change"] = round(8 * gpu_streams.encode(ulp, old, new).data.numel() / total, 3)

    def land_ctx(side: gpu.Side, back: bool) -> None:
        found = gpu_streams.decode(ctx, side, encoded.data, encoded.directory, encoded.changes, bad)
        wrong = bad | (gpu.total(found.sums) != moved).any().to(torch.int32)
        gpu_classes.land(side, found, found.old if back else found.new, wrong)

    works: dict[str, tuple[Callable[[], Any], str]] = {
        "diff": (lambda: gpu.diff(blocks, old, new), "read both"),
        "diff + raw": (raw, "read both"),
        "diff + ulp": (lambda: gpu_streams.encode(ulp, old, new), "read both"),
        "diff + ctx": (lambda: gpu_streams.encode(ctx, old, new), "read both"),
        "raw: check + apply": (land_raw, "read one"),
        "ctx: decode + apply": (lambda: land_ctx(old, back=True), "read one"),  # old bits, to be repeatable
        "digest": (lambda: gpu.digest(blocks, old), "read one"),
    }
    for name, (work, floor) in works.items():
        ms[name] = milliseconds(work)
        out["times floor"][name] = round(ms[name] / ms[floor], 2)
        out["peak MiB"][name] = peak_over(work)
        out["kernels"][name] = kernels_of(work)
    ms["PyTorch: ne, nonzero, gather, per tensor"] = milliseconds(lambda: _torch_way(olds, news), 3)
    _require(int(bad) == 0 and all(map(torch.equal, target.alive, new.alive)), "raw landed")
    target = blocks.side([t.clone() for t in olds])
    land_ctx(target, back=False)
    _require(int(bad) == 0 and all(map(torch.equal, target.alive, new.alive)), "ctx landed")
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


def _time_tracking(old_flat: torch.Tensor, new_flat: torch.Tensor) -> dict[str, Any]:
    """A step that changes a share of the bf16 weights: cast, compare, mark and copy beside the plain cast and copy."""
    from sparserl.kernels import gpu

    half = old_flat.numel() // 2
    sides = [flat[:half].view(torch.bfloat16).to(torch.float32) for flat in (old_flat, new_flat)]
    sizes = [t.numel() for t in parts_of(old_flat[:half])]
    blocks, wide = gpu.Blocks(2, sizes, "cuda"), gpu.Blocks(4, sizes, "cuda")
    weights = old_flat[:half].clone().view(torch.bfloat16)
    side = blocks.side(parts_of(weights))
    masters = [wide.side(parts_of(s)) for s in sides]
    words, counts = blocks.bitmap(), blocks.empty(blocks.count, torch.int32)
    turn = iter(range(10**6))
    ms = {
        "track: cast and copy": milliseconds(lambda: weights.copy_(sides[next(turn) % 2])),
        "track: cast, compare, mark, copy": milliseconds(
            lambda: gpu.mark(blocks, masters[next(turn) % 2], side, words, counts)
        ),
    }
    return {
        "tracking ms": ms,
        "tracking ratio": round(ms["track: cast, compare, mark, copy"] / ms["track: cast and copy"], 3),
    }


# -- a sync of 7B -----------------------------------------------------------------------------------------------------


def _shapes_7b() -> Iterator[tuple[int, ...]]:
    """The tensors of a Llama of 6.7 billion parameters."""
    yield (32000, 4096)
    for _ in range(32):
        yield from ((4096, 4096),) * 4
        yield from ((11008, 4096), (11008, 4096), (4096, 11008), (4096,), (4096,))
    yield (4096,)
    yield (32000, 4096)


def sync_7b() -> dict[str, Any]:
    """Diff, encode, to host memory and back, decode, check the digest, apply: on one GPU, by the host's clock."""
    from sparserl.kernels import gpu, gpu_classes, gpu_streams

    shapes = list(_shapes_7b())
    numel = [int(np.prod(s)) for s in shapes]
    flat = dict(zip(("old", "new"), synthetic(2 * sum(numel), 0.006, 1), strict=True))
    copy = flat["old"].clone()

    def cut(side: torch.Tensor) -> list[torch.Tensor]:
        return [part for tensor in side.split(numel) for part in tensor.split(PART)]

    rng = np.random.default_rng(0)
    keys = rng.integers(0, 2**64, (len(numel), 2), dtype=np.uint64)
    owner = [i for i, n in enumerate(numel) for _ in range(-(-n // PART))]
    start = [at for n in numel for at in range(0, n, PART)]
    sizes = [p.numel() for p in cut(copy)]
    blocks = gpu.Blocks(2, sizes, "cuda", keys[owner], start)
    sides = {name: blocks.side(cut(side)) for name, side in flat.items()}
    rollout = blocks.side(cut(copy))
    limits = np.tile(np.array(THRESHOLDS, np.uint64) << np.uint64(SHIFT), (len(sizes), 1))
    bucket = _buckets(sizes, BUCKET)
    room = torch.empty(256 << 20, dtype=torch.uint8, pin_memory=True)
    back = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    current = gpu.digest(blocks, rollout)
    runs: list[dict[str, float]] = []
    peak = 0
    for i in range(8):
        a, b = ("old", "new") if i % 2 == 0 else ("new", "old")
        known = {name: gpu.digest(blocks, side) for name, side in sides.items()}
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        marks = [time.perf_counter()]

        def lap() -> None:
            torch.cuda.synchronize()
            marks.append(time.perf_counter())  # noqa: B023

        plan = gpu_streams.Plan.of(blocks, bucket, 18, limits)
        lap()
        encoded = gpu_streams.encode(plan, sides[a], sides[b])
        result = known[a] + encoded.moved
        lap()
        size = encoded.data.numel()
        room[:size].copy_(encoded.data, non_blocking=True)
        lap()
        there = gpu_streams.Plan.of(blocks, bucket, 18, limits)
        lap()
        back[:size].copy_(room[:size], non_blocking=True)
        bad = torch.zeros(1, dtype=torch.int32, device="cuda")
        lap()
        found = gpu_streams.decode(there, rollout, back, encoded.directory, encoded.changes, bad)
        reached = current + gpu.total(found.sums)
        wrong = bad | (reached != result).any().to(torch.int32)
        lap()
        gpu_classes.land(rollout, found, found.new, wrong)
        lap()
        _require(int(wrong) == 0, "the digest of the result")
        peak = max(peak, (torch.cuda.max_memory_allocated() - before) >> 20)
        full = time.perf_counter()
        current = gpu.digest(blocks, rollout)
        torch.cuda.synchronize()
        full = time.perf_counter() - full
        _require(torch.equal(current, known[b]) and all(map(torch.equal, rollout.alive, sides[b].alive)), "7B landed")
        names = ("plan", "diff + encode", "to host", "plan again", "to device", "decode + digest", "apply")
        lap_ms = {n: 1e3 * (y - x) for n, x, y in zip(names, marks, marks[1:], strict=False)}
        runs.append({**lap_ms, "total": 1e3 * (marks[-1] - marks[0]), "full digest": 1e3 * full})
        changed = int(encoded.changes.sum())
    kept = runs[2:]
    return {
        "parameters": sum(numel),
        "tensors": len(numel),
        "parts": len(sizes),
        "buckets": int(bucket.max()) + 1,
        "changed": changed,
        "bytes": size,
        "ms": {name: round(statistics.median(r[name] for r in kept), 2) for name in kept[0]},
        "peak MiB": peak,
    }


if __name__ == "__main__":
    main()
