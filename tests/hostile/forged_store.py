"""Stores as no publisher would write them, with every hash right."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import sparserl
from sparserl import Digest
from sparserl.session.store import records, signing
from sparserl.weights.table import TensorTable
from sparserl.wire.cursor import CHECKSUM_BYTES, Cursor, checksum


def twin(bucket: bytes) -> bytes:
    """Other bytes, as many, with a right checksum, that decode to the same bits: only their hash tells them apart."""
    body = bytearray(bucket[:-CHECKSUM_BYTES])
    cursor = Cursor(memoryview(body)[24:], "a bucket")
    cursor.numbers(2, "entries", 1 << 40)
    at = 24 + cursor.offset  # the size of tiles, which dense entries have not
    if body[at + 2]:  # estimates: the bytes of the first
        at += 4
    body[at] ^= 1
    return bytes(body) + checksum(body)


class Forged:
    """A folder that holds what a publisher would have written, had it wanted to."""

    def __init__(self, root: Path, table: TensorTable, nothing: Digest | None = None) -> None:
        """`nothing` is the digest of weights of zeros."""
        self.root = root
        self.run = records.RunRecord("0" * 16, 1.0, table)
        self.digest, self.nothing = Digest(1, 2), nothing or Digest()
        self._places = 0

    def put(self, name: str, data: bytes) -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)

    def step(self, base: int | None, version: int, buckets: list[bytes], changed: int) -> dict[str, Any]:
        """A step whose buckets are written."""
        self._places += 1
        place = f"{self._places:016x}"
        blobs = [[records.sha256(b), len(b)] for b in buckets]
        for (hash, _), bucket in zip(blobs, buckets, strict=True):
            self.put(f"runs/{self.run.run}/buckets/{place}/{hash}", bucket)
        return self.named(base, version, place, blobs, changed)

    def named(self, base: int | None, version: int, place: str, blobs: list[Any], changed: int = 0) -> dict[str, Any]:
        """A step of which only the manifest is written."""
        ends = {"base": self.nothing.hex if base is None else self.digest.hex, "result": self.digest.hex}
        body = {"format": 1, "run": self.run.run, "place": place, "changed": changed, "buckets": blobs, **ends}
        manifest = records.canonical(body)
        self.put(f"runs/{self.run.run}/manifests/{records.sha256(manifest)}", manifest)
        size = sum(size for _, size in blobs)
        row = {"base": base, "version": version, "bytes": size, "changed": changed, "profiles": ["raw"], "time": 1.0}
        start = None if base is None else self.digest.hex
        return {**row, "base_digest": start, "digest": self.digest.hex, "manifest": records.sha256(manifest)}

    def write(self, steps: list[dict[str, Any]]) -> None:
        """Run, index and head."""
        self.commit(records.canonical({"format": 1, "run": self.run.run, "steps": steps}), steps[-1]["version"])

    def commit(self, index: bytes, version: int, run: bytes | None = None) -> None:
        run = self.run.to_bytes() if run is None else run
        self.put(records.run_path(self.run.run), run)
        self.put(f"runs/{self.run.run}/index/{records.sha256(index)}", index)
        hashes = records.sha256(index), records.sha256(run)
        head = records.HeadRecord(self.run.run, version, self.digest, *hashes, 1.0, 1.0, "0" * 16)
        self.put(records.HEAD, signing.seal(head.body(), None))

    def sync(self, target: Any) -> str:
        with sparserl.Subscriber(f"file://{self.root}", target, name=False, threads=1) as subscriber:
            report = subscriber.sync()
        return f"valid: {report}"
