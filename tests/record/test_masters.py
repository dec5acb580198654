"""What is recorded of fp32 masters and gradients: the figures of a plain computation, and never a cost of a version."""

from __future__ import annotations

import logging
import math
from collections import Counter
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import sparserl
from sparserl.errors import SparserlError, StoreError
from sparserl.record import Observer, Recorder, Recording
from sparserl.record.masters import binned, quantiles, sum_of_squares
from sparserl.record.page import page
from sparserl.record.summary import summary
from sparserl.sources.master_sample import MasterSampler
from sparserl.weights.region import Region
from sparserl.weights.staging import lazy_bits
from tests.record.test_page import parsed, texts

torch = pytest.importorskip("torch")
BF16 = torch.bfloat16


class Model(torch.nn.Module):
    """Two kinds of tensors, one of them with zeros and large values."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q_proj = torch.nn.Linear(40, 30, bias=False)
        self.norm = torch.nn.LayerNorm(30)
        with torch.no_grad():
            self.q_proj.weight[0] = 0.0
            self.q_proj.weight[1] *= 1e6

    def train_step(self, optimizer: Any, seed: int) -> None:
        """A step; some rows have no gradient."""
        optimizer.zero_grad()
        torch.manual_seed(seed)
        inputs = torch.randn(8, 40)
        inputs[:, :9] = 0.0
        self.norm(self.q_proj(inputs)).square().mean().backward()
        optimizer.step()


def adam(model: Model) -> Any:
    return torch.optim.AdamW(model.parameters(), lr=1e-5)


def expected_updates(old: Any, new: Any) -> dict[str, Any]:
    """The figures of one tensor, element by element."""
    counts: Counter[str] = Counter(sampled=old.numel())
    bins: Counter[str] = Counter()
    for before, after in zip(old.flatten(), new.flatten(), strict=True):
        if before.view(torch.int32) == after.view(torch.int32):
            continue
        counts["changed"] += 1
        visible = before.to(BF16).view(torch.int16) != after.to(BF16).view(torch.int16)
        counts["visible" if visible else "hidden"] += 1
        low = before.to(BF16).abs()
        step = float((low.view(torch.int16) + 1).view(BF16)) - float(low)
        size = abs(float(after) - float(before)) / step
        bins[str(math.floor(4 * math.log2(size)))] += 1
    ordered = {key: bins[key] for key in sorted(bins, key=int)}
    return {name: counts[name] for name in ("sampled", "changed", "visible", "hidden")} | {"bins": ordered}


@pytest.mark.parametrize("kind", ["module", "track", "masters"])
def test_all_elements(tmp_path: Path, kind: str) -> None:
    """Every figure is that of a plain computation: of cast parameters, tracked or not, and of masters apart."""
    model = Model()
    optimizer = adam(model)
    source: Any = sparserl.sources.module(model, cast=BF16)
    if kind == "track":
        source = sparserl.sources.track(optimizer, model, cast=BF16)
    if kind == "masters":
        narrow = deepcopy(model).to(BF16)
        weights = {name: name if "norm" in name else weight for name, weight in narrow.named_parameters()}
        masters = {weights[name]: master for name, master in model.named_parameters()}  # by name, or by the weight
        source = sparserl.sources.track(optimizer, narrow, masters=masters)
    recorder = Recorder(tmp_path / "run.jsonl", sample=None)
    with sparserl.Publisher(tmp_path / "store", source, observe=recorder) as publisher:
        for version in range(3):
            old = {name: p.detach().clone() for name, p in model.named_parameters()}
            model.train_step(optimizer, version)
            gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
            if kind != "module":  # what tracks steps has seen the gradients already
                optimizer.zero_grad()
            publisher.publish()
    sync = Recording.read(recorder.path).syncs[-1]
    new = dict(model.named_parameters())
    assert sync.sampling == {"elements": None, "seed": 0}
    assert sync.masters["q"] == expected_updates(old["q_proj.weight"], new["q_proj.weight"].detach())
    assert sum(kind["visible"] for kind in sync.masters.values()) == sync.total
    assert sync.masters["q"]["hidden"] > sync.masters["q"]["visible"] > 0
    gradient = gradients["q_proj.weight"].double()
    figures = summary(Recording.read(recorder.path))["precisions"]["bfloat16"]["gradients"]
    assert figures["q"]["norm"] == pytest.approx(float(gradient.norm()), rel=1e-14)
    assert figures["q"]["zero"] == float((gradient == 0).double().mean()) > 0.2
    sizes = gradient[gradient != 0].abs()
    for name, value in figures["q"]["size"].items():
        share = 0.5 if name == "median" else float(name.rstrip("%")) / 100
        exact = float(sizes.flatten().sort().values[math.ceil(share * sizes.numel()) - 1])
        assert exact < value <= exact * 2**0.25 * (1 + 1e-12)


def test_bins_and_sums_are_exact() -> None:
    """Powers of two begin a bin, subnormal numbers are counted, and squares add up in any order."""
    assert binned(np.array([1.0, 1.18, 1.19, 1.99, 2.0, 0.25])) == {"-8": 1, "0": 2, "1": 1, "3": 1, "4": 1}
    assert quantiles({0: 99, 7: 1}) == dict.fromkeys(("1%", "10%", "median", "90%", "99%"), 2**0.25)
    assert quantiles({}) == {}
    rng = np.random.default_rng(0)
    values = (rng.standard_normal(999) * 10.0 ** rng.integers(-44, 19, 999)).astype(np.float32)
    total = sum_of_squares(values)
    assert total == sum_of_squares(values[::3]) + sum_of_squares(values[1::3]) + sum_of_squares(values[2::3])
    assert total / 2**298 == math.fsum(float(value) ** 2 for value in values.astype(np.float64))
    assert sum_of_squares(np.array([1e-45], np.float32)) == 1


class ShardsSource:
    """Weights as a source."""

    def __init__(self, weights: Any) -> None:
        self._weights = weights

    def weights(self) -> Any:
        return self._weights


def sampled_values(sampler: MasterSampler, source: Any) -> dict[str, list[float]]:
    taken = sampler.take(source, source.weights())
    return {name: part.masters.tolist() for (name, _), part in taken.items()}


def test_which_elements_are_sampled() -> None:
    """A share of every tensor, rounded up, by the seed; parts have together what the whole has."""
    weights = {"a": torch.arange(6000.0).reshape(60, 100), "b": torch.arange(10.0)}
    table = sparserl.tensor_table({name: tensor.to(BF16) for name, tensor in weights.items()})

    def source(rows: slice) -> Any:
        region = Region((rows.start, 0), (rows.stop - rows.start, 100))
        parts = [sparserl.Part("a", region, lazy_bits(weights["a"][rows], BF16))]
        return ShardsSource(sparserl.Shards(table, parts))

    everything = sampled_values(MasterSampler(500, 7), source(slice(0, 60)))["a"]
    assert len(everything) == math.ceil(6000 * 500 / 6010)
    assert {int(value / 600) for value in everything} == {*range(10)}  # from all over the tensor
    halves = [sampled_values(MasterSampler(500, 7), source(rows))["a"] for rows in (slice(0, 17), slice(17, 60))]
    assert sorted(halves[0] + halves[1]) == everything
    assert min(map(len, halves)) > 100
    assert sampled_values(MasterSampler(500, 8), source(slice(0, 60)))["a"] != everything


def test_updates_count_from_the_last_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not from a publish that failed, nor with what happens after the capture of one in the background."""
    model = Model()
    recorder = Recorder(tmp_path / "run.jsonl", sample=None)
    weight = model.q_proj.weight.data
    source = sparserl.sources.module(model, cast=BF16)
    with sparserl.Publisher(tmp_path / "store", source, observe=recorder) as publisher:
        publisher.publish()
        weight[2, :5] += 1
        with monkeypatch.context() as patches:
            patches.setattr(type(publisher.store), "swap", _fail)
            with pytest.raises(StoreError):
                publisher.publish()
        weight[3, :2] += 1
        running = publisher.publish_in_background()
        weight[4, :9] += 1
        running.result()
        publisher.publish()
    changed = [sync.masters["q"]["changed"] for sync in Recording.read(recorder.path).syncs]
    assert changed == [7, 9]


def _fail(*_: Any, **__: Any) -> None:
    raise StoreError("the store is gone")


def test_trouble_does_not_stop_a_trainer(tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: Any) -> None:
    """What goes wrong while sampling is logged once a place; steps and versions go on, and changes are recorded."""
    model = Model()
    optimizer = adam(model)
    source = sparserl.sources.track(optimizer, model, cast=BF16)
    recorder = Recorder(tmp_path / "run.jsonl")
    monkeypatch.setattr(source, "training_state", _fail)
    with (
        caplog.at_level(logging.ERROR),
        sparserl.Publisher(tmp_path / "store", source, observe=recorder) as publisher,
    ):
        for version in range(3):
            model.train_step(optimizer, version)
            assert publisher.publish().version == version
    assert [record.getMessage() for record in caplog.records] == [
        "gradients were not sampled; later failures are not logged",
        "masters and gradients were not sampled; later failures are not logged",
    ]
    syncs = Recording.read(recorder.path).syncs
    assert [(bool(sync.total), sync.masters, sync.gradients) for sync in syncs] == [(True, {}, {})] * 2


def test_sources_without_masters(tmp_path: Path) -> None:
    """bf16 parameters have gradients and no masters; arrays have neither; and a recorder may sample nothing."""
    model = Model().to(BF16)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    recorders = [Recorder(tmp_path / f"{number}.jsonl", sample=sample) for number, sample in enumerate((100, 100, 0))]
    arrays = {"w": np.zeros(50, np.float32)}
    observers = [Observer(recorder, source) for recorder, source in zip(recorders, (model, arrays, model), strict=True)]
    for version in range(2):
        for observer in observers:
            observer.observe(version=version)
    (first,), (second,), (third,) = (Recording.read(recorder.path).syncs for recorder in recorders)
    assert (first.masters, list(first.gradients)) == ({}, ["norm", "q"])
    assert first.gradients["q"]["zero"] == 0
    for sync in (second, third):
        assert (sync.masters, sync.gradients, sync.sampling) == ({}, {}, {})


@pytest.mark.parametrize("options", [{"sample": -1}, {"sample": 0.5}, {"sample": True}, {"seed": -3}, {"seed": "a"}])
def test_options_are_checked(tmp_path: Path, options: dict[str, Any]) -> None:
    """By name, before a file is made."""
    with pytest.raises(SparserlError, match=f"^{next(iter(options))} is"):
        Recorder(tmp_path / "run.jsonl", **options)
    assert not (tmp_path / "run.jsonl").exists()


def test_the_page_shows_them(tmp_path: Path) -> None:
    """Curves, columns, a table of gradients and a sentence; the sample is named."""
    model = Model()
    optimizer = adam(model)
    recorder = Recorder(tmp_path / "run.jsonl", sample=400, seed=5)
    observer = Observer(recorder, sparserl.sources.track(optimizer, model, cast=BF16))
    for version in range(4):
        model.train_step(optimizer, version)
        observer.observe(version=version)
    recording = Recording.read(recorder.path)
    shown = parsed(page(recording))
    titles = texts(shown, "h3")
    assert {
        "fp32 and published changes",
        "Size of fp32 updates",
        "Norm of the gradients",
        "Gradients by size",
    } <= {*titles}
    figures = summary(recording)["precisions"]["bfloat16"]
    sentence = next(line for line in texts(shown, "li") if line.startswith("fp32 masters"))
    assert f"of {figures['masters']['sampled']:,} samples" in sentence
    assert any("about 400 elements" in caption and "seed 5" in caption for caption in texts(shown, "figcaption"))
    cells = [row for row in texts(shown, "tr") if row.startswith("q")]
    assert cells[0].startswith(f"q{figures['gradients']['q']['norm']:.3g}")
