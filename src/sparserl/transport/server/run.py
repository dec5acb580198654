"""Running the server: its socket, its tokens, and uvicorn around the application.

The headers of a request must arrive within ten seconds and fit into 16 KiB, a client must not stop reading its answer
for thirty seconds, and one without a token gets a single answer on a connection. There are at most 4096 connections:
another one takes the place of the one that has been idle longest. What they have not taken of objects is bounded for
all of them together.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import resource
import signal
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import uvicorn

from ...errors import StoreError
from ..stores.mirror import MirrorStore
from ..stores.serving import TOKEN
from .app import App
from .connections import MAX_CONNECTIONS, BoundedProtocol, Connections, EventLoop

_IDLE_SECONDS = 30
_END_SECONDS = 5  # that unfinished answers get when the server ends
_BACKGROUND_CONNECTIONS = 128  # to a server inside another program, which needs open files of its own

_log = logging.getLogger("sparserl.serve")


def serve(
    folder: Path,
    address: str,
    *,
    token_file: Path | None = None,
    tls: tuple[Path, Path] | None = None,
    access_log: Path | None = None,
    started: Callable[[str, int], object] = lambda _url, _tokens: None,
) -> None:
    """Serve a folder until a signal ends the server.

    Args:
        folder: the folder of a store; a publisher may still have to make it.
        address: `HOST:PORT`; port 0 is any free port.
        token_file: a request must have one of its tokens (see `read_tokens`); without it everyone may read. It is read
            again at each SIGHUP; one that cannot be read changes nothing.
        tls: the files of a certificate and of its key; without them the server speaks plain HTTP.
        access_log: a file that gets a line for each request: method, path, status, bytes, the name of its token.
        started: called with the URL of the server, and how many tokens there are, when it accepts requests.

    Raises:
        StoreError: the folder, the address or the certificate cannot be used.
    """
    if folder.exists() and not folder.is_dir():
        raise StoreError(f"{folder} is not a folder")
    with contextlib.ExitStack() as stack:
        log = None if access_log is None else stack.enter_context(access_log.open("a", buffering=1))
        tokens = {} if token_file is None else read_tokens(token_file)
        app = App(folder.absolute(), tokens, None if log is None else log.write)
        config = _configure(app, tls)
        _raise_file_limit()
        listener = stack.enter_context(listen(address))
        loop = EventLoop()
        stack.callback(loop.close)
        if token_file is not None:
            with contextlib.suppress(RuntimeError, ValueError):  # only the main thread hears signals
                loop.add_signal_handler(signal.SIGHUP, _reload_tokens, app, token_file)
        started(_url(listener, tls is not None), len(tokens))
        loop.run_until_complete(_Server(config, app).serve(sockets=[listener]))


class BackgroundServer:
    """Serves a folder on a thread of its own, until it is closed.

    Args:
        folder: the folder.
        address: `HOST:PORT`; port 0 is any free port.
        token: every request must have it; None to let everyone read.
        mirror: whose folder it is, if it is one; see `App`.

    Raises:
        StoreError: the address cannot be used.
    """

    def __init__(
        self, folder: Path, address: str, *, token: str | None = None, mirror: MirrorStore | None = None
    ) -> None:
        self._listener = listen(address)
        self._app = App(folder.absolute(), None if token is None else {token: ""}, mirror=mirror)
        self._server = _Server(_configure(self._app, None, most=_BACKGROUND_CONNECTIONS), self._app, is_alone=False)
        self.url = _url(self._listener, secure=False)
        self._thread = threading.Thread(target=self._run, name="sparserl-serve", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the server: those who wait are answered, others get a few seconds."""
        self._app.begin_closing()
        self._server.should_exit = True
        self._thread.join(_END_SECONDS + 3)
        self._app.close()
        self._listener.close()

    def _run(self) -> None:
        loop = EventLoop()
        asyncio.set_event_loop(loop)
        try:
            loop.run_until_complete(self._server.serve(sockets=[self._listener]))
        finally:
            loop.close()


def read_tokens(path: Path) -> dict[str, str]:
    """Read a file of tokens and their names, each on a line: `TOKEN` or `TOKEN # NAME`; others may begin with a #."""
    tokens: dict[str, str] = {}
    for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1):
        token, mark, name = (part.strip() for part in f" {line.strip()}".partition(" #"))
        if not token:
            continue
        if not TOKEN.fullmatch(token) or (mark and not TOKEN.fullmatch(name)):
            raise StoreError(f"{path}: line {number} is not a token; write visible ASCII without spaces")
        tokens[token] = name
    if not tokens:
        raise StoreError(f"{path} has no token in it")
    return tokens


def _reload_tokens(app: App, path: Path) -> None:
    try:
        app.tokens = read_tokens(path)
    except (OSError, StoreError) as error:
        _log.error("the tokens stay as they are: %s", error)


def listen(address: str) -> socket.socket:
    """Open a socket that listens on `HOST:PORT`."""
    host, colon, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise StoreError(f"{address!r} is not an address to listen on; write HOST:PORT, as 127.0.0.1:8000")
    try:
        family, _, _, _, resolved = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)[0]
        listener = socket.create_server(resolved[:2], family=family, backlog=2048)
    except OSError as error:
        raise StoreError(f"cannot listen on {address}: {error.strerror or error}") from error
    # Without this a body waits 40 ms until its headers are acknowledged.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


class _Server(uvicorn.Server):
    """Ends at the first signal, after answering the requests that are held; at the second one immediately."""

    def __init__(self, config: uvicorn.Config, app: App, is_alone: bool = True) -> None:
        """is_alone: whether the process does nothing else, so that what uvicorn logs is ours to silence."""
        super().__init__(config)
        self._app = app
        self._is_alone = is_alone
        if is_alone:
            logging.getLogger("uvicorn.error").setLevel(logging.ERROR)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002  # as uvicorn calls it
        self.force_exit = self.should_exit
        self.should_exit = True
        self._app.begin_closing()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Give unfinished answers a few seconds."""
        if self._is_alone:
            logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
        asyncio.get_running_loop().call_later(_END_SECONDS, self._abort)
        await super().shutdown(sockets)

    def _abort(self) -> None:
        for connection in list(self.server_state.connections):
            connection.transport.abort()


def _configure(app: App, tls: tuple[Path, Path] | None, most: int = MAX_CONNECTIONS) -> uvicorn.Config:
    config = uvicorn.Config(
        app,
        http=functools.partial(BoundedProtocol, connections=Connections(most)),  # type: ignore[arg-type]
        loop="asyncio",
        ws="none",
        lifespan="off",
        interface="asgi3",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=_IDLE_SECONDS,
        timeout_graceful_shutdown=_END_SECONDS + 2,
        ssl_certfile=None if tls is None else tls[0],
        ssl_keyfile=None if tls is None else tls[1],
    )
    try:
        config.load()
    except OSError as error:
        raise StoreError(f"the certificate or its key cannot be used: {error}") from error
    return config


def _url(listener: socket.socket, secure: bool) -> str:
    host, port = listener.getsockname()[:2]
    if listener.family == socket.AF_INET6:
        host = f"[{host}]"
    return f"{'https' if secure else 'http'}://{host}:{port}"


def _raise_file_limit() -> None:
    """Allow as many open files as connections need, if the system lets us."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = 2 * MAX_CONNECTIONS + 256
    if soft != resource.RLIM_INFINITY and soft < needed:
        allowed = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
