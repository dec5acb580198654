"""Finding changes without the bits of the version before: by marks, and by a digest of every part.

    every part ──► one read: its sum now ──► as before? nothing changed
                                         ──► as the marks say? the marked elements, with the bits they have now
                                         ──► anything else? all of it

The sums tell whether marks speak for every change. Where something wrote to a part without marking it, or nobody marks
it, the part is sent dense. A marked element whose bits are what they were is sent too: that does no harm.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from .. import codec, plan
from ..codec.profile import Positions
from ..errors import NeedsBase, TensorMismatch
from ..kernels import cpu
from ..parallel import Progress, ordered
from ..plan import Changes, Dense, Link
from ..plan.routing import BUCKET_PAYLOAD_BYTES
from ..weights.batches import Batch, batches
from ..weights.digest import Digest, sums, table_digest
from ..weights.dtypes import UIntArray
from ..weights.local import LocalWeights
from ..weights.marks import Bitmap
from ..weights.memory import Weights
from ..weights.region import Numbers, whole
from ..weights.shards import Place, Shards
from ..weights.staging import gpu_tensor
from ..weights.table import TensorTable
from .assemble import Target, assemble
from .compare import _chooser, _Listed, _marked
from .patch import Patch


class Marked:
    """All changes since sums were taken, found but not encoded; the weights are not looked at any more.

    sums: those of every part now.
    base, result: the digests of the two versions.
    """

    def __init__(
        self, held: LocalWeights, parts: list[Changes], profile: str, old: Digest, new: dict[Place, Digest]
    ) -> None:
        self._table, self._parts, self._profile = held.table, parts, profile
        self._covers = None if held.complete else held.places
        terms = table_digest(held.table) if held.complete else Digest()
        self.sums = new
        self.base, self.result = old + terms, sum(new.values(), terms)

    def encode(self, *, link: Link | str | None = None, to: Target = None, threads: int | None = None) -> Patch:
        """The patch."""
        chooser = None if link is None else _chooser(link, threads)
        ends = self.base, self.result
        return Patch(
            assemble(self._table, self._parts, self._profile, lambda: ends, self._covers, to, threads, chooser)
        )


def capture_marked(
    new: Weights | Shards,
    known: Mapping[Place, Digest],
    *,
    table: TensorTable | None = None,
    profile: str = "auto",
    threads: int | None = None,
    progress: Progress | None = None,
) -> Marked:
    """What changed since the parts had the sums that are `known`: one read of everything, and a copy of what changed.

    `table` is the tensor table they had. Only profiles that send bits as they are can be used: `raw`, `gap`, or `auto`,
    which takes the better of the two.
    Of a dense entry all elements count as changed.
    """
    names = _absolute(profile)
    held = LocalWeights.of(new, table, "the last version", "the weights now")
    if set(held.places) != known.keys():
        raise TensorMismatch("these are not the parts whose sums are known")
    now = part_sums(held, threads, progress)
    marks = _marked(held, new) if isinstance(new, Shards) else {}
    moved = _moved(held, new) if isinstance(new, Shards) else {}
    sparse: list[Place] = []
    dense: list[Place] = []
    for part, place in enumerate(held.places):
        if now[place] != known[place]:
            told = part in marks and part in moved and known[place] + moved[part] == now[place]
            (sparse if told else dense).append(place)
    parts: list[Changes] = []
    there = {place for place, memory in held.parts if gpu_tensor(memory) is not None}
    for some in ([p for p in sparse if p not in there], [p for p in sparse if p in there]):
        for routed in ordered(lambda batch: _look(held, marks, batch, names), batches(held.table, some), threads):
            parts += routed
    for place in dense:
        parts += _whole(held, place)
    return Marked(held, parts, profile, sum(known.values(), Digest()), now)


def part_sums(held: LocalWeights, threads: int | None = None, progress: Progress | None = None) -> dict[Place, Digest]:
    """The element sums of every part: one read of all bits."""

    def one(batch: Batch) -> tuple[Batch, list[Digest]]:
        addresses, alive = held.read(batch)
        found = []
        for e, tensor in enumerate(batch.tensor.tolist()):
            row = Batch.of(held.table, tensor, batch.region[e])
            found.append(sums(held.table, row, addresses[e : e + 1]))
        del alive  # copies may go only now
        return batch, found

    out, near = dict.fromkeys(held.places, Digest()), held.places
    if held.gpu_streams:
        from ..weights import on_gpu

        near, far = on_gpu.split_by_gpu(near, held)
        for place, first, second, done in on_gpu.piece_sums(held, far):
            out[held.parts[held.part_index(*place)][0]] += Digest(first, second)
            if progress is not None:
                progress(done)
    for batch, found in ordered(one, batches(held.table, near), threads):
        for tensor, region, part in zip(batch.tensor.tolist(), batch.region, found, strict=True):
            out[held.parts[held.part_index(tensor, region)][0]] += part
        if progress is not None:
            progress(batch.elements * batch.dtype.width)
    return out


def _absolute(profile: str) -> tuple[str, ...]:
    """The profiles that a request allows and that need no bits of the version before."""
    names = tuple(name for name in plan.candidates(profile) if codec.PROFILES[name].absolute)
    if not names:
        raise NeedsBase(f"profile {profile!r} needs the bits of the version before; use 'gap', 'raw' or 'auto'")
    return names


def _moved(held: LocalWeights, shards: Shards) -> dict[int, Digest]:
    """How the marked changes moved the sums, by the number of the part."""
    index = shards.table.index
    return {
        held.part_index(index[part.tensor], part.region): Digest(*part.moved)
        for part in shards.parts
        if part.moved is not None
    }


def _look(
    held: LocalWeights, marks: Mapping[int, Bitmap | _Listed], batch: Batch, names: Sequence[str]
) -> list[Changes]:
    """The marked elements of a batch and their bits, routed."""
    slices = []
    for tensor, region, numel in zip(batch.tensor.tolist(), batch.region, batch.numel.tolist(), strict=True):
        slices.append(marks[held.part_index(tensor, region)].between(batch.offset, batch.offset + numel))
    counts = np.array([s.size for s in slices], np.int64)
    live = np.flatnonzero(counts)
    positions = np.concatenate(slices)
    tensors, regions = batch.tensor[live], [batch.region[i] for i in live.tolist()]
    after = _gathered(
        held, replace(batch, tensor=tensors, region=regions, numel=batch.numel[live]), counts[live], positions
    )
    changes = Changes(
        batch.dtype,
        tensors,
        regions,
        batch.numel[live],
        counts[live],
        positions,
        after,
        None,
        batch.elements,
        lambda entry: held.bits(int(tensors[entry]), regions[entry]),
    )
    return list(plan.route(changes, names, held.table))


def _gathered(held: LocalWeights, batch: Batch, counts: Numbers, positions: Positions) -> UIntArray:
    """The bits at positions of some parts."""
    out: UIntArray = np.empty(positions.size, batch.dtype.uint)
    homes = [gpu_tensor(held.locate(*place)[0]) for place in zip(batch.tensor.tolist(), batch.region, strict=True)]
    if homes and all(there is not None for there in homes):
        from ..weights.on_gpu import GpuElements

        GpuElements(held, homes, held.geometry(batch.tensor, batch.region), counts, positions).read(out)
        return out
    addresses, alive = held.read(batch)
    flat, ones = np.ones((counts.size, 1), np.int64), np.ones(counts.size, np.int64)
    cpu.changes.gather(np.empty(0, batch.dtype.uint), counts, addresses, ones, flat, flat, positions, out)
    del alive  # copies may go only now
    return out


def _whole(held: LocalWeights, place: Place) -> Iterator[Changes]:
    """All bits of a part, in entries that fit a bucket."""
    tensor, region = place
    spec = held.table.specs[tensor]
    most = BUCKET_PAYLOAD_BYTES // spec.dtype.width
    numel = spec.numel if region is None else region.numel
    none, words = np.empty(0, np.int64), np.empty(0, spec.dtype.uint)
    for box in [region] if numel <= most else (region or whole(spec.shape)).split(most):
        bits = held.bits(tensor, box).copy()
        entry = Dense((tensor, box), bits.size, bits)
        yield Changes(spec.dtype, none, [], none, none, none.astype(np.uint32), words, None, bits.size, dense=[entry])
