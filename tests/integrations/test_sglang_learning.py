"""What the loader for SGLang finds out of a model's own loads, and what it refuses, on one rank."""

from __future__ import annotations

import sys

import pytest
import torch

import sparserl
from sparserl.errors import UnsupportedTensor
from sparserl.integrations import sglang as ours
from sparserl.targets.rank_sums import checkpoint_tensors
from tests.integrations.sglang_server import Model, Tied, bits, checkpoint, control, expected, in_group, marks
from tests.integrations.test_sglang import Trainer, sums_of


def learnt(model, weights):
    """The pieces of a model of one rank that has loaded some weights, or its error."""
    model.load_weights(weights.items())
    model.used = model.use() if hasattr(model, "use") else None
    return ours.learn_pieces(model, checkpoint_tensors(sparserl.tensor_table(weights)))


def test_a_head_of_its_own(tmp_path, monkeypatch):
    """A head that the configuration calls tied, but for which the model has memory of its own, follows the run."""
    for name in ("sglang", "sglang.srt", "sglang.srt.distributed"):
        monkeypatch.setitem(sys.modules, name, None)  # put back after the test
    in_group(0, 1, None)
    trainer, model = Trainer(tmp_path), Model(0, 1)
    model.config.tie_word_embeddings = True
    for version in range(2):
        trainer.publish(version)
        ours.load(model, control(trainer.url))
    assert marks(model)[0].endswith(" 1")
    assert bits(model) == expected(1, 0, 1)
    assert sums_of(model, checkpoint(1)).uncompared == {}


def test_a_head_that_is_the_embeddings():
    """It is left out: one of two would take the other's place."""
    model = Tied(0, 1)
    model.config.tie_word_embeddings = True
    assert {piece.tensor for piece in learnt(model, checkpoint(0))} == checkpoint(0).keys() - {"lm_head.weight"}


class KeepsANumber(Model):
    """It keeps a number of its weights as Python's."""

    def load_weights(self, weights):
        super().load_weights(weights)
        self.scale = self.model.norm.weight.max().item()


class Limits(Model):
    """What it keeps is the same for zeros as for most weights."""

    def __init__(self, *args):
        super().__init__(*args)
        self.limit = torch.ones(1)

    def load_weights(self, weights):
        super().load_weights(weights)
        self.limit.copy_(self.model.norm.weight.abs().max().clamp(min=10) / 10)


class Caches(Model):
    """What it keeps is computed when it is used first, and dropped by a load."""

    def use(self):
        self.doubled = self.model.norm.weight.data * 2

    def load_weights(self, weights):
        super().load_weights(weights)
        self.doubled = None


@pytest.mark.parametrize(("kind", "name"), [(KeepsANumber, "scale"), (Limits, "limit"), (Caches, "doubled")])
def test_what_models_keep_beside_their_weights(kind, name):
    """A number, what seldom changes, and what is computed later: refused by name."""
    with pytest.raises(UnsupportedTensor, match=rf"'\.{name}' is computed from the weights"):
        learnt(kind(0, 1), checkpoint(0))
