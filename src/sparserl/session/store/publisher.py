"""The trainer's side: every publish makes one more version, which is seen when the head moves and not before."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from ...errors import SessionError
from ...parallel import Progress
from ...sources import PublishedSource
from ...sources.modules import as_source
from ...transport.stores.base import Store
from ...weights.memory import Weights
from ...weights.shards import Shards
from ...weights.table import TensorTable
from ..background import BackgroundPublish, BackgroundSlot
from ..callbacks import Callback
from ..observing import Observing, PatchObserver
from ..options import BaselineOptions, EncodingOptions, require_count, require_number, require_timeout
from ..report import SyncReport
from .fields import checked_clock
from .label import Label
from .maintenance import RetentionOptions
from .quantized_runs import CapturedWeights, LeadingRun, QuantizedRuns, Schemes, checked_schemes, leading_options
from .run_publisher import Completion, RunOptions, RunPublisher
from .signing import PublicKeys, PublisherKeys


class Publisher(RunPublisher):
    """Publishes the versions of one run to a store, for any number of subscribers.

    One publisher at a time may write to a store: a second one fences the first off. Several threads may call a
    publisher: their calls take turns.

    >>> import numpy as np, sparserl, tempfile
    >>> weights = {"w": np.zeros(1000, np.float32)}
    >>> publisher = sparserl.Publisher(f"file://{tempfile.mkdtemp()}", weights)
    >>> publisher.publish().kind
    'anchor'
    >>> weights["w"][7] = 1
    >>> report = publisher.publish()
    >>> (report.version, report.changed)
    (1, 1)

    Args:
        url: Where to publish: a folder, an `s3://`, `gs://` or `az://` URL, or an open store.
        source: The weights, which may change between calls: a torch module, a mapping from names to tensors or arrays,
            a function that returns one, the `Shards` of one rank, or a source such as
            `sparserl.sources.module(model, cast=torch.bfloat16)`.
        signing_key: The secret Ed25519 key to sign heads with (see `sparserl keygen`); None to sign nothing.
        trusted_keys: Further public keys whose runs this publisher may go on with, such as a key that was replaced.
        files: Files that travel with the weights, by name or in a folder, beside those that the source brings along.
        state: A folder on this machine that survives a restart. With it, a publisher that was killed goes on with its
            run from the anchor that it saved there, and fetches only the patches since then. Without it, or when it
            does not fit the run in the store, the publisher fetches the anchor too. With it, a head that is older than
            what was published is refused. One publisher at a time has the folder; a second one is refused. Of several
            writers each has a folder in it, and saves its own shards.
        new_run: Whether to leave the run that the store has, and begin another: subscribers then fetch all weights
            again. Without it, a publisher goes on with that run, or is refused where it cannot.
        also: Quantized runs of the same weights, for other rollouts: by the URL of each, its scheme, as
            `{"s3://bucket/run-7-fp8": "fp8_blockwise"}` (see `sparserl.sources.quantized`). Every publish makes a
            version of each. They need no baseline of their own, but this run does. All other options are theirs too.
        profile: How patches are encoded: `raw`, `gap`, `ulp`, `ctx`, or `auto`, which takes the smallest or, with
            `link`, the quickest.
        link: The bandwidth between the publisher and its subscribers, such as `25Gbit`, by which `auto` chooses.
            For None, it takes the smallest.
        anchor_after: An anchor is written when the patches since the last one add up to this many times its bytes.
        keep_anchors: How many anchors stay in the store, with the versions since the oldest; None to keep all versions,
            and earlier runs.
        ladder: Squashed patches are written over so many versions, twice as many and so on, from the first number up
            to the second, where they take less than the patches they stand for. Late subscribers take them. None for
            no squashed patches.
        grace: How many seconds objects stay in the store after nothing refers to them any more.
        lease: How many seconds a subscriber that has not been heard of still keeps old versions from being removed.
        threads: How many threads to use; None for one a core.
        progress: Called with the number of bytes whenever some have been compared or sent.
        writers: The process group of a sharded trainer, each rank of which has a publisher with the `Shards` it holds.
            All make their publishers and call `publish` in step; each uploads its own buckets, and rank 0 moves the
            head when all are there. After a restart they may be more or fewer.
        timeout: How many seconds writers wait for one another; one that was stopped is noticed within 30 seconds.
        baseline: Where the bits of the last version are kept, to find changes: `host` for host memory; `device` for
            where the weights are, so that changes on a GPU are found and encoded there; `none` for a source that keeps
            the old bits of what changes itself (see `sparserl.sources.track`). `auto` takes `none` for such a source,
            unless there is an observer and `memory` has room for a copy, and `host` for others.
        memory: How many bytes a baseline may take in this process; None for as many as it needs.
        observe: A `sparserl.record.Recorder` of statistics from what has changed; of several writers each has its own.
        callbacks: What is told about every publish, and about what went wrong; see `sparserl.metrics`.
        clock: Gives the time in seconds since 1970.

    Raises:
        SessionError: An option cannot be used, the store can only be read, or the state folder is in use.
        WeightsError: The source has no tensors, or is no source.
        StoreError: The store cannot be reached.
    """

    def __init__(
        self,
        url: str | Path | Store,
        source: PublishedSource,
        *,
        signing_key: str | None = None,
        trusted_keys: PublicKeys | None = None,
        files: Mapping[str, bytes] | str | Path | None = None,
        state: str | Path | None = None,
        new_run: bool = False,
        also: Schemes | None = None,
        profile: str = "auto",
        link: str | None = None,
        anchor_after: float = 1.0,
        keep_anchors: int | None = 2,
        ladder: tuple[int, int] | None = (8, 64),
        grace: float = 600.0,
        lease: float = 120.0,
        threads: int | None = None,
        progress: Progress | None = None,
        writers: Any = None,
        timeout: float = 600.0,
        baseline: str = "auto",
        memory: int | None = None,
        observe: PatchObserver | None = None,
        callbacks: Sequence[Callback] = (),
        clock: Callable[[], float] = time.time,
    ) -> None:
        require_timeout("timeout", timeout)
        published = as_source(source)
        encoding = EncodingOptions(profile, link, threads, progress)
        options = RunOptions(
            keys=PublisherKeys.of(signing_key, trusted_keys),
            files=files,
            state=None if state is None else Path(state),
            new_run=new_run,
            encoding=encoding,
            baseline=BaselineOptions(baseline, memory),
            retention=RetentionOptions(anchor_after, keep_anchors, ladder, grace, lease),
            writers=writers,
            timeout=timeout,
            clock=checked_clock(clock),
        )
        options.clock()
        schemes = checked_schemes(also)
        options = leading_options(options, schemes)
        self._captured_weights = CapturedWeights(published)
        self._also: QuantizedRuns | None = None
        self._turn = threading.RLock()  # of the thread whose call is at work
        self._background = BackgroundSlot()
        self._is_closed = False
        super().__init__(url, published, options, Observing(observe, published), callbacks)
        if schemes:
            try:
                self._also = QuantizedRuns(self._as_leading_run(), self._captured_weights, schemes, options)
            except BaseException:
                self._let_go()
                raise

    def publish(self, *, step: int | None = None, note: str | None = None) -> SyncReport:
        """Publish the weights as they are now, as the next version.

        Args:
            step: The training step of these weights, which `sparserl log` shows. Several writers must publish the
                weights of one step: ranks that name different ones are refused.
            note: A few words about the version, which `sparserl log` shows: up to 200 characters in one line.

        Returns:
            What was published, how large it is, and how long each stage took.

        Raises:
            Fenced: Another publisher has taken over; this one must not go on.
            StoreError: The store failed; nothing was published, and the next publish has these changes too.
            SparserlError: Something else went wrong, perhaps with an earlier publish in the background.
        """
        with self._turn:
            self._require_open()
            self._background.finish()
            with self._callbacks.failures("publish"), self._writers.call():
                return self._capture_all(Label.of(step, note), at_once=False)()

    def publish_in_background(self, *, step: int | None = None, note: str | None = None) -> BackgroundPublish:
        """Publish the weights as they are now, and return as soon as the changes are captured.

        The trainer may go on while the changes are encoded and sent. The next call of the publisher waits for that,
        and raises what went wrong with it.

        Args:
            step: As for `publish`.
            note: As for `publish`.

        Returns:
            The publish that is running; its `result()` waits for the report.

        Raises:
            SparserlError: The changes could not be captured, or an earlier publish in the background failed.
        """
        with self._turn:
            self._require_open()
            self._background.finish()
            with self._callbacks.failures("publish"), self._writers.call():
                complete = self._capture_all(Label.of(step, note), at_once=True)

            def work() -> SyncReport:
                with self._callbacks.failures("publish"), self._writers.call(begin=False):
                    return complete()

            return self._background.start(work)

    def wait(self, version: int, subscribers: int, timeout: float = 600.0, url: str | None = None) -> int:
        """Wait until so many subscribers hold a version or a later one.

        Args:
            version: The version that they should hold, or a later one.
            subscribers: How many subscribers to wait for.
            timeout: How many seconds to wait at most.
            url: The URL of one of the runs of `also`, whose subscribers are meant.

        Returns:
            How many subscribers hold it: fewer than `subscribers` if time is up.
        """
        require_count("subscribers", subscribers, 0)
        require_number("timeout", timeout, 0)
        if url is None:
            return self._run_writer.wait(version, subscribers, timeout)
        if self._also is None or url not in self._also.by_url:
            raise SessionError(f"url is {url!r}, which is none of the runs of also=")
        return self._also.by_url[url].wait(version, subscribers, timeout)

    def close(self) -> None:
        """Wait for a publish in the background, and let go of the store.

        Raises:
            SparserlError: The publish in the background failed, and nobody was told yet.
        """
        try:
            with self._turn:
                self._background.finish()
        finally:
            self._is_closed = True
            with ExitStack() as stack:
                stack.callback(self._let_go)
                if self._also is not None:
                    stack.callback(self._also.close)

    def __enter__(self) -> Publisher:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _require_open(self) -> None:
        if self._is_closed:
            raise SessionError("the publisher is closed; make another one, which continues the run")

    def _capture_all(self, label: Label, *, at_once: bool) -> Completion:
        """Capture a version of this run, and of those that go along with it."""
        if self._also is not None:
            return self._also.capture(label, at_once=at_once)
        complete = self._capture(label, at_once=at_once)
        return lambda: self._tell(complete())

    def _as_leading_run(self) -> LeadingRun:
        """The run, as those see it that go along with it."""
        return LeadingRun(
            url=self.store.url,
            baseline=self._host_baseline,
            position=lambda: (self.run, self.version),
            capture=self._capture,
            tell=self._tell,
            tell_failure=self._tell_failure,
        )

    def _live_weights(self, table: TensorTable | None = None) -> Weights | Shards:
        weights = super()._live_weights(table)
        if self._also is not None:
            self._captured_weights.latest = weights
        return weights
