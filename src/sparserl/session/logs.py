"""What sessions log, as `sparserl.session`: each version in a line (INFO), and trouble, once (WARNING)."""

from __future__ import annotations

import logging
import time

from ..errors import (
    CheckpointError,
    CommitFailed,
    FormatError,
    NotFound,
    Unavailable,
    UnsupportedFormat,
    Untrusted,
    WrongBase,
)
from ..humanize import age
from .report import SyncReport

log = logging.getLogger("sparserl.session")

_AWAY = (NotFound, Unavailable)  # the store, or the publisher of its first version
_PASSING = (CheckpointError, FormatError, Untrusted, WrongBase)  # what staging finds, and the next look may not find
_LONGEST_PAUSE = 30.0  # seconds between looks at such trouble: each pause is twice the one before
_FIRST_REMINDER = 60.0  # seconds of the same trouble after which it is logged again; the next time after twice as many


def log_version(event: str, place: str, report: SyncReport) -> None:
    """Log a version that was published or committed, and what went wrong beside it."""
    log.info("%s: %s %s", place, event, report.summary)
    for note in report.notes:
        log.warning("%s: version %d: %s", place, report.version, note)


def may_pass(error: Exception, has_read: bool, is_staged: bool) -> bool:
    """Whether the next look at a store may mend an error. Before anything was read there, errors show mistakes."""
    if isinstance(error, _AWAY):
        return True
    if not has_read or isinstance(error, UnsupportedFormat):
        return False
    return isinstance(error, CommitFailed if is_staged else _PASSING)


class TroubleLog:
    """Logs why a session waits: when it begins, when the reason changes, again after a long time, and when it ends.

    reason: why it waits; empty if it does not.
    last_error: the last error, of which it may have logged nothing.
    pause: seconds before the next look at a store that is there.
    """

    def __init__(self, place: str) -> None:
        self._place = place
        self.reason = ""
        self.last_error = ""
        self.pause = 0.0
        self._since = 0.0
        self._reminder = _FIRST_REMINDER

    def failed(self, error: Exception, *, in_time: bool) -> None:
        """An attempt ended with an error; if it did in time, the session waits for the next one."""
        self.last_error = str(error).removeprefix(f"{self._place}: ")
        self.pause = 0.0 if isinstance(error, _AWAY) else min(max(1.0, 2 * self.pause), _LONGEST_PAUSE)
        if in_time:
            self.waiting(error)

    def waiting(self, error: Exception) -> None:
        """The session waits because of an error."""
        reason = str(error).removeprefix(f"{self._place}: ")
        now = time.monotonic()
        if not self.reason:
            self._since = now
            self._reminder = _FIRST_REMINDER
        if reason != self.reason:
            self.reason = reason
            log.warning("%s: waiting: %s", self._place, reason)
        elif now - self._since >= self._reminder:
            self._reminder *= 2
            log.warning("%s: still waiting after %s: %s", self._place, age(now - self._since), reason)

    def over(self) -> None:
        """The session waits no more."""
        self.pause = 0.0
        if self.reason:
            log.warning("%s: waits no more, after %s", self._place, age(time.monotonic() - self._since))
            self.reason = ""
