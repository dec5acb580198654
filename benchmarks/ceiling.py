"""The speed this machine's memory allows: two fixed kernels that every other figure is held against.

`python -m benchmarks.ceiling` prints them. The read loops do the least work that still needs every byte (a
XOR fold, checked against NumPy), so a diff or a decoder can approach them and not pass them. The scatter
writes 16-bit values to sorted positions of an array that the caches no longer hold.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic
from numpy.typing import NDArray

_I8, _I32, _I64 = (ir.IntType(bits) for bits in (8, 32, 64))
_LINE = 64
_VECTOR = ir.VectorType(_I64, _LINE // 8)

# (walkers, lines per walker and turn, prefetch distance in bytes); the fastest counts. On a Xeon, eight walkers read
# one stream about a quarter and two streams about a tenth faster than the best single walker found over several
# prefetch distances, vector widths and accumulator counts. A Neoverse-N1 follows a single walker without hints best,
# and eight at half its speed.
_READERS = ((8, 1, 0), (8, 1, 1024), (1, 4, 4096), (1, 1, 0))
_GRAIN = 1 << 14

# (changes ahead, nearest cache but so many); the faster counts. Hints are reads: asking for ownership early (a write
# hint) was slower on a Xeon, by up to a quarter, and no faster on a Neoverse-N1.
_SCATTERERS = ((48, 0), (64, 1))


@dataclass(frozen=True)
class Ceilings:
    """Best speeds seen; the last digit is the number of threads.

    Reads are in dense bytes of one tensor copy per second, whatever the number of streams. Scatters are in
    changes per second.
    """

    one_stream_1: float
    one_stream_2: float
    two_stream_1: float
    two_stream_2: float
    scatter_1: float
    scatter_2: float


def measure(nbytes: int = 512 << 20, repeats: int = 7, density: float = 0.01) -> Ceilings:
    """The best of `repeats` for each kernel, on two arrays of `nbytes`.

    An array must be larger than the caches, or the figures mean nothing. `density` is the share of elements
    that the scatter writes. The kernels take turns inside each repeat, so that a slow moment of the machine
    hits all of them.
    """
    rng = np.random.default_rng(0)
    old, new = (rng.integers(0, 1 << 64, _whole(nbytes) // 8, np.uint64) for _ in range(2))
    positions = _positions(old.size * 4, density, rng)
    values = rng.integers(0, 1 << 16, positions.size, np.uint16)
    _check(old, new)
    for scatter in _SCATTER:
        scatter(old.view(np.uint16), positions, values, 0, 1)  # compiles
    return best(turn(old, new, positions, values) for _ in range(repeats))


def turn(
    old: NDArray[np.uint64], new: NDArray[np.uint64], positions: NDArray[Any], values: NDArray[np.uint16]
) -> Ceilings:
    """Every kernel once; the scatter writes its values into `old`. The words must divide evenly over the readers."""
    took = dict.fromkeys((field.name for field in fields(Ceilings)), float("inf"))
    with ThreadPoolExecutor(2) as pool:
        for threads in (1, 2):
            for one, two in zip(_ONE_STREAM, _TWO_STREAM, strict=True):
                _keep(took, f"one_stream_{threads}", _timed(pool, threads, old.size, one, old))
                _keep(took, f"two_stream_{threads}", _timed(pool, threads, old.size, two, old, new))
            target = old.view(np.uint16), positions, values
            for scatter in _SCATTER:
                read(new)  # pushes `old` out of the caches
                _keep(took, f"scatter_{threads}", _timed(pool, threads, positions.size, scatter, *target))
    work = {name: positions.size if name.startswith("scatter") else old.nbytes for name in took}
    return Ceilings(**{name: work[name] / seconds for name, seconds in took.items()})


def read(words: NDArray[np.uint64]) -> int:
    """Read an array once, and so push others out of the caches."""
    return int(_ONE_STREAM[-1](words, 0, words.size))


def best(turns: Iterable[Ceilings]) -> Ceilings:
    """The highest speed of each kernel."""
    return Ceilings(*(max(speeds) for speeds in zip(*(vars(t).values() for t in turns), strict=True)))


def _whole(nbytes: int) -> int:
    """`nbytes` cut to what every reader divides evenly over two threads, its walkers and its turns."""
    if nbytes < 2 * _GRAIN:
        raise ValueError(f"nbytes is {nbytes}; the read loops need at least {2 * _GRAIN}")
    return nbytes // (2 * _GRAIN) * (2 * _GRAIN)


def _positions(size: int, density: float, rng: np.random.Generator) -> NDArray[Any]:
    """Sorted distinct positions below `size`, each taken with probability `density`; uint32 where they fit."""
    draws = int(size * density * 1.1) + 16
    positions = np.cumsum(rng.geometric(density, draws)) - 1
    return positions[positions < size].astype(np.uint32 if size <= 1 << 32 else np.int64)


def _check(old: NDArray[np.uint64], new: NDArray[np.uint64]) -> None:
    """Compile every read loop, and see that each reads all words exactly once."""
    fold_old, fold_new = np.bitwise_xor.reduce(old), np.bitwise_xor.reduce(new)
    for one, two in zip(_ONE_STREAM, _TWO_STREAM, strict=True):
        if one(old, 0, old.size) != fold_old or two(old, new, 0, old.size) != fold_old ^ fold_new:
            raise AssertionError("a read loop missed words; its figure would be no ceiling")


def _timed(pool: ThreadPoolExecutor, threads: int, size: int, kernel: Callable[..., Any], *arrays: Any) -> float:
    """Seconds for `kernel` over [0, size), cut into equal parts, one for each thread."""
    cuts = [size * part // threads for part in range(threads + 1)]
    start = time.perf_counter()
    if threads == 1:
        kernel(*arrays, 0, size)
    else:
        for future in [pool.submit(kernel, *arrays, a, b) for a, b in pairwise(cuts)]:
            future.result()
    return time.perf_counter() - start


def _keep(best: dict[str, float], name: str, seconds: float) -> None:
    best[name] = min(best[name], seconds)


def _prefetch(builder: ir.IRBuilder, pointer: ir.Value, far: int = 0) -> None:
    """A read hint for the line at `pointer`, which may lie past the end: hints do not fault.

    It is to come to the nearest cache, or to one that is so much farther.
    """
    kind = ir.FunctionType(ir.VoidType(), [_I8.as_pointer(), _I32, _I32, _I32])
    hint = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    builder.call(hint, [builder.bitcast(pointer, _I8.as_pointer()), _I32(0), _I32(3 - far), _I32(1)])


def _data(context: Any, builder: ir.IRBuilder, kind: Any, array: ir.Value) -> ir.Value:
    return context.make_array(kind)(context, builder, array).data


def _fold_loop(
    builder: ir.IRBuilder,
    streams: list[ir.Value],
    start: ir.Value,
    stop: ir.Value,
    walkers: int,
    lines: int,
    ahead: int,
) -> ir.Value:
    """IR for the XOR of words [start, stop) of all streams, `walkers` places of each in turn.

    The whole loop is one piece of IR, for Numba has no vector type to carry accumulators between intrinsics.
    """
    words = _LINE // 8
    segment = builder.udiv(builder.sub(stop, start), _I64(walkers))
    sums = [cgutils.alloca_once_value(builder, ir.Constant(_VECTOR, [0] * words)) for _ in range(walkers * lines)]
    with cgutils.for_range_slice(builder, _I64(0), segment, _I64(lines * words), _I64) as (index, _):
        for slot, total in enumerate(sums):
            walker, line = divmod(slot, lines)
            offset = builder.add(builder.add(start, index), builder.mul(segment, _I64(walker)))
            for stream in streams:
                place = builder.gep(stream, [builder.add(offset, _I64(line * words))])
                if ahead:
                    _prefetch(builder, builder.gep(place, [_I64(ahead // 8)]))
                loaded = builder.load(builder.bitcast(place, _VECTOR.as_pointer()))
                loaded.align = 8
                builder.store(builder.xor(builder.load(total), loaded), total)
    vectors = [builder.load(total) for total in sums]
    parts = [builder.extract_element(vector, _I32(lane)) for vector in vectors for lane in range(words)]
    folded = parts[0]
    for part in parts[1:]:
        folded = builder.xor(folded, part)
    return folded


def _one_stream(walkers: int, lines: int, ahead: int) -> Callable[..., int]:
    @intrinsic
    def loop(_: Any, array: Any, start: Any, stop: Any) -> Any:
        def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
            streams = [_data(context, builder, signature.args[0], args[0])]
            return _fold_loop(builder, streams, args[1], args[2], walkers, lines, ahead)

        return types.uint64(array, types.int64, types.int64), codegen

    @njit(nogil=True)
    def fold(array: NDArray[np.uint64], start: int, stop: int) -> int:
        return loop(array, start, stop)

    return fold


def _two_stream(walkers: int, lines: int, ahead: int) -> Callable[..., int]:
    @intrinsic
    def loop(_: Any, old: Any, new: Any, start: Any, stop: Any) -> Any:
        def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
            streams = [_data(context, builder, signature.args[i], args[i]) for i in (0, 1)]
            return _fold_loop(builder, streams, args[2], args[3], walkers, lines, ahead)

        return types.uint64(old, new, types.int64, types.int64), codegen

    @njit(nogil=True)
    def fold(old: NDArray[np.uint64], new: NDArray[np.uint64], start: int, stop: int) -> int:
        return loop(old, new, start, stop)

    return fold


def _scatterer(ahead: int, far: int) -> Callable[..., None]:
    @intrinsic
    def hint(_: Any, array: Any, index: Any) -> Any:
        def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
            place = builder.gep(_data(context, builder, signature.args[0], args[0]), [args[1]])
            _prefetch(builder, place, far)
            return context.get_dummy_value()

        return types.void(array, types.intp), codegen

    @njit(nogil=True)
    def scatter(
        weights: NDArray[np.uint16], positions: NDArray[Any], values: NDArray[np.uint16], start: int, stop: int
    ) -> None:
        hinted = max(start, stop - ahead)
        for i in range(start, hinted):  # unsigned indices: Numba looks for negative ones among the others
            hint(weights, np.int64(positions[np.uint64(i + ahead)]))
            weights[np.uint64(positions[np.uint64(i)])] = values[np.uint64(i)]
        for i in range(hinted, stop):
            weights[positions[i]] = values[i]

    return scatter


_ONE_STREAM = tuple(_one_stream(*reader) for reader in _READERS)
_TWO_STREAM = tuple(_two_stream(*reader) for reader in _READERS)
_SCATTER = tuple(_scatterer(*how) for how in _SCATTERERS)


def main() -> None:
    for density in (0.002, 0.01):
        ceilings = measure(density=density)
        print(f"density of the scatter {density:.1%}")
        for name in ("one_stream", "two_stream"):
            one, two = getattr(ceilings, f"{name}_1"), getattr(ceilings, f"{name}_2")
            print(f"  {name:10}  1 thread {one / 1e9:6.2f} GB/s     2 threads {two / 1e9:6.2f} GB/s")
        one, two = 1e9 / ceilings.scatter_1, 1e9 / ceilings.scatter_2
        print(f"  scatter     1 thread {one:6.2f} ns/change  2 threads {two:6.2f} ns/change")


if __name__ == "__main__":
    main()
