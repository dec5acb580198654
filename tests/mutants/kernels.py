"""Ways to be wrong in kernels/."""

from __future__ import annotations

from .mutant import Mutant, Tests

MUTANTS = (
    Mutant(
        "every rank compiles a kernel",
        "kernels/cpu/compiling.py",
        "with cache_lock.hold(shared=False):\n            return compile(signature)",
        "return compile(signature)",
        Tests("kernels/test_cpu_compiling.py", "start_together"),
    ),
    Mutant(
        "the tail of a block is seen twice",
        "kernels/cpu/changes.py",
        "return (differ64(tag, a + last, b + last) >> compared) << compared",
        "return differ64(tag, a + last, b + last)",
        Tests("kernels/test_cpu_changes.py", "diff"),
    ),
    Mutant(
        "the digest forgets positions inside a block",
        "kernels/cpu/llvm.py",
        "return b.add(start, self.constant(*(i * GOLDEN for i in range(self.lanes))))",
        "return start",
        Tests("kernels/test_cpu_regions.py", "digest"),
    ),
    Mutant(
        "the digest forgets where a box lies",
        "kernels/cpu/changes.py",
        "at = boxes.start[e] + _offset(p, e, boxes)",
        "at = boxes.start[e] +p",
        Tests("weights/test_digest.py", "shards"),
    ),
    Mutant(
        "counts of tiles need not add up",
        "kernels/cpu/changes.py",
        ("if left:\n    return e"),
        ("if left < 0:\n    return e"),
        Tests("kernels/test_cpu_changes.py", "tile"),
    ),
    Mutant(
        "a tile may reach past the end of its region",
        "kernels/cpu/changes.py",
        "end = min(np.int64(j + 1) << log, numel[e])",
        "end = np.int64(j + 1) << log",
        Tests("kernels/test_cpu_changes.py", "tile"),
    ),
    Mutant(
        "steps that cross zero keep the sign",
        "kernels/cpu/changes.py",
        (
            "word += ((np.uint64(step) >> _ONE) ^ (zero - (np.uint64(step) & _ONE))) << up\n"
            "word ^= np.uint64(np.int64(word) >> np.int64(63)) & mirrors"
        ),
        (
            "sign = np.uint64(np.int64(word) >> np.int64(63)) & mirrors\n"
            "word += ((np.uint64(step) >> _ONE) ^ (zero - (np.uint64(step) & _ONE))) << up\n"
            "word ^= sign"
        ),
        Tests("kernels/test_cpu_numbers.py", "steps"),
    ),
    Mutant(
        "positions past 2^31 wrap",
        "kernels/cpu/changes.py",
        "out[k] = regions.start[e] + _offset(np.int64(positions[k]), e, regions)",
        "out[k] = np.int32(regions.start[e] + _offset(np.int64(positions[k]), e, regions))",
        Tests("kernels/test_cpu_regions.py", "locate"),
    ),
    Mutant(
        "a class begins one above its threshold",
        "kernels/cpu/classes.py",
        "c += np.int64(size >= limits[k])",
        "c += np.int64(size > limits[k])",
        Tests("kernels/test_classes.py", "every_size and 2-float-3"),
    ),
    Mutant(
        "masks of a class take in its threshold",
        "kernels/cpu/llvm.py",
        '[b.icmp_unsigned("<", x, limit) for x in parts]',
        '[b.icmp_unsigned("<=", x, limit) for x in parts]',
        Tests("kernels/test_classes.py", "every_size and 2-float-3"),
    ),
    Mutant(
        "limits that a byte does not tell are taken for such",
        "kernels/cpu/classes.py",
        "short &= limit & ~_HIGH == 0",
        "short &= limit & np.uint64(127) == 0",
        Tests("kernels/test_classes.py", "byte_tells and float-thresholds4"),
    ),
    Mutant(
        "sixteen numbers may take more low bits than there are",
        "kernels/cpu/llvm.py",
        "b.select(b.and_(within, b.not_(_any(b, above))), total, _I64(-1))",
        "b.select(b.not_(_any(b, above)), total, _I64(-1))",
        Tests("kernels/test_cpu_numbers.py", "without_its_low_bits and uint16"),
    ),
    Mutant(
        "what is summed up on the way to a change takes another key",
        "kernels/cpu/changes.py",
        "line = (origin, step, keys[e, 1])\nfor ahead",
        "line = (origin, step, keys[e, 0])\nfor ahead",
        Tests("kernels/test_cpu_regions.py", "test_gather_and_scatter and words-u8"),
    ),
    Mutant(
        "ranks in a class run on from tile to tile",
        "kernels/cpu/classes.py",
        ("passed[:] = 0\nlast[:] = -1"),
        ("if tile == 0:\n    passed[:] = 0\n    last[:] = -1"),
        Tests("kernels/test_classes.py", "stretches_and_tiles and 2-float"),
    ),
    Mutant(
        "elements of a class in the last, partial block are not seen",
        "kernels/cpu/classes.py",
        "if rest:",
        "if rest < 0:",
        Tests("kernels/test_classes.py", "every_size and 2-float-3"),
    ),
    Mutant(
        "a stretch behind a partial one is not whole",
        "kernels/cpu/classes.py",
        "if masks[last, _BLOCKS - 1] != _ALL:",
        "if masks[last, 0] != _ALL:",
        Tests("kernels/test_classes.py", "behind_partial and 2"),
    ),
    Mutant(
        "gaps in a class may lead out of their tile",
        "kernels/cpu/classes.py",
        ("if tile_left:\n    return k, e"),
        ("if tile_left < 0:\n    return k, e"),
        Tests("kernels/test_classes.py", "does_not_fit or next_tile or at_fault"),
    ),
    Mutant(
        "an entry may have fewer changes in its classes than it says",
        "kernels/cpu/classes.py",
        ("if entry_left:\n    return k, e"),
        ("if entry_left < 0:\n    return k, e"),
        Tests("kernels/test_classes.py", "does_not_fit or at_fault"),
    ),
    Mutant(
        "what landed before a gap was at fault stays",
        "kernels/cpu/classes.py",
        "if landing.write and bad >= 0:",
        "if landing.write and bad >= 1 << 30:",
        Tests("kernels/test_classes.py", "does_not_fit"),
    ),
    Mutant(
        "the table finds the bit before the one that is sought in a class",
        "kernels/cpu/llvm.py",
        "b.mul(b.add(rank, _I64(1)), each)",
        "b.mul(rank, each)",
        Tests("kernels/test_classes.py", "select"),
    ),
    Mutant(
        "rans states may end anywhere",
        "kernels/cpu/rans.py",
        "if np.uint64(x[lane]) != _LOW:",
        "if np.uint64(x[lane]) < _ONE:",
        Tests("kernels/test_rans.py", "any_states or flipped"),
    ),
    Mutant(
        "rans words may be left over",
        "kernels/cpu/rans.py",
        "return left == 0",
        "return left >= 0",
        Tests("kernels/test_rans.py", "behind_them"),
    ),
    Mutant(
        "rans words that are missing pass for zeros",
        "kernels/cpu/rans.py",
        "return left == 0",
        "return left <= 0",
        Tests("kernels/test_rans.py", "are_not_zeros"),
    ),
    Mutant(
        "rans frequencies need not add up",
        "kernels/cpu/rans.py",
        "if left < 1 or (at & 7",
        "if left < -(1 << 30) or (at & 7",
        Tests("kernels/test_rans.py", "do_not_add_up"),
    ),
    Mutant(
        "what a kernel has made is freed while its address is in use",
        "kernels/cpu/rans.py",
        "keep_alive(shares)",
        "",
        Tests("test_threads.py", "nobody_wrote"),
        feature="avx512_vbmi2",
    ),
)
