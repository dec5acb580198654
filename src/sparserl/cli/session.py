"""Sessions on the command line: publish, follow, and look after the store between them."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from ..errors import FormatError, NotFound, SessionError, StoreError, Unavailable
from ..humanize import age, parse_duration
from . import show
from .commands import Json, LinkSpeed, Profile, Threads, app, reporting

if TYPE_CHECKING:
    from ..parallel import Progress
    from ..session import Publisher, Subscriber, SyncReport
    from ..session.store.records import Step
    from ..targets import FolderTarget
    from ..transport.stores.base import Store

_MOST_SECRET = 4096  # bytes of a file with a key or a token


def _seconds(text: str | None) -> float | None:
    """A duration as people write it."""
    if text is None:
        return None
    try:
        return parse_duration(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def _checked_duration(text: str | None) -> str | None:
    _seconds(text)
    return text


Url = Annotated[
    str,
    typer.Argument(
        metavar="URL", help="The store: file:///path, s3://bucket/path, gs://…, az://…; to read also http(s)://…"
    ),
]
Endpoint = Annotated[
    str | None, typer.Option(metavar="URL", help="Of an S3-compatible service, as http://localhost:9000.")
]
Region = Annotated[str | None, typer.Option(metavar="NAME", help="Of the bucket, as eu-central-1.")]
TokenFile = Annotated[
    Path | None, typer.Option(metavar="FILE", help="A file with the token that an http(s) store asks for.")
]
Pinned = Annotated[
    str | None,
    typer.Option(
        "--key",
        metavar="KEY|FILE",
        help="The publisher's public key, or a file with it: what it has not signed is refused.",
    ),
]


@app.command(
    epilog="""Examples:

    sparserl publish step-100/ s3://bucket/run --state publisher/

    sparserl publish step-101/ s3://bucket/run --state publisher/ --key trainer.key
"""
)
@reporting
def publish(
    checkpoint: Annotated[Path, typer.Argument(metavar="CHECKPOINT", help="A safetensors file or a folder.")],
    url: Url,
    key: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The secret key to sign with, as keygen wrote it.")
    ] = None,
    state: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where the publisher keeps what it needs to go on with its run.")
    ] = None,
    new_run: Annotated[
        bool, typer.Option("--new-run", help="Begin a new run, although the store has one already.")
    ] = False,
    profile: Profile = "auto",
    link: LinkSpeed = None,
    endpoint: Endpoint = None,
    region: Region = None,
    threads: Threads = None,
    json: Json = False,
) -> None:
    """Publish CHECKPOINT as the next version of the run at URL.

    The first version of a run holds all weights, later ones only what changed. Config and tokenizer files of a folder
    travel with the first version.

    A run goes on with --state: the folder keeps the weights of an earlier version, packed, and the store has the
    patches since. Without it, or with the folder of another run, a new run begins, and whoever follows fetches all
    weights anew: where the store has a run already, this must be meant (--new-run).
    """
    from ..session import Publisher
    from ..sources import open_checkpoint

    secret = None if key is None else _secret(key)
    weights = open_checkpoint(checkpoint)
    files = checkpoint if checkpoint.is_dir() else None
    with opened(url, endpoint, region) as store, show.progress() as stage:
        publisher = Publisher(
            store,
            weights,
            signing_key=secret,
            files=files,
            state=state,
            profile=profile,
            link=link,
            threads=threads,
            progress=stage("publish", weights.nbytes),
        )
        _require_meant(publisher, store, state, new_run)
        begins = publisher.run is None
        report = publisher.publish()
    for line in report.notes:
        show.note(f"note: {line}")
    new = "new run" if begins else "run"
    show.result(json, _values(report) | {"url": url, "new_run": begins}, f"{new} {report.run}, {report}")


def _require_meant(publisher: Publisher, store: Store, state: Path | None, new_run: bool) -> None:
    """A run is neither left nor gone on with by accident."""
    from ..session.store.retention import read_head

    if publisher.run is not None:
        if new_run:
            raise SessionError(f"{state} goes on with run {publisher.run}; for a new run give another --state folder")
        return
    try:
        head, _ = read_head(store)
    except NotFound:
        return
    if not new_run:
        why = "without --state it cannot go on" if state is None else f"{state} is not the state of its publisher"
        raise SessionError(
            f"{store.url} has run {head.run}, version {head.version}, and {why}. "
            "With --new-run a new run begins, and whoever follows fetches all weights anew"
        )


@app.command(
    epilog="""Examples:

    sparserl follow s3://bucket/run -o model/ --key trainer.pub

    sparserl follow https://trainer:8000 -o model/ --once --timeout 10m --token-file token

An engine loads model/current.
"""
)
@reporting
def follow(
    url: Url,
    output: Annotated[
        Path,
        typer.Option("--output", "-o", metavar="FOLDER", help="Where the checkpoints go; FOLDER/current is newest."),
    ],
    once: Annotated[bool, typer.Option("--once", help="To the newest version, and no further.")] = False,
    key: Pinned = None,
    token_file: TokenFile = None,
    run: Annotated[str | None, typer.Option(metavar="ID", help="Follow this run and no other.")] = None,
    keep: Annotated[int, typer.Option(min=1, help="How many versions stay in the folder.")] = 2,
    timeout: Annotated[
        str | None,
        typer.Option(
            callback=_checked_duration,
            metavar="TIME",
            help="Stop after so long: 30s, 10m, 2h. With --once: wait so long for a first version.",
        ),
    ] = None,
    endpoint: Endpoint = None,
    region: Region = None,
    threads: Threads = None,
    json: Json = False,
) -> None:
    """Keep a checkpoint folder at the newest version of a run.

    FOLDER/current is a link to a whole Hugging Face checkpoint at any moment, also after a crash: it moves when the
    next version is complete and on disk. One line on stdout (with --json: one object) tells of each version.

    Ctrl-C, SIGTERM and a timeout end it with exit code 0; a timeout before there was any version, with 1.
    """
    from ..targets import folder

    with _ending() as ended:
        from ..session import Subscriber

        target = folder(output, keep=keep, threads=threads)
        pinned = _public(key)
        with opened(url, endpoint, region, token_file) as store, contextlib.closing(target):
            bar = _Bar()
            subscriber = Subscriber(store, target, trusted_keys=pinned, run=run, threads=threads, progress=bar)
            ended.append(lambda: _where(subscriber))
            _follow(subscriber, lambda: _first(subscriber, target, pinned, bar), once, _seconds(timeout), _teller(json))


def _follow(
    subscriber: Subscriber,
    first: Callable[[], SyncReport | None],
    once: bool,
    timeout: float | None,
    tell: Callable[[SyncReport], None],
) -> None:
    """The first version, for which a publisher may yet have to come, and then those that follow."""
    from ..transport.stores.deadline import within

    wait = _waiting()
    with within(timeout) as deadline:
        while True:
            try:
                report = first()
                break
            except (NotFound, Unavailable) as error:
                if once and timeout is None:
                    raise
                if not deadline.over:
                    wait(error)
                    deadline.sleep(0.5)
                if deadline.over:
                    raise
        if report is not None:
            tell(report)
        else:
            show.note(f"version {subscriber.version} is held already")
        if not once:
            subscriber.follow(on_commit=tell, on_trouble=_waiting(), timeout=deadline.left)
            show.note(_where(subscriber))


def _waiting() -> Callable[[Exception], None]:
    """Says what is waited for, once for each reason."""
    said = ""

    def wait(error: Exception) -> None:
        nonlocal said
        if str(error) != said:
            said = str(error)
            show.note(f"waiting: {said}")

    return wait


def _first(subscriber: Subscriber, target: FolderTarget, key: str | None, bar: _Bar) -> SyncReport | None:
    """The first sync, which may have to fetch everything, with a bar."""
    from ..session.store import routes
    from ..session.store.retention import read_head, read_index

    head, _ = read_head(subscriber.store, key)
    steps = read_index(subscriber.store, head).steps
    run, _, version = target.held() or ("", 0.0, -1)
    digest = routes.versions(steps).get(version) if run == head.run else None
    way = routes.route(steps, None if digest is None else (version, digest), head.version)
    with show.progress() as stage:
        bar.advance = stage("fetch", sum(step.bytes for step in way))
        try:
            return subscriber.sync()
        finally:
            bar.advance = None


class _Bar:
    """A bar that is there at times."""

    advance: Progress | None = None

    def __call__(self, done: int) -> None:
        if (advance := self.advance) is not None:
            advance(done)


def _teller(as_json: bool) -> Callable[[SyncReport], None]:
    return lambda report: show.result(as_json, _values(report), str(report))


def _where(subscriber: Subscriber) -> str:
    version = subscriber.version
    return "stopped before the first version" if version is None else f"stopped at version {version}"


@contextlib.contextmanager
def _ending() -> Iterator[list[Callable[[], str]]]:
    """Ctrl-C and SIGTERM end what is inside, and are no failure; what the last function in the list says is told."""
    words: list[Callable[[], str]] = []
    with contextlib.ExitStack() as stack:
        try:
            before = signal.signal(signal.SIGTERM, signal.default_int_handler)
            stack.callback(signal.signal, signal.SIGTERM, before)
        except ValueError:
            pass  # not on the main thread: whoever is there handles signals
        try:
            yield words
        except KeyboardInterrupt:
            show.note(words[-1]() if words else "stopped")


@app.command(epilog="Example:  sparserl log s3://bucket/run")
@reporting
def log(
    url: Url,
    key: Pinned = None,
    token_file: TokenFile = None,
    endpoint: Endpoint = None,
    region: Region = None,
    json: Json = False,
) -> None:
    """List the steps to the versions of a run, newest last: anchors, patches, and patches that were squashed.

    An anchor holds all weights; a patch leads from one version to the next, a squashed one over several. Density is the
    share of the elements that changed, bits are those sent per changed element.
    """
    from ..session.store.retention import read_head, read_index, read_run

    pinned = _public(key)
    with opened(url, endpoint, region, token_file) as store:
        head, _ = read_head(store, pinned)
        run, index = read_run(store, head), read_index(store, head)
    steps = sorted(index.steps, key=lambda s: (s.version, s.base is not None, -(s.base or 0)))
    elements, now = run.table.elements, time.time()
    totals = {kind: [s for s in steps if _kind(s) == kind] for kind in ("anchor", "patch", "squashed")}
    if json:
        values = {
            "url": url,
            "run": head.run,
            "created": head.created,
            "version": head.version,
            "digest": head.digest.hex,
            "time": head.time,
            "tensors": len(run.table.specs),
            "elements": elements,
            "dense_bytes": run.table.dense_bytes,
            "files": {name: blob.size for name, blob in run.files.items()},
            "steps": [_step_values(s, elements) for s in steps],
            "totals": {k: {"count": len(s), "bytes": sum(x.bytes for x in s)} for k, s in totals.items()},
        }
        show.result(True, values)
        return
    begun = (
        f"run {head.run}, begun {age(now - head.created)} ago: {len(run.table.specs):,} tensor(s), "
        f"{elements:,} elements, {show.size(run.table.dense_bytes)}, {len(run.files)} file(s)"
    )
    header = ("version", "from", "kind", "changed", "density", "bytes", "bits/change", "profiles", "age")
    rows = _columns([header, *(_row(s, elements, now) for s in steps)], left={2, 7})
    parts = [f"{k} {len(s)} of {show.size(sum(x.bytes for x in s))}" for k, s in totals.items() if s]
    size = show.size(sum(s.bytes for s in steps))
    versions = len({s.version for s in steps})
    show.result(
        False, {}, begun, *rows, f"{versions} version(s), newest {head.version}: {', '.join(parts)}; {size} in all"
    )


@app.command(epilog="Example:  sparserl fsck s3://bucket/run --key trainer.pub")
@reporting
def fsck(
    url: Url,
    key: Pinned = None,
    token_file: TokenFile = None,
    endpoint: Endpoint = None,
    region: Region = None,
    json: Json = False,
) -> None:
    """Read everything in a store that its head leads to, and see that it is what it should be.

    Every object, every hash, and a way to every version. One line for each fault, and exit code 1 if there is any.
    Objects that nothing refers to are counted; they are no fault: gc removes them.
    """
    from ..session.store.retention import faults, read_head, read_index

    pinned = _public(key)
    with opened(url, endpoint, region, token_file) as store, show.progress() as stage:
        total = 0
        with contextlib.suppress(StoreError, FormatError, SessionError):
            total = sum(step.bytes for step in read_index(store, read_head(store, pinned)[0]).steps)
        watched = _Watched(store, stage("read", total))
        found: list[str] = []
        try:
            found.extend(faults(cast("Store", watched), pinned))
        except SessionError as error:  # a head that the key has not signed
            found.append(str(error))
        stray = None if found else _unreferenced(store, pinned)
    values = {
        "url": url,
        "faults": found,
        "objects": watched.objects,
        "bytes": watched.bytes,
        "unreferenced": None if stray is None else {"objects": len(stray), "bytes": sum(stray)},
    }
    lines = [*found, f"{watched.objects} object(s), {show.size(watched.bytes)} read: {len(found) or 'no'} fault(s)"]
    if stray is not None:
        lines[-1] += f"; nothing refers to {len(stray)} object(s), {show.size(sum(stray))}"
    show.result(json, values, *lines)
    if found:
        raise typer.Exit(1)


class _Watched:
    """A store that tells of what is read from it."""

    def __init__(self, store: Store, done: Progress) -> None:
        self._store, self._done = store, done
        self.objects = self.bytes = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def get(self, name: str, most: int) -> Any:
        found = self._store.get(name, most)
        self.objects += 1
        self.bytes += len(found.data)
        self._done(len(found.data))
        return found


def _unreferenced(store: Store, key: str | None) -> list[int] | None:
    """Sizes of the objects that nothing refers to; None where the store does not say what it has. Leases are none."""
    from ..session.store.retention import needed, read_head

    if not store.writable:
        return None
    listed = list(store.list("runs/"))  # first: what a publisher adds meanwhile does not count
    head, _ = read_head(store, key)
    keep = needed(store, head)
    return [item.size for item in listed if item.name not in keep and "/leases/" not in item.name]


@app.command(epilog="Example:  sparserl gc s3://bucket/run --grace 2h --dry-run")
@reporting
def gc(
    url: Url,
    grace: Annotated[
        str,
        typer.Option(
            callback=_checked_duration,
            metavar="TIME",
            help="Spare what was written so recently: 10m, 2h, 1d. Longer than a publish takes.",
        ),
    ] = "1d",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be deleted.")] = False,
    key: Pinned = None,
    endpoint: Endpoint = None,
    region: Region = None,
    json: Json = False,
) -> None:
    """Delete what nothing refers to: earlier runs, versions that were given up, and what a killed publisher left.

    Publishers do this themselves when they write an anchor. Versions that can be reached stay.
    """
    from ..session.store.retention import collect, read_head

    pinned = _public(key)
    with opened(url, endpoint, region) as store:
        if not store.writable:
            raise StoreError(f"{url} can only be read")
        read_head(store, pinned)
        sizes = {item.name: item.size for item in store.list("runs/")}
        names = collect(store, _seconds(grace) or 0.0, dry=dry_run)
    size = sum(sizes.get(name, 0) for name in names)
    values = {"url": url, "dry_run": dry_run, "objects": len(names), "bytes": size, "names": names}
    lines = list(names) if dry_run else []
    lines.append(f"{len(names)} object(s), {show.size(size)} {'would be ' if dry_run else ''}deleted")
    show.result(json, values, *lines)


def squash_store(
    urls: list[str], first: int | None, last: int | None, key: Path | None, threads: int | None, json: bool
) -> None:
    """`sparserl squash URL`: one more way between two versions."""
    from ..session.store.squashing import squash_versions

    if len(urls) != 1 or first is None or last is None:
        raise typer.BadParameter("in a store: squash URL --from VERSION --to VERSION")
    with opened(urls[0], None, None) as store:
        step = squash_versions(store, first, last, signing_key=None if key is None else _secret(key), threads=threads)
    values = {"url": urls[0], "from": first, "to": last, "bytes": step.bytes, "changed": step.changed}
    show.result(json, values, f"{step.name}: {step.changed:,} changed, {show.size(step.bytes)}")


@app.command(epilog="Example:  sparserl keygen trainer.key > trainer.pub")
@reporting
def keygen(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The file to write the secret key to; must not exist.")],
    json: Json = False,
) -> None:
    """Make a key pair for signing: the secret key goes to FILE, for its owner alone; the public key is printed.

    A publisher signs with the file (publish --key FILE); whoever follows pins the public key (follow --key KEY).
    """
    from ..files import creating
    from ..session.store.signing import keygen as make

    secret, public = make()
    try:
        with creating(file, 0o600) as out:
            os.fchmod(out.fileno(), 0o600)
            out.write(f"{secret}\n".encode())
    except FileExistsError as error:
        raise FileExistsError(errno.EEXIST, "exists already; a key is never replaced", str(file)) from error
    show.result(json, {"path": str(file), "public_key": public}, public)


@contextlib.contextmanager
def opened(
    url: str, endpoint: str | None = None, region: str | None = None, token_file: Path | None = None
) -> Iterator[Store]:
    """The store at a URL, with what the options say of it, until it is no longer needed."""
    from ..transport.stores.opening import open_store

    scheme = url.partition("://")[0]
    options: dict[str, Any] = {}
    for name, value in (("endpoint", endpoint), ("region", region)):
        if value is not None:
            if scheme in ("file", "http", "https"):
                raise typer.BadParameter(f"is for object storage, not for {scheme}://", param_hint=f"--{name}")
            options[name] = value
    if endpoint is not None and endpoint.startswith("http://"):
        options["client_options"] = {"allow_http": True}
    token = None
    if token_file is not None:
        if scheme not in ("http", "https"):
            raise typer.BadParameter(f"is for http(s), not for {scheme}://", param_hint="--token-file")
        token = _short_text(token_file)
    store: Any = open_store(url, token=token, **options)
    with contextlib.closing(store):
        yield store


def _short_text(path: Path) -> str:
    """The text of a small file."""
    with path.open("rb") as file:
        data = file.read(_MOST_SECRET + 1)
    try:
        text = data.decode().strip()
    except UnicodeDecodeError:
        text = ""
    if not text or len(data) > _MOST_SECRET or not text.isprintable():
        raise SessionError(f"{path} does not hold one line of text")
    return text


def _secret(path: Path) -> str:
    """The secret key in a file, once it is known to be one."""
    from ..session.store.signing import public_key

    if str(path).startswith("sparserl-secret-"):
        raise SessionError("a secret key on the command line can be seen by others; give the file that holds it")
    text = _short_text(path)
    try:
        public_key(text)
    except SessionError as error:
        raise SessionError(f"{path}: {error}") from error
    return text


def _public(key: str | None) -> str | None:
    """A public key: as it is, from a file with it, or the one that belongs to the secret key in a file."""
    from ..session.store.signing import public_key

    if key is None or key.startswith("sparserl-public-"):
        return key
    text = _short_text(Path(key))
    if text.startswith("sparserl-secret-"):
        return public_key(text)
    if not text.startswith("sparserl-public-"):
        raise SessionError(f"{key} holds no key; a public key reads sparserl-public-… with 64 hexadecimal digits")
    return text


def _values(report: SyncReport) -> dict[str, Any]:
    return dataclasses.asdict(report) | {"density": report.density}


def _kind(step: Step) -> str:
    if step.base is None:
        return "anchor"
    return "patch" if step.base == step.version - 1 else "squashed"


def _bits(step: Step) -> float | None:
    """Per changed element. An anchor is no change."""
    return 8 * step.bytes / step.changed if step.base is not None and step.changed else None


def _step_values(step: Step, elements: int) -> dict[str, Any]:
    return {
        "version": step.version,
        "base": step.base,
        "kind": _kind(step),
        "digest": step.digest.hex,
        "changed": None if step.base is None else step.changed,
        "density": None if step.base is None else step.changed / max(1, elements),
        "bytes": step.bytes,
        "bits_per_changed": _bits(step),
        "profiles": list(step.profiles),
        "time": step.time,
    }


def _row(step: Step, elements: int, now: float) -> tuple[str, ...]:
    bits = _bits(step)
    return (
        str(step.version),
        "-" if step.base is None else str(step.base),
        _kind(step),
        "-" if step.base is None else f"{step.changed:,}",
        "-" if step.base is None else f"{step.changed / max(1, elements):.4%}",
        f"{step.bytes:,}",
        "-" if bits is None else f"{bits:.2f}",
        "+".join(step.profiles) or "-",
        age(now - step.time),
    )


def _columns(rows: list[tuple[str, ...]], left: set[int]) -> Iterator[str]:
    """Rows in columns; numbers stand at the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [c.ljust(w) if i in left else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))]
        yield "  ".join(cells).rstrip()
