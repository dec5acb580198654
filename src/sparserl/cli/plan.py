"""`sparserl plan`: how long a sync takes in each profile and dense, and from which link speed on dense is faster."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import SparserlError
from . import show
from .commands import Json, Threads, app, open_patch, reporting

if TYPE_CHECKING:
    from ..plan import Estimate, Link, Speeds

_EPILOG = """Examples:

    sparserl plan --params 671e9 --density 0.006 --link 25Gbit

    sparserl plan --from 101.patch --link 400Mbit --latency 40ms

Speeds are measured once on this machine, in some ten seconds, and kept; --measure measures anew.
"""


@dataclass(frozen=True)
class Question:
    """What is to be synced: `bits` holds bits per change by profile, where they are known."""

    elements: float
    width: float  # bytes
    density: float
    bits: dict[str, float]


@app.command(epilog=_EPILOG)
@reporting
def plan(
    link: Annotated[str, typer.Option(metavar="SPEED", help="Bandwidth: 25Gbit, 100Mbit, 3GB/s, 1e9 (bits).")],
    params: Annotated[float | None, typer.Option(min=1, help="Elements of the model, as 671e9.")] = None,
    density: Annotated[float | None, typer.Option(help="Share of the elements that change between two syncs.")] = None,
    patch: Annotated[
        Path | None, typer.Option("--from", metavar="PATCH", help="Take what is not given from this patch.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="Of the elements.")] = "bfloat16",
    latency: Annotated[str, typer.Option(metavar="TIME", help="Until the first bit arrives: 20ms, 150us, 0.5s.")] = "0",
    bits: Annotated[
        list[str] | None, typer.Option(metavar="PROFILE=BITS", help="Bits per changed element, where you know better.")
    ] = None,
    threads: Threads = None,
    measure: Annotated[bool, typer.Option("--measure", help="Measure this machine anew.")] = False,
    json: Json = False,
) -> None:
    """Predict how long a sync takes over a link: in every profile, and with all weights sent.

    For each: the bytes sent, the seconds of each stage (find and encode, send, decode and apply) and of all together,
    and the link speed above which sending all weights is faster.
    """
    from ..parallel import thread_count
    from ..plan import Link, Speeds, predict

    way = _option("--link / --latency", lambda: Link.parse(link, latency))
    question = _question(params, density, dtype, patch, bits or [])
    count = thread_count(threads)
    speeds = (None if measure else Speeds.load(count)) or _measured(count)
    estimates = predict(question.elements, question.width, question.density, way, speeds, question.bits)
    if json:
        show.result(True, _values(question, way, speeds, estimates))
    else:
        show.plan_table(way, estimates, _words(question, way, speeds, estimates))


def _option(name: str, work: Any) -> Any:
    """What an option means; what is wrong with it is a usage error."""
    try:
        return work()
    except SparserlError as error:
        raise typer.BadParameter(str(error), param_hint=name) from error


def _question(
    params: float | None, density: float | None, dtype: str, patch: Path | None, given: list[str]
) -> Question:
    from ..weights.dtypes import BY_NAME

    if dtype not in BY_NAME:
        raise typer.BadParameter(f"{dtype!r} is not among {', '.join(BY_NAME)}", param_hint="--dtype")
    bits = dict(_bits(text) for text in given)
    width: float = BY_NAME[dtype].width
    if patch is not None:
        stats = open_patch(patch).stats()
        params, density = params or stats.elements, density or stats.density
        width = stats.dense_bytes / max(1, stats.elements)
        bits = {stats.profile: stats.bits_per_changed} | bits  # a mix of profiles matches none, and says nothing
    if params is None or density is None:
        raise typer.BadParameter("give both, or a patch to take them from", param_hint="--params, --density / --from")
    if not params < math.inf:
        raise typer.BadParameter(f"{params:g} is not a number of elements", param_hint="--params")
    if not 0 < density <= 1:
        raise typer.BadParameter(f"{density:g} is not a share above 0 and up to 1", param_hint="--density")
    return Question(params, width, density, bits)


def _bits(text: str) -> tuple[str, float]:
    from ..codec import PROFILES

    name, _, number = text.partition("=")
    try:
        value = float(number)
    except ValueError:
        value = math.nan
    if name not in PROFILES or not 0 < value < math.inf:
        raise typer.BadParameter(
            f"{text!r} is not a profile ({', '.join(PROFILES)}), =, and a number of bits", param_hint="--bits"
        )
    return name, value


def _measured(threads: int) -> Speeds:
    """Speeds of this machine, measured and kept."""
    from ..patch.measuring import measure, work_bytes

    with show.progress() as stage:
        speeds = measure(threads, progress=stage("measure", work_bytes()))
    try:
        speeds.save()
    except OSError as error:
        show.note(f"note: these speeds could not be kept: {error}")
    return speeds


def _values(question: Question, link: Link, speeds: Speeds, estimates: list[Estimate]) -> dict[str, Any]:
    """All of it for a script. A break-even of null: dense is never faster, or is what the row is about."""
    from ..plan import best

    dense = estimates[0]
    return {
        "elements": question.elements,
        "density": question.density,
        "dense_bytes": dense.bytes,
        "link_bits_per_second": link.bits_per_second,
        "latency_s": link.latency_s,
        "threads": speeds.threads,
        "speeds": speeds.origin,
        "best": best(estimates).name,
        "estimates": {
            e.name: {
                "bytes": e.bytes,
                "bits_per_changed": e.bits_per_change,
                "encode_s": e.encode_s,
                "send_s": e.send_s,
                "decode_s": e.decode_s,
                "total_s": e.total_s,
                "ratio_to_dense": dense.total_s / e.total_s,
                "break_even_bits_per_second": e.break_even if e.sparse and e.break_even != math.inf else None,
            }
            for e in estimates
        },
    }


def _words(question: Question, link: Link, speeds: Speeds, estimates: list[Estimate]) -> list[str]:
    """What the symbols of the table mean, and where its figures come from."""
    return [
        f"S = {show.size(estimates[0].bytes)}: dense bytes, {question.elements:,.0f} elements × {question.width:g}.",
        f"ρ = {question.density:.4%}: density, the share of the elements whose bits change between two syncs.",
        "X: bytes sent. Dense sends S; a profile sends ρ · elements · bits / 8, and never more than S.",
        "bits: per changed element, all that is sent for it: its position (index bytes are counted), its value, and",
        "      its share of headers and checksums. Only the tensor table, which a run sends once, is left out.",
        "total: the stages one after the other, nothing overlapped. speedup: total of dense over this total.",
        "break-even: the link speed above which sending S takes less time.",
        f"Link: {link}. Work: {speeds.origin}, bits of bf16 weights unless given.",
    ]
