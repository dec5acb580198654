"""A source for frameworks that save checkpoints: it publishes the one that was saved last, with its files."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

from ..sources import open_checkpoint
from ..sources.casting import Cast, cast_of
from ..sources.checkpoint_files import travelling_files
from ..weights.dtypes import Bits
from ..weights.memory import Weights
from ..weights.staging import lazy_bits


class LatestCheckpoint:
    """The checkpoint that a trainer saved last: set `path` before each publish.

    >>> source = LatestCheckpoint()                                                                # doctest: +SKIP
    >>> publisher = sparserl.Publisher(url, source)                                                # doctest: +SKIP
    >>> source.path = Path("checkpoints/global_step_10")                                           # doctest: +SKIP
    >>> publisher.publish()                                                                        # doctest: +SKIP

    Args:
        cast: The torch dtype in which wider floating-point tensors are published, buffers too, which files do not tell
            apart; None for the bits on disk.
    """

    path: Path

    def __init__(self, cast: Any = None) -> None:
        self._cast = cast_of(cast)

    def weights(self) -> Weights:
        """All tensors of the checkpoint, which is mapped into memory."""
        checkpoint = open_checkpoint(self.path)
        if self._cast is None:
            return checkpoint
        return {name: _published(name, bits, self._cast) for name, bits in checkpoint.items()}

    def files(self) -> dict[str, bytes]:
        """Its config and tokenizer, which may change from version to version."""
        return {name: file.read_bytes() for name, file in travelling_files(self.path).items()}


def _published(name: str, bits: Bits, cast: Cast) -> Any:
    """A tensor in the dtype that is published: read and cast when it is needed."""
    import torch

    dtype = cast(name, getattr(torch, bits.dtype.name))
    if dtype is None:
        return bits
    with warnings.catch_warnings():  # that the file is mapped read-only, which is what it is for
        warnings.simplefilter("ignore")
        tensor = torch.from_numpy(bits.array)
    return lazy_bits(tensor.view(getattr(torch, bits.dtype.name)), dtype)
