"""A small transformer that learns to add two numbers: 2.4 million parameters, plain torch.

The task is next-character prediction on strings such as "37+45=82"; only the characters after "=" count.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

ALPHABET = "0123456789+=\n"  # the newline ends an answer and fills the line
LONGEST = len("99+99=198\n")
WIDTH, HEADS, BLOCKS = 256, 4, 3
IGNORED = -100  # targets that do not count, as cross_entropy spells it


class Block(nn.Module):
    """Attention over what came before, then a feed-forward layer, each added to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.mlp_norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        heads = self.qkv(self.attention_norm(x)).view(batch, length, 3, HEADS, -1)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(batch, length, WIDTH))
        return x + self.down(functional.gelu(self.up(self.mlp_norm(x))))


class Adder(nn.Module):
    """The whole model: characters in, logits of the next character out."""

    def __init__(self) -> None:
        super().__init__()
        self.characters = nn.Embedding(len(ALPHABET), WIDTH)
        self.places = nn.Embedding(LONGEST, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, len(ALPHABET), bias=False)

    def forward(self, text: Tensor) -> Tensor:
        x = self.characters(text) + self.places.weight[: text.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def sums(count: int, generator: torch.Generator) -> Tensor:
    """So many random sums, one a row, each character as its place in the alphabet."""
    pairs = torch.randint(0, 100, (count, 2), generator=generator).tolist()
    lines = (f"{a}+{b}={a + b}".ljust(LONGEST, "\n") for a, b in pairs)
    return torch.tensor([[ALPHABET.index(c) for c in line] for line in lines])


def loss_of(model: Adder, text: Tensor) -> Tensor:
    """Mean cross-entropy of the answers' characters, the newline that ends them included."""
    source, target = text[:, :-1], text[:, 1:]
    answer = (source == ALPHABET.index("=")).cumsum(1) > 0
    ended = source == ALPHABET.index("\n")
    target = target.masked_fill(~answer | ended, IGNORED)
    return functional.cross_entropy(model(source).flatten(0, 1), target.flatten(), ignore_index=IGNORED)


def published(model: Adder) -> dict[str, Tensor]:
    """What the rollout side gets: every fp32 master weight cast to bf16, in memory of its own."""
    return {name: parameter.detach().to(torch.bfloat16) for name, parameter in model.named_parameters()}


def zeros() -> dict[str, Tensor]:
    """Weights of the same names, dtypes and shapes, all zero."""
    with torch.device("meta"):
        model = Adder()
    return {name: torch.zeros(p.shape, dtype=torch.bfloat16) for name, p in model.named_parameters()}
