"""`Patch`: all changes from one version of the weights to another; and patches made of patches."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from ..errors import ChainError
from ..files import replacing
from ..parallel import Progress
from ..weights.digest import Digest
from ..weights.memory import Weights
from ..weights.region import Region, whole
from ..weights.shards import Place, Shards
from ..weights.table import TensorTable
from ..wire import (
    Bytes,
    BytesInMemory,
    BytesOnDisk,
    FileSection,
    PatchReader,
    SourceSlice,
    encode_files,
    section_bytes,
)
from . import compose
from .apply import Applied, apply
from .assemble import PatchPath
from .contents import Contents
from .stats import Stats, stats


@dataclass(frozen=True)
class Entry:
    """The changes of one region, as the entry table has them: nothing is decoded.

    Attributes:
        tensor: The tensor's name.
        region: The box of the tensor that the entry is about.
        elements: How many elements the region has.
        changed: How many of them change.
        dense: Whether all bits of the region are sent, not only those that change.
        profile: How the bucket that it is in is encoded.
        bucket: The number of that bucket.

    Example:
        >>> old = {"w": np.zeros(4, np.float32)}
        >>> patch = sparserl.diff(old, {"w": np.array([0, 0, 1, 0], np.float32)})
        >>> [(entry.tensor, entry.changed) for entry in patch]
        [('w', 1)]
    """

    tensor: str
    region: Region
    elements: int
    changed: int
    dense: bool
    profile: str
    bucket: int


class Patch:
    """All changes from a base to a result, both known by their digests.

    Made by `diff`, `squash`, `merge` and `invert`, read by `open` and `from_bytes`. A patch is immutable; its
    buckets are read one at a time, from memory or from disk. Iterating gives its entries.

    Args:
        contents: The tensor table, ends and buckets of the patch.
        files: The files beside the weights that change with them; None for none. `apply_to_checkpoint` writes them.

    Example:
        >>> old = {"w": np.zeros(4, np.float32)}
        >>> new = {"w": np.array([0, 0, 1, 0], np.float32)}
        >>> patch = sparserl.Patch.from_bytes(sparserl.diff(old, new).to_bytes())
        >>> patch.apply(old).digest == sparserl.digest(new)
        True
    """

    def __init__(self, contents: Contents, files: FileSection | None = None) -> None:
        self.contents = contents
        self.files = files

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Patch:
        """Open a patch file.

        Header and footer are read and checked now, buckets when they are needed.

        Args:
            path: The file. It stays open as long as the patch is in use.

        Raises:
            FormatError: If it is not a patch, is damaged, or was written by a later release.
            OSError: If it cannot be read.
        """
        return cls._read(BytesOnDisk(path))

    @classmethod
    def from_bytes(cls, data: bytes | memoryview) -> Patch:
        """Read a patch from its bytes.

        Args:
            data: The bytes of a patch file, which must not change as long as the patch is in use.

        Raises:
            FormatError: If they are not a patch, are damaged, or were written by a later release.
        """
        return cls._read(BytesInMemory(data))

    @classmethod
    def _read(cls, source: Bytes) -> Patch:
        size = section_bytes(source)
        if not size:
            return cls(Contents.from_image(PatchReader(source)))
        end = source.size - size
        files = FileSection(SourceSlice(source, end, size))
        return cls(Contents.from_image(PatchReader(SourceSlice(source, 0, end))), files)

    def with_files(self, written: Mapping[str, bytes], removed: Sequence[str] = ()) -> Patch:
        """The same patch with files that change beside the weights.

        Args:
            written: The names and contents of files that are new or differ, such as `config.json`.
            removed: The names of files that go.

        Raises:
            FormatError: A name leads out of a checkpoint, or there are too many files or bytes.

        Example:
            >>> weights = {"w": np.zeros(4, np.float32)}
            >>> patch = sparserl.diff(weights, weights).with_files({"config.json": b"{}"})
            >>> sparserl.Patch.from_bytes(patch.to_bytes()).files["config.json"]
            b'{}'
        """
        if not written and not removed:
            return Patch(self.contents)
        return Patch(self.contents, FileSection(BytesInMemory(encode_files(written, removed))))

    def to_bytes(self) -> bytes:
        """The whole patch, as it would be in a file."""
        file = io.BytesIO()
        self._write(file)
        return file.getvalue()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the patch to a file, which takes its name when it is whole.

        Raises:
            OSError: If it cannot be written.
        """
        with replacing(Path(path)) as file:
            self._write(file)

    def _write(self, file: BinaryIO) -> None:
        self.contents.write(file)
        if self.files is not None:
            file.write(self.files.image())

    @property
    def table(self) -> TensorTable:
        """Names, dtypes and shapes of the weights."""
        return self.contents.table

    @property
    def base(self) -> Digest:
        """The digest of the weights this patch applies to."""
        return self.contents.base

    @property
    def result(self) -> Digest:
        """The digest of the weights it turns them into."""
        return self.contents.result

    @property
    def changed(self) -> int:
        """How many elements change."""
        return self.contents.changed

    @property
    def nbytes(self) -> int:
        """Bytes of the patch as a file, tensor table and files included."""
        return self.contents.nbytes + (0 if self.files is None else self.files.nbytes)

    @property
    def table_nbytes(self) -> int:
        """The part of these that is the header with the tensor table, which a run sends once."""
        return self.contents.table_nbytes

    @property
    def complete(self) -> bool:
        """Whether the patch covers the whole tensor table, or only some regions of it."""
        return self.contents.complete

    @property
    def covers(self) -> Sequence[Place]:
        """The regions it covers."""
        return self.contents.covers

    @property
    def buckets(self) -> int:
        """The number of buckets."""
        return len(self.contents)

    def __iter__(self) -> Iterator[Entry]:
        """The entries, bucket by bucket, without decoding their changes."""
        for index, head in enumerate(self.contents.heads):
            entries = head.entries
            for e, tensor in enumerate(entries.tensor.tolist()):
                spec = self.table[tensor]
                yield Entry(
                    spec.name,
                    entries.region[e] or whole(spec.shape),
                    int(entries.numel[e]),
                    int(entries.count[e]),
                    bool(entries.dense[e]),
                    head.profile.name,
                    index,
                )

    def apply(
        self,
        weights: Weights | Shards,
        *,
        digest: Digest | None = None,
        threads: int | None = None,
        progress: Progress | None = None,
    ) -> Applied:
        """Turn the base into the result, in place: all of it, or nothing.

        Weights that are the result already are left alone. Positions and old bits of the changes are held until the
        result is known to be right, up to 256 MiB. Beyond that, and where tensors share memory, nothing is written
        before the result is known: decoded changes are held up to 256 MiB, of the others the buckets' own bytes.

        Args:
            weights: The weights to change. They must be memory that can be written: torch does not say so of tensors
                over a read-only file mapping.
            digest: The digest of the weights, if the caller vouches for it; else they are read once.
            threads: How many threads to use; None for as many as there are cores.
            progress: Called with the number of bytes just read for the digest.

        Returns:
            What was done.

        Raises:
            WrongBase: If the digest of the weights is neither the patch's base nor its result; nothing is touched.
            TensorMismatch: If they have other names, dtypes, shapes or regions.
            TiedConflict: If tensors that share memory would change differently.
            FormatError: If the patch is damaged, or does not lead to its result; the weights are as they were.

        Example:
            >>> weights = {"w": np.zeros(4, np.float32)}
            >>> patch = sparserl.diff(weights, {"w": np.array([0, 0, 1, 0], np.float32)})
            >>> patch.apply(weights).changed
            1
        """
        return apply(self.contents, weights, digest=digest, threads=threads, progress=progress)

    def invert(
        self,
        base: Weights | Shards | None = None,
        *,
        digest: Digest | None = None,
        profile: str = "auto",
        to: PatchPath | None = None,
        threads: int | None = None,
    ) -> Patch:
        """The patch that undoes this one: from its result back to its base.

        A patch of `ulp` entries alone turns round without the base; bits that were overwritten are in the base only.

        Args:
            base: The weights that this patch applies to, where they are needed.
            digest: Their digest, if the caller vouches for it; else they are read once.
            profile: As in `diff`; `ctx` is not used.
            to: Write the patch to this file instead of keeping it in memory.
            threads: How many threads to use; None for as many as there are cores.

        Raises:
            NeedsBase: If the base is needed and was not given.
            WrongBase: If `base` has another digest.
        """
        return Patch(compose.invert(self.contents, base, digest=digest, profile=profile, to=to, threads=threads))

    def stats(self) -> Stats:
        """Sizes and densities, per tensor, per bucket and in total."""
        return stats(self.contents)

    def __repr__(self) -> str:
        return f"<Patch {self.base.hex[:8]}→{self.result.hex[:8]}: {self.changed} changed, {self.nbytes} bytes>"


def squash(
    first: Patch,
    *others: Patch,
    base: Weights | Shards | None = None,
    digest: Digest | None = None,
    profile: str = "auto",
    to: PatchPath | None = None,
    threads: int | None = None,
) -> Patch:
    """Make one patch that does what several do in turn: from the base of the first to the result of the last.

    Without `base` the result keeps the kind of its inputs: `raw` and `gap` patches give bits (`gap`, unless `raw` is
    asked for), `ulp` patches give steps. Where one tensor has both, where a patch has `ctx` buckets, or where another
    profile is asked for, `base` is needed. With `ctx` buckets the touched tensors are copied.

    Args:
        first: The first patch.
        others: The patches that follow it, each from the result of the one before.
        base: The weights that the first patch applies to, where they are needed. With them, elements that end as they
            began are dropped, and any profile may be chosen.
        digest: The digest of `base`, if the caller vouches for it; else it is read once.
        profile: As in `diff`.
        to: Write the patch to this file instead of keeping it in memory.
        threads: How many threads to use; None for as many as there are cores.

    Raises:
        ChainError: If the patches do not follow one another.
        NeedsBase: If the base is needed and was not given.
        WrongBase: If `base` has another digest.

    Example:
        >>> steps = [{"w": np.full(4, value, np.float32)} for value in (0, 1, 2)]
        >>> patches = [sparserl.diff(old, new) for old, new in zip(steps, steps[1:])]
        >>> sparserl.squash(*patches).result == sparserl.digest(steps[2])
        True
    """
    patches = (first, *others)
    contents = _contents_of(patches)
    squashed = Patch(compose.squash(contents, base=base, digest=digest, profile=profile, to=to, threads=threads))
    return _with_files_of(squashed, patches, to)


def merge(first: Patch, *others: Patch, to: PatchPath | None = None) -> Patch:
    """Join the patches of shards: their buckets side by side, nothing recoded.

    Where they cover the whole tensor table, the result is a complete patch, whose digests are those of the whole
    weights.

    Args:
        first: A patch.
        others: Patches of other regions of the same tensor table.
        to: Write the patch to this file instead of keeping it in memory.

    Raises:
        RegionOverlap: If two patches cover the same elements.
        TensorMismatch: If they have different tensor tables.

    Example:
        >>> old = {"a": np.zeros(4, np.float32), "b": np.zeros(4, np.float32)}
        >>> new = {"a": np.ones(4, np.float32), "b": np.ones(4, np.float32)}
        >>> table = sparserl.diff(old, new).table
        >>> def shard(weights, name):
        ...     return sparserl.Shards.of(table, {name: weights[name]})
        >>> patches = [sparserl.diff(shard(old, name), shard(new, name)) for name in "ab"]
        >>> sparserl.merge(*patches).result == sparserl.digest(new)
        True
    """
    patches = (first, *others)
    return _with_files_of(Patch(compose.merge(_contents_of(patches), to=to)), patches, to)


def file_changes(patches: Sequence[Patch]) -> dict[str, bytes | None]:
    """What patches do, one after the other, to the files beside the weights: new contents, or None for those gone."""
    changes: dict[str, bytes | None] = {}
    for patch in patches:
        if patch.files is not None:
            changes.update(dict.fromkeys(patch.files.removed))
            changes.update(patch.files)
    return changes


def _contents_of(patches: Sequence[Patch]) -> list[Contents]:
    for patch in patches:
        if not isinstance(patch, Patch):
            raise ChainError(f"a {type(patch).__name__} is not a patch; write squash(*patches) or merge(*patches)")
    return [patch.contents for patch in patches]


def _with_files_of(patch: Patch, patches: Sequence[Patch], to: PatchPath | None) -> Patch:
    """A patch made of others, with what they do to files."""
    changes = file_changes(patches)
    if not changes:
        return patch
    written = {name: data for name, data in changes.items() if data is not None}
    patch = patch.with_files(written, [name for name, data in changes.items() if data is None])
    if to is not None:
        patch.save(to)
    return patch
