"""Memory beyond the inputs: what diff and apply take at their peak, measured in a process of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import sparserl

MIB = 1 << 20
DENSE = 512 * MIB
DENSITY = 0.006

SCRIPT = """
import ctypes, gc, json, sys, threading, time
import numpy as np, sparserl
from sparserl.bits import BY_NAME, Bits

dense, density, threads = int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
path = sys.argv[4]


def anonymous():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith("RssAnon"))


def peak(work):
    # What was freed before goes back first. The kernels hold no lock, so a sampling thread sees what they take.
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    stop, seen = threading.Event(), [anonymous()]

    def watch():
        while not stop.is_set():
            seen.append(anonymous())
            time.sleep(0.001)

    watcher = threading.Thread(target=watch)
    watcher.start()
    before = seen[0]
    result = work()
    stop.set()
    watcher.join()
    return max(seen) - before, result


def weights(elements, seed):
    rng = np.random.default_rng(seed)
    part = elements // 8
    return {f"layer.{i}": rng.integers(0, 2**16, (part // 1024, 1024), np.uint16) for i in range(8)}


def held(bits):
    return {name: Bits(b, BY_NAME["bfloat16"]) for name, b in bits.items()}


def stepped(bits):
    rng = np.random.default_rng(1)
    out = {}
    for name, b in bits.items():
        out[name] = b.copy()
        where = rng.integers(0, b.size, int(b.size * density))
        out[name].reshape(-1)[where] ^= np.uint16(1)
    return out


warm = weights(1 << 16, 0)
sparserl.diff(held(warm), held(stepped(warm)), threads=threads).apply(held(warm), threads=threads)
old = weights(dense // 2, 0)
new = stepped(old)
to_disk, patch = peak(lambda: sparserl.diff(held(old), held(new), to=path, threads=threads))
changed, size = patch.changed, patch.nbytes
in_memory, kept = peak(lambda: sparserl.diff(held(old), held(new), threads=threads))
applied, done = peak(lambda: patch.apply(held(old), threads=threads))
assert done.changed == changed and all((old[n] == new[n]).all() for n in new)
print(json.dumps(dict(changed=changed, size=size, to_disk=to_disk, in_memory=in_memory, applied=applied)))
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
def test_memory_beyond_the_inputs(tmp_path, capsys):
    """512 MiB of bf16, 0.6% changed: diff takes the buckets in flight, apply what it promises per change."""
    env = {**os.environ, "PYTHONPATH": str(Path(sparserl.__file__).parents[1])}
    arguments = [str(DENSE), str(DENSITY), "2", str(tmp_path / "patch.srl")]
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *arguments], env=env, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    with capsys.disabled():
        print(f"\nmemory beyond {DENSE / MIB:.0f} MiB of weights, {figures['changed']} changed: ", end="")
        print(", ".join(f"{k} {figures[k] / MIB:.1f} MiB" for k in ("size", "to_disk", "in_memory", "applied")))
    in_flight = 2 * 2 * 4 * MIB  # two per thread, four MiB of payload each at most
    slack = 32 * MIB  # of the allocator's and the threads' own
    per_change = 4 + 2 + 2 + 2  # position, step, old and new bits
    assert figures["to_disk"] <= in_flight + slack
    assert figures["in_memory"] <= in_flight + slack + 2 * figures["size"]
    assert figures["applied"] <= in_flight + slack + per_change * figures["changed"]
