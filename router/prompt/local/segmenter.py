"""Cuts texts in front of anchors; `segments` says which tokens are anchors, and why."""

from __future__ import annotations

import re
from collections.abc import Iterable

_END = ""
_Trie = dict[str, "_Trie"]


class Segmenter:
    """Cuts texts in front of anchors."""

    def __init__(self, anchors: Iterable[str], matched: Iterable[str]) -> None:
        """Compile the search.

        Args:
            anchors: Tokens to cut in front of.
            matched: Anchors and all tokens that an anchor could overlap with in a text.
        """
        self.anchors = frozenset(anchors)
        self._matcher: re.Pattern[str] = compile_matcher(matched)

    def starts(self, text: str) -> list[int]:
        return [
            match.start() for match in self._matcher.finditer(text) if match.group() in self.anchors
        ]

    def anchor_at(self, text: str, start: int) -> str:
        found = self._matcher.match(text, start)
        assert found is not None
        return found.group()

    def split(self, text: str) -> list[str]:
        """Cut a text into its segments; an empty text has none."""
        starts = self.starts(text)
        if starts[:1] != [0]:
            starts.insert(0, 0)
        ends = [*starts[1:], len(text)]
        return [text[start:end] for start, end in zip(starts, ends, strict=True)] if text else []


# --- leftmost-longest search ----------------------------------------------------------------------


def compile_matcher(words: Iterable[str]) -> re.Pattern[str]:
    """Compile non-empty words into one expression that finds the leftmost, then longest of them.

    That is how the tokenizers library finds added tokens. The expression is a trie: the cost per
    character is the depth of the branch that matches, however many words there are.

    Raises:
        RecursionError: Hundreds of words are each a prefix of the next.
    """
    return re.compile(_branches(_build(words)))


def _build(words: Iterable[str]) -> _Trie:
    root: _Trie = {}
    for word in words:
        node = root
        for char in word:
            node = node.setdefault(char, {})
        node[_END] = {}
    return root


def _expression(node: _Trie) -> str:
    """Match the continuations; a word that ends here is taken only where no longer one matches."""
    if _END not in node:
        return _branches(node)
    return f"(?:{_branches(node)})?" if len(node) > 1 else ""


def _branches(node: _Trie) -> str:
    branches = [_branch(char, child) for char, child in node.items() if char != _END]
    return branches[0] if len(branches) == 1 else f"(?:{'|'.join(branches)})"


def _branch(char: str, node: _Trie) -> str:
    """Spell a run without forks in one go, so that the depth of the expression is that of the
    forks."""
    run = [char]
    while len(node) == 1 and _END not in node:
        ((char, node),) = node.items()
        run.append(char)
    return re.escape("".join(run)) + _expression(node)
