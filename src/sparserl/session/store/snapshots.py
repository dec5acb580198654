"""What a subscriber finds out of what a store has at one moment, and of what its targets hold."""

from __future__ import annotations

from collections.abc import Sequence

from ...errors import InvalidField, Untrusted
from ...targets import Target
from ...transport.stores.base import Store
from ..receiver import RunVersion
from . import routes
from .records import HeadRecord, RunRecord, StoreSnapshot
from .retention import read_index, read_run


def read_snapshot(store: Store, head: HeadRecord, tag: str, known_run: RunRecord | None) -> StoreSnapshot:
    """What a head leads to.

    known_run: a run that has been read before, which may be the one.
    """
    run = known_run if known_run is not None and known_run.run == head.run else read_run(store, head)
    if run.run != head.run or run.created != head.created:
        raise Untrusted(f"the head is of run {head.run}, what it points to of run {run.run}")
    snapshot = StoreSnapshot(head, tag, run, read_index(store, head))
    if routes.versions(snapshot.index.steps).get(head.version) != head.digest:
        raise InvalidField(f"the head says version {head.version}, {head.digest}; no step of its index leads there")
    return snapshot


def files_change(snapshot: StoreSnapshot, current: RunVersion | None, goal: RunVersion) -> bool:
    """Whether a version has other files than the one that is held, as far as the store can tell."""
    oldest = min(routes.versions(snapshot.index.steps))
    if current is None or current.run != goal.run or min(current.version, goal.version) < oldest:
        return True
    return snapshot.index.has_other_files(current.version, goal.version, snapshot.run)


def likely_version(targets: Sequence[Target], run: str, versions: list[int]) -> int:
    """Of versions with the same bits the one that is held: files may differ, which bits do not tell."""
    remembered = [target.remembered_version() or ("", 0.0, -1) for target in targets if target.keeps_files]
    known = {(run, version) for version in versions}
    held = [version if (name, version) in known else min(versions) for name, _, version in remembered]
    return min(held, default=max(versions))


def require_newer(
    head: HeadRecord,
    newest: HeadRecord | None,
    held: Sequence[tuple[str, float, int]],
    only_run: str | None,
    is_signed: bool,
) -> None:
    """Refuse the head of another run than the one that is followed, and heads older than what was seen.

    newest: the newest head that was seen before.
    held: run, its time and version of what targets hold.
    only_run: the run that is followed; None for any.
    is_signed: whether heads are signed, so that what they say of times can be believed.
    """
    if only_run is not None and head.run != only_run:
        raise Untrusted(f"the store has run {head.run}, this subscriber only follows run {only_run}")
    seen = [*held]
    if newest is not None:
        seen.append((newest.run, newest.created, newest.version))
    for run, created, version in seen:
        if head.run == run and head.version < version:
            raise Untrusted(f"the store was rolled back: version {version} was seen, now it says {head.version}")
        if is_signed and head.run != run and head.created <= created:
            raise Untrusted(f"the store was rolled back: run {head.run} is older than run {run}, which was seen")
