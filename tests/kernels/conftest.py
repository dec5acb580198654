"""What the tests of several kernels stand on."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest


@pytest.fixture
def last_page() -> Iterator[np.ndarray[Any, Any]]:
    """A page of bytes behind which no memory can be read: one byte too many ends the process."""
    page = mmap.PAGESIZE
    area = mmap.mmap(-1, 2 * page)
    memory = np.frombuffer(area, np.uint8)
    memory[:page] = np.arange(page) % 251
    libc = ctypes.CDLL(None, use_errno=True)
    wall = ctypes.c_void_p(memory.ctypes.data + page)
    assert libc.mprotect(wall, ctypes.c_size_t(page), 0) == 0
    yield memory[:page]
    libc.mprotect(wall, ctypes.c_size_t(page), mmap.PROT_READ | mmap.PROT_WRITE)
