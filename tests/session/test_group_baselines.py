"""What a publisher of a process group keeps of the last version, and where its frames are."""

from __future__ import annotations

import numpy as np
import pytest

import sparserl
from sparserl.errors import SessionError
from sparserl.transport.groups.frames import Frame, GpuFrame, read_tail
from tests.session.group_faults import LIMIT
from tests.session.ranks import policy, ranks, results, seal, step, tensors

torch = pytest.importorskip("torch")

CPU = torch.device("cpu")


def kept_in(rank, group, pipe, kind):
    """Three versions with a baseline of a kind."""
    bits = policy(1 + rank)
    if rank:
        with sparserl.GroupSubscriber(group, tensors(bits), timeout=LIMIT) as subscriber:
            return [(subscriber.sync().kind, seal(bits)) for _ in range(3)]
    rng = np.random.default_rng(2)
    versions = []
    with sparserl.GroupPublisher(group, tensors(bits), baseline=kind, timeout=LIMIT) as publisher:
        for _ in range(3):
            kind = publisher.publish().kind
            versions.append((kind, seal(bits)))
            step(bits, rng)
        return versions, publisher.baseline


@pytest.mark.long
@pytest.mark.parametrize("kind", ["host", "device"])
def test_the_baseline_is_where_it_is_asked_for(kind):
    """Versions are exact with any of them; weights in host memory have theirs there."""
    with ranks(2, kept_in, kind) as started:
        (published, label), received = results(started)
    assert received == published
    assert [kind for kind, _ in published] == ["anchor", "patch", "patch"]
    assert label.endswith("in host memory")


def _trained(seed):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(40, 30), torch.nn.Linear(30, 7)).to(torch.bfloat16)


def _bits(model):
    return {name: tensor.detach().view(torch.int16).numpy().copy() for name, tensor in model.state_dict().items()}


def without_bits(rank, group, pipe, writers):
    """A tracked source without a baseline; a receiver that has lost its weights gets all of them."""
    model = _trained(rank if rank not in writers else 0)
    if rank in writers:
        return _publishes_without_bits(rank, group, model, writers)
    seals = []
    for _ in range(2):
        subscriber = sparserl.GroupSubscriber(group, sparserl.targets.module(model), writers=writers, timeout=LIMIT)
        for _ in range(2):
            report = subscriber.sync()
            seals.append((report.version, report.kind, seal(_bits(model))))
        subscriber._line.close()
        with torch.no_grad():
            model[0].weight.zero_()
    return seals


def _publishes_without_bits(rank, group, model, writers):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    source = sparserl.sources.track(optimizer, model)
    if len(writers) > 1:
        source = _Half(source, rank)
    publisher = sparserl.GroupPublisher(group, source, writers=writers, baseline="none", timeout=LIMIT)
    seals, refusals = [], []

    def train():
        optimizer.zero_grad()
        model(torch.ones(2, 40, dtype=torch.bfloat16)).square().sum().backward()
        optimizer.step()

    for publish in (publisher.publish, publisher.publish, None, publisher.publish, publisher.publish):
        train()
        if publish is None:  # the receiver has come again, with other weights
            with pytest.raises(SessionError) as raised:
                publisher.publish_in_background().result()
            refusals.append(str(raised.value))
            continue
        report = publish()
        seals.append((report.version, report.kind, seal(_bits(model))))
    publisher._line.close()
    return seals, refusals, publisher.baseline


class _Half:
    """The tensors of one of two writers."""

    def __init__(self, source, rank):
        self.source = source
        self.rank = rank
        self.committed = source.committed

    def weights(self):
        shards = self.source.weights()
        return sparserl.Shards(shards.table, [part for part in shards.parts if part.tensor.startswith(f"{self.rank}.")])


@pytest.mark.parametrize("writers", [(0,), pytest.param((0, 1), marks=pytest.mark.long)])
def test_without_bits_all_weights_are_sent_again(writers):
    """In the background they may have changed meanwhile: that is refused, with what to do."""
    with ranks(len(writers) + 1, without_bits, writers) as started:
        *published, received = results(started)
    for seals, refusals, label in published:
        assert seals == received
        assert [kind for _, kind, _ in seals] == ["anchor", "patch", "anchor", "patch"]
        assert len(refusals) == 1
        assert label.startswith("baseline: none")
    assert "call publish() once" in published[-1][1][0]


def refused(rank, group, pipe):
    weights = {"w": np.zeros(1000, np.float32)}
    messages = []
    for options in ({"baseline": "disk"}, {"memory": -1}, {"device": "tpu"}, {"device": "meta"}, {"device": "cuda"}):
        with pytest.raises(SessionError) as raised:
            sparserl.GroupPublisher(group, weights, **options)
        messages.append(str(raised.value))
    for options in ({"baseline": "host", "memory": 100}, {"memory": 100}, {"baseline": "none"}):
        with (
            sparserl.GroupPublisher(group, weights, **options) as publisher,
            pytest.raises(SessionError) as raised,
        ):
            publisher.publish()
        messages.append(str(raised.value))
    return messages


@pytest.mark.skipif(torch.cuda.is_available(), reason="refuses a GPU that is not there")
def test_options_that_cannot_be_used():
    """They are refused by name: at once, or where the weights are first seen."""
    with ranks(1, refused) as started:
        (messages,) = results(started)
    wanted = ("baseline is 'disk'", "memory is -1", "device is 'tpu'", "device is 'meta'", "device is 'cuda', but")
    for message, words in zip(
        messages, (*wanted, "the budget is 100", "tracks changes", "tracks changes"), strict=True
    ):
        assert words in message


@pytest.mark.parametrize("kind", [Frame, GpuFrame])
def test_a_frame(kind):
    """A bucket of any length comes out as it went in, and stays when the frame is used again."""
    frame, received = kind(CPU), kind(CPU)
    buckets = [bytes([i]) * size for i, size in enumerate((5, 0, 70_000, 3))]
    out = []
    for index, bucket in enumerate(buckets):
        frame.fill(memoryview(bucket), index)
        received.size = frame.size
        received.tensor().copy_(frame.tensor())
        assert read_tail(received.tail()) == index
        out.append(received.bucket())
    assert [bytes(bucket) for bucket in out] == buckets
