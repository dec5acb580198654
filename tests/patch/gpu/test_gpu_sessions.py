"""Baselines, tracking and a session with weights on a GPU."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

import sparserl
from sparserl.errors import ChecksumMismatch, WrongBase
from sparserl.record import Recorder, Recording
from sparserl.session import anchors
from sparserl.session.baseline import NoBaseline, choose_baseline
from sparserl.session.options import BaselineOptions
from sparserl.targets import Change, modules
from sparserl.weights.dtypes import Bits
from sparserl.weights.local import LocalWeights
from tests.patch.gpu.gpu_weights import DEVICE, TWO, needs_gpu, needs_kernels, on_gpu, on_host, same_bits, two_versions
from tests.record.test_observing import figures

pytest.importorskip("triton")
torch = pytest.importorskip("torch")


class Model(torch.nn.Module):
    """A few parameters on the device."""

    def __init__(self, weights):
        super().__init__()
        for name, tensor in on_gpu(weights).items():
            self.register_parameter(name, torch.nn.Parameter(tensor, requires_grad=False))


@needs_gpu
def test_published_and_followed(tmp_path):
    """A trainer with its baseline on the device, observed, and a module there that follows it, validated."""
    one, two = two_versions("bfloat16", {"w": (300, 9), "v": (70,)}, changes=9)
    _, other = two_versions("bfloat16", {"w": (300, 9), "v": (70,)}, changes=9, seed=1)
    trainer, rollout = Model(one), Model(other)
    recorder = Recorder(tmp_path / "observed.jsonl")
    publisher = sparserl.Publisher(
        tmp_path / "store", sparserl.sources.module(trainer), baseline="device", profile="ctx", observe=recorder
    )
    subscriber = sparserl.Subscriber(tmp_path / "store", sparserl.targets.module(rollout), validate=trainer)
    publisher.publish()
    assert "where the weights are" in publisher.baseline
    subscriber.goto(None)
    assert same_bits(rollout.state_dict(), one)
    for weights in (two, one):
        with torch.no_grad():
            for name, tensor in on_gpu(weights).items():
                getattr(trainer, name).copy_(tensor)
        publisher.publish()
        subscriber.goto(None)
        assert same_bits(rollout.state_dict(), weights)
    on_hosts = Recorder(tmp_path / "host.jsonl")
    for version, (old, new) in enumerate(((one, two), (two, one)), 1):
        on_hosts.observe(on_host(old), on_host(new), version=version)
    assert figures(Recording.read(recorder.path)) == figures(Recording.read(on_hosts.path))


@needs_gpu
@pytest.mark.parametrize("coded", [True, False])
def test_an_anchor_is_built_where_the_weights_are(tmp_path, monkeypatch, coded):
    """Nothing of it is built in host memory; the commit exchanges bits on the device, and can be taken back."""
    shapes = {"w": (300, 9), "v": (70,), "number": ()}
    one, two = two_versions("bfloat16", shapes, changes=9)
    _, other = two_versions("bfloat16", shapes, changes=9, seed=1)
    rollout = Model(other)
    trainer = on_host(one)
    profile = "auto" if coded else "raw"
    publisher = sparserl.Publisher(tmp_path.as_uri(), trainer, profile=profile, anchor_after=100.0)
    publisher.publish()
    for name, bits in on_host(two).items():
        np.copyto(trainer[name].array, bits.array)
    publisher.publish()
    monkeypatch.setattr(anchors, "zeros", None)
    subscriber = sparserl.Subscriber(tmp_path.as_uri(), sparserl.targets.module(rollout))
    assert subscriber.stage().kind == "anchor"
    (prepared,) = subscriber._staged.prepared
    undo = prepared.commit()
    assert same_bits(rollout.state_dict(), two)
    undo()
    assert same_bits(rollout.state_dict(), other)
    assert subscriber.commit().version == 1
    assert same_bits(rollout.state_dict(), two)
    subscriber.audit()


@needs_gpu
def test_published_to_a_group(tmp_path, nothing_leaves_the_gpu):
    """The baseline of a group's publisher lies where the weights are, and moves on there, patch by patch."""
    one, two = two_versions("bfloat16", {"w": (300, 9), "v": (70,)}, changes=9)
    trainer = Model(one)
    store = torch.distributed.FileStore(str(tmp_path / "group"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        with sparserl.GroupPublisher(None, trainer, baseline="device", profile="ulp", threads=1) as publisher:
            publisher.publish()
            assert "where the weights are" in publisher.baseline
            for weights in (two, one):
                for name, tensor in on_gpu(weights).items():
                    getattr(trainer, name).copy_(tensor)
                assert publisher.publish().kind == "patch"
                assert same_bits(publisher._baseline.kept.weights, weights)
    finally:
        torch.distributed.destroy_process_group()


@needs_kernels
def test_several_patches_are_staged_as_their_difference(monkeypatch, nothing_leaves_the_gpu):
    """It is found and located where the weights are, keeps no copy of them, and is written, undone or refused whole."""
    shapes = {"v": (7,), "w": (30, 9)}
    versions = [*two_versions("bfloat16", shapes, changes=3)]
    versions.append({name: Bits(bits.array.copy(), bits.dtype) for name, bits in versions[1].items()})
    versions[2]["w"].array[3] ^= 1
    patches = [sparserl.diff(old, new, profile="raw") for old, new in pairwise(versions)]
    monkeypatch.setattr(modules, "diff", None)
    monkeypatch.setattr(modules, "squash", None)
    copies = []
    of = LocalWeights.of
    monkeypatch.setattr(LocalWeights, "of", lambda *args: copies.append(weakref.ref(local := of(*args))) or local)
    rollout = on_gpu(versions[0])
    target = sparserl.targets.module(rollout)
    change = Change("run", 0.0, 2, patches[-1].result, patches)
    staged = target.prepare(change)
    assert staged.changed == sum((versions[0][n].array != versions[2][n].array).sum() for n in shapes)
    assert same_bits(rollout, versions[0])
    gc.collect()
    assert all(local() is None or local().lies_where(of(rollout)) for local in copies)
    undo = staged.commit()
    assert same_bits(rollout, versions[2])
    undo()
    assert same_bits(rollout, versions[0])
    staged = target.prepare(change)
    with torch.no_grad():
        rollout["w"][3] = -rollout["w"][3]
    drifted = on_host(rollout)
    with pytest.raises(WrongBase, match="changed after the patch was staged"):
        staged.commit()
    assert same_bits(rollout, drifted)
    with pytest.raises(ChecksumMismatch, match="lead to digest"):
        target.prepare(replace(change, digest=patches[0].result))


@pytest.mark.long
@needs_gpu
def test_baselines():
    """A baseline lies where the weights are, and moves on there; weights in host memory have theirs in host memory."""
    old, new = two_versions("bfloat16", TWO)
    weights = on_gpu(old) | {"near": np.zeros(9, np.float32)}
    kept, words = choose_baseline(weights, BaselineOptions("device", None))
    assert "where the weights are" in words
    assert all(isinstance(bits, Bits) == (name == "near") for name, bits in kept.weights.items())
    for name, tensor in on_gpu(new).items():
        weights[name].copy_(tensor)
    weights["near"][3] = 1.0
    found = kept.capture(weights)
    patch = found.encode()
    kept.advance(patch, found)
    assert same_bits({name: kept.weights[name] for name in new}, new)
    assert kept.digest == sparserl.digest(weights)
    _, words = choose_baseline(on_host(old), BaselineOptions("device", None))
    assert "in host memory" in words


@needs_gpu
@pytest.mark.parametrize("mastered", [True, False])
def test_tracked(mastered, nothing_leaves_the_gpu):
    """Steps on a device are marked there: the changes of each and no others, and how the sums moved with them."""
    old, _ = two_versions("bfloat16", {"w": (30, 40), "v": (70,), "tied": (50,)})
    for bits in old.values():
        bits.array[...] &= 0xBFFF  # neither NaNs nor infinities
    model = Model(old)
    model.twin = model.tied
    params = dict(model.named_parameters())
    masters = {p: p.detach().float() for p in params.values()} if mastered else {}
    written = [*masters.values()] if mastered else [*params.values()]
    source = sparserl.sources.track(None, model, params=written, masters=masters)
    kept = NoBaseline(source.weights())
    source.committed()
    seen = on_host(model.state_dict())
    marked = {name: np.zeros(bits.array.shape, bool) for name, bits in seen.items()}
    rng, rollout = np.random.default_rng(0), on_gpu(seen)
    for _ in range(2):
        with source.step(), torch.no_grad():
            for tensor in written:
                flat = tensor.view(-1)
                where = torch.from_numpy(rng.permutation(flat.numel())[:9])
                flat[where.to(DEVICE)] = flat[where.to(DEVICE)] * 2 + 1
        now = on_host(model.state_dict())
        for name, bits in now.items():
            marked[name] |= bits.array != seen[name].array
        seen = now
    shards = source.weights()
    for part in shards.parts:
        assert np.array_equal(part.marks.between(0, part.region.numel), np.flatnonzero(marked[part.tensor]))
    found = kept.capture(shards)
    patch = found.encode()
    del marked["twin"], rollout["twin"]  # published under its first name alone
    assert patch.changed == sum(map(np.count_nonzero, marked.values()))
    patch.apply(rollout)
    rollout["twin"] = rollout["tied"]
    assert same_bits(rollout, seen)
