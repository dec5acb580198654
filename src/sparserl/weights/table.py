"""The tensor table: names, dtypes and shapes of a set of weights, in one canonical order."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable
from functools import cached_property
from operator import itemgetter
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from ..errors import TensorMismatch, UnsupportedTensor
from .dtypes import DType
from .region import Region, Shape


class TensorSpec(NamedTuple):
    """The name, dtype and shape of a tensor: one row of the table.

    Example:
        >>> from sparserl.weights.dtypes import BY_NAME
        >>> str(TensorSpec("w", BY_NAME["float32"], (4, 4)))
        'w float32[4, 4]'
    """

    name: str
    dtype: DType
    shape: Shape

    @property
    def numel(self) -> int:
        """How many elements it has."""
        return math.prod(self.shape)

    def identity(self) -> bytes:
        """The bytes that identify this tensor in the digest: a change of name, dtype or shape changes them."""
        return f"{self.dtype.name}{list(self.shape)}{self.name}".encode()

    def __str__(self) -> str:
        return f"{self.name} {self.dtype.name}{list(self.shape)}"


class Dimensions(NamedTuple):
    """Dimensions of all tensors: how many each has, where they begin in `sizes`, and all sizes."""

    rank: npt.NDArray[np.int64]
    offset: npt.NDArray[np.int64]
    sizes: npt.NDArray[np.int64]


class TensorTable:
    """Names, dtypes and shapes of weights, sorted by name. A tensor is identified by its index in the table.

    Args:
        specs: The tensors, in any order.

    Raises:
        UnsupportedTensor: A name is not text, or not valid Unicode.
        TensorMismatch: A name occurs twice.

    Example:
        >>> from sparserl.weights.dtypes import BY_NAME
        >>> table = TensorTable([TensorSpec("b", BY_NAME["int8"], (2,)), TensorSpec("a", BY_NAME["int8"], ())])
        >>> [spec.name for spec in table.specs], table.index["b"], table.elements
        (['a', 'b'], 1, 3)
    """

    def __init__(self, specs: Iterable[TensorSpec]) -> None:
        try:
            self.specs: tuple[TensorSpec, ...] = tuple(sorted(specs, key=itemgetter(0)))  # their names
            "".join([s.name for s in self.specs]).encode()
        except (TypeError, UnicodeEncodeError) as error:
            raise UnsupportedTensor(f"a tensor name must be text that can be encoded as UTF-8: {error}") from error
        self._equal: weakref.ref[TensorTable] | None = None
        self.index: dict[str, int] = {s.name: i for i, s in enumerate(self.specs)}
        if len(self.index) != len(self.specs):
            raise TensorMismatch("a tensor name occurs twice in the table")

    def __len__(self) -> int:
        return len(self.specs)

    def __getitem__(self, index: int) -> TensorSpec:
        return self.specs[index]

    def __eq__(self, other: object) -> bool:
        if self is other or (self._equal is not None and self._equal() is other):
            return True
        if not isinstance(other, TensorTable) or self.specs != other.specs:
            return False
        self._equal = weakref.ref(other)  # very many specs are compared once
        return True

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_equal": None}

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash(self.specs)

    def __repr__(self) -> str:
        return f"<TensorTable of {len(self)} tensors, {self.elements} elements>"

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The name of each tensor."""
        return tuple(self.index)

    @cached_property
    def numel(self) -> npt.NDArray[np.int64]:
        """The number of elements of each tensor."""
        return np.array([s.numel for s in self.specs], np.int64)

    @cached_property
    def places(self) -> list[tuple[int, Region | None]]:
        """The place of every tensor as a whole."""
        return [(tensor, None) for tensor in range(len(self))]

    @cached_property
    def widths(self) -> npt.NDArray[np.int64]:
        """The bytes of an element of each tensor."""
        return np.array([s.dtype.width for s in self.specs], np.int64)

    @cached_property
    def elements(self) -> int:
        """The number of elements of all tensors."""
        return int(self.numel.sum()) if self.specs else 0

    @cached_property
    def dense_bytes(self) -> int:
        """The bytes of all tensors."""
        return sum(s.numel * s.dtype.width for s in self.specs)

    @cached_property
    def keys(self) -> npt.NDArray[np.uint64]:
        """Two 64-bit keys per tensor, under which the digest mixes its elements."""
        raw = b"".join([xxhash.xxh3_128_digest(s.identity()) for s in self.specs])
        return np.frombuffer(raw, ">u8").astype(np.uint64).reshape(-1, 2)

    @cached_property
    def codes(self) -> npt.NDArray[np.uint8]:
        """The dtype of each tensor, by its code."""
        return np.array([s.dtype.code for s in self.specs], np.uint8)

    @cached_property
    def dimensions(self) -> Dimensions:
        """All dimensions of all tensors."""
        rank = np.array([len(s.shape) for s in self.specs], np.int64)
        sizes = np.fromiter((n for s in self.specs for n in s.shape), np.int64, int(rank.sum()))
        return Dimensions(rank, np.cumsum(rank) - rank, sizes)

    @cached_property
    def wide(self) -> Dimensions:
        """The dimensions that have more than one index; the others do not tell elements apart."""
        dimensions = self.dimensions
        is_wide = dimensions.sizes != 1
        tensor = np.repeat(np.arange(len(self)), dimensions.rank)
        rank = np.bincount(tensor[is_wide], minlength=len(self)).astype(np.int64)
        return Dimensions(rank, np.cumsum(rank) - rank, dimensions.sizes[is_wide])

    def require(self, other: TensorTable, label: str, other_label: str) -> None:
        """Raise `TensorMismatch` naming every difference, unless the two tables are equal."""
        if self == other:
            return
        notes = []
        for name in sorted(self.index.keys() | other.index.keys()):
            spec = self.get(name)
            other_spec = other.get(name)
            if spec is None:
                notes.append(f"{name!r} is in {other_label} but not in {label}")
            elif other_spec is None:
                notes.append(f"{name!r} is in {label} but not in {other_label}")
            elif spec != other_spec:
                notes.append(f"{name!r} is {_kind(spec)} in {label} but {_kind(other_spec)} in {other_label}")
        raise TensorMismatch(_summary(notes) + self._cast_hint(other))

    def _cast_hint(self, other: TensorTable) -> str:
        """What to do where two tables differ by dtypes alone."""
        pairs = [*zip(self.specs, other.specs, strict=False)]
        if len(self) != len(other) or any((a.name, a.shape) != (b.name, b.shape) for a, b in pairs):
            return ""
        width, other_width = (max(spec.dtype.width for spec in table.specs) for table in (self, other))
        if width == other_width:
            return ""
        narrow = self.specs[0] if width < other_width else other.specs[0]
        return (
            ". Only dtypes differ: a trainer that keeps wider weights than its receivers publishes "
            f"sparserl.sources.module(model, cast=torch.{narrow.dtype.name}), and a receiver has the dtypes of the run"
        )

    def get(self, name: str) -> TensorSpec | None:
        """The tensor of a name; None if the table does not have it."""
        index = self.index.get(name)
        return None if index is None else self.specs[index]


def _kind(spec: TensorSpec) -> str:
    return f"{spec.dtype.name}{list(spec.shape)}"


def _summary(notes: list[str], most: int = 10) -> str:
    more = f"; and {len(notes) - most} more" if len(notes) > most else ""
    return f"{len(notes)} tensor(s) differ: " + "; ".join(notes[:most]) + more
