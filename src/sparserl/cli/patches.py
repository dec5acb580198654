"""Commands on patch files: diff, apply, inspect, verify, invert; and the digest of a checkpoint."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import SparserlError, TensorMismatch, WrongBase
from ..transport.stores.versioned import split_version
from . import show
from .export import stored_run
from .keys import read_trusted_keys
from .options import (
    PATCH_FILES,
    Base,
    CertificateFile,
    Endpoint,
    Json,
    LinkSpeed,
    PatchFile,
    PatchOutput,
    Profile,
    Region,
    Threads,
    TokenFile,
    TrustedKeys,
)
from .pipes import is_pipe, patch_path, read_stdin
from .reporting import reporting
from .stores import StoreOptions, is_store

if TYPE_CHECKING:
    from ..patch import Patch
    from ..sources import Checkpoint
    from ..weights.digest import Digest
    from ..wire import FileSection

commands = typer.Typer()


@commands.command(rich_help_panel=PATCH_FILES, epilog="Example:  sparserl diff step-100/ step-101/ -o 101.patch")
@reporting
def diff(
    old: Annotated[Path, typer.Argument(metavar="OLD", help="The weights that receivers have.")],
    new: Annotated[Path, typer.Argument(metavar="NEW", help="The weights that they are to have.")],
    output: PatchOutput,
    profile: Profile = "auto",
    link: LinkSpeed = None,
    threads: Threads = None,
    json: Json = False,
) -> None:
    """Write the patch that turns OLD into NEW, bit for bit.

    Both must have the same tensors, dtypes and shapes. They need not be split into the same files. Of two folders,
    other files that differ travel in the patch too: config, tokenizer, chat template.
    """
    from ..patch import diff as make_patch
    from ..sources import open_checkpoint
    from ..sources.checkpoint_files import changed_files, files_left_behind

    before = open_checkpoint(old)
    after = open_checkpoint(new)
    written, removed = changed_files(old, new) if old.is_dir() and new.is_dir() else ({}, [])
    with (
        patch_path(output) as path,
        show.progress() as stage,
        _draft(path, bool(written or removed)) as draft,
    ):
        advance = stage("compare", before.nbytes)
        patch = make_patch(before, after, profile=profile, link=link, to=draft, threads=threads, progress=advance)
        if draft != path:
            patch = patch.with_files(written, removed)
            patch.save(path)
        show.written(json, output, patch)
    if new.is_dir() and (names := files_left_behind(new)):
        show.note(f"note: not in the patch: {', '.join(names)}")


@commands.command(
    rich_help_panel=PATCH_FILES,
    epilog="Examples:  sparserl apply step-100/ 101.patch 102.patch -o step-102/  "
    "in place:  sparserl apply model/ 101.patch -o model/  "
    "from a store:  sparserl apply step-100/ s3://bucket/run@102 -o step-102/",
)
@reporting
def apply(
    base: Annotated[Path, typer.Argument(metavar="BASE", help="The weights that the first patch applies to.")],
    patches: Annotated[
        list[str],
        typer.Argument(
            metavar="PATCH|URL@VERSION",
            help="One patch, or several that follow one another; or a store, whose patches lead to a version.",
        ),
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="OUT", help="The checkpoint to write; it may be BASE itself.")
    ],
    trusted_key: TrustedKeys = None,
    token_file: TokenFile = None,
    endpoint: Endpoint = None,
    region: Region = None,
    ca: CertificateFile = None,
    threads: Threads = None,
    json: Json = False,
) -> None:
    """Apply patches to BASE and write the result, together with the other files of its folder.

    Training state and weights in other formats (.bin, .pt, .pth) are left out: they are those of BASE.

    Everything is verified before OUT is touched. OUT is replaced in one step, when the new weights are complete and on
    disk: whatever happens, it is either the old checkpoint or the new one. Patches that BASE already contains are
    skipped.

    From a store, BASE must be a version of its run: the patches from there to the other version are fetched.
    """
    from ..targets import apply_to_checkpoint

    if any(map(is_store, patches)):
        if len(patches) > 1:
            raise typer.BadParameter("give patch files, or one store with a version: URL@VERSION")
        url, version = split_version(patches[0])
        keys = read_trusted_keys(trusted_key)
        chain = _stored_patches(base, StoreOptions(url, endpoint, region, token_file, ca), version, keys, threads)
    else:
        chain = [open_patch(Path(path)) for path in patches]
    with show.progress() as stage:
        outcome = apply_to_checkpoint(base, chain, output, stage, threads=threads)
    for name in outcome.unreached:
        show.note(f"note: {name} is not part of the checkpoint and was copied unchanged")
    if outcome.left_out:
        show.note(f"note: of {base}'s weights alone, and left out: {', '.join(outcome.left_out)}")
    values = {
        "path": str(output),
        "digest": outcome.digest.hex,
        "changed": outcome.changed,
        "applied": outcome.applied,
        "already": outcome.already,
        "unreached": list(outcome.unreached),
        "files": list(outcome.files),
        "left_out": list(outcome.left_out),
    }
    summary = f"{outcome.changed:,} changes by {outcome.applied} of {len(chain)} patch(es)"
    if outcome.files:
        summary += f", other files: {', '.join(outcome.files)}"
    if outcome.already:
        summary = "already the result, no changes"
    show.result(json, values, f"{output}: {summary}, digest {outcome.digest}")


@commands.command(rich_help_panel=PATCH_FILES, epilog="Example:  sparserl inspect 101.patch --tensors")
@reporting
def inspect(
    patch: PatchFile,
    tensors: Annotated[bool, typer.Option("--tensors", help="Also print one row for each tensor.")] = False,
    json: Json = False,
) -> None:
    """Show what a patch holds: its digests and sizes, and how each bucket is encoded and why."""
    opened = open_patch(patch)
    stats = opened.stats()
    if json:
        show.result(True, stats.as_dict() | show.file_values(opened))
    else:
        show.patch_tables(patch, stats, tensors)
        show.file_table(opened)


@commands.command(rich_help_panel=PATCH_FILES, epilog="Example:  sparserl verify model/ 101.patch && echo known")
@reporting
def verify(
    weights: Annotated[Path, typer.Argument(metavar="WEIGHTS", help="The weights to check.")],
    patch: PatchFile,
    threads: Threads = None,
    json: Json = False,
) -> None:
    """Say whether WEIGHTS are the patch's base, its result, or neither (exit code 1)."""
    from ..sources import open_checkpoint

    opened = open_patch(patch)
    checkpoint = open_checkpoint(weights)
    try:
        digest = _digest_of(opened, checkpoint, threads)
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


@commands.command(
    rich_help_panel=PATCH_FILES, epilog="Example:  sparserl invert 101.patch --base step-100/ -o undo-101.patch"
)
@reporting
def invert(
    patch: PatchFile,
    output: PatchOutput,
    base: Base = None,
    threads: Threads = None,
    json: Json = False,
) -> None:
    """Write the patch that undoes PATCH.

    Without --base this works only for patches of profile ulp. Patches of other profiles do not hold the bits that they
    overwrite.
    """
    opened = open_patch(patch)
    weights, digest = open_base(opened, base, threads)
    with patch_path(output) as path:
        inverse = opened.invert(weights, digest=digest, to=path, threads=threads)
        if opened.files is not None:
            if base is not None and base.is_dir():
                inverse = inverse.with_files(*_inverse_files(opened.files, base))
                inverse.save(path)
            else:
                show.note(
                    "note: the files of the patch are not undone; that takes --base with the folder that it applies to"
                )
        show.written(json, output, inverse)


def _inverse_files(files: FileSection, base: Path) -> tuple[dict[str, bytes], list[str]]:
    """What undoes the changes of files: their contents in the folder that the patch applies to."""
    names = [*files, *files.removed]
    written = {name: (base / name).read_bytes() for name in names if (base / name).is_file()}
    return written, [name for name in names if name not in written]


@commands.command(rich_help_panel=PATCH_FILES, epilog="Example:  sparserl digest model/")
@reporting
def digest(
    weights: Annotated[Path, typer.Argument(metavar="WEIGHTS", help="The weights to read.")],
    threads: Threads = None,
    json: Json = False,
) -> None:
    """Print the digest of WEIGHTS, by which patches recognize their base and their result.

    It depends on names, dtypes, shapes and bits alone, not on how the weights are split into files.
    """
    from ..sources import open_checkpoint
    from ..weights.digest import digest as compute

    checkpoint = open_checkpoint(weights)
    with show.progress() as stage:
        value = compute(checkpoint, threads=threads, progress=stage("read", checkpoint.nbytes))
    values = {
        "digest": value.hex,
        "tensors": len(checkpoint),
        "elements": sum(bits.array.size for bits in checkpoint.values()),
        "bytes": checkpoint.nbytes,
    }
    show.result(json, values, value.hex)


@contextlib.contextmanager
def _draft(output: Path, needed: bool) -> Iterator[Path]:
    """Where to write a patch that more is added to, or its own place."""
    if not needed:
        yield output
        return
    with tempfile.TemporaryDirectory(prefix=f".{output.name}.", dir=output.parent) as folder:
        yield Path(folder) / "patch"


def open_patch(path: Path) -> Patch:
    """A patch file whose checksums have all been verified; errors name the file."""
    from ..patch import Patch

    try:
        patch = Patch.from_bytes(read_stdin()) if is_pipe(path) else Patch.open(path)
        len(patch.contents.heads)
    except SparserlError as error:
        raise type(error)(f"{path}: {error}") from error
    return patch


def _stored_patches(
    base: Path, options: StoreOptions, version: int | None, keys: list[str] | None, threads: int | None
) -> list[Patch]:
    """The patches that lead from a checkpoint, which is a version of a store's run, to another version."""
    from ..session.store.fields import sha256
    from ..sources import open_checkpoint
    from ..weights.digest import digest as compute

    checkpoint = open_checkpoint(base)
    with show.progress() as stage:
        current = compute(checkpoint, threads=threads, progress=stage("read", checkpoint.nbytes))
    with stored_run(options, keys) as run:
        last = run.head.version if version is None else version
        run.require(last)
        first = run.version_of(current)
        if first is None:
            raise WrongBase(
                f"{base} has digest {current}, which no version has that {options.url} keeps; "
                f"`sparserl export {options.url}@{last} -o OUT` writes the whole version"
            )
        steps = run.steps(first, last)
        has_way = bool(steps) and steps[0].base is not None  # not where only an anchor leads there
        chain = run.patches(steps) if has_way else [run.patch(first, last, threads)]
        if base.is_dir():  # versions with the same weights may differ in files: those of the checkpoint itself count
            names = run.file_hashes(first).keys() | run.file_hashes(last).keys()
            held = {name: sha256((base / name).read_bytes()) for name in names if (base / name).is_file()}
            chain[-1] = run.with_files(chain[-1], held, last)
        return chain


def open_base(patch: Patch, path: Path | None, threads: int | None) -> tuple[Checkpoint | None, Digest | None]:
    """The weights that --base names, and their digest."""
    from ..sources import open_checkpoint

    if path is None:
        return None, None
    checkpoint = open_checkpoint(path)
    return checkpoint, _digest_of(patch, checkpoint, threads)


def _digest_of(patch: Patch, checkpoint: Checkpoint, threads: int | None) -> Digest:
    """The digest of weights over the regions that a patch covers."""
    from ..patch.matching import digest_of
    from ..weights.local import LocalWeights
    from ..weights.tensors import tensor_table

    patch.table.require(tensor_table(checkpoint), "the patch", str(checkpoint.path))
    with show.progress() as stage:
        weights = LocalWeights.of(checkpoint, patch.table)
        return digest_of(patch.contents, weights, threads, stage("verify", checkpoint.nbytes))
