"""The run in a store, read without following it: the weights and files of any version, and patches between two."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ...errors import NotFound, NotRetained, TensorMismatch
from ...parallel import Progress
from ...patch import Patch, diff
from ...transport.stores.base import Store
from ...weights.digest import Digest
from ...weights.dtypes import Bits
from ...weights.shards import Place, Shards
from ..anchors import apply_all, copy_weights, restored_parts
from ..arrival import arriving_weights
from ..parts import apply_to_parts, cut, decodable_places
from . import routes, transfer
from .layouts import run_at
from .pins import read_pin, require_pinnable
from .records import HeadRecord, Index, RouteStep, RunRecord
from .retention import read_head, read_index, read_run
from .side_files import StoredFiles
from .signing import PublicKeys


@dataclass(frozen=True)
class StoredRun:
    """What a store says of its run at one moment.

    Attributes:
        store: The store.
        head: Its head.
        run: What all versions have in common.
        index: The steps between versions.
        progress: Called with the number of bytes just fetched.
    """

    store: Store
    head: HeadRecord
    run: RunRecord
    index: Index
    progress: Progress | None = None

    @classmethod
    def read(cls, store: Store, trusted_keys: PublicKeys | None = None) -> StoredRun:
        """The run as it is now; where keys are given, one of them must have signed it."""
        return cls.of(store, read_head(store, trusted_keys)[0])

    @classmethod
    def at_pin(cls, store: Store, name: str, trusted_keys: PublicKeys | None = None) -> StoredRun:
        """The run of a pin, as if its version were the newest; where keys are given, one must have signed its head.

        Raises:
            NotFound: There is no such pin.
            NotRetained: Its version is gone.
        """
        require_pinnable(store)
        pin, _ = read_pin(store, name)
        head = pin.head(trusted_keys)
        try:
            stored = cls.of(store, head)
        except NotFound as error:
            raise NotRetained(f"{store.url}: pin {name}: version {pin.version} of run {pin.run} is gone") from error
        if stored.digests.get(pin.version) != pin.digest:
            raise NotRetained(f"{store.url}: pin {name}: its index does not lead to version {pin.version}")
        return replace(stored, head=replace(head, version=pin.version, digest=pin.digest))

    @classmethod
    def of(cls, store: Store, head: HeadRecord, progress: Progress | None = None) -> StoredRun:
        """What a head leads to."""
        return cls(store, head, read_run(store, head), read_index(store, head), progress)

    @property
    def digests(self) -> dict[int, Digest]:
        """The digest of every version that the store has."""
        return routes.versions(self.index.steps)

    def require(self, version: int) -> None:
        """Refuse a version that the store does not have."""
        if version not in self.digests:
            versions = sorted(self.digests)
            raise NotRetained(
                f"{self.store.url}: version {version} is not among those that are kept: {_ranges(versions)}"
            )

    def run_at(self, version: int) -> RunRecord:
        """The run, with the tensor table of a version."""
        return run_at(self.store, self.run, self.index, version)

    def version_of(self, digest: Digest) -> int | None:
        """The newest version with this digest; None if there is none."""
        return max((version for version, other in self.digests.items() if other == digest), default=None)

    def steps(self, base: int | None, version: int) -> list[RouteStep]:
        """The steps with the fewest bytes from one version, or from nothing, to another."""
        if base is not None:
            self.require(base)
        self.require(version)
        start = None if base is None else (base, self.digests[base])
        return routes.route(self.index.steps, start, version)

    def fetch(self, steps: list[RouteStep], *, restore: bool = True) -> transfer.Fetch:
        """The patches of some steps, about to be fetched."""
        route = [(step, self.run_at(step.version).layout) for step in steps]
        return transfer.Fetch(self.store, self.run.run, route, self.progress, restore=restore)

    def patches(self, steps: list[RouteStep]) -> list[Patch]:
        """The patches of some steps, fetched and checked."""
        return self.fetch(steps, restore=False).all()

    def build(
        self,
        steps: list[RouteStep],
        version: int,
        threads: int | None = None,
        start: tuple[dict[str, Bits], Digest] | None = None,
    ) -> dict[str, Bits]:
        """The weights that steps lead to, built while these are fetched.

        start: the weights that the steps start from, which are written to, and their digest; without it, the first
            step is an anchor.
        """
        fetch = self.fetch(steps)
        digest = self.digests[version]
        if start is None:
            return fetch.run(lambda: arriving_weights(fetch.arriving, digest, threads))
        return fetch.run(lambda: apply_all(*start, fetch.patches, digest, threads))

    def build_parts(
        self, steps: list[RouteStep], places: Sequence[Place], threads: int | None = None, start: Patch | None = None
    ) -> Shards:
        """Some parts of the weights that steps lead to. Their digest must be checked by the caller.

        start: an anchor of these parts that the steps start from; without it, the first step is an anchor.

        Raises:
            TensorMismatch: It takes more parts than `start` has to decode the steps.
        """
        if start is not None:
            patches = self.patches(steps)
            if set(decodable_places(start.table, places, patches)) - set(start.contents.covers):
                raise TensorMismatch("it takes more parts than the anchor has to decode the patches after it")
            weights = restored_parts(start, places, threads)
        else:
            first, *others = steps
            patches = self.patches(others)
            wider = decodable_places(self.run_at(first.version).layout, places, patches)
            fetch = self.fetch([first])
            weights = fetch.run(lambda: fetch.arriving[0].restored_parts(wider, threads))
        apply_to_parts(weights, patches, threads)
        return cut(weights, places)

    def weights(self, version: int, threads: int | None = None) -> dict[str, Bits]:
        """The weights of a version, built from an anchor and patches."""
        return self.build(self.steps(None, version), version, threads)

    def files(self, version: int) -> Mapping[str, bytes]:
        """The files of a version, each fetched when it is asked for."""
        return StoredFiles(self.store, self.index.files_of(version, self.run))

    def patch(self, base: int, version: int, threads: int | None = None) -> Patch:
        """One patch between two versions, without files: that of the store, or else by comparing both."""
        steps = self.steps(base, version)
        table = self.run_at(version).layout
        self.run_at(base).layout.require(table, f"version {base}", f"version {version}")
        if len(steps) == 1 and steps[0].base == base:
            return self.patches(steps)[0]
        old = self.weights(base, threads)
        start = None if not steps or steps[0].base is None else (copy_weights(old), self.digests[base])
        new = self.build(steps, version, threads, start) if steps else old
        return diff(old, new, base_digest=self.digests[base], threads=threads)

    def file_hashes(self, version: int) -> dict[str, str]:
        """The files of a version, by their names and hashes."""
        return {name: file.blob.hash for name, file in self.index.files_of(version, self.run).items()}

    def with_files(self, patch: Patch, held: Mapping[str, str], version: int) -> Patch:
        """A patch that leads to a version, with the files that differ from those held, which have these hashes."""
        hashes = self.file_hashes(version)
        files = self.files(version)
        changed = {name: files[name] for name, hash in hashes.items() if held.get(name) != hash}
        removed = sorted(held.keys() - hashes.keys())
        return patch.with_files(changed, removed) if changed or removed else patch


def _ranges(versions: list[int]) -> str:
    """Numbers in words: 0, 5 to 9."""
    spans: list[list[int]] = []
    for version in versions:
        if spans and version == spans[-1][-1] + 1:
            spans[-1][1:] = [version]
        else:
            spans.append([version])
    return ", ".join(" to ".join(map(str, span)) for span in spans)
