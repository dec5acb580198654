"""Builds the sdist and the wheel, checks them, and uses the wheel in bare environments: `make package`.

Every Python from 3.10 to 3.13 on this machine installs the wheel with its dependencies, and nothing else, and makes the
same patch. The bytes must be identical.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
USE = Path(__file__).with_name("use_wheel.py")
MINORS = (10, 11, 12, 13)
AT_ONCE = 2  # environments that are made at the same time


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="sparserl-package-") as folder:
        work = Path(folder)
        wheel = build(work / "dist")
        interpreters = list(find_interpreters())
        if not interpreters:
            sys.exit("no Python from 3.10 to 3.13 with venv and pip was found")
        newest = interpreters[-1][0]
        with ThreadPoolExecutor(AT_ONCE) as pool:
            jobs = {
                minor: pool.submit(use, python, wheel, work / f"3.{minor}", minor == newest)
                for minor, python in interpreters
            }
            patches = {minor: job.result() for minor, job in jobs.items()}
    for minor, patch in patches.items():
        print(f"Python 3.{minor}: patch of {len(patch)} bytes, SHA-256 {hashlib.sha256(patch).hexdigest()}")
    if len(set(patches.values())) != 1:
        sys.exit("patches differ between versions of Python")
    print("the wheel works in bare environments, and all make the same patch")


def build(dist: Path) -> Path:
    """The wheel, built from the sdist, once both have been checked."""
    run(sys.executable, "-m", "build", "--outdir", str(dist), str(ROOT))
    (wheel,) = dist.glob("*.whl")
    (sdist,) = dist.glob("*.tar.gz")
    run(sys.executable, "-m", "twine", "check", "--strict", str(wheel), str(sdist))
    check_wheel(wheel)
    check_sdist(sdist)
    return wheel


def check_wheel(wheel: Path) -> None:
    """Exit unless the wheel has the package, its marker for type checkers, its license and nothing else."""
    name, version, *_ = wheel.name.split("-")
    info = f"{name}-{version}.dist-info/"
    with zipfile.ZipFile(wheel) as archive:
        files = set(archive.namelist())
    for wanted in ("sparserl/__init__.py", "sparserl/py.typed", "sparserl/cli/__init__.py", f"{info}licenses/LICENSE"):
        if wanted not in files:
            sys.exit(f"{wheel.name} has no {wanted}")
    if others := sorted(file for file in files if not file.startswith(("sparserl/", info))):
        sys.exit(f"{wheel.name} has files that do not belong to it: {', '.join(others[:5])}")


def check_sdist(sdist: Path) -> None:
    """Exit unless the sdist has what a packager needs: sources, tests, license and changelog."""
    with tarfile.open(sdist) as archive:
        files = {name.partition("/")[2] for name in archive.getnames()}
    for wanted in ("pyproject.toml", "src/sparserl/__init__.py", "tests/conftest.py", "LICENSE", "CHANGELOG.md"):
        if wanted not in files:
            sys.exit(f"{sdist.name} has no {wanted}")


def find_interpreters() -> Iterator[tuple[int, str]]:
    """One interpreter for each version of Python, oldest first, that can make environments."""
    versions = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    for minor in MINORS:
        candidates = [str(path) for path in sorted(versions.glob(f"3.{minor}.*/bin/python"), reverse=True)]
        if (found := shutil.which(f"python3.{minor}")) is not None:
            candidates.append(found)
        for python in candidates:
            code = f"import sys, venv, ensurepip; sys.exit(sys.version_info[:2] != (3, {minor}))"
            if subprocess.run([python, "-c", code], check=False, capture_output=True).returncode == 0:
                yield minor, python
                break


def use(python: str, wheel: Path, folder: Path, sessions: bool) -> bytes:
    """The patch that a Python makes with nothing installed but the wheel and what it depends on."""
    environment = folder / "venv"
    run(python, "-m", "venv", "--without-pip", str(environment))
    inside = str(environment / "bin" / "python")
    install = ("install", "--quiet", "--no-compile", "--disable-pip-version-check", str(wheel))
    run(sys.executable, "-m", "pip", "--python", inside, *install)  # most of what is installed is never imported
    output = folder / "fixed.patch"
    command = [inside, str(USE), str(output), *(["--sessions"] if sessions else [])]
    run(*command, cwd=folder, env=_clean_environment() | {"NUMBA_CACHE_DIR": str(folder / "numba")})
    return output.read_bytes()


def _clean_environment() -> dict[str, str]:
    """Our environment without what would show the repository to another Python."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}


def run(*command: str, cwd: Path = ROOT, env: dict[str, str] | None = None) -> None:
    """Run a program; where it fails, exit with what it said."""
    process = subprocess.run(
        command, cwd=cwd, env=env or _clean_environment(), check=False, capture_output=True, text=True
    )
    if process.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{process.stdout}{process.stderr}")


if __name__ == "__main__":
    main()
