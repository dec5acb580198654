"""The commands. What they need is imported when they run, so that `--help` does not wait for it."""

from __future__ import annotations

import errno
import functools
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ParamSpec

import typer

from ..errors import NeedsBase, SparserlError, TensorMismatch
from . import show

if TYPE_CHECKING:
    from ..patch import Patch
    from ..sources import Checkpoint
    from ..weights.digest import Digest

P = ParamSpec("P")

app = typer.Typer(
    name="sparserl",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Weights are a .safetensors file or a Hugging Face checkpoint folder.",
)


def reporting(command: Callable[P, None]) -> Callable[P, None]:
    """Errors that a user can do something about are one line on stderr and exit code 1."""

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            command(*args, **kwargs)
        except BrokenPipeError:
            raise  # whoever read our output has enough of it
        except NeedsBase as error:
            show.note(f"error: {error} (--base)")
        except SparserlError as error:
            show.note(f"error: {error}")
        except OSError as error:
            names = [str(n) for n in (error.filename, error.filename2) if n is not None]
            show.note(
                "error: " + ": ".join([" -> ".join(names), error.strerror or str(error)] if names else [str(error)])
            )
        else:
            return
        raise typer.Exit(1)

    return run


def _version(asked: bool) -> None:
    if asked:
        from .. import __version__

        typer.echo(f"sparserl {__version__}")
        raise typer.Exit


def _known_profile(name: str) -> str:
    from ..codec import PROFILES

    choices = ", ".join(("auto", *PROFILES))
    if name == "auto" or name in PROFILES:
        return name
    raise typer.BadParameter(f"{name!r} is not a profile; this release has {choices}")


def _known_link(text: str | None) -> str | None:
    from ..plan import Link

    if text is not None:
        try:
            Link.parse(text)
        except SparserlError as error:
            raise typer.BadParameter(str(error)) from error
    return text


Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
Threads = Annotated[int | None, typer.Option(min=1, help="Threads to work on; as many as cores by default.")]
Profile = Annotated[
    str,
    typer.Option(
        callback=_known_profile,
        metavar="auto|raw|gap|ulp|ctx",
        help="How the changes are encoded. auto takes the smallest for each part of the patch.",
    ),
]
LinkSpeed = Annotated[
    str | None,
    typer.Option(
        callback=_known_link,
        metavar="SPEED",
        help="The link to the receiver: 25Gbit, 3GB/s. auto then takes what is coded, sent and landed soonest.",
    ),
]
PatchFile = Annotated[Path, typer.Argument(metavar="PATCH", help="A patch file.")]
PatchOut = Annotated[Path, typer.Option("--output", "-o", metavar="PATCH", help="The patch file to write.")]
Base = Annotated[
    Path | None, typer.Option(metavar="WEIGHTS", help="The weights that the (first) patch applies to, where needed.")
]


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    """Move weights by sending only the bits that changed: exact patches between checkpoints."""


@app.command(epilog="Example:  sparserl diff step-100/ step-101/ -o 101.patch")
@reporting
def diff(
    old: Annotated[Path, typer.Argument(metavar="OLD", help="The weights that receivers have.")],
    new: Annotated[Path, typer.Argument(metavar="NEW", help="The weights that they shall have.")],
    output: PatchOut,
    profile: Profile = "auto",
    link: LinkSpeed = None,
    threads: Threads = None,
    json: Json = False,
) -> None:
    """Write the patch that turns OLD into NEW, bit for bit.

    Both must have the same tensors, dtypes and shapes; how they are sharded does not matter.
    """
    from ..patch import diff as find
    from ..sources import open_checkpoint

    _refuse_to_replace(output)
    before, after = open_checkpoint(old), open_checkpoint(new)
    with show.progress() as stage:
        done = stage("compare", before.nbytes)
        patch = find(before, after, profile=profile, link=link, to=output, threads=threads, progress=done)
    show.written(json, output, patch)


@app.command(
    epilog="Examples:  sparserl apply step-100/ 101.patch 102.patch -o step-102/  "
    "and in place:  sparserl apply model/ 101.patch -o model/"
)
@reporting
def apply(
    base: Annotated[Path, typer.Argument(metavar="BASE", help="The weights that the first patch applies to.")],
    patches: Annotated[list[Path], typer.Argument(metavar="PATCH", help="One patch, or several that follow.")],
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="OUT", help="The checkpoint to write; may be BASE itself.")
    ],
    threads: Threads = None,
    json: Json = False,
) -> None:
    """Write the checkpoint that the patches make of BASE, all files of a folder with it.

    Everything is verified first. OUT is replaced at once when the new weights are complete and on disk: whatever
    happens on the way, it is the old checkpoint or the new one. A BASE that has some of the patches in it already gets
    the rest.
    """
    from ..targets import apply_to_checkpoint

    chain = [open_patch(path) for path in patches]
    with show.progress() as stage:
        landed = apply_to_checkpoint(base, chain, output, stage, threads=threads)
    for name in landed.unreached:
        show.note(f"note: {name} is no part of the checkpoint and was copied as it is")
    values = {
        "path": str(output),
        "digest": landed.digest.hex,
        "changed": landed.changed,
        "applied": landed.applied,
        "already": landed.already,
        "unreached": list(landed.unreached),
    }
    done = f"{landed.changed:,} changes by {landed.applied} of {len(chain)} patch(es)"
    if landed.already:
        done = "already the result, no changes"
    show.result(json, values, f"{output}: {done}, digest {landed.digest}")


@app.command(epilog="Example:  sparserl inspect 101.patch --tensors")
@reporting
def inspect(
    patch: PatchFile,
    tensors: Annotated[bool, typer.Option("--tensors", help="One row for each tensor, too.")] = False,
    json: Json = False,
) -> None:
    """Show what a patch holds: digests, sizes, how each bucket is encoded and why."""
    stats = open_patch(patch).stats()
    if json:
        show.result(True, stats.as_dict())
    else:
        show.patch_tables(patch, stats, tensors)


@app.command(epilog="Example:  sparserl verify model/ 101.patch && echo known")
@reporting
def verify(
    weights: Annotated[Path, typer.Argument(metavar="WEIGHTS", help="The weights to look at.")],
    patch: PatchFile,
    threads: Threads = None,
    json: Json = False,
) -> None:
    """Say whether WEIGHTS are the patch's base, its result, or neither (exit code 1)."""
    from ..sources import open_checkpoint

    opened, checkpoint = open_patch(patch), open_checkpoint(weights)
    try:
        digest = _digest(opened, checkpoint, threads)
    except TensorMismatch as error:
        show.note(str(error))
        digest = None
    answer = "result" if digest == opened.result else "base" if digest == opened.base else "neither"
    values = {
        "answer": answer,
        "digest": None if digest is None else digest.hex,
        "base_digest": opened.base.hex,
        "result_digest": opened.result.hex,
    }
    show.result(json, values, answer)
    if answer == "neither":
        raise typer.Exit(1)


@app.command(
    epilog="""Examples:

    sparserl squash 101.patch 102.patch 103.patch -o 101-103.patch

    sparserl squash s3://bucket/run --from 100 --to 200
"""
)
@reporting
def squash(
    patches: Annotated[
        list[str], typer.Argument(metavar="PATCH|URL", help="Patches that follow one another, or one store.")
    ],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="PATCH", help="The patch file to write.")
    ] = None,
    base: Base = None,
    profile: Profile = "auto",
    first: Annotated[int | None, typer.Option("--from", metavar="VERSION", help="In a store: where to start.")] = None,
    last: Annotated[int | None, typer.Option("--to", metavar="VERSION", help="In a store: where to end.")] = None,
    key: Annotated[
        Path | None, typer.Option(metavar="FILE", help="In a store whose heads are signed: the secret key.")
    ] = None,
    threads: Threads = None,
    json: Json = False,
) -> None:
    """Make one patch of several that follow one another.

    Patches that hold new bits and patches that hold steps can be mixed only with --base, which also drops what ended
    where it began.

    In a store, subscribers that hold the version it starts from, or an earlier one, take the squashed patch where that
    is shorter. Publishers write such patches by themselves, over 8 to 64 versions.
    """
    from ..patch import squash as join

    if "://" in patches[0]:
        from .session import squash_store

        squash_store(patches, first, last, key, threads, json)
        return
    if output is None:
        raise typer.BadParameter("say where the patch goes: --output")
    _refuse_to_replace(output)
    chain = [open_patch(Path(path)) for path in patches]
    weights, digest = _base(chain[0], base, threads)
    show.written(json, output, join(*chain, base=weights, digest=digest, profile=profile, to=output, threads=threads))


@app.command(epilog="Example:  sparserl invert 101.patch --base step-100/ -o undo-101.patch")
@reporting
def invert(
    patch: PatchFile,
    output: PatchOut,
    base: Base = None,
    threads: Threads = None,
    json: Json = False,
) -> None:
    """Write the patch that undoes PATCH.

    Without --base this works for patches of profile ulp alone: other patches do not say what they overwrite.
    """
    _refuse_to_replace(output)
    opened = open_patch(patch)
    weights, digest = _base(opened, base, threads)
    show.written(json, output, opened.invert(weights, digest=digest, to=output, threads=threads))


@app.command(epilog="Example:  sparserl digest model/")
@reporting
def digest(
    weights: Annotated[Path, typer.Argument(metavar="WEIGHTS", help="The weights to read.")],
    threads: Threads = None,
    json: Json = False,
) -> None:
    """Print the digest of WEIGHTS, by which patches know their base and their result.

    It depends on names, dtypes, shapes and bits, and on nothing else: not on how they are sharded.
    """
    from ..sources import open_checkpoint
    from ..weights.digest import digest as read

    checkpoint = open_checkpoint(weights)
    with show.progress() as stage:
        found = read(checkpoint, threads=threads, progress=stage("read", checkpoint.nbytes))
    values = {
        "digest": found.hex,
        "tensors": len(checkpoint),
        "elements": sum(bits.array.size for bits in checkpoint.values()),
        "bytes": checkpoint.nbytes,
    }
    show.result(json, values, found.hex)


def open_patch(path: Path) -> Patch:
    """A patch file with every checksum verified; what is wrong with it is said with its name."""
    from ..patch import Patch

    try:
        patch = Patch.open(path)
        len(patch.contents.heads)
    except SparserlError as error:
        raise type(error)(f"{path}: {error}") from error
    return patch


def _digest(patch: Patch, checkpoint: Checkpoint, threads: int | None) -> Digest:
    """The digest of weights over what a patch covers."""
    from ..patch.matching import digest_of
    from ..weights.local import LocalWeights
    from ..weights.tensors import tensor_table

    patch.table.require(tensor_table(checkpoint), "the patch", str(checkpoint.path))
    with show.progress() as stage:
        return digest_of(
            patch.contents, LocalWeights.of(checkpoint, patch.table), threads, stage("verify", checkpoint.nbytes)
        )


def _base(patch: Patch, path: Path | None, threads: int | None) -> tuple[Checkpoint | None, Digest | None]:
    from ..sources import open_checkpoint

    if path is None:
        return None, None
    checkpoint = open_checkpoint(path)
    return checkpoint, _digest(patch, checkpoint, threads)


def _refuse_to_replace(output: Path) -> None:
    """A patch may take the name of another patch, but of nothing else: the name may be a slip."""
    from ..wire.patchfile import MAGIC

    if output.parent.exists() and not output.parent.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, "is not a folder", str(output.parent))
    if output.is_dir():
        raise IsADirectoryError(errno.EISDIR, "is a folder; a patch is a file", str(output))
    if output.exists():
        if not output.is_file():
            raise FileExistsError(errno.EEXIST, "exists and is not a regular file", str(output))
        with output.open("rb") as file:
            if file.read(len(MAGIC)) not in (b"", MAGIC):
                raise FileExistsError(errno.EEXIST, "exists and is not a patch; choose another name", str(output))
