"""`link="measured"`: `auto` chooses by the transfers that publisher and receivers have seen."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from sparserl import Bits, GroupPublisher, Publisher, Subscriber, SyncReport
from sparserl.errors import InvalidField, SessionError, Unavailable
from sparserl.session.profiles import Takers
from sparserl.session.store import rates, receivers
from sparserl.session.store.leases import Lease
from sparserl.session.store.rates import MeasuredLink, RateMeter, Rates, RecentRates
from sparserl.transport.stores.folder import FolderStore
from sparserl.weights.dtypes import BY_NAME

SIZE = 1 << 22
MEGABIT = 1e6


class Clock:
    """Time that passes when a transfer takes it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(rates.time, "perf_counter", lambda: self.now)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


class SlowStore(FolderStore):
    """A store whose buckets arrive at a rate, by a clock of its own."""

    def __init__(self, path: Path, clock: Clock) -> None:
        super().__init__(path)
        self.clock = clock
        self.rate = 100 * MEGABIT

    def get(self, name: str, max_bytes: int):
        stored = super().get(name, max_bytes)
        if "/buckets/" in name:
            self.clock.now += 8 * len(stored.data) / self.rate
        return stored


def test_a_rate_counts_the_time_in_which_something_was_on_its_way(clock: Clock) -> None:
    meter = RateMeter()
    with meter.transfer(1 << 20):
        clock.now += 1
        with meter.transfer(1 << 20):
            clock.now += 1
    clock.now += 100  # nothing is on its way
    with meter.transfer(2 << 20):
        clock.now += 2
    with pytest.raises(Unavailable):
        fail(meter, clock)
    assert meter.rate == 8 * (4 << 20) / 8


def fail(meter: RateMeter, clock: Clock) -> None:
    """A transfer that failed has taken its time."""
    with meter.transfer(1 << 30):
        clock.now += 4
        raise Unavailable("out of reach")


def test_small_transfers_tell_nothing(clock: Clock) -> None:
    meter = RateMeter()
    with meter.transfer(1000):
        clock.now += 1
    assert meter.rate is None


def metered(clock: Clock, rate: float) -> RateMeter:
    meter = RateMeter()
    with meter.transfer(1 << 20):
        clock.now += 8 * (1 << 20) / rate
    return meter


def test_the_last_transfers_count(clock: Clock) -> None:
    recent = RecentRates()
    assert recent.extremes is None
    for rate in (100.0, 10.0, *[1000.0] * 31):
        recent.add(metered(clock, rate * MEGABIT))
    assert recent.extremes == pytest.approx((10 * MEGABIT, 1000 * MEGABIT))
    recent.add(metered(clock, 1000 * MEGABIT))
    assert recent.extremes == pytest.approx((1000 * MEGABIT, 1000 * MEGABIT))


def rates_of(link: MeasuredLink) -> tuple[float, float]:
    assert link.link is not None
    return link.link.bits_per_second, link.link.most_bits_per_second


def test_the_ways_to_all_receivers_count(clock: Clock) -> None:
    link = MeasuredLink()
    assert link.link is None
    link.uploads.add(metered(clock, 50 * MEGABIT))
    assert link.link is None, "no receiver has told of its link"
    link.hear([None, Rates(200 * MEGABIT, 300 * MEGABIT), Rates(400 * MEGABIT, 400 * MEGABIT)])
    assert rates_of(link) == pytest.approx((50 * MEGABIT, 50 * MEGABIT))
    link.hear([Rates(20 * MEGABIT, 30 * MEGABIT), Rates(10 * MEGABIT, 400 * MEGABIT)])
    assert rates_of(link) == pytest.approx((10 * MEGABIT, 50 * MEGABIT))
    link.hear([])
    assert link.link is None


class Trained:
    """Weights of which small ones change, a publisher, and a receiver behind a link."""

    def __init__(self, path: Path, clock: Clock, **options: object) -> None:
        rng = np.random.default_rng(3)
        self._rng = rng
        array = (rng.standard_normal(SIZE).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
        self.weights = {"w": Bits(array, BY_NAME["bfloat16"])}
        self.store = SlowStore(path, clock)
        self.publisher = Publisher(path, self.weights, ladder=None, anchor_after=100.0, threads=1, **options)
        receivers = self.publisher._maintenance.receivers
        self._look_at_rates = receivers.look
        receivers.look = lambda: None  # on its thread: here the test says when
        self.mine = {"w": Bits(np.zeros_like(array), BY_NAME["bfloat16"])}
        self.subscriber = Subscriber(self.store, self.mine, threads=1)

    def sync(self) -> set[str]:
        """One more version, synced; the profiles of its patch."""
        self.reports()
        return set(self.publisher._committed.index.steps[-1].profiles)

    def reports(self) -> tuple[SyncReport, SyncReport | None]:
        """What publisher and receiver report of one more version."""
        array = self.weights["w"].array
        array += (self._rng.random(SIZE) < 0.2).astype(np.uint16) & ((array & 0x7FFF) < 0x3F00)
        published = self.publisher.publish()
        received = self.subscriber.sync()
        assert (self.mine["w"].array == array).all()
        self._look_at_rates()
        return published, received


@pytest.mark.long
def test_auto_follows_what_receivers_measure(tmp_path: Path, clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    """The smallest while nothing is known or the link is slow, the quickest over a fast one, and back at once."""
    caplog.set_level("INFO", "sparserl.session")
    run = Trained(tmp_path / "store", clock)
    run.store.rate = 1 * MEGABIT
    assert run.sync() == {"gap"}, "an anchor, coded"
    assert run.publisher._encoding.link.bits_per_second == pytest.approx(1 * MEGABIT, rel=0.01)
    assert run.sync() == {"ctx"}
    run.store.rate = 1e13
    for _ in range(33):
        run.sync()
    assert run.sync() <= {"raw", "gap"}
    run.store.rate = 1 * MEGABIT
    run.sync()
    assert run.sync() <= {"ulp", "ctx"}, "these lose less over a fast link than others over this one"
    assert [record.message.split("at ")[1] for record in caplog.records if "transfers" in record.message] == [
        "1 Mbit/s: profiles are chosen for that",
        "1 Mbit/s to 10,000 Gbit/s: profiles are chosen for that",
        "10,000 Gbit/s: profiles are chosen for that",
        "1 Mbit/s to 10,000 Gbit/s: profiles are chosen for that",
    ]
    (lease,) = run.publisher._run_writer.leases()
    assert lease.rates == pytest.approx((1 * MEGABIT, 1e13), rel=0.01)


def test_leases_are_looked_at_often_until_a_receiver_tells_of_its_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    looks = []
    with Publisher(tmp_path / "store", {"w": np.zeros(3, np.float32)}) as publisher:
        watched = publisher._maintenance.receivers
        monkeypatch.setattr(watched, "look", lambda: looks.append(now))
        monkeypatch.setattr(receivers.time, "monotonic", lambda: now)

        def hear(seconds: float) -> int:
            nonlocal now
            now += seconds
            watched.hear()
            watched.close()
            return len(looks)

        assert [hear(0.6) for _ in range(3)] == [1, 2, 3]
        publisher._run_writer.measured_link.hear([Rates(1 * MEGABIT, 1 * MEGABIT)])
        assert [hear(0.6) for _ in range(3)] == [3, 3, 3]
        assert hear(10) == 4
    with Publisher(tmp_path / "other", {"w": np.zeros(3, np.float32)}, profile="ulp") as publisher:
        watched = publisher._maintenance.receivers
        monkeypatch.setattr(watched, "look", lambda: looks.append(now))
        assert [hear(0.6) for _ in range(3)] == [5, 5, 5]


def test_without_a_measured_link_auto_is_the_smallest(tmp_path: Path, clock: Clock) -> None:
    run = Trained(tmp_path / "store", clock, link=None)
    run.store.rate = 1e13
    run.sync()
    assert run.sync() == {"ctx"}


@pytest.mark.parametrize(
    ("options", "taken"),
    [
        ({"link": None}, "ctx (smallest)"),
        ({"link": "10000Gbit"}, "raw (quickest over 10000Gbit)"),
        ({}, "raw (quickest over 10,000 Gbit/s, measured)"),
        ({"profile": "gap"}, "gap (as asked)"),
    ],
)
def test_reports_say_which_profile_and_why(
    tmp_path: Path, clock: Clock, options: dict[str, object], taken: str
) -> None:
    """A patch in another profile than the smallest surprises nobody: line and values of a report have the reason."""
    run = Trained(tmp_path / "store", clock, **options)
    run.store.rate = 1e13
    anchor, _ = run.reports()
    assert (anchor.profile, "version 0: anchor, " in anchor.summary) == ("", True)
    run.publisher._run_writer.measured_link.uploads = RecentRates()  # a real one, of a machine that may be busy
    patch, received = run.reports()
    assert received is not None
    assert (patch.profile, received.profile) == (taken, taken.split(" ")[0])
    assert str(patch).startswith(f"version 1: patch in {taken}, ")
    assert str(received).startswith(f"version 1: patch in {received.profile}, ")
    assert asdict(patch)["profile"] == taken


def test_reports_say_that_receivers_take_few_profiles(tmp_path: Path) -> None:
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


def test_leases_say_their_rate_or_nothing() -> None:
    for span in (None, Rates(5_000_000, 7_000_000)):
        lease = Lease("rollout", 3, 1.5, span)
        assert Lease.parse(lease.to_bytes(), "a lease") == lease
    with pytest.raises(InvalidField):
        Lease.parse(Lease("rollout", 3, 1.5, Rates(-1, 3)).to_bytes(), "a lease")
    assert b"rate" not in Lease("rollout", 3, 1.5).to_bytes()


def test_ranks_of_a_group_measure_nothing() -> None:
    with pytest.raises(SessionError, match="25Gbit"):
        GroupPublisher(None, {"w": np.zeros(3)}, link="measured")
