"""Memory beyond the inputs: what diff and apply take at their peak."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import memory_use

pytestmark = pytest.mark.alone

MIB = 1 << 20


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
def test_memory_beyond_the_inputs(capsys):
    """512 MiB of bf16, 0.6% changed: diff takes the buckets in flight, apply what it promises per change."""
    figures = memory_use.measure()
    with capsys.disabled():
        print(f"\nmemory beyond 512 MiB of weights, {figures['changed']} changed: ", end="")
        print(", ".join(f"{k} {figures[k] / MIB:.1f} MiB" for k in ("size", "to_disk", "in_memory", "applied")))
    in_flight = 2 * 2 * 4 * MIB  # two per thread, four MiB of payload each at most
    slack = 32 * MIB  # of the allocator's and the threads' own
    per_change = 4 + 2 + 2 + 2  # position, step, old and new bits
    assert figures["to_disk"] <= in_flight + slack
    assert figures["in_memory"] <= in_flight + slack + 2 * figures["size"]
    assert figures["applied"] <= in_flight + slack + per_change * figures["changed"]
