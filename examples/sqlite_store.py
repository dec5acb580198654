"""A store of one's own: all objects of a run in an SQLite database.

    sparserl.Publisher(SqliteStore("run.db"), weights)

docs/how-to/testing.md tests it.
"""

from __future__ import annotations

import contextlib
import hashlib
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from sparserl.errors import LimitExceeded, NotFound, Refused, Truncated
from sparserl.transport import ObjectInfo, StoredObject
from sparserl.transport.stores.base import require_name


class SqliteStore:
    """All objects in one database file. A transaction holds the condition of a swap."""

    writable = True

    def __init__(self, path: str | Path) -> None:
        self.path = path
        self.url = f"sqlite://{path}"

    @contextlib.contextmanager
    def _objects(self) -> Iterator[Callable[..., sqlite3.Cursor]]:
        with contextlib.closing(sqlite3.connect(self.path, timeout=60)) as db, db:
            db.execute("begin immediate")
            db.execute("create table if not exists objects (name text primary key, data blob, tag text, time real)")
            yield db.execute

    def _find(self, name: str) -> StoredObject | None:
        with self._objects() as run:
            row = run("select data, tag from objects where name = ?", [require_name(name)]).fetchone()
        return None if row is None else StoredObject(*row)

    def get(self, name: str, max_bytes: int) -> StoredObject:
        if (stored := self._find(name)) is None:
            raise NotFound(f"{self.url}: there is no {name}")
        if len(stored.data) > max_bytes:
            raise LimitExceeded(f"{name} has {len(stored.data)} bytes; at most {max_bytes} were expected")
        return stored

    def read(self, name: str, start: int, size: int) -> bytes:
        data = self.get(name, 1 << 40).data[start : start + size]
        if len(data) < size:
            raise Truncated(f"{name} ends {size - len(data)} bytes too early")
        return data

    def put(self, name: str, data: bytes | memoryview) -> None:
        row: list[Any] = [require_name(name), bytes(data), hashlib.sha256(data).hexdigest(), time.time()]
        with self._objects() as run:
            run("insert or replace into objects values (?, ?, ?, ?)", row)

    def swap(self, name: str, data: bytes, tag: str | None) -> str:
        new_tag = hashlib.sha256(data).hexdigest()
        with self._objects() as run:
            row = run("select tag from objects where name = ?", [require_name(name)]).fetchone()
            if row != (None if tag is None else (tag,)):
                raise Refused(f"{name} was changed by another writer")
            run("insert or replace into objects values (?, ?, ?, ?)", [name, data, new_tag, time.time()])
        return new_tag

    def changed(self, name: str, tag: str | None, timeout: float) -> StoredObject | None:
        end = time.monotonic() + timeout
        while (stored := self._find(name)) is None or stored.tag == tag:
            if stored is None and tag is not None:
                raise NotFound(f"{self.url}: there is no {name}")
            if time.monotonic() >= end:
                return None
            time.sleep(0.05)
        return stored

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        with self._objects() as run:
            rows = run("select name, length(data), time from objects order by name").fetchall()
        return (ObjectInfo(*row) for row in rows if row[0].startswith(prefix))

    def delete(self, names: Iterable[str]) -> None:
        with self._objects() as run:
            for name in names:
                run("delete from objects where name = ?", [require_name(name)])

    def close(self) -> None:
        """Nothing is held open."""
