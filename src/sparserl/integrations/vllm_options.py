"""vLLM: the options of the backend that trainers send to workers."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, fields

from vllm.distributed.weight_transfer.base import WeightTransferInitInfo, WeightTransferUpdateInfo

from ..errors import SessionError
from ..session.options import AUDIT_EVERY, require_count, require_flag, require_timeout
from ..session.store.signing import PublicKeys


@dataclass
class SparserlInitInfo(WeightTransferInitInfo):
    """The store of the run; `trusted_keys`, `run` and `token` as for a `Subscriber`.

    Args:
        url: The URL of the store, which the workers open themselves.
        audit_every: After how many commits all bits are compared with the digest of the version, as the next commit
            begins; None for never.
        ahead: Whether workers fetch and decode a new version as soon as it is published. If not, they begin when it is
            to be committed.
    """

    url: str
    trusted_keys: PublicKeys | None = None
    run: str | None = None
    token: str | None = None
    audit_every: int | None = AUDIT_EVERY
    ahead: bool = True

    def __post_init__(self) -> None:
        if self.audit_every is not None:
            require_count("audit_every", self.audit_every)
        require_flag("ahead", self.ahead)


@dataclass
class SparserlUpdateInfo(WeightTransferUpdateInfo):
    """Which version to commit.

    Args:
        version: The version; by default the newest.
        audit: Whether all bits are compared with the digest of the version afterwards.
        run: The run that it must be a version of; None for the one that the workers follow.
        step: Instead of a version: the training step that it was published for. Workers wait for it.
        timeout: How many seconds to wait for the step.
    """

    version: int | None = None
    audit: bool = False
    run: str | None = None
    step: int | None = None
    timeout: float = 600.0

    def __post_init__(self) -> None:
        if self.version is not None and self.step is not None:
            raise SessionError("give a version or a step, not both")
        for name in ("version", "step"):
            if getattr(self, name) is not None:
                require_count(name, getattr(self, name), 0)
        require_flag("audit", self.audit)
        require_timeout("timeout", self.timeout)


def require_worker_options(names: Collection[str]) -> None:
    """Refuse options that workers do not have."""
    known = [field.name for field in fields(SparserlInitInfo)]
    if unknown := sorted(set(names) - set(known)):
        raise SessionError(f"worker has {unknown[0]!r}; its options are {', '.join(map(repr, known))}")
