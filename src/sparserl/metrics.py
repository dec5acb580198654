"""Metrics of a session, for those who watch it: Prometheus, TensorBoard, Weights & Biases.

>>> from sparserl import Publisher, metrics
>>> import numpy as np, tempfile
>>> class Writer:
...     def add_scalar(self, name, value, step):
...         if name == "sparserl/publish/bytes":
...             print(step)
>>> weights = {"w": np.zeros(1000, np.float32)}
>>> _ = Publisher(f"file://{tempfile.mkdtemp()}", weights, callbacks=[metrics.TensorBoard(Writer())]).publish()
0

Each is a `Callback` for `Publisher(…, callbacks=[…])` and `Subscriber(…, callbacks=[…])`; so is
`sparserl.record.Recorder`. The names are listed in docs/how-to/metrics.md.
"""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any
from weakref import WeakKeyDictionary

from .errors import SparserlError
from .session.callbacks import Callback
from .session.report import SyncReport

__all__ = ["Callback", "Prometheus", "TensorBoard", "WandB"]

_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)


_METRICS: WeakKeyDictionary[Any, dict[str, Any]] = WeakKeyDictionary()  # of each registry, by name


class Prometheus(Callback):
    """Counters, gauges and histograms of prometheus-client; objects of one registry share them.

    >>> publisher = sparserl.Publisher(url, weights, callbacks=[metrics.Prometheus()])             # doctest: +SKIP

    Args:
        registry: The registry of prometheus-client to use; None for its global one.

    Raises:
        SparserlError: prometheus-client is not installed.
    """

    def __init__(self, registry: Any = None) -> None:
        try:
            import prometheus_client as client
        except ModuleNotFoundError as error:
            raise SparserlError("this needs prometheus-client: pip install 'sparserl[metrics]'") from error
        registry = client.REGISTRY if registry is None else registry

        metrics = _METRICS.setdefault(registry, {})  # a registry takes each name once

        def metric(kind: Any, name: str, help: str, labels: tuple[str, ...] = (), **more: Any) -> Any:
            if name not in metrics:
                metrics[name] = kind(f"sparserl_{name}", help, labels, registry=registry, **more)
            return metrics[name]

        timed: dict[str, Any] = {"buckets": _SECONDS}
        side = ("side",)
        stage = ("side", "stage")
        self._seconds = {
            "publish": metric(client.Histogram, "publish_seconds", "Seconds that a publish took.", **timed),
            "commit": metric(client.Histogram, "commit_seconds", "Seconds from plan to commit.", **timed),
        }
        self._pause = metric(client.Histogram, "pause_seconds", "Seconds that a commit paused the targets.", **timed)
        self._stages = metric(client.Counter, "stage_seconds", "Seconds spent in each stage.", stage)
        self._bytes = metric(client.Counter, "bytes", "Bytes written to a store or sent, and fetched.", side)
        self._dense = metric(client.Counter, "dense_bytes", "Bytes that all weights would have been.", side)
        self._density = metric(client.Gauge, "density", "Share of the elements that changed, last time.", side)
        self._version = metric(client.Gauge, "version", "The version last published or committed.", side)
        self._behind = metric(client.Gauge, "staleness_versions", "Versions that the targets were behind.")
        self._faults = metric(client.Counter, "faults", "Errors of a publish, a stage or a commit.", ("stage", "error"))
        self._retries = metric(client.Counter, "retries", "Requests to a store that were made again.")
        self._upkeep = metric(client.Counter, "upkeep_failures", "Upkeep after a publish that failed.")

    def published(self, report: SyncReport) -> None:
        self._observe("publish", report)
        self._upkeep.inc(len(report.notes))

    def committed(self, report: SyncReport) -> None:
        self._observe("commit", report)
        self._pause.observe(report.seconds["commit"])
        if report.behind is not None:
            self._behind.set(report.behind)

    def failed(self, stage: str, error: BaseException) -> None:
        self._faults.labels(stage, type(error).__name__).inc()

    def retried(self) -> None:
        self._retries.inc()

    def _observe(self, side: str, report: SyncReport) -> None:
        self._seconds[side].observe(sum(report.seconds.values()))
        for stage, seconds in report.seconds.items():
            self._stages.labels(side, stage).inc(seconds)
        self._bytes.labels(side).inc(report.bytes)
        self._dense.labels(side).inc(report.dense_bytes)
        self._density.labels(side).set(report.density)
        self._version.labels(side).set(report.version)


class _Scalars(Callback):
    """Named numbers about each version, to be written somewhere."""

    def __init__(self) -> None:
        self._count: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._version = 0

    def published(self, report: SyncReport) -> None:
        self._observe("publish", report, {"upkeep_failures": len(report.notes)} if report.notes else {})

    def committed(self, report: SyncReport) -> None:
        more: dict[str, float] = {"pause_seconds": report.seconds["commit"]}
        if report.behind is not None:
            more["staleness_versions"] = report.behind
        self._observe("commit", report, more)

    def failed(self, stage: str, error: BaseException) -> None:  # noqa: ARG002  # a scalar has no room for it
        self._add(f"faults/{stage}")

    def retried(self) -> None:
        self._add("retries")

    def write(self, values: dict[str, float], version: int) -> None:
        raise NotImplementedError

    def _observe(self, side: str, report: SyncReport, more: dict[str, float]) -> None:
        self._version = report.version
        values = {
            "seconds": sum(report.seconds.values()),
            "bytes": report.bytes,
            "density": report.density,
            "ratio": report.dense_bytes / max(1, report.bytes),
            **{f"{stage}_stage_seconds": seconds for stage, seconds in report.seconds.items()},
            **more,
        }
        self.write({f"sparserl/{side}/{name}": value for name, value in values.items()}, report.version)

    def _add(self, name: str) -> None:
        with self._lock:
            self._count[name] += 1
        self.write({f"sparserl/{name}": self._count[name]}, self._version)


class TensorBoard(_Scalars):
    """Scalars by version for TensorBoard.

    >>> publisher = sparserl.Publisher(url, weights, callbacks=[metrics.TensorBoard("logs/")])     # doctest: +SKIP

    Args:
        writer: A `SummaryWriter`, or anything that has its `add_scalar`; or the folder to write to.
    """

    def __init__(self, writer: Any) -> None:
        super().__init__()
        if not hasattr(writer, "add_scalar"):
            from torch.utils.tensorboard import SummaryWriter

            writer = SummaryWriter(writer)
        self.writer = writer

    def write(self, values: dict[str, float], version: int) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, version)


class WandB(_Scalars):
    """Scalars for Weights & Biases; `sparserl/version` is among them.

    No step is given to `log`, since the trainer counts its own.

    >>> publisher = sparserl.Publisher(url, weights, callbacks=[metrics.WandB(wandb.run)])         # doctest: +SKIP

    Args:
        run: A run of Weights & Biases, or anything that has its `log`.
    """

    def __init__(self, run: Any) -> None:
        super().__init__()
        self.run = run

    def write(self, values: dict[str, float], version: int) -> None:
        self.run.log({**values, "sparserl/version": version})
