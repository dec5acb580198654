"""Train a small policy with RL while its workers follow by patches, and verify every version at every worker.

    python -m examples.rl                                   the demo: GRPO, one version of staleness, two workers
    python -m examples.rl --algorithm dapo --staleness 0    trainer and workers in turn
    python -m examples.rl --dtype fp8                       workers hold fp8 codes and scales
    python -m examples.rl --lora 8                          train a LoRA, publish merged weights
    python -m examples.rl --modes observe --patches         sync all weights, keep statistics and the patches
    python -m examples.rl --url s3://bucket/run             through an object store; `--url gloo:` over a process group
    python -m examples.rl --kill 20                         kill a worker with -9 after version 20; it is replaced

Exit code 0 means that every version was verified bit for bit.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import tempfile
from dataclasses import fields, replace
from pathlib import Path

import torch

import sparserl
from sparserl.record import Recording
from sparserl.record.page import page

from . import policy, ways
from .fleet import Failed
from .options import MODES, Options, add_to
from .trainer import RECORDING, Sync, Trainer
from .view import Lines, LiveTable, view


def summary(syncs: list[Sync], options: Options, replaced: int) -> tuple[list[str], bool]:
    """The figures of a run, the verdict first; and whether it was good."""
    later = syncs[1:]
    due = [sync for sync in syncs if sync.landed or "validate" in options.modes or sync is syncs[-1]]
    bad = [str(sync.version) for sync in due if options.sparse and not sync.verified]
    least = min(len({landed.worker for landed in sync.landed}) for sync in due)
    count = f"all {len(syncs)}" if len(due) == len(syncs) else f"{len(due)} of {len(syncs)}"
    how = "digest and all bits compared" if "validate" in options.modes else "digest"
    verdict = f"{count} versions verified bit for bit, each at {least} worker(s) or more: {how}"
    if not options.sparse:
        verdict = f"{count} versions landed whole; patches were only observed"
    elif bad:
        verdict = f"NOT verified: {', '.join(bad)}"
    sent, dense = sum(sync.bytes for sync in later), sum(sync.dense_bytes for sync in later)
    tenth = max(1, len(later) // 10)
    start, end = (statistics.fmean(sync.reward for sync in part) for part in (later[:tenth], later[-tenth:]))
    stale = [sync.staleness for sync in later]
    pauses = sorted(1000 * landed.pause for sync in later for landed in sync.landed)
    lines = [
        verdict,
        f"reward {start:.3f} → {end:.3f} (means of the first and last {tenth} of {len(later)} syncs)",
        f"{sent:,} bytes instead of {dense:,}: {dense / max(1, sent):.1f}× less",
        f"density {statistics.fmean(sync.density for sync in later):.2%} in the mean",
        f"staleness {statistics.fmean(stale):.2f} in the mean, {max(stale)} at most",
    ]
    if pauses:
        lines.append(f"pause of a worker {statistics.median(pauses):.2f} ms in the median, {pauses[-1]:.2f} ms at most")
    if replaced:
        lines.append(f"{replaced} worker(s) were killed and replaced")
    return lines, not bad


def run(options: Options, kill: int | None, show: Lines | LiveTable, report: Path) -> bool:
    """A whole run; whether every version was verified."""
    trainer = Trainer(options, Path(options.folder), show.doing)
    try:
        trainer.learn_before()
        for sync in trainer.run():
            show.add(sync)
            if sync.version == kill:
                trainer.fleet.kill(0)
        lines, good = summary(trainer.syncs, options, trainer.fleet.replaced)
    finally:
        trainer.close()
    recording = Recording.read(trainer.folder / RECORDING)
    report.write_text(page(recording, title=lines[0], lines=lines[1:], good=good), encoding="utf-8")
    show.summary([*lines, f"report: {report}"], good)
    return good


def arguments(argv: list[str] | None) -> tuple[Options, argparse.Namespace]:
    """What was asked for."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.rl", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_to(parser)
    add, default = parser.add_argument, Options()
    add("--schedule", choices=["free", "fixed"], default="free", help="newest version, or exactly the stalest allowed")
    add("--modes", default=",".join(default.modes), help=f"some of {','.join(MODES)} (default %(default)s)")
    add("--patches", action="store_true", help="with observe: keep every change as a patch in the folder")
    add("--inject", type=int, help="change one element by one ulp at this version: validate must find it")
    add("--kill", type=int, help="kill worker 0 with -9 after this version")
    add("--url", default="", help="where to publish to: a folder, s3://, …; gloo: broadcasts (default: in the folder)")
    add("--follow", default="", help="where workers read it, if elsewhere: http://…, of `sparserl serve`")
    add("--folder", type=Path, help="for the report, the queue and the store (default: a temporary folder)")
    add("--json", action="store_true", help="one JSON object per version, and one at the end")
    given = parser.parse_args(argv)
    known = {field.name for field in fields(Options)} - {"folder"}
    picked = {name: value for name, value in vars(given).items() if name in known}
    try:
        options = Options(**picked | {"modes": tuple(given.modes.split(","))})
    except ValueError as error:
        parser.error(str(error))
    if options.broadcast and given.kill is not None:
        parser.error("a worker that was killed cannot come back into a process group")
    return options, given


def main(argv: list[str] | None = None) -> int:
    """Run it; 0 when every version was verified."""
    options, given = arguments(argv)
    if given.folder is not None:
        given.folder.mkdir(parents=True, exist_ok=True)
    home = (given.folder or Path(tempfile.mkdtemp(prefix="sparserl-rl-"))).resolve()
    work = Path(tempfile.mkdtemp(prefix="run-", dir=home))
    options = replace(options, folder=str(work), url=ways.complete(options.url, work))
    if options.model in policy.MADE:
        torch.set_num_threads(1)  # too small to gain from more
    sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]
    show = view(options.workers, given.json)
    good = False
    try:
        good = run(options, given.kill, show, home / "report.html")
    except KeyboardInterrupt:
        show.close()
        print("interrupted: the workers are stopped", file=sys.stderr)
    except (Failed, sparserl.SparserlError, OSError) as error:
        show.close()
        print(f"failed: {error}", file=sys.stderr)
    finally:
        show.close()
    if good and "observe" not in options.modes:
        shutil.rmtree(work)
    else:
        print(f"everything is left in {work}", file=sys.stderr)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
