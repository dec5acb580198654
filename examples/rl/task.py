"""The task: write five digits in ascending order. `49131=` must be answered by `11349` and the end of the line.

An answer is right or wrong, and a few lines of Python can tell: no reward model is needed. The model starts with a
flaw that RL can mend. In what it was trained on before, only a part of the lines is sorted as the checker wants it;
the rest is in descending order.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Protocol

DIGITS = 5
LONGEST = DIGITS + 1  # tokens of an answer, the end of the line included
END = "\n"
SHOWN = "52810=01258\n93377=33779\n40612=01246\n"  # how the task is told to a model that has not been trained on it


class Tokenizer(Protocol):
    """Text to tokens and back; `end` is the token that ends a line."""

    end: int

    def encode(self, text: str) -> list[int]: ...

    def decode(self, tokens: Sequence[int]) -> str: ...


class Characters:
    """One token for each character."""

    alphabet = END + "=0123456789"
    end = alphabet.index(END)

    def encode(self, text: str) -> list[int]:
        return [self.alphabet.index(c) for c in text]

    def decode(self, tokens: Sequence[int]) -> str:
        return "".join(self.alphabet[t] for t in tokens)


def questions(count: int, rng: random.Random) -> list[str]:
    """So many random questions."""
    return ["".join(rng.choices("0123456789", k=DIGITS)) + "=" for _ in range(count)]


def reward(question: str, answer: str) -> float:
    """1 for the digits in ascending order and the end of the line; else a little for each character in its place."""
    right = "".join(sorted(question[:DIGITS])) + END
    return 1.0 if answer == right else 0.2 * sum(a == b for a, b in zip(answer, right, strict=False)) / len(right)


def lines(count: int, right: float, rng: random.Random) -> list[str]:
    """Lines to train on before RL: a share of them is right, the others are in descending order."""
    return [q + "".join(sorted(q[:DIGITS], reverse=rng.random() >= right)) + END for q in questions(count, rng)]
