"""The benchmark of publishing fp32 weights in bf16, at a size for tests."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from benchmarks import casting


@pytest.mark.parametrize("to", ["store", "group"])
def test_both_publishers_agree(tmp_path, to):
    """It measures versions that are the same, with the changes that were asked for, and gives their ratio."""
    size = ["--layers", "1", "--hidden", "64", "--inner", "96", "--vocabulary", "50", "--syncs", "1"]
    figures = casting.measure(
        casting.parser().parse_args([*size, "--density", "0.1", "--to", to, "--folder", str(tmp_path)])
    )
    assert figures["parameters"] == 2 * 50 * 64 + 4 * 64 * 64 + 3 * 64 * 96 + 2 * 64
    assert 0.08 < figures["changed"] / figures["parameters"] < 0.12
    assert figures["ratio"] > 0


def test_other_bits_do_not_pass(tmp_path, monkeypatch):
    """Where the two models are not the same, nothing is measured."""
    initialize = casting._initialize

    def wrong(masters, weights):
        initialize(masters, weights)
        next(casting._shards(weights))[0, 0] += 1

    monkeypatch.setattr(casting, "_initialize", wrong)
    size = ["--layers", "1", "--hidden", "64", "--inner", "96", "--vocabulary", "50", "--syncs", "1"]
    with pytest.raises(RuntimeError, match="is not what bf16 weights are"):
        casting.measure(casting.parser().parse_args([*size, "--to", "group"]))
