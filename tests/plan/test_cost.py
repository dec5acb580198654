"""The cost model: links as people write them, times that add up, and the profile that suits a link."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

import sparserl
from sparserl.errors import SparserlError
from sparserl.patch.measuring import FEW, MANY, measure, synthetic, work_bytes
from sparserl.plan import AnchorSpeed, Link, Speed, Speeds, Work, best, predict, predict_anchor
from sparserl.plan.cost import BUILT_IN, bandwidth
from sparserl.weights.dtypes import BY_NAME, Bits

PROFILES = ["raw", "gap", "ulp", "ctx"]


@pytest.fixture(autouse=True)
def nothing_kept(tmp_path, monkeypatch):
    """A user who never measured."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.parametrize(
    ("text", "bits"),
    [
        ("25Gbit", 25e9),
        ("25Gbit/s", 25e9),
        ("100Mbit", 100e6),
        ("100 mbits", 100e6),
        ("10Gbps", 10e9),
        ("10Gb", 10e9),
        ("3GB/s", 24e9),
        ("3GB", 24e9),
        ("1.5 kB/s", 12e3),
        ("1MiB/s", 8 * 2**20),
        ("2 bytes", 16),
        ("1e9", 1e9),
        ("2.5e3kbit", 2.5e6),
        (".5Tbit", 5e11),
    ],
)
def test_links_as_people_write_them(text, bits):
    """Small b is bits and large B bytes; a bare number counts bits per second."""
    assert Link.parse(text) == Link(bits)


@pytest.mark.parametrize(
    "text", ["", "fast", "25G", "25 Gbyt", "-1Gbit", "0", "0Mbit", "1e999", "nan", "inf", "1Gbit/h", "1,5Gbit", "Gbit"]
)
def test_what_is_no_bandwidth_is_refused(text):
    """The error repeats what was given."""
    with pytest.raises(SparserlError, match="is not a bandwidth") as caught:
        Link.parse(text)
    assert repr(text) in str(caught.value)


def test_latency():
    """With a unit or in seconds; a wrong one is refused."""
    texts = ("20ms", "150 us", "150µs", "0.5s", "2")
    assert [Link.parse("1e9", text).latency_s for text in texts] == [0.02, 150e-6, 150e-6, 0.5, 2.0]
    assert Link.parse("1e9", "20ms") == Link.parse("1e9", 0.02) == Link(1e9, 0.02)
    assert Link(8e6, 0.5).seconds(2e6) == 2.5
    for wrong in ("20 minutes", "ms", "-1s", ""):
        with pytest.raises(SparserlError, match="is not a duration"):
            Link.parse("1e9", wrong)


def test_links_for_people():
    """In the unit that leaves few digits."""
    assert [bandwidth(b) for b in (10, 1.5e4, 1e8, 2.5e10, 1e13)] == [
        "10 bit/s",
        "15 kbit/s",
        "100 Mbit/s",
        "25 Gbit/s",
        "10,000 Gbit/s",
    ]
    assert str(Link(1e9, 0.02)) == "1 Gbit/s + 20 ms"


def test_work_from_two_measurements():
    """A line through both, of which noise turns no part negative."""
    work = Work.fit(100, (10, 1.1), (20, 1.2))
    assert work.seconds(100, 10) == pytest.approx(1.1)
    assert work.seconds(200, 40) == pytest.approx(2.4)
    falling = Work.fit(100, (10, 1.2), (20, 1.1))
    assert falling == Work(0.012, 0.0)
    assert Work.fit(100, (10, 1.0), (20, 3.0)) == Work(0.0, 0.2)


def speeds(**per_change):
    """A machine that reads a gigabyte a second and takes some nanoseconds for a change."""
    profiles = {
        name: Speed(Work(1e-9, ns * 1e-9), Work(0.0, ns * 1e-9), bits, slope)
        for (name, ns), (bits, slope) in zip(
            per_change.items(), [(48.0, 0.0), (20.0, 1.0), (10.0, 1.0), (6.0, 0.5)], strict=True
        )
    }
    anchors = {"dense": AnchorSpeed(1e-9, 1e-9, 1.0), "coded": AnchorSpeed(4e-9, 3e-9, 0.7)}
    return Speeds(1, 0.5e-9, profiles, anchors, "made up")


MACHINE = speeds(raw=0, gap=30, ulp=30, ctx=100)


def test_stages_add_up():
    """Every figure by hand: a billion bf16 elements of which one percent changed, over 8 Gbit/s and 10 ms."""
    dense, raw, _, _, ctx = predict(1e9, 2, 0.01, Link(8e9, 0.01), MACHINE)
    assert (dense.name, dense.bytes, dense.encode_s, dense.bits_per_change) == ("dense", 2e9, 0.0, 1600.0)
    assert (dense.send_s, dense.decode_s) == (pytest.approx(2.01), pytest.approx(1.0))
    assert (raw.bytes, raw.encode_s, raw.decode_s) == (pytest.approx(60e6), pytest.approx(2.0), 0.0)
    assert raw.send_s == pytest.approx(0.07)
    assert (ctx.bytes, ctx.encode_s, ctx.decode_s) == (pytest.approx(7.5e6), pytest.approx(3.0), pytest.approx(1.0))
    assert ctx.total_s == ctx.encode_s + ctx.send_s + ctx.decode_s


def test_break_even():
    """At this speed dense and sparse take equally long; below it sparse is faster; never, where it works less."""
    for estimate in predict(1e9, 2, 0.01, Link(1e9, 0.3), MACHINE)[1:]:
        gains = []
        for factor in (0.9, 1.0, 1.1):
            again = {e.name: e for e in predict(1e9, 2, 0.01, Link(factor * estimate.break_even, 0.3), MACHINE)}
            gains.append(again["dense"].total_s - again[estimate.name].total_s)
        assert gains[0] > 0 > gains[2]
        assert gains[1] == pytest.approx(0, abs=1e-9)
    lazy = replace(MACHINE, copy=1.0)
    assert all(e.break_even == math.inf for e in predict(1e9, 2, 0.01, Link(1e9), lazy)[1:])


def test_bits():
    """They grow as changes grow rare; a user's own figures win; nothing sends more than all weights."""

    def bits(density, **given):
        return {e.name: e.bits_per_change for e in predict(1e6, 2, density, Link(1e9), MACHINE, given)}

    assert bits(0.01)["gap"] == pytest.approx(20)
    assert bits(0.0025) == pytest.approx({"dense": 6400, "raw": 48, "gap": 22, "ulp": 12, "ctx": 7})
    assert bits(0.01, ctx=4.5, raw=50)["ctx"] == pytest.approx(4.5)
    assert bits(0.01, ctx=4.5, raw=50)["raw"] == pytest.approx(50)
    assert bits(1.0)["raw"] == 16
    assert predict(1e6, 4, 0.01, Link(1e9), MACHINE)[1].bits_per_change == pytest.approx(64)


def test_the_best_way_depends_on_the_link():
    """From slow to fast: the smallest, then what takes less work, then all weights as they are."""
    taken = [best(predict(7e9, 2, 0.006, Link(10.0**e), MACHINE)).name for e in range(4, 14)]
    assert taken[0] == "ctx"
    assert taken[-1] == "dense"
    assert [n for i, n in enumerate(taken) if n not in taken[:i]] == ["ctx", "ulp", "raw", "dense"]
    assert taken == sorted(taken, key=["ctx", "ulp", "raw", "dense"].index)


def test_speeds_are_kept():
    """By number of threads; a file that is none, or of another release, counts as absent."""
    assert Speeds.load(1) is None
    assert Speeds.load_or_built_in(1) is BUILT_IN
    path = MACHINE.save()
    assert Speeds.load(1) == Speeds.load_or_built_in(1) == MACHINE
    assert Speeds.load(2) is None
    whole = path.read_text()
    for text in ("", "[]", "{}", whole.replace('"shape": 2', '"shape": 1'), whole.replace("per_byte", "per_bit")):
        path.write_text(text)
        assert Speeds.load(1) is None


@pytest.mark.parametrize("density", [FEW, MANY])
def test_synthetic_weights(density):
    """As dense in changes as asked; small weights change more often than large ones; most steps are one."""
    old, new = synthetic(1_000_000, density, 3)
    changed = old != new
    assert np.count_nonzero(changed) / old.size == pytest.approx(density, rel=0.1)
    magnitude = old & 0x7FFF
    small = magnitude < np.quantile(magnitude, 0.1)
    assert changed[small].mean() > 5 * changed[~small].mean()
    assert (np.abs(old[changed].astype(int) - new[changed]) == 1).mean() > 0.8
    assert (new[changed] & 0x7F80 != 0x7F80).all()
    assert 0.4 < (new[changed] > old[changed]).mean() < 0.6


@pytest.mark.parametrize("threads", [1, 2])
def test_measuring(threads):
    """Figures for every profile, from which times and sizes of the right order follow."""
    done = []
    found = measure(threads, megabytes=4, repeats=1, progress=done.append)
    assert sum(done) == pytest.approx(work_bytes(4, 1))
    assert found.threads == threads
    assert list(found.profiles) == PROFILES
    bits = [speed.bits(0.006) for speed in found.profiles.values()]
    assert bits == sorted(bits, reverse=True)
    assert bits[0] == pytest.approx(48, rel=0.02)
    assert 4 < bits[3] < 10
    assert found.copy > 0
    assert found.anchors["dense"].share == pytest.approx(1, rel=0.01)
    assert 0.6 < found.anchors["coded"].share < 0.75
    assert all(speed.encode > 0 and speed.decode > 0 for speed in found.anchors.values())
    assert all(0 < e.encode_s < 1 for e in predict(1e6, 2, 0.006, Link(1e9), found)[1:])


def weights(density=0.006):
    old, new = synthetic(400_000, density, 0)
    return tuple({"w": Bits(bits, BY_NAME["bfloat16"])} for bits in (old, new))


@pytest.mark.parametrize(
    ("link", "profile"), [("1Mbit", "ctx"), ("100Mbit", "ulp"), ("1Tbit", "raw"), (Link(1e6), "ctx")]
)
def test_auto_for_a_link(link, profile):
    """The slower the link, the smaller the patch; the reason says what was chosen, and for what."""
    old, new = weights()
    patch = sparserl.diff(old, new, link=link)
    assert patch.stats().profile == profile
    (bucket,) = patch.stats().buckets
    speed = bandwidth((Link.parse(link) if isinstance(link, str) else link).bits_per_second)
    assert bucket.reason.startswith(f"least predicted time at {speed}: {profile}, of ctx ")
    landed = {"w": Bits(old["w"].array.copy(), BY_NAME["bfloat16"])}
    patch.apply(landed)
    assert (landed["w"].array == new["w"].array).all()
    assert sparserl.Patch.from_bytes(patch.to_bytes()).stats() == patch.stats()


def test_a_link_leaves_a_profile_alone():
    """Whoever asks for one gets it."""
    old, new = weights()
    stats = sparserl.diff(old, new, profile="gap", link="1Tbit").stats()
    assert (stats.profile, stats.buckets[0].reason) == ("gap", "as asked")


def test_anchors_are_dense_where_the_link_is_fast():
    """Every figure by hand: coding saves 0.3 of the bytes and costs 5 ns a byte, which is even at 480 Mbit/s."""
    dense, coded = predict_anchor(1e9, Link(8e9, 0.01), MACHINE)
    assert (dense.bytes, dense.encode_s, dense.decode_s) == (1e9, 1.0, 1.0)
    assert dense.send_s == pytest.approx(1.01)
    assert (coded.bytes, coded.encode_s, coded.decode_s) == pytest.approx((7e8, 4.0, 3.0))
    assert coded.total_s == pytest.approx(7.71)
    for bits_per_second, name in ((470e6, "coded"), (490e6, "dense")):
        assert best(predict_anchor(1e9, Link(bits_per_second), MACHINE)).name == name


def test_measured_speeds_decide():
    """A machine for which work is free takes the smallest on any link, one that takes long the least work."""
    old, new = weights()
    free = {n: replace(s, encode=Work(0, 0), decode=Work(0, 0)) for n, s in BUILT_IN.profiles.items()}
    slow = {n: replace(s, decode=Work(0, 10.0 ** (i - 6))) for i, (n, s) in enumerate(BUILT_IN.profiles.items())}
    for profiles, taken in ((free, "ctx"), (slow, "raw")):
        replace(BUILT_IN, threads=3, profiles=profiles).save()
        assert sparserl.diff(old, new, link="100Mbit", threads=3).stats().profile == taken


def test_an_absurd_link_leaves_a_readable_patch():
    """Whatever number people write."""
    old, new = weights()
    for link in ("1e300", "1e-300"):
        patch = sparserl.diff(old, new, link=link)
        assert sparserl.Patch.from_bytes(patch.to_bytes()).stats().changed == patch.changed
    with pytest.raises(SparserlError, match="'25G' is not a bandwidth"):
        sparserl.diff(old, new, link="25G")
