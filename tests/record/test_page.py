"""The page: it holds the figures of its recording, needs nothing from elsewhere, and a browser shows all of it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path
from statistics import median

import numpy as np
import pytest
from typer.testing import CliRunner

from sparserl.cli.app import app
from sparserl.humanize import short_size
from sparserl.patch.measuring import synthetic
from sparserl.record import Recorder, Recording
from sparserl.record.kinds import place
from sparserl.record.page import page
from sparserl.record.plots import share
from sparserl.record.summary import by_layer, projection, summary
from sparserl.weights.dtypes import BY_NAME, Bits

NAMES = ("self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "input_layernorm")
BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def bits_of(seed: int, rows: int) -> tuple[dict[str, Bits], dict[str, Bits]]:
    """Two versions of a model of two layers; its norms do not change."""
    old, new = {}, {}
    for number, name in enumerate(f"model.layers.{layer}.{kind}.weight" for layer in (0, 1) for kind in NAMES):
        pair = synthetic(rows * 100, 0.03, 10 * seed + number)
        same = "norm" in name
        old[name], new[name] = (Bits(pair[0 if same else n], BY_NAME["bfloat16"]) for n in (0, 1))
    return old, new


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recording with everything in it: two precisions, timings, rewards."""
    recorder = Recorder(tmp_path_factory.mktemp("recorded") / "run.jsonl", {"model": "<tiny> & 'odd'", "seed": 0})
    for version in range(1, 5):
        for precision, rows in (("bf16", 20), ("narrow", 10)):
            recorder.observe(*bits_of(version, rows), version=version, precision=precision)
        stages = ("find", "encode", "upload", "fetch", "stage", "pause")
        recorder.note(version, seconds=dict.fromkeys(stages, 0.01 * version), reward=0.1 * version)
    return recorder.path


def parsed(text: str) -> ET.Element:
    """The page as XML."""
    assert text.startswith("<!DOCTYPE html>\n<html")
    return ET.fromstring(text)


def texts(element: ET.Element, tag: str) -> list[str]:
    return ["".join(one.itertext()) for one in element.iter(tag)]


def test_the_figures_are_the_recordings(recorded: Path) -> None:
    """Headline, cards and hover texts say what the syncs of the recording say."""
    recording = Recording.read(recorded)
    found = parsed(page(recording))
    values = {one.get("id"): float(one.get("data-value", "nan")) for one in found.iter("div") if one.get("id")}
    for name in ("bf16", "narrow"):
        syncs = recording.of(name)
        sent = [sync.bytes() for sync in syncs]
        assert values[f"ratio-{name}"] == sum(sync.dense_bytes for sync in syncs) / sum(sent)
        assert values[f"density-{name}"] == median(sync.total / sync.elements for sync in syncs)
        assert values[f"bits-{name}"] == pytest.approx(8 * sum(sent) / sum(sync.total for sync in syncs))
        assert values[f"bytes-{name}"] == median(sent)
        assert values[f"inactive-{name}"] == 2
    hover = texts(found, "title")
    for sync in recording.syncs:
        assert f"{sync.precision}, version {sync.version}: {share(sync.density)}" in hover
    assert "reward, version 3: 0.3" in hover
    assert "2, upload: 20 ms" in hover
    at = recording.tensors["bf16"].names.index("model.layers.1.self_attn.q_proj.weight")
    changed = sum(sync.changed[at] for sync in recording.of("bf16"))
    assert f"q, layer 1: {share(changed / 8000)} of 2,000 elements, 1 tensor(s)" in hover
    assert "norm, layer 0: 0% of 2,000 elements, 1 tensor(s)" in hover
    bits = summary(recording)["precisions"]["bf16"]["bits_per_change"]["ctx"]
    assert f"ctx, index: {bits['index']:.2f}" in hover


def test_what_stands_on_it(recorded: Path) -> None:
    """Every section is there, names are escaped, and there is no script and no address of anything else."""
    text = page(Recording.read(recorded))
    found = parsed(text)
    assert texts(found, "h1") == ["sparserl: <tiny> & 'odd'"]
    assert texts(found, "h2") == [
        "bf16",
        "narrow",
        "Over time",
        "Where and how bf16 changes",
        "Where and how narrow changes",
        "Seconds of a sync",
        "Other links and models (bf16)",
        "Other links and models (narrow)",
    ]
    assert len(list(found.iter("svg"))) == 4 + 2 * 5 + 2
    assert all(svg.get("aria-label") for svg in found.iter("svg"))
    assert "//" not in text
    assert not re.search(r"<script|<link|<img|url\(|@import|\son\w+=|href=|src=", text)


def test_missing_parts_are_said(tmp_path: Path) -> None:
    """A recording without timings, rewards or weights has no such sections, and says so."""
    recorder = Recorder(tmp_path / "bare.jsonl")
    recorder.observe(*bits_of(0, 10), version=1)
    text = page(Recording.read(recorder.path))
    assert "Seconds of a sync" not in text
    assert texts(parsed(text), "li") == [
        "no timings were recorded: there is no timeline",
        "no rewards were recorded",
    ]
    recorder = Recorder(tmp_path / "timed.jsonl")
    recorder.note(1, seconds={"pause": 0.5})
    found = parsed(page(Recording.read(recorder.path), title="Done", lines=["one", "two"], good=True))
    assert texts(found, "h2") == ["Seconds of a sync", "Not in this recording"]
    assert next(found.iter("h1")).get("class") == "good"
    assert texts(found, "li")[:2] == ["one", "two"]


def test_other_names_are_shown(tmp_path: Path) -> None:
    """Tensors of no known kind have rows of their own names, on the page and in JSON, as far as they are few."""
    old, new = ({f"{n}.weight": bits for n, bits in enumerate(one.values())} for one in bits_of(0, 10))
    recorder = Recorder(tmp_path / "plain.jsonl")
    recorder.observe(old, new, version=1)
    recording = Recording.read(recorder.path)
    shown = texts(parsed(page(recording)), "text")
    assert {f"{n}.weight" for n in range(8)} < {*shown}
    rows = summary(recording)["precisions"]["bfloat16"]["by_layer"]
    (sync,) = recording.syncs
    assert [row["layer"] for row in rows] == [*old]
    assert [row["density"] for row in rows] == [changed / 1000 for changed in sync.changed]
    many = {f"{n % 3}.{n}": old["0.weight"] for n in range(100)}
    recorder = Recorder(tmp_path / "many.jsonl")
    recorder.observe(many, many, version=1)
    rows = by_layer(Recording.read(recorder.path), "bfloat16")
    assert [(row["layer"], row["tensors"]) for row in rows] == [("0.*", 34), ("1.*", 33), ("2.*", 33)]


def test_densities_by_layer_and_version(recorded: Path) -> None:
    """The figures have those of every sync, and of every layer and kind; layers are in order, the rest is last."""
    recording = Recording.read(recorded)
    figures = json.loads(json.dumps(summary(recording)))["precisions"]["bf16"]
    assert [row["version"] for row in figures["by_version"]] == [1, 2, 3, 4]
    assert [row["density"] for row in figures["by_version"]] == [sync.density for sync in recording.of("bf16")]
    at = {(row["layer"], row["kind"]): row for row in figures["by_layer"]}
    assert [*at] == [(layer, kind) for layer in "01" for kind in ("q", "o", "gate", "norm")]
    changed = sum(sync.changed[0] for sync in recording.of("bf16"))
    name = recording.tensors["bf16"].names[0]
    expected = {"tensors": 1, "elements": 2000, "changed": changed, "density": changed / 8000}
    assert at["0", place(name)[1]].items() >= expected.items()


def test_nothing_changes(tmp_path: Path) -> None:
    """Syncs in which nothing changed make a page, and no division by nothing."""
    old, _ = bits_of(0, 10)
    recorder = Recorder(tmp_path / "still.jsonl")
    recorder.observe(old, old, version=1)
    recorder.observe(old, old, version=2)
    assert "Nothing changed." in texts(parsed(page(Recording.read(recorder.path))), "p")


def test_projection_is_the_plan(recorded: Path) -> None:
    """Seconds of other links and models come from the cost model, with the recording's density and bits."""
    syncs = Recording.read(recorded).of("bf16")
    rows = {(row["elements"], row["link"]): row for row in projection(syncs)}
    assert len(rows) == 4 * 5
    slow, fast = rows[7e9, "1Gbit"], rows[7e9, "400Gbit"]
    assert slow["dense_s"] == pytest.approx(8 * 14e9 / 1e9, rel=0.1)
    assert slow["best"] != "dense"
    assert slow["best_s"] < slow["dense_s"] / 3
    assert fast["dense_s"] < slow["dense_s"]
    assert rows[70e9, "1Gbit"]["best_s"] == pytest.approx(10 * slow["best_s"])


@pytest.mark.parametrize(
    ("shown", "value", "expected"),
    [
        (short_size, 0, "0 B"),
        (short_size, 1500, "1.5 kB"),
        (short_size, 2e12, "2 TB"),
        (share, 0.0, "0%"),
        (share, 0.01234, "1.23%"),
    ],
)
def test_numbers_for_people(shown: Callable[[float], str], value: float, expected: str) -> None:
    """Axes and cards have short numbers."""
    assert shown(value) == expected


def test_the_commands(tmp_path: Path) -> None:
    """Checkpoints on disk are recorded and reported; what is no recording or no page is left alone."""
    safetensors = pytest.importorskip("safetensors.numpy")
    rng, paths = np.random.default_rng(0), []
    held = {"model.layers.0.mlp.up_proj.weight": rng.standard_normal((40, 50)).astype(np.float16)}
    for version in range(3):
        paths.append(str(tmp_path / f"{version}.safetensors"))
        safetensors.save_file(held, paths[-1])
        held["model.layers.0.mlp.up_proj.weight"][version, :7] *= np.float16(1.5)
    run, html = tmp_path / "run.jsonl", tmp_path / "report.html"

    def call(*arguments: object) -> tuple[int, str]:
        done = CliRunner().invoke(app, list(map(str, arguments)))
        return done.exit_code, done.output

    code, said = call("record", *paths, "-o", run, "--json")
    assert (code, json.loads(said)["changed"]) == (0, [7, 7])
    code, said = call("report", run, "-o", html, "--json")
    figures = json.loads(said)["precisions"]["float16"]
    assert (code, figures["syncs"], figures["changed"], figures["density"]) == (0, 2, 14, 7 / 2000)
    assert texts(parsed(html.read_text()), "h1") == ["sparserl: 0.safetensors"]
    assert call("report", run, "-o", html)[0] == 0
    code, said = call("report", run, "-o", paths[0])
    assert (code, "is not a page" in said) == (1, True)
    code, said = call("report", paths[0], "-o", html)
    assert (code, "is not a recording" in said) == (1, True)
    code, said = call("record", *paths, "-o", paths[1])
    assert (code, "is not a recording" in said) == (1, True)
    assert call("record", paths[0], "-o", run)[0] == 2
    assert call("report", run)[0] == 2


def test_steps_are_recorded_in_their_order(tmp_path: Path) -> None:
    """Checkpoints that the shell sorts by letters are compared in the order of their numbers: the versions."""
    safetensors = pytest.importorskip("safetensors.numpy")
    for folder in ("run", "other"):
        for step in (100, 200, 1000):
            (tmp_path / folder / f"checkpoint-{step}").mkdir(parents=True)
            held = {"w": (np.arange(1000) < step).astype(np.float16)}
            safetensors.save_file(held, tmp_path / folder / f"checkpoint-{step}" / "model.safetensors")

    def call(*arguments: object) -> tuple[list[int], list[int], str]:
        recording = tmp_path / f"{len([*tmp_path.iterdir()])}.jsonl"
        done = CliRunner().invoke(app, ["record", *map(str, arguments), "-o", str(recording)])
        assert done.exit_code == 0, done.output
        syncs = Recording.read(recording).syncs
        return [sync.version for sync in syncs], [sync.total for sync in syncs], done.output

    by_letters = sorted((tmp_path / "run").iterdir())
    assert [path.name for path in by_letters] == ["checkpoint-100", "checkpoint-1000", "checkpoint-200"]
    versions, changed, said = call(*by_letters)
    assert (versions, changed) == ([200, 1000], [100, 800])
    assert "in the order of the numbers" in said
    assert call(*by_letters, "--first", 7)[:2] == ([7, 8], [100, 800])
    apart = (tmp_path / "run" / "checkpoint-1000", tmp_path / "other" / "checkpoint-100")
    versions, changed, said = call(*apart)  # of different runs: as they are given
    assert (versions, changed) == ([1], [900])
    assert "order" not in said


@pytest.mark.skipif(BROWSER is None, reason="no Chromium here")
@pytest.mark.parametrize("dark", [False, True])
def test_in_a_browser(recorded: Path, tmp_path: Path, dark: bool) -> None:
    """On a phone nothing is wider than the screen, nothing is said on the console, and the colours are as asked for."""
    probe = """<script>addEventListener("load", () => {
      const root = document.documentElement, style = getComputedStyle(document.body);
      const out = [...document.querySelectorAll("svg text")].filter(t => {
        const a = t.getBoundingClientRect(), b = t.ownerSVGElement.getBoundingClientRect();
        return a.left < b.left - 1 || a.right > b.right + 1 || a.bottom > b.bottom + 1;
      }).map(t => t.textContent);
      root.dataset.seen = JSON.stringify({wide: root.scrollWidth, screen: innerWidth, background: style.backgroundColor,
        svgs: document.querySelectorAll("svg").length, cut: out});
    });</script>"""
    frame = tmp_path / "frame.html"
    frame.write_text(page(Recording.read(recorded)).replace("</body>", f"{probe}</body>"))
    outer = tmp_path / "outer.html"
    outer.write_text(
        '<!DOCTYPE html><body style="margin:0"><iframe src="frame.html" style="width:390px;height:800px;border:0">'
        "</iframe><script>onload=()=>setTimeout(()=>document.title=document.querySelector('iframe').contentDocument"
        ".documentElement.dataset.seen,0)</script></body>"
    )
    ended = subprocess.run(
        [
            *(
                str(BROWSER),
                "--headless=new",
                "--hide-scrollbars",
                "--no-sandbox",
                "--disable-gpu",
                "--allow-file-access-from-files",
            ),
            *("--enable-logging=stderr", f"--user-data-dir={tmp_path}/profile", "--virtual-time-budget=5000"),
            *(["--blink-settings=preferredColorScheme=0"] if dark else []),
            *("--window-size=800,900", "--dump-dom", outer.as_uri()),
        ],
        capture_output=True,
        text=True,
        timeout=900,
        check=True,
    )
    seen = json.loads(re.search(r"<title>(.*?)</title>", ended.stdout)[1].replace("&quot;", '"'))  # type: ignore[index]
    assert (seen["wide"], seen["screen"]) == (390, 390)
    assert seen["cut"] == []
    assert seen["svgs"] == 16
    assert seen["background"] == ("rgb(18, 22, 29)" if dark else "rgb(255, 255, 255)")
    assert "CONSOLE" not in ended.stderr
