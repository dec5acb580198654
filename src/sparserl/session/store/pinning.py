"""Pinning versions, unpinning them, and what a publisher keeps in its index for the sake of pins."""

from __future__ import annotations

import contextlib
import time as clocks
from collections.abc import Callable, Iterator
from pathlib import Path

from ...errors import FormatError, NotFound, NotRetained, Refused, SessionError, StoreError, Unavailable, Untrusted
from ...transport.stores.base import Store, exists
from ...transport.stores.opening import store_at
from ..logs import log
from ..options import require_count
from ..receiver import RunVersion
from . import routes
from .label import Label
from .pins import (
    Pin,
    checked_pin_name,
    intact_pins,
    pin_path,
    read_pin,
    require_pinnable,
    steps_of_pins,
    stored_pins,
)
from .records import Index, RouteStep, RunRecord
from .retention import get_head, read_head, read_index
from .signing import PublicKeys


def pin(
    url: str | Path | Store,
    version: int | None = None,
    *,
    name: str | None = None,
    note: str | None = None,
    move: bool = False,
    trusted_keys: PublicKeys | None = None,
) -> Pin:
    """Keep a version of a run in its store until it is unpinned, whatever retention, `gc` and new runs remove.

    >>> import numpy as np, sparserl, tempfile
    >>> url = f"file://{tempfile.mkdtemp()}"
    >>> _ = sparserl.Publisher(url, {"w": np.zeros(5, np.float32)}).publish()
    >>> sparserl.pin(url, 0, name="best", note="reward 0.7").version
    0
    >>> [pin.name for pin in sparserl.pins(url)]
    ['best']
    >>> sparserl.unpin(url, "best")

    Args:
        url: The store of the run: a folder, an `s3://`, `gs://` or `az://` URL, or an open store.
        version: Which version; None for the newest.
        name: The name of the pin; None for `v` and the version, as in `v100`.
        note: A few words about it: up to 200 characters in one line.
        move: Whether a pin of this name may be moved here from another version.
        trusted_keys: The publisher's public key, or several; a head that none of them has signed is refused.

    Returns:
        The pin.

    Raises:
        NotRetained: The store does not have the version, or removed it while it was being pinned.
        SessionError: The store can only be read, or has a pin of this name at another version.
        StoreError: The store cannot be reached, or has no run yet.
    """
    with _writable(url) as store:
        return pin_version(store, version, name=name, note=note, move=move, trusted_keys=trusted_keys)


def unpin(url: str | Path | Store, name: str) -> None:
    """Remove a pin: retention treats its version like any other from the next anchor on. See `pin`.

    Args:
        url: The store of the run, as for `pin`.
        name: The name of the pin.

    Raises:
        NotFound: There is no pin of this name.
        SessionError: The store can only be read.
        StoreError: The store cannot be reached.
    """
    with _writable(url) as store:
        place = pin_path(name)
        if not exists(store, place):
            raise NotFound(f"{store.url}: there is no pin {name}")
        store.delete([place])


def pins(url: str | Path | Store) -> list[Pin]:
    """The pins of a store, by name; those of earlier runs too. Damaged ones are left out, with a warning. See `pin`.

    Args:
        url: The store of the run, as for `pin`.

    Raises:
        SessionError: The store cannot be listed.
        StoreError: The store cannot be reached.
    """
    with _writable(url) as store:
        return list(intact_pins(store))


@contextlib.contextmanager
def _writable(url: str | Path | Store) -> Iterator[Store]:
    """A store that pins can be written to; it is closed at the end if it was opened here."""
    store = store_at(url)
    try:
        require_pinnable(store)
        yield store
    finally:
        if store is not url:
            store.close()


def pin_version(
    store: Store,
    version: int | None = None,
    *,
    name: str | None = None,
    note: str | None = None,
    move: bool = False,
    trusted_keys: PublicKeys | None = None,
    expected: RunVersion | None = None,
    clock: Callable[[], float] = clocks.time,
) -> Pin:
    """`pin` in an open store.

    expected: what the version must be, where its number alone could mean that of another run.
    """
    note = Label.of(None, note).note
    if version is not None:
        require_count("version", version, 0)
    stored_head = get_head(store)
    head, _ = read_head(store, trusted_keys, stored_head)
    number = head.version if version is None else version
    index = read_index(store, head)
    digest = routes.versions(index.steps).get(number)
    if digest is None or (number, digest) not in routes.reached(index.steps):
        raise NotRetained(f"{store.url}: version {number} cannot be pinned; the store has {routes.span(index.steps)}")
    if expected is not None and (head.run, digest) != (expected.run, expected.digest):
        raise NotRetained(f"{store.url}: version {number} of run {expected.run} is not in the store any more")
    own_name = checked_pin_name(f"v{number}" if name is None else name)
    new = Pin(own_name, head.run, number, digest, clock(), note, stored_head.data)
    previous = _write(store, new, move)
    try:
        _require_kept(store, new, trusted_keys)
    except BaseException:
        _take_back(store, new, previous)
        raise
    return new


def _write(store: Store, new: Pin, move: bool) -> Pin | None:
    """Write a pin; returns the one that it has replaced."""
    previous: Pin | None = None
    tag: str | None = None
    if exists(store, pin_path(new.name)):
        previous, tag = read_pin(store, new.name)
        if not move and not previous.is_at(new.run, new.version):
            raise SessionError(
                f"{store.url}: pin {new.name} is at version {previous.version} of run {previous.run}; choose another "
                "name, or move it with move=True (on the command line, --move)"
            )
    data = new.to_bytes()
    try:
        store.swap(pin_path(new.name), data, tag)
    except (Refused, Unavailable) as error:
        if _stored(store, new.name) != data:  # else the reply was lost, and the pin was written
            raise StoreError(f"{store.url}: pin {new.name} could not be written: {error}") from error
    return previous


def _stored(store: Store, name: str) -> bytes | None:
    try:
        return read_pin(store, name)[0].to_bytes()
    except (NotFound, FormatError):
        return None


def _require_kept(store: Store, new: Pin, trusted_keys: PublicKeys | None) -> None:
    """After the pin was written: the version must still be there, so that retention keeps it from now on.

    Whatever retention has read before the pin was there, it writes its head afterwards, and looks at pins again then.
    Either this look sees its head, or that one sees this pin.
    """
    head, _ = read_head(store, trusted_keys)
    if head.run != new.run:
        raise NotRetained(f"{store.url}: run {new.run} has just been replaced by run {head.run}; nothing was pinned")
    if (new.version, new.digest) not in routes.reached(read_index(store, head).steps):
        raise NotRetained(f"{store.url}: version {new.version} has just been removed by retention; nothing was pinned")


def _take_back(store: Store, new: Pin, previous: Pin | None) -> None:
    """Remove a pin of a version that is gone, or move it back to where it was."""
    try:
        current, tag = read_pin(store, new.name)
        if current != new:
            return  # somebody else has moved it
        if previous is None:
            store.delete([pin_path(new.name)])
        else:
            store.swap(pin_path(new.name), previous.to_bytes(), tag)
    except (StoreError, FormatError) as error:
        log.warning("%s: pin %s of a version that is gone could not be removed: %s", store.url, new.name, error)


class OwnPin:
    """The pin of a subscriber: at the version that it holds, and moved with it.

    Args:
        store: Where the pin is written.
        name: Its name, which no other pin may have; None for no pin.
        trusted_keys: As those of the subscriber.

    Raises:
        SessionError: The name cannot be used, or the store can only be read.
    """

    def __init__(self, store: Store, name: str | None, trusted_keys: PublicKeys | None) -> None:
        self._store = store
        self._name = None if name is None else checked_pin_name(name)
        self._trusted_keys = trusted_keys
        self._last: RunVersion | None = None  # that was pinned, or cannot be
        self._last_trouble = ""
        if name is not None:
            require_pinnable(store)

    def move(self, held: RunVersion | None) -> None:
        """Pin a version, and with that unpin the last one; what cannot be pinned is logged."""
        if self._name is None or held is None or held == self._last:
            return
        try:
            self._pin(self._name, held)
        except (FormatError, SessionError) as error:
            self._last = held
            self._log(held, error)
        except StoreError as error:  # it is tried again
            self._log(held, error)
        else:
            self._last = held
            self._last_trouble = ""

    def _pin(self, name: str, held: RunVersion) -> None:
        with contextlib.suppress(NotFound, FormatError):
            if read_pin(self._store, name)[0].is_at(held.run, held.version):
                return  # since before a restart
        keys = self._trusted_keys
        pin_version(self._store, held.version, name=name, move=True, trusted_keys=keys, expected=held)

    def _log(self, held: RunVersion, error: Exception) -> None:
        trouble = f"version {held.version} is not pinned as {self._name}: {error}"
        if trouble != self._last_trouble:
            log.warning("%s: %s", self._store.url, trouble)
        self._last_trouble = trouble


class PublishedPins:
    """The pins of a run, for its publisher: which steps its index must have because of them.

    Args:
        store: The store.
        trusted_keys: Keys of which one must have signed the head of a pin; None where heads are not signed.
        grace: How many seconds objects stay in the store after nothing refers to them.
    """

    def __init__(self, store: Store, trusted_keys: PublicKeys | None, grace: float) -> None:
        self._store = store
        self._trusted_keys = trusted_keys
        self._grace = grace
        self._ignored: set[str] = set()  # what was logged

    def steps(self, run: RunRecord, index: Index, now: float) -> tuple[RouteStep, ...]:
        """The steps that lead to pinned versions of a run, of which this is the index at a time.

        They may be missing there, if a version was pinned while retention removed it. Then they can be put back within
        the grace, in which nobody deletes what the head led to; later, or where retention forgot the files or the
        tensor table of the version, only the pin leads to it. Where the index of a pin is damaged, it is the other way.
        """
        pins: list[Pin] = []
        for pin in stored_pins(self._store):
            try:
                if isinstance(pin, FormatError):
                    raise pin
                if pin.run == run.run:
                    pin.head(self._trusted_keys)
                    pins.append(pin)
            except (FormatError, Untrusted) as error:
                self._ignore(str(error))
        steps: list[RouteStep] = []
        for pinned in steps_of_pins(self._store, pins, self._ignore):
            recent = {pin.version for pin in pinned.pins if now - pin.time < self._grace}
            put_back = routes.from_anchors(pinned.index.steps, recent) if recent else ()
            if _fits(pinned.index, put_back, index, run):
                steps += put_back
            steps += [step for step in pinned.steps if step in index.steps]
            pins = [pin for pin in pins if pin not in pinned.pins]
        reached = routes.reached(index.steps)
        left = {pin.version for pin in pins if (pin.version, pin.digest) in reached}
        return (*steps, *routes.from_anchors(index.steps, left))

    def _ignore(self, reason: str) -> None:
        if reason not in self._ignored:
            self._ignored.add(reason)
            log.warning("%s: a pin is ignored: %s", self._store.url, reason)


def _fits(pinned: Index, steps: tuple[RouteStep, ...], index: Index, run: RunRecord) -> bool:
    """Whether steps of an earlier index can be in another one: versions, files and tensors are the same there."""
    digests = routes.versions(index.steps)
    return all(
        digests.get(step.version, step.digest) == step.digest
        and pinned.files_of(step.version, run) == index.files_of(step.version, run)
        and pinned.layout_of(step.version) == index.layout_of(step.version)
        for step in steps
    )
