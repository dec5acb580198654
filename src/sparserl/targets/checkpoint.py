"""Patches landing on a checkpoint: a new file or folder that is the base with the patches in it.

    chain of patches ──► digest of the base ──► copy beside OUT ──► patch the copy in place ──► fsync ──► rename
        (nothing is written so far)

Everything is verified before the copy begins, with one read of the base; the copy takes the name of OUT only when all
of it is on disk. OUT may be the base itself. The header of a safetensors file is copied with the rest of it, so that
its metadata stays.

Limitations: on a filesystem that shares blocks between copies, a disk that fills up while the copy is patched ends
the process (the pages are mapped); OUT is then what it was. Ownership and extended attributes are not copied.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..digest import Digest
from ..errors import CheckpointError, WeightsError, WrongBase
from ..files import sync
from ..memory import tensor_table
from ..parallel import Progress
from ..patch import Patch
from ..patch.apply import digest_of
from ..patch.compose import require_chain
from ..pieces import Held
from ..sources.checkpoint import Checkpoint, open_checkpoint
from ..table import TensorTable
from .swap import Swap, swapping

Stages = Callable[[str, int], Progress]  # called with the name of a stage and its bytes, gives what counts them
Fingerprint = tuple[tuple[int, ...], ...]

_COPY_BYTES = 1 << 27
_CANNOT_COPY_RANGE = frozenset(
    (errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EPERM, errno.EBADF)
)


@dataclass(frozen=True)
class Landed:
    """What became of the patches. `already` where the base was the result before, so that none had to be applied.

    `unreached` are safetensors files of the folder that are no part of the checkpoint and travelled as they were.
    """

    path: Path
    digest: Digest
    changed: int
    applied: int
    already: bool
    unreached: tuple[str, ...]


def apply_to_checkpoint(
    base: str | os.PathLike[str],
    patches: Sequence[Patch],
    out: str | os.PathLike[str],
    progress: Stages | None = None,
    *,
    threads: int | None = None,
) -> Landed:
    """Write to `out` the checkpoint that the patches, one after the other, make of `base`.

    A file gives a file, a folder gives a folder with all its files (links are followed). `out` may be the base, or an
    older version of it: the name is replaced at once, and where it is a link, what it points to is left alone. Anything
    else that has the name already is refused. A base that has some or all of the patches in it already gets the rest.

    Each stage of the work calls `progress` with its name and its bytes; what that returns is called as they are done.
    """
    base, out = Path(base), _absolute(Path(out))
    stages = progress or (lambda _name, _total: lambda _done: None)
    require_chain(patches)
    tuple(patch.heads for patch in patches)  # reading them checks every checksum
    with swapping(out) as swap:
        files = _files(base)
        before = _fingerprint(files)
        checkpoint = open_checkpoint(base)
        _refuse_unrelated(checkpoint, out, patches[0].table)
        rest = _rest(checkpoint, patches, stages, threads)
        own = {_relative(checkpoint, f) for f in checkpoint.files}
        landed = Landed(
            out,
            patches[-1].result,
            sum(p.changed for p in rest),
            len(rest),
            not rest,
            tuple(sorted(name for name in files if name.endswith(".safetensors") and name not in own)),
        )
        if not rest and out.exists() and out.samefile(base):
            return landed
        _copy(checkpoint, files, swap.draft, stages)
        if _fingerprint(files) != before:
            raise CheckpointError(f"{base} changed while it was copied; nothing was written")
        _patch(swap.draft, rest, threads)
        _finish(checkpoint, files, swap, stages)
    return landed


def _absolute(out: Path) -> Path:
    """The output with its folder resolved, but not itself: where it is a link, the link is replaced."""
    out = out.parent.resolve() / out.name if out.name not in ("", "..") else out.resolve()
    if not out.name or not out.parent.is_dir():
        raise CheckpointError(f"{out} cannot be written: {out.parent} is not a folder, make it first")
    return out


def _refuse_unrelated(base: Checkpoint, out: Path, table: TensorTable) -> None:
    """Replace nothing but the base, an older version of it, or an empty folder."""
    is_folder = base.path.is_dir()
    real_base, real_out = base.path.resolve(), out.resolve()
    if is_folder and real_base != real_out and (real_base in real_out.parents or real_out in real_base.parents):
        raise CheckpointError(f"{out} and {base.path} lie in one another; choose an output beside the base")
    if not os.path.lexists(out) or real_base == real_out:
        return
    if is_folder != out.is_dir():
        kinds = ("a folder", "a file") if is_folder else ("a file", "a folder")
        raise CheckpointError(f"the base is {kinds[0]}, but {out} exists and is {kinds[1]}; choose another output")
    if is_folder and not any(out.iterdir()):
        return
    try:
        table.require(tensor_table(open_checkpoint(out)), "the patch", str(out))
    except WeightsError as error:
        raise CheckpointError(f"{out} exists and is no version of the base; choose another output ({error})") from error
    if is_folder and (strangers := sorted(_walk(out).keys() - _walk(base.path).keys())):
        raise CheckpointError(f"{out} exists and would lose {strangers[0]!r}, which {base.path} does not have")


def _files(base: Path) -> dict[str, Path]:
    """All that travels, by its path below the root: a file, or all files of a folder."""
    if base.is_dir():
        return _walk(base)
    return {"": base} if base.exists() else {}


def _walk(folder: Path, below: str = "", above: tuple[tuple[int, int], ...] = ()) -> dict[str, Path]:
    """Every file below a folder, links followed."""
    status = folder.stat()
    here = (status.st_dev, status.st_ino)
    if here in above:
        raise CheckpointError(f"{folder} is a link to a folder that contains it")
    out: dict[str, Path] = {}
    for path in sorted(folder.iterdir()):
        if path.is_dir():
            out |= _walk(path, f"{below}{path.name}/", (*above, here))
        elif path.is_file():
            out[below + path.name] = path
        else:
            raise CheckpointError(f"{path} is a broken link or not a regular file")
    return out


def _relative(checkpoint: Checkpoint, file: Path) -> str:
    return file.relative_to(checkpoint.path).as_posix() if checkpoint.path.is_dir() else ""


def _fingerprint(files: dict[str, Path]) -> Fingerprint:
    """What tells that a file was written to meanwhile."""
    found = (path.stat() for path in files.values())
    return tuple((s.st_dev, s.st_ino, s.st_size, s.st_mtime_ns) for s in found)


def _rest(checkpoint: Checkpoint, patches: Sequence[Patch], stages: Stages, threads: int | None) -> Sequence[Patch]:
    """The patches that the base does not have in it yet: one read of its bits tells."""
    table = patches[0].table
    table.require(tensor_table(checkpoint), "the patch", str(checkpoint.path))
    held = Held.of(checkpoint, table)
    digest = digest_of(patches[0], held, threads, stages("verify", checkpoint.nbytes))
    if digest == patches[-1].result:
        return ()
    for i in reversed(range(len(patches))):
        if digest == patches[i].base:
            return patches[i:]
    raise WrongBase(
        f"{checkpoint.path} has digest {digest}; the patch turns {patches[0].base} into {patches[-1].result}. "
        "Nothing was written: find the patch that starts from these weights, or a full copy"
    )


def _copy(checkpoint: Checkpoint, files: dict[str, Path], draft: Path, stages: Stages) -> None:
    done = stages("copy", sum(path.stat().st_size for path in files.values()))
    if checkpoint.path.is_dir():
        draft.mkdir(0o700)
        for folder in _folders(files):
            (draft / folder).mkdir(0o700)
    for name, path in files.items():
        _copy_file(path, draft / name, done)


def _folders(files: dict[str, Path]) -> Iterator[str]:
    """The folders below the root, parents first."""
    yield from sorted({str(parent) for name in files for parent in Path(name).parents} - {"."})


def _copy_file(source: Path, to: Path, done: Progress) -> None:
    """Copy bytes inside the kernel: shared blocks or a copy on the server where the filesystem can."""
    copied = 0
    handle = os.open(to, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with source.open("rb") as a, os.fdopen(handle, "wb") as b:
        size = os.fstat(a.fileno()).st_size
        try:
            while copied < size and (n := os.copy_file_range(a.fileno(), b.fileno(), _COPY_BYTES)):
                copied += n
                done(n)
        except (AttributeError, OSError) as error:  # not on every system, and not between any two filesystems
            if isinstance(error, OSError) and error.errno not in _CANNOT_COPY_RANGE:
                raise
    if copied < size:
        shutil.copyfile(source, to)
        done(size - copied)


def _patch(draft: Path, patches: Sequence[Patch], threads: int | None) -> None:
    """Each patch into the mapped copy; the digest that one leads to is the one that the next starts from."""
    weights = open_checkpoint(draft, writable=True) if patches else {}
    for patch in patches:
        patch.apply(weights, digest=patch.base, threads=threads)


def _finish(checkpoint: Checkpoint, files: dict[str, Path], swap: Swap, stages: Stages) -> None:
    """Modes as they were, everything on disk, then the name. Mapped pages are unmapped, so that fsync has them all."""
    sizes = {name: path.stat().st_size for name, path in files.items()}
    done = stages("write", sum(sizes.values()))
    for name, path in files.items():
        shutil.copymode(path, swap.draft / name)
        sync(swap.draft / name)
        done(sizes[name])
    if checkpoint.path.is_dir():
        for folder in (*reversed([*_folders(files)]), ""):
            (swap.draft / folder).chmod(0o700 | (checkpoint.path / folder).stat().st_mode & 0o7777)
            sync(swap.draft / folder)
    swap.commit()
