"""The command that plans for a link, and measures the machine once."""

from __future__ import annotations

import importlib
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import sparserl
from sparserl import Patch
from sparserl.cli.app import app
from sparserl.plan.cost import BUILT_IN, Speeds
from tests.cli.patch_commands import W, run_command


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Speeds that were measured before, on two threads."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    replace(BUILT_IN, threads=2, origin="measured long ago").save()


PLAN = ("plan", "--params", "671e9", "--density", 0.006, "--link", "25Gbit", "--threads", 2)


def test_plan(measured: None) -> None:
    """A table with every way, the fastest marked, and what its symbols mean, in words."""
    said = run_command(*PLAN)
    for name in ("dense", "raw", "gap", "ulp", "ctx"):
        assert sum(line.split()[:1] == [name] for line in said.splitlines()) == 1
    assert said.count("◄") == 2
    assert sum(line.strip().startswith("anchor, ") for line in said.splitlines()) == 2
    assert "S = 1.34 TB: dense bytes, 671,000,000,000 elements × 2." in said
    assert "ρ = 0.6000%: density" in said
    for words in ("X: bytes sent", "index bytes are counted", "break-even: the link speed above which", "long ago"):
        assert words in said


def test_plan_for_scripts(measured: None) -> None:
    """The same as JSON; stages add up, and options do what they say."""
    said = json.loads(run_command(*PLAN, "--json"))
    assert (said["dense_bytes"], said["link_bits_per_second"], said["threads"]) == (1.342e12, 25e9, 2)
    assert list(said["estimates"]) == ["dense", "raw", "gap", "ulp", "ctx"]
    for row in said["estimates"].values():
        assert row["total_s"] == row["encode_s"] + row["send_s"] + row["decode_s"]
    assert said["estimates"]["dense"]["break_even_bits_per_second"] is None
    assert said["estimates"]["raw"]["bytes"] == pytest.approx(671e9 * 0.006 * 6)
    given = json.loads(run_command(*PLAN, "--json", "--bits", "ctx=4", "--dtype", "float32", "--latency", "20ms"))
    assert given["estimates"]["ctx"]["bits_per_changed"] == pytest.approx(4)
    assert given["dense_bytes"] == 2.684e12
    assert given["latency_s"] == 0.02
    slow = json.loads(run_command(*PLAN, "--json", "--link", "10Mbit"))
    assert (slow["best"], slow["best_anchor"]) == ("ctx", "coded")
    fast = json.loads(run_command(*PLAN, "--json", "--link", "400Gbit"))
    assert fast["best_anchor"] == "dense"
    assert fast["anchors"]["dense"]["bytes"] == fast["dense_bytes"] > fast["anchors"]["coded"]["bytes"]


def test_plan_from_a_patch(measured: None, files: Path) -> None:
    """Elements, density and bits of a real patch; what is given as well wins."""
    run_command("diff", "0", "1", "-o", "gap.patch", "--profile", "gap")
    stats = Patch.open("gap.patch").stats()
    asked = ("plan", "--from", "gap.patch", "--link", "1Gbit", "--threads", 2, "--json")
    said = json.loads(run_command(*asked))
    assert (said["elements"], said["density"], said["dense_bytes"]) == (
        stats.elements,
        stats.density,
        pytest.approx(stats.dense_bytes),
    )
    assert said["estimates"]["gap"]["bits_per_changed"] == pytest.approx(stats.bits_per_changed)
    assert json.loads(run_command(*asked, "--bits", "gap=9"))["estimates"]["gap"]["bits_per_changed"] == pytest.approx(
        9
    )
    assert json.loads(run_command(*asked, "--params", "7e9"))["elements"] == 7e9


@pytest.mark.parametrize("profile", ["auto", "raw", "gap", "ulp", "ctx"])
def test_plan_from_a_patch_and_its_base(measured: None, files: Path, profile: str) -> None:
    """What every profile takes is what `diff` makes with it, within 5%, whichever the patch is in."""
    run_command("diff", "0", "1", "-o", "some.patch", "--profile", profile)
    asked = ("plan", "--from", "some.patch", "--link", "1Gbit", "--threads", 2, "--json")
    predicted = json.loads(run_command(*asked, "--base", "0"))["estimates"]
    for name in ("raw", "gap", "ulp", "ctx"):
        made = sparserl.diff(W[0], W[1], profile=name).stats()
        assert predicted[name]["bits_per_changed"] == pytest.approx(made.bits_per_changed, rel=0.05), name


@pytest.mark.parametrize("profile", ["raw", "gap", "ulp", "ctx"])
def test_plan_from_a_patch_alone(measured: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, profile: str) -> None:
    """Its own profile and `raw` are known; the others are left out, and the table says so."""
    monkeypatch.chdir(tmp_path)
    old = {"w": np.linspace(-1, 1, 60_000, dtype=np.float32)}
    new = {"w": old["w"] + np.float32(1e-5) * (np.arange(60_000) % 20 == 0)}
    sparserl.diff(old, new, profile=profile).save("some.patch")
    asked = ("plan", "--from", "some.patch", "--link", "1Gbit", "--threads", 2)
    predicted = json.loads(run_command(*asked, "--json"))["estimates"]
    own = Patch.open("some.patch").stats().profile
    assert list(predicted) == list(dict.fromkeys(("dense", "raw", own)))
    for name in {"raw", own}:
        made = sparserl.diff(old, new, profile=name).stats()
        assert predicted[name]["bits_per_changed"] == pytest.approx(made.bits_per_changed, rel=0.05), name
    said = run_command(*asked)
    for name in ("gap", "ulp", "ctx"):
        assert (f"{name} is left out: its bits are not known without --base." in said) == (name not in predicted)
    assert "gap is left out" not in run_command(*asked, "--bits", "gap=9")


def test_plan_measures_once(measured: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing is kept, and on demand; what was measured is kept."""
    calls = []

    def quick(threads: int, **_: object) -> Speeds:
        calls.append(threads)
        return replace(BUILT_IN, threads=threads, origin=f"measurement {len(calls)}")

    monkeypatch.setattr(importlib.import_module("sparserl.patch.measuring"), "measure", quick)
    for more, origin, times in (
        (("--threads", 3), "measurement 1", [3]),
        (("--threads", 3), "measurement 1", [3]),
        (("--threads", 3, "--measure"), "measurement 2", [3, 3]),
        (("--threads", 3), "measurement 2", [3, 3]),
    ):
        assert origin in run_command(*PLAN, *more)
        assert calls == times
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null/nowhere")
    result = CliRunner().invoke(app, [str(a) for a in PLAN])
    assert result.exit_code == 0
    assert "these speeds could not be saved" in result.stderr


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (("--link", "25G"), "'25G' is not a bandwidth; write bits per second as 25Gbit"),
        (("--link", "fast"), "'fast' is not a bandwidth"),
        (("--latency", "20 minutes"), "'20 minutes' is not a duration"),
        (("--density", "0"), "0 is not a share above 0 and up to 1"),
        (("--density", "1.5"), "1.5 is not a share"),
        (("--density", "nan"), "'nan' is not a number"),
        (("--params", "0"), "--params"),
        (("--params", "inf"), "--params"),
        (("--dtype", "bf17"), "'bf17' is not among"),
        (("--base", "0"), "it is the base of a patch: give --from as well"),
        (("--bits", "zip=3"), "'zip=3' is not PROFILE=BITS"),
        (("--bits", "ctx"), "'ctx' is not PROFILE=BITS"),
        (("--bits", "ctx=-1"), "and a number of bits"),
    ],
)
def test_plan_says_what_is_wrong(more: tuple[str, str], says: str, measured: None) -> None:
    """A question that makes no sense is a usage error that repeats it."""
    result = CliRunner().invoke(app, [str(a) for a in (*PLAN, *more)], env={"COLUMNS": "300"})
    assert result.exit_code == 2, result.output
    assert says in result.stderr


def test_plan_needs_a_model(measured: None) -> None:
    """Its size and density, or a patch."""
    result = CliRunner().invoke(app, ["plan", "--link", "1Gbit", "--params", "7e9"], env={"COLUMNS": "300"})
    assert result.exit_code == 2
    assert "give both, or a patch to take them from" in result.stderr


def test_diff_for_a_link(measured: None, files: Path) -> None:
    """As the library does it; a link that is none is a usage error."""
    for link in ("1kbit", "1Tbit"):
        run_command("diff", "0", "1", "-o", "p.patch", "--link", link, "--threads", 2)
        expected = sparserl.diff(W[0], W[1], link=link, threads=2)
        assert (files / "p.patch").read_bytes() == expected.to_bytes()
    result = CliRunner().invoke(app, ["diff", "0", "1", "-o", "q", "--link", "25G"], env={"COLUMNS": "300"})
    assert result.exit_code == 2
    assert "'25G' is not a bandwidth" in result.stderr
    assert not (files / "q").exists()
