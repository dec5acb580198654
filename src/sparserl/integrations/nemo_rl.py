"""NeMo-RL: a checkpoint engine that sends only the bits that changed, through a store.

    generator of the policy ──► host copy ──► Publisher ──► store ──► patches, into the live weights of vLLM's worker
    └─ send_weights, on the policy's ranks                      └──► host copy ──► all tensors, into NeMo-RL's loader
                                                                     └─ receive_weight_batches, with in_place: false

NeMo-RL imports this module if `policy.generation.refit_transport` is `sparserl.integrations.nemo_rl:Engine`. At every
sync it calls `prepare` on all workers, `init_policy_process_group` and `init_rollout_process_group` with the answers of
all, then `send_weights` and `receive_weight_batches` at the same time, then `finalize`. It does so only with
`release_after_refit: true`; otherwise nobody would tell rollouts, after the first sync, which version is the next.
"""

from __future__ import annotations

import socket
from collections.abc import AsyncGenerator, Generator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..errors import SessionError
from ..session.options import AUDIT_EVERY, require_count, require_timeout
from ..session.store.signing import PublicKeys, public_keys
from ..transport.stores.opening import open_store
from .checkpoint_engine import (
    AwaitedVersion,
    RunAndVersion,
    WeightSender,
    WholeReceiver,
    as_tensor,
    head_version,
    publisher_options,
    rollout_dtype_named,
)

try:
    from nemo_rl.utils.checkpoint_engines.base import CheckpointEngine
except ImportError as missing:
    raise SessionError("NeMo-RL is not installed, or too old: it has no nemo_rl.utils.checkpoint_engines") from missing

if TYPE_CHECKING:
    from .nemo_rl_vllm import LiveReceiver


class Engine(CheckpointEngine):  # type: ignore[misc]
    """Sends weights on NeMo-RL's policy workers and receives them in vLLM's; NeMo-RL makes one object in every worker.

    Its options are those of `policy.generation.refit_cfg["sparserl.integrations.nemo_rl:Engine"]`.

    >>> Engine(1 << 28, url="s3://bucket/run", release_after_refit=True)                           # doctest: +SKIP

    Args:
        bucket_size: Passed by NeMo-RL: about so many bytes go to its loader at once, with `in_place=False`.
        url: The store; the policy's workers write to it, vLLM's read from it.
        release_after_refit: Must be true: NeMo-RL then tells all workers at every sync what was published last.
        in_place: Whether changes are written into the live weights of vLLM, at the first sync all of them; a model that
            does not allow it is refused by name. Otherwise NeMo-RL's own loader gets all tensors at every sync.
        spread: Whether every rank of the policy publishes a share of the tensors; otherwise rank 0 publishes all.
        rollout_dtype: Floating-point weights are rounded to it before they are compared; None to send them as NeMo-RL
            yields them, in the policy's precision.
        folder: A folder of the rollout's node in which one worker keeps whole versions for all workers of the node;
            without it every worker has a copy in host memory. With `in_place`, only at its first sync.
        timeout: Seconds to wait for the other side.
        audit_every: After so many commits in place, all bits are compared with the version's digest; None for never.
        signing_key_file: The file with the secret key with which the policy signs; only the policy's workers read it.
        trusted_keys: The public keys that rollouts trust, one or several.
        options: Further options of the `Publisher`.

    Raises:
        SessionError: An option cannot be used.
        StoreError: The URL names no store.
    """

    def __init__(
        self,
        bucket_size: int,
        *,
        url: str,
        release_after_refit: bool = False,
        in_place: bool = True,
        spread: bool = False,
        rollout_dtype: str | None = None,
        folder: str | None = None,
        timeout: float = 600.0,
        audit_every: int | None = AUDIT_EVERY,
        signing_key_file: str | None = None,
        trusted_keys: PublicKeys | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        require_count("bucket_size", bucket_size)
        require_timeout("timeout", timeout)
        require_count("audit_every", 1 if audit_every is None else audit_every)
        public_keys(trusted_keys)
        flags = {"release_after_refit": release_after_refit, "in_place": in_place, "spread": spread}
        for name, flag in flags.items():
            if not isinstance(flag, bool):
                raise SessionError(f"{name} is {flag!r}; it must be true or false")
        if trusted_keys is not None and signing_key_file is None:
            raise SessionError("trusted_keys are given without signing_key_file: rollouts would refuse every version")
        if not release_after_refit:
            raise SessionError(
                "release_after_refit is false; set it to true beside url: NeMo-RL then tells workers at every sync "
                "which version was the last, so that they never take it for the next one"
            )
        self._bucket_size = bucket_size
        self._url = url
        self._store = open_store(url)
        self._in_place = in_place
        self._spread = spread
        self._dtype = rollout_dtype_named(rollout_dtype)
        self._folder = folder
        self._timeout = timeout
        self._audit_every = audit_every
        self._trusted_keys = trusted_keys
        self._signing_key_file = signing_key_file
        self._options = publisher_options(options) | {"timeout": timeout}
        self._sender: WeightSender | None = None
        self._whole = WholeReceiver(url, folder, trusted_keys)
        self._live: LiveReceiver | None = None
        self._before: RunAndVersion | None = None
        self._is_ready = False  # whether it was told what was published before this sync

    # -- calls of NeMo-RL's synchronizer around a sync -----------------------------------------------------------------

    def prepare(self) -> dict[str, Any]:
        """Return the version at the store's head, the name of this node, and whether this worker needs all weights."""
        return {
            "before": head_version(self._store, self._trusted_keys),
            "node": socket.gethostname(),
            "needs_whole": self._live is None or not self._live.is_following,
        }

    def init_policy_process_group(
        self, *, worker_rank: int, train_world_size: int, rollout_world_size: int, metadata: list[Any]
    ) -> None:
        """Get ready to publish; no group is made."""
        del train_world_size, rollout_world_size
        if self._sender is None:
            options = self._options
            if self._signing_key_file is not None:
                key = Path(self._signing_key_file).read_text().strip()
                options = options | {"signing_key": key, "trusted_keys": self._trusted_keys}
            self._sender = WeightSender(
                self._store, worker_rank, dtype=self._dtype, spread=self._spread, options=options
            )
        self._begin(metadata)

    def init_rollout_process_group(
        self, *, rollout_rank: int, train_world_size: int, rollout_world_size: int, metadata: list[Any]
    ) -> None:
        """Remember what the policy published last, and whether this worker writes the folder of its node."""
        rollouts = metadata[train_world_size : train_world_size + rollout_world_size]
        node = rollouts[rollout_rank]["node"]
        first = next((i for i, told in enumerate(rollouts) if told["needs_whole"] and told["node"] == node), None)
        self._whole.begin(leads=first == rollout_rank)
        self._begin(metadata)

    def _begin(self, metadata: list[Any]) -> None:
        self._before = metadata[0]["before"]  # of rank 0 of the policy, which publishes
        self._is_ready = True

    def finalize(self) -> None:
        """End a sync. Publisher and weights stay for the next one, which must be announced first."""
        self._is_ready = False

    # -- the policy's side ---------------------------------------------------------------------------------------------

    async def send_weights(self, weights: Generator[tuple[str, torch.Tensor], None, None]) -> None:
        """Publish the next version; on all ranks, since all take part in gathering a tensor.

        Nothing is awaited meanwhile, so that NeMo-RL cannot ask this worker for the last version in the middle.
        """
        if self._sender is None or not self._is_ready:
            raise self._unready_error()
        self._is_ready = False
        self._sender.capture(weights)
        self._sender.publish()

    # -- the rollout's side --------------------------------------------------------------------------------------------

    async def receive_weight_batches(self) -> AsyncGenerator[list[tuple[str, torch.Tensor]], None]:
        """Wait for the version of this sync and verify it; yield its tensors, or commit it in place and yield none."""
        if not self._is_ready:
            raise self._unready_error()
        self._is_ready = False
        awaited = AwaitedVersion(self._store, self._before, self._timeout, self._trusted_keys)
        if self._in_place:
            self._commit_in_place(awaited)
            return
        device = "cuda" if torch.cuda.is_available() else "cpu"
        batch: list[tuple[str, torch.Tensor]] = []
        size = 0
        for name, bits in self._whole.receive(awaited).items():
            tensor = as_tensor(bits)
            if batch and size + tensor.nbytes > self._bucket_size:
                yield batch
                batch = []
                size = 0
            batch.append((name, tensor.to(device, copy=True)))  # NeMo-RL may write to it
            size += tensor.nbytes
        if batch:
            yield batch

    def _commit_in_place(self, awaited: AwaitedVersion) -> None:
        from .nemo_rl_vllm import LiveReceiver, find_worker

        if self._live is None:
            self._live = LiveReceiver(
                find_worker(self), self._url, trusted_keys=self._trusted_keys, audit_every=self._audit_every
            )
        self._live.receive(
            awaited, lambda: {name: as_tensor(bits) for name, bits in self._whole.receive(awaited).items()}
        )
        self._whole.close()  # of the first sync, or of one after a failure

    @staticmethod
    def _unready_error() -> SessionError:
        return SessionError(
            "this sync was not announced: prepare and init_…_process_group must be called before every sync, as "
            "NeMo-RL does with release_after_refit: true"
        )
