"""Code without white space, comments and line breaks: how the text of a mutant is found and replaced in a file."""

from __future__ import annotations

import re
from typing import NamedTuple

_LEXEMES = re.compile(
    r"""
    (?P<space> \s+ | \#[^\n]* | \\\n )
  | (?P<string> [rRbBuUfF]{0,2} (?: \"{3}.*?\"{3} | '{3}.*?'{3} | "(?:\\.|[^"\\\n])*" | '(?:\\.|[^'\\\n])*' ) )
  | (?P<number> \d[\w.]* )
  | (?P<word> \w+ )
  | (?P<operator> \*\*= | //= | >>= | <<= | \*\* | // | >> | << | := | -> | [-+*/%&|^@=<>!]= | \S )
    """,
    re.VERBOSE | re.DOTALL,
)
_CLOSING = frozenset(")]}")


class Token(NamedTuple):
    """A piece of code, and where it stands in the text."""

    text: str
    start: int
    end: int


def tokens_of(text: str) -> list[Token]:
    """The tokens of a file or of a fragment; commas before a closing bracket, which formatters add, are left out."""
    found: list[Token] = []
    for lexeme in _LEXEMES.finditer(text):
        if lexeme.lastgroup == "space":
            continue
        if found and found[-1].text == "," and lexeme.group() in _CLOSING:
            found.pop()
        found.append(Token(lexeme.group(), lexeme.start(), lexeme.end()))
    return found


def places_of(fragment: str, tokens: list[Token]) -> list[int]:
    """Indices of tokens at which the fragment begins."""
    wanted = [token.text for token in tokens_of(fragment)]
    texts = [token.text for token in tokens]
    first = wanted[0]
    return [i for i, text in enumerate(texts) if text == first and texts[i : i + len(wanted)] == wanted]


def replaced(text: str, old: str, new: str) -> str:
    """The text with the one place of `old` replaced by `new`, whose further lines are indented as the place is."""
    tokens = tokens_of(text)
    places = places_of(old, tokens)
    if len(places) != 1:
        raise ValueError(f"stands {len(places)} times")
    start = tokens[places[0]].start
    end = tokens[places[0] + len(tokens_of(old)) - 1].end
    indented = new.strip().replace("\n", "\n" + indent_at(text, start))
    return text[:start] + indented + text[end:]


def indent_at(text: str, position: int) -> str:
    """The white space with which the line of a position begins."""
    line = text[text.rfind("\n", 0, position) + 1 :]
    return line[: len(line) - len(line.lstrip(" "))]
