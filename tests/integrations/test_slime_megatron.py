"""slime and miles: ranks of Megatron publish their own shards, and engines commit them at the update point."""

from __future__ import annotations

import os
from contextlib import contextmanager
from importlib.util import find_spec

import pytest

from sparserl.errors import SessionError
from tests.integrations import slime_trainer
from tests.integrations.sglang_server import expected, running
from tests.integrations.wheels import wheel
from tests.session.ranks import ranks

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
        return answers

    def update(self, version, *servers):
        """Train to a version, and update the engines."""
        self.ask("fill", version)
        answers = self.ask("update", [server.url for server in servers])
        for answer in answers:
            if not isinstance(answer, dict):
                raise answer if isinstance(answer, Exception) else AssertionError(answer)
        return answers


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
