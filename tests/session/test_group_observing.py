"""Publishers on a group record what they find, and subscribers compare all bits: as those of a store do."""

from __future__ import annotations

import numpy as np
import pytest

import sparserl
from sparserl.errors import ChecksumMismatch, SessionError, WeightsError
from sparserl.record import Recorder, Recording
from tests.session.ranks import ranks, results

dist = pytest.importorskip("torch.distributed")
if not dist.is_available() or not dist.is_gloo_available():
    pytest.skip("torch without Gloo", allow_module_level=True)

CHANGES = (3, 0, 5)


def weights(version):
    """The weights of a version: so many elements differ from the one before."""
    bits = np.arange(400, dtype=np.float32).reshape(20, 20)
    for number, count in enumerate(CHANGES[:version], 1):
        bits.reshape(-1)[:count] -= number
    return {"w": bits}


def publishes(group, folder):
    current = weights(0)
    with pytest.raises(SessionError, match="observe is 3; it must be"):
        sparserl.GroupPublisher(group, current, observe=3)
    recorder = Recorder(f"{folder}/run.jsonl")
    failures = []
    with sparserl.GroupPublisher(group, current, observe=recorder) as publisher:
        for version in range(len(CHANGES) + 1):
            current["w"][...] = weights(version)["w"]
            try:
                publisher.publish()
            except SessionError as error:
                failures.append((version, str(error)))
    return failures


def follows(group):
    """A bit that something else flips during the second commit is found, and the next version mends it."""
    target = {"w": np.zeros((20, 20), np.float32)}
    commits = 0

    def flip():
        nonlocal commits
        if commits == 1:
            target["w"].view(np.uint32)[4, 2] ^= 1
        commits += 1

    with pytest.raises(WeightsError, match="validate: source is of type int"):
        sparserl.GroupSubscriber(group, target, validate=3)
    subscriber = sparserl.GroupSubscriber(group, target, after=flip, validate=lambda: weights(commits - 1))
    with subscriber:
        for version in range(len(CHANGES) + 1):
            if version == 1:
                with pytest.raises(ChecksumMismatch, match=r"1 element\(s\), first in tensor 'w' at \[4, 2\]"):
                    subscriber.sync(60)
            else:
                subscriber.sync(60)
                assert (target["w"] == weights(version)["w"]).all()


def work(rank, group, pipe, folder):
    return publishes(group, folder) if rank == 0 else follows(group)


@pytest.mark.long
def test_recordings_and_validation_of_a_group(tmp_path):
    """The recording has what changed in each version that was committed; what validation finds is told to all ranks."""
    with ranks(2, work, str(tmp_path)) as started:
        failures, _ = results(started)
    assert [version for version, _ in failures] == [1]
    assert "first in tensor 'w' at [4, 2]" in failures[0][1]
    assert [sync.changed for sync in Recording.read(tmp_path / "run.jsonl").syncs] == [[3], [5]]


def tracks(group, folder, memory):
    """A tracked model: with room for a copy its old bits are at hand, without it they are not."""
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    model = torch.nn.Linear(20, 20, bias=False, dtype=torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    source = sparserl.sources.track(optimizer, model)
    recorder = Recorder(f"{folder}/tracked.jsonl")
    with sparserl.GroupPublisher(group, source, observe=recorder, memory=memory) as publisher:
        for version in range(3):
            model.weight.grad = torch.zeros(20, 20, dtype=torch.bfloat16)
            model.weight.grad[version, : 2 + version] = 8.0
            optimizer.step()
            publisher.publish()
        return publisher.baseline


def follow_tracked(group):
    torch = pytest.importorskip("torch")
    with sparserl.GroupSubscriber(group, {"weight": torch.zeros(20, 20, dtype=torch.bfloat16)}) as subscriber:
        for _ in range(3):
            subscriber.sync(60)


def work_tracked(rank, group, pipe, folder, memory):
    return tracks(group, folder, memory) if rank == 0 else follow_tracked(group)


@pytest.mark.long
@pytest.mark.parametrize(("memory", "has_bits"), [(None, True), (10, False)])
def test_a_tracked_source_is_observed_with_its_old_bits(tmp_path, memory, has_bits):
    """As with a publisher to a store: a copy is kept where it fits the memory, and its old bits are counted."""
    with ranks(2, work_tracked, str(tmp_path), memory) as started:
        baseline, _ = results(started)
    assert baseline.startswith("baseline: 800 B in host memory" if has_bits else "baseline: none")
    syncs = Recording.read(tmp_path / "tracked.jsonl").syncs
    assert [sync.changed for sync in syncs] == [[3], [4]]
    assert [bool(sync.steps and sync.classes and len(sync.profiles) > 1) for sync in syncs] == [has_bits] * 2
