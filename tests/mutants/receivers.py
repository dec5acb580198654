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
    Mutant(
        "a lease that could not be written waits its turn",
        "session/store/own_lease.py",
        "self.due = now + min(self._seconds, _RETRY + 10 * (now - began))",
        "self.due = now + self._seconds",
        Tests("session/test_profiles.py", "could_not_be_written"),
    ),
    Mutant(
        "receivers without a version are not heard",
        "session/store/own_lease.py",
        "if self._name is None or (version is None and profiles is None):",
        "if self._name is None or version is None:",
        Tests("session/test_profiles.py", "without_a_version_is_heard"),
    ),
    Mutant(
        "engines that were silent for a day are forgotten at once",
        "session/store/receivers.py",
        "if looks + 1 < _LOOKS_TO_FORGET}",
        "if looks < 0}",
        Tests("integrations/test_ranks.py", "break_of_more"),
    ),
    Mutant(
        "leases as old as a training step are not heard",
        "session/store/receivers.py",
        "remembered = [lease for lease in leases if now - lease.time < self._remembered]",
        "remembered = current",
        Tests("session/test_profiles.py", "take_long"),
    ),
    Mutant(
        "who starts again counts once more",
        "session/store/receivers.py",
        "is_another = lease.version is not None",
        "is_another = True",
        Tests("session/test_profiles.py", "again_and_again"),
    ),
    Mutant(
        "what receivers can take does not matter",
        "session/store/receivers.py",
        "self.profiles = choice.profiles",
        "self.profiles = None",
        Tests("session/test_profiles.py", "keeps_to_what"),
    ),
    Mutant(
        "a receiver that takes nothing limits all others",
        "session/profiles.py",
        'for receiver, names in every.items() if plan.candidates("auto", names)}',
        "for receiver, names in every.items()}",
        Tests("session/test_profiles.py", "no_patch_can_be"),
    ),
    Mutant(
        "receivers wait for an anchor that is due some day",
        "session/store/receivers.py",
        "self._anchors = [row.anchor for row in heard if row.anchor is not None]",
        "self._anchors = []",
        Tests("integrations/test_ranks.py", "cannot_be_taken"),
    ),
)
