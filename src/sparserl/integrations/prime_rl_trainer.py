"""prime-rl, trainer side: publish to a store instead of writing whole checkpoints to a shared file system.

gather, as prime-rl does ──► each rank publishes its layers ──► STABLE, by which the orchestrator knows of the version

See docs/how-to/integrations/prime-rl.md for the change to prime-rl that this needs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from prime_rl.transports.weights.filesystem import FileSystemWeightBroadcast
from prime_rl.utils.pathing import get_broadcast_dir, get_step_path
from prime_rl.utils.weights import convert_state_dict_to_hf, gather_weights_parallel

from ..errors import SessionError
from ..session import Publisher
from ..weights.dtypes import BY_NAME
from ..weights.shards import Shards
from ..weights.table import TensorSpec, TensorTable


class SparserlWeightBroadcast(FileSystemWeightBroadcast):
    """Publishes each step; what the file system carries is a marker, by which the orchestrator knows of it.

    Args:
        output_dir: The folder of the run.
        config: prime-rl's config of the file system's broadcast.
        lora_config: Must be None: prime-rl sends adapters in another way.
        url: Where to publish.
        options: Further options of the `Publisher`, `files` and `signing_key` among them.
    """

    def __init__(self, output_dir: Path, config: Any, lora_config: Any = None, *, url: str, **options: Any) -> None:
        if lora_config is not None:
            raise SessionError("prime-rl sends LoRA adapters as files: leave out weight_broadcast.import_path")
        super().__init__(output_dir, config, lora_config)
        self._captured: Shards | None = None
        self._publisher = Publisher(url, self._weights, writers=dist.group.WORLD, **options)

    def broadcast_weights(self, model: torch.nn.Module, step: int) -> None:
        """On all ranks: publish the weights; then let the orchestrator know."""
        tensors = convert_state_dict_to_hf(model, gather_weights_parallel(model))
        self._captured = Shards.of(_whole_table(tensors), tensors)
        report = self._publisher.publish(step=step)
        self._captured = None
        if self.world.is_master:
            folder = get_step_path(get_broadcast_dir(self.output_dir), step)
            folder.mkdir(parents=True, exist_ok=True)
            self._notify_orchestrator(folder)
            self.logger.info(f"sparserl: {report}")

    def _weights(self) -> Shards:
        assert self._captured is not None
        return self._captured


def _whole_table(tensors: dict[str, torch.Tensor]) -> TensorTable:
    """The tensors of all ranks, each of which has some."""
    own = [(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)) for name, tensor in tensors.items()]
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, own)
    fields = sorted(field for rank in gathered for field in rank)
    return TensorTable([TensorSpec(name, BY_NAME[dtype], shape) for name, dtype, shape in fields])
