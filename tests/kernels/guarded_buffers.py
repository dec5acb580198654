"""Random bits at any address, and output buffers that show what a kernel wrote."""

from __future__ import annotations

import numpy as np
import pytest

UINTS = (np.uint8, np.uint16, np.uint32, np.uint64)
SIZES = (*range(301), 511, 512, 513, 1000, 4095, 4096, 4097, 10_007)
POISON = 0xA5
GUARD = 64  # elements behind every output that no kernel may touch

each_width = pytest.mark.parametrize("uint", UINTS, ids=lambda u: f"u{8 * np.dtype(u).itemsize}")


def poisoned(count, dtype):
    """An output buffer full of a pattern, with a guard behind it."""
    out = np.empty(count + GUARD, dtype)
    out.view(np.uint8)[:] = POISON
    return out


def untouched(buffer, used):
    """Whether everything behind the first `used` elements still holds the pattern."""
    return bool((buffer[used:].view(np.uint8) == POISON).all())


def random_bits(rng, size, uint):
    return rng.integers(0, 256, size * np.dtype(uint).itemsize, np.uint8).view(uint)


def unaligned(bits, offset):
    """A copy of the bits `offset` bytes into a buffer: the buffer, and the address of the copy."""
    buffer = np.full(bits.nbytes + offset + 16, POISON, np.uint8)
    buffer[offset : offset + bits.nbytes] = bits.view(np.uint8)
    return buffer, buffer.ctypes.data + offset


def int64(*values):
    return np.array(values, np.int64)
