"""Tensors that were looked at before are not looked at again, unless they have moved."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
import torch

from sparserl import Bits, diff, digest
from sparserl.errors import UnsupportedTensor
from sparserl.weights import known, local
from sparserl.weights.dtypes import BY_NAME
from sparserl.weights.local import LocalWeights
from sparserl.weights.objects import object_array
from tests.effort import each

KINDS = ["torch", "parameters", "arrays", "bits"]


def some_weights(kind):
    rows = {"b": np.arange(12, dtype=np.float32).reshape(3, 4), "a": np.ones(5, np.float32)}
    if kind == "torch":
        return {name: torch.from_numpy(row) for name, row in rows.items()}
    if kind == "parameters":
        return {name: torch.nn.Parameter(torch.from_numpy(row)) for name, row in rows.items()}
    if kind == "bits":
        return {name: Bits(row.view(np.uint32), BY_NAME["float32"]) for name, row in rows.items()}
    return rows


@pytest.fixture
def looks(monkeypatch):
    """How often it was found out what tensors are."""
    calls = []
    find_out = local._look
    monkeypatch.setattr(local, "_look", lambda *arguments: calls.append(1) or find_out(*arguments))
    return calls


def is_known(weights):
    return known.find_known(tuple(weights), object_array([*weights.values()])) is not None


@pytest.mark.parametrize("kind", KINDS)
def test_known_tensors_are_looked_at_once(looks, kind):
    weights = some_weights(kind)
    first = LocalWeights.of(weights)
    again = LocalWeights.of(dict(weights))
    assert len(looks) == 1
    assert again is not first
    assert again.lies_where(first)
    assert [place for place, _ in again.parts] == [(0, None), (1, None)]


@each("kind", KINDS, by_day=["torch"])
def test_they_are_forgotten_with_their_last_user(kind):
    weights = some_weights(kind)
    local = LocalWeights.of(weights)
    assert is_known(weights)
    tensor = weakref.ref(weights["a"].array if kind == "bits" else weights["a"])
    del local
    gc.collect()
    assert not is_known(weights)
    del weights
    gc.collect()
    assert tensor() is None


@pytest.mark.parametrize("kind", KINDS)
def test_another_tensor_under_the_same_name_is_another(looks, kind):
    weights = some_weights(kind)
    first = LocalWeights.of(weights)
    others = {**weights, "a": some_weights(kind)["a"]}
    assert not LocalWeights.of(others).lies_where(first)
    assert LocalWeights.of({"b": weights["b"]}).places == [(0, None)]
    assert len(looks) == 3


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_tensors_under_other_names_are_others(kind):
    """Names that sort alike do not make another model of the same tensors the known one."""
    weights = some_weights(kind)
    first = LocalWeights.of(weights)
    renamed = LocalWeights.of({"d": weights["b"], "c": weights["a"]})
    assert renamed.table.names == ("c", "d")
    assert first.table.names == ("a", "b")


@pytest.mark.parametrize(
    "move",
    [
        lambda tensor: tensor.set_(torch.zeros(3, 4)),
        lambda tensor: setattr(tensor, "data", torch.zeros(3, 4)),
        lambda tensor: setattr(tensor, "data", tensor.data.reshape(4, 3).t()),
        lambda tensor: tensor.t_(),
        lambda tensor: tensor.resize_(2, 4),
        lambda tensor: setattr(tensor, "data", tensor.data.view(4, 3)),
        lambda tensor: setattr(tensor, "data", tensor.data.view(torch.int32)),
    ],
    ids=[
        "set",
        "data",
        "the same memory in another order",
        "transposed",
        "smaller",
        "of another shape",
        "of another dtype",
    ],
)
def test_a_tensor_that_has_moved_is_looked_at_again(looks, move):
    weights = some_weights("torch")
    first = LocalWeights.of(weights)
    before = digest(weights)
    move(weights["b"])
    again = LocalWeights.of(weights)
    assert len(looks) == 2
    assert again.parts != first.parts
    assert digest(weights) == digest({name: tensor.clone() for name, tensor in weights.items()}) != before


def test_a_tensor_that_became_another_class_is_looked_at_again(looks):
    class Scaled(torch.Tensor):
        pass

    weights = some_weights("torch")
    local = LocalWeights.of(weights)
    weights["b"].__class__ = Scaled
    assert not is_known(weights)
    del local


@pytest.mark.parametrize("size", [8, 1])
def test_a_tensor_that_became_a_negative_view_is_refused(size):
    """It is where it was, and its bits in memory are others than its numbers'."""
    numbers = torch.randn(size, dtype=torch.complex64)
    weights = {"a": torch.nn.Parameter(numbers.imag, requires_grad=False)}
    local = LocalWeights.of(weights)
    weights["a"].data = numbers.conj().imag
    with pytest.raises(UnsupportedTensor, match="negative view"):
        LocalWeights.of(weights)
    del local


@pytest.mark.parametrize("become", ["negative", "below a byte"])
def test_a_known_tensor_that_became_odd_in_place_is_refused(become):
    """At the same address, contiguous and of the same size, by public functions of torch."""
    if become == "negative":
        numbers = torch.randn(8, dtype=torch.complex64)
        weights = {"w": torch.view_as_real(numbers).reshape(-1)[:8]}
        odd = numbers.conj().imag.as_strided((8,), (1,), 0)
    else:
        weights = {"w": torch.zeros(8, dtype=torch.uint8)}
        odd = torch.empty(0, dtype=torch.uint4).set_(weights["w"].untyped_storage(), 0, (8,), (1,))
    local = LocalWeights.of(weights)
    weights["w"].data = odd
    with pytest.raises(UnsupportedTensor):
        LocalWeights.of(weights)
    del local


def test_tensors_that_lead_back_to_what_is_known_of_them_are_freed():
    """As where a parameter has a loader of its module, and the module a subscriber."""
    weights = some_weights("torch")
    tensor = weakref.ref(weights["a"])
    weights["a"].keeper = LocalWeights.of(weights)
    del weights
    gc.collect()
    assert tensor() is None


def test_a_dict_that_changes_meanwhile(monkeypatch):
    """Names and tensors are of one moment."""
    weights = {"a": np.full(3, 1.0), "x": np.full(3, 2.0)}
    before = digest(dict(weights))

    def change_after(mapping):
        names = tuple(mapping)
        if weights.pop("a", None) is not None:
            weights.update(b=np.full(3, 3.0), c=np.full(3, 4.0))
        return names

    monkeypatch.setattr(local, "tuple", change_after, raising=False)
    assert digest(weights) == before
    assert [*weights] == ["x", "b", "c"]


@pytest.mark.parametrize(
    "change",
    [
        lambda weights: weights.update(a=torch.ones(5)),
        lambda weights: weights.pop("a"),
        lambda weights: weights.update(c=torch.ones(5)),
        lambda weights: weights.update(b=weights.pop("b")),
    ],
    ids=["another tensor", "one less", "one more", "another order"],
)
def test_a_dict_that_has_changed_is_looked_at_again(looks, change):
    weights = some_weights("torch")
    first = LocalWeights.of(weights)
    assert known.find_known_dict(weights) is first.known
    change(weights)
    assert known.find_known_dict(weights) is None
    assert LocalWeights.of(weights).table.names == tuple(sorted(weights))
    assert len(looks) == 2


def test_equal_names_are_as_good_as_the_same(looks):
    weights = {"weight 1": torch.zeros(3), "weight 2": torch.zeros(3)}
    first = LocalWeights.of(weights)
    others = {" ".join(name.split()): tensor for name, tensor in weights.items()}
    assert known.find_known_dict(others) is None
    assert LocalWeights.of(others).known is first.known
    assert len(looks) == 1


def test_a_dict_that_changes_while_its_first_tensor_is_read(monkeypatch, looks):
    weights = some_weights("torch")
    first = LocalWeights.of(weights)

    def change(_):
        raise RuntimeError("dictionary changed size during iteration")

    monkeypatch.setattr(known, "iter", change, raising=False)
    assert LocalWeights.of(weights).known is first.known
    assert len(looks) == 1


def test_a_mapping_whose_values_are_not_its_tensors():
    """What a mapping has is what it gives by name."""

    class Trainable(dict):
        def values(self):
            return [tensor for tensor in super().values() if tensor.requires_grad]

    weights = Trainable(a=torch.zeros(4, requires_grad=True), b=torch.zeros(4))
    first = LocalWeights.of(weights)
    weights["b"] = torch.ones(4)
    assert not LocalWeights.of(weights).lies_where(first)
    assert digest(weights) == digest({"a": torch.zeros(4), "b": torch.ones(4)})
    frozen = Trainable(a=torch.zeros(4))
    assert digest(frozen) == digest({"a": torch.zeros(4)})


@pytest.mark.parametrize("kind", ["torch", "arrays"])
def test_the_same_memory_read_in_another_way_does_not_lie_where_it_was(kind):
    weights = some_weights(kind)
    first = LocalWeights.of(weights)
    assert LocalWeights.of({**weights, "b": weights["b"].reshape(3, 4)}).lies_where(first)
    assert not LocalWeights.of({**weights, "b": weights["b"].reshape(4, 3)}).lies_where(first)
    assert not LocalWeights.of({**weights, "b": weights["b"].reshape(4, 3).T}).lies_where(first)
    assert not LocalWeights.of({"c": weights["b"], "a": weights["a"]}).lies_where(first)


@pytest.mark.parametrize("left", [0, 16])
def test_memory_that_was_freed_or_made_smaller_is_noticed(left):
    weights = {"b": torch.zeros(3, 4)}
    local = LocalWeights.of(weights)
    weights["b"].untyped_storage().resize_(left)
    with pytest.raises(UnsupportedTensor, match="no memory"):
        LocalWeights.of(weights)
    del local


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # NumPy discourages it
@pytest.mark.parametrize("is_known", [False, True])
@pytest.mark.parametrize("dtype", [np.uint8, np.uint32])
def test_bits_whose_array_became_wider_or_narrower_are_refused(is_known, dtype):
    weights = {"a": Bits(np.zeros(8, np.uint16), BY_NAME["bfloat16"])}
    first = LocalWeights.of(weights) if is_known else None
    weights["a"].array.dtype = dtype
    with pytest.raises(UnsupportedTensor, match="'a': bits of bfloat16 must be an array of uint16"):
        digest(weights)
    del first


def test_an_array_that_can_only_be_read_now_is_not_written():
    weights = some_weights("arrays")
    old = {name: array.copy() for name, array in weights.items()}
    local = LocalWeights.of(weights)
    new = {name: array + 1 for name, array in weights.items()}
    weights["a"].flags.writeable = False
    with pytest.raises(UnsupportedTensor, match="read-only"):
        diff(old, new).apply(weights)
    del local


@pytest.mark.parametrize("kind", ["arrays", "bits"])
@pytest.mark.parametrize("change", ["shape", "resize"])
def test_an_array_that_is_read_in_another_way_is_looked_at_again(looks, kind, change):
    weights = some_weights(kind)
    weights["b"] = _copied(weights["b"])  # an array that owns its memory
    first = LocalWeights.of(weights)
    array = weights["b"].array if kind == "bits" else weights["b"]
    if change == "resize":
        array.resize((3000, 400), refcheck=False)
        array.resize((3, 4), refcheck=False)
        array[...] = 7
    else:
        array.resize((4, 3), refcheck=False)
    again = LocalWeights.of(weights)
    assert len(looks) == 2 or (change == "resize" and again.lies_where(first))
    assert digest(weights) == digest({name: _copied(tensor) for name, tensor in weights.items()})


def _copied(tensor):
    return Bits(tensor.array.copy(), tensor.dtype) if isinstance(tensor, Bits) else tensor.copy()
