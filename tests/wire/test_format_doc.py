"""docs/reference/format.md is what the code does: its tables, its digest and its example are rebuilt and compared."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

import sparserl
from sparserl import Bits
from sparserl.codec import PROFILES, Stream
from sparserl.codec.coders import CODERS
from sparserl.weights.dtypes import BY_NAME, DTYPES
from sparserl.wire import limits

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "reference" / "format.md").read_text()
EXAMPLE = (ROOT / "tests" / "golden" / "example.md").read_text()


def block(language: str, page: str) -> str:
    """The one fenced block in a language."""
    (code,) = re.findall(rf"```{language}\n(.*?)```", page, re.DOTALL)
    return code


def rows(header: str) -> list[list[str]]:
    """The rows of the table that begins with a header."""
    body = PAGE[PAGE.index(header) :].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in body]


def bf16(bits: np.ndarray) -> Bits:
    return Bits(bits, BY_NAME["bfloat16"])


@pytest.fixture
def versions():
    """The weights of the example, before and after."""
    old = np.full(2000, 0x3F80, np.uint16)
    new = old.copy()
    new[[3, 40, 1999]] = 0x3F81, 0x3F7F, 0x3F82
    return {"w": bf16(old)}, {"w": bf16(new)}


def dump() -> bytes:
    """The bytes of the example, each line at the offset that stands before it."""
    out = b""
    for line in block("hexdump", EXAMPLE).splitlines():
        offset, digits, note = re.fullmatch(r" *(\d+)  ((?:[0-9a-f]{2} ?)+) (\S.*)", line).groups()
        assert int(offset) == len(out)
        assert note
        out += bytes.fromhex(digits)
    return out


def test_the_example_is_exact(versions):
    """Every byte of the example is what the code writes."""
    patch = sparserl.diff(*versions, profile="ulp")
    assert dump().hex(" ") == patch.to_bytes().hex(" ")
    assert f"all {patch.nbytes} bytes" in EXAMPLE
    assert f"all {patch.nbytes} bytes" in PAGE


def test_the_example_applies(versions):
    """The bytes on the page, read back, turn the one version into the other."""
    old, new = versions
    assert sparserl.Patch.from_bytes(dump()).apply(old).changed == 3
    assert old["w"].array.tobytes() == new["w"].array.tobytes()


def test_the_digest_on_the_page(versions):
    """The page's few lines of Python give the digests of the code."""
    names: dict = {}
    exec(block("python", PAGE), names)
    weights = {
        "w": versions[1]["w"],
        "layer.0.weight": np.arange(32, dtype=np.float32).reshape(8, 4),
        "empty": np.empty((0, 3), np.int64),
        "scalar": np.array(-1.5),
    }
    described = []
    for spec in sparserl.tensor_table(weights).specs:
        held = weights[spec.name]
        bits = held.array if isinstance(held, Bits) else held.view(spec.dtype.uint)
        described.append((spec.name, spec.dtype.name, spec.shape, bits.ravel().tolist()))
    assert names["digest"](described) == sparserl.digest(weights).to_bytes()


def test_the_limits_on_the_page():
    """The table of limits is complete and true."""
    told = {}
    for cells in rows("| limit | | of |"):
        for name, value in zip(cells[0].split(", "), cells[1].split(", "), strict=True):
            base, _, log = value.partition("^")
            told[name] = int(base) ** int(log or 1)
    assert told == {k: v for k, v in vars(limits).items() if k.isupper() and k != "FORMAT_VERSION"}
    assert re.search(rf"format version {limits.FORMAT_VERSION}\b", PAGE)


def test_the_dtypes_on_the_page():
    """Codes, names, widths and orders of all dtypes."""
    told = set()
    for width, order, dtypes in rows("| bytes | order |"):
        told |= {(*dtype.split(), width, order) for dtype in dtypes.split(", ")}
    orders = {True: "sign", False: "plain"}
    assert told == {(str(d.code), d.name, str(d.width), orders[d.sign_magnitude]) for d in DTYPES}


def test_the_streams_profiles_and_coders_on_the_page():
    """Ids on the page are those in the code."""
    told = {}
    for cell, names, *_ in rows("| id | stream |"):
        ids = [int(id) for id in re.findall(r"(?:^|, )(\d+)", cell)]
        for id, name in zip(ids, names.split(", "), strict=False):
            told.setdefault(name, id)
    assert told == {s.name: int(s) for s in Stream}
    profiles = {name.strip("`"): int(id) for id, name, *_ in rows("| id | profile |")}
    assert profiles == {p.name: p.id for p in PROFILES.values()}
    assert {name: int(id) for id, name, *_ in rows("| coder | | |")} == {c.name: c.id for c in CODERS.values()}
