"""Ranks read all their bits: what something else wrote to is found out, and no commit is built on it."""

from __future__ import annotations

import itertools
import threading

import pytest
import torch

from sparserl.errors import ChecksumMismatch, SessionError
from sparserl.integrations.ranks import _moved
from sparserl.session.store import holding_records
from sparserl.session.store.fields import Bound
from sparserl.targets.engine import MovedSums
from sparserl.weights.digest import Digest
from tests.integrations.fleet import fleet


def test_ranks_that_should_be_alike(tmp_path):
    """A replica that differs is seen when all bits are read, on demand, and made right by the next commit."""
    with fleet(tmp_path, 2) as it:
        it.all(lambda s: s.commit_version())
        it.engines[1].live["o.bias"][2] += 1
        assert [type(error) for error in it.all(lambda s: s.audit())] == [ChecksumMismatch] * 2
        it.train(1)
        it.all(lambda s: s.commit_version())
        it.require_exact()


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_was_staged_on_bits_that_others_wrote_to(tmp_path, ranks):
    """An audit that fails forgets it on all ranks: it would change right elements of wrong weights."""
    with fleet(tmp_path, ranks) as it:
        it.all(lambda s: s.commit_version())
        it.all(lambda s: s.refresh())
        version = it.train(0)
        it.all(lambda s: s.stage_newest())
        assert [subscriber._staged.run_version.version for subscriber in it.subscribers] == [version] * ranks
        it.engines[-1].live["o.bias"][2] += 1
        assert {type(error) for error in it.all(lambda s: s.audit())} == {ChecksumMismatch}
        it.all(lambda s: s.stage_newest())
        assert {report.kind for report in it.all(lambda s: s.commit_version(version))} == {"anchor"}
        it.require_exact()
        it.train(1)
        assert {report.kind for report in it.all(lambda s: s.commit_version())} == {"patch"}
        it.require_exact()


@pytest.mark.parametrize("ranks", [1, 2])
def test_ranks_audit_together_after_so_many_commits(tmp_path, ranks):
    """As a commit begins: what is staged ahead stays staged where bits are right, and is forgotten elsewhere."""
    with fleet(tmp_path, ranks, audit_every=2) as it:
        for seed in range(5):
            it.train(seed)
            it.all(lambda s: s.refresh())
            it.all(lambda s: s.stage_newest())
            if seed < 4:
                assert {report.kind for report in it.all(lambda s: s.commit_version())} == {"patch"}
        it.engines[-1].live["o.bias"][2] += 1
        assert {type(error) for error in it.all(lambda s: s.commit_version())} == {ChecksumMismatch}
        assert {report.kind for report in it.all(lambda s: s.commit_version())} == {"anchor"}
        it.require_exact()


def test_more_parts_than_a_record_can_name(tmp_path, monkeypatch, caplog):
    """Its ranks fetch all of every patch, which is said once."""
    monkeypatch.setattr(holding_records, "HOLDING", Bound(1 << 22, 20, 16))
    with fleet(tmp_path, 2) as it:
        for seed in range(2):
            it.all(lambda s: s.commit_version())
            it.train(seed)
            reports = it.all(lambda s: s.commit_version())
            assert it.all(lambda s: s.audit()) == [None] * 2
            assert [(report.kind, report.bytes) for report in reports] == [("patch", it.last_patch().bytes)] * 2
            it.require_exact()
        assert not [*it.publisher.store.list(f"runs/{it.publisher.run}/holdings/")]
    warnings = [record.getMessage() for record in caplog.records if "cut along" in record.getMessage()]
    assert len(warnings) == 2  # one a rank


@pytest.mark.parametrize("from_anchor", [0, 1])
def test_ranks_that_take_different_ways_to_a_version(tmp_path, monkeypatch, from_anchor):
    """One has a patch, the other an anchor: for the parts that both have, too, that leads to the same."""
    with fleet(tmp_path, 2, anchor_after=0) as it:
        it.all(lambda s: s.commit_version())
        for seed in range(3):
            it.train(seed)
            with monkeypatch.context() as restarted:
                restarted.setattr(it.subscribers[from_anchor], "_start_in", lambda _run: None)
                kinds = [report.kind for report in it.all(lambda s: s.commit_version())]
            assert sorted(kinds) == ["anchor", "patch"]
            it.require_exact()
        assert it.all(lambda s: s.audit()) == [None] * 2


def test_ranks_that_are_behind_compare_all_bits_that_they_share(tmp_path):
    """So a commit over several versions notices what was written beside the changes, on one of two ranks."""
    name = "model.layers.0.o.bias"
    with fleet(tmp_path, 2, anchor_after=100) as it:
        it.all(lambda s: s.commit_version())
        before = it.weights[name].clone()
        for seed in range(2):
            it.train(seed)
        unchanged = int((it.weights[name] == before).nonzero()[0])
        it.engines[1].live["o.bias"][unchanged] += 1
        assert [type(error) for error in it.all(lambda s: s.commit_version())] == [ChecksumMismatch] * 2
        assert {report.kind for report in it.all(lambda s: s.commit_version())} == {"anchor"}
        it.require_exact()


def test_all_ranks_are_compared_with_each_other():
    """Whichever comes first: of three that share a part, one has a patch, one several, one other bits beside them."""
    before, change, other = Digest(1000, 1), Digest(7, 2), Digest(1 << 63, 3)
    patch = MovedSums(Digest(), change, from_zero=True)
    several = MovedSums(before, before + change, from_zero=False)
    wrong = MovedSums(before + other, before + other + change, from_zero=False)
    members = (0, 1, 2)
    for order in itertools.permutations([patch, several, several]):
        assert _moved({rank: {members: sums} for rank, sums in enumerate(order)}, before) == before + change
    for order in itertools.permutations([patch, several, wrong]):
        assert _moved({rank: {members: sums} for rank, sums in enumerate(order)}, before) is None


def test_a_version_of_another_run(tmp_path):
    """It is refused on all ranks, whatever number it has, and nothing is written."""
    with fleet(tmp_path, 2) as it:
        version = it.train(0)
        before = it.live()
        errors = it.all(lambda s: s.commit_version(version, "0" * 16))
        assert [type(error) for error in errors] == [SessionError] * 2
        assert all(f"the engine follows run {it.publisher.run}" in str(error) for error in errors)
        for live, old in zip(it.live(), before, strict=True):
            assert all(torch.equal(live[name], old[name]) for name in old)
        assert {report.version for report in it.all(lambda s: s.commit_version(version, it.publisher.run))} == {version}


def test_a_version_that_comes_while_ranks_look(tmp_path, monkeypatch):
    """It has the bits that they have, as the one before: all take them for the same version."""
    with fleet(tmp_path, 2) as it:
        first, second = it.subscribers
        has_looked = threading.Event()
        read_first, read_second = first._read_store, second._read_store

        def read_and_tell(version):
            try:
                return read_first(version)
            finally:
                has_looked.set()

        def wait_and_read(version):
            if it.publisher.version == 0:
                assert has_looked.wait(20)
                it.publisher.publish()
            return read_second(version)

        monkeypatch.setattr(first, "_read_store", read_and_tell)
        monkeypatch.setattr(second, "_read_store", wait_and_read)
        assert it.all(lambda s: s.refresh()) == [None] * 2
        assert [subscriber.version for subscriber in it.subscribers] == [1, 1]
        it.train(0)
        assert {report.version for report in it.all(lambda s: s.commit_version())} == {2}
        it.require_exact()
