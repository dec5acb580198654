"""TRL's `AsyncGRPOTrainer`: weights reach its vLLM server as patches. See docs/how-to/integrations/trl.md.

    send_weights ──► copy to host memory, cast ──► publish ──► store ──► pause, commit, resume

The server generates while a version is published; only the commit pauses it. Neither vLLM nor TRL is imported here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from ..errors import SessionError
from ..session import Publisher, SyncReport
from ..transport.stores.base import Store
from .vllm_server import FollowingServer


class WeightTransfer:
    """What `AsyncGRPOTrainer` takes as `weight_transfer`; it has the methods of TRL's `WeightTransferProtocol`.

    >>> transfer = WeightTransfer("http://localhost:8000", "s3://bucket/run")                      # doctest: +SKIP
    >>> trainer = AsyncGRPOTrainer(model, ..., weight_transfer=transfer)                           # doctest: +SKIP

    Args:
        server: The address of the vLLM server, which was started as for `use_server`.
        url: The store, as for a `Publisher`. Trainer and server must reach it.
        timeout: How many seconds to wait for the server to start, and to start again.
        worker: Further options of the server's workers; see `SparserlInitInfo`.
        **options: Further options of the `Publisher`.

    Attributes:
        report: What was published last.
    """

    def __init__(
        self,
        server: str,
        url: str | Store,
        *,
        timeout: float = 600.0,
        worker: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        self.report: SyncReport | None = None
        self._address = server
        self._timeout = timeout
        self._worker = dict(worker or {})
        self._weights: dict[str, torch.Tensor] = {}
        self._publisher = Publisher(url, lambda: self._weights, **options)
        self._server: FollowingServer | None = None

    def init_weight_transfer(self) -> None:
        """Wait for the server, and check that it was started as it must be."""
        self._server = FollowingServer(self._address, self._timeout)

    def pause(self) -> None:
        """Do nothing: the server generates until a commit pauses it."""

    def send_weights(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Publish the weights, in the dtype of the server, and let it commit them."""
        if self._server is None:
            raise SessionError("call init_weight_transfer first")
        dtype = getattr(torch, self._server.config["model_config"]["dtype"].removeprefix("torch."))
        for name, tensor in iterator:  # which may be gathered for this moment only
            self._weights[name] = tensor.to("cpu", dtype if tensor.is_floating_point() else None)
        self.report = self._publisher.publish()
        init_info = {"url": self._publisher.store.url, **self._worker}
        self._server.commit(init_info, self._publisher.run, self.report.version)

    def resume(self) -> None:
        """Do nothing: a commit resumes the server itself."""

    def destroy(self) -> None:
        """Close the publisher; the server keeps the weights that it has."""
        self._publisher.close()
