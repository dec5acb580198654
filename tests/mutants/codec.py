"""Ways to be wrong in codec/."""

from __future__ import annotations

from .mutant import Mutant, Tests

MUTANTS = (
    Mutant(
        "the length of a stored chunk is not checked",
        "codec/coders.py",
        "if len(coded) != size:",
        "if len(coded) < 0:",
        Tests("codec/test_coders.py"),
    ),
    Mutant(
        "magnitudes keep their sign",
        "codec/ctx.py",
        "(1 << (width - dtype.sign_magnitude)) - 1",
        "(1 << width) - 1",
        Tests("codec/test_class_streams.py", "class_streams and bfloat16"),
    ),
    Mutant(
        "counts by class need not add up to those of the entries",
        "codec/ctx.py",
        "if int(totals.sum()) != layout.changes:",
        "if int(totals.sum()) < 0:",
        Tests("codec/test_class_streams.py", "counts_of_classes"),
    ),
    Mutant(
        "thresholds of classes need not rise",
        "codec/ctx.py",
        "if not rising or thresholds[-1] >= KEYS",
        "if thresholds[-1] >= KEYS",
        Tests("codec/test_class_streams.py", "no_sense"),
    ),
    Mutant(
        "items are lent from memory that may change",
        "codec/streams.py",
        "stored is not None and self._is_safe(stream)",
        "stored is not None",
        Tests("codec/test_coders.py", "lent"),
    ),
)
