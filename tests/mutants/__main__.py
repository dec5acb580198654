"""`python -m tests.mutants` runs the mutants; `python -m tests.mutants reanchor` finds code that has moved."""

from __future__ import annotations

import argparse
import sys

from ..turns import one_in
from . import reanchor, run


def main(arguments: list[str]) -> int:
    """0 if every mutant that was asked for was noticed, or has a place."""
    parser = argparse.ArgumentParser(description=run.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    noticed = commands.add_parser("run", help="break the code in each way, and see that the tests notice")
    noticed.add_argument("names", nargs="*", metavar="NAME", help="only mutants with one of these in their name")
    noticed.add_argument("--green", action="store_true", help="the tests have just passed: do not begin with them")
    noticed.add_argument(
        "--one-in", type=one_in, default=1, metavar="N", help="run one of N mutants; others after the next commit"
    )
    moved = commands.add_parser("reanchor", help="find the code of mutants whose text is no longer found")
    moved.add_argument("--write", action="store_true", help="change the catalogue; else the changes are only shown")
    asked = parser.parse_args(arguments)
    if asked.command == "reanchor":
        return reanchor.reanchor(asked.write)
    return run.run(asked.names, asked.green, asked.one_in)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
