"""Applying patches to a checkpoint on disk: a new file or folder that is the base with the patches applied.

    copy of the base beside OUT ──► digest of the copy ──► patch it in place ──► fsync ──► rename to OUT

The copy is verified, not the base, since nothing else writes to it. It gets the name of OUT only when all of it is on
disk; if anything fails before, OUT is unchanged and the copy is removed. OUT may be the base itself.

Limitations: on a filesystem that shares blocks between copies, a disk that fills up while the copy is patched ends the
process (the pages are mapped); OUT is unchanged then. Ownership and extended attributes are not copied.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..errors import CheckpointError, WeightsError, WrongBase
from ..files import Folder
from ..parallel import Progress
from ..patch import Patch
from ..patch.compose import require_chain
from ..patch.matching import digest_of
from ..patch.patch import file_changes
from ..sources.checkpoint import Checkpoint, checkpoint_file, checkpoint_in, open_checkpoint
from ..sources.checkpoint_files import WEIGHT_FILES, is_other_state
from ..weights.digest import Digest
from ..weights.local import LocalWeights
from ..weights.table import TensorTable
from ..weights.tensors import tensor_table
from .swap import swapping

Stages = Callable[[str, int], Progress]  # called with the name of a stage and its bytes; returns its progress

_COPY_BYTES = 1 << 27
_MOST_FOLDERS = 100  # one in the other, that are copied
_CANNOT_COPY_RANGE = frozenset(
    (errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EPERM, errno.EBADF)
)


@dataclass(frozen=True)
class PatchedCheckpoint:
    """The result of `apply_to_checkpoint`. `already` says that the base had all patches, so that none was applied.

    `unreached` are safetensors files of the folder that do not belong to the checkpoint; they were copied unchanged.
    `files` are the names of other files that the patches have written or removed. `left_out` are files of the base that
    have training state or weights in another format: those of the base, which no patch changes.
    """

    path: Path
    digest: Digest
    changed: int
    applied: int
    already: bool
    unreached: tuple[str, ...]
    files: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()


def _is_weights(name: str) -> bool:
    return "/" not in name and name.endswith(WEIGHT_FILES)


def apply_to_checkpoint(
    base: str | os.PathLike[str],
    patches: Sequence[Patch],
    out: str | os.PathLike[str],
    progress: Stages | None = None,
    *,
    threads: int | None = None,
) -> PatchedCheckpoint:
    """Apply patches, one after the other, to the checkpoint `base`, and write the result to `out`.

    A file gives a file, a folder gives a folder with its other files (links are followed), of which those that the
    patches carry are replaced. Training state and weights in other formats are left out: they are those of the base. If
    `base` has some of the patches already, the rest is applied.

    Args:
        base: a safetensors file or a checkpoint folder.
        patches: patches that follow one another.
        out: where the result goes: a new path, the base itself, or an older version of it, which is replaced in one
            step. If it is a link, the link is replaced. Anything else is refused.
        progress: called with the name and the bytes of each stage; returns a function that is called with bytes done.
        threads: how many threads verify and write; by default as many as there are cores, up to 16.

    Returns:
        What was done.

    Raises:
        WrongBase: the base has none of the versions that the patches start from. Nothing is written.
        CheckpointError: `base` is not a valid checkpoint, or `out` cannot be written or must not be replaced.

    >>> patches = [sparserl.Patch.open("100-101.patch")]                                           # doctest: +SKIP
    >>> sparserl.targets.apply_to_checkpoint("step-100", patches, "step-101").changed              # doctest: +SKIP
    1613022
    """
    base = Path(base)
    out = _absolute(Path(out))
    stages = progress or _no_progress
    _require_sound(patches)
    with swapping(out) as swap:
        checkpoint = open_checkpoint(base)
        table = patches[0].table
        changes = file_changes(patches)
        _refuse_unrelated(checkpoint, out, table, changes.keys())
        table.require(tensor_table(checkpoint), "the patch", str(base))
        with _copying(base, swap.draft) as copy:
            copy.make(stages)
            rest = copy.patch(patches, stages, threads)
            files = copy.change_files(changes)
            result = PatchedCheckpoint(
                out,
                patches[-1].result,
                sum(p.changed for p in rest),
                len(rest),
                not rest and not files,
                copy.unreached(checkpoint),
                files,
                copy.left_out,
            )
            if result.already and out.exists() and out.samefile(base):
                swap.clear()
                return result
            copy.finish(stages)
        swap.commit()
    return result


def copy_patched(
    base: Folder, draft: Folder, patches: Sequence[Patch], threads: int | None = None, *, weights_only: bool = False
) -> None:
    """Write a checkpoint with patches applied to an empty folder. All of it is on disk when this returns.

    weights_only: whether to leave out the other files of the base.
    """
    copy = _Copy(base, draft, weights_only=weights_only)
    if patches:
        _require_sound(patches)
    copy.make(_no_progress)
    if patches:
        copy.patch(patches, _no_progress, threads)
    copy.finish(_no_progress)


def _no_progress(_name: str, _total: int) -> Progress:
    return lambda _done: None


def _require_sound(patches: Sequence[Patch]) -> None:
    """Check that patches follow one another and are not damaged."""
    require_chain([patch.contents for patch in patches])
    tuple(patch.contents.heads for patch in patches)  # reading them checks every checksum


def _absolute(out: Path) -> Path:
    """The output with its folder resolved, but not itself: if it is a link, the link is replaced."""
    out = out.parent.resolve() / out.name if out.name not in ("", "..") else out.resolve()
    if not out.name or not out.parent.is_dir():
        raise CheckpointError(f"{out} cannot be written: {out.parent} is not a folder, make it first")
    return out


def _refuse_unrelated(base: Checkpoint, out: Path, table: TensorTable, changed_files: Collection[str]) -> None:
    """Replace nothing but the base, an older version of it, or an empty folder.

    changed_files: names of files that the patches write or remove.
    """
    is_folder = base.path.is_dir()
    real_base = base.path.resolve()
    real_out = out.resolve()
    if is_folder and real_base != real_out and (real_base in real_out.parents or real_out in real_base.parents):
        raise CheckpointError(f"one of {out} and {base.path} is inside the other; choose an output beside the base")
    if not os.path.lexists(out):
        return
    if is_folder != out.is_dir():
        kinds = ("a folder", "a file") if is_folder else ("a file", "a folder")
        raise CheckpointError(f"the base is {kinds[0]}, but {out} exists and is {kinds[1]}; choose another output")
    if is_folder and not any(out.iterdir()):
        return
    if real_base != real_out:
        try:
            table.require(tensor_table(open_checkpoint(out)), "the patch", str(out))
        except WeightsError as error:
            raise CheckpointError(
                f"{out} exists and is not a version of the base; choose another output ({error})"
            ) from error
    kept = {name for name in _all_files(base.path) if not is_other_state(name)} if is_folder else set()
    if is_folder and (lost := sorted(_all_files(out) - kept - set(changed_files))):
        raise CheckpointError(
            f"{out} exists and would lose {lost[0]!r}, which the result does not have; choose another output"
        )


@contextlib.contextmanager
def _copying(base: Path, draft: Path) -> Iterator[_Copy]:
    """A copy of a file or a folder, at a path that does not exist yet."""
    with contextlib.ExitStack() as stack:
        parent = stack.enter_context(Folder.open(draft.parent))
        if base.is_dir():
            source = stack.enter_context(Folder.open(base, links=True))
            yield _Copy(source, stack.enter_context(parent.folder(draft.name, make=True, mode=0o700)))
        else:
            source = stack.enter_context(Folder.open(base.parent, links=True))
            yield _Copy(source, parent, (base.name, draft.name))


class _Copy:
    """A copy of a checkpoint folder, or of a single file (`single`: its name, and the name of the copy).

    Links in the folder that is copied are followed. Nothing else writes to the draft.
    """

    def __init__(
        self, source: Folder, draft: Folder, single: tuple[str, str] | None = None, *, weights_only: bool = False
    ) -> None:
        self._source = source
        self._draft = draft
        self._single = single
        names = list(_walk(source)) if single is None else []
        self.left_out = tuple(filter(is_other_state, names))
        copied = (name for name in names if (_is_weights(name) if weights_only else not is_other_state(name)))
        self._names = {name: name for name in copied} if single is None else dict([single])
        self._folders = sorted({str(above) for name in self._names for above in Path(name).parents} - {"."})

    @property
    def _path(self) -> Path:
        """The path that is copied."""
        return self._source.path if self._single is None else self._source.path / self._single[0]

    def unreached(self, checkpoint: Checkpoint) -> tuple[str, ...]:
        """Safetensors files of the folder that do not belong to the checkpoint."""
        own = {str(file.relative_to(self._source.path)) for file in checkpoint.files}
        return tuple(sorted(name for name in self._names if name.endswith(".safetensors") and name not in own))

    def make(self, stages: Stages) -> None:
        """Copy every file."""
        statuses = self._statuses()
        done = stages("copy", sum(status.st_size for status in statuses))
        for path in self._folders:
            above, _, last = path.rpartition("/")
            with self._draft.below(above) as folder:
                folder.folder(last, make=True, mode=0o700).close()
        for name, new in self._names.items():
            with _opened(self._source, name) as file, _created(self._draft, new) as copy:
                _copy_bytes(file, copy, done)
        if _fingerprint(self._statuses()) != _fingerprint(statuses):
            raise CheckpointError(f"{self._path} changed while it was copied; nothing was written")

    def patch(self, patches: Sequence[Patch], stages: Stages, threads: int | None) -> Sequence[Patch]:
        """Verify the copy, then apply the patches that it does not have yet. Returns these."""
        if self._single is None:
            weights = checkpoint_in(self._draft, writable=True)
        else:
            weights = checkpoint_file(self._draft, self._single[1], writable=True)
        table = patches[0].table
        table.require(tensor_table(weights), "the patch", str(self._path))
        digest = digest_of(
            patches[0].contents, LocalWeights.of(weights, table), threads, stages("verify", weights.nbytes)
        )
        rest = _rest(digest, patches, self._path)
        for patch in rest:
            patch.apply(weights, digest=patch.base, threads=threads)
        return rest

    def change_files(self, changes: Mapping[str, bytes | None]) -> tuple[str, ...]:
        """Write and remove files beside the weights of a folder. Returns the names of those that differ now."""
        changed = []
        for name, data in changes.items() if self._single is None else ():
            above, _, last = name.rpartition("/")
            before = self._content(name) if name in self._names else None
            if data == before:
                continue
            changed.append(name)
            with self._draft.below(above, make=True) as folder:
                if before is not None:
                    folder.unlink(last)
                if data is not None:
                    with folder.creating(last) as file:
                        file.write(data)
                folder.sync()
            self._names.pop(name, None)
        return tuple(sorted(changed))

    def _content(self, name: str) -> bytes:
        with _opened(self._draft, name) as file, os.fdopen(os.dup(file), "rb") as stream:
            return stream.read()

    def finish(self, stages: Stages) -> None:
        """Give the copy the modes of the original, and write everything to disk."""
        statuses = self._statuses()
        done = stages("write", sum(status.st_size for status in statuses))
        for new, status in zip(self._names.values(), statuses, strict=True):
            with _opened(self._draft, new) as copy:
                os.fchmod(copy, stat.S_IMODE(status.st_mode))
                os.fsync(copy)
            done(status.st_size)
        if self._single is None:
            for path in (*reversed(self._folders), ""):
                with self._source.below(path) as folder, self._draft.below(path) as copy_folder:
                    copy_folder.chmod(0o700 | folder.mode)
                    copy_folder.sync()

    def _statuses(self) -> list[os.stat_result]:
        """The status of every file that is copied."""
        statuses = []
        for name in self._names:
            with _opened(self._source, name) as file:
                statuses.append(os.fstat(file))
        return statuses


def _all_files(path: Path) -> set[str]:
    with Folder.open(path, links=True) as folder:
        return set(_walk(folder))


def _walk(folder: Folder, below: str = "", above: tuple[tuple[int, int], ...] = ()) -> Iterator[str]:
    """The relative path of every file below a folder, sorted."""
    if folder.identity in above:
        raise CheckpointError(f"{folder.path} is a link to a folder that contains it")
    if len(above) > _MOST_FOLDERS:
        raise CheckpointError(f"{folder.path}: more than {_MOST_FOLDERS} folders lie one in the other")
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
    with folder.below(above) as parent:
        handle = parent.file(last)
    try:
        yield handle
    finally:
        os.close(handle)


@contextlib.contextmanager
def _created(folder: Folder, path: str) -> Iterator[int]:
    """A new file that only its owner can read."""
    above, _, last = path.rpartition("/")
    with folder.below(above) as parent:
        handle = parent.file(last, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        yield handle
    finally:
        os.close(handle)


def _fingerprint(statuses: Sequence[os.stat_result]) -> list[tuple[int, ...]]:
    """What changes when a file is written to, except through a mapping."""
    return [(s.st_dev, s.st_ino, s.st_size, s.st_mtime_ns) for s in statuses]


def _copy_bytes(file: int, copy: int, done: Progress) -> None:
    """Copy in the kernel, with shared blocks or on the server if the filesystem can do that."""
    copied = 0
    size = os.fstat(file).st_size
    try:
        while copied < size and (n := os.copy_file_range(file, copy, _COPY_BYTES)):
            copied += n
            done(n)
    except (AttributeError, OSError) as error:  # not supported by every system, nor between all filesystems
        if isinstance(error, OSError) and error.errno not in _CANNOT_COPY_RANGE:
            raise
    if copied < size:
        with os.fdopen(file, "rb", closefd=False) as source, os.fdopen(copy, "wb", closefd=False) as target:
            source.seek(copied)
            target.seek(copied)
            shutil.copyfileobj(source, target)
        done(size - copied)


def _rest(digest: Digest, patches: Sequence[Patch], path: Path) -> Sequence[Patch]:
    """The patches that weights with a digest do not have yet."""
    if digest == patches[-1].result:
        return ()
    for i in reversed(range(len(patches))):
        if digest == patches[i].base:
            return patches[i:]
    raise WrongBase(
        f"{path} has digest {digest}; the patch turns {patches[0].base} into {patches[-1].result}. "
        "Nothing was written: find the patch that starts from these weights, or a full copy"
    )
