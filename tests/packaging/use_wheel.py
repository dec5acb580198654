"""Uses an installed sparserl, with nothing else beside it: run by `check_packages.py` in bare environments.

Writes the patch between two fixed versions of some weights, which must have the same bytes under every Python.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np

import sparserl

ELEMENTS = 20_000


def versions() -> list[dict[str, np.ndarray]]:
    """Two versions of float16 weights, from integer arithmetic alone; about one element in a hundred changes."""
    noise = (np.arange(ELEMENTS, dtype=np.uint32) * np.uint32(2654435761)) >> np.uint32(8)
    old = (noise.astype(np.float32) / np.float32(2**24)).astype(np.float16)
    bits = old.view(np.uint16).copy()
    bits[noise % 97 == 0] += 1
    return [{"weight": old.reshape(100, 200)}, {"weight": bits.view(np.float16).reshape(100, 200)}]


def patch_bytes() -> bytes:
    """The patch between them, which was applied and gave the second version."""
    old, new = versions()
    patch = sparserl.diff(old, new, profile="ulp")
    patch.apply(old)
    assert np.array_equal(old["weight"].view(np.uint16), new["weight"].view(np.uint16))
    return patch.to_bytes()


def follow_a_folder(folder: Path) -> None:
    """Publish both versions to a folder and follow them, by the API and by the command line."""
    weights, new = versions()
    rollout = {"weight": np.zeros_like(new["weight"])}
    publisher = sparserl.Publisher(f"file://{folder}/store", weights)
    subscriber = sparserl.Subscriber(f"file://{folder}/store", rollout)
    for version in (0, 1):
        publisher.publish()
        report = subscriber.sync()
        assert report is not None
        assert report.version == version
        assert sparserl.digest(rollout) == sparserl.digest(weights)
        np.copyto(weights["weight"], new["weight"])
    program("follow", f"file://{folder}/store", "-o", str(folder / "model"), "--once")
    assert program("digest", str(folder / "model" / "current")).strip() == sparserl.digest(new).hex


def program(*args: str) -> str:
    """What the installed command prints."""
    command = [str(Path(sys.executable).with_name("sparserl")), *args]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def main() -> None:
    output = Path(sys.argv[1])
    assert "site-packages" in sparserl.__file__, sparserl.__file__
    assert program("--version") == f"sparserl {sparserl.__version__}\n"
    output.write_bytes(patch_bytes())
    if "--sessions" in sys.argv:
        follow_a_folder(output.parent)


if __name__ == "__main__":
    main()
