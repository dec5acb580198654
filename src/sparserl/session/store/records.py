"""What a session writes down: head, run, index and manifests. JSON, canonical, read in bounds.

    head.json                    which run, which version, which index
    runs/RUN/run.json            the tensor table, and the files that travel with the weights
    runs/RUN/index/HASH          every patch and anchor that can be had, with what it costs, and files that changed
    runs/RUN/manifests/HASH      the buckets of one patch or anchor
    runs/RUN/buckets/PLACE/HASH  a bucket, byte for byte as in a patch file
    runs/RUN/files/HASH          config, tokenizer and the like
    runs/RUN/leases/NAME         what a subscriber holds, and can take
    runs/RUN/holdings/HASH       the parts of the weights that a subscriber has, where it does not have all
    pins/NAME                    a version that stays until it is unpinned; see `pins`

Whatever is named HASH is named by the SHA-256 of its bytes: a retry, or another publisher, can never change what a name
means. Head names index and run by hash, the index its manifests, a manifest its buckets: one signature binds them all.
PLACE is drawn anew for every patch that is sent, so that what nothing refers to will never be referred to again: it can
be deleted without asking who might be about to.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ...errors import ChecksumMismatch, InvalidField, SessionError
from ...transport.stores.base import Store
from ...weights.digest import Digest
from ...weights.holdings import MOST_NAMES
from ...weights.table import TensorTable
from ...wire import file_names, limits
from ...wire.file_names import checked_file_name
from ...wire.table import decode_table, decompress_table, encoded_table
from .fields import (
    FORMAT,
    MOST_VERSION,
    Bound,
    Fields,
    canonical,
    checked_seconds,
    counted,
    matched,
    parse,
    read_digest,
    read_list,
    read_profiles,
    require_few,
    sha256,
    written,
)
from .leases import LEASE_NAME

HEAD = "head.json"
MOST_HEAD = MOST_LEASE = 1 << 16  # bytes
MOST_FILE = 1 << 30  # bytes of all files together
MOST_FILES = 1 << 12
MOST_STEPS = 1 << 17
MOST_LAYOUTS = 256  # that the versions of an index have, besides the first
MOST_CHANGED_FILES = 1 << 16  # that an index names for all its versions together
MOST_NOTE = 200  # characters
_MOST_FOLDERS = 32  # one in the other, that a file lies in
_RUN = re.compile(r"[0-9a-f]{16}")
_HASH = re.compile(r"[0-9a-f]{64}")
_HOLDING = re.compile(r"[0-9a-f]{16}")
_OBJECT = re.compile(
    rf"runs/{_RUN.pattern}/(run\.json|(index|manifests|files|holdings|buckets/{_RUN.pattern})/{_HASH.pattern}|leases/{LEASE_NAME.pattern})"
)


RUN = Bound(limits.TABLE_BYTES * 4 // 3 + MOST_FILES * 6200 + 4096, 1 << 21, 1 << 20)
INDEX = Bound(MOST_STEPS * 512, MOST_STEPS * 18 + MOST_CHANGED_FILES * 6, MOST_STEPS * 11 + MOST_CHANGED_FILES * 4)
MANIFEST = Bound(limits.BUCKETS * 120, limits.BUCKETS * 4 + 128, 16)
HOLDING = Bound(1 << 22, 1 << 20, 16)


@dataclass(frozen=True)
class HeadRecord:
    """The newest committed version. `nonce` is drawn anew for every write, so that a writer knows its own."""

    run: str
    version: int
    digest: Digest
    index: str  # hash
    run_hash: str
    created: float  # when the run began
    time: float
    nonce: str

    def body(self) -> bytes:
        record = vars(self) | {"digest": self.digest.hex, "format": FORMAT}
        return canonical(record)

    @classmethod
    def parse(cls, data: bytes) -> HeadRecord:
        fields = Fields(parse(data, HEAD), HEAD)
        head = cls(
            fields.text("run", _RUN),
            fields.count("version"),
            fields.take("digest", read_digest),
            fields.text("index", _HASH),
            fields.text("run_hash", _HASH),
            fields.take("created", checked_seconds),
            fields.take("time", checked_seconds),
            fields.text("nonce", _RUN),
        )
        fields.finish()
        return head


class Blob(NamedTuple):
    """An object by its hash, and its size."""

    hash: str
    size: int


@dataclass(frozen=True)
class RunRecord:
    """What all versions of a run have in common."""

    run: str
    created: float
    table: TensorTable  # of the first version
    files: dict[str, Blob] = field(default_factory=dict)
    later_table: TensorTable | None = None  # of the version that this is about; not part of the record

    @property
    def layout(self) -> TensorTable:
        """The tensor table of the version that this is about."""
        return self.later_table or self.table

    def to_bytes(self) -> bytes:
        record = {
            "run": self.run,
            "created": self.created,
            **_table_record(self.table),
            "files": {name: list(blob) for name, blob in self.files.items()},
        }
        return written(record, f"run {self.run}", RUN)

    @classmethod
    def parse(cls, data: bytes, label: str) -> RunRecord:
        fields = Fields(parse(data, label, RUN), label)
        run = fields.text("run", _RUN)
        created = fields.take("created", checked_seconds)
        table = _read_table(fields)
        files = fields.take("files", _files)
        fields.finish()
        require_files({name: blob.size for name, blob in files.items()}, label)
        return cls(run, created, table, files)


def _table_record(table: TensorTable) -> dict[str, Any]:
    encoded = encoded_table(table)
    return {"table": base64.b64encode(encoded.compressed).decode(), "table_bytes": len(encoded.raw)}


def _read_table(fields: Fields) -> TensorTable:
    size = fields.count("table_bytes", limits.TABLE_BYTES)
    coded = fields.take("table", lambda v: base64.b64decode(v, validate=True))
    return decode_table(decompress_table(coded, size))


def layout_to_bytes(table: TensorTable) -> bytes:
    """The tensor table of later versions, as an object of its own."""
    return written(_table_record(table), "a layout", RUN)


def parse_layout(data: bytes, label: str) -> TensorTable:
    """The tensor table that `layout_to_bytes` wrote."""
    fields = Fields(parse(data, label, RUN), label)
    table = _read_table(fields)
    fields.finish()
    return table


def _files(value: Any) -> dict[str, Blob]:
    return {_checked(name): read_blob(blob, MOST_FILE) for name, blob in value.items()}


def require_files(sizes: Mapping[str, int], label: str) -> None:
    """Refuse files that are too many or too large, or of which one would lie inside another."""
    file_names.require_files(sizes, label, MOST_FILES, MOST_FILE)


def read_note(value: Any) -> str:
    """A few words in one line."""
    if not isinstance(value, str) or not 0 < len(value) <= MOST_NOTE or not value.isprintable():
        raise ValueError(value)
    return value


def read_holding_names(value: Any) -> tuple[str, ...]:
    """The names of holdings, of which there are not very many."""
    names = read_list(lambda name: matched(_HOLDING, name))(value)
    if len(names) > MOST_NAMES:
        raise ValueError(value)
    return names


def read_blob(value: Any, most: int) -> Blob:
    """An object by its hash, and its size."""
    hash, size = value
    return Blob(matched(_HASH, hash), counted(size, most))


@dataclass(frozen=True)
class RouteStep:
    """A way to a version: a patch from another one, or an anchor (`base` is None), which starts from nothing."""

    base: int | None
    version: int
    base_digest: Digest | None
    digest: Digest
    bytes: int
    changed: int
    profiles: tuple[str, ...]
    manifest: str  # hash
    time: float
    step: int | None = None  # of the training, as the publisher has named it
    note: str | None = None  # of the publisher, for people
    holdings: tuple[str, ...] = ()  # names of those that can take it, though some profile takes old bits

    @property
    def name(self) -> str:
        return f"anchor {self.version}" if self.base is None else f"patch {self.base} → {self.version}"

    def record(self) -> dict[str, Any]:
        out = vars(self) | {"digest": self.digest.hex, "profiles": list(self.profiles)}
        for name in ("step", "note"):
            if out[name] is None:
                del out[name]
        if not self.holdings:
            del out["holdings"]
        return out | {"base_digest": None if self.base_digest is None else self.base_digest.hex}

    @classmethod
    def read(cls, record: Any) -> RouteStep:
        fields = Fields(dict(record), "index: a step")
        step = cls(
            fields.take("base", lambda v: None if v is None else counted(v, MOST_VERSION)),
            fields.count("version"),
            fields.take("base_digest", lambda v: None if v is None else read_digest(v)),
            fields.take("digest", read_digest),
            fields.count("bytes"),
            fields.count("changed"),
            fields.take("profiles", read_profiles),
            fields.text("manifest", _HASH),
            fields.take("time", checked_seconds),
            fields.optional("step", lambda v: counted(v, MOST_VERSION), None),
            fields.optional("note", read_note, None),
            fields.optional("holdings", read_holding_names, ()),
        )
        fields.finish()
        if (step.base is None) != (step.base_digest is None) or (step.base is not None and step.base == step.version):
            raise InvalidField(f"index: a step from {step.base} to {step.version} makes no sense")
        return step


class StoredFile(NamedTuple):
    """A file, and the name of the object that it is."""

    blob: Blob
    name: str


class PlacedFile(NamedTuple):
    """A file that was sent after the first version. Its place is drawn anew, as that of a patch is."""

    hash: str
    size: int
    place: str

    @property
    def blob(self) -> Blob:
        return Blob(self.hash, self.size)

    def name(self, run: str) -> str:
        """The name of the object."""
        return path(run, "buckets", f"{self.place}/{self.hash}")

    @classmethod
    def read(cls, value: Any) -> PlacedFile | None:
        if value is None:
            return None
        hash, size, place = value
        return cls(*read_blob((hash, size), MOST_FILE), matched(_RUN, place))


class FileChanges(NamedTuple):
    """The files that a version has changed: new ones, or None for those that it has removed."""

    version: int
    files: dict[str, PlacedFile | None]

    def record(self) -> dict[str, Any]:
        files = {name: None if file is None else list(file) for name, file in self.files.items()}
        return {"version": self.version, "files": files}

    @classmethod
    def read(cls, record: Any) -> FileChanges:
        fields = Fields(dict(record), "index: files")
        version = fields.count("version")
        files = fields.take("files", lambda v: {_checked(n): PlacedFile.read(f) for n, f in v.items()})
        fields.finish()
        return cls(version, files)


class LayoutChange(NamedTuple):
    """A version from which on the tensors are others, and the object with their table."""

    version: int
    table: PlacedFile

    def record(self) -> dict[str, Any]:
        return {"version": self.version, "table": list(self.table)}

    @classmethod
    def read(cls, record: Any) -> LayoutChange:
        fields = Fields(dict(record), "index: a layout")
        version = fields.count("version")
        table = fields.take("table", PlacedFile.read)
        fields.finish()
        if table is None:
            raise InvalidField("index: a layout has no table")
        return cls(version, table)


@dataclass(frozen=True)
class Index:
    """All steps that can be had in a run, as of a version, and where the files or tensors of its versions change."""

    run: str
    steps: tuple[RouteStep, ...]
    files: tuple[FileChanges, ...] = ()
    layouts: tuple[LayoutChange, ...] = ()

    def layout_of(self, version: int) -> LayoutChange | None:
        """The layout of a version; None for that which the run began with."""
        return next((layout for layout in reversed(self.layouts) if layout.version <= version), None)

    def files_of(self, version: int, run: RunRecord) -> dict[str, StoredFile]:
        """The files of a version: those that the run began with, and what has changed up to it."""
        files = {name: StoredFile(blob, path(run.run, "files", blob.hash)) for name, blob in run.files.items()}
        for changes in self.files:
            for name, file in changes.files.items() if changes.version <= version else ():
                if file is None:
                    files.pop(name, None)
                else:
                    files[name] = StoredFile(file.blob, file.name(run.run))
        return files

    def has_other_files(self, first: int, second: int, run: RunRecord) -> bool:
        """Whether the files of two versions differ."""
        if not self.files:
            return False
        files, others = (self.files_of(version, run) for version in (first, second))
        return {name: file.blob for name, file in files.items()} != {name: file.blob for name, file in others.items()}

    def to_bytes(self) -> bytes:
        label = f"the index of run {self.run}"
        require_few(len(self.steps), MOST_STEPS, "steps", label)
        self._require_changes(label)
        record: dict[str, Any] = {"run": self.run, "steps": [step.record() for step in self.steps]}
        if self.files:
            record["files"] = [changes.record() for changes in self.files]
        if self.layouts:
            record["layouts"] = [layout.record() for layout in self.layouts]
        return written(record, label, INDEX)

    def _require_changes(self, label: str) -> None:
        """Files and tensors change at versions that rise, and no patch leads to other tensors."""
        require_few(sum(len(changes.files) for changes in self.files), MOST_CHANGED_FILES, "changed files", label)
        if any(a.version >= b.version for a, b in zip(self.files, self.files[1:], strict=False)):
            raise InvalidField(f"{label}: the versions at which files changed do not rise")
        require_few(len(self.layouts), MOST_LAYOUTS, "layouts", label)
        if any(a.version >= b.version for a, b in zip(self.layouts, self.layouts[1:], strict=False)):
            raise InvalidField(f"{label}: the versions at which tensors changed do not rise")
        for step in self.steps if self.layouts else ():
            if step.base is not None and self.layout_of(step.base) != self.layout_of(step.version):
                raise InvalidField(f"{label}: {step.name} leads to other tensors")

    @classmethod
    def parse(cls, data: bytes, label: str) -> Index:
        fields = Fields(parse(data, label, INDEX), label)
        index = cls(
            fields.text("run", _RUN),
            fields.take("steps", read_list(RouteStep.read)),
            fields.optional("files", read_list(FileChanges.read), ()),
            fields.optional("layouts", read_list(LayoutChange.read), ()),
        )
        fields.finish()
        index._require_changes(label)
        require_few(len(index.steps), MOST_STEPS, "steps", label)
        digests = {step.version: step.digest for step in index.steps}
        for step in index.steps:
            ends = [(step.version, step.digest)] + ([] if step.base is None else [(step.base, step.base_digest)])
            if any(digests.get(version, digest) != digest for version, digest in ends):
                raise InvalidField(f"{label}: {step.name} and others do not agree on what a version is")
        return index


@dataclass(frozen=True)
class StoreSnapshot:
    """What a store has at a time: the head and its tag, and what the head leads to."""

    head: HeadRecord
    tag: str
    run: RunRecord
    index: Index


def file_name(name: str) -> str:
    """A name under which a file can travel: a path below the checkpoint, and nowhere else."""
    try:
        return _checked(name)
    except (ValueError, TypeError) as error:
        where = f"below a checkpoint, in at most {_MOST_FOLDERS} folders"
        raise InvalidField(f"{name!r} is not the name of a file {where}") from error


def _checked(name: Any) -> str:
    if checked_file_name(name).count("/") > _MOST_FOLDERS:
        raise ValueError(name)
    return str(name)


def read_run_id(fields: Fields, name: str) -> str:
    """A field with the id of a run, or of a place."""
    return fields.text(name, _RUN)


def run_id(run: str) -> str:
    """The id of a run, checked."""
    try:
        return matched(_RUN, run)
    except ValueError as error:
        raise SessionError(f"run is {run!r}; the id of a run has 16 hexadecimal digits") from error


def path(run: str, kind: str, name: str) -> str:
    """Where something of a run lies: kind is `index`, `manifests`, `buckets`, `files`, `leases` or `holdings`."""
    return f"runs/{run}/{kind}/{name}"


def is_own(name: str) -> bool:
    """Whether something below `runs/` has a name that sessions give."""
    return _OBJECT.fullmatch(name) is not None


def run_path(run: str) -> str:
    return f"runs/{run}/run.json"


_MOST = {  # bytes of an object, by its kind
    "index": INDEX.size,
    "manifests": MANIFEST.size,
    "files": MOST_FILE,
    "holdings": HOLDING.size,
}


def get_named(store: Store, run: str, kind: str, hash: str, most: int | None = None) -> bytes:
    """An object that is named by its hash, once it is known to be the one."""
    name = path(run, kind, hash)
    data = store.get(name, _MOST[kind] if most is None else most).data
    require_hash(data, hash, name)
    return data


def require_hash(data: bytes | memoryview, hash: str, name: str) -> None:
    if sha256(data) != hash:
        raise ChecksumMismatch(f"{name}: the bytes are not those that its name promises")
