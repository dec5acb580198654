"""Train a small transformer, send every version of it to a second process as a patch, verify each bit for bit.

    this process                                    receiver.py, a process of its own
    AdamW on fp32 master weights                    starts from zeros
      └► bf16 cast ─► sparserl.diff ─► 000042.patch ─► Patch.apply ─► digest of the live weights
    compare with the digest of what was published ◄────────────────────────┘

Version 0 is a patch from zeros, which is dense. Exit code 0 means that every version was verified.
"""

from __future__ import annotations

import argparse
import json
import math
import queue
import re
import statistics
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import small_transformer
import torch
from receiver import compile_kernels
from torch import Tensor
from view import Row, View, view

import sparserl

WARM_UP_RATE = 1e-3
BATCH = 64
ANSWER = 120  # seconds: the longest wait for the receiver's word; it may have to compile kernels of its own
OURS = re.compile(r"\.?\d{6}\.patch(\..*)?")  # what Patch.save leaves in the folder, unfinished files included


class Failed(Exception):
    """The demo cannot go on; the message says why."""


class Trainer:
    """The model with its fp32 master weights, the optimizer, and the sums it learns from: all from one seed."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = small_transformer.Adder()
        self._sums = torch.Generator().manual_seed(seed)
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=WARM_UP_RATE)

    def warm_up(self, steps: int, doing: Callable[[str], None]) -> float:
        """Learn most of the task at a rate that rises, stays and falls. Returns the last loss."""
        loss = 0.0
        for step in range(steps):
            rise, fall = (step + 1) / 20, 2 * (1 - step / steps)
            self._rate(WARM_UP_RATE * min(1, rise, fall))
            loss = self._step()
            doing(f"warm-up: step {step + 1} of {steps}, loss {loss:.3f}")
        return loss

    def begin_tuning(self, rate: float) -> None:
        """From here on as RL fine-tuning does it: a small constant rate, a fresh optimizer."""
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=rate)

    def tune(self, steps: int) -> float:
        """So many steps; returns the mean loss."""
        return statistics.fmean(self._step() for _ in range(steps))

    def _rate(self, rate: float) -> None:
        for group in self._optimizer.param_groups:
            group["lr"] = rate

    def _step(self) -> float:
        loss = small_transformer.loss_of(self.model, small_transformer.sums(BATCH, self._sums))
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()
        return loss.item()


class Receiver:
    """The second process. Every wait for it is bounded."""

    def __init__(self, patches: Path, last: int, log: Path) -> None:
        program = Path(__file__).with_name("receiver.py")
        command = [sys.executable, str(program), str(patches), "--last", str(last)]
        self._log = log
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors, encoding="utf-8"
            )
        self._lines: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._listen, daemon=True).start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def hear(self, key: str, value: object) -> dict[str, Any]:
        """The next thing it says, which must be about `key` being `value`."""
        try:
            line = self._lines.get(timeout=ANSWER)
        except queue.Empty:
            raise Failed(f"the receiver (process {self.pid}) said nothing for {ANSWER} s") from None
        if line is None:
            raise Failed(self._obituary())
        try:
            said: dict[str, Any] = json.loads(line)
        except ValueError:
            raise Failed(f"the receiver (process {self.pid}) said {line!r}, which is not JSON") from None
        if "refused" in said:
            raise Failed(f"the receiver refused {said['refused']}")
        if said.get(key) != value:
            raise Failed(f"the receiver said {line.strip()} where {key} {value} was due")
        return said

    def finish(self) -> None:
        """It must end by itself, and well."""
        try:
            code = self._process.wait(ANSWER)
        except subprocess.TimeoutExpired:
            raise Failed(f"the receiver (process {self.pid}) did not end within {ANSWER} s") from None
        if code:
            raise Failed(self._obituary())

    def stop(self) -> None:
        """Make sure that it is gone."""
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(5)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                self._lines.put(line)
        self._lines.put(None)

    def _obituary(self) -> str:
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(5)
        code = self._process.returncode
        how = f"was killed by signal {-code}" if code is not None and code < 0 else f"ended with code {code}"
        last = self._log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-5:]
        return "\n".join([f"the receiver (process {self.pid}) {how}; {self._log} has its last words", *last])


class Run:
    """Publishing versions and hearing that they landed."""

    def __init__(self, patches: Path, receiver: Receiver, show: View) -> None:
        self.rows: list[Row] = []
        self._patches, self._receiver, self._view = patches, receiver, show
        self._published = small_transformer.zeros()
        self._digest = sparserl.digest(self._published)

    def publish(self, weights: dict[str, Tensor], loss: float) -> None:
        """Diff against the last published version, save the patch, wait until it has landed."""
        version = len(self.rows)
        patch = sparserl.diff(self._published, weights, base_digest=self._digest)
        self._view.doing(f"version {version}: {patch.nbytes:,} bytes on their way")
        patch.save(self._patches / f"{version:06}.patch")
        report = self._receiver.hear("version", version)
        expected = sparserl.digest(weights)  # every bit read, not the sum that diff has carried along
        verified = patch.result == expected and report["digest"] == expected.hex
        self.rows.append(Row(version, loss, patch.stats(), report["seconds"], verified))
        self._view.add(self.rows[-1])
        self._published, self._digest = weights, patch.result


def demo(options: argparse.Namespace, show: View) -> bool:
    """The whole story; whether every version was verified."""
    patches = prepare(options.folder)
    show.say("compiling the kernels for bfloat16: a few seconds on the first run, cached for later ones")
    show.doing("compiling")
    show.say(f"kernels ready after {compile_kernels():.1f} s")
    receiver = Receiver(patches, options.syncs, options.folder / "receiver.log")
    try:
        show.say(f"receiver started as process {receiver.pid}")
        show.doing("waiting for the receiver")
        receiver.hear("ready", True)
        run = Run(patches, receiver, show)
        train(options, run, show)
        receiver.finish()
    finally:
        receiver.stop()
    show.summary(summary(run.rows))
    return all(row.verified for row in run.rows)


def train(options: argparse.Namespace, run: Run, show: View) -> None:
    """Warm up, publish version 0, then tune and publish after every few steps."""
    trainer = Trainer(options.seed)
    loss = trainer.warm_up(options.warm_up, show.doing)
    show.say(f"warm-up done: {options.warm_up} steps at a rate of up to {WARM_UP_RATE:g}, loss {loss:.3f}")
    weights = small_transformer.published(trainer.model)
    show.say(why_sparse(weights, options.lr, options.steps_per_sync))
    run.publish(weights, loss)
    trainer.begin_tuning(options.lr)
    for version in range(1, options.syncs + 1):
        show.doing(f"version {version} of {options.syncs}: training")
        loss = trainer.tune(options.steps_per_sync)
        run.publish(small_transformer.published(trainer.model), loss)


def why_sparse(weights: dict[str, Tensor], rate: float, steps: int) -> str:
    """Why few bits change, in the numbers of these weights."""
    median = torch.cat([tensor.flatten() for tensor in weights.values()]).abs().float().median()
    spacing = torch.finfo(torch.bfloat16).eps * 2 ** median.log2().floor()
    return (
        f"why patches are small: AdamW at lr {rate:g} moves a weight by about {steps * rate:.1e} a sync at most, and\n"
        f"bf16 numbers near the median weight, {median:.2g}, lie {spacing:.1e} apart, so most weights keep their bits"
    )


def summary(rows: Sequence[Row]) -> list[str]:
    """The figures of the run, the verdict first."""
    unverified = [str(row.version) for row in rows if not row.verified]
    first, syncs = rows[0].stats, [row.stats for row in rows[1:]]
    sent, dense = sum(s.bytes for s in syncs), sum(s.dense_bytes for s in syncs)
    sent_all, dense_all = sent + first.bytes, dense + first.dense_bytes
    changed = sum(s.changed for s in syncs)
    bits = sum(s.bits_per_changed * s.changed for s in syncs) / max(1, changed)
    ratio = statistics.fmean(s.ratio for s in syncs)
    low, high = (f"{pick(s.density for s in syncs):.2%}" for pick in (min, max))
    apply = 1000 * statistics.median(row.seconds for row in rows[1:])
    good = f"all {len(rows)} versions verified bit for bit in the second process"
    bad = f"NOT verified: {', '.join(unverified)} (of {len(rows)} versions)"
    return [
        bad if unverified else good,
        f"{len(syncs)} syncs: {sent:,} bytes instead of {dense:,}: {dense / sent:.1f}× less, mean ratio {ratio:.1f}×",
        f"with version 0, from zeros: {sent_all:,} bytes instead of {dense_all:,}: {dense_all / sent_all:.1f}× less",
        f"density {low} to {high}, {bits:.2f} bits per change, apply {apply:.1f} ms in the median",
    ]


def prepare(folder: Path) -> Path:
    """The folder for the patches, without those of an earlier run."""
    patches = folder / "patches"
    patches.mkdir(parents=True, exist_ok=True)
    for path in leftovers(patches):
        path.unlink()
    return patches


def remove(folder: Path) -> None:
    """Remove what the demo wrote, and the folders if nothing else is in them."""
    for path in [*leftovers(folder / "patches"), folder / "receiver.log"]:
        path.unlink(missing_ok=True)
    for path in (folder / "patches", folder):
        with suppress(OSError):
            path.rmdir()


def leftovers(patches: Path) -> list[Path]:
    """The files in it that a run of the demo has written."""
    return [path for path in patches.iterdir() if OURS.fullmatch(path.name)]


def positive(text: str) -> int:
    """A whole number, at least one."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not positive")
    return number


def rate(text: str) -> float:
    """A learning rate: finite, not negative."""
    number = float(text)
    if not 0 <= number < math.inf:
        raise argparse.ArgumentTypeError(f"{number} is not a learning rate")
    return number


def arguments() -> argparse.Namespace:
    """What was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--syncs", type=positive, default=30, help="versions to publish after version 0 (default %(default)s)")
    add("--steps-per-sync", type=positive, default=2, help="optimizer steps between them (default %(default)s)")
    add("--warm-up", type=positive, default=150, help="optimizer steps before version 0 (default %(default)s)")
    add("--lr", type=rate, default=1e-6, help="learning rate after the warm-up (default %(default)s)")
    add("--seed", type=int, default=0, help="same seed, same patches (default %(default)s)")
    add("--folder", type=Path, default=Path("demo-run"), help="where patches go; those of an earlier run are removed")
    add("--keep", action="store_true", help="leave the patches there when all went well")
    return parser.parse_args()


def main() -> int:
    """Run the demo; 0 when every version was verified."""
    options = arguments()
    torch.set_num_threads(2)
    sys.stdout.reconfigure(errors="replace")
    show = view()
    try:
        good = demo(options, show)
    except KeyboardInterrupt:
        show.close()
        print("interrupted: the receiver is stopped", file=sys.stderr)
        good = False
    except (Failed, sparserl.SparserlError, OSError) as error:
        show.close()
        print(f"failed: {error}", file=sys.stderr)
        good = False
    finally:
        show.close()
    if good and not options.keep:
        remove(options.folder)
    else:
        print(f"the patches are in {options.folder / 'patches'}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
