"""Pins: versions that retention and the collection of garbage keep until they are unpinned.

    pins/NAME    a version, and the head by which it can be read: sealed, as it was when the version was pinned

A pin needs no other object to be found, so that it outlives its run. What it keeps are the steps from an anchor to its
version in the index that its head names, the tensor table, and the files of the version.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from ...errors import FormatError, InvalidField, NotFound, SessionError, UnsupportedFormat
from ...transport.stores.base import Store
from ...weights.digest import Digest
from ..logs import log
from . import routes, signing
from .fields import Bound, Fields, checked_seconds, parse, read_digest, written
from .records import MOST_HEAD, HeadRecord, Index, RouteStep, get_named, path, read_note
from .signing import PublicKeys

_PREFIX = "pins/"
_PIN = Bound(4 * MOST_HEAD, MOST_HEAD, MOST_HEAD)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


@dataclass(frozen=True)
class Pin:
    """A version that stays in the store until it is unpinned.

    Attributes:
        name: By which it can be unpinned.
        run: The run of the version, which may have been followed by another run.
        version: The version.
        digest: The digest of its weights.
        time: When it was pinned, in seconds since 1970.
        note: A few words about it; None for none.
        sealed_head: The head that leads to the version, with its signature.
    """

    name: str
    run: str
    version: int
    digest: Digest
    time: float
    note: str | None
    sealed_head: bytes = field(repr=False)

    def to_bytes(self) -> bytes:
        """The record in the store."""
        record = {
            "name": self.name,
            "version": self.version,
            "digest": self.digest.hex,
            "time": self.time,
            "head": self.sealed_head.decode(),
        }
        if self.note is not None:
            record["note"] = self.note
        return written(record, f"pin {self.name}", _PIN)

    @classmethod
    def parse(cls, data: bytes, label: str) -> Pin:
        """The pin of a record."""
        fields = Fields(parse(data, label, _PIN), label)
        name = fields.text("name", _NAME)
        version = fields.count("version")
        digest = fields.take("digest", read_digest)
        time = fields.take("time", checked_seconds)
        sealed = fields.take("head", lambda text: text.encode("ascii"))
        note = fields.optional("note", read_note, None)
        fields.finish()
        head = HeadRecord.parse(signing.unseal(sealed, None, label))
        if head.version < version:
            raise InvalidField(f"{label}: version {version} is newer than its head")
        return cls(name, head.run, version, digest, time, note, sealed)

    def is_at(self, run: str, version: int) -> bool:
        """Whether it is a pin of this version."""
        return (self.run, self.version) == (run, version)

    def head(self, trusted_keys: PublicKeys | None = None) -> HeadRecord:
        """The head that leads to the version; where keys are trusted, one of them must have signed it."""
        return HeadRecord.parse(signing.unseal(self.sealed_head, trusted_keys, f"the head of pin {self.name}"))


def checked_pin_name(name: str) -> str:
    """A name that a pin can have.

    Raises:
        SessionError: It cannot be used.
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise SessionError(f"{name!r} cannot be the name of a pin: letters, digits, '.', '_' and '-' can, up to 100")
    return name


def pin_path(name: str) -> str:
    """Where a pin lies."""
    return _PREFIX + checked_pin_name(name)


def require_pinnable(store: Store) -> None:
    """Refuse a store that pins cannot be written to."""
    if not store.writable:
        raise SessionError(f"{store.url} can only be read; pins are in the folder or object store that it serves")


def read_pin(store: Store, name: str) -> tuple[Pin, str]:
    """A pin, and its tag in the store.

    Raises:
        NotFound: There is no such pin.
        FormatError: It is damaged.
    """
    place = pin_path(name)
    try:
        data, tag = store.get(place, _PIN.size)
        pin = Pin.parse(data, place)
        if pin.name != name:
            raise InvalidField(f"{place} is the pin {pin.name}")
    except NotFound as error:
        raise NotFound(f"{store.url}: there is no pin {name}") from error
    except UnsupportedFormat:
        raise
    except FormatError as error:
        raise type(error)(f"pin {name} is damaged, remove it with `sparserl unpin`: {error}") from error
    return pin, tag


def pin_names(store: Store) -> list[str]:
    """The names of all pins of a store."""
    names = (item.name.removeprefix(_PREFIX) for item in store.list(_PREFIX))
    return sorted(name for name in names if _NAME.fullmatch(name))


def stored_pins(store: Store) -> Iterator[Pin | FormatError]:
    """All pins of a store, or what is wrong with them, by name."""
    for name in pin_names(store):
        try:
            yield read_pin(store, name)[0]
        except FormatError as error:
            yield error
        except NotFound:
            continue  # it was unpinned meanwhile


def intact_pins(store: Store) -> Iterator[Pin]:
    """All pins of a store but those that are damaged: they keep nothing, and are warned of.

    Raises:
        UnsupportedFormat: A newer release may have written one of them.
    """
    for pin in stored_pins(store):
        if isinstance(pin, UnsupportedFormat):
            raise pin
        if isinstance(pin, FormatError):
            log.warning("%s: %s", store.url, pin)
        else:
            yield pin


@dataclass(frozen=True)
class PinnedSteps:
    """What pins keep that were made under the same index.

    Attributes:
        pins: The pins whose versions the index leads to.
        head: The head of one of them.
        index: The index.
        steps: The steps from anchors to their versions.
    """

    pins: tuple[Pin, ...]
    head: HeadRecord
    index: Index
    steps: tuple[RouteStep, ...]

    @property
    def newest(self) -> int:
        """The newest of the pinned versions."""
        return max(pin.version for pin in self.pins)

    @property
    def label(self) -> str:
        """The pins, in words."""
        return f"pin {', '.join(pin.name for pin in self.pins)}"


def steps_of_pins(store: Store, pins: Iterable[Pin], tell: Callable[[str], None]) -> Iterator[PinnedSteps]:
    """What pins keep, index by index: each is read once, whatever the number of pins.

    tell: told of the pins that keep nothing: their index is damaged or gone, or does not lead to their versions.
    """
    for group in _by_index(pins):
        head = group[0].head()
        kept: list[Pin] = []
        try:
            index = read_index_of(store, head)
            reached = routes.reached(index.steps)
            kept = [pin for pin in group if (pin.version, pin.digest) in reached]
        except NotFound:
            pass
        except FormatError as error:
            names = ", ".join(pin.name for pin in group)
            tell(f"the index of pin {names} is damaged, remove it with `sparserl unpin`: {error}")
            continue
        for pin in group:
            if pin not in kept:
                gone = f"version {pin.version} of run {pin.run} is gone"
                tell(f"pin {pin.name}: {gone}; remove the pin with `sparserl unpin`")
        if kept:
            steps = routes.from_anchors(index.steps, {pin.version for pin in kept})
            yield PinnedSteps(tuple(kept), head, index, steps)


def _by_index(pins: Iterable[Pin]) -> Iterable[list[Pin]]:
    """Pins that were made under the same index, together."""
    groups: dict[tuple[str, str], list[Pin]] = {}
    for pin in pins:
        head = pin.head()
        groups.setdefault((head.run, head.index), []).append(pin)
    return groups.values()


def read_index_of(store: Store, head: HeadRecord) -> Index:
    """The index that a head names.

    Raises:
        NotFound: It is gone.
        FormatError: It is damaged, or of another run.
    """
    index = Index.parse(get_named(store, head.run, "index", head.index), path(head.run, "index", head.index))
    if index.run != head.run:
        raise InvalidField(f"the index of run {head.run} is that of run {index.run}")
    return index
