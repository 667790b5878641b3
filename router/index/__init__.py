"""The group-aware prefix index: which replica would reuse how much of a prompt.

The files; each imports only what is listed above it:

    base.py      the interface of an index, and the values that cross it
    dump.py      an index as bytes and back
    reference/   the index in plain Python, which defines the behaviour
    native.py    the compiled index behind the interface of all
    choice.py    which of them serves
"""

from router.index.base import (
    NO_HIT,
    ApplyResult,
    DumpError,
    GroupHit,
    HashedPrompt,
    Hit,
    LayoutHints,
    PrefixIndex,
    SourceId,
    SourceLimits,
    SourceStatistics,
    StoreHint,
    TierHint,
    WaitingStatistics,
    pack_keys,
    token_columns,
)
from router.index.choice import (
    REFERENCE,
    IndexChoice,
    IndexImplementation,
    IndexUnavailable,
    choose_index,
    why_not_native,
)

__all__ = [
    "NO_HIT",
    "REFERENCE",
    "ApplyResult",
    "DumpError",
    "GroupHit",
    "HashedPrompt",
    "Hit",
    "IndexChoice",
    "IndexImplementation",
    "IndexUnavailable",
    "LayoutHints",
    "PrefixIndex",
    "SourceId",
    "SourceLimits",
    "SourceStatistics",
    "StoreHint",
    "TierHint",
    "WaitingStatistics",
    "choose_index",
    "create_index",
    "pack_keys",
    "token_columns",
    "why_not_native",
]


def create_index(limits: SourceLimits | None = None) -> PrefixIndex:
    """A new, empty index for one model, of the implementation that is chosen by default."""
    return choose_index().create(limits=limits)
