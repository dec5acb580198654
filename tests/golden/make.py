"""Write the golden patches and their index: once for each version of the format, never over those of another.

    python -m tests.golden.make --anew

Buckets are put together field by field, so that every profile, coder, tile and chunk size is there, whatever the
planner would choose; a few patches are what `diff` writes. `recipe.py` gives the bases. Nothing here is needed to read
them: the index has what they must do.
"""

from __future__ import annotations

import io
import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

import sparserl
from sparserl import Bits, Region, TensorTable, codec
from sparserl.codec import Classes, Stream, value
from sparserl.codec.coders import CODERS
from sparserl.kernels import reference
from sparserl.plan import steps_between
from sparserl.weights.digest import digest
from sparserl.weights.dtypes import BY_NAME, DTYPES
from sparserl.wire import Entries, Head, PatchWriter, encode_bucket
from tests.boxed_shards import diff_shards
from tests.golden.recipe import Tensor, bits, fingerprint, noise, weights

HERE = Path(__file__).parent
STORED = frozenset((Stream.CLASSES, Stream.TILE_LOWS, Stream.GAP_LOWS, Stream.STEP_LOWS, *range(65, 96, 2)))
PROFILES = tuple(codec.PROFILES)
Place = tuple[str, Region | None, bool]  # tensor, region, dense


@dataclass(frozen=True)
class Bucket:
    """What goes into one bucket, and how."""

    profile: str
    places: list[Place]
    coder: int = 0
    tile_log: int = 10
    chunk_log: int = 8


def changed(base: dict[str, Bits], seed: int, one_in: int, how: str = "steps") -> dict[str, Bits]:
    """The weights after steps of one or two, or other bits, at one in so many elements."""
    out = {}
    for i, (name, held) in enumerate(base.items()):
        old, dtype = held.array.ravel(), held.dtype
        z = noise(seed + 100 + i, old.size)
        if how == "steps":
            new = reference.advance(old, (z % np.uint64(4)).astype(old.dtype) + old.dtype.type(1), dtype.sign_magnitude)
        else:
            new = bits(dtype.name, old.size, how, seed + 200 + i)
        if dtype.name == "bool":
            new = old ^ old.dtype.type(1)
        hit = (z >> np.uint64(20)) % np.uint64(one_in) == 0
        out[name] = Bits(np.where(hit, new, old).reshape(held.array.shape), dtype)
    return out


def classes(dtype: Any, number: int = 3) -> Classes:
    """Classes that do tell the elements of `small` apart."""
    shift = max(0, 8 * dtype.width - 10)
    return Classes(shift, (1,) if dtype.name == "bool" else (2, 9, 40, 60, 80, 100, 110)[:number])


def encode(
    table: TensorTable, spec: Bucket, old: dict[str, Bits], new: dict[str, Bits], hash: bytes, number: int
) -> Any:
    profile, dtype = codec.profile_by_name(spec.profile), table[table.index[spec.places[0][0]]].dtype
    rows, before, positions, words, dense = [], [], [], [], []
    for name, region, is_dense in spec.places:
        a, b = ((w[name].array if region is None else w[name].array[region.slices]).ravel() for w in (old, new))
        where = np.flatnonzero(a != b)
        if not where.size:
            continue
        rows.append((table.index[name], where.size, is_dense, region, a.size))
        if is_dense:
            dense.append(b)
        else:
            before.append(a.copy())
            positions.append(where.astype(np.uint32))
            words.append(b[where] if profile.absolute else steps_between(dtype, a[where], b[where]))
    tensor, count, is_dense, region, numel = zip(*rows, strict=True)
    entries = Entries(
        np.array(tensor, np.int64),
        np.array(count, np.int64),
        np.array(is_dense, bool),
        list(region),
        np.array(numel, np.int64),
    )
    head = Head(profile, dtype, spec.tile_log, spec.chunk_log, (), entries)
    addresses = np.array([b.ctypes.data for b in before], np.int64)
    layout = replace(head.layout, old_addresses=addresses, classes=classes(dtype, number))
    streams: codec.Chunks = {}
    if positions:
        streams |= profile.encode(layout, positions, words)
    if dense:
        write = value.write_planes if profile.planar else value.write_words
        streams |= write(layout, np.concatenate(dense), Stream.DENSE_PLANE if profile.planar else Stream.DENSE)
    coded = {}
    for id, chunks in streams.items():
        coder = CODERS[0 if id in STORED else spec.coder]
        if any(map(len, chunks)):
            coded[id] = coder, [coder.encode(chunk) for chunk in chunks]
    return encode_bucket(head, coded, hash), sum(count)


def written(base: dict[str, Bits], new: dict[str, Bits], *specs: Bucket, number: int = 3) -> bytes:
    """A patch of these buckets."""
    table, file = sparserl.tensor_table(base), io.BytesIO()
    writer, total = PatchWriter(file, table), 0
    for spec in specs:
        bucket, count = encode(table, spec, base, new, writer.hash, number)
        writer.add(bucket)
        total += count
    writer.finish(digest(base), digest(new), total, None)
    return file.getvalue()


INDEX: list[dict[str, Any]] = []


def keep(name: str, tensors: list[Tensor], data: bytes) -> None:
    """Check a patch and put it on the shelf."""
    held = weights(tensors)
    patch = sparserl.Patch.from_bytes(data)
    record = {"file": f"{name}.srl", "tensors": tensors, "base": fingerprint(held)}
    record |= {"base_digest": patch.base.hex, "result_digest": patch.result.hex, "changed": patch.changed}
    patch.apply(held)
    record["result"] = fingerprint(held)
    (HERE / record["file"]).write_bytes(data)
    INDEX.append(record)


def every_dtype() -> None:
    """Each profile and dtype: three tiles, all but the smallest step, in turn in each coder."""
    for i, dtype in enumerate(DTYPES):
        tensors: list[Tensor] = [("w", dtype.name, [37, 70], "small", i)]
        base = weights(tensors)
        new = changed(base, i, 40)
        for j, profile in enumerate(PROFILES):
            data = written(base, new, Bucket(profile, [("w", None, False)], (i + j) % 3), number=1 + (i + j) % 7)
            keep(f"{profile}-{dtype.name}", tensors, data)


def edges() -> None:
    """NaNs with payloads, infinities, zeros of both signs, the largest and the smallest: to and from each other."""
    for i, name in enumerate(
        ("float8_e4m3fn", "int8", "bfloat16", "float16", "int16", "float32", "uint32", "float64", "int64")
    ):
        tensors: list[Tensor] = [("w", name, [700], "edges", 40 + i), ("x", name, [64], "edges", 60 + i)]
        base = weights(tensors)
        new = changed(base, i, 12, "edges")
        for j, profile in enumerate(PROFILES):
            places: list[Place] = [("w", None, False), ("x", None, False)]
            keep(f"edges-{profile}-{name}", tensors, written(base, new, Bucket(profile, places, (i + j) % 3)))


TENSORS: list[Tensor] = [
    ("a.boxes", "bfloat16", [30, 40], "small", 1),
    ("b.cube", "bfloat16", [6, 7, 8], "any", 2),
    ("c.dense", "bfloat16", [9, 5], "any", 3),
    ("d.scalar", "float32", [], "any", 4),
    ("e.empty", "float32", [0, 3], "any", 5),
    ("f.step", "int64", [1], "small", 6),
    ("g.é", "float32", [65], "small", 7),
    ("h.last", "float32", [1025], "small", 8),
]
BOXES: list[Place] = [
    ("a.boxes", Region((0, 0), (30, 11)), False),
    ("a.boxes", Region((0, 11), (12, 29)), False),
    ("a.boxes", Region((12, 11), (18, 29)), True),
    ("b.cube", Region((1, 2, 3), (4, 5, 2)), False),
]


def regions() -> None:
    """Boxes, dense and sparse entries side by side, scalars, empty tensors, tails, several buckets, mixed profiles."""
    base = weights(TENSORS)
    inside = changed(base, 9, 6)
    cube = base["b.cube"].array.copy()
    cube[1:5, 2:7, 3:5] = inside["b.cube"].array[1:5, 2:7, 3:5]
    new = {**inside, "b.cube": Bits(cube, BY_NAME["bfloat16"])}
    scalar, step, last = (new[n].array.copy() for n in ("d.scalar", "f.step", "h.last"))
    scalar[...] = 0x7FC00001
    step[0] = 2**64 - 1
    last[-1] = base["h.last"].array[-1] + np.uint32(1)
    new |= {"d.scalar": Bits(scalar, BY_NAME["float32"]), "f.step": Bits(step, BY_NAME["int64"])}
    new |= {"h.last": Bits(last, BY_NAME["float32"])}
    floats: list[Place] = [(n, None, False) for n in ("d.scalar", "g.é", "h.last")]
    for coder, profile in enumerate(PROFILES):
        boxes = [*BOXES, ("c.dense", None, True)]
        buckets = [Bucket(profile, p, coder % 3) for p in (boxes, floats, [("f.step", None, False)])]
        keep(f"regions-{profile}", TENSORS, written(base, new, *buckets))
    mixed = [Bucket("ctx", BOXES, 2), Bucket("gap", floats, 1), Bucket("raw", [("f.step", None, True)])]
    keep("regions-mixed", TENSORS, written(base, {**new, "c.dense": base["c.dense"]}, *mixed))
    keep("nothing", TENSORS, written(base, base))
    keep("no-tensors", [], written({}, {}))


def covers() -> None:
    """Patches that speak for some regions only, and two of them merged."""
    base = weights(TENSORS)
    new = changed(base, 10, 5)
    table = sparserl.tensor_table(base)
    parts = []
    for region in (Region((0, 0), (17, 40)), Region((17, 0), (13, 25))):
        a, b = ({"a.boxes": Bits(w["a.boxes"].array[region.slices].copy(), BY_NAME["bfloat16"])} for w in (base, new))
        parts.append(diff_shards(a, b, table=table, regions={"a.boxes": region}, profile="gap"))
    whole = ({"g.é": w["g.é"], "e.empty": w["e.empty"]} for w in (base, new))
    parts.append(diff_shards(*whole, table=table, profile="ulp"))
    for i, patch in enumerate(parts):
        keep(f"covers-{i}", TENSORS, patch.to_bytes())
    keep("covers-merged", TENSORS, sparserl.merge(*parts).to_bytes())


def chunks() -> None:
    """Several chunks a stream, tiles of all sizes, and enough symbols for several lanes of the coder."""
    tensors: list[Tensor] = [("w", "bfloat16", [9000], "small", 20)]
    base = weights(tensors)
    new = changed(base, 20, 12)
    for i, profile in enumerate(PROFILES):
        for tile_log, chunk_log in ((10, 8), (13, 9), (31, 24)):
            bucket = Bucket(profile, [("w", None, False)], (i + tile_log) % 3, tile_log, chunk_log)
            keep(f"chunks-{profile}-{tile_log}-{chunk_log}", tensors, written(base, new, bucket, number=4 + i))
    large: list[Tensor] = [("w", "uint8", [100_000], "small", 21)]
    base = weights(large)
    z = noise(99, 100_000)
    step = np.where((z >> np.uint64(11)) % np.uint64(50) == 0, 2, 1).astype(np.uint8)
    hit = z % np.uint64(20) != 0
    new = {"w": Bits(np.where(hit, base["w"].array + step, base["w"].array), BY_NAME["uint8"])}
    for profile, tile_log in (("ulp", 16), ("ctx", 14)):
        keep(f"lanes-{profile}", large, written(base, new, Bucket(profile, [("w", None, False)], 2, tile_log, 24)))


def typical() -> None:
    """What `diff` makes of weights whose small elements change more often."""
    tensors: list[Tensor] = [
        ("down", "bfloat16", [200, 150], "small", 30),
        ("router", "float32", [64, 16], "small", 31),
    ]
    base = weights(tensors)
    new = {}
    for i, (name, held) in enumerate(base.items()):
        old = held.array
        size = (old << old.dtype.type(1)) >> old.dtype.type(1)
        z = noise(32 + i, old.size).reshape(old.shape)
        rank = np.array([int(s).bit_length() for s in size.ravel()], np.uint64).reshape(old.shape)
        hit = z % (rank * rank + np.uint64(2)) == 0
        moved = reference.advance(old, (z >> np.uint64(40) & np.uint64(1)).astype(old.dtype) + old.dtype.type(1), True)
        new[name] = Bits(np.where(hit, moved, old), held.dtype)
    for profile in ("auto", *PROFILES):
        keep(f"typical-{profile}", tensors, sparserl.diff(base, new, profile=profile).to_bytes())
    dense = changed(base, 33, 1, "any")
    keep(
        "typical-dense", tensors[1:], sparserl.diff({"router": base["router"]}, {"router": dense["router"]}).to_bytes()
    )


def main(words: list[str]) -> None:
    if (HERE / "index.json").exists() and words != ["--anew"]:
        raise SystemExit("golden patches are there to stay; --anew throws them away and writes others")
    for old in HERE.glob("*.srl"):
        old.unlink()
    for make in (every_dtype, edges, regions, covers, chunks, typical):
        make()
    lines = ",\n".join(json.dumps(record, ensure_ascii=False) for record in INDEX)
    (HERE / "index.json").write_text(f"[\n{lines}\n]\n")
    total = sum(path.stat().st_size for path in HERE.iterdir() if path.is_file())
    print(f"{len(INDEX)} patches, {total} bytes with the index")


if __name__ == "__main__":
    main(sys.argv[1:])
