"""Ways to be wrong about receivers: what they write down, and what they fetch."""

from __future__ import annotations

from .mutant import Mutant, Tests

MUTANTS = (
    Mutant(
        "records of parts are read for every version",
        "session/store/receivers.py",
        "if key not in self._read:",
        "if key:",
        Tests("session/test_holding_records.py", "many_receivers_cost"),
    ),
    Mutant(
        "weights are cut anew for every version",
        "session/store/receivers.py",
        "if self._cut is None or self._cut[0] != key:",
        "if key:",
        Tests("session/test_holding_records.py", "many_receivers_cost"),
    ),
    Mutant(
        "one damaged record of parts ends the cut of all",
        "session/store/receivers.py",
        'trouble = f"the parts of a receiver cannot be used: {own}"\ncontinue',
        'trouble = f"the parts of a receiver cannot be used: {own}"\nbreak',
        Tests("session/test_holding_records.py", "many_receivers_cost"),
    ),
    Mutant(
        "any bucket with the right digest is taken",
        "session/store/coming.py",
        "require_hash(data, blob.hash, name)\nreturn data",
        "return data",
        Tests("session/test_bucket_hashes.py", "refuses_them or continue_from or anything_else"),
    ),
)
