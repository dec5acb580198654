"""What works on this machine: packages, kernels, devices, transports, the speed of memory, a store that is asked for.

What is said to work was tried: patches are made and applied, objects are put and swapped, torch is imported (in a
process of its own, which may crash). Engines are only looked for: importing one takes longer than all the rest.
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

# Which packages each extra brings, by the name they are imported under. Those in ENGINES are not imported.
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
Opening = Callable[[], AbstractContextManager[Store]]
_REMOVAL = 10.0  # seconds to remove what a trial that failed has left in a store
_MEGABYTES = 64  # read and copied at a time: more than the caches of most machines hold
_TORCH = """
import json, torch
found = {"version": torch.__version__, "backends": [], "devices": []}
if torch.distributed.is_available():
    found["backends"] = [b for b in ("gloo", "nccl", "mpi") if torch.distributed.is_backend_available(b)]
if torch.cuda.is_available():
    for i in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(i)
        torch.ones(1, device=f"cuda:{i}").sum().item()
        found["devices"].append([about.name, about.total_memory, [about.major, about.minor]])
print(json.dumps(found))
"""


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    state: `works` if it was tried, `installed` if it was only looked for, `missing`, or `broken`.
    remedy: what to do about it, if anything.
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
    def words(self) -> str:
        """What is to be said of it."""
        return "; ".join(text for text in (self.detail, self.remedy) if text)


def examine(url: str | None = None, opening: Opening | None = None) -> list[Finding]:
    """All of it; with a URL also the store there, into which an object is put for a moment.

    opening: opens that store, where the URL does not say all.
    """
    with subprocess.Popen(  # noqa: S603  # our own interpreter
        [sys.executable, "-c", _TORCH], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as torch:
        out = [_python(), _kernels(), *packages(), *_transports()]
        out[2:2] = _torch(torch)
    out += speeds()  # when nothing else runs
    if url is not None:
        out.append(store(url, opening))
    return out


def packages() -> list[Finding]:
    """Every package of every extra, and the engines that are there."""
    wanted = {package: extra for extra, several in reversed(EXTRAS.items()) for package in several}
    out = [_package(package, extra) for package, extra in wanted.items() if package != "torch"]
    for name in (name for name in ENGINES if name not in wanted):
        there = util.find_spec(name) is not None
        out.append(Finding("package", name, "installed" if there else "missing", _version(name)))
    return sorted(out, key=lambda finding: finding.name)


def speeds() -> list[Finding]:
    """What memory allows, with one thread and with as many as are used by default: the best of several turns."""
    words = np.ones(_MEGABYTES * 10**6 // 8, np.uint64)
    there = np.zeros_like(words)
    works: dict[str, Callable[[slice], object]] = {
        "read": lambda part: np.bitwise_xor.reduce(words[part]),
        "copy": lambda part: np.copyto(there[part], words[part]),
    }
    out = []
    for name, work in works.items():
        rates = {threads: words.nbytes / _best(work, words.size, threads) for threads in (1, default_threads())}
        text = ", ".join(f"{rate / 1e9:.1f} GB/s with {threads} thread(s)" for threads, rate in rates.items())
        out.append(Finding("memory", name, "works", text))
    free = _available()
    return [Finding("memory", "available", "works", "unknown" if free is None else size(free)), *out]


def store(url: str, opening: Opening | None = None) -> Finding:
    """Whether a store at a URL can hold a run: objects, and a head that is swapped under its condition."""
    started = time.perf_counter()
    try:
        with opening() if opening is not None else closing(open_store(url)) as opened:
            said = trial(opened) if opened.writable else _readable(opened)
    except (SparserlError, OSError) as error:
        return Finding("store", url, "broken", " ".join(str(error).split()))
    return Finding("store", url, "works", f"{said}; {(time.perf_counter() - started) * 1e3:.0f} ms")


def trial(opened: Store) -> str:
    """Put, swap and delete an object under a name of its own; raises `StoreError` if a promise is not kept."""
    name = f"doctor/{uuid.uuid4().hex}"
    try:
        tag = opened.swap(name, b"1", None)
        _require(opened.get(name, 10).data == b"1", "what was written is not what is read")
        _refused(opened, name, None, "an object is created a second time")
        after = opened.swap(name, b"2", tag)
        _refused(opened, name, tag, "an object is replaced by one who knew only an older one")
        _require(opened.get(name, 10) == (b"2", after), "a refused write has changed something")
        _require(name in [item.name for item in opened.list("doctor/")], "an object that is there is not listed")
    except BaseException as error:
        seconds = _REMOVAL if isinstance(error, Exception) else 0.3  # who presses Ctrl-C does not wait for it
        with within(seconds), suppress(SparserlError):
            opened.delete([name])
        raise
    opened.delete([name])
    try:
        opened.get(name, 10)
    except NotFound:
        return "conditional puts are honoured; the trial object is removed"
    raise StoreError(f"{name} is still there after it was deleted")


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
    """A store that can only be read must have a head."""
    from ..session.store.retention import read_head

    head, _ = read_head(opened, None)
    return f"can be read: run {head.run}, version {head.version}"


def _python() -> Finding:
    from .. import __version__

    machine = f"{platform.machine()}, {default_threads()} thread(s) on {os.cpu_count()} core(s)"
    return Finding("python", "sparserl", "works", f"{__version__}, Python {platform.python_version()}, {machine}")


def _kernels() -> Finding:
    """Compiled code, by a patch of all profiles that is made and applied."""
    from ..codec import PROFILES
    from ..patch import diff

    started = time.perf_counter()
    try:
        for profile in PROFILES:
            old, new = np.zeros(1000, np.float32), np.zeros(1000, np.float32)
            new[::7] = np.arange(143)
            diff({"w": old}, {"w": new}, profile=profile).apply({"w": old})
            if not np.array_equal(old.view(np.uint32), new.view(np.uint32)):
                return Finding("kernels", "cpu", "broken", f"a patch in profile {profile} does not lead to its result")
    except Exception as error:  # noqa: BLE001  # whatever compiling raises is what is to be told
        return Finding("kernels", "cpu", "broken", f"{type(error).__name__}: {error}", "pip install --upgrade numba")
    took = f"compiled or loaded, and run, in {time.perf_counter() - started:.1f} s"
    return Finding("kernels", "cpu", "works", f"profiles {', '.join(PROFILES)}: {took}")


def _torch(probe: subprocess.Popen[str]) -> list[Finding]:
    """What torch says, in a process of its own."""
    if util.find_spec("torch") is None:
        probe.kill()
        return [Finding("package", "torch", "missing", "", _install("torch"))]
    try:
        said, wrong = probe.communicate(timeout=60)
    except subprocess.TimeoutExpired:
        probe.kill()
        return [Finding("package", "torch", "broken", "importing it takes more than a minute")]
    if probe.returncode:
        last = (wrong.strip().splitlines() or [f"importing it ends with exit code {probe.returncode}"])[-1]
        return [Finding("package", "torch", "broken", last)]
    found = json.loads(said)
    return [
        Finding("package", "torch", "works", found["version"]),
        _process_groups(found["backends"]),
        *(_devices(found["devices"]) or [Finding("kernels", "gpu", "missing", "torch sees no CUDA device")]),
    ]


def _process_groups(backends: list[str]) -> Finding:
    if not backends:
        return Finding("transport", "process-group", "missing", "this torch has no backend of torch.distributed")
    return Finding("transport", "process-group", "works", ", ".join(backends))


def _devices(devices: Iterable[tuple[str, int, list[int]]]) -> list[Finding]:
    """Kernels on a device need Triton, and instructions that NVIDIA's GPUs have from Hopper on."""
    out = []
    for number, (name, room, capability) in enumerate(devices):
        about = f"{name}, {size(room)}"
        if capability < [9, 0]:
            found = "missing", f"{about}: kernels need compute capability 9.0; weights go through host memory"
        elif util.find_spec("triton") is None:
            found = "missing", f"{about}: Triton is not installed; weights go through host memory"
        else:
            found = "installed", about
        out.append(Finding("kernels", "gpu" if not number else f"gpu {number}", *found))
    return out


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
        tried = store(f"file://{folder}")
    out = [Finding("transport", "folder", tried.state, f"file://: {tried.detail}")]
    for name, about, extra, several in (
        ("object-storage", "s3://, gs://, az://: give a URL to try it", "store", ("obstore",)),
        ("http-server", "sparserl serve", "serve", ("starlette", "uvicorn")),
    ):
        if all(util.find_spec(package) for package in several):
            out.append(Finding("transport", name, "installed", about))
        else:
            out.append(Finding("transport", name, "missing", about, _install(extra)))
    return out


def _best(work: Callable[[slice], object], count: int, threads: int) -> float:
    cuts = [count * part // threads for part in range(threads + 1)]
    parts = [slice(low, high) for low, high in zip(cuts, cuts[1:], strict=False)]
    took = []
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(4):
            started = time.perf_counter()
            list(pool.map(work, parts))
            took.append(time.perf_counter() - started)
    return min(took)


def _available() -> int | None:
    """Bytes that can still be had, as Linux tells; None elsewhere."""
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
    """Of what is needed, by name, what does not work; the store that was asked for is always needed."""
    return [found for found in findings if not found.ok and (found.name in needs or found.topic == "store")]
