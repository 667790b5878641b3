"""An index for the tests of this folder, and how to look inside."""

from __future__ import annotations

from router.index.base import SourceLimits
from router.index.index import PrefixIndex


class Implementation:
    """Makes indexes."""

    @staticmethod
    def create(limits: SourceLimits | None = None) -> PrefixIndex:
        return PrefixIndex(limits=limits)

    @staticmethod
    def expect_sound(index: PrefixIndex) -> None:
        """Fails where two parts of its state contradict each other."""
        assert index.core.contradictions() == []

    @staticmethod
    def expect_empty(index: PrefixIndex) -> None:
        """Fails where memory is left although no source holds a block."""
        nodes, _ = index.core.sizes()
        assert nodes == 0


CORE = Implementation()
