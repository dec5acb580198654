"""Find the code of mutants again that was renamed or moved, and apply the same edit to it.

Some earlier version of its file has the code of a mutant. What stood around it then is aligned, token by token, with
the code of today, in the same file and in those that have most of its words. Tokens that the mutant leaves alone are
taken from today's code, and in those that it changes names become what they are called today.
"""

from __future__ import annotations

import ast
import difflib
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType

from .catalogue import PACKAGE, ROOMS, ROOT, lost
from .mutant import Mutant
from .tokens import Token, indent_at, places_of, replaced, tokens_of

CONTEXT = 60  # tokens on each side
LEAST = 0.4  # of a mutant's tokens must be what they were
REVISIONS = 40  # of a file that are searched
FILES = 4  # that are aligned, of those with most words in common


def reanchor(write: bool) -> int:
    """Print, and write if asked, what becomes of mutants whose code is not found; 0 if each has a place."""
    without = 0
    for room in ROOMS:
        for mutant in lost(room.MUTANTS):
            print(f"{mutant.name}\n  {mutant.file}", flush=True)
            moved = moved_to(mutant)
            if moved is None:
                without += 1
                print("  no place was found: see to it by hand")
                continue
            for sign, text in ((">", moved.file), ("-", mutant.old), ("+", moved.old), ("→", moved.new)):
                print("\n".join(f"  {sign} {line}" for line in text.splitlines()))
            if not _makes_sense(moved):
                without += 1
                print("  this makes no sense: see to it by hand")
            elif write:
                _rewrite(room, mutant, moved)
    return 1 if without else 0


def moved_to(mutant: Mutant) -> Mutant | None:
    """The mutant as it must be today, or None."""
    tokens = _tokens_before(mutant)
    if tokens is None:
        return None
    (place,) = places_of(mutant.old, tokens)
    size = len(tokens_of(mutant.old))
    begin = max(0, place - CONTEXT)
    window = tokens[begin : place + size + CONTEXT]
    first = place - begin
    best = max(
        (_aligned(window, first, size, path) for path in _candidates(window, mutant.file)), key=lambda a: a.score
    )
    core = tokens_of(mutant.old)
    if sum(core[i].text == best.tokens[j].text for i, j in best.pairs.items()) < LEAST * size:
        return None
    old, new = _edited(mutant, best)
    return replace(mutant, file=str(best.path.relative_to(PACKAGE)), old=old, new=new)


def _makes_sense(mutant: Mutant) -> bool:
    """Whether it has one place, and Python can read what becomes of the file."""
    if lost([mutant]) or tokens_of(mutant.old) == tokens_of(mutant.new):
        return False
    try:
        ast.parse(replaced((PACKAGE / mutant.file).read_text(), mutant.old, mutant.new))
    except SyntaxError:
        return False
    return True


@dataclass
class Alignment:
    """Tokens of a mutant that correspond to tokens of a file."""

    path: Path
    text: str
    tokens: list[Token]
    score: float
    pairs: dict[int, int]  # token of the mutant to token of the file


def _candidates(window: list[Token], file: str) -> list[Path]:
    """The file itself, if it is still there, and those with most words in common."""
    words = Counter(token.text for token in window)
    common = {}
    for path in PACKAGE.rglob("*.py"):
        here = Counter(token.text for token in tokens_of(path.read_text()))
        common[path] = sum(min(count, here[word]) * _weight(word) for word, count in words.items())
    best = sorted(common, key=lambda path: common[path], reverse=True)[:FILES]
    return list({PACKAGE / file: None, **dict.fromkeys(best)}) if (PACKAGE / file).exists() else best


def _weight(word: str) -> float:
    """How much it tells that two places have a token in common."""
    return 2.0 if len(word) > 2 and word[0].isalpha() else 1.0 if word.isalnum() else 0.5


def _match(a: str, b: str) -> float:
    if a == b:
        return _weight(a)
    names = (a[0].isalpha() or a[0] == "_") and (b[0].isalpha() or b[0] == "_")
    return -0.3 if names else -1.0


def _aligned(window: list[Token], first: int, size: int, path: Path) -> Alignment:
    """The best local alignment of a window with a file, after Smith and Waterman."""
    text = path.read_text()
    tokens = tokens_of(text)
    gap = 0.6
    above = [0.0] * (len(tokens) + 1)
    steps = []
    best = (0.0, 0, 0)
    for i, token in enumerate(window):
        row = [0.0] * (len(tokens) + 1)
        step = bytearray(len(tokens) + 1)
        for j, other in enumerate(tokens, 1):
            diagonal = above[j - 1] + _match(token.text, other.text)
            value = max(0.0, diagonal, above[j] - gap, row[j - 1] - gap)
            row[j] = value
            if value > 0:
                step[j] = 1 if value == diagonal else 2 if value == above[j] - gap else 3
                if value > best[0]:
                    best = (value, i, j)
        steps.append(step)
        above = row
    score, i, j = best
    pairs = {}
    while i >= 0 and j > 0 and steps[i][j]:
        kind = steps[i][j]
        if kind == 1 and first <= i < first + size:
            pairs[i - first] = j - 1
        i -= kind in (1, 2)
        j -= kind in (1, 3)
    return Alignment(path, text, tokens, score, pairs)


def _edited(mutant: Mutant, found: Alignment) -> tuple[str, str]:
    """Today's code for the mutant, and the same edit of it."""
    before = tokens_of(mutant.old)
    after = tokens_of(mutant.new)
    low = min(found.pairs.values())
    high = max(found.pairs.values())
    names = {before[i].text: found.tokens[j].text for i, j in found.pairs.items()}
    indent = indent_at(found.text, found.tokens[low].start)

    def today(start: int, stop: int) -> str:
        """Code of the file from one of its tokens to another, with the white space before it."""
        from_ = found.tokens[start - 1].end if start > low else found.tokens[start].start
        return found.text[from_ : found.tokens[stop - 1].end].replace("\n" + indent, "\n")

    def renamed(start: int, stop: int) -> str:
        """Code of the mutant, with today's names."""
        out = ""
        for k in range(start, stop):
            space = mutant.new[after[k - 1].end if k else after[k].start : after[k].start]
            out += space + names.get(after[k].text, after[k].text)
        return out

    out = ""

    def add(piece: str) -> None:
        nonlocal out
        glued = out[-1:].isidentifier() and piece[:1].isidentifier()
        out += " " + piece if glued else piece

    place = low
    opcodes = difflib.SequenceMatcher(None, [t.text for t in before], [t.text for t in after], False).get_opcodes()
    for kind, i1, i2, j1, j2 in opcodes:
        stop = min((found.pairs[i] for i in range(i2, len(before)) if i in found.pairs), default=high + 1)
        if kind == "equal" and stop > place:
            add(today(place, stop))
        elif kind in ("replace", "insert"):
            add(renamed(j1, j2))
            if not i1 and j2 < len(after):
                out += mutant.new[after[j2 - 1].end : after[j2].start]
        if i2 > i1:
            place = max(place, stop)
    return today(low, high + 1).strip(), out.strip()


def _rewrite(room: ModuleType, mutant: Mutant, moved: Mutant) -> None:
    """Change the mutant in the catalogue."""
    assert room.__file__ is not None
    path = Path(room.__file__)
    source = path.read_bytes()
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call) and len(node.args) == 5]
    (call,) = [node for node in calls if isinstance(node.args[0], ast.Constant) and node.args[0].value == mutant.name]
    for node, text in zip(call.args[3:0:-1], (moved.new, moved.old, moved.file), strict=True):
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        begin = starts[node.lineno - 1] + node.col_offset
        end = starts[node.end_lineno - 1] + node.end_col_offset
        source = source[:begin] + _literal(text).encode() + source[end:]
    path.write_bytes(source)
    subprocess.run([sys.executable, "-m", "ruff", "format", "--quiet", path], check=False)


def _literal(text: str) -> str:
    """Python for a string, a line of it on each line."""
    return "\n".join(ast.unparse(ast.Constant(line)) for line in text.splitlines(keepends=True)) or '""'


def _tokens_before(mutant: Mutant) -> list[Token] | None:
    """The newest committed version of its file that has the mutant's code once."""
    path = f"src/sparserl/{mutant.file}"
    for revision in _git("log", f"-{REVISIONS}", "--format=%H", "--", path).split():
        tokens = tokens_of(_git("show", f"{revision}:{path}"))
        if len(places_of(mutant.old, tokens)) == 1:
            return tokens
    return None


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout  # nothing where the file was deleted
