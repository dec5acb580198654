"""The doctor says which way weights on each GPU go, and why. Where there is none, torch's answers are made up."""

from __future__ import annotations

import pytest

from sparserl.cli import checks
from sparserl.cli.checks import Finding

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

ANSWERS = """
import shutil, types, torch
properties = types.SimpleNamespace(name="Made up", total_memory=80 * 10**9)
torch.cuda.is_available = lambda: True
torch.cuda.device_count = lambda: {count}
torch.cuda.synchronize = lambda device: None
torch.cuda.get_device_properties = lambda device: properties
torch.cuda.get_device_capability = lambda device: {capability}
torch.version.hip = {hip!r}
shutil.which = {which}
"""
SLOWLY = "weights are read through host memory, and written by torch"


def examined() -> list[Finding]:
    """What the doctor says of GPUs."""
    with checks.torch_probe() as probe:
        return [finding for finding in checks.examine_torch(probe) if finding.name.startswith("gpu")]


def gpus(monkeypatch: pytest.MonkeyPatch, **answers: object) -> list[Finding]:
    """What the doctor says of GPUs, if torch answers so."""
    monkeypatch.delenv("CC", raising=False)
    answers = {"count": 1, "capability": (9, 0), "hip": None, "which": "lambda name: name"} | answers
    monkeypatch.setattr(checks, "_TORCH", ANSWERS.format(**answers) + checks._TORCH)
    return examined()


@pytest.mark.parametrize(
    ("answers", "switch", "reason"),
    [
        ({"capability": (7, 5)}, "on", "its compute capability is 7.5, the kernels need 8.0"),
        pytest.param({"hip": "6.4"}, "on", "the kernels are for NVIDIA's GPUs", marks=pytest.mark.long),
        pytest.param(
            {"which": "lambda name: None"},
            "on",
            "Triton finds no C compiler: neither gcc nor clang, nor",
            marks=pytest.mark.long,
        ),
        pytest.param({}, "off", "SPARSERL_GPU is off", marks=pytest.mark.long),
    ],
)
def test_obstacles(monkeypatch: pytest.MonkeyPatch, answers: dict[str, object], switch: str, reason: str) -> None:
    """Kernels are missing where something stands in their way; it is named, and no kernel is run."""
    monkeypatch.setenv("SPARSERL_GPU", switch)
    found = gpus(monkeypatch, **answers)
    assert [(finding.name, finding.state, finding.remedy) for finding in found] == [("gpu", "missing", "")]
    assert found[0].detail.startswith(f"Made up, 80.00 GB: {reason}")
    assert found[0].detail.endswith(f"; {SLOWLY}")


@pytest.mark.long
@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels run here")
def test_a_kernel_that_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing stands in the way a kernel is run, on each GPU; what it raises is told, and what to do."""
    monkeypatch.setenv("SPARSERL_GPU", "on")
    found = gpus(monkeypatch, count=2)
    assert [(finding.name, finding.state) for finding in found] == [("gpu", "broken"), ("gpu 1", "broken")]
    for finding in found:
        assert finding.text.startswith("Made up, 80.00 GB: a kernel was tried there: ")
        assert finding.text.endswith("; SPARSERL_GPU=off does without kernels")


@pytest.mark.long
def test_an_unknown_word(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is told where it matters."""
    monkeypatch.setenv("SPARSERL_GPU", "false")
    (found,) = gpus(monkeypatch)
    assert found.state == "broken"
    assert "SPARSERL_GPU is 'false'; set it to on or off" in found.detail


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_kernels_that_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU with kernels one was run, and its sums are right."""
    monkeypatch.setenv("SPARSERL_GPU", "on")
    found = examined()
    assert len(found) == torch.cuda.device_count()
    assert {finding.state for finding in found} == {"works"}
