"""Weights on GPUs without kernels are read through host memory, and written by plain operations of torch.

Without such a GPU, CPU tensors pass for tensors on one.
"""

from __future__ import annotations

import numpy as np
import pytest

import sparserl
from sparserl.errors import WrongBase
from sparserl.kernels.gpu import support
from sparserl.kernels.gpu.ints import INTS
from sparserl.patch.application import stage_all
from sparserl.sources import track
from sparserl.weights import gpu_elements, memory
from sparserl.weights.local import LocalWeights
from tests.dtypes import long_if_rare

torch = pytest.importorskip("torch")
DTYPES = ("float32", "uint8", "float8_e4m3fn", "int64")
DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


@pytest.fixture(autouse=True)
def without_kernels(monkeypatch):
    monkeypatch.setenv("SPARSERL_GPU", "off")
    monkeypatch.setattr(memory, "is_on_gpu", lambda tensor: tensor.device == DEVICE)


def weights(seed=0, dtype=torch.bfloat16):
    """Contiguous, transposed, cut from a larger tensor, beside others in one storage, empty, of no dimension."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        bits = torch.randint(0, 256, (*shape, dtype.itemsize), generator=generator, dtype=torch.uint8)
        return bits.view(dtype).reshape(shape).to(DEVICE)

    both = draw(200)
    return {
        "plain": draw(70, 30),
        "transposed": draw(30, 70).T,
        "columns": draw(50, 90)[:, 20:50],
        "first": both[:90],
        "second": both[90:].view(11, 10),
        "empty": draw(0, 4),
        "scale": draw(),
    }


def clone(tensors):
    return {name: tensor.clone() for name, tensor in tensors.items()}


def trained(tensors, seed=1, share=0.1):
    """New bits in some elements."""
    generator = torch.Generator().manual_seed(seed)
    new = {}
    for name, tensor in tensors.items():
        bits = tensor.detach().cpu().clone().contiguous().view(INTS[tensor.element_size()])
        chosen = torch.rand(bits.shape, generator=generator) < share
        new[name] = torch.where(chosen, bits ^ 1, bits).view(tensor.dtype).to(DEVICE)
    return new


def same(a, b):
    return all(
        torch.equal(a[n].contiguous().view(torch.uint8), b[n].contiguous().view(torch.uint8)) for n in a if a[n].dim()
    ) and sparserl.digest(a) == sparserl.digest(b)


@pytest.mark.parametrize("profile", ["raw", "gap", "ulp", "ctx"])
def test_every_layout(profile):
    """Patches are made, applied and taken back in any memory layout."""
    old = weights()
    new = trained(old)
    patch = sparserl.diff(old, new, profile=profile)
    assert LocalWeights.of(old).gpu_streams
    assert not LocalWeights.of(old).has_kernels
    before = clone(old)
    staged = stage_all(patch.contents, old)
    assert same(old, before)
    undo = staged.commit()
    assert same(old, new)
    undo()
    assert same(old, before)
    patch.apply(old)
    assert same(old, new)
    assert patch.apply(old).already


@pytest.mark.parametrize("name", [pytest.param(name, marks=long_if_rare(name)) for name in DTYPES])
def test_every_width(name):
    old = weights(dtype=getattr(torch, name))
    new = trained(old)
    sparserl.diff(old, new, profile="gap").apply(old)
    assert same(old, new)


def test_all_or_nothing(monkeypatch):
    """A write that fails in the middle is taken back, and what something else has written is noticed."""
    old = weights()
    new = trained(old)
    staged = stage_all(sparserl.diff(old, new, profile="ulp").contents, old)
    before = clone(old)
    write = gpu_elements.GpuElements.write
    calls = []

    def fail(self, bits):
        write(self, bits)
        calls.append(len(bits))
        if len(calls) == 1:
            raise MemoryError

    monkeypatch.setattr(gpu_elements.GpuElements, "write", fail)
    with pytest.raises(MemoryError):
        staged.commit()
    assert same(old, before)
    monkeypatch.undo()


def test_what_something_else_has_written():
    old = weights()
    new = trained(old)
    staged = stage_all(sparserl.diff(old, new, profile="ulp").contents, old)
    position = (new["plain"].view(torch.int16) != old["plain"].view(torch.int16)).nonzero()[0]
    old["plain"].view(torch.int16)[tuple(position)] ^= 7
    before = clone(old)
    with pytest.raises(WrongBase):
        staged.commit()
    assert same(old, before)


def test_sessions(tmp_path):
    """A trainer and an engine, both on such a GPU: anchors, patches, several at once, and a tracked trainer."""
    model = {name: tensor.clone() for name, tensor in weights().items()}
    with (
        sparserl.Publisher(f"file://{tmp_path}", model, baseline="device", ladder=None) as publisher,
        sparserl.Subscriber(f"file://{tmp_path}", live := weights(seed=5)) as subscriber,
    ):
        publisher.publish()
        assert subscriber.sync().kind == "anchor"
        for seed in range(6):
            for name, tensor in trained(model, seed).items():
                model[name].copy_(tensor)
            publisher.publish()
            if seed != 2:
                assert subscriber.sync().kind == "patch"
                assert same(live, model)
        subscriber.audit()


def test_a_tracked_trainer(tmp_path):
    layer = torch.nn.Linear(40, 30).to(DEVICE)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.01)
    live = {name: torch.zeros_like(p) for name, p in layer.named_parameters()}
    source = track(optimizer, layer)
    with sparserl.Publisher(f"file://{tmp_path}", source, baseline="none") as publisher:
        publisher.publish()
        for _ in range(3):
            layer(torch.ones(1, 40, device=DEVICE)).sum().backward()
            optimizer.step()
            publisher.publish()
    with sparserl.Subscriber(f"file://{tmp_path}", live) as subscriber:
        subscriber.sync()
    assert same(live, {name: p.detach() for name, p in layer.named_parameters()})


class Device:
    type = "cuda"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, None),
        ({"hip": "6.4"}, "for NVIDIA's GPUs"),
        ({"capability": (7, 5)}, "capability is 7.5, the kernels need 8.0"),
        ({"triton": None}, "Triton is not installed"),
        ({"compilers": ()}, "neither gcc nor clang"),
        ({"compilers": ("clang",)}, None),
        ({"compilers": (), "CC": "/opt/cc"}, None),
    ],
)
def test_obstacles(monkeypatch, change, reason):
    """Each is named."""
    monkeypatch.delenv("SPARSERL_GPU")
    monkeypatch.delenv("CC", raising=False)
    if "CC" in change:
        monkeypatch.setenv("CC", change["CC"])
    compilers = change.get("compilers", ("gcc",))
    monkeypatch.setattr(torch.version, "hip", change.get("hip"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: change.get("capability", (8, 0)))
    monkeypatch.setattr(support, "find_spec", lambda _: change.get("triton", "found"))
    monkeypatch.setattr(support.shutil, "which", lambda name: name if name in compilers else None)
    support._obstacle.cache_clear()
    said = support.obstacle(Device())
    support._obstacle.cache_clear()
    assert said is None if reason is None else reason in said


@pytest.mark.long
def test_nothing_of_triton_is_needed():
    """Neither to write nor to read."""
    import subprocess
    import sys

    code = """
import sys
sys.modules["triton"] = None
import torch, sparserl
from sparserl.weights import memory
memory.is_on_gpu = lambda tensor: True
old = {"w": torch.zeros(100, dtype=torch.bfloat16)}
new = {"w": torch.ones(100, dtype=torch.bfloat16)}
for profile in ("ulp", "ctx"):
    live = {"w": old["w"].clone()}
    sparserl.diff(live, new, profile=profile).apply(live)
    assert torch.equal(live["w"], new["w"])
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


def test_numpy_is_left_alone():
    """What is in host memory is still read in place."""
    assert not LocalWeights.of({"w": np.zeros(3, np.float32)}).gpu_streams
