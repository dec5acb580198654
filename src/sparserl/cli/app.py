"""The program: every command, in the order in which `--help` lists them."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from . import (
    doctor,
    export,
    follow,
    fsck,
    keys,
    log,
    patches,
    pins,
    plan,
    publish,
    report,
    serve,
    show,
    squash,
    verify_engine,
    warmup,
)


class _PlainFlags:
    """Help that names no type beside flags: they take no value."""

    def get_params(self, ctx: Any) -> Any:
        params = super().get_params(ctx)  # type: ignore[misc]
        for param in params:
            if getattr(param, "is_flag", False):
                param.metavar = ""
        return params


app = typer.Typer(
    cls=type("Group", (_PlainFlags, TyperGroup), {}),
    name="sparserl",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Weights are a .safetensors file or a Hugging Face checkpoint folder.",
)
for module in (
    *(patches, squash, publish, follow, export, serve, log, pins, fsck, keys, verify_engine),
    *(plan, report, doctor, warmup),
):
    for command in module.commands.registered_commands:
        command.cls = type("Command", (_PlainFlags, TyperCommand), {})
    app.add_typer(module.commands)


def _print_version(requested: bool) -> None:
    if requested:
        from .. import __version__

        typer.echo(f"sparserl {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[  # noqa: ARG001  # its callback does the work
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Also log what sessions do, on stderr; give it before the command.")
    ] = False,
) -> None:
    """Move weights by sending only the bits that changed: exact patches between checkpoints."""
    show.log_to_stderr(verbose)
