"""TRL: a callback that makes a trainer publish its weights after optimizer steps.

`GRPOTrainer` and every other `transformers.Trainer` take it. Rollouts are subscribers in other processes. Where the
trainer generates through a vLLM server, `trl_server` takes the place of this callback.

Limits: a model whose parameters are sharded (FSDP, ZeRO-3) needs `writers`, and a `source` with the parts of each rank.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from .. import sources
from ..errors import SessionError, Unavailable, UnsupportedTensor
from ..session import BackgroundPublish, Publisher, SyncReport
from ..session.options import require_count
from ..transport.stores.base import Store

try:
    import torch
    from transformers import TrainerCallback
except ImportError as missing:
    raise ImportError("TRL is not installed: pip install 'sparserl[trl]'") from missing

_log = logging.getLogger("sparserl.trl")


class PublishCallback(TrainerCallback):
    """Publishes the weights when training begins, after every `every` optimizer steps, and when it ends.

    >>> trainer = GRPOTrainer(model, ..., callbacks=[PublishCallback("s3://bucket/run")])          # doctest: +SKIP

    Args:
        url: The store, as for a `Publisher`, which also gets all other options.
        every: Optimizer steps between versions.
        in_background: True to continue training while a version is encoded and sent; `settle` waits for it.
        cast: The dtype to publish in, if the trainer's weights are wider, such as `torch.bfloat16`. The changes of the
            optimizer are then tracked (`sparserl.sources.track`).
        source: A function that makes the source from the model and the optimizer. By default all weights of the model
            are published; of a peft model, the base weights with the active adapters merged in.

    If the store is not available, training continues: it is logged, and the next version includes the changes.
    Config and tokenizer are published as files, so that a folder that follows the run can be loaded.
    """

    def __init__(
        self,
        url: str | Store,
        *,
        every: int = 1,
        in_background: bool = False,
        cast: Any = None,
        source: Callable[[Any, Any], Any] | None = None,
        **options: Any,
    ) -> None:
        if cast is not None and source is not None:
            raise SessionError("cast and source exclude each other: give one of them")
        self._url = url
        require_count("every", every)
        self._every = every
        self._cast = cast
        self._source = source
        self._in_background = in_background
        self._background: BackgroundPublish | None = None
        self._options = options
        self._step = -1  # the last step that was published
        self.publisher: Publisher | None = None
        self.report: SyncReport | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Open the publisher, and publish the initial weights."""
        model = kwargs["model"]
        optimizer = kwargs.get("optimizer")
        if args.process_index and self._options.get("writers") is None:
            return
        make_source = self._source or partial(default_source, cast=self._cast)
        self.publisher = open_publisher(
            self._url, model, optimizer, kwargs.get("processing_class"), make_source, self._options
        )
        self._publish(state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Publish after every `every` steps."""
        if state.global_step % self._every == 0:
            self._publish(state.global_step)

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Add the last version to what the trainer shows, and to its history."""
        if (report := self.report) is not None:
            values = {"version": report.version, "bytes": report.bytes, "density": report.density}
            for log in (kwargs["logs"], state.log_history[-1]):
                log.update({f"sparserl/{name}": value for name, value in values.items()})

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Publish the last step if it was not published, and close the publisher."""
        if self.publisher is not None:
            self._unless_unavailable(self.settle)
            if self._step != state.global_step:
                self.report = self.publisher.publish(step=state.global_step)
            self.publisher.close()

    def settle(self) -> SyncReport | None:
        """Wait until the newest version is in the store, and return its report."""
        background = self._background
        self._background = None
        if background is not None:
            self.report = background.result()
        return self.report

    def _publish(self, step: int) -> None:
        publisher = self.publisher
        if publisher is None:
            return

        def publish() -> None:
            if self._in_background:
                self._background = publisher.publish_in_background(step=step)
            else:
                self.report = publisher.publish(step=step)
            self._step = step

        self._unless_unavailable(self.settle)
        self._unless_unavailable(publish)

    def _unless_unavailable(self, work: Callable[[], object]) -> None:
        try:
            work()
        except Unavailable as error:
            self._step = -1
            _log.warning("not published; the next version will include these changes: %s", error)


def open_publisher(
    url: str | Store,
    model: Any,
    optimizer: Any,
    tokenizer: Any,
    make_source: Callable[[Any, Any], Any],
    options: Mapping[str, Any],
) -> Publisher:
    """A publisher of a model as `transformers.Trainer` has it, with its config and tokenizer as files."""
    if isinstance(model, torch.nn.parallel.DistributedDataParallel):
        model = model.module
    source = make_source(model, getattr(optimizer, "optimizer", optimizer))  # accelerate wraps it
    return Publisher(url, source, **{"files": _files(model, tokenizer), **options})


def default_source(model: Any, optimizer: Any, cast: Any = None) -> Any:
    """The source of all weights of a model; of a peft model, of the base weights with the adapters merged in.

    Args:
        model: A model, all of whose weights are in this process.
        optimizer: The optimizer whose changes are tracked if there is a `cast`; None if there is none yet.
        cast: The dtype to publish in, if the model's weights are wider.

    Raises:
        UnsupportedTensor: A parameter is sharded.
        SessionError: There is a `cast` for a peft model.
    """
    for name, parameter in model.named_parameters():
        if hasattr(parameter, "ds_id") or type(parameter.data).__name__ == "DTensor":
            raise UnsupportedTensor(f"{name} is sharded: give `source` and `writers`, see sparserl.sources.fsdp")
    is_peft = hasattr(model, "peft_config") and hasattr(model, "merge_and_unload")
    if cast is None:
        return sources.lora(model, merged=True) if is_peft else sources.module(model)
    if is_peft:
        raise SessionError(
            "an adapter is merged in the dtype of the base model: load the base model in the dtype to publish"
        )
    return sources.module(model, cast=cast) if optimizer is None else sources.track(optimizer, model, cast=cast)


def _files(model: Any, tokenizer: Any) -> dict[str, bytes]:
    """Configs and tokenizer, as `save_pretrained` writes them."""
    parts = getattr(model, "config", None), getattr(model, "generation_config", None), tokenizer
    with tempfile.TemporaryDirectory(prefix="sparserl-") as folder:
        for part in parts:
            if part is not None:
                part.save_pretrained(folder)
        return {path.name: path.read_bytes() for path in Path(folder).iterdir() if path.is_file()}
