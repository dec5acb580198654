"""The weights at both ends: what the trainer publishes, and what a worker holds and answers with.

What is published is narrower than what is trained: fp32 masters move a little at every step, and most of their bf16
casts keep their bits. `sparserl.sources.track` finds what steps change and keeps their old bits, so no bf16 copy of
the model has to live beside the masters. Merged LoRA weights and fp8 codes are made anew at every publish.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import sparserl
from sparserl import sources

from .options import Options
from .queue import Landed
from .ways import Way

Weights = dict[str, Tensor]
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def float_dtype(options: Options) -> torch.dtype:
    """The dtype that workers compute in; fp8 weights are unpacked to bf16."""
    return torch.float16 if options.dtype == "fp16" else torch.bfloat16


def narrow(model: Any, dtype: torch.dtype) -> Any:
    """Cast the parameters of a model, and only them: transformers keeps its rotary frequencies in fp32."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    if dtype == torch.bfloat16 and _lacks_bf16():
        for module in model.modules():
            if isinstance(module, torch.nn.Linear):
                module.forward = partial(_wide, module)
    return model


def _lacks_bf16() -> bool:
    """Whether this processor has no bf16 arithmetic: PyTorch's products of matrices then take 200 times as long."""
    mkldnn = torch.ops.mkldnn
    return torch.backends.mkldnn.is_available() and not mkldnn._is_mkldnn_bf16_supported()  # noqa: SLF001


def _wide(layer: torch.nn.Linear, x: Tensor) -> Tensor:
    """A layer computed in fp32."""
    if x.device.type != "cpu":
        return torch.nn.Linear.forward(layer, x)
    bias = None if layer.bias is None else layer.bias.float()
    return torch.nn.functional.linear(x.float(), layer.weight.float(), bias).to(x.dtype)


def distinct(weights: Mapping[str, Tensor]) -> Weights:
    """Weights without second names of tied ones, as in a checkpoint: the embedding stays, not the head."""
    kept = {tensor.data_ptr(): name for name, tensor in sorted(weights.items())}
    return {name: tensor.detach() for name, tensor in weights.items() if kept[tensor.data_ptr()] == name}


class Trained:
    """The weights of a model as they are trained."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def weights(self) -> Weights:
        return distinct(self._model.state_dict())


class Published:
    """What workers get of the trainer's model: `source` for a publisher, `dense()` cast afresh, without sparserl."""

    def __init__(self, model: Any, optimizer: Any, options: Options) -> None:
        self._options, self._trained = options, Trained(model)
        self._lora = sources.lora(model, merged=True) if options.lora else None
        tracked = not options.lora and options.dtype != "fp8"
        self.source: Any = sources.track(optimizer, self._trained, cast=float_dtype(options)) if tracked else self

    def weights(self) -> Weights:
        """The weights as a source has them, for LoRA and fp8."""
        return self.dense()

    def dense(self) -> Weights:
        """All weights as the workers must hold them."""
        found = distinct(self._lora.weights()) if self._lora else self._trained.weights()
        cast = {n: t.to("cpu", float_dtype(self._options), copy=True) for n, t in found.items()}
        return packed(cast) if self._options.dtype == "fp8" else cast


def packed(weights: Mapping[str, Tensor]) -> Weights:
    """fp8 codes and scales in place of the weights of linear layers."""
    made = sources.quantized(dict(weights), sources.fp8_blockwise()).weights()
    assert isinstance(made, Mapping)
    return {name: tensor.clone() for name, tensor in made.items()}


def bits(tensor: Tensor) -> Tensor:
    """A tensor as integers, one for each element."""
    return tensor.view(_INTEGERS[tensor.element_size()])


def first_difference(sparse: Weights, full: Weights) -> str:
    """Where two sets of weights first differ by a bit; empty if nowhere."""
    if sparse.keys() != full.keys():
        return f"tensors: {min(sparse.keys() ^ full.keys())} is on one side only"
    for name in sorted(full):
        ours, theirs = bits(sparse[name].contiguous()), bits(full[name])
        if not torch.equal(ours, theirs):
            place = tuple((ours != theirs).nonzero()[0].tolist())
            return f"{name}{list(place)}: bits {ours[place].item():#x}, full weights have {theirs[place].item():#x}"
    return ""


def sha256(weights: Mapping[str, Tensor]) -> str:
    """A hash of all bits, names included, that owes nothing to sparserl."""
    found = hashlib.sha256()
    for name in sorted(weights):
        found.update(name.encode())
        found.update(bits(weights[name].detach().contiguous().cpu()).numpy())
    return found.hexdigest()


class Holder:
    """The weights of a worker. Patches land in the live weights; or, without `update`, in a copy to compare with."""

    def __init__(
        self, model: Any, options: Options, folder: Path, tell: Callable[[Landed], None], worker: int, way: Way
    ) -> None:
        self.model = narrow(model, float_dtype(options)).to(options.device)
        self._options, self._folder, self._tell, self._worker = options, folder, tell, worker
        state = distinct(self.model.state_dict())
        apart = options.dtype == "fp8" or options.device != "cpu"  # from the parameters: they must be copied there
        on_cpu = {name: tensor.cpu() for name, tensor in state.items()}
        self.live = packed(on_cpu) if options.dtype == "fp8" else on_cpu
        self._parameters = state if apart else None
        self.version: int | None = None
        self.fingerprint = ""
        self._sparse = self.live if "update" in options.modes else {n: t.clone() for n, t in self.live.items()}
        self._follower = way.follower(options, self._sparse, worker) if options.sparse else None

    def goto(self, version: int | None, at_least: int = 0) -> None:
        """Hold a version, by default the newest. Where versions are compared, none on the way there is left out."""
        if self._follower is not None and self._follower.told:  # all that was published has landed already
            assert self.version is not None
            assert self.version >= (at_least if version is None else version)
            return
        if version is None:
            version = newest(self._folder, at_least)
        every = "validate" in self._options.modes or self._options.fingerprint
        if every and self.version is not None:
            for step in range(self.version + 1, version):
                if self._file(step).exists() or not self._options.full:
                    self._land(step)
        if self.version != version:
            self._land(version)

    def look(self) -> None:
        """Between jobs: take what is broadcast; or the newest version, where workers are free to."""
        if self._follower is not None and (version := self._follower.look()) is not None:
            self._land(version)
        elif self._options.schedule == "free" and self.version is not None:
            self.goto(None)

    def close(self) -> None:
        """Let go of where the weights come from."""
        if self._follower is not None:
            self._follower.close()

    def _file(self, version: int) -> Path:
        return self._folder / "full" / f"{version:06}.safetensors"

    def _land(self, version: int) -> None:
        options, pause, digest, difference = self._options, 0.0, "", ""
        full = load_file(self._file(version)) if options.full else {}
        if self._follower is not None:
            pause = self._follower.land(version)
            if version == options.inject:
                flip(self._sparse)
            digest = "" if options.fingerprint else sparserl.digest(self._sparse, threads=1).hex
        if full and options.sparse:
            difference = first_difference(self._sparse, full)
        began = time.perf_counter()
        if "update" not in options.modes:
            pause = 0.0
            for name, tensor in self.live.items():
                tensor.copy_(full[name])
        self._install()
        pause += time.perf_counter() - began
        self.version = version
        self.fingerprint = sha256(self.live) if options.fingerprint else ""
        compared = bool(full) and options.sparse
        self._tell(Landed(self._worker, version, digest, pause, compared, difference, self.fingerprint))

    def _install(self) -> None:
        """Bring what is held into the parameters, where it is not there already."""
        for name, parameter in (self._parameters or {}).items():
            held, scales = self.live[name], self.live.get(f"{name}_scale_inv")
            if scales is not None:
                rows, columns = held.shape
                spread = scales.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
                held = held.float() * spread
            parameter.copy_(held)


def flip(weights: Weights) -> None:
    """Move one element of one tensor by one ulp, behind sparserl's back."""
    tensor = max(weights.values(), key=Tensor.numel)
    bits(tensor).view(-1)[tensor.numel() // 2] ^= 1


def save(weights: Weights, folder: Path, version: int, keep: int) -> None:
    """Write all weights of a version down, and forget all but the last versions."""
    half = folder / "full" / f"{version:06}.half"
    half.parent.mkdir(exist_ok=True)
    save_file({name: tensor.clone() for name, tensor in weights.items()}, half)  # tied ones would be refused
    half.rename(half.with_suffix(".safetensors"))
    for old in sorted(half.parent.glob("*.safetensors"))[:-keep]:
        old.unlink()


def announce(folder: Path, version: int) -> None:
    """Say that a version can be had."""
    half = folder / "newest.half"
    half.write_text(str(version))
    half.rename(folder / "newest")


def newest(folder: Path, at_least: int) -> int:
    """The newest version that has been announced."""
    return max(at_least, int((folder / "newest").read_text()))
