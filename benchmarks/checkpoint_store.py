"""`python -m benchmarks.checkpoint_store`: what it takes to keep every step of a run; writes research/results/.

The RL loop of examples/rl with a worker inside the trainer. Every step's weights in bf16, fp32 weights and optimizer
state (AdamW) are saved as safetensors. Those files are then compressed by zstd, as they are and as the XOR with the
file of the step before, and published to a store that keeps all versions. Every step is read back from the store and
compared bit for bit. zstd -19 takes long: by default it is measured on every fifth step.
"""

from __future__ import annotations

import argparse
import json
import platform
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
import zstandard
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import sparserl
from examples.rl.options import Options
from examples.rl.trainer import Trainer

ANCHOR_AFTER = 20.0  # an anchor after patches of so many times its size: few, because patches may be nearly as large
_HOME = Path(__file__).parent.parent / "research" / "results"
_Tensors = Mapping[str, torch.Tensor]
KINDS: dict[str, Callable[[Trainer], _Tensors]] = {}


def _kind(name: str) -> Callable[[Callable[[Trainer], _Tensors]], Callable[[Trainer], _Tensors]]:
    def add(tensors: Callable[[Trainer], _Tensors]) -> Callable[[Trainer], _Tensors]:
        KINDS[name] = tensors
        return tensors

    return add


@_kind("weights, bf16")
def bf16_weights(trainer: Trainer) -> _Tensors:
    """What rollouts hold."""
    return {name: tensor.detach().to(torch.bfloat16) for name, tensor in trainer.model.named_parameters()}


@_kind("weights, fp32")
def fp32_weights(trainer: Trainer) -> _Tensors:
    """What the optimizer changes."""
    return {name: tensor.detach().clone() for name, tensor in trainer.model.named_parameters()}


@_kind("optimizer state, fp32")
def optimizer_state(trainer: Trainer) -> _Tensors:
    """AdamW's two moments of every parameter; zeros before the first step."""
    state = {}
    for name, parameter in trainer.model.named_parameters():
        for moment in ("exp_avg", "exp_avg_sq"):
            tensor = trainer.optimizer.state[parameter].get(moment)
            state[f"{moment}.{name}"] = torch.zeros_like(parameter.detach()) if tensor is None else tensor.clone()
    return state


def train(folder: Path, options: Options) -> None:
    """Run the RL loop, and save every step: `folder/KIND/STEP.safetensors`."""
    for kind in KINDS:
        (folder / kind).mkdir()
    with tempfile.TemporaryDirectory(prefix="sparserl-run-") as run:
        own = Options(**{**vars(options), "url": f"file://{run}/store", "folder": run})
        trainer = Trainer(own, Path(run), lambda _: None)
        try:
            trainer.learn_before()
            for sync in trainer.run():
                for kind, tensors in KINDS.items():
                    save_file(dict(tensors(trainer)), folder / kind / f"{sync.version:04}.safetensors")
        finally:
            trainer.close()


def zstd_bytes(files: Sequence[Path], level: int, every: int, xor: bool) -> float:
    """Bytes of a step, in the mean over every so many steps after the first; `xor`: of the XOR with the step before."""
    compressor = zstandard.ZstdCompressor(level=level)
    sizes = []
    for old, new in list(zip(files, files[1:], strict=False))[every - 1 :: every]:
        data = np.frombuffer(new.read_bytes(), np.uint8)
        if xor:
            data = data ^ np.frombuffer(old.read_bytes(), np.uint8)
        sizes.append(len(compressor.compress(data.tobytes())))
    return fmean(sizes)


def published_bytes(files: Sequence[Path]) -> tuple[float, float, str]:
    """Bytes of a step after the first, anchors included; the share of elements that change; and profiles.

    Raises:
        SystemExit: A step cannot be read back bit for bit.
    """
    with tempfile.TemporaryDirectory(prefix="sparserl-store-") as folder:
        store = Path(folder) / "store"
        weights: dict[str, torch.Tensor] = {}

        def source() -> dict[str, torch.Tensor]:
            return weights

        reports = []
        first_bytes = 0
        with _publisher(store, source) as publisher:
            for file in files:
                weights.update(load_file(file))
                reports.append(publisher.publish(step=int(file.stem)))
                first_bytes = first_bytes or _bytes_in(store)
        mean = (_bytes_in(store) - first_bytes) / (len(files) - 1)
        _require_all_steps(store, files)
        later = reports[1:]
        return mean, sum(r.changed for r in later) / sum(r.elements for r in later), _profiles(store)


def _publisher(store: Path, source: Callable[[], dict[str, torch.Tensor]]) -> sparserl.Publisher:
    return sparserl.Publisher(store, source, keep_anchors=None, anchor_after=ANCHOR_AFTER, ladder=None)


def _profiles(store: Path) -> str:
    from sparserl.session.store.stored_run import StoredRun
    from sparserl.transport import open_store

    steps = StoredRun.read(open_store(store)).index.steps
    return ", ".join(sorted({name for step in steps if step.base is not None for name in step.profiles}))


def _require_all_steps(store: Path, files: Sequence[Path]) -> None:
    """Go from the first step to the last, and compare all bits."""
    weights = {name: torch.zeros_like(tensor) for name, tensor in load_file(files[0]).items()}
    with sparserl.Subscriber(store, weights, name=False) as subscriber:
        for version, file in enumerate(files):
            subscriber.sync(version)
            with safe_open(file, "pt") as saved:
                for name in saved.keys():  # noqa: SIM118  # it is no mapping
                    if not torch.equal(weights[name].view(torch.uint8), saved.get_tensor(name).view(torch.uint8)):
                        raise SystemExit(f"step {version}: {name} is not what was published")


def _bytes_in(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def measure(files: Sequence[Path], every: int) -> dict[str, Any]:
    """All ways to keep the steps of one kind."""
    published, density, profiles = published_bytes(files)
    rows = {"safetensors": fmean(file.stat().st_size for file in files[1:])}
    for level, step in ((3, 1), (19, every)):
        rows[f"zstd -{level}"] = zstd_bytes(files, level, step, xor=False)
        rows[f"zstd -{level} of the XOR"] = zstd_bytes(files, level, step, xor=True)
    return {"bytes_per_step": {**rows, "sparserl": published}, "density": density, "profiles": profiles}


def table(results: Mapping[str, Any]) -> Iterator[str]:
    """The figures as a page."""
    run = results["run"]
    yield "# Keeping every step of a run\n"
    yield (
        f"`python -m benchmarks.checkpoint_store`: {run['steps']} steps of GRPO (examples/rl, model {run['model']}, "
        f"{run['parameters']:,} parameters, AdamW at {run['lr']:g}), on {run['machine']}. Bytes of a step after the "
        f"first, in the mean; zstd -19 on every {run['every']}th step. Every step was read back from the store and "
        "compared bit for bit.\n"
    )
    kinds = results["kinds"]
    yield f"| | {' | '.join(kinds)} |"
    yield f"| --- |{' --- |' * len(kinds)}"
    ways = next(iter(kinds.values()))["bytes_per_step"]
    for way in ways:
        cells = []
        for kind in kinds.values():
            size, dense = kind["bytes_per_step"][way], kind["bytes_per_step"]["safetensors"]
            cells.append(f"{size:,.0f} ({size / dense:.1%})")
        yield f"| {way} | {' | '.join(cells)} |"
    densities = [f"{kind['density']:.1%}" for kind in kinds.values()]
    yield f"| elements that change in a step | {' | '.join(densities)} |"
    yield f"| profiles of the patches | {' | '.join(kind['profiles'] or '-' for kind in kinds.values())} |"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny", help="as for examples/rl")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--lr", type=float, default=5e-6)
    parser.add_argument("--warm-up", type=int, default=200, help="steps before RL begins")
    parser.add_argument("--every", type=int, default=5, help="measure zstd -19 on every so many steps")
    parser.add_argument(
        "--saved", type=Path, help="measure the steps in this folder, KIND/STEP.safetensors, of such a run"
    )
    parser.add_argument("-o", "--output", type=Path, default=_HOME, help="where checkpoint_store.json and .md go")
    options = parser.parse_args(arguments)
    rl = Options(
        model=options.model,
        syncs=options.steps,
        lr=options.lr,
        warm_up=options.warm_up,
        workers=0,
        staleness=0,
        modes=("update",),
    )
    with tempfile.TemporaryDirectory(prefix="sparserl-steps-") as made:
        folder = options.saved or Path(made)
        if options.saved is None:
            train(folder, rl)
        kinds = {}
        for kind in KINDS:
            kinds[kind] = measure(sorted((folder / kind).iterdir()), options.every)
            print(kind, json.dumps(kinds[kind]), flush=True)
        files = sorted((folder / "weights, fp32").iterdir())
        parameters = sum(tensor.numel() for tensor in load_file(files[0]).values())
    run = {"model": options.model, "steps": len(files) - 1, "lr": options.lr, "every": options.every}
    machine = f"{platform.machine()}, torch {torch.__version__}"
    results = {"run": {**run, "parameters": parameters, "machine": machine}, "kinds": kinds}
    options.output.mkdir(parents=True, exist_ok=True)
    (options.output / "checkpoint_store.json").write_text(json.dumps(results, indent=1) + "\n")
    text = "\n".join(table(results)) + "\n"
    (options.output / "checkpoint_store.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
