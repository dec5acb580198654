"""How weights get from the trainer to the workers.

file:///path, s3://bucket/path   a store; workers may read it at another address, such as http://host:port
gloo://host:port                 a process group: the trainer is rank 0, worker n is rank n + 1
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from torch import Tensor
from torch import distributed as dist

import sparserl
from sparserl.errors import SessionError

from .options import GROUP, Options

if TYPE_CHECKING:
    from .weights import Published

PATIENCE = timedelta(seconds=120)  # for all ranks to come
LOOK = 0.01  # seconds to look for a version that is being broadcast


class Publisher(Protocol):
    """The trainer's end."""

    def publish(self) -> sparserl.SyncReport | None: ...

    def close(self) -> None: ...


class Follower(Protocol):
    """A worker's end. One that is told which version comes next cannot choose: it has to `look` for it."""

    told: bool

    def look(self) -> int | None: ...

    def land(self, version: int) -> float: ...

    def close(self) -> None: ...


class FromStore:
    """Goes to any version that a store has."""

    told = False

    def __init__(self, url: str, target: dict[str, Tensor]) -> None:
        self._subscriber = sparserl.Subscriber(url, target, threads=1)

    def look(self) -> int | None:
        """Nothing comes by itself."""
        return None

    def land(self, version: int) -> float:
        """Hold a version; the seconds of its commit."""
        if self._subscriber.stage(version) is None:  # these are the bits that the worker began with
            return 0.0
        return self._subscriber.commit().seconds["commit"]

    def close(self) -> None:
        self._subscriber.close()


class FromGroup:
    """Takes every version when it is broadcast."""

    told = True

    def __init__(self, url: str, target: dict[str, Tensor], rank: int, size: int) -> None:
        self._subscriber = sparserl.GroupSubscriber(join(url, rank, size), target, threads=1)

    def look(self) -> int | None:
        """The next version, staged; None if none is on its way."""
        report = self._subscriber.stage(LOOK)
        return None if report is None else int(report.version)

    def land(self, version: int) -> float:
        """Commit the version that was found; the seconds it took."""
        report = self._subscriber.commit()
        assert report.version == version
        return float(report.seconds["commit"])

    def close(self) -> None:
        self._subscriber.close()
        dist.destroy_process_group()


class ToGroup:
    """Broadcasts versions: a publish ends when every worker has committed."""

    def __init__(self, url: str, source: Any, size: int, callbacks: Sequence[Any]) -> None:
        self._publisher = sparserl.GroupPublisher(join(url, 0, size), source, callbacks=callbacks)

    def publish(self) -> sparserl.SyncReport | None:
        report: sparserl.SyncReport | None = self._publisher.publish()
        return report

    def close(self) -> None:
        self._publisher.close()
        dist.destroy_process_group()


class Way:
    """Both ends, by sparserl. A benchmark puts others in their place."""

    worker: ClassVar[tuple[str, ...]] = (sys.executable, "-m", "examples.rl.worker")  # then a folder and a number

    def publisher(self, options: Options, published: Published, callbacks: Sequence[Any]) -> Publisher:
        """The trainer's end."""
        if options.broadcast:
            return ToGroup(options.url, published.source, options.workers + 1, callbacks)
        made: Publisher = sparserl.Publisher(options.url, published.source, callbacks=callbacks)
        return made

    def follower(self, options: Options, target: dict[str, Tensor], worker: int) -> Follower:
        """A worker's end."""
        if options.broadcast:
            return FromGroup(options.url, target, worker + 1, options.workers + 1)
        return FromStore(options.follow or options.url, target)


def join(url: str, rank: int, size: int) -> Any:
    """The process group at a URL, when all ranks have come."""
    place = url.removeprefix(GROUP + "//")
    try:
        dist.init_process_group("gloo", init_method=f"tcp://{place}", rank=rank, world_size=size, timeout=PATIENCE)
    except (dist.DistError, ValueError) as error:
        raise SessionError(f"{url}: not all {size} ranks came together: {error}") from error
    return dist.group.WORLD


def complete(url: str, folder: Path) -> str:
    """A URL in full: `gloo:` gets a port of this machine, a path becomes file://, nothing a store in the folder."""
    if url == GROUP:
        with socket.create_server(("127.0.0.1", 0)) as free:
            return f"{GROUP}//127.0.0.1:{free.getsockname()[1]}"
    if "://" in url:
        return url
    return f"file://{Path(url).resolve() if url else folder / 'store'}"
