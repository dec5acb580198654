"""The manifest of a patch or an anchor: its buckets, and for which receivers each of them is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ...errors import InvalidField
from ...weights.digest import Digest
from ...weights.holdings import MOST_NAMES, number_of
from ...wire import limits
from .fields import Fields, counted, parse, read_digest, read_list, require_few, written
from .records import MANIFEST, Blob, path, read_blob, read_holding_names, read_run_id


@dataclass(frozen=True)
class Manifest:
    """The buckets of one step, in order, and the place where they lie.

    Attributes:
        holdings: The names of the holdings that the patch was cut along.
        touched: For each bucket, which of these it changes something in: a bit for each.
    """

    run: str
    place: str
    base: Digest
    result: Digest
    changed: int
    buckets: tuple[Blob, ...]
    holdings: tuple[str, ...] = ()
    touched: tuple[int, ...] = ()

    def to_bytes(self) -> bytes:
        record: dict[str, Any] = {
            "run": self.run,
            "place": self.place,
            "base": self.base.hex,
            "result": self.result.hex,
            "changed": self.changed,
            "buckets": [list(b) for b in self.buckets],
        }
        if self.holdings:
            record |= {"holdings": list(self.holdings), "touched": list(self.touched)}
        label = f"the manifest of a patch in run {self.run}"
        self._require_sound(label)
        return written(record, label, MANIFEST)

    @classmethod
    def parse(cls, data: bytes, label: str) -> Manifest:
        fields = Fields(parse(data, label, MANIFEST), label)
        manifest = cls(
            read_run_id(fields, "run"),
            read_run_id(fields, "place"),
            fields.take("base", read_digest),
            fields.take("result", read_digest),
            fields.count("changed"),
            fields.take("buckets", read_list(lambda v: read_blob(v, limits.BUCKET_BYTES))),
            fields.optional("holdings", read_holding_names, ()),
            fields.optional("touched", read_list(lambda v: counted(v, (1 << MOST_NAMES) - 1)), ()),
        )
        fields.finish()
        manifest._require_sound(label)
        return manifest

    @property
    def size(self) -> int:
        """Bytes of all buckets."""
        return sum(blob.size for blob in self.buckets)

    def for_holding(self, name: str | None) -> tuple[Blob, ...]:
        """The buckets that a receiver with this holding needs: all of them where it has no holding, or an unknown one.

        That none is missing shows when the digests of the parts of all receivers of an engine are added up.
        """
        number = number_of(name, self.holdings)
        if number is None:
            return self.buckets
        bit = 1 << number
        return tuple(blob for blob, touched in zip(self.buckets, self.touched, strict=True) if touched & bit)

    def _require_sound(self, label: str) -> None:
        """Refuse a bucket that is named twice, whose entries would overlap themselves, and marks of other buckets."""
        require_few(len(self.buckets), limits.BUCKETS, "buckets", label)
        if len({blob.hash for blob in self.buckets}) != len(self.buckets):
            raise InvalidField(f"{label}: a bucket stands in it twice")
        if len(self.touched) != (len(self.buckets) if self.holdings else 0):
            raise InvalidField(f"{label}: {len(self.touched)} marks of {len(self.buckets)} buckets")

    def bucket(self, blob: Blob) -> str:
        """The name of a bucket."""
        return path(self.run, "buckets", f"{self.place}/{blob.hash}")
