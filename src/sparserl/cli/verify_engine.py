"""`sparserl verify-engine`: whether a running engine has the weights of a checkpoint or of a run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..humanize import size
from ..transport.stores.versioned import split_version
from . import show
from .keys import read_trusted_keys
from .options import (
    SESSIONS,
    CertificateFile,
    Endpoint,
    Json,
    Region,
    Threads,
    TokenFile,
    TrustedKeys,
    duration_option,
    parse_seconds,
)
from .reporting import reporting
from .stores import open_store, read_secret

if TYPE_CHECKING:
    from ..integrations.verify import EngineComparison

commands = typer.Typer()

_MOST_NAMES = 10
_EPILOG = """Examples:

    sparserl verify-engine http://localhost:8000 checkpoint/

    sparserl verify-engine http://localhost:30000 s3://bucket/run@42 --json

sparserl must be installed where the server runs, and a vLLM server run with VLLM_SERVER_DEV_MODE=1.
"""


@commands.command(rich_help_panel=SESSIONS, epilog=_EPILOG)
@reporting
def verify_engine(
    engine: Annotated[str, typer.Argument(metavar="ENGINE", help="The address of a vLLM or SGLang server.")],
    weights: Annotated[
        str,
        typer.Argument(
            metavar="WEIGHTS|URL[@VERSION]",
            help="What it should have: a checkpoint, or the run in a store, by default its newest version.",
        ),
    ],
    api_key_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A file with the API key of the server; SGLang's admin key.")
    ] = None,
    timeout: Annotated[str, duration_option("How long to wait for the engine, such as 30s or 10m.")] = "10m",
    trusted_key: TrustedKeys = None,
    token_file: TokenFile = None,
    endpoint: Endpoint = None,
    region: Region = None,
    ca: CertificateFile = None,
    threads: Threads = None,
    json: Json = False,
) -> None:
    """Compare the live weights of an engine with a checkpoint or a run, bit by bit, however it got them.

    Exits with code 1 if a tensor differs, or cannot be compared; these are named. The checkpoint or the store is read
    here, not by the engine. The engine pauses between two steps while it reads its weights, and longer the first time,
    when it finds out where it keeps the tensors of the checkpoint; afterwards it is what it was.
    """
    from ..integrations.verify import asking, compare, expected_checkpoint, expected_version, is_run

    ask = asking(engine, None if api_key_file is None else read_secret(api_key_file), parse_seconds(timeout))
    url, version = split_version(weights)
    if is_run(url, version):
        with open_store(url, endpoint, region, token_file, ca) as store:
            expected = expected_version(store, version, read_trusted_keys(trusted_key), threads)
            comparison = compare(ask, expected, threads)
    else:
        comparison = compare(ask, expected_checkpoint(Path(url)), threads)
    _show(json, engine, comparison)
    if comparison.answer != "equal":
        raise typer.Exit(1)


def _show(json: bool, engine: str, comparison: EngineComparison) -> None:
    values = {
        "engine": engine,
        "answer": comparison.answer,
        "expected": comparison.expected,
        "run": comparison.run,
        "version": comparison.version,
        "tensors": comparison.tensors,
        "bytes": comparison.bytes,
        "different": list(comparison.different),
        "uncompared": dict(comparison.uncompared),
        "cast": dict(comparison.cast),
    }
    line = f"{engine}: {comparison.tensors:,} tensors, {size(comparison.bytes)}, "
    if comparison.different:
        line += f"of which {len(comparison.different):,} differ from {comparison.expected}: "
        line += _some([*comparison.different])
    elif comparison.tensors:
        line += f"equal to {comparison.expected}"
    else:
        line += f"compared with {comparison.expected}"
    if comparison.cast:
        dtypes = ", ".join(sorted({*comparison.cast.values()}))
        line += f"; {len(comparison.cast):,} were cast to the engine's {dtypes}"
    lines = [line]
    if comparison.uncompared:
        lines.append(f"{len(comparison.uncompared):,} could not be compared:")
        reasons: dict[str, list[str]] = {}
        for name, reason in comparison.uncompared.items():
            reasons.setdefault(reason, []).append(name)
        lines += [f"  {_some(names)}: {reason}" for reason, names in reasons.items()]
    show.result(json, values, *lines)


def _some(names: list[str]) -> str:
    """The first of some names, and how many more there are."""
    more = len(names) - _MOST_NAMES
    return ", ".join(names[:_MOST_NAMES]) + (f" and {more:,} more (--json lists them)" if more > 0 else "")
