"""Anchors follow the profile and the link of their publisher: dense where that is faster, coded where it is not."""

from __future__ import annotations

import numpy as np
import pytest

from sparserl import Bits, Publisher, Subscriber
from sparserl.weights.dtypes import BY_NAME

ELEMENTS = 200_000


@pytest.fixture(autouse=True)
def _never_measured(tmp_path, monkeypatch):
    """The speeds of this machine play no part."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def normal_weights() -> dict[str, Bits]:
    floats = np.random.default_rng(3).normal(0, 0.02, ELEMENTS).astype(np.float32)
    return {"w": Bits((floats.view(np.uint32) >> 16).astype(np.uint16), BY_NAME["bfloat16"])}


@pytest.mark.parametrize(
    ("options", "is_coded"),
    [
        ({}, True),
        ({"profile": "ctx"}, True),
        ({"profile": "raw"}, False),
        ({"link": "10Mbit"}, True),
        ({"link": "400Gbit"}, False),
        ({"profile": "ulp", "link": "400Gbit"}, True),
    ],
)
def test_anchors_follow_profile_and_link(url, options, is_coded) -> None:
    weights = normal_weights()
    with Publisher(url, weights, anchor_after=0, **options) as publisher:
        first = publisher.publish()
        weights["w"].array[5] ^= 1
        publisher.publish()  # with an anchor of its own, since one is due after every patch
    dense_bytes = 2 * ELEMENTS
    assert (first.bytes < 0.8 * dense_bytes) == is_coded
    received = {"w": Bits(np.zeros(ELEMENTS, np.uint16), BY_NAME["bfloat16"])}
    with Subscriber(url, received) as subscriber:
        report = subscriber.sync()
    assert (report.version, report.kind) == (1, "anchor")
    assert (report.bytes < 0.8 * dense_bytes) == is_coded
    assert (received["w"].array == weights["w"].array).all()
