"""All mutants, one module for each room of the package and one for receivers, and where their code stands."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from . import (
    codec,
    integrations,
    kernels,
    modules,
    patch,
    plan,
    receivers,
    session,
    sources,
    targets,
    transport,
    weights,
    wire,
)
from .mutant import Mutant
from .tokens import places_of, tokens_of

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "sparserl"
ROOMS = (
    modules,
    weights,
    kernels,
    codec,
    wire,
    plan,
    patch,
    sources,
    targets,
    transport,
    session,
    receivers,
    integrations,
)
MUTANTS = tuple(mutant for room in ROOMS for mutant in room.MUTANTS)


def lost(mutants: Iterable[Mutant]) -> dict[Mutant, str]:
    """Mutants whose code does not stand exactly once where it should, and what is wrong with each."""
    faults = {}
    for mutant in mutants:
        path = PACKAGE / mutant.file
        if not path.exists():
            faults[mutant] = f"there is no {mutant.file}"
            continue
        places = places_of(mutant.old, tokens_of(path.read_text()))
        if len(places) != 1:
            faults[mutant] = f"its code stands {len(places)} times in {mutant.file}"
    return faults
