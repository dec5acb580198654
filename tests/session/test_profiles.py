"""Profiles are agreed on: publishers keep to what receivers take, and what cannot be taken is refused by name."""

from __future__ import annotations

import contextlib
import json
import time
from unittest.mock import Mock

import numpy as np
import pytest

from sparserl import Publisher, Subscriber, targets
from sparserl.errors import InvalidField, NotRetained, StoreError
from sparserl.session.profiles import Takers, choose_profiles, refusal
from sparserl.session.store import receivers
from sparserl.session.store.leases import Lease
from sparserl.session.store.own_lease import OwnLease
from sparserl.session.store.records import path
from tests.class_choice import always
from tests.session.policy import Policy, bits


def taking(url, policy, *profiles, **options):
    """A subscriber whose target takes only some profiles, and its weights."""
    mine = policy.empty()
    target = targets.module(mine)
    target.profiles = frozenset(profiles)
    return Subscriber(url, target, **options), mine


def require_heard(publisher, policy, subscriber, mine):
    """The publisher hears of a receiver that was refused, which goes on with an anchor, and then with patches."""
    publisher._maintenance.receivers.look()
    for kind in ("anchor", "patch"):
        policy.step()
        publisher.publish()
        assert subscriber.sync().kind == kind
        assert bits(mine) == bits(policy.weights)


def last_patch(publisher):
    """The step of the newest patch to the next version."""
    return [step for step in publisher._committed.index.steps if step.base == step.version - 1][-1]


def warnings(caplog):
    """What sessions have warned of."""
    return [r.getMessage() for r in caplog.records if (r.name, r.levelname) == ("sparserl.session", "WARNING")]


@pytest.fixture(autouse=True)
def _classes(monkeypatch):
    monkeypatch.setattr("sparserl.plan.buckets.choose_classes", always)


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize(
    ("takes", "expected"),
    [
        ([("raw",)], {"raw"}),
        ([("gap",), None], {"gap"}),
        ([("raw", "ulp"), ("gap", "ulp", "ctx")], {"ulp"}),
        ([("ctx", "ulp"), ("raw", "gap", "ulp", "ctx")], {"ctx", "ulp"}),
        ([("ctx", "raw"), None], {"raw"}),  # where `ctx` saves nothing, buckets are in `ulp`
    ],
)
def test_a_publisher_keeps_to_what_all_receivers_take(url, takes, expected, background, caplog):
    """Whatever `auto` would choose: all go on by patches, squashed ones among them, and nothing is warned of."""
    policy = Policy()
    publisher = Publisher(url, policy.weights, ladder=(2, 4), anchor_after=100)
    publisher.publish()
    receivers = [taking(url, policy, *(names or ("raw", "gap", "ulp", "ctx"))) for names in takes]
    for subscriber, _ in receivers:
        assert subscriber.sync().kind == "anchor"
    for _ in range(4):
        policy.step()
        publisher.publish_in_background().result() if background else publisher.publish()
        assert set(last_patch(publisher).profiles) == expected
        for subscriber, mine in receivers:
            assert subscriber.sync().kind == "patch"
            assert bits(mine) == bits(policy.weights)
    common = set.intersection(*(set(names or ("raw", "gap", "ulp", "ctx")) for names in takes))
    steps = publisher._committed.index.steps
    assert any(step.base is not None and step.base < step.version - 1 for step in steps)
    assert all(common.issuperset(step.profiles) for step in steps if step.base is not None)
    assert warnings(caplog) == []


def test_a_profile_that_was_set_and_cannot_be_taken(url, caplog):
    """The publisher keeps to what its receivers take, and warns once of the option."""
    policy = Policy()
    publisher = Publisher(url, policy.weights, profile="ctx", anchor_after=100)
    publisher.publish()
    subscriber, mine = taking(url, policy, "raw", name="engine")
    subscriber.sync()
    for _ in range(3):
        policy.step()
        publisher.publish()
        assert last_patch(publisher).profiles == ("raw",)
        assert subscriber.sync().kind == "patch"
        assert bits(mine) == bits(policy.weights)
    (warning,) = warnings(caplog)
    assert warning.endswith(
        ": profile='ctx' is set, but engine takes only raw: patches are in raw; set profile='raw', or 'auto'"
    )


@pytest.mark.parametrize("profile", ["auto", "ulp", "raw"])
def test_receivers_without_a_profile_in_common(url, profile, caplog):
    """Patches are in what one takes; the others go on by anchors that come anyway; a warning names all of it once."""
    policy = Policy()
    publisher = Publisher(url, policy.weights, profile=profile, anchor_after=100)
    publisher.publish()
    receivers = {name: taking(url, policy, name, name=f"takes-{name}") for name in ("raw", "ulp")}
    for subscriber, _ in receivers.values():
        subscriber.sync()
    chosen = "raw" if profile == "auto" else profile
    for _ in range(3):
        policy.step()
        publisher.publish()
        assert last_patch(publisher).profiles == (chosen,)
        for name, (subscriber, mine) in receivers.items():
            if name == chosen:
                assert subscriber.sync().kind == "patch"
                assert bits(mine) == bits(policy.weights)
            else:
                with pytest.raises(NotRetained, match=f"publish with profile='{name}'"):
                    subscriber.sync()
    assert [step.version for step in publisher._committed.index.steps if step.base is None] == [0]
    (warning,) = warnings(caplog)
    assert "no profile in common: takes-raw takes only raw, takes-ulp takes only ulp: give all receivers" in warning
    assert f"Until then patches are in {chosen}, and the others can take anchors only" in warning


@pytest.mark.parametrize("profiles", [("bogus",), (), ("ctx",)])
def test_receivers_for_which_no_patch_can_be(url, profiles, caplog):
    """They change nothing for the others, and cost nothing: no anchor is written for them, and a warning says so."""
    policy = Policy()
    publisher = Publisher(url, policy.weights, anchor_after=100)
    publisher.publish()
    subscriber, mine = taking(url, policy, "raw", "gap", "ulp", "ctx")
    subscriber.sync()
    lease = Lease("engine", 0, publisher._run_writer.clock(), profiles=profiles)
    publisher.store.put(path(publisher._committed.run.run, "leases", "engine"), lease.to_bytes())
    publisher._maintenance.receivers.look()
    for _ in range(3):
        policy.step()
        publisher.publish()
        assert set(last_patch(publisher).profiles) == {"ctx", "ulp"}
        assert subscriber.sync().kind == "patch"
        assert bits(mine) == bits(policy.weights)
    assert [step.version for step in publisher._committed.index.steps if step.base is None] == [0]
    (warning,) = warnings(caplog)
    assert "engine takes only" in warning
    assert "that is for anchors alone" in warning


def test_a_publisher_that_goes_on_needs_no_anchor_for_receivers_that_keep_up(url, tmp_path):
    """Patches from before the newest anchor need not be taken any more."""
    policy = Policy()
    subscriber = None
    for restart in range(3):
        with Publisher(url, policy.weights, anchor_after=100, keep_anchors=None, state=tmp_path) as publisher:
            for _ in range(5):
                policy.step()
                publisher.publish()
                if subscriber is None:
                    publisher.publish()
                    subscriber, mine = taking(url, policy, "raw")
                with contextlib.suppress(NotRetained):
                    subscriber.sync()
                publisher._maintenance.receivers.look()
            assert bits(mine) == bits(policy.weights), restart
            anchors = [step.version for step in publisher._committed.index.steps if step.base is None]
            assert len(anchors) <= 2


def test_a_receiver_that_comes_late_is_told_what_to_set(url):
    """Patches that it cannot take are refused by their profile and its own; its lease then lets it go on."""
    policy = Policy()
    publisher = Publisher(url, policy.weights, profile="ulp", anchor_after=100)
    subscriber, mine = taking(url, policy, "raw", "gap")
    publisher.publish()
    for _ in range(4):  # after some publishes without receivers, leases are looked at now and then only
        policy.step()
        publisher.publish()
    subscriber.sync(0)
    with pytest.raises(NotRetained) as error:
        subscriber.sync()
    assert str(error.value) == (
        "version 4 is in profile ulp, but only gap, raw can be taken: publish with profile='gap'. "
        "A publisher that hears of this by a lease keeps to it, and writes an anchor first"
    )
    require_heard(publisher, policy, subscriber, mine)


def test_a_receiver_without_a_version_is_heard(url):
    """It can begin when patches from the newest anchor on are none that it takes: the publisher writes another one."""
    policy = Policy()
    publisher = Publisher(url, policy.weights, profile="ulp", anchor_after=100)
    publisher.publish()
    policy.step()
    publisher.publish()
    subscriber, mine = taking(url, policy, "raw")
    with pytest.raises(NotRetained, match="A publisher that hears of this by a lease keeps to it"):
        subscriber.sync()
    (lease,) = publisher._run_writer.leases()
    assert (lease.version, lease.profiles) == (None, ("raw",))
    assert publisher.wait(version=0, subscribers=1, timeout=0) == 0
    require_heard(publisher, policy, subscriber, mine)
    (lease,) = publisher._run_writer.leases()
    assert lease.version == 3


def test_who_takes_all_and_holds_no_version_leaves_no_lease(url):
    """There is nothing that a publisher should do for it."""
    publisher = Publisher(url, Policy().weights)
    run = publisher.publish().run
    for profiles, leases in ((None, 0), (("raw",), 1)):
        OwnLease(publisher.store, True, time.time, None).renew(run, None, profiles)
        assert len(publisher._run_writer.leases()) == leases


def test_who_evaluates_every_second_version_is_refused_too(url):
    """It says so instead of going on with an old version in silence, and goes on when there is an anchor."""
    policy = Policy()
    publisher = Publisher(url, policy.weights, profile="ulp", anchor_after=100)
    publisher.publish()
    failures = []
    callback = Mock(failed=lambda stage, error: failures.append((stage, type(error))))
    evaluator, mine = taking(url, policy, "raw", "ulp", callbacks=[callback])
    evaluator.follow(once=True, every=2)
    evaluator.targets[0].profiles = frozenset({"raw"})
    for _ in range(2):
        policy.step()
        publisher.publish()
    with pytest.raises(NotRetained, match="version 2 is in profile ulp, but only raw can be taken"):
        evaluator.follow(once=True, every=2)
    assert evaluator.version == 0
    assert failures == [("stage", NotRetained)]
    publisher._maintenance.receivers.look()
    for _ in range(2):
        policy.step()
        publisher.publish()
    evaluator.follow(once=True, every=2)
    assert evaluator.version == 4
    assert bits(mine) == bits(policy.weights)


def test_a_lease_that_cannot_be_read(url, monkeypatch, caplog):
    """It is warned of once; the other receivers are heard, and anchors are written."""
    policy = Policy()
    publisher = Publisher(url, policy.weights, anchor_after=0)
    run = publisher.publish().run
    subscriber, mine = taking(url, policy, "raw", name="engine")
    subscriber.sync()
    get = publisher.store.get
    bad = path(run, "leases", "other")
    publisher.store.put(bad, b"{}")

    def get_or_refuse(name, most):
        if name == bad:
            raise StoreError(f"{name} cannot be read: permission denied")
        return get(name, most)

    monkeypatch.setattr(publisher.store, "get", get_or_refuse)
    for _ in range(3):
        policy.step()
        report = publisher.publish()
        publisher._maintenance.receivers.look()
        assert report.notes == ()
        subscriber.sync()
        assert bits(mine) == bits(policy.weights)
    assert last_patch(publisher).profiles == ("raw",)
    assert any(step.base is None and step.version == 3 for step in publisher._committed.index.steps)
    (warning,) = (text for text in warnings(caplog) if "permission" in text)
    assert f"{bad} cannot be read: its receiver is not heard" in warning


def test_a_lease_that_could_not_be_written_is_tried_again(url, monkeypatch):
    """After some seconds, not after as long as a lease that is there is left alone."""
    publisher = Publisher(url, Policy().weights)
    run = publisher.publish().run
    own = OwnLease(publisher.store, "engine", time.time, None)
    with monkeypatch.context() as trouble:
        trouble.setattr(publisher.store, "put", Mock(side_effect=StoreError("no room")))
        own.renew(run, 0)
        own.renew(run, 0)
        publisher.store.put.assert_called_once()
    own.renew(run, 0)
    assert publisher._run_writer.leases() == []
    own._lease.due -= 4
    own.renew(run, 0)
    assert [lease.name for lease in publisher._run_writer.leases()] == ["engine"]


def test_leases_that_take_long_to_fail_leave_time_for_other_work(url, monkeypatch):
    """If a refusal takes five seconds, the next attempt comes thirty seconds later."""
    now, puts = [1000], []
    publisher = Publisher(url, Policy().weights)
    run = publisher.publish().run
    monkeypatch.setattr("sparserl.session.store.own_lease.time", Mock(monotonic=lambda: now[0]))

    def put(*_):
        puts.append(now[0])
        now[0] += 5
        raise StoreError("no room")

    own = OwnLease(publisher.store, "engine", time.time, None)
    monkeypatch.setattr(publisher.store, "put", put)
    while now[0] < 1100:
        own.renew(run, 0)
        now[0] += 1
    assert puts == [1000, 1035, 1070]


def test_a_lease_names_profiles_that_there_are(url):
    """Whatever a target says: others would make a lease that nobody can read."""
    publisher = Publisher(url, Policy().weights)
    run = publisher.publish().run
    names = {"raw", "ulp", "Zstd 1", "x" * 99, *map("p{}".format, range(20))}
    OwnLease(publisher.store, "engine", time.time, None).renew(run, 0, names)
    (lease,) = publisher._run_writer.leases()
    assert lease.profiles == ("raw", "ulp")


@pytest.mark.parametrize("holds", [False, True])
def test_steps_that_take_long(url, holds):
    """A lease that is as old as a training step is heard, whether it has a version or not."""
    now = [1e9]
    policy = Policy()
    publisher = Publisher(url, policy.weights, profile="ulp", anchor_after=100, clock=lambda: now[0])
    publisher.publish()
    subscriber, mine = taking(url, policy, "raw", clock=lambda: now[0])
    if holds:
        subscriber.sync()
    kinds = []
    for _ in range(6):
        now[0] += 300
        policy.step()
        publisher.publish()
        publisher._maintenance.receivers.look()
        try:
            kinds.append(subscriber.sync().kind)
            assert bits(mine) == bits(policy.weights)
        except NotRetained:
            kinds.append("refused")
    assert kinds == (["patch"] * 6 if holds else ["refused", "anchor"] + ["patch"] * 4)


def test_who_starts_again_and_again_counts_once(url):
    """Receivers that hold no version do not outvote those that follow, whatever names they have each time."""
    policy = Policy()
    publisher = Publisher(url, policy.weights, anchor_after=100)
    publisher.publish()
    healthy = [taking(url, policy, "ulp", name=f"engine-{i}") for i in range(3)]
    for subscriber, _ in healthy:
        subscriber.sync()
    for life in range(5):
        policy.step()
        publisher.publish()
        for subscriber, mine in healthy:
            assert subscriber.sync().kind == "patch"
            assert bits(mine) == bits(policy.weights)
        misfit, _ = taking(url, policy, "raw", name=f"misfit-{life}")
        with contextlib.suppress(NotRetained):  # it may have come just when there is an anchor
            misfit.sync()
        publisher._maintenance.receivers.look()


def test_what_a_target_takes_from_now_on(url):
    """A receiver that is refused says so in its lease at once, though its version is the same."""
    policy = Policy()
    publisher = Publisher(url, policy.weights, anchor_after=100)
    publisher.publish()
    subscriber, _ = taking(url, policy, "raw", "gap", "ulp", "ctx")
    subscriber.sync()
    policy.step()
    publisher.publish()
    subscriber.targets[0].profiles = frozenset({"raw"})
    with pytest.raises(NotRetained, match="publish with profile='raw'"):
        subscriber.sync()
    (lease,) = publisher._run_writer.leases()
    assert lease.profiles == ("raw",)


@pytest.mark.parametrize("ahead", [0, 1e300], ids=["on time", "from the future"])
def test_receivers_that_are_silent_are_remembered_for_a_day(url, ahead, caplog):
    """An engine renews its lease when it commits: between two commits, patches are still for it.

    If it was forgotten and comes again, there is a warning again.
    """
    now = [1e9]
    policy = Policy()
    publisher = Publisher(url, policy.weights, profile="ctx", anchor_after=100, clock=lambda: now[0])
    publisher.publish()
    name = path(publisher._committed.run.run, "leases", "engine")
    for seconds, comes, profiles in (
        (0, True, {"raw"}),
        (4000, False, {"raw"}),
        (86_401, False, {"ctx", "ulp"}),
        (86_500, True, {"raw"}),
    ):
        now[0] = 1e9 + seconds
        if comes:
            publisher.store.put(name, Lease("engine", 0, now[0] + ahead, profiles=("raw",)).to_bytes())
        publisher._maintenance.receivers.look()
        publisher.store.delete([name])
        policy.step()
        publisher.publish()
        assert set(last_patch(publisher).profiles) == profiles
    assert len(warnings(caplog)) == 2


def test_a_profile_that_most_receivers_take():
    """Where there is none in common: of as many, the one that was asked for, or that needs nothing of the receiver."""
    ulp, ctx, raw = (
        Takers(("ulp",), False, "a", 2),
        Takers(("ctx", "ulp"), False, "b", 2),
        Takers(("raw",), False, "c", 3),
    )
    assert choose_profiles("auto", [ulp, raw], can_cut=True).profile == "raw"
    assert choose_profiles("auto", [ulp, ctx, raw], can_cut=True).profile == "ulp"
    assert choose_profiles("ctx", [ctx._replace(total=3), raw], can_cut=True).profile == "ctx"
    assert choose_profiles("gap", [Takers((), False, "d")], can_cut=True).profile == "gap"


def test_an_option_that_helps():
    """It is a profile that can be taken; without any, targets must change."""
    assert refusal("it", ["ctx"], ["raw", "gap"]).endswith("but only gap, raw can be taken: publish with profile='gap'")
    assert refusal("it", ["ctx"], ["ctx"]).endswith("have one in common, such as 'raw'")


def test_leases_of_earlier_releases_are_read():
    """They have the rates at which their subscriber fetched, which count for nothing; other fields are refused."""
    earlier = b'{"format":1,"name":"engine","profiles":["raw"],"rates":[5000000,7000000],"time":1.5,"version":3}'
    lease = Lease("engine", 3, 1.5, ("raw",))
    assert Lease.parse(earlier, "a lease") == lease
    assert json.loads(earlier).keys() - json.loads(lease.to_bytes()).keys() == {"rates"}
    with pytest.raises(InvalidField, match="speeds"):
        Lease.parse(earlier.replace(b"rates", b"speeds"), "a lease")


def test_leases_are_looked_at_every_ten_seconds(url, monkeypatch):
    """However often a version is published."""
    now = 1000.0
    looks = []
    with Publisher(url, {"w": np.zeros(3, np.float32)}) as publisher:
        heard = publisher._maintenance.receivers
        monkeypatch.setattr(heard, "look", lambda: looks.append(now))
        monkeypatch.setattr(receivers.time, "monotonic", lambda: now)
        for seconds in (0, 1, 1, 8, 1):
            now += seconds
            heard.hear()
            heard.close()
    assert looks == [1000.0, 1010.0]
