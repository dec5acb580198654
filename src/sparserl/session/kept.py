"""An anchor that a publisher keeps on its own machine, so that a restart goes on with the run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ..bits import Bits
from ..errors import FormatError, NotFound, NotRetained, WeightsError, WrongBase
from ..files import replacing
from ..patch import Patch
from ..transport.store import Store
from . import chain, parcel
from .records import Head, Index, Run
from .upkeep import read_index, read_run


@dataclass(frozen=True)
class Resumed:
    """A run to go on with, and the weights of its newest version."""

    run: Run
    index: Index
    weights: dict[str, Bits]


class KeptAnchor:
    """A folder with one anchor of the run that is being published."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.run: str | None = None  # of which an anchor is here

    def keep(self, anchor: Patch, run: str, version: int) -> None:
        """Keep an anchor; it takes the place of the one before when it is whole."""
        self._folder.mkdir(parents=True, exist_ok=True)
        name = f"anchor-{run}-{version}.srl"
        anchor.save(self._folder / name)
        with replacing(self._folder / "run.txt") as file:
            file.write(f"{run} {version}\n".encode())
        self.run = run
        self._sweep(name)

    def resumed(self, store: Store, head: Head, threads: int | None = None) -> Resumed | None:
        """The run whose anchor is kept here, if it is the one of the store's head; else a new run begins."""
        try:
            name, version = (self._folder / "run.txt").read_text().split()
            held = int(version)
            anchor = Patch.open(self._folder / f"anchor-{name}-{held}.srl")
        except (OSError, ValueError, FormatError):
            return None
        if head.run != name:
            return None
        try:
            run, index = read_run(store, head), read_index(store, head)
            anchor.table.require(run.table, "the kept anchor", "the run")
            steps = chain.route(index.steps, (held, anchor.result), head.version)
            patches = [anchor] if not steps or steps[0].base is not None else []
            patches += [parcel.receive(store, name, run.table, step) for step in steps]
            weights = parcel.built(run.table, patches, head.digest, threads)
        except (FormatError, NotFound, NotRetained, WeightsError, WrongBase):  # damaged here or there
            return None
        self.run = name
        self._sweep(f"anchor-{name}-{held}.srl")
        return Resumed(run, index, weights)

    def _sweep(self, name: str) -> None:
        """Remove other anchors, and what a publisher that was killed here was writing."""
        folder = self._folder
        for left in (*folder.glob("anchor-*.srl"), *folder.glob(".anchor-*"), *folder.glob(".run.txt.*")):
            if left.name != name:
                left.unlink(missing_ok=True)
