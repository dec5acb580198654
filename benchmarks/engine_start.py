"""How long vLLM takes to start alone and with sparserl's backend, phase by phase.

    python -m benchmarks.engine_start --models 6.7B --modes graphs --folder /dev/shm/engine --repeats 3

Ways, each in a process of its own after one that warms the caches of kernels: `alone`; `follow`, which learns where
weights are from vLLM's own load; `again`, which loads made-up weights and then the checkpoint once more, as where that
load does not explain all. Ways take turns; the start of the median time is shown, and the times of all. Phases may
contain others. Prints the results and writes them to --out.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.engine import MODELS, MODES, RESULTS, SETTINGS, Engine

WAYS = ("alone", "follow", "again")
MOST = 1.15  # times vLLM's own start


class Phases:
    """Seconds in named functions, added up, and the most GPU memory while a worker loads its models."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.load_peak_bytes = 0

    def time(self, owner: Any, name: str, label: str) -> None:
        """Count the time in a function or method from now on."""
        function = getattr(owner, name)

        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            begun = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds[label] = self.seconds.get(label, 0.0) + time.perf_counter() - begun

        setattr(owner, name, timed)

    def note_load_peak(self) -> None:
        """Note how much memory a load takes. What vLLM allocates afterwards, for keys and values, would hide it."""
        import torch
        from vllm.v1.worker.gpu_worker import Worker

        load_model = Worker.load_model

        def load(*args: Any, **kwargs: Any) -> None:
            load_model(*args, **kwargs)
            self.load_peak_bytes = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0

        Worker.load_model = load

    def time_load(self, way: str) -> None:
        """Count the phases of a load. Those of sparserl are imported when vLLM loads: on a CPU not before."""
        from vllm.model_executor.model_loader import base_loader, default_loader

        self.time(default_loader.DefaultModelLoader, "load_weights", "vLLM loads weights")
        self.time(base_loader.BaseModelLoader, "load_model", "vLLM makes and loads the model")
        load_model = base_loader.BaseModelLoader.load_model

        def load(*args: Any, **kwargs: Any) -> Any:
            if way != "alone":
                self._time_learning(way)
            return load_model(*args, **kwargs)

        base_loader.BaseModelLoader.load_model = load

    def _time_learning(self, way: str) -> None:
        from sparserl.integrations import vllm, vllm_first_load, vllm_layout
        from sparserl.targets import engine, engine_layout, first_load

        self.time(vllm.SparserlEngine, "__init__", "backend: all of it but the watched load")
        self.time(engine, "warm_up", "attach: compile, load and run kernels")
        self.time(first_load.FirstLoad, "_add_sums", "vLLM waits for sums of the checkpoint")
        self.time(first_load.FirstLoad, "_register", "vLLM waits for tensors to be noted")
        self.time(first_load.GpuSums, "add", "vLLM waits for sums on the GPU to be launched")
        self.time(vllm_first_load, "wait", "vLLM waits for the kernel of sums")
        self.time(vllm, "learn_layout", "learn")
        if way == "again":
            vllm_layout.take_first_load = lambda _: None
        self.time(first_load.FirstLoad, "find_pieces", "learn: from the first load")
        self.time(first_load, "place_sums", "learn: sums of live weights (and, on threads, of the checkpoint)")
        self.time(vllm_layout, "digests_of", "learn: digests of live weights")
        self.time(engine_layout, "watch_pieces", "learn: watch a load of made-up weights")
        self.time(vllm_layout.LoadedModel, "load", "learn: loads")
        self.time(vllm_layout, "_compare", "learn: compare with the checkpoint")


def start(way: str, mode: str, folder: Path, *, attaches: bool) -> dict[str, Any]:
    """One start, and whether a run is followed then."""
    phases = Phases()
    phases.note_load_peak()
    phases.time_load(way)
    engine = Engine(folder, mode, None if way == "alone" else "sparserl")
    result = {"way": way, "start_s": engine.start_seconds, "peak_bytes": engine.peak_bytes}
    result["load_peak_bytes"] = phases.load_peak_bytes
    if way != "alone":
        result["pieces"] = engine.llm.collective_rpc(_pieces)[0]
        if attaches:
            result["attach_s"] = _attach(engine, folder)
    return result | {"phases": {label: round(value, 3) for label, value in phases.seconds.items()}}


def _pieces(worker: Any) -> int:
    return len(worker.weight_transfer_engine.layout.pieces)


def _attach(engine: Engine, folder: Path) -> float:
    """Seconds until a run, which another process publishes, is followed: all weights are read."""
    url = str(folder.with_name(f"{folder.name}-start-{os.getpid()}"))
    publish = [sys.executable, "-m", "sparserl", "publish", str(folder), url, "--profile", "raw"]
    subprocess.run(publish, check=True, env=os.environ | {"CUDA_VISIBLE_DEVICES": ""})
    begun = time.perf_counter()
    engine.llm.init_weight_transfer_engine({"init_info": {"url": url, "ahead": False}})
    return time.perf_counter() - begun


def run(way: str, model: str, mode: str, folder: Path, *, attaches: bool = False) -> dict[str, Any]:
    """One start in a process of its own."""
    result = folder / model / "start.json"
    result.unlink(missing_ok=True)
    command = [sys.executable, "-m", "benchmarks.engine_start", "--case", way, "--models", model, "--modes", mode]
    command += ["--attach"] * attaches
    log = folder / model / f"start-{way}-{mode}.log"
    environment = os.environ | SETTINGS | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    with log.open("wb") as output:
        code = subprocess.call([*command, "--folder", str(folder)], env=environment, stdout=output, stderr=output)
    if code or not result.exists():
        raise SystemExit(f"{way}: {log.read_text(errors='replace')[-3000:]}")
    lines = log.read_text(errors="replace").splitlines()
    warnings = sum("WARNING" in line for line in lines)
    return {"model": model, "mode": mode, "warnings": warnings} | json.loads(result.read_text())


def _median(starts: list[dict[str, Any]]) -> dict[str, Any]:
    """The start that took the median time, of two the longer; with the times of all."""
    times = [result["start_s"] for result in starts]
    middle = sorted(starts, key=lambda result: result["start_s"])[len(starts) // 2]
    phases = starts[0]["phases"] | middle["phases"]  # a run is attached after the first start only
    warnings = max(result["warnings"] for result in starts)
    return starts[0] | middle | {"phases": phases, "starts_s": times, "warnings": warnings}


def report(results: list[dict[str, Any]]) -> str:
    """The starts of one model, beside vLLM's own."""
    alone = next(result for result in results if result["way"] == "alone")
    lines = []
    for result in results:
        ratio = result["start_s"] / alone["start_s"]
        peak, load_peak = ((result[key] - alone[key]) / 2**20 for key in ("peak_bytes", "load_peak_bytes"))
        lines.append(
            f"{result['model']}, {result['mode']}, {result['way']}: {result['start_s']:.2f} s, {ratio:.2f} × alone "
            f"(at most {MOST}); {load_peak:+.0f} MiB at the peak while loading, {peak:+.0f} MiB after that; "
            f"{result['warnings'] - alone['warnings']:+d} warnings"
        )
        lines.append(f"    all starts: {', '.join(f'{seconds:.2f}' for seconds in result['starts_s'])} s")
        if "attach_s" in result:
            lines.append(f"    {result['attach_s']:8.3f} s  attach, after the start ({result['pieces']} pieces)")
        lines += [f"    {value:8.3f} s  {label}" for label, value in result["phases"].items()]
    return "\n".join(lines)


def main() -> None:
    """Run the cases and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["6.7B"])
    parser.add_argument("--modes", nargs="+", choices=MODES, default=["graphs"])
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=[*WAYS])
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm/sparserl-engine"))
    parser.add_argument("--out", type=Path, default=RESULTS / "engine_start.json")
    parser.add_argument("--repeats", type=int, default=1, help="starts of each way")
    parser.add_argument("--case", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--attach", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case is not None:
        (model,) = options.models
        result = start(options.case, options.modes[0], options.folder / model, attaches=options.attach)
        (options.folder / model / "start.json").write_text(json.dumps(result))
        sys.stdout.flush()
        os._exit(0)  # an engine's threads do not always end
    results = []
    for model in options.models:
        make_it = f"from benchmarks.engine import make_checkpoint; make_checkpoint({model!r}, {str(options.folder)!r})"
        subprocess.check_call([sys.executable, "-c", make_it])
        for mode in options.modes:
            run("follow", model, mode, options.folder)  # vLLM, Triton and Numba compile for the first start
            starts: dict[str, list[dict[str, Any]]] = {way: [] for way in ("alone", *options.ways)}
            for repeat in range(max(1, options.repeats)):
                for way, done in starts.items():
                    done.append(run(way, model, mode, options.folder, attaches=repeat == 0 and way != "alone"))
            rows = [*map(_median, starts.values())]
            print(report(rows), flush=True)
            results += rows
            options.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
