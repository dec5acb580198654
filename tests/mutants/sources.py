"""Ways to be wrong in sources/."""

from __future__ import annotations

from .mutant import Mutant, Tests

MUTANTS = (
    Mutant(
        "marks that were not committed are forgotten",
        "sources/tracked_rows.py",
        "marks.unite(earlier.marks)",
        "",
        Tests("sources/test_track_steps.py", "failed_publishes"),
    ),
    Mutant(
        "only the marks of the last step are sent",
        "sources/tracked_rows.py",
        "first = plan.first[changes.rows]",
        ("first = plan.first[changes.rows]\nself.words[:] = 0"),
        Tests("sources/test_track.py", "add_up"),
    ),
)
