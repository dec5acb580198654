"""`Recorder`: writes a recording, one line of JSON for everything it is told.

{"kind": "run", …}        the first line: what the run is
{"kind": "tensors", …}    before the first sync of a precision: names and sizes
{"kind": "sync", …}       the figures of one sync
{"kind": "note", …}       what was learnt otherwise about a version: seconds of its stages, its reward, …
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import SparserlError
from ..parallel import Progress
from ..patch import Patch
from ..session import Callback, SyncReport
from ..sources.master_sample import MasterSampler, MasterUpdate
from ..weights.memory import Weights
from ..weights.shards import Shards
from ..weights.table import TensorTable
from ..weights.tensors import tensor_table
from .counts import ChangedBefore
from .masters import figures as master_figures
from .statistics import observe, observe_patch

FORMAT = 1


STAGES = {  # what a report calls a stage, and what a recording calls it
    "capture": "find",
    "find": "find",
    "encode": "encode",
    "upload": "upload",
    "send": "transfer",
    "receive": "transfer",
    "fetch": "fetch",
    "build": "stage",
    "stage": "stage",
}


class Recorder(Callback):
    """Appends to a recording.

    Among the `callbacks` of a publisher or a subscriber it notes sizes and seconds; `observe` looks at the weights.

    >>> import numpy as np, tempfile
    >>> old, new = {"w": np.zeros(1000, np.float32)}, {"w": np.ones(1000, np.float32)}
    >>> recorder = Recorder(f"{tempfile.mkdtemp()}/run.jsonl", meta={"model": "a line"})
    >>> recorder.observe(old, new, version=1)["changed"]
    [1000]

    Args:
        path: The file. An existing recording is continued; which elements changed before is counted anew.
        meta: Facts about the run for the report: the model, the algorithm, anything that is JSON.
        sample: Of how many elements of the whole model publishers sample fp32 masters and gradients, where a source
            has them; every tensor adds its share, rounded up. A sampled element takes about 32 bytes of memory on the
            rank that has it, and some random reads at every publish. 0 for none; None for all, which takes a second
            copy of the masters.
        seed: Which elements are sampled depends on it, on names and on shapes. All ranks must have the same seed.

    Raises:
        SparserlError: The file is no recording, or an option cannot be used.
    """

    def __init__(
        self,
        path: str | Path,
        meta: Mapping[str, Any] | None = None,
        *,
        sample: int | None = 1 << 20,
        seed: int = 0,
    ) -> None:
        if sample is not None and (isinstance(sample, bool) or not isinstance(sample, int) or sample < 0):
            raise SparserlError(f"sample is {sample!r}; it must be a number of elements, or None for all")
        if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
            raise SparserlError(f"seed is {seed!r}; it must be a whole number that is not negative")
        self._sampling = {"elements": sample, "seed": seed}
        self.path = Path(path)
        if not _is_begun(self.path):
            self._write("run", {"format": FORMAT, "time": time.time(), "meta": dict(meta or {})})
        self._seen: dict[str, ChangedBefore] = {}

    def master_sampler(self) -> MasterSampler | None:
        """What samples masters and gradients for one publisher; None where there is nothing to sample."""
        elements = self._sampling["elements"]
        seed = self._sampling["seed"] or 0
        return None if elements == 0 else MasterSampler(elements, seed)

    def observe(
        self,
        old: Weights,
        new: Weights,
        *,
        version: int,
        precision: str | None = None,
        seconds: Mapping[str, float] | None = None,
        reward: float | None = None,
        threads: int | None = None,
        progress: Progress | None = None,
    ) -> dict[str, Any]:
        """Compare two versions of the weights and write down what a sync from one to the other is.

        Both have the same names, dtypes and shapes. Tensors on a GPU are copied to host memory first.

        Args:
            old: The weights of the version before.
            new: The weights of this version.
            version: The number of this version.
            precision: A name for this precision, where weights are recorded in several; by default the most common
                dtype.
            seconds: The seconds of each stage: `find`, `encode`, `upload`, `transfer`, `fetch`, `stage`, `pause`, or
                any other name.
            reward: The reward of the rollouts that this version was learnt from.
            threads: How many threads compare; by default all cores, at most 16.
            progress: Called with the dense bytes that were just compared.
        """
        before = _on_host(old)
        after = _on_host(new)
        name = precision or _commonest(tensor_table(before))
        figures, changed_before = observe(before, after, self._seen.get(name), threads, progress)
        return self._write_sync(name, version, figures, changed_before, _measurements(seconds, {"reward": reward}))

    def observe_patch(
        self,
        patch: Patch,
        old: Weights | Shards | None,
        *,
        version: int,
        precision: str | None = None,
        seconds: Mapping[str, float] | None = None,
        reward: float | None = None,
        threads: int | None = None,
        masters: MasterUpdate | None = None,
    ) -> dict[str, Any]:
        """Write down what a sync is, from its patch: no second copy of the weights is needed.

        The patch may be that of one rank, which covers the parts that it has; `merge` joins the recordings of all.

        Args:
            patch: The patch from the version before to this one.
            old: The weights of the version before. None where nobody has them any more: then steps, magnitudes and
                other profiles are left out.
            version: The number of this version.
            precision: As for `observe`.
            seconds: As for `observe`.
            reward: As for `observe`.
            threads: How many threads count and encode; by default all cores, at most 16.
            masters: Samples of masters and gradients that `master_sampler` took with the versions.

        Raises:
            TensorMismatch: The patch is of other tensors, or parts, than `old` or the syncs before.
            NeedsBase: The patch cannot be decoded without `old`.
        """
        name = precision or _commonest(patch.table)
        figures, changed_before = observe_patch(patch, old, self._seen.get(name), threads)
        if masters is not None and (sampled := master_figures(masters)):
            figures |= {"sampling": self._sampling, **sampled}
        return self._write_sync(name, version, figures, changed_before, _measurements(seconds, {"reward": reward}))

    def _write_sync(
        self,
        precision: str,
        version: int,
        figures: Mapping[str, Any],
        changed_before: ChangedBefore,
        measurements: Mapping[str, Any],
    ) -> dict[str, Any]:
        if precision not in self._seen:
            self._write("tensors", {"precision": precision, **_tensor_columns(changed_before)})
        self._seen[precision] = changed_before
        line = {"version": version, "precision": precision, **figures, **measurements}
        self._write("sync", line)
        return line

    def note(self, version: int, *, seconds: Mapping[str, float] | None = None, **numbers: float | None) -> None:
        """Write down what was learnt about a version beside its bits: seconds by stage, `reward`, any other number."""
        self._write("note", {"version": version} | _measurements(seconds, numbers))

    def published(self, report: SyncReport) -> None:
        """Write down a report of a publisher."""
        sizes = {name: getattr(report, name) for name in ("changed", "elements", "bytes", "dense_bytes")}
        sent = {} if report.kind == "anchor" else {"sent": sizes}
        self._write("note", {"version": report.version, **sent} | _measurements(_stages(report), {}))

    def committed(self, report: SyncReport) -> None:
        """Write down a report of a subscriber."""
        seconds = _stages(report) | {"pause": report.seconds["commit"]}
        self.note(report.version, seconds=seconds, staleness=report.behind)

    def _write(self, kind: str, values: Mapping[str, Any]) -> None:
        line = json.dumps({"kind": kind, **values}, separators=(",", ":")) + "\n"
        with self.path.open("ab", buffering=0) as file:  # one write: lines of several writers do not mix
            file.write(line.encode())


def _is_begun(path: Path) -> bool:
    """Whether there is a recording already; anything else that has the name is not touched."""
    if not path.exists() or not path.stat().st_size:
        return False
    with path.open(encoding="utf-8", errors="replace") as file:
        first = file.readline(1 << 20)
    try:
        begun = json.loads(first)
        if begun["kind"] == "run" and begun["format"] == FORMAT:
            return True
    except (ValueError, KeyError, TypeError):
        pass
    raise SparserlError(f"{path} exists and is not a recording of this release; choose another name")


def _measurements(seconds: Mapping[str, float] | None, numbers: Mapping[str, float | None]) -> dict[str, Any]:
    """Seconds by stage and numbers by name, as a line has them; what is not known is left out."""
    fields: dict[str, Any] = {}
    if seconds:
        fields["seconds"] = {stage: round(value, 6) for stage, value in seconds.items()}
    known_numbers = {name: float(number) for name, number in numbers.items() if number is not None}
    if known_numbers:
        fields["numbers"] = known_numbers
    return fields


def _stages(report: SyncReport) -> dict[str, float]:
    """Seconds by the names that recordings have for stages; what a sync does not wait for is left out."""
    stages: dict[str, float] = {}
    for stage, seconds in report.seconds.items():
        if (name := STAGES.get(stage)) is not None:
            stages[name] = stages.get(name, 0.0) + seconds
    return stages


def _on_host(weights: Weights) -> Weights:
    torch = sys.modules.get("torch")
    if torch is None:
        return weights
    return {n: t.cpu() if isinstance(t, torch.Tensor) and not t.is_cpu else t for n, t in weights.items()}


def _commonest(table: TensorTable) -> str:
    sizes: dict[str, int] = {}
    for spec in table.specs:
        sizes[spec.dtype.name] = sizes.get(spec.dtype.name, 0) + spec.numel
    return max(sizes, key=lambda name: sizes[name], default="none")


def _tensor_columns(changed_before: ChangedBefore) -> dict[str, list[Any]]:
    """Names, dtypes and elements; of a rank that has parts, the elements that it has and those of the whole."""
    table = changed_before.table
    elements = [0] * len(table)
    for tensor, region in changed_before.places:
        elements[tensor] += table.specs[tensor].numel if region is None else region.numel
    columns: dict[str, list[Any]] = {
        "names": [spec.name for spec in table.specs],
        "dtypes": [spec.dtype.name for spec in table.specs],
        "elements": elements,
    }
    whole = table.numel.tolist()
    return columns if elements == whole else columns | {"whole": whole}
