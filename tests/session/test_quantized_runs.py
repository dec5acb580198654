"""One publisher of a run and its quantized runs: from one baseline, bit for bit what separate publishers give."""

from __future__ import annotations

import gc
import json
import tracemalloc

import pytest
import torch

import sparserl
from sparserl import Publisher, Subscriber, sources
from sparserl.errors import SessionError, Unavailable
from sparserl.metrics import Callback
from sparserl.transport.stores.folder import FolderStore
from sparserl.weights import batches

SCHEMES = ("fp8_blockwise", "fp8_per_channel", "fp8_per_tensor", "int8", "mxfp4", "mxfp8", "nvfp4")


def model(seed=0):
    """Weights of two layers that engines fuse, one that is frozen, and some that are not quantized."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator).mul_(0.1).to(torch.bfloat16)

    return {
        "embed.weight": normal(40, 64),
        "layers.0.q_proj.weight": normal(130, 64),
        "layers.0.k_proj.weight": normal(66, 64),
        "layers.0.o_proj.weight": normal(64, 192),
        "layers.0.norm.weight": normal(64),
    }


FROZEN = "layers.0.o_proj.weight"


def step(weights, number):
    """Change some elements, by little and by much, also the largest of a block."""
    generator = torch.Generator().manual_seed(1000 + number)
    for name, tensor in weights.items():
        if name == FROZEN:
            continue
        flat = tensor.view(-1)
        where = torch.randint(0, flat.numel(), (max(2, flat.numel() // 100),), generator=generator)
        flat[where] *= 1.5
        flat[where[:1]] = 3.0 + number


def quantized_now(weights, scheme):
    """The bits that a quantized rollout must have."""
    return {name: tensor.clone() for name, tensor in sources.quantized(weights, scheme).weights().items()}


def empty_like(weights):
    return {name: torch.zeros_like(tensor.view(torch.uint8)).view(tensor.dtype) for name, tensor in weights.items()}


def equal(a, b):
    bits = [(x.reshape(-1).view(torch.uint8), b[name].reshape(-1).view(torch.uint8)) for name, x in a.items()]
    return a.keys() == b.keys() and all(torch.equal(x, y) for x, y in bits)


def steps_of(folder):
    """The buckets of every patch in a store, by what they contain."""
    return sorted(path.read_bytes() for path in folder.rglob("*") if path.is_file() and "buckets" in path.parts)


class Away(FolderStore):
    """A store that can go away."""

    away = False

    def put(self, name, data):
        if type(self).away:
            raise Unavailable("away")
        super().put(name, data)


@pytest.fixture
def away(monkeypatch):
    """Stores of which those in a folder called `away` can go away."""
    from sparserl.session.store import quantized_runs

    def opened(url):
        return Away(url.removeprefix("file://")) if url.endswith("away") else quantized_runs_open(url)

    quantized_runs_open = quantized_runs.open_writable
    monkeypatch.setattr(quantized_runs, "open_writable", opened)
    monkeypatch.setattr(Away, "away", False)
    return Away


@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_both_runs_are_those_of_separate_publishers(tmp_path, scheme, wait):
    """Receivers get the same bits, and the objects with changes are the same, byte for byte."""
    weights = model()
    url = f"file://{tmp_path}/pair-quantized"
    pair = Publisher(f"file://{tmp_path}/pair", weights, also={url: scheme}, ladder=(2, 4))
    alone = Publisher(f"file://{tmp_path}/alone", weights, ladder=(2, 4))
    alone_quantized = Publisher(
        f"file://{tmp_path}/alone-quantized", sources.quantized(weights, scheme), ladder=(2, 4)
    )
    live = empty_like(weights)
    live_quantized = empty_like(quantized_now(weights, scheme))
    subscribers = [Subscriber(pair.store.url, live), Subscriber(url, live_quantized)]
    for version in range(5):
        step(weights, version)
        alone.publish()
        alone_report = alone_quantized.publish()
        expected = {name: tensor.clone() for name, tensor in weights.items()}
        report = pair.publish() if wait else pair.publish_in_background()
        if not wait:
            step(weights, 100)  # belongs to no version that is looked at: it is taken back
            report = report.result()
            for name, tensor in weights.items():
                tensor.copy_(expected[name])
        assert report.version == version
        quantized_report = report.also[url]
        assert quantized_report.version == version
        assert quantized_report.digest == alone_report.digest
        assert (quantized_report.changed, quantized_report.kind) == (alone_report.changed, alone_report.kind)
        for subscriber in subscribers:
            subscriber.sync()
        assert equal(live, weights)
        assert equal(live_quantized, quantized_now(weights, scheme))
    assert pair.wait(4, 1, timeout=0, url=url) == 1
    for publisher in (pair, alone, alone_quantized):
        publisher.close()
    assert steps_of(tmp_path / "pair") == steps_of(tmp_path / "alone")
    assert steps_of(tmp_path / "pair-quantized") == steps_of(tmp_path / "alone-quantized")
    assert len(steps_of(tmp_path / "pair-quantized")) > 5
