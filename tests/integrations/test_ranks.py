"""Engines of one rank and of several follow a run: all ranks hold one version, bit for bit, whatever fails on one."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

import sparserl
from sparserl.errors import ChecksumMismatch, CommitFailed, NotRetained, SessionError, TensorMismatch, Truncated
from sparserl.plan import buckets
from sparserl.session import receiver
from sparserl.session.store import receivers as receivers_module
from sparserl.session.store.holding_records import HoldingRecord
from sparserl.session.store.retention import collect
from sparserl.targets.engine import EngineTarget
from sparserl.weights import holdings as holdings_module
from sparserl.weights.holdings import Holdings
from tests.class_choice import always
from tests.integrations.fleet import fleet
from tests.targets.engines import checkpoint


@pytest.mark.parametrize(("ranks", "profile"), [(1, "ctx"), (2, "ulp"), (4, "raw"), (2, "gap")])
def test_ranks_follow(tmp_path, ranks, profile):
    """Version by version, from patches; the bits that the engine was loaded with are known for version 0."""
    with fleet(tmp_path, ranks, profile=profile) as it:
        assert it.all(lambda s: s.commit_version()) == [None] * ranks
        for seed in range(3):
            version = it.train(seed)
            reports = it.all(lambda s, version=version: s.commit_version(version))
            assert [(report.version, report.kind) for report in reports] == [(version, "patch")] * ranks
            it.require_exact()
        assert it.all(lambda s: s.audit()) == [None] * ranks


@pytest.mark.parametrize(("ranks", "profile"), [(2, "ctx"), (4, "ctx"), (2, "auto"), (2, "ulp"), (4, "gap")])
def test_patches_are_cut_along_ranks(tmp_path, ranks, profile, caplog, monkeypatch):
    """Ranks say by their leases which parts they have; each fetches only what is for it, in any profile."""
    monkeypatch.setattr(buckets, "choose_classes", always)
    caplog.set_level("INFO", "sparserl.session")
    with fleet(tmp_path, ranks, profile=profile) as it:
        assert it.all(lambda s: s.commit_version()) == [None] * ranks
        for seed in range(3):
            it.train(seed)
            reports = it.all(lambda s: s.commit_version())
            assert {report.kind for report in reports} == {"patch"}
            it.require_exact()
            step = it.last_patch()
            assert max(report.bytes for report in reports) < step.bytes
            assert sum(report.bytes for report in reports) >= step.bytes
            assert bool(step.holdings) == ("ctx" in step.profiles)
        if profile == "ctx":
            assert step.profiles == ("ctx",)
        assert it.all(lambda s: s.audit()) == [None] * ranks
        assert "a receiver has parts of the weights: patches are cut along them from now on" in caplog.text


def test_engines_of_different_sizes_follow_one_run(tmp_path, monkeypatch):
    """Patches are cut along the parts of all of them."""
    monkeypatch.setattr(buckets, "choose_classes", always)
    with (
        fleet(tmp_path, 2, profile="ctx") as it,
        fleet(tmp_path, 4, other=it) as larger,
        fleet(tmp_path, 1, other=it) as alone,
    ):
        fleets = it, larger, alone
        for every in fleets:
            assert every.all(lambda s: s.commit_version()) == [None] * len(every.engines)
        for seed in range(3):
            it.train(seed)
            for every in fleets:
                assert {report.kind for report in every.all(lambda s: s.commit_version())} == {"patch"}
                every.require_exact()
        step = it.last_patch()
        assert step.profiles == ("ctx",)
        assert len(step.holdings) == 6


def test_engines_that_are_gone_are_forgotten(tmp_path, monkeypatch):
    """A day after they were heard of, patches are not cut for them; that their records are collected does no harm."""
    monkeypatch.setattr(buckets, "choose_classes", always)
    with fleet(tmp_path, 2, profile="ctx", anchor_after=100) as it:
        with fleet(tmp_path, 4, other=it) as gone:
            for seed in range(2):
                for every in (it, gone):
                    every.all(lambda s: s.commit_version())
                it.train(seed)
            assert len(it.last_patch().holdings) == 6
            was_silent(gone, 200_000)
        for look in range(10):
            it.publisher._maintenance.receivers.look()
            if look == 5:
                it.train(2)
                assert len(it.last_patch().holdings) == 6
                assert len(collect(it.publisher.store, grace=1000)) == 4
        it.train(3)
        assert {report.kind for report in it.all(lambda s: s.commit_version())} == {"patch"}
        it.require_exact()
        step = it.last_patch()
        assert (step.profiles, len(step.holdings)) == (("ctx",), 2)
        with fleet(tmp_path, 4, other=it) as back:
            assert {type(error) for error in back.all(lambda s: s.commit_version())} == {NotRetained}
            it.publisher._maintenance.receivers.look()
            for seed in range(4, 6):
                it.train(seed)
                for every in (it, back):
                    every.all(lambda s: s.commit_version())
                    every.require_exact()
            assert len(it.last_patch().holdings) == 6


def test_a_break_of_more_than_a_day(tmp_path, monkeypatch):
    """Engines that were silent since the last version go on with patches."""
    monkeypatch.setattr(buckets, "choose_classes", always)
    with fleet(tmp_path, 2, profile="ctx", anchor_after=100) as it:
        it.all(lambda s: s.commit_version())
        it.train(0)
        it.all(lambda s: s.commit_version())
        was_silent(it, 100_000)
        for seed in range(1, 4):
            it.train(seed)
            it.publisher._maintenance.receivers.look()
            assert {report.kind for report in it.all(lambda s: s.commit_version())} == {"patch"}
            it.require_exact()
            assert len(it.last_patch().holdings) == 2


def was_silent(engine, seconds):
    """Make it so that its ranks have not been heard for so long."""
    run = Path(engine.publisher.store.root) / "runs" / engine.publisher.run
    before = time.time() - seconds
    for subscriber in engine.subscribers:
        lease = subscriber._lease
        lease._lease.due -= seconds
        lease._holding.due -= seconds
        os.utime(run / "holdings" / subscriber._holding.record(subscriber._table).hash, (before, before))
        (run / "leases" / lease._name).unlink()


def test_several_cut_patches_at_once(tmp_path, monkeypatch):
    """Ranks that are behind take one patch after the other; a fresh rank an anchor, of which it fetches its parts."""
    monkeypatch.setattr(buckets, "choose_classes", always)
    with fleet(tmp_path, 2, profile="ctx", anchor_after=100) as it:
        it.all(lambda s: s.commit_version())
        for seed in range(3):
            it.train(seed)
        reports = it.all(lambda s: s.commit_version())
        assert {report.kind for report in reports} == {"patch"}
        it.require_exact()
        maintenance = it.publisher._maintenance
        maintenance._options = replace(maintenance._options, anchor_after=0.0)
        it.publisher.publish()
        maintenance._options = replace(maintenance._options, anchor_after=100)
        anchor = it.publisher._committed.index.steps[-1]
        assert anchor.base is None
        it.train(7)
        for engine in it.engines:
            engine.live["qkv"].zero_()
        for subscriber in it.subscribers:
            subscriber._is_uncertain = True
        reports = it.all(lambda s: s.commit_version())
        assert {report.kind for report in reports} == {"anchor"}
        it.require_exact()
        assert max(report.bytes for report in reports) < anchor.bytes


def test_a_rank_that_is_not_given_a_bucket_notices(tmp_path, monkeypatch):
    """A manifest that leaves a bucket out for a rank cannot lead to the digest: nothing is written."""
    touched = Holdings.touched

    def forget(self, places):
        return touched(self, places)._replace(holdings=1)

    with fleet(tmp_path, 2, profile="ulp") as it:
        it.all(lambda s: s.commit_version())
        before = it.live()
        monkeypatch.setattr(Holdings, "touched", forget)
        it.train(1)
        for error in it.all(lambda s: s.commit_version()):
            assert isinstance(error, ChecksumMismatch)
        for live, old in zip(it.live(), before, strict=True):
            assert all(torch.equal(live[name], old[name]) for name in old)
        monkeypatch.undo()
        it.train(2)


@pytest.mark.parametrize("given", [0b01, 0b10])
def test_a_rank_that_is_not_given_what_another_has_too_notices(tmp_path, monkeypatch, given):
    """Ranks agree on the changes of parts that several of them have."""
    touched = Holdings.touched

    def forget(self, places):
        found = [*places]
        marks = touched(self, found)
        bias = it.publisher._committed.run.layout.index["model.layers.0.o.bias"]
        return marks._replace(holdings=given) if {tensor for tensor, _ in found} == {bias} else marks

    with fleet(tmp_path, 2, profile="ulp", anchor_after=100) as it:
        it.all(lambda s: s.commit_version())
        it.train(1)
        it.all(lambda s: s.commit_version())
        monkeypatch.setattr(Holdings, "touched", forget)
        it.weights["model.layers.0.o.bias"] += 1
        it.publisher.publish()
        before = it.live()
        for error in it.all(lambda s: s.commit_version()):
            assert isinstance(error, ChecksumMismatch)
        for live, old in zip(it.live(), before, strict=True):
            assert all(torch.equal(live[name], old[name]) for name in old)


@pytest.mark.parametrize("change", ["more rows", "fewer rows", "one more", "another"])
def test_other_tensors_in_a_run_that_ranks_follow(tmp_path, change):
    """They are published as an anchor, which is not cut along parts of the tensors before."""
    with fleet(tmp_path, 2, profile="auto") as it:
        it.all(lambda s: s.commit_version())
        it.train(1)
        it.all(lambda s: s.commit_version())
        if change.endswith("rows"):
            it.weights["model.layers.0.o.weight"] = torch.ones(24 if change == "more rows" else 6, 8).bfloat16()
        else:
            it.weights["a.new"] = torch.ones(5).bfloat16()
        if change == "another":
            del it.weights["model.scale"]
        for _ in range(3):
            version = it.publisher.publish().version
            live = {name: torch.zeros_like(tensor) for name, tensor in it.weights.items()}
            with sparserl.Subscriber(f"file://{tmp_path}/run", live) as subscriber:
                assert subscriber.sync().version == version
            assert sparserl.digest(live) == sparserl.digest(it.weights)
            it.weights["model.layers.0.o.bias"] += 1


def test_a_cold_engine_of_another_size_joins(tmp_path, monkeypatch):
    """It says which parts it has before it holds a version; the publisher then writes an anchor for it."""
    monkeypatch.setattr(buckets, "choose_classes", always)
    with fleet(tmp_path, 2, profile="ctx", anchor_after=100) as it, fleet(tmp_path, 4, other=it) as cold:
        it.all(lambda s: s.commit_version())
        for seed in range(4):
            it.train(seed)
            it.all(lambda s: s.commit_version())
        for engine in cold.engines:
            engine.load(checkpoint(seed=9).items())
        assert {type(error) for error in cold.all(lambda s: s.commit_version())} == {NotRetained}
        it.publisher._maintenance.receivers.look()
        it.train(5)
        for every in (it, cold):
            every.all(lambda s: s.commit_version())
            every.require_exact()
        it.train(6)
        for every in (it, cold):
            assert {report.kind for report in every.all(lambda s: s.commit_version())} == {"patch"}
            every.require_exact()
        assert len(it.last_patch().holdings) == 6


@pytest.mark.parametrize("trouble", ["cells", "names", "groups"])
def test_parts_that_patches_cannot_be_cut_along(tmp_path, monkeypatch, trouble):
    """Then patches keep to the profile that everybody takes."""
    monkeypatch.setattr(buckets, "choose_classes", always)
    if trouble == "cells":
        monkeypatch.setattr(holdings_module, "_MOST_CELLS", 1)
    elif trouble == "groups":
        monkeypatch.setattr(holdings_module, "_SPARE_GROUPS", -4)
    else:
        monkeypatch.setattr(receivers_module, "holding_name", lambda _: "0" * 16)
    with fleet(tmp_path, 2, profile="ctx") as it:
        it.all(lambda s: s.commit_version())
        for seed in range(3):
            it.train(seed)
            assert {report.kind for report in it.all(lambda s: s.commit_version())} == {"patch"}
            it.require_exact()
            assert "ctx" not in it.last_patch().profiles


def test_a_rank_that_nothing_is_for(tmp_path):
    """It fetches nothing, and has the version all the same."""
    with fleet(tmp_path, 2, profile="ulp", anchor_after=100) as it:
        it.all(lambda s: s.commit_version())
        it.train(1)
        it.all(lambda s: s.commit_version())
        it.weights["model.layers.0.o.weight"][:, :2] += 1  # columns of the first rank
        version = it.publisher.publish().version
        first, second = it.all(lambda s: s.commit_version())
        assert (first.version, second.version) == (version, version)
        assert first.bytes > 0
        assert (second.bytes, second.changed) == (0, 0)
        it.require_exact()
        assert it.all(lambda s: s.audit()) == [None] * 2


def test_receivers_whose_parts_cannot_be_read(tmp_path, monkeypatch, caplog):
    """Then patches keep to the profile that everybody takes, and all ranks fetch all of them."""
    monkeypatch.setattr(buckets, "choose_classes", always)
    monkeypatch.setattr(HoldingRecord, "put", lambda *_: None)
    caplog.set_level("INFO", "sparserl.session")
    with fleet(tmp_path, 2, profile="ctx") as it:
        it.all(lambda s: s.commit_version())
        it.train(1)
        assert {report.kind for report in it.all(lambda s: s.commit_version())} == {"patch"}
        it.require_exact()
        assert "ctx" not in it.last_patch().profiles
        assert "the parts of a receiver cannot be used" in caplog.text
        assert "takes only gap, raw, ulp: patches are in gap, raw, ulp; set profile='ulp', or 'auto'" in caplog.text


def test_a_profile_that_cannot_be_taken_is_named(tmp_path, monkeypatch):
    """An engine that comes late says what to set; the publisher hears of it, and lets it go on from an anchor."""
    monkeypatch.setattr(buckets, "choose_classes", always)
    with fleet(tmp_path, 2, profile="ctx", anchor_after=100) as it:
        for seed in range(4):  # after some publishes without receivers, it looks at leases now and then only
            it.train(seed)
        assert it.all(lambda s: s.commit_version(0)) == [None] * 2
        for error in it.all(lambda s: s.commit_version(1)):
            assert isinstance(error, NotRetained)
            assert "version 1 is in profile ctx" in str(error)
            assert "profile='ulp'" in str(error)
        it.publisher._maintenance.receivers.look()
        version = it.train(9)
        assert {report.kind for report in it.all(lambda s: s.commit_version())} == {"anchor"}
        it.require_exact()
        assert it.train(10) == version + 1
        assert {report.kind for report in it.all(lambda s: s.commit_version())} == {"patch"}
        it.require_exact()


@pytest.mark.parametrize("ranks", [1, 2])
def test_several_versions_at_once(tmp_path, ranks):
    """A way over several patches leads to the same bits, and back again."""
    with fleet(tmp_path, ranks) as it:
        first = {name: tensor.clone() for name, tensor in it.weights.items()}
        it.train(1), it.train(2)
        version = it.train(3)
        assert {report.version for report in it.all(lambda s: s.commit_version())} == {version}
        it.require_exact()
        assert {report.kind for report in it.all(lambda s: s.commit_version(0))} == {"anchor"}
        it.require_exact(first)


def test_ranks_that_share_a_part_must_build_the_same(tmp_path, monkeypatch):
    """What one of them has built wrong is found out before anything is written, although another one owns it."""
    fresh = EngineTarget._fresh

    def spoilt(self, change, local):
        weights = fresh(self, change, local)
        if self is it.subscribers[1].targets[0]:  # the second rank, in a bias that both have
            (bias,) = (part for part in weights.parts if part.tensor.endswith("o.bias"))
            bias.data.array.view("u2")[3] ^= 1
        return weights

    with fleet(tmp_path, 2) as it:
        for engine in it.engines:
            engine.load(checkpoint(seed=7).items())
        monkeypatch.setattr(EngineTarget, "_fresh", spoilt)
        before = it.live()
        errors = it.all(lambda s: s.commit_version())
        assert {type(error) for error in errors} == {ChecksumMismatch}
        after = it.live()
        assert all(torch.equal(a[name], b[name]) for a, b in zip(before, after, strict=True) for name in a)
        monkeypatch.undo()
        assert {report.kind for report in it.all(lambda s: s.commit_version())} == {"anchor"}
        it.require_exact()


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_engine_with_other_weights(tmp_path, ranks, monkeypatch):
    """Bits that are of no version are replaced from an anchor, of which a rank builds its own parts and no more."""
    if ranks > 1:
        monkeypatch.delattr(receiver, "arriving_weights")
    with fleet(tmp_path, ranks) as it:
        for engine in it.engines:
            engine.load(checkpoint(seed=7).items())
        assert {report.kind for report in it.all(lambda s: s.commit_version())} == {"anchor"}
        it.require_exact()
        it.train(1)
        assert {report.kind for report in it.all(lambda s: s.commit_version())} == {"patch"}
        it.require_exact()


def test_staged_ahead(tmp_path):
    """What each rank has staged by itself is committed; nothing of it is seen before."""
    with fleet(tmp_path, 2) as it:
        it.all(lambda s: s.refresh())
        version = it.train(1)
        before = it.live()
        it.all(lambda s: s.stage_newest())
        assert {s._staged.run_version.version for s in it.subscribers} == {version}
        assert all(torch.equal(a[n], b[n]) for a, b in zip(before, it.live(), strict=True) for n in a)
        assert {report.version for report in it.all(lambda s: s.commit_version(version))} == {version}
        it.require_exact()


def test_one_rank_cannot_commit(tmp_path):
    """Something else wrote to one rank's weights after they were staged: no rank commits, and the next try recovers."""
    with fleet(tmp_path, 2) as it:
        it.all(lambda s: s.refresh())
        it.weights["model.layers.0.o.weight"][0, -1] += 1
        version = it.train(1)
        it.all(lambda s: s.stage_newest())
        it.engines[1].live["o"][0, -1] += 3
        before = it.live()
        errors = it.all(lambda s: s.commit_version(version))
        assert [type(error) for error in errors] == [CommitFailed] * 2
        assert "rank 1 of the engine: WrongBase" in str(errors[0])
        assert all(torch.equal(a[n], b[n]) for a, b in zip(before, it.live(), strict=True) for n in a)
        assert {report.version for report in it.all(lambda s: s.commit_version(version))} == {version}
        it.require_exact()


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("looks_again", [None, "audit", "refresh"])
def test_tensors_that_moved(tmp_path, ranks, looks_again):
    """A parameter that the engine replaced is not written where it was, though its bits were read since."""
    with fleet(tmp_path, ranks) as it:
        it.all(lambda s: s.refresh())
        version = it.train(1)
        it.all(lambda s: s.stage_newest())
        it.engines[0].live["o"] = it.engines[0].live["o"].clone()
        if looks_again == "audit":
            assert it.all(lambda s: s.audit()) == [None] * ranks
        elif looks_again == "refresh":
            it.subscribers[0]._is_uncertain = True
        assert [type(error) for error in it.all(lambda s: s.commit_version(version))] == [CommitFailed] * ranks
        assert {report.version for report in it.all(lambda s: s.commit_version(version))} == {version}
        it.require_exact()


@pytest.mark.parametrize("ranks", [1, 2])
def test_tied_tensors(tmp_path, ranks):
    """A name that the loader leaves out follows the tensor it is tied to; where they part, nothing is written."""
    extra = checkpoint()["model.embed_tokens.weight"]
    with fleet(
        tmp_path, ranks, tied={"lm_head.weight": "model.embed_tokens.weight"}, extra={"lm_head.weight": extra}
    ) as it:
        it.weights["lm_head.weight"] = it.weights["model.embed_tokens.weight"]
        it.train(1)
        assert {report.version for report in it.all(lambda s: s.commit_version())} == {1}
        it.require_exact()
        it.weights["lm_head.weight"] = it.weights["model.embed_tokens.weight"].clone()
        it.weights["lm_head.weight"][1, 1] += 1
        it.publisher.publish()
        errors = it.all(lambda s: s.commit_version())
        assert any("share memory" in str(error) for error in errors)
        assert all(isinstance(error, sparserl.SparserlError) for error in errors)


def test_a_tensor_that_no_rank_has(tmp_path):
    """A run with a tensor that the engine does not load is refused by name, on all ranks."""
    with fleet(tmp_path, 2, extra={"model.mtp.weight": torch.ones(3)}) as it:
        errors = it.all(lambda s: s.refresh())
        assert [type(error) for error in errors] == [TensorMismatch] * 2
        assert "'model.mtp.weight'" in str(errors[0])


def test_another_dtype(tmp_path):
    """Weights that are published in another dtype than the engine's are refused by name, on all ranks."""
    wide = checkpoint()["model.layers.0.o.bias"].float()
    with fleet(tmp_path, 2, extra={"model.layers.0.o.bias": wide}) as it:
        errors = it.all(lambda s: s.refresh())
        assert all(isinstance(error, TensorMismatch | SessionError) for error in errors)
        assert "'model.layers.0.o.bias'" in str(errors[0])


def test_a_head_that_cannot_be_read_does_not_end_the_wait(tmp_path, monkeypatch):
    """A thread that stages ahead goes on when the head is mended."""
    with fleet(tmp_path, 1) as it:
        (subscriber,) = it.subscribers
        changed = Mock(side_effect=Truncated("head.json ends 1 bytes too early"))
        monkeypatch.setattr(subscriber.store, "changed", changed)
        subscriber.wait(0.0)
        changed.assert_called_once()
