"""The compiler takes every kernel for GPUs: Triton's interpreter accepts what it rejects.

That takes no GPU, and a process of its own. There kernels are launched as the package launches them, on elements of
some widths. A kernel that is launched somewhere in the package, and not here, is an error.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeGuard

import numpy as np
import pytest

import sparserl
from sparserl.kernels import gpu
from sparserl.sources.schemes import LIMITS, SCHEMES
from tests.triton_runs import only_compile, run

pytest.importorskip("triton")
torch = pytest.importorskip("torch")

_NUMEL = 9000
_CHANGES = 64
_FORMATS = ("fp8_blockwise", "fp8_per_channel", "fp8_per_tensor", "int8", "mxfp4", "mxfp8", "nvfp4")
_TILE_LOG = 16


@pytest.mark.parametrize(
    ("capability", "widths"),
    [
        pytest.param(80, "24", id="80", marks=pytest.mark.long),
        pytest.param(80, "18", id="80, of other widths", marks=pytest.mark.long),
        pytest.param(89, "1248", id="89", marks=pytest.mark.nightly),
        pytest.param(90, "1248", id="90", marks=pytest.mark.long),
    ],
)
def test_compiled(capability, widths):
    """The compiler takes every kernel that is launched anywhere, for Ampere, Ada and Hopper."""
    arguments = ("-m", "tests.kernels.test_gpu_compiled", str(capability), widths)
    assert "compiled" in run(*arguments, TRITON_INTERPRET="0")


def compile_all(capability: int, widths: Sequence[int]) -> None:
    """Hand every kernel to the compiler, for GPUs of a compute capability."""
    compiled = only_compile(capability)
    launched = {*launched_kernels(Path(sparserl.__file__).parent)}
    for width in widths:
        _compile_changes(width)
        _compile_classes(width)
        _compile_numbers(width)
        _compile_cells(width)
        _compile_whole_parts(width)
    _compile_casts()
    _compile_coder()
    _compile_formats()
    assert compiled == launched, f"launched here alone or in the package alone: {sorted(compiled ^ launched)}"
    print("compiled", len(compiled), "kernels")


def launched_kernels(folder: Path) -> Iterator[str]:
    """Module and name of each function of Triton that code subscripts with a grid."""
    for path in sorted(folder.rglob("*.py")):
        module = ast.parse(path.read_text())
        subscripts = [node for node in ast.walk(module) if isinstance(node, ast.Subscript)]
        subscripted = {ast.unparse(node.value) for node in subscripts}
        kernels = [statement for statement in module.body if _is_of_triton(statement)]
        yield from (f"{path.stem}.{kernel.name}" for kernel in kernels if kernel.name in subscripted)


def _is_of_triton(statement: ast.stmt) -> TypeGuard[ast.FunctionDef]:
    return isinstance(statement, ast.FunctionDef) and any(
        "triton.jit" in ast.unparse(decorator) for decorator in statement.decorator_list
    )


class _Parts:
    """A part of some elements, and numbers of as many changes as are taken."""

    def __init__(self, width: int, aligned: bool = True) -> None:
        room = torch.zeros(_NUMEL + 16, dtype=gpu.ints.INTS[width])
        begin = -(room.data_ptr() // width) % (16 // width) + (not aligned)
        self.blocks = gpu.changes.Blocks(width, [_NUMEL], "cpu")
        one = np.ones(1, np.int64)
        self.blocks_and_rows = (self.blocks, gpu.changes.Blocks(width, [_NUMEL], "cpu", rows=(one, one)))
        self.side = self.blocks.side([room[begin : begin + _NUMEL]])
        self.words = self.blocks.bitmap()
        self.counts = torch.zeros(self.blocks.count, dtype=torch.int32)
        self.bits = torch.zeros(_CHANGES, dtype=gpu.ints.INTS[width])
        self.numbers = torch.zeros(_CHANGES, dtype=torch.int32)
        self.addresses = torch.zeros(_CHANGES, dtype=torch.int64)
        self.tile_log = torch.full((1,), _TILE_LOG, dtype=torch.int32)
        self.bad = torch.zeros(1, dtype=torch.int32)


def _compile_changes(width: int) -> None:
    """What finds changes, in pairs of elements and one by one."""
    for p in (_Parts(width), _Parts(width, aligned=False)):
        gpu.changes.diff(p.blocks, p.side, p.side)
        gpu.changes.digest(p.blocks, p.side)
    p = _Parts(width)
    gpu.changes.mark(p.blocks, p.side, p.side, p.words, p.counts)
    for blocks in p.blocks_and_rows:
        gpu.changes.compact(blocks, p.side, p.side, p.words, p.counts, _CHANGES, steps=True, tile_log=p.tile_log)


def _compile_classes(width: int) -> None:
    """What sorts changes by class, and finds them again."""
    p = _Parts(width)
    blocks, side = p.blocks, p.side
    classification = gpu.classes.Classification.of(blocks, np.ones((1, 4 if width == 2 else 5)), _TILE_LOG, True)
    classes = classification.K + 1
    tiles = gpu.classes.Tiles.of(blocks, _TILE_LOG)
    ranks = gpu.classes.class_ranks(blocks, classification, side)
    gpu.classes.diff_with_class_ranks(blocks, classification, side, side)
    before = p.counts.to(torch.int64)
    classified = gpu.classes.classify_changes(blocks, classification, side, side, p.words, before, ranks, _CHANGES)
    gpu.classes.sort_by_class(blocks, classification, p.counts, classified)
    none = torch.zeros(tiles.count * classes, dtype=torch.int32)
    one = np.ones(classes, int)
    layout, _ = gpu.classes.change_layout(
        blocks, tiles, none, 0 * one[:1], _CHANGES * one[:1], one, one, 1 << _TILE_LOG, p.bad
    )
    numbers = gpu.classes.ChangeNumbers(layout, p.numbers, p.bits, _CHANGES)
    for some in p.blocks_and_rows:
        located = gpu.classes.class_positions(some, classification, side, tiles, ranks, numbers, p.bad)
    gpu.classes.write(side, located, p.bits, p.bad)


def _compile_numbers(width: int) -> None:
    """What writes and reads numbers as tokens and low bits."""
    p = _Parts(width)
    chunks, _ = gpu.rans.NumberChunks.of_streams(p.blocks, [_CHANGES], 256)
    packed = gpu.rans.PackedNumbers.of(chunks, 8 * width)
    packed.pack(0, 1, p.bits)
    encoded = gpu.rans.EncodedChunks(chunks.begin, chunks.size, chunks.begin, chunks.size)
    gpu.rans.unpack(encoded, packed.tokens, packed.tokens, p.bits, 9, p.bad)


def _compile_cells(width: int) -> None:
    """What reads and writes single elements."""
    p = _Parts(width)
    gpu.cells.scatter(p.side.base, p.addresses, gpu.cells.gather(p.side.base, p.addresses))
    located = gpu.classes.LocatedChanges(p.addresses, p.bits, p.bits, gpu.changes.new_sums("cpu"))
    gpu.cells.swap(p.side, located, p.bad)
    tiles = gpu.classes.Tiles.of(p.blocks, _TILE_LOG)
    layout = gpu.classes.ChangeLayout(p.numbers[:1], p.addresses[:1], p.addresses[:1])
    numbers = gpu.classes.ChangeNumbers(layout, p.numbers, p.bits, _CHANGES)
    for blocks in p.blocks_and_rows:
        gpu.cells.locate(blocks, p.side, np.array([_CHANGES]), p.numbers, p.bits, p.bad)
        gpu.cells.tile_positions(blocks, p.side, tiles, p.tile_log, numbers, p.bad, True)
    gpu.cells.sample(p.blocks, p.side, p.side, p.words, p.counts, p.addresses)
    one = np.ones(1, np.int64)
    for kind in (0, 1, 2):
        gpu.cells.key_histogram(p.blocks, p.side, kind, 0 * one, one, one)


def _compile_whole_parts(width: int) -> None:
    """What joins planes, and sums up parts."""
    p = _Parts(width)
    gpu.planes.join(p.blocks, p.side, p.addresses[:width], torch.zeros(_CHANGES, dtype=torch.uint8), p.bad)
    gpu.sums.digest_deltas(p.blocks, p.side, p.side, gpu.sums.digests(p.blocks, p.side))
    gpu.sums.grid_digests(p.blocks, p.side, np.ones(1, np.int64), np.ones((4, 1), np.int64))


def _compile_casts() -> None:
    """The same for fp32 elements, which are compared as bf16."""
    p = _Parts(2)
    blocks, side = p.blocks, p.side
    for wide in (_Parts(4).side, _Parts(4, aligned=False).side):
        gpu.changes.diff(blocks, side, wide)
    wide = _Parts(4).side
    gpu.changes.mark(blocks, wide, side, p.words, p.counts)
    gpu.changes.compact(blocks, side, wide, p.words, p.counts, _CHANGES, steps=True, tile_log=p.tile_log)
    classification = gpu.classes.Classification.of(blocks, np.ones((1, 4)), _TILE_LOG, True)
    ranks = gpu.classes.class_ranks(blocks, classification, side)
    before = p.counts.to(torch.int64)
    gpu.classes.classify_changes(blocks, classification, side, wide, p.words, before, ranks, _CHANGES)
    gpu.cells.sample(blocks, side, wide, p.words, p.counts, p.addresses)
    gpu.sums.digest_deltas(blocks, wide, side, gpu.sums.digests(blocks, side))


def _compile_coder() -> None:
    """What codes tokens, of any elements."""
    p = _Parts(2)
    chunks, _ = gpu.rans.NumberChunks.of_streams(p.blocks, [_CHANGES], 256)
    packed = gpu.rans.PackedNumbers.of(chunks, 16)
    packed.pack(0, 1, p.numbers, ranked=True)
    gpu.rans.lay_out(packed, gpu.rans.encode(packed), np.zeros(1, int), np.arange(2))
    encoded = gpu.rans.EncodedChunks(chunks.begin, chunks.size, chunks.begin, chunks.size)
    gpu.rans.decode(p.blocks, encoded, packed.tokens, packed.tokens, p.bad)
    gpu.rans.copy(packed.tokens, packed.tokens, chunks.begin, chunks.begin, chunks.size, _CHANGES)


def _compile_formats() -> None:
    """What quantizes, in every format; codes are compared with those before, or not."""
    bits = torch.zeros(256 * 256, dtype=torch.uint8)
    for dtype, difference in ((torch.bfloat16, bits), (torch.float32, None)):
        weights = torch.zeros(256, 256, dtype=dtype)
        gpu.quantize.run_magnitudes(weights, 16)
        for name in _FORMATS:
            scheme = SCHEMES[name]()
            kind = gpu.quantize.Format(scheme.dtype, scheme.scale_dtype, LIMITS[scheme.dtype])
            block = tuple(n or 256 for n in scheme.block)
            scales = bits.view(torch.int32) if scheme.scale_dtype == "float32" else bits
            largest = torch.zeros(1 if block == (256, 256) else 4096) if name in ("fp8_per_tensor", "nvfp4") else None
            gpu.quantize.quantize(weights, bits, scales, kind, block, largest, torch.ones(1), difference)
        kind = gpu.quantize.Format("int8", "float32", LIMITS["int8"])  # one block of several tiles
        gpu.quantize.quantize(weights, bits, bits.view(torch.int32), kind, (256, 256), None, None, difference)


if __name__ == "__main__":
    compile_all(int(sys.argv[1]), [int(width) for width in sys.argv[2]])
