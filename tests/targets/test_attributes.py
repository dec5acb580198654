"""Tensors beside the parameters of a model are found wherever objects keep them: they would not follow."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from sparserl.targets.attributes import attribute_tensors, attribute_values, changed_values
from sparserl.targets.model_copy import ModelCopy


@dataclass
class Box:
    """An object with an attribute."""

    value: Any

    def method(self):
        return self.value


class Slots:
    """An object without a dictionary."""

    __slots__ = ("__kept", "empty")

    def __init__(self, value):
        self.__kept = value


class MoreSlots(Slots):
    """A class of such ones, with slots of its own."""

    __slots__ = ("more",)


def closed_over(tensor):
    return lambda: tensor


def layer_of(tensor):
    """A module that no other module has registered, with a parameter."""
    layer = torch.nn.Module()
    layer.weight = torch.nn.Parameter(tensor)
    return layer


@pytest.mark.parametrize(
    ("wrap", "label"),
    [
        (lambda tensor: tensor, "0.kept"),
        (lambda tensor: Box([{"bias": tensor}]), "0.kept.value.0.bias"),
        (closed_over, "0.kept.0"),
        (lambda tensor: Box(tensor).method, "0.kept.self.value"),
        (lambda tensor: functools.partial(max, tensor), "0.kept.1"),
        (MoreSlots, "0.kept._Slots__kept"),
        (lambda tensor: lambda x=tensor: x, "0.kept.defaults.0"),
        (lambda tensor: lambda *, x=tensor: x, "0.kept.x"),
        (lambda tensor: [tensor].append, "0.kept.self.0"),
        (lambda tensor: Box(layer_of(tensor)), "0.kept.value._parameters.weight"),
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


def test_an_object_is_searched_from_the_nearest_module():
    """What one module has far away, and another near, is found."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(2, 3))
    shared = Box(Box(Box(torch.ones(2))))
    model[0].kept = Box(Box(Box(Box(shared))))
    model[1].kept = shared
    assert [*attribute_tensors(model, dict(model.named_parameters()))] == ["1.kept.value.value.value"]


def test_types_that_are_not_searched():
    """Objects of the engine have the tensors of other models."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 3))
    model[0].engine = Box(torch.ones(2))
    assert attribute_tensors(model, dict(model.named_parameters()), (Box,)) == {}


@pytest.mark.parametrize("value", [0.5, 2j, True, np.float32(0.5), np.ones(3)])
def test_numbers_are_found(value):
    """Python's and NumPy's, wherever tensors would be found; a change is told."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 3))
    model[0].kept = Box({"scale": value})
    before = attribute_values(model)
    assert "0.kept.value.scale" in before
    assert changed_values(before, attribute_values(model)) == []
    model[0].kept.value["scale"] = value * 0 if not isinstance(value, bool) else not value
    assert changed_values(before, attribute_values(model)) == ["0.kept.value.scale"]


def test_numbers_that_are_not_compared():
    """Counters, arrays that are views of weights, and what is there at one time only; what is no number is itself."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 3))
    model[0].count, model[0].none, model[0].early = 1, float("nan"), 1.0
    model[0].view = model[0].weight.data.numpy()
    before = attribute_values(model)
    model[0].count, model[0].late = 2, 3.0
    del model[0].early
    with torch.no_grad():
        model[0].weight += 1
    assert changed_values(before, attribute_values(model)) == []


def test_what_a_load_changes_in_objects_is_put_back():
    """In containers and objects, however deep: the same objects have what they had."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 3))
    slots = MoreSlots(1)
    slots.more = 2
    objects = {
        "scales": {"a": 1.0, "b": 2.0},
        "list": [1, Box(3)],
        "set": {1},
        "box": Box(Box({"x": 4})),
        "slots": slots,
    }
    model[0].kept = Box(objects)
    copy = ModelCopy(model, {})
    objects["scales"].pop("a")
    objects["scales"]["c"] = 5.0
    objects["list"][1].value = 6
    objects["list"].append(7)
    objects["set"].add(8)
    objects["box"].value.value["x"] = 9
    objects["box"].value.new = 10
    slots.more = 11
    model[0].kept.value = None
    copy.put_back()
    assert model[0].kept.value is objects
    assert [*objects["scales"].items()] == [("a", 1.0), ("b", 2.0)]
    assert (objects["list"], objects["set"], slots.more) == ([1, Box(3)], {1}, 2)
    assert objects["box"] == Box(Box({"x": 4}))
    assert not hasattr(objects["box"].value, "new")
