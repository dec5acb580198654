"""Tensors beside the parameters of a model are found wherever objects keep them: they would not follow."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from sparserl.targets.attributes import attribute_tensors


@dataclass
class Box:
    """An object with an attribute."""

    value: Any

    def method(self):
        return self.value


def closed_over(tensor):
    return lambda: tensor


@pytest.mark.parametrize(
    ("wrap", "label"),
    [
        (lambda tensor: tensor, "0.kept"),
        (lambda tensor: Box([{"bias": tensor}]), "0.kept.value.0.bias"),
        (closed_over, "0.kept.0"),
        (lambda tensor: Box(tensor).method, "0.kept.self.value"),
        (lambda tensor: functools.partial(max, tensor), "0.kept.1"),
        (lambda tensor: Box(Box(Box(Box(tensor)))), "0.kept.value.value.value.value"),
    ],
)
def test_tensors_are_found(wrap, label):
    """In containers, attributes, closures and bound methods; views of the weights are not looked for."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 3))
    model[0].kept = wrap(model[0].weight.data.clone())
    model[0].view = wrap(model[0].weight.data.t())
    assert [*attribute_tensors(model, dict(model.named_parameters()))] == [label]


def test_objects_that_refer_to_each_other():
    """Circles end, and what several modules share is found once."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(2, 3))
    shared = Box(torch.ones(2))
    shared.back = shared
    for layer in model:
        layer.kept = shared
        layer.other = model
    assert [*attribute_tensors(model, dict(model.named_parameters()))] == ["0.kept.value"]
