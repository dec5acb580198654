"""Checks what works on this machine: packages, kernels, GPUs, transports, memory speed, and a store.

What is reported to work was tried: patches are made and applied, objects are written and swapped, torch is imported (in
a process of its own, as it may crash), a kernel sums up bits on each GPU. Engines are only looked for, since importing
one takes longer than all the rest.
"""

from __future__ import annotations

import importlib
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, closing, suppress
from dataclasses import dataclass
from importlib import metadata, util

import numpy as np

from ..errors import NotFound, Refused, SparserlError, StoreError
from ..humanize import size
from ..parallel import default_threads
from ..transport.stores.base import Store
from ..transport.stores.deadline import within
from ..transport.stores.opening import open_store

# The packages of each extra, by the names they are imported under. Those in ENGINES are not imported.
EXTRAS: dict[str, tuple[str, ...]] = {
    "torch": ("torch",),
    "store": ("obstore", "cryptography"),
    "serve": ("starlette", "uvicorn"),
    "metrics": ("prometheus_client",),
    "rl": ("peft", "safetensors", "torch", "transformers"),
    "trl": ("trl",),
    "ray": ("ray",),
    "testing": ("pytest",),
}
ENGINES = ("torch", "transformers", "peft", "trl", "ray", "vllm", "sglang")
Connect = Callable[[], AbstractContextManager[Store]]
_REMOVAL_SECONDS = 10.0  # to remove what a failed trial has left in a store
_INTERRUPTED_SECONDS = 0.3  # the same after Ctrl-C: nobody wants to wait
_MEGABYTES = 64  # read and copied at a time: more than most caches hold
_TORCH = """
import json, torch
from sparserl.kernels import gpu
def examine(device):
    torch.cuda.synchronize(device)
    obstacle = gpu.support.obstacle(device)
    if obstacle is None and not gpu.trial.sums_are_right(device):
        raise ArithmeticError("its sums are wrong")
    return obstacle
facts = {"version": torch.__version__, "backends": [], "devices": []}
if torch.distributed.is_available():
    facts["backends"] = [b for b in ("gloo", "nccl", "mpi") if torch.distributed.is_backend_available(b)]
if torch.cuda.is_available():
    for i in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(i)
        obstacle = fault = None
        try:
            obstacle = examine(torch.device("cuda", i))
        except Exception as error:
            fault = f"{type(error).__name__}: {error}"
        facts["devices"].append([properties.name, properties.total_memory, obstacle, fault])
print(json.dumps(facts))
"""


@dataclass(frozen=True)
class Finding:
    """One thing that was checked.

    Attributes:
        topic: What kind of thing it is, such as "package" or "transport".
        name: Its name, unique among all findings.
        state: `works` if it was tried, `installed` if it was only looked for, `missing`, or `broken`.
        detail: A version, a speed, or what is wrong.
        remedy: What to do about it, if anything.
    """

    topic: str
    name: str
    state: str
    detail: str = ""
    remedy: str = ""

    @property
    def ok(self) -> bool:
        return self.state in ("works", "installed")

    @property
    def text(self) -> str:
        """Detail and remedy in one line."""
        return "; ".join(part for part in (self.detail, self.remedy) if part)


def examine(url: str | None = None, connect: Connect | None = None) -> list[Finding]:
    """Run all checks.

    Args:
        url: A store to check as well; an object is written to it for a moment.
        connect: Opens that store, where the URL alone is not enough.
    """
    with torch_probe() as torch:
        basics = [_python(), _kernels()]
        others = [*packages(), *_transports()]
        findings = [*basics, *examine_torch(torch), *others]
    findings += speeds()  # when nothing else runs
    if url is not None:
        findings.append(store(url, connect))
    return findings


def packages() -> list[Finding]:
    """Every package of every extra, and the engines."""
    extra_of = {package: extra for extra, names in reversed(EXTRAS.items()) for package in names}
    findings = [_package(package, extra) for package, extra in extra_of.items() if package != "torch"]
    for name in ENGINES:
        if name not in extra_of:
            state = "missing" if util.find_spec(name) is None else "installed"
            findings.append(Finding("package", name, state, _version(name)))
    return sorted(findings, key=lambda finding: finding.name)


def speeds() -> list[Finding]:
    """Speed of memory with one thread and with the default number of threads: the best of several rounds."""
    source = np.ones(_MEGABYTES * 10**6 // 8, np.uint64)
    copy = np.zeros_like(source)
    works: dict[str, Callable[[slice], object]] = {
        "read": lambda part: np.bitwise_xor.reduce(source[part]),
        "copy": lambda part: np.copyto(copy[part], source[part]),
    }
    free = _available()
    findings = [Finding("memory", "available", "works", "unknown" if free is None else size(free))]
    for name, work in works.items():
        rates = {threads: source.nbytes / _best(work, source.size, threads) for threads in (1, default_threads())}
        text = ", ".join(f"{rate / 1e9:.1f} GB/s with {threads} thread(s)" for threads, rate in rates.items())
        findings.append(Finding("memory", name, "works", text))
    return findings


def store(url: str, connect: Connect | None = None) -> Finding:
    """Whether the store at a URL can hold a run: it keeps objects, and swaps a head only under its condition."""
    started = time.perf_counter()
    try:
        with connect() if connect is not None else closing(open_store(url)) as opened:
            detail = trial(opened) if opened.writable else _readable(opened)
    except (SparserlError, OSError) as error:
        return Finding("store", url, "broken", " ".join(str(error).split()))
    return Finding("store", url, "works", f"{detail}; {(time.perf_counter() - started) * 1e3:.0f} ms")


def trial(opened: Store) -> str:
    """Write, swap and delete an object with a random name; raises `StoreError` if the store breaks a promise."""
    name = f"doctor/{uuid.uuid4().hex}"
    try:
        tag = opened.swap(name, b"1", None)
        _require(opened.get(name, 10).data == b"1", "an object reads back other bytes than were written")
        _refused(opened, name, None, "it creates an object that exists already")
        after = opened.swap(name, b"2", tag)
        _refused(opened, name, tag, "it replaces an object although the condition names an older one")
        _require(opened.get(name, 10) == (b"2", after), "a refused write has changed the object")
        _require(name in [item.name for item in opened.list("doctor/")], "an existing object is not listed")
    except BaseException as error:
        seconds = _REMOVAL_SECONDS if isinstance(error, Exception) else _INTERRUPTED_SECONDS
        with within(seconds), suppress(SparserlError):
            opened.delete([name])
        raise
    opened.delete([name])
    try:
        opened.get(name, 10)
    except NotFound:
        return "conditional puts are honoured; the trial object is removed"
    raise StoreError(f"{name} still exists after it was deleted")


def _refused(opened: Store, name: str, tag: str | None, otherwise: str) -> None:
    try:
        opened.swap(name, b"3", tag)
    except Refused:
        return
    raise StoreError(
        f"the store does not honour conditional puts: {otherwise}. Two publishers would not notice each other"
    )


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise StoreError(otherwise)


def _readable(opened: Store) -> str:
    """What a read-only store holds; it must have a head."""
    from ..session.store.retention import read_head

    head, _ = read_head(opened, None)
    return f"can be read: run {head.run}, version {head.version}"


def _python() -> Finding:
    from .. import __version__

    machine = f"{platform.machine()}, {default_threads()} thread(s) on {os.cpu_count()} core(s)"
    return Finding("python", "sparserl", "works", f"{__version__}, Python {platform.python_version()}, {machine}")


def _kernels() -> Finding:
    """Whether the CPU kernels work: a patch of every profile is made and applied."""
    from ..codec import PROFILES
    from ..patch import diff

    started = time.perf_counter()
    try:
        for profile in PROFILES:
            old = np.zeros(1000, np.float32)
            new = np.zeros(1000, np.float32)
            new[::7] = np.arange(143)
            diff({"w": old}, {"w": new}, profile=profile).apply({"w": old})
            if not np.array_equal(old.view(np.uint32), new.view(np.uint32)):
                return Finding("kernels", "cpu", "broken", f"a patch of profile {profile} does not give its result")
    except Exception as error:  # noqa: BLE001  # compiling may raise anything
        return Finding("kernels", "cpu", "broken", f"{type(error).__name__}: {error}", "pip install --upgrade numba")
    took = f"compiled or loaded, and run, in {time.perf_counter() - started:.1f} s"
    return Finding("kernels", "cpu", "works", f"profiles {', '.join(PROFILES)}: {took}")


def torch_probe() -> subprocess.Popen[str]:
    """A process that imports torch, tries its GPUs, and prints what `examine_torch` reads."""
    command = [sys.executable, "-c", _TORCH]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)  # noqa: S603  # ours


def examine_torch(probe: subprocess.Popen[str]) -> list[Finding]:
    """What torch reports, from a process of its own."""
    if util.find_spec("torch") is None:
        probe.kill()
        return [Finding("package", "torch", "missing", "", _install("torch"))]
    try:
        output, errors = probe.communicate(timeout=60)
    except subprocess.TimeoutExpired:
        probe.kill()
        return [Finding("package", "torch", "broken", "importing it and a kernel on each GPU take more than a minute")]
    if probe.returncode:
        last = (errors.strip().splitlines() or [f"importing it ends with exit code {probe.returncode}"])[-1]
        return [Finding("package", "torch", "broken", last)]
    facts = json.loads(output)
    return [
        Finding("package", "torch", "works", facts["version"]),
        _process_groups(facts["backends"]),
        *(_gpus(facts["devices"]) or [Finding("kernels", "gpu", "missing", "torch sees no CUDA device")]),
    ]


def _process_groups(backends: list[str]) -> Finding:
    if not backends:
        return Finding("transport", "process-group", "missing", "this torch has no backend of torch.distributed")
    return Finding("transport", "process-group", "works", ", ".join(backends))


def _gpus(gpus: Iterable[tuple[str, int, str | None, str | None]]) -> list[Finding]:
    """Which GPUs kernels run on, and why not on others."""
    findings = []
    for number, (model, memory, obstacle, fault) in enumerate(gpus):
        name = f"gpu {number}" if number else "gpu"
        detail = f"{model}, {size(memory)}: "
        remedy = ""
        if fault is not None:
            state = "broken"
            detail += f"a kernel was tried there: {' '.join(fault.split())}"
            remedy = "SPARSERL_GPU=off does without kernels"
        elif obstacle is not None:
            state = "missing"
            detail += f"{obstacle}; weights are read through host memory, and written by torch"
        else:
            state = "works"
            detail += "kernels compare, encode, decode and write weights there"
        findings.append(Finding("kernels", name, state, detail, remedy))
    return findings


def _package(name: str, extra: str) -> Finding:
    if util.find_spec(name) is None:
        return Finding("package", name, "missing", "", _install(extra))
    if name in ENGINES:
        return Finding("package", name, "installed", _version(name))
    try:
        importlib.import_module(name)
    except Exception as error:  # noqa: BLE001  # a package may raise anything while it is imported
        return Finding("package", name, "broken", f"{type(error).__name__}: {error}", _install(extra))
    return Finding("package", name, "works", _version(name))


def _transports() -> list[Finding]:
    with tempfile.TemporaryDirectory(prefix="sparserl-") as folder:
        attempt = store(f"file://{folder}")
    findings = [Finding("transport", "folder", attempt.state, f"file://: {attempt.detail}")]
    for name, detail, extra, modules in (
        ("object-storage", "s3://, gs://, az://: give a URL to test it", "store", ("obstore",)),
        ("http-server", "sparserl serve", "serve", ("starlette", "uvicorn")),
    ):
        if all(util.find_spec(package) for package in modules):
            findings.append(Finding("transport", name, "installed", detail))
        else:
            findings.append(Finding("transport", name, "missing", detail, _install(extra)))
    return findings


def _best(work: Callable[[slice], object], count: int, threads: int) -> float:
    """The least seconds that threads take for work on `count` elements, each on its part."""
    cuts = [count * part // threads for part in range(threads + 1)]
    parts = [slice(low, high) for low, high in zip(cuts, cuts[1:], strict=False)]
    seconds = []
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(4):
            started = time.perf_counter()
            list(pool.map(work, parts))
            seconds.append(time.perf_counter() - started)
    return min(seconds)


def _available() -> int | None:
    """Bytes of free memory on Linux; None elsewhere."""
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:  # noqa: PTH123
            return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return None


def _version(name: str) -> str:
    try:
        return metadata.version(name.replace("_", "-"))
    except metadata.PackageNotFoundError:
        return ""


def _install(extra: str) -> str:
    return f"pip install 'sparserl[{extra}]'"


def unmet(findings: Sequence[Finding], needs: Sequence[str]) -> list[Finding]:
    """The findings that must work and do not: those named in `needs`, and the store."""
    return [finding for finding in findings if not finding.ok and (finding.name in needs or finding.topic == "store")]
