"""Weights quantized as the rollout holds them: changes are found in the quantized bits, scales included.

    parts ──► largest magnitudes ──► agreed between processes, where blocks are cut ──► scales, and elements / scales
              of their blocks        or a scale is for a whole matrix

Everything stays on the device of a part. Kernels do the work on GPUs that have them, operations of torch elsewhere
(`block_codes.py`), and both give the same bits. Only what processes agree on goes to the device of their group.

- A block of zeros, or of numbers so small that a float32 scale would not be normal, has the scale 1; scales of eight
  bits are the least there is.
- A block with a NaN or an infinity has the scale NaN and zeros, so that it is NaN again after dequantizing.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from ..errors import TensorMismatch, UnsupportedTensor, WeightsError
from ..weights.memory import Weights
from ..weights.shards import Shards
from ..weights.table import TensorTable
from ..weights.tensors import tensor_table
from .modules import Source, files_of, module, weights_of
from .schemes import SCHEMES, Blockwise, scheme_named
from .tying import tied_of

if TYPE_CHECKING:
    import torch

    from .quantize_plan import QuantizationPlan
    from .quantized_view import QuantizedView

    Measured = tuple[QuantizationPlan, Shards, tuple[torch.Tensor, list[str], torch.Tensor]]

Function = Callable[[str, Any], Mapping[str, Any]]


class QuantizedSource:
    """The weights of another source, quantized at every call of `weights`. Made by `quantized`.

    One quantized copy is kept, and overwritten by the next call. Results of a function are not kept.
    """

    _track = False

    def __init__(self, source: Source | Weights, scheme: Blockwise | Function, process_group: Any = None) -> None:
        self._source = source
        self._scheme = scheme
        self._group = process_group
        self._plan: QuantizationPlan | None = None
        self._table: TensorTable | None = None  # of the source, when it was asked last
        self._sharded = process_group is not None  # until the source was asked

    def weights(self) -> Weights | Shards:
        """The quantized weights, or shards of them."""
        if not isinstance(self._scheme, Blockwise):
            return _by_function(self._scheme, weights_of(self._source))
        plan, shards, agreed = self._measure(self._scheme)
        parts = plan.quantize(shards.parts, *agreed)
        if self._sharded or self._track:
            return Shards(plan.table, parts)
        return {part.tensor: part.data for part in parts}

    @property
    def tied(self) -> Mapping[str, str]:
        """The names that the source left out, each with that of the same tensor, where this is not quantized."""
        if not isinstance(self._scheme, Blockwise) or self._table is None:
            return {}
        table = self._table
        pairs = [(name, kept, table.get(kept)) for name, kept in tied_of(self._source).items()]
        return {name: kept for name, kept, spec in pairs if spec is not None and not self._scheme.names(spec)}

    def _measure(self, scheme: Blockwise) -> Measured:
        """Measure what must be known before anything is quantized, and agree on it with other processes."""
        try:
            shards = self._shards()
            plan = self._plan_for(scheme, shards)
            largest = plan.measure(shards.parts)
        except BaseException:
            if self._sharded and self._has_peers():
                with contextlib.suppress(RuntimeError):  # the first error is raised
                    _tell_peers(None, self._group)
            raise
        if self._sharded and self._has_peers():
            return plan, shards, _agree(plan, largest, self._group)
        if self._sharded and (name := plan.incomplete_tensor()) is not None:
            raise TensorMismatch(
                f"{name!r}: other processes have the rest of some blocks or of a matrix with one scale; "
                "give their process group as `process_group`"
            )
        return plan, shards, (largest, plan.cut, plan.cut_magnitudes(plan.cut, largest.device))

    def files(self) -> dict[str, bytes]:
        """The files that the source brings along; a `config.json` says how the weights are quantized."""
        files = files_of(self._source)
        return {name: self.adapted(data) if name == "config.json" else data for name, data in files.items()}

    def adapted(self, config: bytes) -> bytes:
        """A `config.json`, of whatever origin, that says how the weights are quantized."""
        if not isinstance(self._scheme, Blockwise):
            return config
        fields = json.loads(config)
        fields["quantization_config"] = self._scheme.config(self._unquantized_layers(self._scheme))
        return (json.dumps(fields, indent=2) + "\n").encode()

    def _unquantized_layers(self, scheme: Blockwise) -> list[str]:
        """The layers with matrices that are not quantized: engines would take them for quantized ones."""
        layers: dict[str, None] = {}
        table = self._shards().table if self._table is None else self._table
        tied = [table[table.index[kept]]._replace(name=name) for name, kept in self.tied.items()]
        for spec in (*table.specs, *tied):
            layer, _, last = spec.name.rpartition(".")
            has_matrices = len(spec.shape) > 2 or (len(spec.shape) == 2 and last == "weight")
            if has_matrices and not scheme.names(spec):
                layers[layer] = None
        return [*layers]

    def _shards(self) -> Shards:
        weights = weights_of(self._source)
        self._sharded = isinstance(weights, Shards)
        shards = weights if isinstance(weights, Shards) else Shards.of(tensor_table(weights), weights)
        self._table = shards.table
        return shards

    def _plan_for(self, scheme: Blockwise, shards: Shards) -> QuantizationPlan:
        """The plan for these shards: the last one, if it still fits."""
        from .quantize_plan import QuantizationPlan

        for _ in shards.located():
            pass  # which checks that the shards have the shapes of their regions
        if self._plan is None or not self._plan.fits(shards):
            self._plan = QuantizationPlan(scheme, shards, track=self._track)
        return self._plan

    def _has_peers(self) -> bool:
        """Whether there are other processes to agree with."""
        import torch.distributed as dist

        return self._group is not None or (dist.is_available() and dist.is_initialized())


class TrackedQuantizedSource(QuantizedSource):
    """The same with the old bits of what has changed, so that a publisher needs no baseline. Made by `quantized`."""

    _track = True

    def committed(self) -> None:
        """Called by the publisher when the weights that it got last are a committed version."""
        if self._plan is not None:
            self._plan.committed()
        if (committed := getattr(self._source, "committed", None)) is not None:
            committed()


class ViewedQuantizedSource(QuantizedSource):
    """The same without a quantized copy: tensors are quantized when they are read. For one process.

    Attributes:
        view: Of the weights that were asked for last.
        base: A view of the version before; parts that still have its bits are not quantized anew.
    """

    def __init__(self, source: Source | Weights, scheme: Blockwise) -> None:
        super().__init__(source, scheme)
        self._blockwise = scheme
        self.view: QuantizedView | None = None
        self.base: QuantizedView | None = None

    def weights(self) -> Weights | Shards:
        """The weights, quantized when they are read."""
        self.view = self.view_of(weights_of(self._source), self.base)
        return self.view.weights

    def view_of(self, weights: Weights | Shards, base: QuantizedView | None = None) -> QuantizedView:
        """A view of any weights: their blocks are measured, where the bits are not those of another view."""
        from .quantized_view import ViewPlan, as_shards

        shards = as_shards(weights)
        self._table = shards.table
        for _ in shards.located():
            pass  # which checks that the shards have the shapes of their regions
        plan = ViewPlan(self._blockwise, shards)
        plan.compare(shards.parts, base)
        largest = plan.measure(shards.parts)
        if (name := plan.incomplete_tensor()) is not None:
            raise TensorMismatch(f"{name!r}: other processes have the rest of some blocks or of a matrix")
        cut = plan.cut_magnitudes(plan.cut, largest.device)
        return plan.view(shards, largest, plan.cut, cut, sharded=isinstance(weights, Shards))


def _agree(plan: QuantizationPlan, largest: torch.Tensor, group: Any) -> tuple[torch.Tensor, list[str], torch.Tensor]:
    """What all processes have measured: matrices, the tensors with cut blocks, and the magnitudes of their blocks.

    If a process has failed, or has other tensors, all raise, and none waits.
    """
    import torch
    import torch.distributed as dist

    _tell_peers(plan.signature, group)
    device = _group_device(group)
    own_cut = set(plan.cut)
    is_cut = torch.tensor([float(name in own_cut) for name in plan.grids])
    message = torch.cat((is_cut, largest)).to(device)
    if message.numel():
        dist.all_reduce(message, dist.ReduceOp.MAX, group=group)
    message = message.cpu()
    largest = message[len(plan.grids) :]
    names = [name for name, flag in zip(plan.grids, message.tolist(), strict=False) if flag]
    cut = plan.cut_magnitudes(names, device)
    if names:
        dist.all_reduce(cut, dist.ReduceOp.MAX, group=group)
    return largest, names, cut


def _tell_peers(signature: int | None, group: Any) -> None:
    """Tell all processes what this one quantizes, or by None that it has failed; raise if they do not do the same."""
    import torch
    import torch.distributed as dist

    failed = dist.get_rank(group) + 1 if signature is None else 0
    number = signature or 0
    message = torch.tensor([failed, number, -number], device=_group_device(group))
    dist.all_reduce(message, dist.ReduceOp.MAX, group=group)
    failed, most, minus_least = message.tolist()
    if signature is None:
        return
    if failed:
        raise WeightsError(
            f"rank {failed - 1} could not quantize its parts; its own error says why. Nothing was quantized"
        )
    if most != -minus_least:
        raise TensorMismatch("the processes do not quantize the same tensors, or not in the same blocks")


def _group_device(group: Any) -> torch.device:
    """Where the tensors of a group's collectives must be: NCCL has none in host memory."""
    import torch
    import torch.distributed as dist

    kinds = [backend.split(":")[0] for backend in dist.get_backend_config(group).split(",")]
    if "cpu" in kinds:
        return torch.device("cpu")
    return torch.device(kinds[0], torch.get_device_module(kinds[0]).current_device())


def _by_function(function: Function, weights: Weights | Shards) -> Weights:
    if isinstance(weights, Shards):
        raise UnsupportedTensor("a function quantizes whole tensors; use a scheme such as fp8_blockwise() for shards")
    quantized: dict[str, Any] = {}
    for name, tensor in weights.items():
        tensors = function(name, tensor)
        if duplicates := quantized.keys() & tensors.keys():
            raise TensorMismatch(
                f"the function returned {min(duplicates)!r} for {name!r} and for another tensor before it"
            )
        quantized.update(tensors)
    return quantized


def quantized(
    source: Any, scheme: Blockwise | str | Function, process_group: Any = None, *, track: bool = False
) -> QuantizedSource:
    """The weights of a source as a quantized rollout holds them.

    Args:
        source: a source, a torch module, or a mapping from names to torch tensors.
        scheme: `fp8_blockwise()`, `nvfp4()` and others of this module, or the name of one, as in `"nvfp4"`; or a
            function from a name and a tensor to a mapping of named tensors, which must give equal bits for equal bits.
        process_group: for shards, the processes that have them; all must publish at the same time. By default all
            processes of torch.distributed.
        track: whether to mark what changes, for a publisher with `baseline="none"`. Tensors that are not quantized are
            marked only if the source is a tracker.

    Returns:
        A source of quantized weights and their scales.

    Raises:
        UnsupportedTensor: the source is none of these.
        TypeError: the scheme is none of these.
        ValueError: there is no scheme of this name, or `track` is given with a function.

    >>> import torch, sparserl
    >>> source = sparserl.sources.quantized({"q.weight": torch.ones(2, 4)}, sparserl.sources.int8())
    >>> {name: tensor.dtype for name, tensor in source.weights().items()}
    {'q.weight': torch.int8, 'q.weight_scale': torch.float32}
    """
    if isinstance(scheme, str):
        scheme = scheme_named(scheme)
    if getattr(scheme, "__name__", None) in SCHEMES:
        raise TypeError("the scheme is a function that makes one; call it, or give its name, as in 'nvfp4'")
    if not isinstance(scheme, Blockwise) and not callable(scheme):
        raise TypeError(f"scheme is a {type(scheme).__name__}; it must be a scheme, the name of one, or a function")
    if not isinstance(source, Source | Mapping):
        source = module(source)
    if track and not isinstance(scheme, Blockwise):
        raise ValueError("track=True takes a scheme: what a function returns is not kept, so nothing can be marked")
    return (TrackedQuantizedSource if track else QuantizedSource)(source, scheme, process_group)
