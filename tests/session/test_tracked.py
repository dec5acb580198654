"""Publishing from a source that tracks its changes, with a baseline and without one."""

from __future__ import annotations

import pytest
import torch

import sparserl
from sparserl import Publisher, Subscriber, sources
from sparserl.errors import SessionError, Unavailable
from sparserl.record import Recorder, Recording
from sparserl.session.store.retention import faults
from sparserl.transport.stores.folder import FolderStore

KINDS = ("host", "none")


class Away(FolderStore):
    """A store that can go away."""

    away = False

    def put(self, name, data):
        if self.away:
            raise Unavailable("away")
        super().put(name, data)


def trainer(seed=0):
    """A model with a buffer and a frozen layer, and its optimizer."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(
        torch.nn.Embedding(50, 24), torch.nn.Linear(24, 40), torch.nn.BatchNorm1d(40), torch.nn.Linear(40, 8)
    ).to(torch.bfloat16)
    model[3].requires_grad_(False)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-4)
    return model, optimizer


def step(model, optimizer):
    optimizer.zero_grad()
    model(torch.randint(0, 50, (16,))).float().square().mean().backward()
    optimizer.step()


def copy_of(model):
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def equal(a, b):
    return all(torch.equal(x.reshape(-1).view(torch.uint8), b[n].reshape(-1).view(torch.uint8)) for n, x in a.items())


@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_every_version_is_exact(tmp_path, kind, wait):
    """One step a version or several, buffers that no optimizer knows of, steps while a publish is in flight."""
    model, optimizer = trainer()
    store = Away(tmp_path / "store")
    recorder = Recorder(tmp_path / "run.jsonl")
    source = sources.track(optimizer, model)
    publisher = Publisher(store, source, baseline=kind, anchor_after=0.6, observe=recorder)
    mine = {name: torch.zeros_like(tensor) for name, tensor in model.state_dict().items()}
    subscriber = Subscriber(f"file://{tmp_path}/store", mine)
    kinds = []
    for version in range(9):
        for _ in range(version % 3 + 1):
            step(model, optimizer)
        expected = copy_of(model)
        report = publisher.publish() if wait else None
        background = None if wait else publisher.publish_in_background()
        step(model, optimizer)  # the trainer goes on
        report = report or background.result()
        assert report.version == version
        subscriber.sync()
        assert equal(mine, expected)
        kinds.append(report.changed)
    assert all(0 < changed < 4000 for changed in kinds[1:])
    syncs = Recording.read(recorder.path).syncs
    assert [(sync.version, sync.total) for sync in syncs] == [*enumerate(kinds)][1:]
    assert all(bool(sync.steps) == (kind == "host") for sync in syncs)  # which takes the old bits of all elements
    anchors = [step for step in publisher._committed.index.steps if step.base is None]
    assert len(anchors) > 1  # they were due, and are exact too
    fresh = {name: torch.zeros_like(tensor) for name, tensor in model.state_dict().items()}
    Subscriber(f"file://{tmp_path}/store", fresh).sync()
    assert equal(fresh, expected)
    assert list(faults(store)) == []


@pytest.mark.parametrize("kind", KINDS)
def test_a_failed_publish_loses_no_marks(tmp_path, kind):
    """What a publish that failed would have sent, the next one sends, with what has changed since."""
    model, optimizer = trainer(1)
    store = Away(tmp_path / "store")
    publisher = Publisher(store, sources.track(optimizer, model), baseline=kind)
    publisher.publish()
    for _ in range(2):
        step(model, optimizer)
        store.away = True
        with pytest.raises(Unavailable):
            publisher.publish()
    store.away = False
    model[2].running_mean[3] += 1  # a buffer, and a frozen parameter that something else writes to
    with torch.no_grad():
        model[3].weight[1, 2] += 1
    model[1].weight.data.view(torch.int16)[5, 6] ^= 1  # and a tracked one, behind the tracker's back
    assert publisher.publish().version == 1
    mine = {name: torch.zeros_like(tensor) for name, tensor in model.state_dict().items()}
    Subscriber(f"file://{tmp_path}/store", mine).sync()
    assert equal(mine, copy_of(model))


def test_the_budget_decides(tmp_path):
    """What tracks needs no baseline, and the publisher says so; what is observed has one if it fits."""
    model, optimizer = trainer(2)
    tracked = sources.track(optimizer, model)
    url = f"file://{tmp_path}/store"
    for number, (memory, observe, words) in enumerate(
        (
            (None, None, "baseline: none; the source keeps old bits"),
            (1 << 30, Recorder(tmp_path / "large.jsonl"), "in host memory"),
            (1000, Recorder(tmp_path / "small.jsonl"), "would not fit"),
        )
    ):
        publisher = Publisher(f"{url}-{number}", tracked, memory=memory, observe=observe)
        publisher.publish()
        assert words in publisher.baseline
    with pytest.raises(SessionError, match="a source that tracks"):
        Publisher(f"{url}-3", sources.module(model), memory=1000).publish()
    with pytest.raises(SessionError, match="a source that tracks"):
        Publisher(f"{url}-3", sources.module(model), baseline="none").publish()


def test_a_restart_goes_on_without_a_baseline(tmp_path):
    """What was committed is known from the store, and is kept until the first publish: what changed since is sparse."""
    model, optimizer = trainer(3)
    url, state = f"file://{tmp_path}/store", tmp_path / "state"
    first = Publisher(url, sources.track(optimizer, model), baseline="none", state=state)
    first.publish()
    run = first.run
    del first
    step(model, optimizer)
    second = Publisher(url, sources.track(optimizer, model), baseline="none", state=state)
    report = second.publish()
    assert (report.run, report.version, report.kind) == (run, 1, "patch")
    assert report.digest == sparserl.digest(copy_of(model)).hex
    assert report.changed < report.elements / 2
