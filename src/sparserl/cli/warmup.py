"""`sparserl warmup`: compile the kernels beforehand, for instance while a container image is built."""

from __future__ import annotations

from typing import Annotated

import typer

from . import show
from .options import ADVICE, Json
from .reporting import reporting

commands = typer.Typer()

_EPILOG = """Examples:

    sparserl warmup

    sparserl warmup --dtype bfloat16 --dtype float32

    NUMBA_CACHE_DIR=/opt/kernels sparserl warmup && NUMBA_CACHE_DIR=/opt/kernels python train.py

Kernels are compiled for the processor that this runs on, and kept beside the package, below the home directory if that
cannot be written, or in NUMBA_CACHE_DIR. All processes that use the same folder share them.
"""


@commands.command(rich_help_panel=ADVICE, epilog=_EPILOG)
@reporting
def warmup(
    dtype: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="A dtype of the weights; repeat it for several. By default bfloat16."),
    ] = None,
    gpu: Annotated[
        bool | None,
        typer.Option("--gpu/--no-gpu", help="Compile kernels for the GPU, too; by default if there is one."),
    ] = None,
    json: Json = False,
) -> None:
    """Compile all kernels that sessions need, so that no first publish or sync waits for them.

    It takes about twenty seconds on two cores, and a second or two where all of them are compiled already.
    """
    from ..weights.dtypes import BY_NAME

    dtypes = dtype or ["bfloat16"]
    for name in dtypes:
        if name not in BY_NAME:
            raise typer.BadParameter(f"{name!r} is not among {', '.join(BY_NAME)}", param_hint="--dtype")
    from . import kernel_tasks as kernels

    compiled = 0
    seconds = 0.0
    for task, functions, seconds in kernels.compile_all(dtypes, gpu=kernels.has_gpu() if gpu is None else gpu):
        compiled += functions
        show.note(f"{task.part} of {task.dtype}: {functions} functions compiled, after {seconds:.1f} s")
    folder = kernels.cache_folder()
    values = {"dtypes": dtypes, "functions": compiled, "seconds": seconds, "folder": folder}
    show.result(json, values, f"{compiled} functions compiled in {seconds:.1f} s; they are kept in {folder}")
