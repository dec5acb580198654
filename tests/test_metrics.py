"""Metrics, read back by the programs that they are for."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

import sparserl
from sparserl import metrics
from sparserl.errors import NotFound, SparserlError
from tests.transport.serve_program import ask, serving


def session(folder: Path, callback: metrics.Callback, turns: int = 3) -> list[sparserl.SyncReport]:
    """A publisher and a subscriber with one callback; one attempt to stage before there is anything fails."""
    url, weights = f"file://{folder}/store", {"w": np.arange(5000, dtype=np.float32)}
    reports = []
    with sparserl.Subscriber(url, {"w": np.zeros(5000, np.float32)}, callbacks=[callback]) as subscriber:
        with pytest.raises(NotFound):
            subscriber.sync()
        with sparserl.Publisher(url, weights, callbacks=[callback]) as publisher:
            for turn in range(turns):
                weights["w"][turn * 10 : turn * 10 + 10] *= 2
                reports += [publisher.publish(), subscriber.sync()]
    return [report for report in reports if report is not None]


def test_prometheus(tmp_path: Path) -> None:
    """A registry of the real client adds up what the reports say, and two registries do not meet."""
    client = pytest.importorskip("prometheus_client")
    from prometheus_client.parser import text_string_to_metric_families as families

    registry, other = client.CollectorRegistry(), client.CollectorRegistry()
    callback = metrics.Prometheus(registry)
    metrics.Prometheus(other)
    reports = session(tmp_path, callback)
    callback.retried()
    text = client.generate_latest(registry).decode()
    found = {
        (sample.name, *sorted(sample.labels.values())): sample.value
        for family in families(text)
        for sample in family.samples
    }
    for side, mine in (("publish", reports[::2]), ("commit", reports[1::2])):
        assert found["sparserl_bytes_total", side] == sum(report.bytes for report in mine)
        assert found["sparserl_dense_bytes_total", side] == 3 * 20_000
        assert found["sparserl_density", side] == mine[-1].density
        assert found["sparserl_version", side] == 2
        assert found[f"sparserl_{side}_seconds_count",] == 3
        total = sum(sum(report.seconds.values()) for report in mine)
        assert math.isclose(found[f"sparserl_{side}_seconds_sum",], total)
    assert math.isclose(found["sparserl_pause_seconds_sum",], sum(r.seconds["commit"] for r in reports[1::2]))
    assert found["sparserl_stage_seconds_total", "encode", "publish"] > 0
    assert found["sparserl_staleness_versions",] == 1
    assert found["sparserl_faults_total", "NotFound", "stage"] == 1
    assert found["sparserl_retries_total",] == 1
    assert b"sparserl_bytes_total{" not in client.generate_latest(other)


def test_prometheus_is_asked_for_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the package the error names the extra."""
    monkeypatch.setitem(__import__("sys").modules, "prometheus_client", None)
    with pytest.raises(SparserlError, match=r"sparserl\[metrics\]"):
        metrics.Prometheus()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of tensorboard's own making
@pytest.mark.parametrize("by_name", [False, True])
def test_tensorboard(tmp_path: Path, by_name: bool) -> None:
    """Files that SummaryWriter wrote, read by TensorBoard: a scalar for every version."""
    pytest.importorskip("tensorboard")
    torch_tensorboard = pytest.importorskip("torch.utils.tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = str(tmp_path / "logs")
    callback = metrics.TensorBoard(folder if by_name else torch_tensorboard.SummaryWriter(folder))
    reports = session(tmp_path, callback)
    callback.writer.close()
    found = EventAccumulator(folder).Reload()
    published = [(event.step, event.value) for event in found.Scalars("sparserl/publish/bytes")]
    assert published == [(report.version, report.bytes) for report in reports[::2]]
    pauses = [event.value for event in found.Scalars("sparserl/commit/pause_seconds")]
    assert pauses == pytest.approx([report.seconds["commit"] for report in reports[1::2]], rel=1e-6)
    assert [event.value for event in found.Scalars("sparserl/commit/staleness_versions")] == [1, 1]
    assert [event.value for event in found.Scalars("sparserl/faults/stage")] == [1]
    names = {"seconds", "bytes", "density", "ratio", "encode_stage_seconds", "upload_stage_seconds"}
    assert names <= {tag.removeprefix("sparserl/publish/") for tag in found.Tags()["scalars"]}


def test_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real run that stays offline has the last value of everything in its summary."""
    wandb = pytest.importorskip("wandb", reason="wandb takes 100 MB, and is not among the packages of the tests")
    monkeypatch.chdir(tmp_path)
    with wandb.init(mode="offline", dir=str(tmp_path), settings=wandb.Settings(console="off")) as run:
        reports = session(tmp_path, metrics.WandB(run))
        summary = dict(run.summary)
    assert summary["sparserl/publish/bytes"] == reports[-2].bytes
    assert summary["sparserl/commit/pause_seconds"] == reports[-1].seconds["commit"]
    assert summary["sparserl/version"] == 2
    assert summary["sparserl/faults/stage"] == 1


def test_what_has_log_will_do(tmp_path: Path) -> None:
    """Anything that takes a dictionary gets one for each report."""

    class Run:
        lines: list[dict[str, float]] = []  # noqa: RUF012

        def log(self, values: dict[str, float]) -> None:
            self.lines.append(values)

    reports = session(tmp_path, metrics.WandB(Run()))
    faults, *others = Run.lines
    assert faults == {"sparserl/faults/stage": 1, "sparserl/version": 0}
    assert [line["sparserl/version"] for line in others] == [report.version for report in reports]
    assert [line["sparserl/publish/ratio"] for line in others[::2]] == [r.dense_bytes / r.bytes for r in reports[::2]]


def test_the_server_has_metrics(tmp_path: Path) -> None:
    """/metrics of a real server is what Prometheus reads: requests by status, bytes, who waits, the version."""
    pytest.importorskip("starlette")
    pytest.importorskip("uvicorn")
    parser = pytest.importorskip("prometheus_client.parser")

    sent = []  # bytes of each answer that has any

    def read(url: str) -> dict[tuple[str, ...], float]:
        answer = ask(url, "/metrics", authorization="Bearer secret")
        assert (answer.status, answer.headers["content-type"]) == (200, "text/plain; version=0.0.4; charset=utf-8")
        assert answer.headers["cache-control"] == "no-store"
        sent.append(len(answer.body))
        families = list(parser.text_string_to_metric_families(answer.body.decode()))
        assert all(family.documentation and family.type in ("counter", "gauge") for family in families)
        return {(s.name, *s.labels.values()): s.value for family in families for s in family.samples}

    (tmp_path / "tokens").write_text("secret\n")
    store = tmp_path / "store"
    store.mkdir()
    with serving(store, "--token-file", tmp_path / "tokens") as (url, _):
        assert ("sparserl_serve_version",) not in read(url)
        assert ask(url, "/metrics").status == 401
        weights = {"w": np.zeros(100, np.float32)}
        with sparserl.Publisher(f"file://{store}", weights) as publisher:
            publisher.publish()
            weights["w"][0] = 1
            publisher.publish()
        sent.append(len(ask(url, "/head.json", authorization="Bearer secret").body))
        assert ask(url, "/nothing", authorization="Bearer secret").status == 404
        found = read(url)
    assert found["sparserl_serve_version",] == 1
    assert found["sparserl_serve_waiting",] == 0
    assert found["sparserl_serve_requests_total", "200"] == 2
    assert found["sparserl_serve_requests_total", "401"] == 1
    assert found["sparserl_serve_requests_total", "404"] == 1
    assert found["sparserl_serve_sent_bytes_total",] == sum(sent[:-1])
