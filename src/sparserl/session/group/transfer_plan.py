"""What one sync over a process group sends: patches that lead to a version, bucket by bucket, and who sends them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from ...errors import SessionError
from ...weights.digest import Digest
from ..store.fields import sha256

Note = dict[str, Any]


class RankShare(NamedTuple):
    """The buckets of a patch that one rank sends: how many, with how many changes, and the length of the first."""

    rank: int
    buckets: int
    changed: int
    first_bytes: int


_NO_FILES = RankShare(0, 0, 0, 0)


class WriterLeg(NamedTuple):
    """One writer's share of a patch, and what it adds to the digests of the patch's two ends."""

    base: Digest
    result: Digest
    share: RankShare

    def to_row(self) -> list[Any]:
        return [self.base.hex, self.result.hex, list(self.share)]

    @classmethod
    def of_row(cls, row: Sequence[Any]) -> WriterLeg:
        base, result, share = row
        return cls(Digest.from_hex(base), Digest.from_hex(result), RankShare(*share))


@dataclass(frozen=True)
class PatchLeg:
    """One patch of a transfer; an anchor starts from nothing."""

    anchor: bool
    base: Digest
    result: Digest
    shares: tuple[RankShare, ...]

    @classmethod
    def of_writers(cls, anchor: bool, legs: Sequence[WriterLeg], table_terms: Digest) -> PatchLeg:
        """The patch that the shares of all writers are together."""
        base = sum((leg.base for leg in legs), table_terms)
        result = sum((leg.result for leg in legs), table_terms)
        return cls(anchor, base, result, tuple(leg.share for leg in legs))

    @property
    def changed(self) -> int:
        return sum(share.changed for share in self.shares)

    @property
    def buckets(self) -> int:
        return sum(share.buckets for share in self.shares)

    def to_row(self) -> list[Any]:
        return [self.anchor, self.base.hex, self.result.hex, [list(share) for share in self.shares]]

    @classmethod
    def of_row(cls, row: Sequence[Any]) -> PatchLeg:
        anchor, base, result, shares = row
        return cls(anchor, Digest.from_hex(base), Digest.from_hex(result), tuple(RankShare(*share) for share in shares))


@dataclass(frozen=True)
class TransferPlan:
    """Patches that lead to a version, and its files, by name and hash; None if ranks have them already."""

    run: str
    created: float
    version: int
    digest: Digest
    legs: tuple[PatchLeg, ...]
    files: tuple[tuple[str, str], ...] | None = None
    file_share: RankShare = _NO_FILES

    @property
    def kind(self) -> str:
        """As a `SyncReport` says it."""
        if not self.legs:
            return "none"
        return "anchor" if self.legs[0].anchor else "patch"

    def first_leg(self, digest: Digest | None) -> int:
        """The first leg that a rank needs which holds weights of this digest."""
        if digest == self.digest:
            return len(self.legs)
        starts = [number for number, leg in enumerate(self.legs) if leg.base == digest and not leg.anchor]
        if starts:
            return starts[-1]
        if self.legs and self.legs[0].anchor:
            return 0
        raise SessionError(f"what is sent starts neither from {digest} nor from an anchor")

    def with_files(self, files: Mapping[str, bytes], rank: int) -> TransferPlan:
        """The same, and files that a rank sends after the last leg."""
        hashes = tuple((name, sha256(data)) for name, data in files.items())
        first = len(next(iter(files.values()), b""))
        return replace(self, files=hashes, file_share=RankShare(rank, len(files), 0, first))

    def to_note(self) -> Note:
        return {
            "run": self.run,
            "created": self.created,
            "version": self.version,
            "digest": self.digest.hex,
            "legs": [leg.to_row() for leg in self.legs],
            "files": self.files,
            "file_share": list(self.file_share),
        }

    @classmethod
    def of_note(cls, note: Note) -> TransferPlan:
        return cls(
            run=note["run"],
            created=note["created"],
            version=note["version"],
            digest=Digest.from_hex(note["digest"]),
            legs=tuple(PatchLeg.of_row(row) for row in note["legs"]),
            files=None if note["files"] is None else tuple((name, hash) for name, hash in note["files"]),
            file_share=RankShare(*note["file_share"]),
        )
