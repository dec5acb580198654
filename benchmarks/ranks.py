"""What each rank of an engine fetches, and what cutting patches along the ranks costs.

    python -m benchmarks.ranks --model 0.14B --share 0.006

Patches of random weights in bf16, whole and cut for tensor parallelism over 2, 4 and 8 ranks as vLLM shards them:
projections to heads and to the inner size by rows, those back by columns, embeddings by rows, norms on every rank.
Writes research/results/ranks.md.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.engine import MODELS, shapes
from sparserl.patch import capture
from sparserl.patch.snapshot import snapshot
from sparserl.weights.digest import digest
from sparserl.weights.dtypes import BY_NAME, Bits
from sparserl.weights.holdings import Holdings
from sparserl.weights.region import Region
from sparserl.weights.shards import Place
from sparserl.weights.table import TensorTable
from sparserl.weights.tensors import tensor_table

RESULTS = Path(__file__).parent.parent / "research" / "results"
RANKS = (1, 2, 4, 8)
PROFILES = ("ulp", "ctx")
_REPEATS = 3
_COLUMNS = ("o_proj.weight", "down_proj.weight")
HEADING = """# Ranks of an engine

Bytes of a patch, and of what each rank fetches of it; seconds to find and encode it, beside those of a patch that is
not cut, in the same run. `python -m benchmarks.ranks`

"""


class Result(NamedTuple):
    """A patch, whole or cut."""

    kind: str
    ranks: int
    nbytes: int
    largest: int  # bytes that a rank fetches
    seconds: float


def places_of(table: TensorTable, rank: int, ranks: int) -> Iterator[Place]:
    """The parts that a rank has."""
    for tensor, spec in enumerate(table.specs):
        axis = 1 if spec.name.endswith(_COLUMNS) else 0
        if len(spec.shape) < 2:
            yield tensor, None
            continue
        size = [*spec.shape]
        size[axis] //= ranks
        start = [0] * len(size)
        start[axis] = rank * size[axis]
        yield tensor, Region(tuple(start), tuple(size)) if ranks > 1 else None


def two_versions(config: dict[str, Any], share: float) -> list[dict[str, Bits]]:
    """Random weights, and the same with some neighbouring numbers: about a share of all, most of them small."""
    rng = np.random.default_rng(7)
    old = {}
    new = {}
    for name, shape in shapes(config):
        values = rng.standard_normal(shape, np.float32) * 0.02
        likely = share * 0.004 / np.maximum(np.abs(values), 1e-6)  # steps of one size move small numbers
        old[name] = (values.view(np.uint32) >> 16).astype(np.uint16)
        new[name] = old[name] + (rng.random(shape, np.float32) < likely).astype(np.uint16)
    dtype = BY_NAME["bfloat16"]
    return [{name: Bits(bits, dtype) for name, bits in weights.items()} for weights in (old, new)]


def measure(old: dict[str, Bits], new: dict[str, Bits], threads: int | None) -> Iterator[Result]:
    """Patches in every profile, and an anchor, for every number of ranks."""
    table = tensor_table(old)
    base = digest(old)
    for kind in (*PROFILES, "anchor"):
        for ranks in RANKS:
            names = {str(rank): [*places_of(table, rank, ranks)] for rank in range(ranks)}
            holdings = Holdings(table, names) if ranks > 1 else None
            seconds = []
            for _ in range(_REPEATS):
                begun = time.perf_counter()
                if kind == "anchor":
                    contents = snapshot(new, coded=False, holdings=holdings, threads=threads)
                else:
                    captured = capture(old, new, profile=kind, base_digest=base, holdings=holdings, threads=threads)
                    contents = captured.encode(threads=threads).contents
                seconds.append(time.perf_counter() - begun)
            fetched = [0] * ranks
            total = 0
            for index, head in enumerate(contents.heads):
                size = len(contents.bucket(index))
                total += size
                mask = 1 if holdings is None else holdings.touched(head.entries.places()).holdings
                for rank in range(ranks):
                    fetched[rank] += size * (mask >> rank & 1)
            yield Result(kind, ranks, total, max(fetched), min(seconds))


def table(results: list[Result]) -> str:
    """The results as a table."""
    rows = [
        "| | ranks | bytes | a rank fetches | of the patch | times ranks | time |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    whole = {result.kind: result for result in results if result.ranks == 1}
    for kind, ranks, nbytes, largest, seconds in results:
        one = whole[kind]
        cells = f"{kind} | {ranks} | {nbytes:,} | {largest:,} | {largest / one.nbytes:.3f} | "
        cells += f"{ranks * largest / one.nbytes:.3f} | {seconds / one.seconds:.2f}"
        rows.append(f"| {cells} |")
    return "\n".join(rows) + "\n"


def main() -> None:
    """Measure, print and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="0.14B")
    parser.add_argument("--share", type=float, default=0.006, help="of the elements, that change")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--out", type=Path, default=RESULTS / "ranks.md")
    options = parser.parse_args()
    old, new = two_versions(MODELS[options.model], options.share)
    for _ in measure(*two_versions(MODELS["tiny"], options.share), options.threads):
        pass  # kernels are compiled
    results = [*measure(old, new, options.threads)]
    what = f"Llama {options.model}, {options.share:.1%} changed.\n\n"
    text = HEADING + what + table(results)
    options.out.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
