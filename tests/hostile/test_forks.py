"""Processes that are forked off, as the workers of a data loader are: they share nothing that must not be shared."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from datetime import timedelta

import pytest

from sparserl.errors import Unavailable
from sparserl.transport.stores.base import Retry
from sparserl.transport.stores.folder import FolderStore
from sparserl.transport.stores.http_settings import Origin, find_proxy
from sparserl.transport.stores.opening import open_store
from tests.hostile.lying_server import Liar

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")


@contextlib.contextmanager
def worker(work=lambda: time.sleep(600)):
    """A process that is forked off, does something, and lives on until the end."""
    child = os.fork()
    if not child:
        try:
            work()
        finally:
            os._exit(0)
    try:
        yield child
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_fork_during_a_swap_does_not_keep_its_lock(tmp_path):
    """The next swap need not wait for the end of a process that was forked off while one was under way."""
    store = FolderStore(tmp_path / "store", wait=1.0)
    write = store._write
    with contextlib.ExitStack() as stack:

        def forking(*arguments):
            stack.enter_context(worker())
            write(*arguments)

        store._write = forking
        tag = store.swap("head.json", b"1", None)
        store._write = write
        assert store.swap("head.json", b"2", tag)


def test_a_fork_that_closes_a_store_removes_nothing_of_its_parents(tmp_path):
    """Drafts belong to the process that has made them."""
    store = FolderStore(tmp_path / "store")
    store.put("a/x", b"1")
    before = sorted(path.name for path in (tmp_path / "store" / ".tmp").iterdir())
    with worker(store.close) as child:
        os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
        assert sorted(path.name for path in (tmp_path / "store" / ".tmp").iterdir()) == before
    store.put("a/y", b"2")


def test_a_fork_asks_on_connections_of_its_own(tmp_path):
    """Two processes never read each other's answers."""

    def rule(_liar, _connection, asked):
        body = asked.path.encode()
        return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)

    with Liar(rule) as liar:
        store = open_store(liar.url)
        store.get("first", 100)
        note = tmp_path / "note"

        def ask():
            note.write_text(str({store.get(f"child{n}", 100).data == f"/child{n}".encode() for n in range(50)}))

        with worker(ask) as child:
            answers = {store.get(f"parent{n}", 100).data == f"/parent{n}".encode() for n in range(50)}
            os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
        assert answers == {True}
        assert note.read_text() == "{True}"
        assert liar.connections >= 2


@pytest.mark.long
def test_a_slow_link_is_not_a_dead_one():
    """As long as bytes come, a request goes on past its timeout; when they stop, it ends."""

    def trickle(liar, connection, asked):
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 65536\r\n\r\n")
        for _ in range(32 if asked.path == "/slow" else 4):
            connection.sendall(bytes(2048))
            time.sleep(0.1)
        if asked.path != "/slow":
            liar.silent()

    with Liar(trickle) as liar:
        options = {"timeout": timedelta(seconds=1.5)}
        store = open_store(liar.url, retry=Retry(attempts=1), client_options=options)
        assert store.get("slow", 65536).data == bytes(65536)
        with pytest.raises(Unavailable, match="not done in time"):
            store.get("dead", 65536)


@pytest.mark.parametrize(
    ("host", "asked_directly"),
    [("10.1.2.3", True), ("11.1.2.3", False), ("::1", True), ("store.example", False), ("store.inside", True)],
)
def test_servers_that_need_no_proxy(monkeypatch, host, asked_directly):
    """Names and networks, as other programs read them."""
    monkeypatch.setenv("http_proxy", "http://proxy.example:3128")
    monkeypatch.setenv("no_proxy", "10.0.0.0/8, ::1,.inside")
    assert (find_proxy(Origin("http", host, 8000)) is None) == asked_directly
