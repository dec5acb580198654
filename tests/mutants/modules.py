"""Ways to be wrong in the modules in the root of the package."""

from __future__ import annotations

from .mutant import Mutant, Tests

MUTANTS = (
    Mutant(
        "buckets go on landing while others are put back",
        "parallel.py",
        "wait([future for future, _ in self._futures if not future.cancel()])",
        "[future for future, _ in self._futures if not future.cancel()]",
        Tests("test_threads.py", "behind"),
    ),
    Mutant(
        "links in a folder of ours are followed",
        "files.py",
        "return 0 if self.links else os.O_NOFOLLOW",
        "return 0",
        Tests("hostile/test_folders.py", "links_in or at_any_moment"),
    ),
)
