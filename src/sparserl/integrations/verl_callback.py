"""verl: a checkpoint callback that publishes what the trainer saves.

    trainer.save_freq ──► global_step_N/actor/…/huggingface ──► PublishCheckpoints.on_save ──► Publisher ──► store

The v1 trainer of verl makes the class that `trainer.checkpoint_callback_class` names, on the driver, with all of its
config, and calls `on_save` after each save. Evaluators and serving fleets follow the run from anywhere.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import CheckpointError, SessionError
from ..session import Publisher, SyncReport
from ..transport.stores.opening import open_store
from .checkpoint_engine import rollout_dtype_named
from .saved_checkpoints import LatestCheckpoint

try:
    from verl.trainer.ppo.checkpoint_callback import CheckpointCallback
except ImportError as missing:
    raise SessionError("verl is not installed, or too old: its checkpoint callbacks came with 0.9") from missing

_FOLDERS = ("huggingface", "model/huggingface")  # of a checkpoint of FSDP, of Megatron


class PublishCheckpoints(CheckpointCallback):  # type: ignore[misc]
    """Publishes the actor's Hugging Face checkpoint, with config and tokenizer, after each save.

    Options are in the config of verl, under `trainer.sparserl`: `url`, the store; `rollout_dtype`, to which wider
    floating-point tensors are rounded (`bfloat16`; `null` publishes the bits on disk); `signing_key_file`, a file with
    the secret key; all others are options of the `Publisher`. What goes wrong ends training, as verl has it.

    Args:
        config: The config of verl's trainer.

    Raises:
        SessionError: An option cannot be used, the actor saves no Hugging Face checkpoint, or saves in the background.

    Example, on verl's command line:
        trainer.checkpoint_callback_class=sparserl.integrations.verl_callback.PublishCheckpoints
        +trainer.sparserl.url=s3://bucket/run
    """

    def __init__(self, config: Any = None) -> None:
        super().__init__(config)
        _require_whole_checkpoints(config.actor_rollout_ref.actor.checkpoint)
        options = _plain(config.trainer.get("sparserl") or {})
        if not options.get("url"):
            raise SessionError("trainer.sparserl.url is not set: set it to the store of the run")
        dtype = options.pop("rollout_dtype", "bfloat16")
        key_file = options.pop("signing_key_file", None)
        if key_file is not None:
            options["signing_key"] = Path(key_file).read_text().strip()
        self._source = LatestCheckpoint(rollout_dtype_named(dtype))
        self._store = open_store(options.pop("url"))
        try:
            inspect.signature(Publisher).bind(self._store, self._source, **options)
        except TypeError as error:
            raise SessionError(f"trainer.sparserl has {sorted(options)}; of a Publisher: {error}") from error
        self._options = options
        self._publisher: Publisher | None = None
        self.report: SyncReport | None = None

    def on_save(
        self,
        trainer: Any,  # noqa: ARG002
        global_step: int,
        checkpoint_dir: str,
        async_save: bool = False,
        **kwargs: Any,  # noqa: ARG002
    ) -> None:
        """Publish the checkpoint in `checkpoint_dir`; its step is in the log of the run."""
        if async_save:
            raise SessionError(f"{checkpoint_dir} is still being written: set actor.checkpoint.async_save=False")
        self._source.path = _saved_in(Path(checkpoint_dir) / "actor")
        if self._publisher is None:  # it reads the files of the first checkpoint
            self._publisher = Publisher(self._store, self._source, **self._options)
        self.report = self._publisher.publish(step=global_step)


def _plain(value: Any) -> Any:
    """A value of a config without OmegaConf's own containers."""
    if isinstance(value, Mapping):
        return {key: _plain(value[key]) for key in value}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_plain(item) for item in value]
    return value


def _require_whole_checkpoints(checkpoint: Any) -> None:
    """Refuse a run whose saves could not be published, before it has trained for hours."""
    contents = list(checkpoint.save_contents)
    if "hf_model" not in contents:
        raise SessionError(
            f"actor.checkpoint.save_contents is {contents}: add 'hf_model', the checkpoint that is published"
        )
    if checkpoint.get("async_save", False):
        raise SessionError("actor.checkpoint.async_save is on: a checkpoint is published when it is whole; turn it off")


def _saved_in(actor: Path) -> Path:
    """The folder with the Hugging Face checkpoint of a save."""
    for folder in _FOLDERS:
        if any((actor / folder).glob("*.safetensors")):
            return actor / folder
    places = " or ".join(_FOLDERS)
    raise CheckpointError(f"{actor} has no safetensors in {places}: is it on a disk that this node sees?")
