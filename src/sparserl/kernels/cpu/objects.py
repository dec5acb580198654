"""Fields of Python objects, read in one call for very many of them, in Numba."""

from __future__ import annotations

from typing import Any

from .compiling import kernel
from .llvm import load


@kernel
def read_words(address: Any, out: Any) -> None:
    """Write the 64-bit word at each address to `out`, an int64 array."""
    for i in range(address.size):
        out[i] = load(out, address[i])
