"""`sparserl follow`: a checkpoint folder that stays at the newest version of a run."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import NotFound, NotRetained, Unavailable
from . import show
from .keys import read_trusted_keys
from .options import (
    SESSIONS,
    CertificateFile,
    Endpoint,
    Json,
    Region,
    Threads,
    TokenFile,
    TrustedKeys,
    Url,
    duration_option,
    parse_seconds,
)
from .reporting import reporting
from .stores import open_store, read_secret

if TYPE_CHECKING:
    from ..parallel import Progress
    from ..session import Subscriber, SyncReport
    from ..targets import FolderTarget
    from ..transport.stores.base import Store
    from ..transport.stores.deadline import Deadline

commands = typer.Typer()

_neighbours = partial(typer.Option, rich_help_panel="Neighbours")
_RETRY_SECONDS = 0.5  # between two looks for a first version
_EPILOG = """Examples:

    sparserl follow s3://bucket/run -o model/ --trusted-key trainer.pub

    sparserl follow https://trainer:8000 -o model/ --once --timeout 10m --token-file token

    sparserl follow s3://bucket/run -o old/ --version 100

    sparserl follow s3://bucket/run -o eval/ --every 10 --pin eval-1

    sparserl follow s3://bucket/run -o model/ --serve 0.0.0.0:9000

    sparserl follow s3://bucket/run -o model/ --near http://neighbour:9000

An inference engine loads model/current.
"""


@commands.command(rich_help_panel=SESSIONS, epilog=_EPILOG)
@reporting
def follow(
    url: Url,
    output: Annotated[
        Path,
        typer.Option(
            "--output", "-o", metavar="FOLDER", help="Where checkpoints are written; FOLDER/current is the newest."
        ),
    ],
    once: Annotated[bool, typer.Option("--once", help="Stop once the newest version is there.")] = False,
    version: Annotated[
        int | None,
        typer.Option(min=0, metavar="N", help="Fetch this version, older or newer, instead of the newest, and stop."),
    ] = None,
    every: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Take versions 0, N, 2N … in turn, starting with the newest of them."),
    ] = None,
    pin: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="A pin that moves to each version in FOLDER, so that the store keeps it."),
    ] = None,
    trusted_key: TrustedKeys = None,
    token_file: TokenFile = None,
    run: Annotated[str | None, typer.Option(metavar="ID", help="Follow this run and no other.")] = None,
    keep: Annotated[int, typer.Option(min=1, metavar="N", help="How many versions to keep in the folder.")] = 2,
    timeout: Annotated[
        str | None,
        duration_option("Stop after this time: 30s, 10m, 2h. With --once: how long to wait for a first version."),
    ] = None,
    near: Annotated[
        list[str] | None,
        _neighbours(metavar="URL", help="A receiver that serves what it has: asked before the store; repeatable."),
    ] = None,
    serve: Annotated[
        str | None,
        _neighbours(metavar="HOST:PORT", help="Serve what is fetched to neighbours; port 0 picks a free port."),
    ] = None,
    mirror: Annotated[
        Path | None,
        _neighbours(metavar="DIR", help="Where to keep what is fetched; with --serve by default FOLDER-mirror."),
    ] = None,
    endpoint: Endpoint = None,
    region: Region = None,
    ca: CertificateFile = None,
    threads: Threads = None,
    json: Json = False,
) -> None:
    """Keep a checkpoint folder at the newest version of a run.

    FOLDER/current is a link to a complete Hugging Face checkpoint at all times, even after a crash: it is moved when
    the next version is complete and on disk. Each version is reported by one line on stdout (with --json: one object).

    Ctrl-C, SIGTERM and --timeout end the command with exit code 0; a timeout before the first version, with 1.
    """
    if version is not None and (every is not None or pin is not None):
        raise typer.BadParameter("--version stops at one version; --every and --pin are for following")
    with _ended_by_signals():
        from ..targets import folder
        from ..transport.stores.opening import scheme_of

        target = folder(output, keep=keep, threads=threads)
        keys = read_trusted_keys(trusted_key)
        token = None if token_file is None else read_secret(token_file)
        is_for_neighbours = bool(near or serve) and scheme_of(url) not in ("http", "https")
        store_token = None if is_for_neighbours else token_file
        kept = Path(f"{output}-mirror") if mirror is None and serve is not None else mirror
        options = {"run": run, "threads": threads, "near": near or (), "serve": serve, "mirror": kept, "token": token}
        with open_store(url, endpoint, region, store_token, ca) as store, contextlib.closing(target):
            follower = _Follower(store, target, keys, version=version, every=every, pin=pin, json=json, **options)
            with contextlib.closing(follower):
                follower.follow(once or version is not None, None if timeout is None else parse_seconds(timeout))


class _Follower:
    """A subscriber that reports each version it commits, and shows progress while it fetches the first."""

    def __init__(
        self,
        store: Store,
        target: FolderTarget,
        keys: list[str] | None,
        *,
        version: int | None,
        every: int | None,
        pin: str | None,
        json: bool,
        **options: Any,
    ) -> None:
        from ..session import Subscriber

        self._target = target
        self._keys = keys
        self._json = json
        self._version = version
        self._every = every
        self._pin = pin
        self._advance: Progress | None = None
        self._subscriber: Subscriber = Subscriber(store, target, trusted_keys=keys, progress=self._progress, **options)
        if (served_url := self._subscriber.served_url) is not None:
            show.note(f"serving neighbours at {served_url}")
            if options["token"] is None:
                show.note_open_server(served_url)

    def close(self) -> None:
        self._subscriber.close()

    def follow(self, once: bool, timeout: float | None) -> None:
        """Fetch the first version, for which a publisher may still have to start, and then those after it."""
        from ..transport.stores.deadline import within

        try:
            with within(timeout) as deadline:
                self._first(deadline, wait=not once or timeout is not None)
                if once:
                    return
                self._subscriber.follow(every=self._every, pin=self._pin, on_commit=self._report, timeout=deadline.left)
                show.note(self._position())
        except KeyboardInterrupt:
            show.note(self._position())

    def _first(self, deadline: Deadline, wait: bool) -> None:
        """Fetch a first version; with `wait`, until there is one or the deadline has passed."""
        from ..session.logs import TroubleLog

        trouble = TroubleLog(self._subscriber.store.url)
        while True:
            try:
                reports = self._sync_with_progress()
                break
            except (NotFound, Unavailable, NotRetained) as error:
                if not wait or (isinstance(error, NotRetained) and self._every is None):
                    raise
                if not deadline.over:
                    trouble.waiting(error)
                    deadline.sleep(_RETRY_SECONDS)
                if deadline.over:
                    raise
        trouble.over()
        if not reports:
            show.note(f"already at version {self._subscriber.version}")
        for report in reports:
            self._report(report)
        if not (self._target.current / "config.json").exists():
            show.note(
                f"warning: {self._target.current} has no config.json, so that engines cannot load it; give the "
                "publisher the files of the checkpoint: Publisher(url, model, files=...)"
            )

    def _sync_with_progress(self) -> list[SyncReport]:
        """The first sync, which may have to fetch everything; or, with --every, the first ones."""
        from ..session.store import routes
        from ..session.store.retention import read_head, read_index

        head, _ = read_head(self._subscriber.store, self._keys)
        steps = read_index(self._subscriber.store, head).steps
        run, _, version = self._target.remembered_version() or ("", 0.0, -1)
        digest = routes.versions(steps).get(version) if run == head.run else None
        start = None if digest is None else (version, digest)
        goal = head.version if self._version is None else self._version
        if self._every is not None:
            goal = next((version for version, _ in routes.next_multiples(steps, start, self._every)), goal)
        route = routes.route(steps, start, goal) if goal in routes.versions(steps) else []
        with show.progress() as stage:
            self._advance = stage("fetch", sum(step.bytes for step in route))
            try:
                if self._every is None and self._pin is None:
                    report = self._subscriber.sync(self._version)
                    return [] if report is None else [report]
                reports: list[SyncReport] = []
                self._subscriber.follow(once=True, every=self._every, pin=self._pin, on_commit=reports.append)
                return reports
            finally:
                self._advance = None

    def _progress(self, done: int) -> None:
        if (advance := self._advance) is not None:
            advance(done)

    def _report(self, report: SyncReport) -> None:
        show.result(self._json, show.report_values(report), str(report))

    def _position(self) -> str:
        version = self._subscriber.version
        return "stopped before the first version" if version is None else f"stopped at version {version}"


@contextlib.contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Ctrl-C and SIGTERM end what is inside, and are not a failure."""
    with contextlib.ExitStack() as stack:
        try:
            previous = signal.signal(signal.SIGTERM, signal.default_int_handler)
            stack.callback(signal.signal, signal.SIGTERM, previous)
        except ValueError:
            pass  # not on the main thread: the program around us handles signals
        try:
            yield
        except KeyboardInterrupt:
            show.note("stopped")
