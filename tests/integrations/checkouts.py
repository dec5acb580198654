"""Frameworks that tests run from checkouts, since they are not on the package index, and the commits that were tried.

    python -m tests.integrations.checkouts SPARSERL_SLIME

says how to get one if the variable names none, and whether it is at another commit; `make` asks before it runs tests,
which would be skipped without a checkout, and seem to pass.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple


class Checkout(NamedTuple):
    """A framework's repository on GitHub, the commit that was tried, and the page that says so."""

    repository: str
    commit: str
    page: str


CHECKOUTS = {
    "SPARSERL_SLIME": Checkout("THUDM/slime", "624b824a898ab0ec1fcb4d373004c7f3852bf515", "slime.md"),
    "SPARSERL_MILES": Checkout("radixark/miles", "31f1ca961a94cb860cec3b2dea34ec332bfa8f76", "slime.md"),
    "SPARSERL_NEMO_RL": Checkout("NVIDIA-NeMo/RL", "7ea279abfbeb698b092856d0dab61e7cf39bc909", "nemo-rl.md"),
    "SPARSERL_PRIME_RL": Checkout(
        "PrimeIntellect-ai/prime-rl", "559b44772e471d1538537b8805cc77f3824a5e64", "prime-rl.md"
    ),
    "SPARSERL_AREAL": Checkout("areal-project/AReaL", "cbff54d645d2cd8ee1f1c358a82f3f473588433d", "areal.md"),
    "SPARSERL_ROLL": Checkout("alibaba/ROLL", "8eb27cc2dc34c4d1310b169d9b86d339004d811a", "roll.md"),
    "SPARSERL_OPENRLHF": Checkout("OpenRLHF/OpenRLHF", "3c3be6234e0cb353e76bb8019947db9dfe99fca7", "openrlhf.md"),
}


def problem(variable: str) -> str | None:
    """What keeps tests from running with the checkout that a variable should name."""
    checkout = CHECKOUTS[variable]
    folder = os.environ.get(variable)
    if folder and _commit(folder):
        return None
    name = checkout.repository.split("/")[1]
    return (
        f"{variable} names no checkout:\n  git clone https://github.com/{checkout.repository}\n"
        f"  git -C {name} checkout {checkout.commit}\n  export {variable}=$PWD/{name}"
    )


def warning(variable: str) -> str | None:
    """What may be different in the checkout that a variable names."""
    commit = _commit(os.environ[variable])
    tried = CHECKOUTS[variable].commit
    return None if commit == tried else f"{variable} is at {commit}; {tried} was tried"


def _commit(folder: str) -> str | None:
    """Which commit a folder is a checkout of; None if it is not one, or only a part of one."""
    asking = ["git", "-C", folder, "rev-parse", "--show-toplevel", "HEAD"]
    lines = subprocess.run(asking, capture_output=True, text=True, check=False).stdout.splitlines()
    return lines[1] if len(lines) == 2 and Path(lines[0]).samefile(folder) else None


def main(variables: list[str]) -> int:
    """0 if all variables name checkouts."""
    problems = [text for text in map(problem, variables) if text]
    for text in problems or filter(None, map(warning, variables)):
        print(text, file=sys.stderr)
    return 2 if problems else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
