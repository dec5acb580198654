"""The tensor table of a run is compressed and read once, and patches go through a store without a file image."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

import sparserl
from sparserl import Publisher, Subscriber
from sparserl.session.store import records
from sparserl.wire import patchfile, table
from tests.session.policy import Policy


@pytest.fixture
def calls(monkeypatch):
    """How often tables were compressed and read, and file images written and opened."""
    counted = Counter()

    def count(owner, name):
        inner = getattr(owner, name)

        def outer(*args, **options):
            counted[name if owner is not patchfile.PatchReader else "opened"] += 1
            return inner(*args, **options)

        monkeypatch.setattr(owner, name, outer)

    table.encoded_table.cache_clear()
    count(table, "compress_table")
    count(records, "decode_table")
    count(patchfile, "decode_table")
    count(patchfile, "encode_header")
    count(patchfile, "encode_footer")
    count(patchfile.PatchReader, "__init__")
    return counted


def test_a_table_is_compressed_and_read_once(tmp_path, calls):
    """Of several publishes and syncs, the first compresses the table, and each side reads it at most once."""
    policy = Policy()
    target = policy.empty()
    with Publisher(tmp_path.as_uri(), policy.weights) as publisher:
        publisher.publish()
        assert (calls["compress_table"], calls["decode_table"] <= 1) == (1, True)
        read_by_publisher = calls["decode_table"]
        with Subscriber(tmp_path.as_uri(), target) as subscriber:
            subscriber.sync()
            assert calls["decode_table"] == read_by_publisher + 1
            for _ in range(3):
                policy.step()
                publisher.publish()
                subscriber.sync()
    assert sparserl.digest(target) == sparserl.digest(policy.weights)
    assert calls == {"compress_table": 1, "decode_table": read_by_publisher + 1}  # and no file image at all


def test_a_saved_patch_is_an_image(tmp_path, calls):
    """The counts above can fail: saving a patch writes one header and one footer, opening it reads them."""
    old = {"w": np.zeros(9, np.float32)}
    sparserl.diff(old, {"w": np.ones(9, np.float32)}).save(tmp_path / "patch")
    assert (calls["encode_header"], calls["encode_footer"], calls["opened"]) == (1, 1, 0)
    sparserl.Patch.open(tmp_path / "patch")
    assert (calls["opened"], calls["decode_table"]) == (1, 1)
