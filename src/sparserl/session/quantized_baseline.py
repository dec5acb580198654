"""The baseline of a quantized run, whose bits are quantized anew from the baseline of the run that it goes along with.

| what is known | when | memory |
| --- | --- | --- |
| a view of the other run's baseline | the last versions of both runs are of the same weights | scales |
| bits of its own | after a restart, until both are again | all quantized bits |
| nothing | one of them failed: the bits are fetched from the store, then they are its own | none |
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

from ..errors import SessionError
from ..parallel import Progress
from ..patch import Captured, Patch, capture
from ..patch.compare import Timed
from ..plan import Link
from ..weights.digest import Digest
from ..weights.holdings import Holdings
from ..weights.memory import Weights
from ..weights.shards import Shards
from .baseline import CapturedChanges, HostBaseline

if TYPE_CHECKING:
    from ..sources.quantized_view import QuantizedView


class LeadingBaseline:
    """The baseline of the run that quantized runs go along with.

    Args:
        current: Returns the baseline of its newest version; None where there is none.

    Attributes:
        is_ahead: Whether it has just been moved to the weights that quantized runs are about to commit.
    """

    def __init__(self, current: Callable[[], HostBaseline | None]) -> None:
        self._current = current
        self.is_ahead = False

    @property
    def bits(self) -> HostBaseline | None:
        """The baseline of its newest version."""
        return self._current()


class QuantizedBaseline:
    """What is known of the last version of a quantized run.

    Args:
        leading: The baseline of the run that it goes along with.
        newest_view: Returns the view of the weights that were captured last.
        digest: The digest of the version, where it is known.
        view: A view of the other run's baseline, which quantizes it to this version.
        own: All bits of this version.
        with_way_back: Whether changes must tell the way back.
    """

    def __init__(
        self,
        leading: LeadingBaseline,
        newest_view: Callable[[], QuantizedView],
        *,
        digest: Digest | None = None,
        view: QuantizedView | None = None,
        own: HostBaseline | None = None,
        with_way_back: bool = False,
    ) -> None:
        self._leading = leading
        self._newest_view = newest_view
        self._digest = digest
        self._own = own
        self._with_way_back = with_way_back
        self._view: QuantizedView | None = None
        self._viewed: tuple[HostBaseline, Digest] | None = None  # what the view is of, and its digest then
        if view is not None:
            self._look_at(view)

    @property
    def digest(self) -> Digest:
        if self._digest is None:
            raise SessionError("the first version of the quantized run is not committed yet")
        return self._digest

    @property
    def view(self) -> QuantizedView | None:
        """A view of the other run's baseline; None if that is not of the same weights any more."""
        bits = self._leading.bits
        if bits is None or self._viewed is None or self._viewed[0] is not bits or self._viewed[1] != bits.digest:
            self._view = None
            self._viewed = None
        return self._view

    @property
    def weights(self) -> Any:
        """All bits, to be read while no publish changes the baseline they are made of; None where nothing is known."""
        if self._own is not None:
            return self._own.weights
        return None if self.view is None else self.view.weights

    def capture(
        self,
        weights: Weights | Shards,
        *,
        profile: str = "auto",
        profiles: Collection[str] | None = None,
        holdings: Holdings | None = None,
        threads: int | None = None,
        progress: Progress | None = None,
        timed: Timed | None = None,  # noqa: ARG002  # the other run's baseline moves on before this one is sent
        link: Link | str | None = None,
    ) -> Captured:
        """What changed, encoded."""
        old = self.weights
        if old is None:
            raise SessionError("the bits of the quantized run's last version are not known")
        changes = capture(
            old,
            weights,
            profile=profile,
            profiles=profiles,
            base_digest=self.digest,
            holdings=holdings,
            threads=threads,
            progress=progress,
        )
        return changes.detach(link, threads, with_way_back=self._with_way_back)

    def set_digest(self, digest: Digest) -> None:
        """The first version is about to be committed."""
        self._digest = digest
        if self._leading.is_ahead:
            self._look_at(self._newest_view())

    def advance(self, patch: Patch, changes: CapturedChanges, threads: int | None = None) -> None:
        """A patch is committed: if the other run has committed the same weights, its baseline has the bits."""
        if self._leading.is_ahead:
            self._own = None
            self._look_at(self._newest_view())
        elif self._own is not None:
            self._own.advance(patch, changes, threads)
        else:
            self._viewed = None
        self._digest = patch.result

    def _look_at(self, view: QuantizedView) -> None:
        bits = self._leading.bits
        assert bits is not None  # it has just been committed
        self._view = view.over(bits.weights)
        self._viewed = (bits, bits.digest)
