"""slime and miles: ranks of Megatron publish their own shards, and engines commit them at the update point."""

from __future__ import annotations

import os
from contextlib import contextmanager
from importlib.util import find_spec

import pytest

from sparserl.errors import SessionError
from tests.integrations import slime_checkout, slime_trainer
from tests.integrations.sglang_server import expected, running
from tests.integrations.wheels import wheel
from tests.session.ranks import port, ranks

pytestmark = pytest.mark.skipif(find_spec("megatron") is None, reason="Megatron-core is not installed")


@pytest.fixture(name="sglang", scope="module")
def _sglang():
    return wheel("sglang", "0.5.23")


@pytest.fixture(name="folder")
def _folder(tmp_path, monkeypatch):
    monkeypatch.setenv("SPARSERL_URL", f"file://{tmp_path}/store")
    slime_trainer.save_checkpoint(tmp_path / "model")
    return tmp_path / "model"


class Trainer:
    """The ranks of a trainer."""

    def __init__(self, started) -> None:
        self._pipes = [pipe for _, pipe in started]

    def ask(self, *order):
        """The answers of all ranks."""
        for pipe in self._pipes:
            pipe.send(order)
        answers = []
        for pipe in self._pipes:
            assert pipe.poll(240), "a rank does not answer"
            answers.append(pipe.recv())
            assert not isinstance(answers[-1], tuple), answers[-1][1]  # why the rank has ended
        return answers

    def update(self, version, *servers):
        """Train to a version, and update the engines; returns metrics, or raises an error that all ranks must have."""
        assert set(self.ask("fill", version)) == {None}
        answers = self.ask("update", [getattr(server, "url", server) for server in servers])
        if isinstance(answers[0], Exception):
            assert {str(answer) for answer in answers} == {str(answers[0])}
            raise answers[0]
        return answers[0]


@contextmanager
def trainer(folder, framework="slime", **sizes):
    """A trainer with as many ranks as its kinds of parallelism need."""
    size = sizes.get("tp", 1) * sizes.get("pp", 1)
    with ranks(size, slime_trainer.train, framework, folder, sizes) as started:
        yield Trainer(started)


def held(server):
    return [bits for bits, _ in server.ask("bits")]


def wanted(version):
    return [expected(version, rank, 2) for rank in range(2)]


def test_an_update(sglang, folder):
    with running(sglang) as server, trainer(folder, tp=2) as ranks_:
        for version in range(3):
            ranks_.update(version, server)
            assert held(server) == wanted(version)
            assert server.version == str(version + 1)


@pytest.fixture(name="checkout")
def _checkout() -> str:
    if "SPARSERL_SLIME" not in os.environ:
        pytest.skip("SPARSERL_SLIME names no checkout of slime, which is not on the package index")
    return os.environ["SPARSERL_SLIME"]


@contextmanager
def slimes_trainer(checkout, folder, given=None, **sizes):
    """slime's own trainer."""
    size = sizes.get("tp", 1) * sizes.get("pp", 1)
    with ranks(size, slime_checkout.train, checkout, folder, sizes, port(), given or {}) as started:
        yield Trainer(started)


def test_slimes_own_actor(checkout, folder):
    with running(wheel("sglang", "0.5.15.post1")) as server, slimes_trainer(checkout, folder, tp=2) as ranks_:
        for version in range(3):
            ranks_.update(version, server)
            assert held(server) == wanted(version)
            assert server.version == str(version + 1)


def test_with_a_critic(checkout, folder):
    """Between updates slime gives back the memory of the model, and destroys all process groups."""
    critic = {"offload_train": True, "use_critic": True}
    with running(wheel("sglang", "0.5.15.post1")) as server, slimes_trainer(checkout, folder, critic, tp=2) as ranks_:
        for version in range(3):
            ranks_.update(version, server)
            assert held(server) == wanted(version)
