"""Hands every kernel for GPUs to Triton's compiler, which needs no GPU. Runs as a process of its own."""

from __future__ import annotations

import sys

import numpy as np
import torch

from tests.triton_runs import only_compile


def compile_all(capability: int) -> None:
    """Hand every kernel to the compiler, for GPUs of a compute capability."""
    made = only_compile(capability)
    from sparserl.kernels import gpu

    bad = torch.zeros(1, dtype=torch.int32)
    for width in (2, 4):
        blocks = gpu.changes.Blocks(width, [9000], "cpu")
        room = torch.zeros(9016, dtype=gpu.ints.INTS[width])
        begin = -(room.data_ptr() // width) % (16 // width)
        side = blocks.side([room[begin : begin + 9000]])
        words, counts = gpu.changes.diff(blocks, side, side)
        counts.zero_()
        logs, where = torch.full((1,), 16, dtype=torch.int32), torch.zeros(64, dtype=torch.int32)
        bits = torch.zeros(64, dtype=gpu.ints.INTS[width])
        gpu.changes.compact(blocks, side, side, words, counts, 64, steps=True, tile_log=logs)
        gpu.changes.digest(blocks, side)
        gpu.changes.mark(blocks, side, side, words, counts)
        classification = gpu.classes.Classification.of(blocks, np.ones((1, 4 if width == 2 else 5)), 16, True)
        tiles, ranks = gpu.classes.Tiles.of(blocks, 16), gpu.classes.class_ranks(blocks, classification, side)
        gpu.classes.diff_with_class_ranks(blocks, classification, side, side)
        emitted = gpu.classes.classify_changes(
            blocks, classification, side, side, words, counts.to(torch.int64), ranks, 64
        )
        gpu.classes.sort_by_class(blocks, classification, counts, emitted)
        none, one = (
            torch.zeros(tiles.count * (classification.K + 1), dtype=torch.int32),
            np.ones(classification.K + 1, int),
        )
        layout, _ = gpu.classes.change_layout(blocks, tiles, none, 0 * one[:1], 64 * one[:1], one, one, 1 << 16, bad)
        found = gpu.classes.class_positions(
            blocks, classification, side, tiles, ranks, gpu.classes.ChangeNumbers(layout, where, bits, 64), bad
        )
        gpu.classes.write(side, found, bits, bad)
        cuts, _ = gpu.rans.NumberChunks.of_streams(blocks, [64], 256)
        packed = gpu.rans.PackedNumbers.of(cuts, 8 * width)
        packed.pack(0, 1, bits)
        chunks = gpu.rans.EncodedChunks(cuts.begin, cuts.size, cuts.begin, cuts.size)
        gpu.rans.unpack(chunks, packed.tokens, packed.tokens, bits, 9, bad)
        if width == 2:
            other = gpu.changes.Blocks(4, [9000], "cpu").side([torch.zeros(9000)])
            gpu.changes.mark(blocks, other, side, words, counts)
            gpu.changes.diff(blocks, side, other)
            gpu.changes.diff(blocks, side, gpu.changes.Blocks(4, [9000], "cpu").side([torch.zeros(9001)[1:]]))
            gpu.changes.compact(blocks, side, other, words, counts, 64, steps=True, tile_log=logs)
            gpu.classes.classify_changes(blocks, classification, side, other, words, counts.to(torch.int64), ranks, 64)
            gpu.cells.sample(blocks, side, other, words, counts, torch.zeros(4, dtype=torch.int64))
            packed.pack(0, 1, where, ranked=True)
            gpu.rans.lay_out(packed, gpu.rans.encode(packed), np.zeros(1, int), np.arange(2))
            gpu.rans.decode(blocks, chunks, packed.tokens, packed.tokens, bad)
            gpu.rans.copy(packed.tokens, packed.tokens, cuts.begin, cuts.begin, cuts.size, 64)
    kernels = {n for m in (gpu.changes, gpu.classes, gpu.rans) for n in vars(m) if n.endswith("_kernel")}
    assert made == kernels | {"_sample_kernel"}, kernels - made
    print("compiled", len(made), "kernels")


if __name__ == "__main__":
    compile_all(int(sys.argv[1]))
