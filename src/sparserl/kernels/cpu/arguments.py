"""What kernels take together, in named tuples. Numba passes the fields to machine code one by one, like arguments."""

from __future__ import annotations

from typing import Any, NamedTuple


class InMemory(NamedTuple):
    """Where regions lie in memory: a row each."""

    first: Any  # address of the first element
    dims: Any
    size: Any  # elements in each dimension
    stride: Any  # in elements


class InTensor(NamedTuple):
    """Where regions lie in their tensors, and the keys of these: a row each."""

    start: Any  # position of the first element
    dims: Any
    size: Any
    stride: Any
    keys: Any


class ChangeAddresses(NamedTuple):
    """Where changes lie in memory: uint32 positions and words, which need not be aligned, and room for the old bits."""

    position: Any
    word: Any
    old: Any


class WordKind(NamedTuple):
    """What words are: new bits, or else steps from the old ones; and whether the dtype has a sign and a magnitude."""

    absolute: Any
    sign_magnitude: Any


class Magnitudes(NamedTuple):
    """How magnitudes are read: an empty array of the integers that bits are read as, and a mask of bits to keep."""

    kind: Any
    keep: Any


class Tiled(NamedTuple):
    """Contiguous regions that are cut into tiles of 2^log elements: a row each."""

    address: Any
    numel: Any
    counts: Any  # changes
    log: Any


class ClassEnds(NamedTuple):
    """Where the changes of each class go: how many a tile has of each, and addresses of the next gaps and words."""

    tiles: Any
    gap: Any
    word: Any


class ClassStreams(NamedTuple):
    """Gaps (and one more behind the last) and words, sorted by class.

    `tiles` has how many of each class every tile has, `begin` where each class begins.
    """

    tiles: Any
    begin: Any
    gaps: Any
    words: Any


class ClassChanges(NamedTuple):
    """Room for positions, with their words and old bits."""

    positions: Any
    words: Any
    old: Any


class Landing(NamedTuple):
    """Whether new bits are written over the old ones, and whether the dtype has a sign and a magnitude."""

    write: Any
    sign_magnitude: Any
