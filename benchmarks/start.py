"""How long one waits for the first patch: kernels compiled anew, and found in the cache.

`python -m benchmarks.start` prints a line of JSON, in seconds.
"""

from __future__ import annotations

import json
import tempfile
import time

from benchmarks.fresh import told

_WARM = 3  # turns that find all kernels in the cache; the best counts


def measure() -> dict[str, float]:
    """Seconds of fresh processes: all profiles with an empty cache, then import and the first call with a full one."""
    with tempfile.TemporaryDirectory() as cache:
        cold, *warm = (told("benchmarks.start", NUMBA_CACHE_DIR=cache) for _ in range(1 + _WARM))
    return {
        "compile": cold["all"],
        "import": min(turn["import"] for turn in warm),
        "first": min(turn["first"] for turn in warm),
    }


def main() -> None:
    began = time.perf_counter()
    import sparserl
    import sparserl.codec
    import sparserl.kernels.cpu.changes  # loads Numba, which the first patch would otherwise wait for
    import sparserl.weights.dtypes

    took = {"import": time.perf_counter() - began}
    from benchmarks import traces

    old, new = traces.synthetic(2 << 20, 0.05, seed=0)
    dtype = sparserl.weights.dtypes.BY_NAME["bfloat16"]
    began = time.perf_counter()
    for profile in ("auto", *sparserl.codec.PROFILES):
        weights = {"w": sparserl.Bits(old.copy(), dtype)}
        patch = sparserl.diff(weights, {"w": sparserl.Bits(new, dtype)}, profile=profile)
        patch.apply(weights)
        took.setdefault("first", time.perf_counter() - began)
        if (weights["w"].array != new).any():
            raise AssertionError(f"{profile} did not land; its figures would be worth nothing")
    took["all"] = time.perf_counter() - began
    print(json.dumps(took))


if __name__ == "__main__":
    main()
