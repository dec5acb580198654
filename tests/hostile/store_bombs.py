"""Stores and records of a few bytes that ask for much, read in processes of their own. See `bombs`."""

from __future__ import annotations

import base64
import json
import shutil
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

import sparserl
from sparserl.session.store import records, retention
from sparserl.session.store.holding_records import parse_places
from sparserl.session.store.manifests import Manifest
from sparserl.transport import open_store
from sparserl.weights.dtypes import BY_NAME
from sparserl.weights.table import TensorSpec, TensorTable
from sparserl.wire import limits
from tests.hostile.forged_patch import squeeze
from tests.hostile.forged_store import Forged
from tests.hostile.watched_runs import apart, slowness

STORES: dict[str, Callable[[Path], None]] = {}
RECORDS: dict[str, Callable[[], bytes]] = {}
LARGE = 250 << 20  # bytes of an object that is only there in name: a file with a hole
PARSERS = {
    "run": records.RunRecord.parse,
    "index": records.Index.parse,
    "manifest": Manifest.parse,
    "holding": parse_places,
}


def store(build: Callable[[Path], None]) -> Callable[[Path], None]:
    STORES[build.__name__] = build
    return build


def record(build: Callable[[], bytes]) -> Callable[[], bytes]:
    RECORDS[build.__name__] = build
    return build


def weights_of(elements: int, tensors: int = 1) -> TensorTable:
    return TensorTable([TensorSpec(f"w{i}", BY_NAME["uint8"], (elements,)) for i in range(tensors)])


def hole(forged: Forged, place: str, hash: str) -> None:
    path = forged.root / f"runs/{forged.run.run}/buckets/{place}/{hash}"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.truncate(LARGE)


@store
def a_bucket_named_many_times(root: Path) -> None:
    """Six gigabytes to fetch, of one file, for four hundred bytes of weights."""
    forged, hash = Forged(root, weights_of(400)), "1" * 64
    hole(forged, "0" * 16, hash)
    forged.write([forged.named(None, 0, "0" * 16, [[hash, LARGE]] * 24)])


@store
def buckets_larger_than_any_patch(root: Path) -> None:
    """The same, by links of other names."""
    forged = Forged(root, weights_of(400))
    hashes = [f"{i:064x}" for i in range(24)]
    for hash in hashes:
        hole(forged, "0" * 16, hash)
    forged.write([forged.named(None, 0, "0" * 16, [[hash, LARGE] for hash in hashes])])


@store
def more_buckets_than_elements(root: Path) -> None:
    forged = Forged(root, weights_of(400))
    forged.write([forged.named(None, 0, "0" * 16, [[f"{i:064x}", 100] for i in range(10_000)])])


@store
def weights_of_terabytes(root: Path) -> None:
    """An anchor without a byte, for weights of four tebibytes."""
    forged = Forged(root, weights_of(1 << 40, 4))
    forged.write([forged.named(None, 0, "0" * 16, [])])


@store
def steps_one_behind_the_other(root: Path) -> None:
    """A way of many steps, all of them over one manifest."""
    forged = Forged(root, weights_of(4))
    first = forged.named(None, 0, "0" * 16, [])
    after = forged.named(0, 1, "1" * 16, [])
    forged.write([first, *({**after, "base": i, "version": i + 1} for i in range(8000))])


@store
def manifests_of_one_bucket(root: Path) -> None:
    """Many manifests that all name a large bucket, which is there once."""
    forged, hash = Forged(root, weights_of(1 << 28)), "1" * 64
    hole(forged, "0" * 16, hash)
    steps = [forged.named(None if i == 0 else i - 1, i, "0" * 16, [[hash, LARGE]], i) for i in range(200)]
    forged.write(steps)


@store
def an_index_of_empty_lists(root: Path) -> None:
    forged = Forged(root, weights_of(4))
    forged.commit(RECORDS["empty_lists"](), 0)


@store
def a_table_of_zeros(root: Path) -> None:
    """A frame of two kilobytes becomes a table of the largest size."""
    forged = Forged(root, weights_of(4))
    coded = base64.b64encode(squeeze(bytes(limits.TABLE_BYTES))).decode()
    body = {"format": 1, "run": forged.run.run, "created": 1.0, "files": {}, "table": coded}
    run = records.canonical({**body, "table_bytes": limits.TABLE_BYTES})
    index = records.canonical({"format": 1, "run": forged.run.run, "steps": []})
    forged.commit(index, 0, run)


_BEGIN = b'{"format":1,"run":"0000000000000000","steps":['
_SIZE = 48 << 20


@record
def empty_lists() -> bytes:
    return _BEGIN + b"[]," * (_SIZE // 3) + b"[]]}"


@record
def empty_objects() -> bytes:
    return _BEGIN + b"{}," * (_SIZE // 3) + b"{}]}"


@record
def names() -> bytes:
    return b'{"format":1,' + b",".join(b'"%06x":0' % i for i in range(1 << 20)) + b"}"


@record
def short_texts() -> bytes:
    return _BEGIN + b'"\\u1234",' * (_SIZE // 9) + b'""]}'


@record
def one_wide_text() -> bytes:
    return b'{"format":1,"run":"' + b"a" * _SIZE + b'\\ud83d\\ude00"}'


@record
def text_that_is_not_ascii() -> bytes:
    return b'{"format":1,"run":"' + b"a" * _SIZE + "\N{GRINNING FACE}".encode() + b'"}'


@record
def a_long_fraction() -> bytes:
    return b'{"format":1,"created":1.' + b"1" * _SIZE + b"}"


@record
def lists_in_lists() -> bytes:
    return b'{"format":1,"steps":' + b"[" * (1 << 20) + b"]" * (1 << 20) + b"}"


def in_memory(root: Path, folder: Path) -> str:
    return Forged(root, weights_of(4)).sync({"w0": np.zeros(400, np.uint8)})


def in_a_folder(root: Path, folder: Path) -> str:
    return Forged(root, weights_of(4)).sync(sparserl.targets.folder(folder / "out"))


def fsck(root: Path, folder: Path) -> str:
    return f"{sum(1 for _ in retention.faults(open_store(f'file://{root}')))} faults"


def collect(root: Path, folder: Path) -> str:
    return f"{len(retention.collect(open_store(f'file://{root}'), 3600.0))} objects"


def parsed(parse: Callable[[bytes, str], object], data: bytes, folder: Path) -> str:
    return str(parse(data, "a record"))


def main(chosen: set[str]) -> None:
    """Watch what is done with stores and records: each `name/way` that was chosen, or all."""
    print(json.dumps({"slowness": slowness()}), flush=True)
    for name, build in STORES.items():
        ways = [go for go in (in_memory, in_a_folder, fsck, collect) if not chosen or f"{name}/{go.__name__}" in chosen]
        if not ways:
            continue
        root = Path(tempfile.mkdtemp(prefix="bomb-"))
        build(root)
        files = [path for path in root.rglob("*") if path.is_file()]
        size = sum(path.stat().st_blocks << 9 for path in files)  # holes do not count
        for go in ways:
            apart(name, partial(go, root), way=go.__name__, size=size)
        shutil.rmtree(root)
    for name, build_record in RECORDS.items():
        data = build_record()
        for kind, parse in PARSERS.items():
            if not chosen or f"{name}/{kind}" in chosen:
                apart(name, partial(parsed, parse, data), way=kind, size=len(data))


if __name__ == "__main__":
    main(set(sys.argv[1:]))
