"""A store that keeps every step of a run: training goes on from any of them, bit for bit."""

from __future__ import annotations

import pytest

import sparserl

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.usefixtures("torch_as_before")

STEPS = 8
RESUMED = 3


def build(seed):
    """A small transformer and its optimizer, which has its state before the first step."""
    torch.manual_seed(seed)
    layer = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    model = torch.nn.Sequential(torch.nn.Embedding(11, 16), layer, torch.nn.Linear(16, 11))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for parameter in model.parameters():
        moments = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
        optimizer.state[parameter] = {"step": torch.tensor(0.0), **moments}
    return model, optimizer


def training_state(model, optimizer):
    """Weights and optimizer state, as tensors by name: those that training changes in place."""
    state = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    for number, values in optimizer.state_dict()["state"].items():
        state |= {f"optimizer.{number}.{name}": tensor for name, tensor in values.items()}
    return state


def train_step(model, optimizer, step):
    """One step on data and with dropout that depend on the step alone; the loss."""
    torch.manual_seed(1000 + step)
    tokens = torch.randint(11, (4, 9))
    loss = torch.nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The store of a run that kept every step, its losses, and the digest of its end."""
    url = f"file://{tmp_path_factory.mktemp('run')}/store"
    model, optimizer = build(0)
    losses = []
    with sparserl.Publisher(url, training_state(model, optimizer), keep_anchors=None, threads=1) as publisher:
        publisher.publish(step=0)
        for step in range(1, STEPS + 1):
            losses.append(train_step(model, optimizer, step))
            publisher.publish(step=step)
    return url, losses, sparserl.digest(training_state(model, optimizer))


def test_training_goes_on_from_any_step(run):
    """A fresh model and optimizer that take a version give the same losses, and end with the same bits."""
    url, losses, digest = run
    model, optimizer = build(1)
    assert train_step(*build(1), RESUMED + 1) != losses[RESUMED]
    with sparserl.Subscriber(url, training_state(model, optimizer), name=False, threads=1) as subscriber:
        subscriber.sync(RESUMED)
    resumed = [train_step(model, optimizer, step) for step in range(RESUMED + 1, STEPS + 1)]
    assert resumed == losses[RESUMED:]
    assert sparserl.digest(training_state(model, optimizer)) == digest


def test_every_step_stays(run):
    """Retention removes no version, though most patches are as large as anchors."""
    url, _, digest = run
    model, optimizer = build(1)
    state = training_state(model, optimizer)
    with sparserl.Subscriber(url, state, name=False, threads=1) as subscriber:
        for step in (*range(STEPS, -1, -1), STEPS):
            assert subscriber.sync(step).version == step
    assert sparserl.digest(state) == digest
