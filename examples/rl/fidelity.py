"""A proof: a run that syncs patches and a run that syncs all weights cannot be told apart.

Both runs are made side by side, with one seed and a fixed schedule. After every sync the tokens (and their
log-probabilities), the rewards and the weights that the tokens were sampled with must be the same, bit for bit; in the
end the fp32 weights of the trainers, too.

    python -m examples.rl.fidelity --syncs 50 --algorithm grpo
    python -m examples.rl.fidelity --syncs 50 --inject 20       # one ulp in one element: must be found out

Exit code 1 at the first difference.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import torch

from . import weights
from .fleet import Failed
from .options import Options, add_to
from .trainer import Sync, Trainer

PROVEN = ("rollout", "tokens", "rewards")  # what a sync is compared by
CALLED = {"rollout": "weights at the workers"}


def ready(options: Options, folder: Path, mode: str) -> Trainer:
    """A run of one kind, up to the point where RL begins."""
    folder.mkdir()
    inject = options.inject if mode == "update" else None
    own = replace(options, modes=(mode,), inject=inject, url=f"file://{folder / 'store'}", folder=str(folder))
    trainer = Trainer(own, folder, lambda _: None)
    trainer.learn_before()
    return trainer


def prove(full: Trainer, sparse: Trainer) -> str:
    """Run both; the first difference, or nothing."""
    for ours, theirs in zip(sparse.run(), full.run(), strict=True):
        if ours.version and (found := differs(ours, theirs)):
            return found
        if ours.version:
            print(line(ours), flush=True)
    if not any(sync.changed for sync in sparse.syncs[1:]):
        return "no weight has changed, so nothing is proven; let it learn more before RL"
    last: set[str] = set()
    for syncs in zip(full.syncs, sparse.syncs, strict=True):
        last = {landed.weights for sync in syncs for landed in sync.landed}
        if len(last) != 1 or not all(sync.landed for sync in syncs):
            return f"version {syncs[0].version}: weights at the workers differ: {' and '.join(h[:16] for h in last)}"
    masters = [weights.sha256(trainer.model.state_dict()) for trainer in (full, sparse)]
    if masters[0] != masters[1]:
        return f"after the last sync: the trainers' weights differ: {masters[0][:16]} and {masters[1][:16]}"
    print(f"final weights: {last.pop()[:16]} at the workers, {masters[0][:16]} in the trainers")
    return ""


def differs(ours: Sync, theirs: Sync) -> str:
    """What is not the same in two syncs."""
    for name in PROVEN:
        a, b = getattr(ours, name), getattr(theirs, name)
        if a != b or not a:
            return f"sync {ours.version}: {CALLED.get(name, name)} differ: patches {a[:16]}, full weights {b[:16]}"
    return ""


def line(sync: Sync) -> str:
    """A sync that is the same in both."""
    hashes = "  ".join(f"{CALLED.get(name, name)} {getattr(sync, name)[:16]}" for name in PROVEN)
    return f"sync {sync.version:3}  staleness {sync.staleness}  reward {sync.reward:.3f}  {sync.density:7.3%}  {hashes}"


def main(argv: list[str] | None = None) -> int:
    """Print the proof; 1 if there is a difference."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.rl.fidelity",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_to(parser)
    parser.add_argument("--inject", type=int, help="change one element by one ulp in the patched run, at this version")
    parser.set_defaults(syncs=50, workers=0, staleness=0)
    given = vars(parser.parse_args(argv))
    try:
        options = Options(**given, schedule="fixed", fingerprint=True)
    except ValueError as error:
        parser.error(str(error))
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="sparserl-fidelity-") as folder:
        runs: list[Trainer] = []
        try:
            runs.extend(ready(options, Path(folder) / mode, mode) for mode in ("observe", "update"))
            found = prove(*runs)
        except Failed as error:
            found = str(error)
        finally:
            for trainer in runs:
                trainer.close()
    about = f"{options.algorithm}, {options.syncs} syncs, staleness {options.staleness}, {options.dtype}"
    if found:
        print(f"NOT identical ({about}): {found}")
        return 1
    print(f"identical ({about}): tokens, rewards and weights, patches against full weights, bit for bit")
    return 0


if __name__ == "__main__":
    sys.exit(main())
