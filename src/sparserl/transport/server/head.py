"""The objects of a served folder that change, and requests that wait for that."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import io
import json
import logging
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import NamedTuple

from ...files import Folder

HEAD = "head.json"
_POLL = 0.01  # seconds between looks at the head while a request waits for it: one small file, whoever waits
_CLIENT_POLL = 2.0  # seconds between looks at whether a client that waits is still connected
_MAX_HEAD_BYTES = 1 << 20
_NO_OBJECT = {
    *(errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP),
    *(errno.ENAMETOOLONG, errno.ENXIO, errno.EINVAL),
}

_log = logging.getLogger("sparserl.serve")


class ServedHead(NamedTuple):
    """The bytes of the head, and their tag."""

    data: bytes
    tag: str

    @property
    def version(self) -> int | None:
        """The version that it names; None if it is not a head of a session."""
        try:
            return int(json.loads(json.loads(self.data)["body"])["version"])
        except (ValueError, KeyError, TypeError):
            return None


class HeadWatcher:
    """Reads the head. While requests wait for another one, a single task looks at the file for all of them.

    Args:
        root: the folder.
        name: the name of another object to watch.
        missing: what is served where there is no such object; None for nothing.
    """

    def __init__(self, root: Path, name: str = HEAD, missing: bytes | None = None) -> None:
        self.closing = False
        self.waiting = 0
        self.name = name
        self._root = root
        self._missing = None if missing is None else _served(missing)
        self._newest: ServedHead | None = None
        self._change: asyncio.Event | None = None
        self._task: asyncio.Task[None] | None = None

    async def wait_while(
        self, known: Callable[[str], bool], seconds: float, disconnected: Callable[[], Awaitable[bool]]
    ) -> ServedHead | None:
        """The head, or None; if the client knows its tag, wait some seconds for another one first."""
        loop = asyncio.get_running_loop()
        end = loop.time() + seconds
        change = self._change = self._change or asyncio.Event()
        head = await asyncio.to_thread(self.read)
        self.waiting += 1
        try:
            while head is not None and known(head.tag) and not self.closing and loop.time() < end:
                if self._task is None:
                    self._task = loop.create_task(self._watch())
                try:
                    await asyncio.wait_for(change.wait(), min(_CLIENT_POLL, end - loop.time()))
                except asyncio.TimeoutError:
                    if await disconnected():
                        break
                else:
                    change = self._change
                    head = self._newest
        finally:
            self.waiting -= 1
        return head

    async def _watch(self) -> None:
        """Look while requests wait. The first look counts as a change: the head may have changed before it."""
        seen: ServedHead | None = None
        while self.waiting:
            try:
                head = await asyncio.to_thread(self.read)
            except OSError as error:
                _log.error("%s cannot be read: %s", self.name, error)
                head = seen
            if head != seen or self.closing:
                seen = head
                self._newest = head
                change = self._change
                self._change = asyncio.Event()
                if change is not None:
                    change.set()
            await asyncio.sleep(_POLL)
        self._task = None

    def read(self) -> ServedHead | None:
        """The head as it is now; None if there is none."""
        file = open_object(self._root, self.name)
        if file is None:
            return self._missing
        with file:
            size = os.fstat(file.fileno()).st_size
            if size > _MAX_HEAD_BYTES:
                raise OSError(f"it has {size} bytes; at most {_MAX_HEAD_BYTES} are served")
            data = os.pread(file.fileno(), size, 0)
        return _served(data)


def _served(data: bytes) -> ServedHead:
    return ServedHead(data, f'"{hashlib.sha256(data).hexdigest()}"')


def open_object(root: Path, name: str) -> io.FileIO | None:
    """Open a regular file below a folder; None if there is none. No symbolic link below the folder is followed."""
    above, _, last = name.rpartition("/")
    try:
        with Folder.open(root, above) as folder:
            return io.FileIO(folder.file(last))
    except OSError as error:
        if error.errno in _NO_OBJECT:
            return None
        raise
