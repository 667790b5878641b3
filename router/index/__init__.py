"""The group-aware prefix index: which replica would reuse how much of a prompt.

It is compiled (`router/core/index`); `tests/oracle/index` has it in Python that can be read, and
defines what it answers. The files; each imports only what is listed above it:

    compiled.py        whether the compiled core is there, and the right one
    base.py            the values that go into an index and come out of it
    hash_finder.py     which hash function an engine uses
    layout_learner.py  what events say about the cache layout
    prompt.py          a prompt under every key and hash that some source may know it by
    index.py           all sources of one model
    dump.py            an index as bytes and back
"""

from router.index.base import (
    NO_HIT,
    ApplyResult,
    DumpError,
    GroupHit,
    HashesFound,
    Hit,
    LayoutHints,
    SourceId,
    SourceLimits,
    SourceStatistics,
    StoreHint,
    TierHint,
    WaitingStatistics,
    pack_keys,
    token_columns,
    unpack_keys,
)
from router.index.compiled import CORE_VERSION, CoreUnavailable, check_core
from router.index.index import PrefixIndex
from router.index.prompt import HashedPrompt, pack_token_ids

__all__ = [
    "CORE_VERSION",
    "NO_HIT",
    "ApplyResult",
    "CoreUnavailable",
    "DumpError",
    "GroupHit",
    "HashedPrompt",
    "HashesFound",
    "Hit",
    "LayoutHints",
    "PrefixIndex",
    "SourceId",
    "SourceLimits",
    "SourceStatistics",
    "StoreHint",
    "TierHint",
    "WaitingStatistics",
    "check_core",
    "pack_keys",
    "pack_token_ids",
    "token_columns",
    "unpack_keys",
]
