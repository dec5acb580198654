"""Ways to be wrong in patch/."""

from __future__ import annotations

from .mutant import Mutant, Tests

MUTANTS = (
    Mutant(
        "planes that a GPU decodes lie on each other",
        "patch/gpu_restoration.py",
        "symbols_at += bucket.head.dense_elements",
        "",
        Tests("patch/test_gpu_restoration.py", "all_bits and float32"),
    ),
    Mutant(
        "what a GPU does not decode is taken for decoded",
        "patch/gpu_restoration.py",
        "if bad()[0]:",
        "if bad() is None:",
        Tests("patch/test_gpu_restoration.py", "what_does_not_decode"),
    ),
    Mutant(
        "parts on a GPU get the first entry of a bucket",
        "patch/gpu_restoration.py",
        "np.stack((entry_first + first,",
        "np.stack((first,",
        Tests("patch/test_gpu_restoration.py", "test_parts"),
    ),
    Mutant(
        "zeros compared by value: a flipped sign is lost",
        "patch/cpu_compare.py",
        "positions, before, after = (column[:n].copy() for column in columns)",
        (
            "positions, before, after = (column[:n].copy() for column in columns)\n"
            "real = ((before | after) << 1) != 0\n"
            "counts = np.bincount(np.repeat(np.arange(size.size), counts)[real], minlength=size.size)\n"
            "positions, before, after = (column[real] for column in (positions, before, after))"
        ),
        Tests("patch/test_diff_apply.py", "every_kind_of_change and (bfloat16 or float32) or zero_signs"),
    ),
    Mutant(
        "the last element is not compared",
        "patch/cpu_compare.py",
        "return scan(tag, old, new, batch.numel)",
        "return scan(tag, old, new, batch.numel - 1)",
        Tests("patch/test_diff_apply.py", "every_kind_of_change and (bfloat16 or float32) or zero_signs"),
    ),
    Mutant(
        "a superset of the changes is taken for the changes",
        "patch/cpu_compare.py",
        "differs = before != after",
        "differs = before == before",
        Tests("patch/test_diff_apply.py", "known or bad_positions"),
    ),
    Mutant(
        "the base is not checked",
        "patch/matching.py",
        "if current != patch.base:",
        "if current is None:",
        Tests("patch/test_refused_patches.py", "wrong_base or does_not_hold or vouching"),
    ),
    Mutant(
        "the result is not checked",
        "patch/matching.py",
        "if result != patch.result:",
        "if result is None:",
        Tests("patch/test_refused_patches.py", "wrong_base or does_not_hold or vouching"),
    ),
    Mutant(
        "weights are written before the result is known",
        "patch/staging.py",
        "return Staged(decoded, replace(",
        ("replace(old, bits=new_bits, dense=decoded.dense_bits).write(weights)\nreturn Staged(decoded, replace("),
        Tests("patch/test_refused_patches.py", "wrong_base or does_not_hold or vouching"),
    ),
    Mutant(
        "old bits are not put back",
        "patch/apply.py",
        ("for old, _ in log:\n    old.write(weights)"),
        "",
        Tests("patch/test_refused_patches.py", "wrong_base or does_not_hold or vouching"),
    ),
    Mutant(
        "a bucket that fails half-way stays as it is",
        "patch/staging.py",
        ("except BaseException:\n    old.write(weights)\n    raise"),
        ("except BaseException:\n    raise"),
        Tests("patch/test_refused_patches.py", "before_an_error"),
    ),
    Mutant(
        "tied tensors may be told to differ",
        "patch/apply.py",
        "refuse_conflicts(weights, tied, staged)",
        "",
        Tests("patch/test_tied_tensors.py", "should_differ and auto-numpy"),
    ),
    Mutant(
        "read-only and folded memory is written",
        "patch/matching.py",
        "weights.require_writable({tensor for head in patch.heads for tensor in head.entries.tensor.tolist()})",
        "pass",
        Tests("weights/test_memory.py", "cannot_take_a_patch and not read-only and not broadcast"),
    ),
    Mutant(
        "squashed steps survive the bits laid over them",
        "patch/compose.py",
        "keep = ~among(self.positions[False], positions)",
        "keep = np.ones(self.positions[False].size, bool)",
        Tests("patch/test_compose.py", "bits_and_steps or dense_entries"),
    ),
    Mutant(
        "squashed windows lose their first element",
        "patch/located.py",
        "if a < b:",
        ("a += int(a > 0)\nif a < b:"),
        Tests("patch/test_compose.py", "without_the_base"),
    ),
    Mutant(
        "merged digests count the table twice",
        "patch/compose.py",
        "base = sum((p.base - terms if p.complete else p.base for p in patches), start)",
        "base = sum((p.base for p in patches), start)",
        Tests("patch/test_regions.py", "holds_everything"),
    ),
    Mutant(
        "changes found class by class are taken to be in order",
        "patch/compose.py",
        "decoded = decoded.in_order()",
        "",
        Tests("patch/test_ctx.py", "undone"),
    ),
    Mutant(
        "a commit does not look at what it writes over",
        "patch/application.py",
        "self._require_tracked(self.base + log.moved)",
        "",
        Tests("session/test_session_commits.py", "others_wrote"),
    ),
    Mutant(
        "names that share memory are not looked at before a commit",
        "patch/staging.py",
        "if not np.array_equal(bits, part.old_bits):",
        "if bits is None:",
        Tests("session/test_session_commits.py", "tied"),
    ),
    Mutant(
        "old bits pass for those of all changes, whatever the sums say",
        "patch/tracked.py",
        "if old_sums[place] + finder.moved[place] == now}",
        "}",
        Tests("patch/test_marked.py", "without_a_mark"),
    ),
    Mutant(
        "classes are counted over new bits",
        "plan/buckets.py",
        "layout = replace(layout, old_bits=_old_bits(sparse_parts, order))",
        "pass",
        Tests("sources/test_track_old_bits.py", "same_bytes and ctx"),
    ),
    Mutant(
        "what was captured is the trainer's own memory",
        "patch/tracked.py",
        "bits = self._weights.bits(tensor, box).copy()",
        "bits = self._weights.bits(tensor, box)",
        Tests("patch/test_marked.py", "captured"),
    ),
)
