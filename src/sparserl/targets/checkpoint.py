"""Patches landing on a checkpoint: a new file or folder that is the base with the patches in it.

    chain of patches ──► copy beside OUT ──► digest of the copy ──► patch it in place ──► fsync ──► rename

The copy is verified, not the base: nobody else writes to it, so that what was verified is what gets the patches. All
bits are read once. The copy takes the name of OUT only when all of it is on disk; whatever goes wrong before, OUT is
untouched and the copy is removed. OUT may be the base itself. The header of a safetensors file is copied with the rest
of it, so that its metadata stays.

Limitations: on a filesystem that shares blocks between copies, a disk that fills up while the copy is patched ends
the process (the pages are mapped); OUT is then what it was. Ownership and extended attributes are not copied.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..errors import CheckpointError, WeightsError, WrongBase
from ..files import Folder
from ..parallel import Progress
from ..patch import Patch
from ..patch.compose import require_chain
from ..patch.matching import digest_of
from ..sources.checkpoint import Checkpoint, checkpoint_file, checkpoint_in, open_checkpoint
from ..weights.digest import Digest
from ..weights.local import LocalWeights
from ..weights.table import TensorTable
from ..weights.tensors import tensor_table
from .swap import swapping

Stages = Callable[[str, int], Progress]  # called with the name of a stage and its bytes, gives what counts them

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
    stages = progress or _no_progress
    _require_sound(patches)
    with swapping(out) as swap:
        checkpoint = open_checkpoint(base)
        table = patches[0].table
        _refuse_unrelated(checkpoint, out, table)
        table.require(tensor_table(checkpoint), "the patch", str(base))
        with _copying(base, swap.draft) as copy:
            copy.make(stages)
            rest = copy.patch(patches, stages, threads)
            landed = Landed(
                out, patches[-1].result, sum(p.changed for p in rest), len(rest), not rest, copy.unreached(checkpoint)
            )
            if not rest and out.exists() and out.samefile(base):
                swap.clear()
                return landed
            copy.finish(stages)
        swap.commit()
    return landed


def copy_patched(base: Folder, draft: Folder, patches: Sequence[Patch], threads: int | None = None) -> None:
    """Make of an empty folder the checkpoint that the patches make of another one; on disk when this returns."""
    _require_sound(patches)
    copy = _Copy(base, draft)
    copy.make(_no_progress)
    copy.patch(patches, _no_progress, threads)
    copy.finish(_no_progress)


def _no_progress(_name: str, _total: int) -> Progress:
    return lambda _done: None


def _require_sound(patches: Sequence[Patch]) -> None:
    """Refuse patches that do not follow one another, or are damaged."""
    require_chain([patch.contents for patch in patches])
    tuple(patch.contents.heads for patch in patches)  # reading them checks every checksum


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
    if is_folder and (strangers := sorted(_all_files(out) - _all_files(base.path))):
        raise CheckpointError(f"{out} exists and would lose {strangers[0]!r}, which {base.path} does not have")


@contextlib.contextmanager
def _copying(base: Path, draft: Path) -> Iterator[_Copy]:
    """What copies a file or a folder to a path where there is nothing yet."""
    with contextlib.ExitStack() as stack:
        to = stack.enter_context(Folder.open(draft.parent))
        if base.is_dir():
            source = stack.enter_context(Folder.open(base, links=True))
            yield _Copy(source, stack.enter_context(to.folder(draft.name, make=True, mode=0o700)))
        else:
            source = stack.enter_context(Folder.open(base.parent, links=True))
            yield _Copy(source, to, (base.name, draft.name))


class _Copy:
    """A copy of a checkpoint folder, or of one file (`alone`: its name, and that of the copy).

    What is in the folder that is copied may be links, which are followed; what is in the draft is nobody else's.
    """

    def __init__(self, source: Folder, draft: Folder, alone: tuple[str, str] | None = None) -> None:
        self._source = source
        self._draft = draft
        self._alone = alone
        self._names = {name: name for name in _walk(source)} if alone is None else dict([alone])
        self._folders = sorted({str(above) for name in self._names for above in Path(name).parents} - {"."})

    @property
    def _path(self) -> Path:
        """What is copied."""
        return self._source.path if self._alone is None else self._source.path / self._alone[0]

    def unreached(self, checkpoint: Checkpoint) -> tuple[str, ...]:
        """Safetensors files of the folder that are no part of the checkpoint."""
        own = {str(file.relative_to(self._source.path)) for file in checkpoint.files}
        return tuple(sorted(name for name in self._names if name.endswith(".safetensors") and name not in own))

    def make(self, stages: Stages) -> None:
        """Copy every file."""
        before = self._statuses()
        done = stages("copy", sum(status.st_size for status in before))
        for path in self._folders:
            above, _, last = path.rpartition("/")
            with self._draft.below(above) as folder:
                folder.folder(last, make=True, mode=0o700).close()
        for name, new in self._names.items():
            with _opened(self._source, name) as file, _created(self._draft, new) as copy:
                _copy_bytes(file, copy, done)
        if _fingerprint(self._statuses()) != _fingerprint(before):
            raise CheckpointError(f"{self._path} changed while it was copied; nothing was written")

    def patch(self, patches: Sequence[Patch], stages: Stages, threads: int | None) -> Sequence[Patch]:
        """Verify the copy, then apply to it the patches that it does not have in it yet. Returns those."""
        if self._alone is None:
            weights = checkpoint_in(self._draft, writable=True)
        else:
            weights = checkpoint_file(self._draft, self._alone[1], writable=True)
        table = patches[0].table
        table.require(tensor_table(weights), "the patch", str(self._path))
        digest = digest_of(
            patches[0].contents, LocalWeights.of(weights, table), threads, stages("verify", weights.nbytes)
        )
        rest = _rest(digest, patches, self._path)
        for patch in rest:
            patch.apply(weights, digest=patch.base, threads=threads)
        return rest

    def finish(self, stages: Stages) -> None:
        """Modes as they were, and everything on disk."""
        statuses = self._statuses()
        done = stages("write", sum(status.st_size for status in statuses))
        for new, status in zip(self._names.values(), statuses, strict=True):
            with _opened(self._draft, new) as copy:
                os.fchmod(copy, stat.S_IMODE(status.st_mode))
                os.fsync(copy)
            done(status.st_size)
        if self._alone is None:
            for path in (*reversed(self._folders), ""):
                with self._source.below(path) as folder, self._draft.below(path) as copied:
                    copied.chmod(0o700 | folder.mode)
                    copied.sync()

    def _statuses(self) -> list[os.stat_result]:
        """Of every file that is copied."""
        out = []
        for name in self._names:
            with _opened(self._source, name) as file:
                out.append(os.fstat(file))
        return out


def _all_files(path: Path) -> set[str]:
    with Folder.open(path, links=True) as folder:
        return set(_walk(folder))


def _walk(folder: Folder, below: str = "", above: tuple[tuple[int, int], ...] = ()) -> Iterator[str]:
    """The path from here of every file below a folder, sorted."""
    if folder.identity in above:
        raise CheckpointError(f"{folder.path} is a link to a folder that contains it")
    for name in folder.names():
        status = folder.status(name)
        mode = 0 if status is None else status.st_mode
        if stat.S_ISDIR(mode):
            with folder.folder(name) as inside:
                yield from _walk(inside, f"{below}{name}/", (*above, folder.identity))
        elif stat.S_ISREG(mode):
            yield below + name
        else:
            raise CheckpointError(f"{folder.path / name} is a broken link or not a regular file")


@contextlib.contextmanager
def _opened(folder: Folder, path: str) -> Iterator[int]:
    """A file in a folder, or in a folder below."""
    above, _, last = path.rpartition("/")
    with folder.below(above) as where:
        handle = where.file(last)
    try:
        yield handle
    finally:
        os.close(handle)


@contextlib.contextmanager
def _created(folder: Folder, path: str) -> Iterator[int]:
    """A new file there, for its owner alone."""
    above, _, last = path.rpartition("/")
    with folder.below(above) as where:
        handle = where.file(last, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        yield handle
    finally:
        os.close(handle)


def _fingerprint(statuses: Sequence[os.stat_result]) -> list[tuple[int, ...]]:
    """What tells that a file was written to meanwhile, but for what was written through a mapping."""
    return [(s.st_dev, s.st_ino, s.st_size, s.st_mtime_ns) for s in statuses]


def _copy_bytes(file: int, copy: int, done: Progress) -> None:
    """Copy inside the kernel: shared blocks or a copy on the server where the filesystem can."""
    copied = 0
    size = os.fstat(file).st_size
    try:
        while copied < size and (n := os.copy_file_range(file, copy, _COPY_BYTES)):
            copied += n
            done(n)
    except (AttributeError, OSError) as error:  # not on every system, and not between any two filesystems
        if isinstance(error, OSError) and error.errno not in _CANNOT_COPY_RANGE:
            raise
    if copied < size:
        with os.fdopen(file, "rb", closefd=False) as a, os.fdopen(copy, "wb", closefd=False) as b:
            a.seek(copied)
            b.seek(copied)
            shutil.copyfileobj(a, b)
        done(size - copied)


def _rest(digest: Digest, patches: Sequence[Patch], path: Path) -> Sequence[Patch]:
    """The patches that weights of a digest do not have in them yet."""
    if digest == patches[-1].result:
        return ()
    for i in reversed(range(len(patches))):
        if digest == patches[i].base:
            return patches[i:]
    raise WrongBase(
        f"{path} has digest {digest}; the patch turns {patches[0].base} into {patches[-1].result}. "
        "Nothing was written: find the patch that starts from these weights, or a full copy"
    )
