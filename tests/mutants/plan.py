"""Ways to be wrong in plan/."""

from __future__ import annotations

from .mutant import Mutant, Tests

MUTANTS = (
    Mutant(
        "a bucket of a GPU with many changes covers as much as one with few",
        "plan/buckets.py",
        "covered_before + capacity.enough_cover_bytes",
        "covered_before + capacity.cover_bytes",
        Tests("plan/test_plan.py", "where_a_bucket_is_full"),
    ),
    Mutant(
        "a bucket goes across a boundary",
        "plan/buckets.py",
        "if isinstance(part, Boundary):",
        "if part is None:",
        Tests("patch/test_cut_patches.py", "test_patches"),
    ),
    Mutant(
        "positions of a split entry count from the old start",
        "plan/routing.py",
        "piece.positions = piece.positions - np.uint32(begin)",
        "",
        Tests("plan/test_plan.py", "cut_by"),
    ),
    Mutant(
        "entries are put in order without their changes",
        "plan/buckets.py",
        "return [np.concatenate(positions)[indices]], [np.concatenate(words)[indices]]",
        "return positions, words",
        Tests("plan/test_plan.py", "share_buckets"),
    ),
    Mutant(
        "a bucket takes entries that no profile can hold",
        "plan/buckets.py",
        "if part.count.size and self.costs and not self.costs.keys() & part.cost.keys():",
        "if part.count.size < 0:",
        Tests("patch/test_compose.py", "different_kinds"),
    ),
    Mutant(
        "`ctx` is taken for as large as `ulp` until it is written",
        "plan/classes.py",
        "return tuple(thresholds.tolist()), float(single - bits)",
        "return tuple(thresholds.tolist()), 0.0",
        Tests("plan/test_auto.py", "small_weights"),
    ),
    Mutant(
        "`plan` takes the bits of other patches for those of profiles that it does not know",
        "cli/plan.py",
        "[estimate for estimate in estimates if estimate.name not in question.unknown]",
        "[*estimates]",
        Tests("cli/test_plan_cli.py", "patch_alone"),
    ),
)
