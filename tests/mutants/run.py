"""Break the code in named ways, one at a time, and see that the tests notice.

Each mutant is one replacement in one file. It is run against the tests that are there to catch it; a mutant that
survives, or whose code is no longer found, makes this program fail. The same tests are run on the unbroken code first,
so that red means something.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path

from ..turns import has_turn, turn
from .catalogue import MUTANTS, ROOT, lost
from .mutant import Mutant, Tests
from .tokens import replaced

WORKERS = 2
SECONDS = 1200  # for one run of pytest that hangs
GREEN, RED = 0, 1  # pytest's exit codes: all passed, some failed


@contextmanager
def mutated(folder: Path, mutant: Mutant) -> Iterator[None]:
    """The folder's code with the mutant in it; afterwards the file is as it was, to the nanosecond.

    Meanwhile the file has a date of which no bytecode was made.
    """
    path = folder / "src" / "sparserl" / mutant.file
    before = path.read_text()
    stamp = path.stat()
    path.write_text(replaced(before, mutant.old, mutant.new))
    os.utime(path, (0, 0))
    try:
        yield
    finally:
        path.write_text(before)
        os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))


class Pytest:
    """Runs tests on the code in a folder. A run is a fork of one process, which saves importing what they all need."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        environment = {
            **os.environ,
            "HYPOTHESIS_PROFILE": "first",
            "PYTHONPATH": str(folder / "src"),
            "PYTHONDONTWRITEBYTECODE": "1",  # that of a mutant would outlive it
        }
        environment.pop("NUMBA_CACHE_DIR", None)
        self._process = subprocess.Popen(
            [sys.executable, "-P", Path(__file__).with_name("pytest_forks.py")],
            cwd=folder,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __call__(self, tests: Iterable[Tests], cache: Path | None = None) -> tuple[int, str]:
        """Exit code and output. Kernels are cached beside the code, or elsewhere."""
        files = sorted({f"tests/{t.file}" for t in tests})
        words = " or ".join(sorted({t.keywords for t in tests}))
        imported = "ignore::pytest.PytestAssertRewriteWarning"  # that plugins are there already is what we want
        options = ["-W", imported, "-x", "-q", "--tb=line", "-p", "no:cacheprovider", "--hypothesis-seed=0"]
        output = self._folder / "output"
        there = None if cache is None else str(cache)
        order = {"args": [*options, *files, "-k", words], "cache": there, "seconds": SECONDS, "output": str(output)}
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        code = int(self._process.stdout.readline())
        return code, output.read_text(errors="replace")

    def close(self) -> None:
        self._process.communicate()


def judge(folder: Path, pytest: Pytest, mutant: Mutant) -> str | None:
    """None if the tests notice the mutant, else what went wrong."""
    with mutated(folder, mutant):
        with kept_kernels(folder) if mutant.compiled else nullcontext():
            code, output = pytest([mutant.tests])
        if mutant.compiled and code == GREEN:  # kernels of other files have inlined what is broken
            with tempfile.TemporaryDirectory() as cache:
                code, output = pytest([mutant.tests], Path(cache))
    if code == RED:
        return None
    return "survived" if code == GREEN else f"pytest ended with {code}:\n{output[-2000:]}"


@contextmanager
def kept_kernels(folder: Path) -> Iterator[None]:
    """Kernels in a mutant's file are compiled again, since it has another date, and forgotten; others are as they were."""
    cache = folder / "src" / "sparserl" / "kernels" / "cpu" / "__pycache__"
    cache.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as kept:
        shutil.copytree(cache, kept, dirs_exist_ok=True)
        try:
            yield
        finally:
            shutil.rmtree(cache)
            shutil.copytree(kept, cache)


def control(pytest: Pytest, mutants: Iterable[Mutant]) -> str | None:
    """None if the tests pass on the code as it is, else what they say."""
    code, output = pytest([m.tests for m in mutants])
    return None if code == GREEN else f"pytest ended with {code}:\n{output[-2000:]}"


def report(name: str, wrong: str | None, began: float) -> bool:
    print(f"{'ok' if wrong is None else 'FAILED':<8}{time.monotonic() - began:6.1f} s  {name}", flush=True)
    if wrong is not None:
        print(f"        {wrong}", flush=True)
    return wrong is None


def work(folder: Path, mutants: list[Mutant], green: bool) -> bool:
    """The tests without a mutant, if it is not known that they pass, then each mutant. True if all were noticed."""
    skip = shutil.ignore_patterns("data", ".hypothesis")  # bytecode and compiled kernels come along
    for part in ("src", "tests", "docs", "examples"):  # tests read pages, and files beside them
        shutil.copytree(ROOT / part, folder / part, ignore=skip)
    shutil.copy2(ROOT / "pyproject.toml", folder)
    with closing(Pytest(folder)) as pytest:
        began = time.monotonic()
        if not green and not report(f"no mutant in the way of {len(mutants)}", control(pytest, mutants), began):
            return False
        good = True
        for mutant in mutants:
            began = time.monotonic()
            good &= report(mutant.name, judge(folder, pytest, mutant), began)
        return good


def shared(mutants: Iterable[Mutant]) -> list[list[Mutant]]:
    """Mutants for each worker: those of one test file together, since they use the same compiled kernels."""
    by_file: dict[str, list[Mutant]] = {}
    for mutant in mutants:
        by_file.setdefault(mutant.tests.file, []).append(mutant)
    shares: list[list[Mutant]] = [[] for _ in range(WORKERS)]
    for group in sorted(by_file.values(), key=len, reverse=True):
        min(shares, key=len).extend(group)
    return [share for share in shares if share]


def run(names: list[str], green: bool, one_in: int = 1) -> int:
    """0 if every mutant that was asked for was noticed."""
    asked = [m for m in MUTANTS if not names or any(name in m.name for name in names)]
    now = turn()
    chosen = [m for m in asked if has_turn(m.name, one_in, now)]
    mutants = [m for m in chosen if m.runs_here]
    for mutant in set(chosen) - set(mutants):
        print(f"left out: {mutant.name}: this processor has no {mutant.feature}", flush=True)
    if faults := lost(chosen):
        raise SystemExit("\n".join(f"{mutant.name}: {fault}" for mutant, fault in faults.items()))
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="sparserl-mutants-") as home, ThreadPoolExecutor(WORKERS) as pool:
        shares = shared(mutants)
        folders = [Path(home) / str(i) for i in range(len(shares))]
        good = all(list(pool.map(lambda folder, share: work(folder, share, green), folders, shares)))
    print(f"{len(mutants)} mutants, {'all noticed' if good else 'NOT all noticed'}, {time.monotonic() - began:.0f} s")
    return 0 if good else 1
