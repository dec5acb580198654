"""Looking after a store: which objects are needed, which can go, and whether all are what they should be."""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from ...errors import FormatError, NotFound, SessionError, StoreError, Truncated
from ...transport.stores.base import RANGE_BYTES, ObjectInfo, Store, StoredObject
from ..logs import log
from . import routes, signing
from .layouts import run_at
from .manifests import Manifest
from .pins import Pin, PinnedSteps, intact_pins, read_index_of, steps_of_pins, stored_pins
from .records import (
    HEAD,
    MOST_HEAD,
    RUN,
    HeadRecord,
    Index,
    RouteStep,
    RunRecord,
    get_named,
    is_own,
    path,
    require_hash,
    run_path,
)
from .signing import PublicKeys
from .transfer import require_size

_UNRENEWED = {"leases": 86_400.0, "holdings": 2 * 86_400.0}  # seconds that they stay; a lease names a holding


def get_head(store: Store) -> StoredObject:
    """The head, as it is stored."""
    try:
        return store.get(HEAD, MOST_HEAD)
    except NotFound as error:
        raise NotFound(f"{store.url}: nothing is published here yet: there is no {HEAD}") from error


def read_head(
    store: Store, trusted_keys: PublicKeys | None = None, stored: StoredObject | None = None
) -> tuple[HeadRecord, str]:
    """The head and its tag; where keys are trusted, one of them must have signed it.

    stored: the head, where the store has just been asked for it.
    """
    data, tag = get_head(store) if stored is None else stored
    try:
        return HeadRecord.parse(signing.unseal(data, trusted_keys, HEAD)), tag
    except FormatError as error:
        raise type(error)(
            f"{store.url}: the head is damaged: {error}. A publisher that is running replaces it; else put back a copy "
            "of it, or begin a new run: new_run=True (on the command line, --new-run)"
        ) from error


def read_run(store: Store, head: HeadRecord) -> RunRecord:
    name = run_path(head.run)
    data = store.get(name, RUN.size).data
    require_hash(data, head.run_hash, name)
    return RunRecord.parse(data, name)


def read_index(store: Store, head: HeadRecord) -> Index:
    return read_index_of(store, head)


def needed(store: Store, head: HeadRecord, indices: Iterable[str] = ()) -> set[str]:
    """Every object that the head leads to, and those that other indices of its run and pins lead to.

    An index that only a pin has kept names steps that are gone.
    """
    names = {HEAD, run_path(head.run)}
    names |= {path(head.run, "files", blob.hash) for blob in read_run(store, head).files.values()}
    manifests: dict[str, bool] = {}  # whether the head leads to them
    for hash in {head.index, *indices}:
        names.add(path(head.run, "index", hash))
        index = Index.parse(get_named(store, head.run, "index", hash), path(head.run, "index", hash))
        for step in index.steps:
            manifests[step.manifest] = manifests.get(step.manifest, False) or hash == head.index
        names |= _side_objects(index)
    for hash, is_of_head in manifests.items():
        with contextlib.nullcontext() if is_of_head else contextlib.suppress(NotFound):
            names |= _manifest_objects(store, head.run, hash)
    runs: dict[str, RunRecord | None] = {}  # by hash, None for those that are gone

    def warn(reason: str) -> None:
        log.warning("%s: %s", store.url, reason)

    for pinned in steps_of_pins(store, intact_pins(store), warn):
        names |= _pinned_objects(store, pinned, names, runs, warn)
    return names


def _side_objects(index: Index, newest: int | None = None) -> set[str]:
    """The tensor tables and changed files that an index names, for versions up to one, or for all."""
    layouts = [layout for layout in index.layouts if newest is None or layout.version <= newest]
    changes = [change for change in index.files if newest is None or change.version <= newest]
    files = {file.name(index.run) for change in changes for file in change.files.values() if file is not None}
    return files | {layout.table.name(index.run) for layout in layouts}


def _manifest_objects(store: Store, run: str, hash: str) -> set[str]:
    """A manifest and its buckets."""
    name = path(run, "manifests", hash)
    manifest = Manifest.parse(get_named(store, run, "manifests", hash), name)
    return {name, *(manifest.bucket(blob) for blob in manifest.buckets)}


def _pinned_objects(
    store: Store,
    pinned: PinnedSteps,
    known: set[str],
    runs: dict[str, RunRecord | None],
    warn: Callable[[str], None],
) -> set[str]:
    """What pins of one index need. Of a version that is lost or damaged, what can be found stays.

    known: objects of manifests that have been read.
    runs: those that have been read.
    warn: told of what is damaged.
    """
    head = pinned.head
    names = {run_path(head.run), path(head.run, "index", head.index)} | _side_objects(pinned.index, pinned.newest)
    if head.run_hash not in runs:
        runs[head.run_hash] = None
        try:
            runs[head.run_hash] = read_run(store, head)
        except NotFound:
            pass
        except FormatError as error:
            warn(f"{pinned.label}: {error}")
    if (run := runs[head.run_hash]) is not None:
        names |= {path(head.run, "files", blob.hash) for blob in run.files.values()}
    for step in pinned.steps:
        name = path(head.run, "manifests", step.manifest)
        try:
            names |= set() if name in known else _manifest_objects(store, head.run, step.manifest)
        except NotFound:
            pass
        except FormatError as error:
            names.add(name)
            warn(f"{pinned.label}: {step.name}: {error}")
    return names


def _recent(indices: list[ObjectInfo], head_time: float, since: float) -> set[str]:
    """The hashes of the indices that the head has led to since then: those written since, and the one before them.

    indices: those of its run.
    head_time: when the head was written: it may be a copy of an older one, which was put back.
    """
    if head_time <= since:
        return set()
    first = max((item.time for item in indices if item.time <= since), default=since)
    return {item.name.rpartition("/")[2] for item in indices if item.time >= first}


def _replaced(indices: dict[str, list[ObjectInfo]], run: str, head_time: float) -> dict[str, float]:
    """When the head stopped leading to each other run that had a version: then the next index of its run was written.

    Where there is none, such as after a copy of an older head was put back, it was when the head was written.
    """
    written = [item.time for item in indices.get(run, ())]
    last = {other: items[-1].time for other, items in indices.items() if other != run}
    return {other: next((time for time in written if time > last_time), head_time) for other, last_time in last.items()}


def _indices(listed: Iterable[ObjectInfo]) -> dict[str, list[ObjectInfo]]:
    """The indices of each run, in the order in which they were written."""
    indices: dict[str, list[ObjectInfo]] = {}
    for item in sorted(listed, key=lambda item: item.time):
        if is_own(item.name) and _kind(item.name) == "index":
            indices.setdefault(_run(item.name), []).append(item)
    return indices


def runs_with_versions(store: Store) -> list[str]:
    """The runs of which a store has versions, whatever its head says: their publishers came as far as an index."""
    return sorted(_indices(store.list("runs/")))


def collect(
    store: Store,
    grace: float,
    clock: Callable[[], float] = time.time,
    dry: bool = False,
    other_runs: bool = True,
) -> list[str]:
    """Delete what nothing has referred to for the grace period, and what is that old and never was; returns the names.

    A lease goes when it has not been renewed for a day, a holding after two; what a pin needs stays. What nothing
    refers to is never referred to again, but for what a publisher is just sending or somebody just pinning: the grace
    period must be longer than that takes. What has a name that no session gives is left alone.

    other_runs: whether other runs than that of the head go too, when it has not led to them for the grace period.
    """
    # Listed before the head is read: what is committed in between is younger than the list.
    everything = list(store.list(""))
    listed = [item for item in everything if is_own(item.name)]
    head_time = next((item.time for item in everything if item.name == HEAD), 0.0)
    now = clock()
    head, _ = read_head(store)
    indices = _indices(listed)
    keep = needed(store, head, _recent(indices.get(head.run, []), head_time, now - grace))
    replaced = _replaced(indices, head.run, head_time)

    def is_garbage(item: ObjectInfo) -> bool:
        run = _run(item.name)
        age = now - max(item.time, replaced.get(run, item.time))
        is_old = age > max(grace, _UNRENEWED.get(_kind(item.name), 0.0))
        return is_old and item.name not in keep and (other_runs or run == head.run)

    gone = [item.name for item in listed if is_garbage(item)]
    if gone and not dry:
        store.delete(gone)
    return gone


def is_of_receiver(name: str) -> bool:
    """Whether an object below `runs/` was written by a subscriber, which may be gone: nothing refers to it."""
    return _kind(name) in _UNRENEWED


def _run(name: str) -> str:
    """The run of an object below `runs/`."""
    return name.split("/")[1]


def _kind(name: str) -> str:
    """What follows the run in the name of an object, such as `leases`."""
    _, _, *rest = name.split("/")
    return rest[0] if rest else ""


def faults(store: Store, trusted_keys: PublicKeys | None = None) -> Iterator[str]:
    """Everything that is wrong with a store, object by object: `sparserl fsck`."""
    try:
        head, _ = read_head(store, trusted_keys)
        run = read_run(store, head)
        index = read_index(store, head)
    except (StoreError, FormatError, SessionError) as error:
        yield str(error)
        return
    first = {path(head.run, "files", blob.hash): (name, blob) for name, blob in run.files.items()}
    later = [(name, file) for changes in index.files for name, file in changes.files.items() if file is not None]
    files = first | {file.name(head.run): (name, file.blob) for name, file in later}
    for place, (name, blob) in files.items():
        yield from _blob_fault(store, place, blob.hash, blob.size, f"file {name}")
    for layout in index.layouts:
        table = layout.table
        yield from _blob_fault(
            store, table.name(head.run), table.hash, table.size, f"tensors of version {layout.version}"
        )
    steps: dict[str, list[RouteStep]] = {}
    for step in index.steps:
        steps.setdefault(step.manifest, []).append(step)
    places: set[str] = set()
    for hash, named in steps.items():
        try:
            run_of_step = run_at(store, run, index, named[0].version)
        except (StoreError, FormatError) as error:
            yield f"{named[0].name}: the table of its tensors: {error}"
            continue
        yield from _manifest_faults(store, run_of_step, hash, named, places)
    digests = routes.versions(index.steps)
    if digests.get(head.version) != head.digest:
        yield f"no step leads to version {head.version} with digest {head.digest}"
    oldest = min((step.version for step in index.steps if step.base is None), default=0)
    reached = routes.reached(index.steps)
    for version, digest in digests.items():
        if version >= oldest and (version, digest) not in reached:  # older ones are for those who hold a version
            yield f"version {version} cannot be reached with what the store has"
    if store.writable:  # others cannot list pins
        yield from _pin_faults(store, _Checked({head.run_hash: run}, set(steps), places, set(files)))


class _Checked(NamedTuple):
    """What has been read of a store: runs by hash, hashes of manifests, places of buckets, and names of files."""

    runs: dict[str, RunRecord]
    manifests: set[str]
    places: set[str]
    files: set[str]


def _pin_faults(store: Store, checked: _Checked) -> Iterator[str]:
    """What is wrong with pins and with what they keep, beyond what has been read."""
    pins: list[Pin] = []
    for pin in stored_pins(store):
        if isinstance(pin, FormatError):
            yield str(pin)
        else:
            pins.append(pin)
    keep_nothing: list[str] = []
    try:
        for pinned in steps_of_pins(store, pins, keep_nothing.append):
            yield from _pinned_faults(store, pinned, checked)
    except (StoreError, FormatError) as error:
        yield f"what pins keep cannot be read: {error}"
    yield from keep_nothing


def _pinned_faults(store: Store, pinned: PinnedSteps, checked: _Checked) -> Iterator[str]:
    """What is wrong with the steps and files of pinned versions. What is missing is an error of the caller's."""
    label = pinned.label
    if pinned.head.run_hash not in checked.runs:
        checked.runs[pinned.head.run_hash] = read_run(store, pinned.head)
    run = checked.runs[pinned.head.run_hash]
    for step in pinned.steps:
        if step.manifest not in checked.manifests:
            checked.manifests.add(step.manifest)
            run_of_step = run_at(store, run, pinned.index, step.version)
            for fault in _manifest_faults(store, run_of_step, step.manifest, [step], checked.places):
                yield f"{label}: {fault}"
    for name, file in pinned.index.files_of(pinned.newest, run).items():
        if file.name not in checked.files:
            checked.files.add(file.name)
            yield from _blob_fault(store, file.name, file.blob.hash, file.blob.size, f"{label}: file {name}")


def _manifest_faults(
    store: Store, run: RunRecord, hash: str, steps: list[RouteStep], places: set[str]
) -> Iterator[str]:
    """What is wrong with a manifest and its buckets, given the steps that name it and the places seen before."""
    first = steps[0].name
    try:
        manifest = Manifest.parse(get_named(store, run.run, "manifests", hash), first)
        require_size(manifest, run.layout, first)
    except (StoreError, FormatError) as error:
        for step in steps:
            yield f"{step.name}: {error}"
        return
    for step in steps:
        if manifest.run != run.run or manifest.result != step.digest or step.base_digest not in (None, manifest.base):
            yield f"{step.name}: its manifest is that of something else"
        if manifest.size != step.bytes:
            yield f"{step.name}: the index promises {step.bytes} bytes, its buckets have another size"
    if manifest.place in places:  # each patch has its own, so that no bucket is read twice
        yield f"{first}: its buckets lie in {manifest.place}, the place of another patch"
        return
    places.add(manifest.place)
    for blob in manifest.buckets:
        yield from _blob_fault(store, manifest.bucket(blob), blob.hash, blob.size, first)


def _goes_on(store: Store, name: str, size: int) -> bool:
    """Whether there is more of an object behind so many bytes."""
    try:
        store.read(name, size, 1)
    except Truncated:
        return False
    return True


def _blob_fault(store: Store, name: str, hash: str, size: int, label: str) -> Iterator[str]:
    """Whether an object is there and has the hash that names it; large ones are read piece by piece."""
    hasher = hashlib.sha256()
    try:
        if size <= RANGE_BYTES:
            hasher.update(store.get(name, size).data)
        else:
            for start in range(0, size, RANGE_BYTES):
                hasher.update(store.read(name, start, min(RANGE_BYTES, size - start)))
            if _goes_on(store, name, size):
                yield f"{label}: {name} is longer than the {size} bytes that it should have"
    except (StoreError, FormatError) as error:
        yield f"{label}: {error}"
        return
    if hasher.hexdigest() != hash:
        yield f"{label}: {name} holds other bytes than its name promises"
