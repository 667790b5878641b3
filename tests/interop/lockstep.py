"""Performs every operation on two caches and looks for the first difference."""

from __future__ import annotations

from typing import Any

from tests.interop.cache import PrefixCache


class Disagreement(AssertionError):
    """The caches differ; `history` has every operation up to then, so that it can be replayed and
    shortened."""

    def __init__(
        self, fact: str, theirs: Any, mine: Any, history: list[tuple[str, tuple[Any, ...]]]
    ) -> None:
        super().__init__(
            f"operation {len(history)}, {history[-1][0]}: {fact}: vLLM {theirs}, ours {mine}"
        )
        self.history = history


class Lockstep:
    """Args:
    theirs: vLLM's cache.
    mine: Ours.
    same_entries: Whether the sets of cached blocks must be equal; else ours must be among vLLM's.
    """

    def __init__(self, theirs: PrefixCache, mine: PrefixCache, same_entries: bool = True) -> None:
        self.theirs = theirs
        self.mine = mine
        self.history: list[tuple[str, tuple[Any, ...]]] = []
        self._same_entries = same_entries

    def do(self, operation: str, *arguments: Any) -> Any:
        """Do it on both; return the common result.

        Raises:
            Disagreement: Results, cached blocks or free blocks differ.
        """
        self.history.append((operation, arguments))
        theirs = getattr(self.theirs, operation)(*arguments)
        mine = getattr(self.mine, operation)(*arguments)
        if theirs != mine:
            raise Disagreement("answers", theirs, mine, self.history)
        self._compare_state()
        return mine

    def ask(self, question: str, *arguments: Any) -> Any:
        """The same for operations that change nothing: only the results are compared."""
        self.history.append((question, arguments))
        theirs = getattr(self.theirs, question)(*arguments)
        mine = getattr(self.mine, question)(*arguments)
        if theirs != mine:
            raise Disagreement("answers", theirs, mine, self.history)
        self.history.pop()
        return mine

    def _compare_state(self) -> None:
        theirs, mine = self.theirs.cached(), self.mine.cached()
        if mine != theirs and (self._same_entries or not mine <= theirs):
            raise Disagreement(
                "cached blocks only one holds",
                named(theirs - mine),
                named(mine - theirs),
                self.history,
            )
        free = self.theirs.num_free_blocks(), self.mine.num_free_blocks()
        if free[0] != free[1]:
            raise Disagreement("free blocks", *free, self.history)


def named(blocks: Any) -> list[str]:
    return sorted(f"{block.group}:{block.block_hash.hex()[:8]}" for block in blocks)
