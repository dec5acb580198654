"""Quantized runs that go along with another run: the same weights, captured at the same moment, in stores of their own.

    capture: changes of the run ──► changes of its quantized runs, encoded, since they read the run's baseline
    then:    commit the run; its baseline moves on ──► commit the quantized runs

Whichever fails, the others are published. A quantized run whose last version is of other weights than that of the
leading run fetches its own bits from its store, as after a restart.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from ...errors import SessionError, WeightsError
from ...sources.modules import files_of, weights_of
from ...sources.quantize import ViewedQuantizedSource
from ...sources.schemes import Blockwise, scheme_named
from ...sources.tying import tied_of
from ...transport.stores.base import Store
from ...transport.stores.opening import open_writable
from ...weights.digest import Digest, digest
from ...weights.memory import Weights
from ...weights.shards import Shards
from ...weights.table import TensorTable
from ..baseline import HostBaseline
from ..logs import log
from ..observing import Observing
from ..options import BaselineOptions
from ..quantized_baseline import LeadingBaseline, QuantizedBaseline
from ..report import SyncReport, Watch
from .fields import sha256
from .label import Label
from .records import HeadRecord
from .run_publisher import Completion, RunOptions, RunPublisher
from .run_writer import CommittedVersion
from .stored_run import StoredRun

if TYPE_CHECKING:
    from ...sources.quantized_view import QuantizedView

Schemes = Mapping[str, str | Blockwise]


def checked_schemes(also: Schemes | None) -> dict[str, Blockwise]:
    """By the URL of each quantized run, its scheme.

    Raises:
        SessionError: The option is no mapping of that kind.
    """
    if also is None:
        return {}
    if not isinstance(also, Mapping):
        raise SessionError(f"also is {also!r}; it must be a mapping from URLs to schemes")
    schemes = {}
    for url, scheme in also.items():
        if not isinstance(url, str) or not isinstance(scheme, str | Blockwise):
            raise SessionError(
                f"also has {url!r}: {scheme!r}; it must map a URL to a scheme or the name of one, such as 'nvfp4'"
            )
        try:
            schemes[url] = scheme_named(scheme) if isinstance(scheme, str) else scheme
        except ValueError as error:
            raise SessionError(f"also[{url!r}]: {error}") from error
    return schemes


def leading_options(options: RunOptions, schemes: Mapping[str, Blockwise]) -> RunOptions:
    """The options of a run that quantized runs go along with: it has a baseline.

    Raises:
        SessionError: Options do not go together.
    """
    if not schemes:
        return options
    if options.baseline.kind == "none":
        raise SessionError("also= takes a baseline, from which the old codes are made; baseline is 'none'")
    if options.writers is not None:
        raise SessionError("also= is for one writer; several need a publisher of sources.quantized beside this one")
    kind = "host" if options.baseline.kind == "auto" else options.baseline.kind
    return replace(options, baseline=BaselineOptions(kind, options.baseline.memory))


class Capture(Protocol):
    """Takes what a version needs of the weights."""

    def __call__(self, label: Label, *, at_once: bool) -> Completion:
        """Returns what is left to do."""
        ...


@dataclass(frozen=True)
class LeadingRun:
    """The run that quantized runs go along with.

    Attributes:
        url: Where it is published.
        baseline: Returns all bits of its newest version; None where there is none.
        position: Returns what changes with every version.
        capture: Captures a version.
        tell: Tells of a version that was published.
        tell_failure: Tells of an error.
    """

    url: str
    baseline: Callable[[], HostBaseline | None]
    position: Callable[[], object]
    capture: Capture
    tell: Callable[[SyncReport], SyncReport]
    tell_failure: Callable[[Exception], None]


class CapturedWeights:
    """The source of a leading run, with the weights that it gave last as long as a publish captures them."""

    def __init__(self, source: Any) -> None:
        self._source = source
        self.latest: Weights | Shards | None = None

    def weights(self) -> Weights | Shards:
        """The weights of the version that is being captured."""
        return weights_of(self._source) if self.latest is None else self.latest

    @property
    def tied(self) -> Mapping[str, str]:
        """The names that the source left out, each with that of the same tensor."""
        return tied_of(self._source)

    def files(self) -> dict[str, bytes]:
        """The files that the source brings along."""
        return files_of(self._source)


class QuantizedRun(RunPublisher):
    """Publishes a quantized run, without a baseline of its own as long as it is in step with the leading run."""

    def __init__(
        self, store: Store, scheme: Blockwise, source: CapturedWeights, leading: LeadingBaseline, options: RunOptions
    ) -> None:
        self._leading = leading
        self._quantized = ViewedQuantizedSource(source, scheme)
        self._with_way_back = options.retention.ladder is not None
        super().__init__(store, self._quantized, options, Observing(None, self._quantized))

    def _live_weights(self, _: TensorTable | None = None) -> Weights | Shards:
        committed = self._committed
        baseline = None if committed is None else committed.baseline
        self._quantized.base = baseline.view if isinstance(baseline, QuantizedBaseline) else None
        return super()._live_weights()  # which have the names of the leading run

    def capture(self, label: Label, *, at_once: bool) -> Completion:
        """Take what a version needs of the weights; returns what is left to do."""
        complete = self._capture(label, at_once=at_once)
        return lambda: self._tell(complete())

    def wait(self, version: int, subscribers: int, timeout: float) -> int:
        """Wait until so many subscribers hold a version or a later one; how many do."""
        return self._run_writer.wait(version, subscribers, timeout)

    def close(self) -> None:
        """Let go of the store."""
        self._let_go()

    def forget_weights(self) -> None:
        """A publish has ended: what it captured may go."""
        self._quantized.view = None
        self._quantized.base = None

    def _newest_view(self) -> QuantizedView:
        assert self._quantized.view is not None  # the weights were captured
        return self._quantized.view

    def _capture_changes(self, committed: CommittedVersion, label: Label, watch: Watch, *, at_once: bool) -> Completion:
        if committed.baseline.weights is None:
            log.info(
                "%s: rebuilding version %d, since the leading run has another", self.store.url, committed.head.version
            )
            committed = self._rebuilt(committed.head)
            self._run_writer.committed = committed
        return super()._capture_changes(committed, label, watch, at_once=at_once)

    def _choose_baseline(
        self,
        weights: Weights | Shards,
        own_digest: Digest | None,
        options: BaselineOptions,  # noqa: ARG002  # it has no choice
    ) -> QuantizedBaseline:
        self.baseline = "baseline: quantized from that of the leading run"
        own = None
        if own_digest is not None:
            own = HostBaseline(weights, own_digest, copy=False, threads=self._encoding.threads)
        return self._baseline_of(own_digest, own=own)

    def _rebuilt(self, head: HeadRecord) -> CommittedVersion:
        """The version that a head names: of the leading run's bits, if these are it; or else from the store."""
        view = self._view_of_leading_bits()
        if view is None or digest(view.weights, threads=self._encoding.threads) != head.digest:
            return super()._rebuilt(head)
        stored = StoredRun.of(self.store, head)
        baseline = self._baseline_of(head.digest, view=view)
        return CommittedVersion(stored.run_at(head.version), head, stored.index, baseline)

    def _view_of_leading_bits(self) -> QuantizedView | None:
        bits = self._leading.bits
        if bits is None:
            return None
        try:
            return self._quantized.view_of(bits.weights)
        except WeightsError:
            return None  # of a version with other tensors

    def _baseline_of(self, digest: Digest | None, **bits: Any) -> QuantizedBaseline:
        return QuantizedBaseline(
            self._leading, self._newest_view, digest=digest, with_way_back=self._with_way_back, **bits
        )


class QuantizedRuns:
    """The quantized runs that go along with a leading one.

    Args:
        leading: That run.
        source: Its source.
        schemes: By their URLs, the schemes of the quantized runs.
        options: Those of the leading run; each quantized run has a state folder in that one.
    """

    def __init__(
        self, leading: LeadingRun, source: CapturedWeights, schemes: Mapping[str, Blockwise], options: RunOptions
    ) -> None:
        self._leading = leading
        self._source = source
        self._baseline = LeadingBaseline(leading.baseline)
        self.by_url: dict[str, QuantizedRun] = {}
        try:
            for url, scheme in schemes.items():
                state = options.state and options.state / f"also-{sha256(url.encode())[:8]}"
                store = self._open_apart(url)
                self.by_url[url] = QuantizedRun(store, scheme, source, self._baseline, replace(options, state=state))
        except BaseException:
            self.close()
            raise

    def _open_apart(self, url: str) -> Store:
        """The store of a run, in which no other one of these is published: it would be fenced off."""
        store = open_writable(url)
        if store.url in [self._leading.url, *(run.store.url for run in self.by_url.values())]:
            store.close()
            raise SessionError(f"also has {url!r}, where another run is published; each needs a store of its own")
        return store

    def capture(self, label: Label, *, at_once: bool) -> Completion:
        """Capture a version of all runs; returns what is left to do, which raises the first error there was."""
        failures: dict[str, Exception] = {}
        completions: dict[str, Completion] = {}
        try:
            for url, capture in self._captures():
                with _noting(failures, url):
                    completions[url] = capture(label, at_once=at_once)
        finally:
            self._source.latest = None
        return functools.partial(self._complete, completions, failures)

    def _captures(self) -> Iterator[tuple[str, Capture]]:
        """How each run is captured; the leading one first."""
        yield self._leading.url, self._leading.capture
        yield from ((url, run.capture) for url, run in self.by_url.items())

    def _complete(self, completions: dict[str, Completion], failures: dict[str, Exception]) -> SyncReport:
        """Commit the leading run first, and then the others, of which the report of the leading one tells."""
        reports: dict[str, SyncReport] = {}
        before = self._leading.position()
        try:
            for url, complete in completions.items():
                self._baseline.is_ahead = self._leading.position() != before
                with _noting(failures, url):
                    reports[url] = complete()
        finally:
            self._baseline.is_ahead = False
            for run in self.by_url.values():
                run.forget_weights()
        return self._tell(reports, failures)

    def _tell(self, reports: dict[str, SyncReport], failures: dict[str, Exception]) -> SyncReport:
        report = reports.pop(self._leading.url, None)
        if report is not None:
            report = self._leading.tell(replace(report, also=reports))
        for url, error in failures.items():
            log.warning("%s: not published: %s: %s", url, type(error).__name__, error)
        for error in [*failures.values()][1:]:
            self._leading.tell_failure(error)  # whoever publishes tells of the first
        for error in failures.values():
            raise error
        assert report is not None
        return report

    def close(self) -> None:
        """Let go of all stores."""
        with ExitStack() as stack:
            for run in self.by_url.values():
                stack.callback(run.close)


@contextmanager
def _noting(failures: dict[str, Exception], url: str) -> Iterator[None]:
    """Note an error instead of raising it."""
    try:
        yield
    except Exception as error:  # noqa: BLE001  # raised again when all runs had their turn
        failures[url] = error
