"""`Observer`: records what changes in a source, without a store."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..parallel import require_threads
from ..session.baseline import Baseline, choose_baseline
from ..session.observing import require_observer
from ..session.options import BaselineOptions
from ..sources import PublishedSource
from ..sources.master_sample import MasterSample, MasterUpdate
from ..sources.modules import as_source, weights_of
from .recorder import Recorder


class Observer:
    """Records what changes in a source between two calls, as a publisher with `observe` does, and sends nothing.

    >>> import numpy as np, tempfile
    >>> weights = {"w": np.zeros(1000, np.float32)}
    >>> observer = Observer(Recorder(f"{tempfile.mkdtemp()}/run.jsonl"), weights)
    >>> observer.observe(version=0)
    >>> weights["w"][7] = 1
    >>> observer.observe(version=1)["changed"]
    [1]

    Args:
        recorder: What writes the recording.
        source: The weights, as a `Publisher` takes them; of a sharded trainer the parts of one rank.
        precision: A name for the precision; by default the most common dtype.
        baseline: Where the bits of the last call are kept, as for a `Publisher`.
        memory: How many bytes they may take; None for as many as they need.
        threads: How many threads to use; None for one a core.

    Raises:
        SessionError: An option cannot be used.
        WeightsError: The source has no tensors, or is no source.
    """

    def __init__(
        self,
        recorder: Recorder,
        source: PublishedSource,
        *,
        precision: str | None = None,
        baseline: str = "auto",
        memory: int | None = None,
        threads: int | None = None,
    ) -> None:
        require_observer("recorder", recorder)
        require_threads(threads)
        self._recorder = recorder
        self._source = as_source(source)
        self._precision = precision
        self._options = BaselineOptions(baseline, memory)
        self._threads = threads
        self._baseline: Baseline | None = None
        self._sample: MasterSample | None = None
        self._sampler = recorder.master_sampler()
        if self._sampler is not None:
            self._sampler.watch(self._source)

    def observe(
        self, *, version: int, seconds: Mapping[str, float] | None = None, reward: float | None = None
    ) -> dict[str, Any] | None:
        """Record what has changed since the last call.

        Args:
            version: The number of this version.
            seconds: The seconds of each stage, as for `Recorder.observe`.
            reward: The reward of the rollouts that this version was learnt from.

        Returns:
            The figures; None from the first call, before which nothing is known.

        Raises:
            TensorMismatch: The source has other tensors, or parts of them, than before.
        """
        weights = weights_of(self._source)
        sample = None if self._sampler is None else self._sampler.take(self._source, weights)
        committed = getattr(self._source, "committed", None)
        line = None
        if self._baseline is None:
            tracked = committed is not None
            self._baseline, _ = choose_baseline(
                weights, self._options, tracked=tracked, observed=True, threads=self._threads
            )
        else:
            changes = self._baseline.capture(weights, threads=self._threads)
            patch = changes.encode(threads=self._threads)
            line = self._recorder.observe_patch(
                patch,
                self._baseline.weights,
                version=version,
                precision=self._precision,
                seconds=seconds,
                reward=reward,
                threads=self._threads,
                masters=None if sample is None else MasterUpdate(self._sample, sample),
            )
            self._baseline.advance(patch, changes, self._threads)
        self._sample = sample
        if committed is not None:
            committed()
        return line
