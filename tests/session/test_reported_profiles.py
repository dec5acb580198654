"""Reports say which profile a patch is in, and why."""

from __future__ import annotations

from dataclasses import asdict

import numpy as np
import pytest

from sparserl import Bits, Publisher, Subscriber
from sparserl.session.profiles import Takers
from sparserl.weights.dtypes import BY_NAME


@pytest.mark.parametrize(
    ("options", "taken"),
    [
        ({}, "ctx (smallest)"),
        ({"link": "10000Gbit"}, "raw (quickest over 10000Gbit)"),
        ({"profile": "gap"}, "gap (as asked)"),
    ],
)
def test_reports_say_which_profile_and_why(url, options, taken, tmp_path, monkeypatch):
    """Without a link the smallest, however near a receiver is; line and values of a report have the reason."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # no speeds are kept
    rng = np.random.default_rng(3)
    array = (rng.standard_normal(1 << 16).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    mine = {"w": Bits(np.zeros_like(array), BY_NAME["bfloat16"])}
    with Publisher(url, {"w": Bits(array, BY_NAME["bfloat16"])}, anchor_after=100, **options) as publisher:
        anchor = publisher.publish()
        assert (anchor.profile, "version 0: anchor, " in anchor.summary) == ("", True)
        subscriber = Subscriber(url, mine)
        for version in (1, 2):
            subscriber.sync()
            publisher._maintenance.receivers.look()
            array += (rng.random(array.size) < 0.2) & ((array & 0x7FFF) < 0x3F00)
            patch = publisher.publish()
            assert patch.profile == asdict(patch)["profile"] == taken
            assert str(patch).startswith(f"version {version}: patch in {taken}, ")
    received = subscriber.sync()
    assert received.profile == taken.split(" ")[0]
    assert str(received).startswith(f"version 2: patch in {received.profile}, ")
    assert (mine["w"].array == array).all()


def test_reports_say_that_receivers_take_few_profiles(tmp_path):
    """What limits a choice is said with it."""
    with Publisher(tmp_path / "store", {"w": np.zeros(3, np.float32)}) as publisher:
        chosen = publisher._maintenance.receivers
        chosen._choose([Takers(("gap", "raw"), has_holding=False, name="one")], can_cut=False)
        assert chosen.reason(None) == "smallest, of gap, raw"
    with Publisher(tmp_path / "other", {"w": np.zeros(3, np.float32)}, profile="ulp") as publisher:
        chosen = publisher._maintenance.receivers
        takers = [
            Takers((name,), has_holding=False, name=name, total=total) for name, total in (("gap", 1), ("raw", 2))
        ]
        chosen._choose(takers, can_cut=True)
        assert (chosen.profile, chosen.reason(None)) == ("raw", "what most receivers take")
