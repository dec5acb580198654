"""The study: it counts as plain NumPy does, its figures keep their order, and its pages say what it found."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from benchmarks import session_tables  # noqa: E402
from research.study import __main__ as study  # noqa: E402
from research.study import follow as study_follow  # noqa: E402
from research.study import page as study_page  # noqa: E402
from research.study import run as study_run  # noqa: E402
from research.study import traces as study_traces  # noqa: E402
from research.study.plots import Axis, plot  # noqa: E402
from research.study.summary import summary  # noqa: E402
from sparserl import sources  # noqa: E402

pytestmark = pytest.mark.long

POINT = study_run.Point("tiny-grpo-5e-06", "tiny", "grpo", 5e-6, 4, prompts=4, group=4, warm_up=2)
DATA = Path(__file__).resolve().parents[1] / "data" / "trace"


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """The tiny model gains nothing from more; other tests should not notice."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Runs as they stand in the file: GRPO at a rate, and SFT."""
    folder = tmp_path_factory.mktemp("recordings")
    out = {}
    for point in (POINT, replace(POINT, name="tiny-sft-5e-06", algorithm="sft", start="fp32")):
        counted = study_run.run(point, folder, "cpu", 1, lambda _: None)
        made = summary(counted, folder / f"{point.name}.jsonl", folder / f"{point.name}-apart.jsonl")
        out[f"tiny/{point.name.removeprefix('tiny-')}"] = json.loads(json.dumps(made))
    return out


@pytest.fixture(scope="module")
def grpo(found: dict[str, Any]) -> study_page.Found:
    return study_page.Found(found["tiny/grpo-5e-06"])


def test_coarser_numbers_change_less(grpo: study_page.Found) -> None:
    """In every sync fp32 changes most, then fp16, bf16, and fp8 least."""
    for sync in range(1, POINT.syncs + 1):
        fp32, fp16, bf16, fp8 = (grpo.densities(precision)[sync] for precision in study_run.PRECISIONS)
        assert 1 >= fp32 > fp16 > bf16 > fp8 > 0


def test_one_patch_has_fewer_elements_than_the_chain(grpo: study_page.Found) -> None:
    """Of several syncs, elements that change twice or back count once or not at all; one sync is itself."""
    assert list(grpo.apart()) == [1, 2, 4]
    assert grpo.chained(1) == (1, 1)
    for distance in (2, 4):
        elements, size = grpo.chained(distance)
        assert elements > 1
        assert size > 1
    assert grpo.apart()[4] <= grpo.apart()[2] + sum(list(grpo.densities("bf16").values())[:2])


def test_profiles_keep_their_order(grpo: study_page.Found) -> None:
    """`raw` takes a position and a value, `gap` less, `ulp` less than that, `ctx` least."""
    for precision in ("fp16", "bf16"):
        raw, gap, ulp, ctx = (grpo.bits(precision, profile) for profile in study_page.PROFILES)
        assert 49 > raw > 48 > gap > ulp >= ctx > 1


def test_sums_of_a_recording_are_the_counts(grpo: study_page.Found) -> None:
    """Kinds, classes and steps of the later syncs hold every change once."""
    later = sum(grpo.counts["bf16"]["changed"][grpo.settled :])
    bf16 = grpo.precisions["bf16"]
    assert sum(changed for changed, _ in bf16["kinds"].values()) == later
    assert sum(changed for changed, _ in bf16["classes"]["bfloat16"].values()) == later
    assert sum(bf16["steps"].values()) == later
    assert 0 < sum(changed for changed, _ in bf16["layers"].values()) < later
    assert grpo.again()[1] == 0
    assert grpo.data["ever"] == sorted(grpo.data["ever"])
    assert grpo.data["ever"][-1] <= sum(grpo.counts["bf16"]["changed"])


def test_counts_are_those_of_numpy() -> None:
    """Bit by bit, not number by number: a zero that changes its sign has changed, a NaN that stays has not."""
    before = {"a": torch.tensor([0.0, 1.0, float("nan"), 3.0]), "b": torch.ones(2, 3)}
    after = {"a": torch.tensor([-0.0, 1.0, float("nan"), 3.5]), "b": torch.ones(2, 3)}
    assert study_run.count(before, after) == [2, 0]
    trained = study_run.Run(POINT, "cpu", lambda _: None)
    masters = {name: tensor.clone() for name, tensor in trained.masters().items()}
    trained.step(1)
    for precision in study_run.PRECISIONS:
        old, new = (study_run.cast(weights, precision) for weights in (masters, trained.masters()))
        plain = []
        for name in sorted(new):
            a, b = (w[name].contiguous().view(torch.uint8).numpy().reshape(w[name].numel(), -1) for w in (old, new))
            plain.append(int(np.count_nonzero((a != b).any(1))))
        assert study_run.count(old, new) == plain
        assert sum(plain) > 0


def test_masters_start_as_bf16_numbers() -> None:
    """As those of a published checkpoint do, unless the point says otherwise."""
    for start, exact in (("bf16", True), ("fp32", False)):
        masters = study_run.Run(replace(POINT, start=start), "cpu", lambda _: None).masters()
        assert exact == all(torch.equal(t, t.bfloat16().float()) for t in masters.values())


def test_the_cast_follows_later_where_masters_are_bf16_numbers() -> None:
    """They must go half a step before it notices; from any numbers it goes along in the mean."""
    point = replace(POINT, algorithm="sft", lr=1e-6)
    bf16, fp32 = (list(study_follow.follow(replace(point, start=start), (0, 3))) for start in study_follow.STARTS)
    assert [row.share for row in (bf16[0], fp32[0])] == [0, 0]
    assert 0 < bf16[1].share < 0.5 < fp32[1].share < 1.5
    assert bf16[1].masters < bf16[0].masters == bf16[0].rollout
    masters = {"w": torch.tensor([1.0, 2.0, 3.0])}
    moved = {"w": masters["w"] + torch.tensor([2.0**-9, 0.25, 0.0])}
    assert study_follow.gone(masters, moved) == 0.25**2 / (0.25**2 + 2.0**-18)
    assert study_follow.gone(masters, moved, "fp32") == 1


def test_looking_at_the_loss_changes_nothing() -> None:
    """Masters are what they were, whatever they were cast to."""
    trained = study_run.Run(replace(POINT, start="fp32"), "cpu", lambda _: None)
    before = {name: tensor.clone() for name, tensor in trained.masters().items()}
    assert trained.loss(["49131=11349\n"], "bf16") != trained.loss(["49131=11349\n"], "fp32")
    assert study_run.count(before, trained.masters()) == [0] * len(before)


def test_fp8_is_that_of_the_library() -> None:
    """Codes and scales are bit for bit those of `fp8_blockwise`, at the edges and in a block of zeros too."""
    torch.manual_seed(0)
    masters = {"a.weight": torch.randn(130, 257), "b.weight": torch.zeros(4, 4), "norm.weight": torch.randn(7)}
    mixed = {name: t if t.dim() == 2 else t.bfloat16() for name, t in masters.items()}
    made = sources.quantized(mixed, sources.fp8_blockwise(names=lambda spec: len(spec.shape) == 2)).weights()
    ours = study_run.cast(masters, "fp8")
    assert ours.keys() == dict(made).keys()
    assert not any(study_run.count(dict(made), ours))


def test_a_run_in_the_file_is_not_made_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is only looked up."""
    out = tmp_path / "study.json"
    out.write_text('{"tiny/grpo-5e-06": {"kept": true}}')
    assert study.main(["tiny", "--points", "grpo-5e-06", "--out", str(out), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"tiny/grpo-5e-06": {"kept": True}}


def test_the_file_has_a_line_for_each_run(tmp_path: Path) -> None:
    """And is read back as it was."""
    runs = {"tiny/b": {"changed": [1, 2]}, "tiny/a": {"é": 0.5}}
    study.keep(runs, tmp_path / "study.json")
    text = (tmp_path / "study.json").read_text()
    assert json.loads(text) == runs
    assert [line[:8] for line in text.splitlines()] == ["{", '"tiny/a"', '"tiny/b"', "}"]


def test_unknown_runs_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """With the names of those that there are."""
    with pytest.raises(SystemExit) as error:
        study.main(["tiny", "--points", "ppo"])
    assert error.value.code == 2
    assert "no such run: ppo; there are grpo-5e-07" in capsys.readouterr().err


def test_pages(found: dict[str, Any], grpo: study_page.Found, tmp_path: Path) -> None:
    """Tables have the figures, plots are SVG and hold every curve, what stands around them stays."""
    trace = {"traces/one": json.loads(json.dumps(study_traces.replay(DATA, "grpo_lr1e-6")))}
    (tmp_path / "study.md").write_text(f"before\n\n{study_page.BEGIN}\nold\n{study_page.END}\n\nafter\n")
    (tmp_path / "study.json").write_text(json.dumps(found | trace))
    study_page.write(found | trace, tmp_path)
    page = (tmp_path / "study.md").read_text()
    assert page.startswith("before\n")
    assert page.endswith(f"{study_page.END}\n\nafter\n")
    assert "old" not in page
    assert f"**{study_page.share(grpo.density('bf16'))}**" in page
    assert f"{grpo.ratio('bf16'):.0f}×" in page
    assert "## The traces" in page
    for name in study_page.TITLES:
        drawn = ET.parse(tmp_path / "plots" / f"{name}.svg").getroot()
        assert drawn.tag.endswith("svg")
        assert len(drawn.findall(".//{*}polyline")) >= 1
    results = "\n".join(session_tables.tables(tmp_path))
    assert "## Sparsity of real RL" in results
    assert f"**{study_page.share(grpo.density('bf16'))}**" in results


def test_starts_stand_side_by_side(found: dict[str, Any], grpo: study_page.Found) -> None:
    """A figure has a column for each start of the first model; a start without the run has nothing there."""
    run, sft = found["tiny/grpo-5e-06"], found["tiny/sft-5e-06"]
    both = {"tiny/grpo-5e-06": run, "tiny-from-fp32/grpo-5e-06": run, "tiny-from-fp32/sft-1e-06": sft}
    assert list(study_page.starts(study_page.families(both))) == ["from bf16", "from fp32"]
    rows = study_page.section(both)
    density = study_page.share(grpo.density("bf16"))
    assert f"| density, bf16, at 5e-06 | {density} | {density} |  | 0.94% |" in rows
    assert f"| SFT at 1e-6, bf16 |  | {study_page.share(study_page.Found(sft).density('bf16'))} |  | 2–4% |" in rows
    assert not any(row.startswith("| DAPO") for row in rows)


def test_a_share_that_is_not_zero_does_not_look_like_it() -> None:
    """Nor does zero look like something that was rounded."""
    assert [study_page.share(value) for value in (0, 4e-6, 5e-6, 0.00123, 0.5)] == [
        "0",
        "< 0.001%",
        "0.001%",
        "0.12%",
        "50.0%",
    ]


def test_a_plot_places_its_points() -> None:
    """The ends of a logarithmic axis are its decades, a linear one starts at zero; names are escaped."""
    up, across = Axis("up", str, log=True), Axis("across", str)
    drawn = ET.fromstring(plot("a < b", {"one": {0: 1.0, 10: 100.0}}, across, up, {"other": {5: 10.0}}))
    first, other = drawn.findall(".//{*}polyline")
    assert first.get("points") == "64.0,292.0 472.0,44.0"
    assert other.get("points") == "268.0,168.0"
    assert other.get("class") == "s1 dashed"


def test_a_trace_is_told_in_the_same_words() -> None:
    """Its counts are those that were written down when it was made."""
    told = study_traces.replay(DATA, "grpo_lr1e-6")
    written = json.loads((DATA / "grpo_lr1e-6.json").read_text())["syncs"]
    assert told["versions"] == [sync["sync"] for sync in written]
    assert told["changed"] == [sync["changed"] for sync in written]
    assert all(0 < again < changed for again, changed in zip(told["again"], told["changed"], strict=True))
    assert all(one <= chain for one, chain in told["apart"].values())
