"""A set of strings -> one regular expression that finds the leftmost, then longest of them.

That is the rule by which the tokenizers library finds added tokens. The expression is a trie, so
that a set of thousands costs no more per character than the depth of the branch that matches.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

_END = ""
_Trie = dict[str, "_Trie"]


def compile_matcher(words: Iterable[str]) -> re.Pattern[str]:
    """Compile *words*, of which none is empty, into a leftmost-longest matcher.

    Raises:
        RecursionError: Hundreds of words are each the beginning of the next.
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
    """Match what may follow; a word that ends here is taken only where no longer one goes on."""
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
