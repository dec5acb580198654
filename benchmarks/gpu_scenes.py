"""What the kernels are for, timed by `benchmarks.gpu`: traces, a training step, small patches, NCCL, a sync of 7B."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from benchmarks.gpu_data import PART, buckets_of, limits_of, parts_of, read_traces, synthetic, tiled


def require(holds: bool, what: str) -> None:
    if not holds:
        raise SystemExit(f"wrong: {what}")


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


def peak_over(work: Callable[[], Any]) -> int:
    """MiB of device memory that a run takes beside what is there before."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    work()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) >> 20


def decoded(plan: Any, side: Any, sent: Any, bad: torch.Tensor, data: torch.Tensor | None = None) -> Any:
    """The changes of all buckets that were encoded, located; from another copy of their bytes if there is one."""
    from sparserl.kernels import gpu

    arrived = gpu.streams.ReceivedChunks(sent.data if data is None else data, sent.directory)
    return gpu.streams.decode(plan, side, sent.changes, bad, lambda: arrived)


# -- traces -----------------------------------------------------------------------------------------------------------


def time_traces(path: Path, nbytes: int, floors: dict[str, float]) -> dict[str, Any]:
    """One sync of each run, again and again until there are so many bytes: real bits next to each other."""
    from sparserl.kernels import gpu

    out: dict[str, Any] = {}
    for run, (old_bits, new_bits, classes) in read_traces(path).items():
        flat_old, flat_new = tiled(old_bits, nbytes // 2), tiled(new_bits, nbytes // 2)
        sizes = [t.numel() for t in parts_of(flat_old)]
        keys = np.random.default_rng(0).integers(0, 2**64, (len(sizes), 2), np.uint64)
        blocks = gpu.changes.Blocks(2, sizes, "cuda", keys)
        old, new = blocks.side(parts_of(flat_old)), blocks.side(parts_of(flat_new))
        ulp = gpu.streams.StreamPlan.of(blocks, buckets_of(sizes), 18)
        ctx = gpu.streams.StreamPlan.of(blocks, buckets_of(sizes), 18, limits_of(len(sizes), classes[0], classes[1:]))
        sent, bad = gpu.streams.encode(ctx, old, new), torch.zeros(1, dtype=torch.int32, device="cuda")
        short = gpu.streams.encode(ulp, old, new).data.numel()
        total = int(sent.changes.sum())

        def land(side: gpu.changes.Side, back: bool) -> None:
            found = decoded(ctx, side, sent, bad)  # noqa: B023
            wrong = bad | (gpu.changes.sum_slots(found.sums) != sent.digest_delta).any().to(torch.int32)  # noqa: B023
            gpu.classes.write(side, found, found.old if back else found.new, wrong)

        target = blocks.side([t.clone() for t in old.owners])
        land(target, back=False)
        require(int(bad) == 0 and all(map(torch.equal, target.owners, new.owners)), f"{run} landed")
        del target
        works = {
            "diff + ulp": (lambda: gpu.streams.encode(ulp, old, new), "read both"),  # noqa: B023
            "diff + ctx": (lambda: gpu.streams.encode(ctx, old, new), "read both"),  # noqa: B023
            "ctx: decode + apply": (lambda: land(old, back=True), "read one"),  # noqa: B023
        }
        ms = {name: milliseconds(work) for name, (work, _) in works.items()}
        out[run] = {
            "GiB": nbytes / 2**30,
            "elements of the trace": old_bits.size,
            "changed": total,
            "density": total / (nbytes // 2),
            "ulp bits per change": round(8 * short / total, 3),
            "ctx bits per change": round(8 * sent.data.numel() / total, 3),
            "ms": ms,
            "times floor": {name: round(ms[name] / floors[floor], 2) for name, (_, floor) in works.items()},
            "peak MiB": {name: peak_over(work) for name, (work, _) in works.items()},
        }
    return out


# -- a training step --------------------------------------------------------------------------------------------------


class Layer(torch.nn.Module):
    """Attention and a feed-forward net."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = torch.nn.ModuleList(torch.nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = (torch.nn.Linear(width, n * width, bias=False) for n in (3, 1))
        self.up, self.down = (
            torch.nn.Linear(width, 4 * width, bias=False),
            torch.nn.Linear(4 * width, width, bias=False),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norms[0](x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(functional.gelu(self.up(self.norms[1](x))))


class Transformer(torch.nn.Module):
    """A decoder with bf16 weights."""

    def __init__(self, layers: int, width: int, heads: int, words: int) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(words, width)
        self.layers = torch.nn.ModuleList(Layer(width, heads) for _ in range(layers))
        self.head = torch.nn.Linear(width, words, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        loss: torch.Tensor = functional.cross_entropy(
            self.head(x[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten()
        )
        return loss


def training_step(
    layers: int = 20, width: int = 2048, words: int = 32000, batch: tuple[int, int] = (8, 512), steps: int = 30
) -> dict[str, Any]:
    """fp32 masters under fused AdamW and bf16 weights; their cast and copy in turn with and without marks."""
    from sparserl.kernels import gpu

    torch.manual_seed(0)
    with torch.device("cuda"):
        model = Transformer(layers, width, width // 128, words).to(torch.bfloat16)
    weights = [p.detach() for p in model.parameters()]
    masters = [p.float() for p in weights]
    for master in masters:
        master.grad = torch.empty_like(master)
    optimizer = torch.optim.AdamW(masters, lr=1e-6, fused=True)
    sizes = [p.numel() for p in weights]
    before = torch.cuda.memory_allocated()
    blocks = gpu.changes.Blocks(2, sizes, "cuda")
    wide, side = gpu.changes.Blocks(4, sizes, "cuda").side(masters), blocks.side(weights)
    marks, counts = blocks.bitmap(), blocks.empty(blocks.count, torch.int32)
    extra = torch.cuda.memory_allocated() - before
    ways: dict[str, Callable[[], Any]] = {
        "off": lambda: torch._foreach_copy_(weights, masters),
        "on": lambda: gpu.changes.mark(blocks, wide, side, marks, counts),
    }
    times: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
    marked = []
    for step in range(2 * steps + 4):
        way = ("off", "on")[step % 2]
        old = [w.clone() for w in weights] if step < 4 else []
        marks.zero_()
        events = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
        events[0].record()
        model(torch.randint(words, batch, device="cuda")).backward()
        torch._foreach_copy_([m.grad for m in masters], [p.grad for p in model.parameters()])
        optimizer.step()
        events[1].record()
        ways[way]()
        events[2].record()
        events[2].synchronize()
        model.zero_grad(set_to_none=True)
        if way == "on":
            marked.append(int(counts.sum()))
        if step < 4:
            same = all(torch.equal(w, m.to(torch.bfloat16)) for w, m in zip(weights, masters, strict=True))
            require(same, "weights are the cast masters")
            changed = sum(
                int((w.view(torch.int16) != o.view(torch.int16)).sum()) for w, o in zip(weights, old, strict=True)
            )
            require(way == "off" or changed == marked[-1], "marks of a step")
        else:
            times[way].append((events[0].elapsed_time(events[2]), events[1].elapsed_time(events[2])))
    medians = {
        way: [round(statistics.median(column), 3) for column in zip(*rows, strict=True)] for way, rows in times.items()
    }
    return {
        "parameters": sum(sizes),
        "tokens": batch[0] * batch[1],
        "steps of each": steps,
        "changed in a step": round(statistics.median(marked) / sum(sizes), 5),
        "step ms": {way: row[0] for way, row in medians.items()},
        "cast and copy ms": {way: row[1] for way, row in medians.items()},
        "step ratio": round(medians["on"][0] / medians["off"][0], 4),
        "cast and copy ratio": round(medians["on"][1] / medians["off"][1], 3),
        "extra MiB": extra >> 20,
    }


# -- small patches ----------------------------------------------------------------------------------------------------


def crossover(nbytes: int = 2 << 30, most: int = 7) -> dict[str, Any]:
    """From a bitmap to coded bytes in host memory, in `ulp`: all on the GPU, or only compacted there."""
    from sparserl.kernels import gpu

    torch.manual_seed(3)
    flat = torch.randint(0x3000, 0x3F80, (nbytes // 2,), dtype=torch.int16, device="cuda")
    sizes = [t.numel() for t in parts_of(flat)]
    blocks, bucket = gpu.changes.Blocks(2, sizes, "cuda"), buckets_of(sizes)
    plan = gpu.streams.StreamPlan.of(blocks, bucket, 18)
    room = torch.empty(256 << 20, dtype=torch.uint8, pin_memory=True)
    rows = []
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for exponent in range(2, most + 1):
            other = flat.clone()
            other[torch.randint(flat.numel(), (10**exponent,), device="cuda")] ^= 1
            old, new = blocks.side(parts_of(flat)), blocks.side(parts_of(other))
            found = gpu.changes.diff(blocks, old, new)
            changes = gpu.streams.part_changes(blocks, found[1]).cpu().numpy()

            def there() -> int:
                data = gpu.streams.encode(plan, old, new, found).data  # noqa: B023
                room[: data.numel()].copy_(data)
                return data.numel()

            def here() -> int:
                total = int(gpu.streams.part_changes(blocks, found[1]).sum())  # noqa: B023
                where, steps, _, _ = gpu.changes.compact(blocks, old, new, *found, total, steps=True)  # noqa: B023
                columns = [blocks.fetch(c) for c in (where, steps)]
                return _coded(pool, sizes, bucket, changes, columns[0]().view(np.uint32), columns[1]().view(np.uint16))  # noqa: B023

            row: dict[str, Any] = {"changes": int(changes.sum())}
            for name, work in (("GPU", there), ("CPU", here)):
                row[f"{name} bytes"] = work()
                row[f"{name} ms"] = round(_by_the_host(work), 3)
                row[f"{name} peak MiB"] = peak_over(work)
            rows.append(row)
    first = next((r["changes"] for r in rows if r["GPU ms"] < r["CPU ms"]), None)
    return {"GiB": nbytes / 2**30, "threads": os.cpu_count(), "rows": rows, "GPU is faster from": first}


def _coded(pool: Any, sizes: list[int], bucket: Any, changes: Any, positions: Any, steps: Any) -> int:
    """Bytes of the streams that the CPU makes of all buckets."""
    from sparserl import codec
    from sparserl.codec.profile import BucketLayout
    from sparserl.weights.dtypes import BY_NAME

    ends = np.cumsum(changes)

    def one(b: int) -> int:
        parts = np.flatnonzero((bucket == b) & (changes > 0))
        if not parts.size:
            return 0
        numel, some = np.asarray(sizes)[parts], slice(int(ends[parts[0]] - changes[parts[0]]), int(ends[parts[-1]]))
        layout = BucketLayout(BY_NAME["bfloat16"], numel, changes[parts], 18, 16)
        streams = codec.encode_streams(codec.profile_by_name("ulp").encode(layout, [positions[some]], [steps[some]]))
        return sum(len(chunk) for _, chunks in streams.values() for chunk in chunks)

    return sum(pool.map(one, range(int(bucket.max()) + 1)))


def _by_the_host(work: Callable[[], Any], repeats: int = 7) -> float:
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times)


# -- NCCL -------------------------------------------------------------------------------------------------------------


def one_rank(backend: str = "nccl", device: str = "cuda", megabytes: int = 64) -> dict[str, Any]:
    """The publisher on a process group of one rank: it shows that the collective path runs, and nothing about speed."""
    import torch.distributed as dist

    import sparserl

    torch.manual_seed(5)
    weights = {f"tensor.{i}": torch.randn(megabytes << 16, dtype=torch.bfloat16) for i in range(8)}
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group(backend, init_method=f"file://{folder}/group", rank=0, world_size=1)
        try:
            with sparserl.GroupPublisher(dist.group.WORLD, weights, device=device) as publisher:
                reports = []
                for _ in range(3):
                    reports.append(publisher.publish())
                    for tensor in weights.values():
                        tensor[torch.randint(tensor.numel(), (tensor.numel() // 200,))] += 0.01
                version = publisher.version
        finally:
            dist.destroy_process_group()
    require(version == 2, "three versions of one rank")
    return {
        "backend": backend,
        "world size": 1,
        "what it shows": "that the path runs on this backend; with one rank nothing crosses a link",
        "versions": version + 1,
        "changed": [r.changed for r in reports],
        "bytes": [r.bytes for r in reports],
    }


# -- a sync of 7B -----------------------------------------------------------------------------------------------------


def shapes_7b() -> Iterator[tuple[int, ...]]:
    """The tensors of a Llama of 6.7 billion parameters."""
    yield (32000, 4096)
    for _ in range(32):
        yield from ((4096, 4096),) * 4
        yield from ((11008, 4096), (11008, 4096), (4096, 11008), (4096,), (4096,))
    yield (4096,)
    yield (32000, 4096)


def sync_7b() -> dict[str, Any]:
    """Diff, encode, to host memory and back, decode, check the digest, apply: on one GPU, by the host's clock."""
    from sparserl.kernels import gpu

    shapes = list(shapes_7b())
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
    blocks = gpu.changes.Blocks(2, sizes, "cuda", keys[owner], start)
    sides = {name: blocks.side(cut(side)) for name, side in flat.items()}
    rollout = blocks.side(cut(copy))
    limits = limits_of(len(sizes))
    bucket = buckets_of(sizes)
    room = torch.empty(256 << 20, dtype=torch.uint8, pin_memory=True)
    back = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    current = gpu.changes.digest(blocks, rollout)
    runs: list[dict[str, float]] = []
    peak = 0
    for i in range(8):
        a, b = ("old", "new") if i % 2 == 0 else ("new", "old")
        known = {name: gpu.changes.digest(blocks, side) for name, side in sides.items()}
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        marks = [time.perf_counter()]

        def lap() -> None:
            torch.cuda.synchronize()
            marks.append(time.perf_counter())  # noqa: B023

        plan = gpu.streams.StreamPlan.of(blocks, bucket, 18, limits)
        lap()
        encoded = gpu.streams.encode(plan, sides[a], sides[b])
        result = known[a] + encoded.digest_delta
        lap()
        size = encoded.data.numel()
        room[:size].copy_(encoded.data, non_blocking=True)
        lap()
        there = gpu.streams.StreamPlan.of(blocks, bucket, 18, limits)
        lap()
        back[:size].copy_(room[:size], non_blocking=True)
        bad = torch.zeros(1, dtype=torch.int32, device="cuda")
        lap()
        found = decoded(there, rollout, encoded, bad, back)
        reached = current + gpu.changes.sum_slots(found.sums)
        wrong = bad | (reached != result).any().to(torch.int32)
        lap()
        gpu.classes.write(rollout, found, found.new, wrong)
        lap()
        require(int(wrong) == 0, "the digest of the result")
        peak = max(peak, (torch.cuda.max_memory_allocated() - before) >> 20)
        full = time.perf_counter()
        current = gpu.changes.digest(blocks, rollout)
        torch.cuda.synchronize()
        full = time.perf_counter() - full
        require(torch.equal(current, known[b]) and all(map(torch.equal, rollout.owners, sides[b].owners)), "7B landed")
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


# -- the library ------------------------------------------------------------------------------------------------------


def library(repeats: int = 8) -> dict[str, Any]:
    """`sparserl.diff` and `Patch.apply` of a 7B model on the device, by the host's clock, with heads and checksums.

    The base's digest is known, as a session knows it. Every result is compared bit for bit. Medians after two warm-ups.
    """
    import sparserl

    shapes = list(shapes_7b())
    numel = [int(np.prod(s)) for s in shapes]

    def named(flat: torch.Tensor) -> dict[str, torch.Tensor]:
        parts = zip(flat.view(torch.bfloat16).split(numel), shapes, strict=True)
        return {f"tensor.{i}": part.view(shape) for i, (part, shape) in enumerate(parts)}

    old, new = synthetic(2 * sum(numel), 0.006, 1)
    rollout = old.clone()
    sides = named(old), named(new), named(rollout)
    digest = sparserl.digest(sides[0])
    out: dict[str, Any] = {"parameters": sum(numel), "tensors": len(numel)}
    for profile in ("raw", "ulp", "ctx", "auto"):
        times: dict[str, list[float]] = {"diff": [], "apply": []}
        peaks = dict.fromkeys(times, 0)
        made: list[sparserl.Patch] = []
        works: dict[str, Callable[[], Any]] = {
            "diff": lambda: made.append(sparserl.diff(*sides[:2], profile=profile, base_digest=digest)),  # noqa: B023
            "apply": lambda: made[-1].apply(sides[2], digest=made[-1].base),  # noqa: B023
        }
        for _ in range(repeats):
            made.clear()
            rollout.copy_(old)
            for name, work in works.items():
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
                before, begin = torch.cuda.memory_allocated(), time.perf_counter()
                work()
                torch.cuda.synchronize()
                times[name].append(1e3 * (time.perf_counter() - begin))
                peaks[name] = (torch.cuda.max_memory_allocated() - before) >> 20
            require(torch.equal(rollout, new), f"{profile} of 7B through the library")
        row: dict[str, Any] = {f"{name} ms": round(statistics.median(found[2:]), 1) for name, found in times.items()}
        row |= {f"{name} ms, best": round(min(found[2:]), 1) for name, found in times.items()}
        row |= {"sync ms": round(statistics.median(map(sum, zip(*(t[2:] for t in times.values()), strict=True))), 1)}
        row |= {f"{name} peak MiB": peak for name, peak in peaks.items()}
        size = round(8 * made[0].nbytes / made[0].changed, 3)
        out[profile] = row | {"buckets": made[0].buckets, "bits per change": size}
    return out


def small() -> dict[str, Any]:
    """Small patches through the library: coded where the weights are, or on the CPU, whatever their number."""
    import sparserl
    from sparserl.patch import gpu_apply as device_apply
    from sparserl.patch import gpu_compare

    torch.manual_seed(4)
    never, always = 0, 1 << 62
    diffs, lands, plain = [], [], []
    old = torch.randint(0x3000, 0x3F80, (32 << 20,), dtype=torch.int16, device="cuda")
    digest = sparserl.digest({"w": old.view(torch.bfloat16)})
    for exponent in range(6, 22, 2):
        new = old.clone()
        new[torch.randint(old.numel(), (1 << exponent,), device="cuda")] ^= 1
        row: dict[str, Any] = {"changes": 1 << exponent}
        sides = {"w": old.view(torch.bfloat16)}, {"w": new.view(torch.bfloat16)}
        for name, few in (("GPU ms", never), ("CPU ms", always)):
            gpu_compare.FEW_CHANGES = few
            work = lambda: sparserl.diff(*sides, profile="ulp", base_digest=digest)  # noqa: B023, E731
            work()
            row[name] = round(_by_the_host(work), 2)
        diffs.append(row)
        there, back = (sparserl.diff(*pair, profile="ulp") for pair in (sides, sides[::-1]))
        weights, row = {"w": old.clone().view(torch.bfloat16)}, {"changes": 1 << exponent}
        for name, few in (("GPU ms", never), ("CPU ms", always)):
            device_apply.FEW_CHANGES = few
            row[name] = _there_and_back(weights, [there, back])
        plain.append(row)
    for exponent in range(16, 28, 2):
        a, b = (t[: 1 << (exponent - 1)].clone() for t in synthetic(max(2 << 20, 1 << exponent), 0.006, 2))
        gpu_compare.FEW_CHANGES = never
        sides = {"w": a.view(torch.bfloat16)}, {"w": b.view(torch.bfloat16)}
        patches = [sparserl.diff(*pair, profile="ctx") for pair in (sides, sides[::-1])]
        weights, row = {"w": a.clone().view(torch.bfloat16)}, {"bytes": 1 << exponent}
        for name, few in (("GPU ms", never), ("CPU ms", always)):
            device_apply.FEW_BYTES = few
            row[name] = _there_and_back(weights, patches)
        lands.append(row)
    return {"diff in ulp, 64 MiB": diffs, "apply in ulp, 64 MiB": plain, "apply in ctx, 0.6%": lands}


def _there_and_back(weights: dict[str, torch.Tensor], patches: list[Any]) -> float:
    """Milliseconds of applying a patch, from the mean over one and the one that undoes it."""

    def work() -> None:
        for patch in patches:
            patch.apply(weights, digest=patch.base)

    work()
    return round(_by_the_host(work) / 2, 2)
