"""An index as bytes and back: to keep one over a restart, to look at one offline, to compare
two."""

from __future__ import annotations

import msgspec

from kvevents.errors import KVEventsError
from kvevents.events import BlockHash, CacheLayout
from kvevents.hashing import HashChain
from router.index.base import LayoutHints, SourceId, SourceLimits
from router.index.reference.index import ReferenceIndex
from router.index.reference.keys import KeySpace
from router.index.reference.learning import SeenGroup
from router.index.reference.source import Source
from router.index.reference.waiting import Run

VERSION = 1


class DumpError(KVEventsError):
    """Bytes that are no dump of an index, or one of another version."""


class _HeldBlocks(msgspec.Struct, array_like=True):
    group: int
    tier: str
    hashes: list[BlockHash]
    copies: list[int]


class _WaitingRun(msgspec.Struct, array_like=True):
    parent: BlockHash
    run: Run


class _SourceDump(msgspec.Struct):
    replica: str
    dp_rank: int
    hints: LayoutHints
    lookahead: int
    announced: CacheLayout | None
    seen: dict[int, SeenGroup]
    chain: HashChain | None
    shows_extra_keys: bool
    uses_int_hashes: bool
    held: list[_HeldBlocks]
    placed: list[tuple[BlockHash, int]]
    waiting: list[_WaitingRun]


class _IndexDump(msgspec.Struct):
    version: int
    modulus: int
    sources: list[_SourceDump]


def dump(index: ReferenceIndex) -> bytes:
    """Everything the index knows, as msgpack.

    It holds block hashes, keys and the tokens of runs that wait for their parents: treat it like a
    prompt log.
    """
    sources = [_dump_source(source_id, source) for source_id, source in index.sources.items()]
    return msgspec.msgpack.encode(_IndexDump(VERSION, index.keys.modulus, sources))


def load(data: bytes, limits: SourceLimits | None = None) -> ReferenceIndex:
    """The index that `dump` wrote.

    Raises:
        DumpError: The bytes are no dump, or of another version.
    """
    try:
        found = msgspec.msgpack.decode(data, type=_IndexDump)
    except msgspec.MsgspecError as error:
        raise DumpError(f"dump of {len(data)} bytes: {error}") from None
    if found.version != VERSION:
        raise DumpError(f"dump: version {found.version}; this one reads version {VERSION}")
    index = ReferenceIndex(KeySpace(found.modulus), limits or SourceLimits())
    for dumped in found.sources:
        source = SourceId(dumped.replica, dumped.dp_rank)
        index.add(source, dumped.hints)
        _load_source(index.sources[source], dumped)
    return index


def _dump_source(source_id: SourceId, source: Source) -> _SourceDump:
    return _SourceDump(
        replica=source_id.replica,
        dp_rank=source_id.dp_rank,
        hints=source.learner.hints,
        lookahead=source.learner.lookahead,
        announced=source.learner.announced,
        seen=source.learner.seen,
        chain=source.finder.chain,
        shows_extra_keys=source.shows_extra_keys,
        uses_int_hashes=source.uses_int_hashes,
        held=[
            _HeldBlocks(group, tier, list(held), list(held.values()))
            for (group, tier), held in source.held.items()
        ],
        placed=[(block_hash, key) for key, block_hash in source.hash_at.items()],
        waiting=[_WaitingRun(parent, run) for parent, run in source.waiting_runs()],
    )


def _load_source(source: Source, dumped: _SourceDump) -> None:
    source.learner.restore(dumped.announced, dumped.seen, dumped.lookahead)
    source.finder.chain = dumped.chain
    source.shows_extra_keys = dumped.shows_extra_keys
    held: dict[tuple[int, str], dict[BlockHash, int]] = {
        (blocks.group, blocks.tier): dict(zip(blocks.hashes, blocks.copies, strict=True))
        for blocks in dumped.held
    }
    source.restore(
        held, dumped.placed, [(waiting.parent, waiting.run) for waiting in dumped.waiting]
    )
    source.uses_int_hashes = dumped.uses_int_hashes
