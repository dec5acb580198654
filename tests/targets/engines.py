"""An engine as plain tensors: its loader fuses, shards, pads, stacks and transposes, as those of real ones do."""

from __future__ import annotations

import torch

from sparserl.targets.pieces import CheckpointTensor

HEADS, KEYS, WIDTH, HIDDEN, INNER, VOCAB, EXPERTS = 4, 2, 2, 12, 8, 10, 2


def checkpoint(dtype=torch.bfloat16, seed=0):
    """Weights under their checkpoint names."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {
        "model.embed_tokens.weight": (VOCAB, HIDDEN),
        "model.layers.0.q.weight": (HEADS * WIDTH, HIDDEN),
        "model.layers.0.k.weight": (KEYS * WIDTH, HIDDEN),
        "model.layers.0.v.weight": (KEYS * WIDTH, HIDDEN),
        "model.layers.0.o.weight": (HIDDEN, HEADS * WIDTH),
        "model.layers.0.o.bias": (HIDDEN,),
        **{f"model.layers.1.experts.{e}.{n}.weight": (INNER, HIDDEN) for e in range(EXPERTS) for n in ("gate", "up")},
        **{f"model.layers.1.experts.{e}.down.weight": (HIDDEN, INNER) for e in range(EXPERTS)},
        "model.scale": (),
    }
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}


def named(weights):
    return [CheckpointTensor(name, tuple(tensor.shape), tensor.dtype) for name, tensor in weights.items()]


class Engine:
    """One rank of it."""

    def __init__(self, rank=0, ranks=1, dtype=torch.bfloat16, device="cpu"):
        self.rank, self.ranks = rank, ranks
        keys = max(1, KEYS // ranks)  # of more ranks than key heads, several have the same
        rows = (HEADS // ranks + 2 * keys) * WIDTH
        shapes = {
            "embed": (16 // ranks, HIDDEN),
            "qkv": (rows, HIDDEN),
            "o": (HIDDEN, HEADS * WIDTH // ranks),
            "o.bias": (HIDDEN,),
            "w13": (EXPERTS, 2 * INNER // ranks, HIDDEN),
            "w2": (EXPERTS, INNER // ranks, HIDDEN),
            "scale": (1,),
            "table": (7,),
        }
        self.live = {name: torch.ones(shape, dtype=dtype, device=device) for name, shape in shapes.items()}
        self.live["w2"] = self.live["w2"].transpose(1, 2)  # so that it has the shape of the checkpoint's

    def load(self, weights):
        for name, tensor in weights:
            self.load_one(name, tensor)

    def load_one(self, name, tensor):
        live, part = self.live, name.split(".")[-2]
        if part == "embed_tokens":
            live["embed"].zero_()
            mine = tensor[self.rank * len(live["embed"]) :][: len(live["embed"])]
            live["embed"][: len(mine)] = mine
        elif part in "qkv":
            self._load_heads(part, tensor)
        elif name.endswith("o.bias"):
            live["o.bias"].copy_(tensor)
        elif part == "o":
            live["o"].copy_(tensor.chunk(self.ranks, 1)[self.rank])
        elif part in ("gate", "up"):
            live["w13"][int(name.split(".")[4])].chunk(2)[part == "up"].copy_(tensor.chunk(self.ranks)[self.rank])
        elif part == "down":
            live["w2"][int(name.split(".")[4])].copy_(tensor.chunk(self.ranks, 1)[self.rank])
        elif name == "model.scale":
            live["scale"].fill_(tensor)

    def _load_heads(self, part, tensor):
        queries, keys = HEADS // self.ranks * WIDTH, max(1, KEYS // self.ranks) * WIDTH
        if part == "q":
            self.live["qkv"][:queries] = tensor[self.rank * queries :][:queries]
            return
        first = self.rank * KEYS // self.ranks * WIDTH
        at = queries if part == "k" else queries + keys
        self.live["qkv"][at : at + keys] = tensor[first : first + keys]
