"""Ways to be wrong in targets/."""

from __future__ import annotations

from .mutant import Mutant, Tests

MUTANTS = (
    Mutant(
        "a copy that nobody has verified is patched",
        "targets/checkpoint.py",
        "rest = _rest(digest, patches, self._path)",
        "rest = _rest(patches[0].base, patches, self._path)",
        Tests("hostile/test_odd_files.py", "what_was_verified"),
    ),
)
