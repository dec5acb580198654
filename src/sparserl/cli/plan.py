"""`sparserl plan`: how long a sync takes in each profile and dense, and above which link speed dense is faster."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import SparserlError
from ..humanize import parse_number
from . import show
from .options import ADVICE, Base, Json, Threads
from .patches import open_base, open_patch
from .reporting import reporting

if TYPE_CHECKING:
    from ..patch import Patch
    from ..plan import AnchorEstimate, Estimate, Link, Speeds

commands = typer.Typer()

_EPILOG = """Examples:

    sparserl plan --params 671e9 --density 0.006 --link 25Gbit

    sparserl plan --from 101.patch --base step-100/ --link 400Mbit --latency 40ms

The speeds of this machine are measured once, which takes about ten seconds, and kept; --measure measures them again.
"""


@dataclass(frozen=True)
class Question:
    """What is to be sent. `bits` holds the bits per change of the profiles for which they are known."""

    elements: float
    width: float  # bytes of an element
    density: float
    bits: dict[str, float]
    unknown: frozenset[str] = frozenset()  # profiles that are left out


@commands.command(rich_help_panel=ADVICE, epilog=_EPILOG)
@reporting
def plan(
    link: Annotated[
        str,
        typer.Option(
            metavar="SPEED", help="Speed of the link: 25Gbit, 100Mbit, 3GB/s, or bits per second such as 1e9."
        ),
    ],
    params: Annotated[
        str | None, typer.Option(metavar="COUNT", help="Elements (parameters) of the model: 7B, 135M, 671e9.")
    ] = None,
    density: Annotated[
        str | None,
        typer.Option(metavar="SHARE", help="Share of the elements that change between two syncs: 0.6% or 0.006."),
    ] = None,
    patch: Annotated[
        Path | None,
        typer.Option(
            "--from",
            metavar="PATCH",
            help="Take elements, density and bits from this patch where no option gives them.",
        ),
    ] = None,
    base: Base = None,
    dtype: Annotated[str, typer.Option(help="Dtype of the elements.")] = "bfloat16",
    latency: Annotated[
        str, typer.Option(metavar="TIME", help="Time until the first bit arrives: 20ms, 150us, 0.5s.")
    ] = "0",
    bits: Annotated[
        list[str] | None,
        typer.Option(metavar="PROFILE=BITS", help="Bits per changed element of a profile, if you know them."),
    ] = None,
    threads: Threads = None,
    measure: Annotated[bool, typer.Option("--measure", help="Measure this machine again.")] = False,
    json: Json = False,
) -> None:
    """Predict how long a sync takes over a link, in every profile and with all weights sent.

    For each way it prints the bytes sent, the time of each stage (find and encode, send, decode and apply) and in
    total, and the link speed above which sending all weights is faster.

    With --from and --base the patch is encoded in every profile to find its size. Without --base its own profile and
    raw are known; the others are left out.
    """
    from ..parallel import thread_count
    from ..plan import Link, Speeds, predict, predict_anchor

    try:
        speed = Link.parse(link, latency)
    except SparserlError as error:
        raise typer.BadParameter(str(error), param_hint="--link / --latency") from error
    count = thread_count(threads)
    question = _question(
        _number(params, "--params", 1), _number(density, "--density", 0), dtype, patch, base, bits or [], count
    )
    speeds = (None if measure else Speeds.load(count)) or _measured(count)
    estimates = predict(question.elements, question.width, question.density, speed, speeds, question.bits)
    estimates = [estimate for estimate in estimates if estimate.name not in question.unknown]
    anchors = predict_anchor(question.elements * question.width, speed, speeds)
    if json:
        show.result(True, _values(question, speed, speeds, estimates, anchors))
    else:
        show.plan_table(speed, estimates, anchors, _legend(question, speed, speeds, estimates))


def _number(text: str | None, option: str, least: float) -> float | None:
    if text is None:
        return None
    try:
        number = parse_number(text)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint=option) from error
    if number < least:
        raise typer.BadParameter(f"{text} is less than {least}", param_hint=option)
    return number


def _question(
    params: float | None,
    density: float | None,
    dtype: str,
    path: Path | None,
    base: Path | None,
    profile_bits: list[str],
    threads: int,
) -> Question:
    from ..codec import PROFILES
    from ..weights.dtypes import BY_NAME

    if base is not None and path is None:
        raise typer.BadParameter("it is the base of a patch: give --from as well", param_hint="--base")
    if dtype not in BY_NAME:
        raise typer.BadParameter(f"{dtype!r} is not among {', '.join(BY_NAME)}", param_hint="--dtype")
    bits = dict(_parse_bits(text) for text in profile_bits)
    width: float = BY_NAME[dtype].width
    if path is not None:
        patch = open_patch(path)
        stats = patch.stats()
        params = params or stats.elements
        density = density or stats.density
        width = stats.dense_bytes / max(1, stats.elements)
        bits = _bits_in_profiles(patch, base, threads) | bits
    if params is None or density is None:
        raise typer.BadParameter("give both, or a patch to take them from", param_hint="--params, --density / --from")
    if not params < math.inf:
        raise typer.BadParameter(f"{params:g} is not a number of elements", param_hint="--params")
    if not 0 < density <= 1:
        raise typer.BadParameter(f"{density:g} is not a share above 0 and up to 1", param_hint="--density")
    return Question(params, width, density, bits, frozenset(PROFILES if path is not None else ()) - bits.keys())


def _bits_in_profiles(patch: Patch, base: Path | None, threads: int) -> dict[str, float]:
    """Bits per change of a patch in every profile; without its base in its own, and in `raw`, where counts tell it."""
    from ..codec import PROFILES
    from ..patch import squash

    stats = patch.stats()
    weights, digest = open_base(patch, base, threads)
    if weights is not None:
        recoded = {name: squash(patch, base=weights, digest=digest, profile=name, threads=threads) for name in PROFILES}
        return {name: other.stats().bits_per_changed for name, other in recoded.items()}
    size = 0
    for head in patch.contents.heads:
        width = head.dtype.width
        dense = width * head.entries.numel
        size += int(((4 + width) * head.entries.count).clip(max=dense).sum())
    names = {bucket.profile for bucket in stats.buckets} - {"dense"}
    own = {min(names): stats.bits_per_changed} if len(names) == 1 or names == {"ctx", "ulp"} else {}
    return {"raw": 8 * size / max(1, stats.changed)} | own


def _parse_bits(text: str) -> tuple[str, float]:
    from ..codec import PROFILES

    name, _, number = text.partition("=")
    try:
        value = float(number)
    except ValueError:
        value = math.nan
    if name not in PROFILES or not 0 < value < math.inf:
        raise typer.BadParameter(
            f"{text!r} is not PROFILE=BITS with a profile ({', '.join(PROFILES)}) and a number of bits",
            param_hint="--bits",
        )
    return name, value


def _measured(threads: int) -> Speeds:
    """Speeds of this machine, measured now and kept for later."""
    from ..patch.measuring import measure, work_bytes

    with show.progress() as stage:
        speeds = measure(threads, progress=stage("measure", work_bytes()))
    try:
        speeds.save()
    except OSError as error:
        show.note(f"note: these speeds could not be saved: {error}")
    return speeds


def _values(
    question: Question, link: Link, speeds: Speeds, estimates: list[Estimate], anchors: list[AnchorEstimate]
) -> dict[str, Any]:
    """The prediction for scripts. A break-even of null: dense is never faster, or the row is dense itself."""
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
        "best_anchor": best(anchors).name,
        "anchors": {anchor.name: {**asdict(anchor), "total_s": anchor.total_s} for anchor in anchors},
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


def _legend(question: Question, link: Link, speeds: Speeds, estimates: list[Estimate]) -> list[str]:
    """What the columns of the table mean, and where its figures come from."""
    return [
        f"S = {show.size(estimates[0].bytes)}: dense bytes, {question.elements:,.0f} elements × {question.width:g}.",
        f"ρ = {question.density:.4%}: density, the share of the elements whose bits change between two syncs.",
        "X: bytes sent. Dense sends S; a profile sends ρ · elements · bits / 8, and never more than S.",
        "bits: sent per changed element: its position (index bytes are counted), its value, and its share of headers",
        "      and checksums. Only the tensor table, which a run sends once, is left out.",
        "total: the stages one after the other, without overlap. speedup: total of dense divided by this total.",
        "break-even: the link speed above which sending S takes less time.",
        "anchor: all weights, for receivers that have none of them; a publisher with this link takes the faster kind.",
        f"Link: {link}. Speeds: {speeds.origin}. Bits are those of bf16 weights unless given or those of a patch.",
        *(f"{name} is left out: its bits are not known without --base." for name in sorted(question.unknown)),
    ]
