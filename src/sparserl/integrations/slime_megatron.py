"""slime and miles: every rank of Megatron publishes its own shards, and every rank of SGLang commits them in place.

    all ranks of the trainer: shards ──► Publisher ──► store ──► loader, on all ranks of every engine
    rank 0, when the version is in the store: every engine pauses, commits it, and continues

Both frameworks call a function of the user's on every rank of the trainer before they choose the class that updates
weights. The functions of this module replace the class that broadcasts weights over NCCL; nothing is gathered, and
nothing is written to disk (see docs/how-to/integrations/slime.md):

    --custom-megatron-init-path sparserl.integrations.slime_megatron.publish_in_slime      # or publish_in_miles
    --sglang-custom-weight-loader sparserl.integrations.sglang.load

The store comes from the environment of the trainer, SPARSERL_URL; also SPARSERL_STATE, SPARSERL_SIGNING_KEY_FILE and
SPARSERL_TRUSTED_KEYS, which engines are told.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ..errors import SessionError, UnsupportedTensor
from ..session import Publisher, SyncReport
from ..sources import megatron
from .environment import publisher_options, store_url, trusted_keys
from .sglang import Client

_REPLACED = "UpdateWeightFromDistributed"


@dataclass(frozen=True)
class TrainerHooks:
    """What differs between slime and miles.

    Attributes:
        gloo_group: Returns the Gloo group of all ranks of the trainer.
        urls: Returns the addresses of engines, which are actors of Ray.
        pause_mode: What happens to running requests in an update, as for `Client`.
    """

    gloo_group: Callable[[], Any]
    urls: Callable[[Sequence[Any]], list[str]]
    pause_mode: str


def publish_in_slime(args: Any) -> None:
    """On every rank of slime's trainer, for `--custom-megatron-init-path`: publish weights instead of broadcasting.

    Args:
        args: The options of slime.

    Raises:
        SessionError: An option does not go with it, or SPARSERL_URL is not set.

    >>> def initialize(args):  # a hook of one's own, with more in it                              # doctest: +SKIP
    ...     publish_in_slime(args)
    """
    from slime.backends.megatron_utils import actor
    from slime.utils.distributed_utils import get_gloo_group

    _refuse(
        {
            f"--update-weight-mode {args.update_weight_mode}": args.update_weight_mode != "full",
            f"--update-weight-transport {args.update_weight_transport}": args.update_weight_transport != "nccl",
            "--offload-train without a critic": args.offload_train and not args.use_critic,  # the weights are not there
            **_unsupported(args),
        }
    )
    _replace_updater(actor, TrainerHooks(get_gloo_group, _urls_in_slime, "abort"))


def publish_in_miles(args: Any) -> None:
    """On every rank of miles's trainer, for `--custom-megatron-init-path`: publish weights instead of broadcasting.

    Args:
        args: The options of miles.

    Raises:
        SessionError: An option does not go with it, or SPARSERL_URL is not set.

    >>> def initialize(args):  # a hook of one's own, with more in it                              # doctest: +SKIP
    ...     publish_in_miles(args)
    """
    from miles.backends.megatron_utils import actor
    from miles.utils.distributed_utils import get_gloo_group

    mode = args.update_weight_transfer_mode
    _refuse(
        {
            f"--update-weight-transfer-mode {mode}": mode != "broadcast",
            "--offload-train": args.offload_train,
            "--indep-dp": args.indep_dp,  # every replica has ranks of its own
            **_unsupported(args),
        }
    )
    _replace_updater(actor, TrainerHooks(get_gloo_group, _urls_in_miles, args.pause_generation_mode))


def _replace_updater(actor: Any, hooks: TrainerHooks) -> None:
    """Replace the class that the module of an actor takes to broadcast weights."""
    if not hasattr(actor, _REPLACED):
        raise SessionError(f"{actor.__name__} has no {_REPLACED} to replace: sparserl does not know this release")
    setattr(actor, _REPLACED, partial(WeightPublisher, hooks))


def _unsupported(args: Any) -> dict[str, bool]:
    """The options that go with neither framework, and whether they are set."""
    return {
        "--colocate": args.colocate,
        "--offload-rollout": args.offload_rollout,  # engines would lose the version that they have
        "--check-weight-update-equal": args.check_weight_update_equal,  # engines have one more buffer than before
    }


def _refuse(options: dict[str, bool]) -> None:
    """Raise if one of these options is set, and the same where there is no store."""
    wrong = [option for option, is_set in options.items() if is_set]
    if wrong:
        raise SessionError(f"sparserl cannot publish from this trainer with {', '.join(wrong)}: leave that out")
    store_url()


def _urls_in_slime(engines: Sequence[Any]) -> list[str]:
    import ray

    urls: list[str] = ray.get([engine.get_url.remote() for engine in engines])
    return urls


def _urls_in_miles(engines: Sequence[Any]) -> list[str]:
    import ray

    addresses = []
    for server in ray.get([engine.get_server_info.remote() for engine in engines]):
        host = server["host"].strip("[]")
        addresses.append(f"http://[{host}]:{server['port']}" if ":" in host else f"http://{host}:{server['port']}")
    return addresses


class WeightPublisher:
    """Updates the weights of engines at the update point of slime and miles, which make one on every rank.

    Args:
        hooks: What differs between the frameworks.
        args: The options of the framework.
        model: The chunks of this rank's model.
        weights_getter: Copies of the weights in host memory; not used here.
        model_name: The name of the model; not used here.
        quantization_config: That of the checkpoint that engines begin with.
        is_lora: Whether only adapters are trained.

    Raises:
        UnsupportedTensor: Engines have other tensors than the trainer: quantized ones, or adapters.
    """

    def __init__(
        self,
        hooks: TrainerHooks,
        args: Any,
        model: Sequence[torch.nn.Module],
        weights_getter: Any = None,  # noqa: ARG002  # the frameworks pass it to every class
        *,
        model_name: str | None = None,  # noqa: ARG002
        quantization_config: Any = None,
        is_lora: bool = False,
    ) -> None:
        if quantization_config is not None:
            raise UnsupportedTensor(
                f"{args.hf_checkpoint} is quantized, and Megatron's ranks publish what they train: give engines the "
                "checkpoint that is not quantized as --hf-checkpoint"
            )
        if is_lora:
            raise UnsupportedTensor("adapters are not published from here: merge them, or leave the hook out")
        self.weight_version = 0
        self.rollout_engines: Sequence[Any] | None = None
        self._hooks = hooks
        self._args = args
        self._model = model
        self._publisher: Publisher | None = None
        self._metrics: dict[str, float] = {}
        self._is_stale = False

    def connect_rollout_engines(
        self,
        rollout_engines: Sequence[Any],
        rollout_engine_lock: Any = None,  # noqa: ARG002  # the frameworks pass it to every class
        **_: Any,
    ) -> None:
        """From now on, update these engines."""
        self.rollout_engines = rollout_engines
        self._is_stale = False

    def disconnect_rollout_engines(self) -> None:
        """Do nothing: there is no connection."""

    def is_rollout_engines_fresh(self) -> bool:
        """Whether the engines are known. miles asks for it before every update."""
        return self.rollout_engines is not None and not self._is_stale

    def mark_engine_connection_stale(self) -> None:
        """Have miles name the engines again."""
        self._is_stale = True

    def pop_metrics(self) -> dict[str, float]:
        """The metrics of the last update, once."""
        metrics = self._metrics
        self._metrics = {}
        return metrics

    @torch.no_grad()
    def update_weights(self) -> None:
        """On all ranks at once: publish the weights as the next version, and let every engine commit it.

        Raises:
            SessionError: An engine could not commit the version, and still has its old weights; raised on all ranks.
            SparserlError: The version could not be published; raised on all ranks, and engines know nothing of it.
        """
        self.weight_version += 1
        if self._publisher is None:
            self._publisher = self._make_publisher()
        report = self._publisher.publish(step=self.weight_version)
        self._metrics = {
            "perf/update_weights_density": report.density,
            "perf/update_weights_wire_bytes": float(report.bytes),
        }
        group = self._hooks.gloo_group()
        failures = [self._commit(report) if dist.get_rank(group) == 0 else []]
        dist.broadcast_object_list(failures, src=0, group=group)
        if failures[0]:
            raise SessionError(f"version {report.version} is published, but {'; '.join(failures[0])}")

    def _make_publisher(self) -> Publisher:
        from transformers import AutoConfig

        checkpoint = self._args.hf_checkpoint
        config = AutoConfig.from_pretrained(checkpoint, trust_remote_code=True)
        return Publisher(
            store_url(),
            megatron(self._model, config),
            files=checkpoint if Path(checkpoint).is_dir() else None,
            writers=self._hooks.gloo_group(),
            **publisher_options(),
        )

    def _commit(self, report: SyncReport) -> list[str]:
        """On rank 0: let all engines commit a version, at the same time. Returns what went wrong."""
        try:
            urls = self._hooks.urls(self.rollout_engines or ())
        except Exception as error:  # noqa: BLE001  # the other ranks must not wait for this one
            return [f"an engine is gone: {error}"]
        failures = []
        with ThreadPoolExecutor(max(1, len(urls))) as pool:
            for commit in [pool.submit(self._commit_on, url, report) for url in urls]:
                try:
                    commit.result()
                except Exception as error:  # noqa: BLE001
                    failures.append(str(error))
        return failures

    def _commit_on(self, url: str, report: SyncReport) -> None:
        """Let one engine commit a version."""
        client = Client(url, mode=self._hooks.pause_mode)
        client.update(
            store_url(), report.version, run=report.run, trusted_keys=trusted_keys(), label=str(self.weight_version)
        )
