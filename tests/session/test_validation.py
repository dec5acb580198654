"""Validation: a wrong bit in a target, or in its source, is found after the commit and named."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import sparserl
from sparserl.errors import ChecksumMismatch, TensorMismatch, WeightsError


def weights() -> dict[str, np.ndarray]:
    return {"a": np.arange(60, dtype=np.float32).reshape(5, 12), "b": np.arange(7, dtype=np.uint16)}


def test_a_planted_bit_is_named(tmp_path: Path) -> None:
    """The first element that differs: its tensor, index, position, and both bits; it is mended by the next sync."""
    source = weights()
    target = {name: np.zeros_like(array) for name, array in source.items()}
    planted = False

    def plant() -> None:
        if planted:
            target["b"][6] ^= 0x100
            target["a"].view(np.uint32)[2, 3] ^= 1
            target["a"].view(np.uint32)[4, 0] ^= 2

    with (
        sparserl.Publisher(tmp_path / "store", source) as publisher,
        sparserl.Subscriber(tmp_path / "store", target, after=plant, validate=source) as subscriber,
    ):
        for version in range(2):
            source["a"][0, version] = -1
            publisher.publish()
            assert subscriber.sync().version == version
        planted = True
        source["b"][0] = 9
        publisher.publish()
        message = (
            r"version 2: target 0 differs from the source in 3 element\(s\), first in tensor 'a' at \[2, 3\] "
            r"\(position 27\): the target has 0x41d80001, the source 0x41d80000"
        )
        with pytest.raises(ChecksumMismatch, match=message):
            subscriber.sync()
        planted = False
        subscriber.sync()
        assert all(np.array_equal(source[name], target[name]) for name in source)


def test_a_source_with_parts_and_one_that_goes_on(tmp_path: Path) -> None:
    """Only what both have is compared; a source that is not at the version differs from it."""
    source = weights()
    target = {name: np.zeros_like(array) for name, array in source.items()}
    region = sparserl.Region((1, 2), (3, 4))
    part = sparserl.Part("a", region, source["a"][region.slices])
    rows = sparserl.Shards(sparserl.tensor_table(source), [part])
    with (
        sparserl.Publisher(tmp_path / "store", source) as publisher,
        sparserl.Subscriber(tmp_path / "store", target, validate=rows) as subscriber,
    ):
        publisher.publish()
        source["b"][2] = 0  # not in the part
        assert subscriber.sync().version == 0
        publisher.publish()
        source["a"][3, 5] = 0
        with pytest.raises(ChecksumMismatch, match=r"'a' at \[3, 5\] \(position 41\)"):
            subscriber.sync()


def test_what_is_no_source_is_refused(tmp_path: Path) -> None:
    """By the constructor; other tensors than the run has when they are compared."""
    target = weights()
    for wrong in (7, {}):
        with pytest.raises(WeightsError, match="validate: source is"):
            sparserl.Subscriber(tmp_path / "store", target, validate=wrong)  # type: ignore[arg-type]
    with sparserl.Publisher(tmp_path / "store", weights()) as publisher:
        publisher.publish()
    target["a"][0] = 5
    with (
        sparserl.Subscriber(tmp_path / "store", target, validate={"a": target["a"]}) as subscriber,
        pytest.raises(TensorMismatch, match="the source of validate"),
    ):
        subscriber.sync()
