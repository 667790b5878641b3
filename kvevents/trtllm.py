"""Translates TensorRT-LLM's polled events into batches; no sockets.

`POST /kv_cache_events` of trtllm-serve returns each event once, in a JSON array, oldest first:

    [{"event_id": 0, "window_size": 4096, "layer_group_id": 1, "attention_dp_rank": 0,
      "data": {"type": "created", "num_blocks_per_cache_level": [6500, 0]}},
     {"event_id": 1, ..., "data": {"type": "stored", "parent_hash": null, "blocks": [
        {"block_hash": 17, "cache_level": 0, "priority": 35, "cache_salt": null, "mm_keys": [],
         "tokens": [{"token_id": 5, "token_extra_id": 0}, ...]}, ...]}},
     {"event_id": 2, ..., "data": {"type": "updated", "block_hash": 17, "priority": null,
        "cache_level": {"old_value": 0, "new_value": 1}}},
     {"event_id": 3, ..., "data": {"type": "removed", "block_hashes": [17]}}]

Each data-parallel rank counts from 0, so that an event is a batch of its own, with its number. The
buffer of an engine that is not asked drops the oldest; then a number is missing.

Two managers of the cache write this form. The older one, in C++, has a pool for each window, finds
a prompt in each from its first block on, and reuses what all of them have: as if every group were
full attention. The newer one names `layer_group_id`; its windows need their last blocks alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, NamedTuple

import msgspec

from kvevents.codec import (
    MAX_GROUP_IDX,
    MAX_NAME_LENGTH,
    MAX_TOKEN_ID,
    MAX_UNREADABLE,
    encode,
    names_a_removal,
    without_values,
)
from kvevents.errors import UNREADABLE, MalformedBatch
from kvevents.events import (
    CPU,
    GPU,
    STORAGE,
    BlockHash,
    BlockRemoved,
    BlockStored,
    Event,
    EventBatch,
)
from kvevents.messages import MAX_SEQ, Batch

MAX_RESPONSE_BYTES = 32 * 2**20
"""Room for blocks of 750,000 tokens: one prompt is one event, and the events of an outage come at
once. Longer responses are lost."""
MAX_EVENTS = 100_000
"""The most events of one response."""
MAX_BLOCK_TOKENS = 4096
MAX_HELD_BACK = 4096
"""The most blocks that wait until the block size is known."""
MAX_HELD_BACK_TOKENS = 262_144
"""Tokens of all these blocks together."""
MAX_APART = 1_048_576
"""The most remembered blocks that are not, or not only, on the GPU."""
_MAX_HASH_CHARS = 128
_TIERS = (GPU, CPU, STORAGE)
"""Tiers by `cache_level`; levels below the last one are storage, too."""

_Name = Annotated[str, msgspec.Meta(max_length=MAX_NAME_LENGTH)]
_Hash = (
    Annotated[int, msgspec.Meta(ge=0)] | Annotated[str, msgspec.Meta(max_length=_MAX_HASH_CHARS)]
)
_Level = Annotated[int, msgspec.Meta(ge=0, le=255)]
_Size = Annotated[int, msgspec.Meta(ge=0, le=2**31)]


class _Counted(msgspec.Struct, gc=False):
    """An element of a response. It counts while the array is read: a few bytes are enough for an
    element, and an array of many would take far more memory than its text."""

    left: ClassVar[int] = 0
    """How many more elements are allowed."""

    def __post_init__(self) -> None:
        _Counted.left -= 1
        if _Counted.left < 0:
            raise ValueError("too many events")


class _PolledHead(msgspec.Struct):
    event_id: Annotated[int, msgspec.Meta(ge=0, le=MAX_SEQ)]
    attention_dp_rank: int | None = None


class _Kind(msgspec.Struct):
    type: str


class _PolledEvent(msgspec.Struct):
    data: msgspec.Raw
    window_size: _Size | None = None
    layer_group_id: Annotated[int, msgspec.Meta(ge=0, le=MAX_GROUP_IDX)] | None = None


class _Token(msgspec.Struct):
    token_id: Annotated[int, msgspec.Meta(ge=0, le=MAX_TOKEN_ID)] | _Name
    """A digest for the first token of an image or other media."""
    token_extra_id: int = 0


class _MultimodalKey(msgspec.Struct):
    hash: _Name = ""
    start_offset: int = 0


class _Block(msgspec.Struct):
    block_hash: _Hash
    tokens: Annotated[list[_Token], msgspec.Meta(max_length=MAX_BLOCK_TOKENS)]
    cache_level: _Level = 0
    mm_keys: list[_MultimodalKey] | None = None
    cache_salt: _Name | None = None

    @property
    def tier(self) -> str:
        return _tier(self.cache_level)

    def extra_keys(self) -> list[Any] | None:
        """Return the keys that its hash covers besides token ids, so that it matches no text."""
        keys: list[Any] = [[key.hash, key.start_offset] for key in self.mm_keys or ()]
        keys += [token.token_id for token in self.tokens if isinstance(token.token_id, str)]
        keys += [str(token.token_extra_id) for token in self.tokens if token.token_extra_id]
        return keys or None


class _Stored(msgspec.Struct):
    blocks: list[_Block]
    parent_hash: _Hash | None = None
    lora_id: int | None = None
    lora_name: _Name | None = None


class _Removed(msgspec.Struct):
    block_hashes: list[_Hash]


class _Diff(msgspec.Struct):
    old_value: _Level
    new_value: _Level


class _Updated(msgspec.Struct):
    block_hash: _Hash
    cache_level: _Diff | None = None


_count_decoder = msgspec.json.Decoder(list[_Counted])
_events_decoder = msgspec.json.Decoder(list[msgspec.Raw])
_head_decoder = msgspec.json.Decoder(_PolledHead)
_event_decoder = msgspec.json.Decoder(_PolledEvent)
_kind_decoder = msgspec.json.Decoder(_Kind)
_stored_decoder = msgspec.json.Decoder(_Stored)
_removed_decoder = msgspec.json.Decoder(_Removed)
_updated_decoder = msgspec.json.Decoder(_Updated)


class PolledEvent(NamedTuple):
    """One event of a response, its contents not read yet."""

    rank: int
    seq: int
    body: msgspec.Raw


class PolledEvents(NamedTuple):
    """The events of a response."""

    events: list[PolledEvent]
    unreadable: int
    """Events left out, as they have no number."""


def read_response(body: bytes) -> PolledEvents:
    """Read the events of a response, in its order.

    Raises:
        MalformedBatch: It is not a JSON array of objects, or has too many, or too many without a
            number.
    """
    what = f"response of {len(body)} bytes"
    _Counted.left = MAX_EVENTS
    try:
        _count_decoder.decode(body)
        found = _events_decoder.decode(body)
    except UNREADABLE:
        rule = "it must be a JSON array of events"
        if _Counted.left < 0:
            rule = f"it may have {MAX_EVENTS} events"
        raise MalformedBatch(f"{what}: {rule}") from None
    events: list[PolledEvent] = []
    unreadable = 0
    for each in found:
        if bytes(each) == b"{}":  # an event that had become empty when it was written
            continue
        try:
            head = _head_decoder.decode(each)
        except UNREADABLE:
            unreadable += 1
            if unreadable > MAX_UNREADABLE:
                rule = f"more than {MAX_UNREADABLE} events name no event_id"
                raise MalformedBatch(f"{what}: {rule}") from None
            continue
        events.append(PolledEvent(head.attention_dp_rank or 0, head.event_id, each))
    return PolledEvents(events, unreadable)


class _HeldBack(NamedTuple):
    parent: BlockHash | None
    block: _Block
    origin: _Stored


class TrtllmTranslator:
    """Turns the events of one rank into batches, as long as the rank is followed.

    No event has the number of tokens in a block, and the last block of a run may not be full: such
    blocks are left out, as the engine may fill them later. The first run of two blocks, or the
    first block that follows another, shows the size; blocks wait until then.
    """

    def __init__(self) -> None:
        self._last_seq = -1
        self._start()

    def _start(self) -> None:
        self._groups: dict[int | None, int] = {}
        """Groups by window, where events name no group."""
        self._windows: dict[int, int] = {}
        """Windows by group, where events name it."""
        self._block_size = 0
        self._held_back: dict[tuple[int, BlockHash], _HeldBack] = {}
        self._held_back_tokens = 0
        self._apart: dict[tuple[int, BlockHash], str | None] = {}
        """The tiers of blocks that are not on the GPU; None: left out."""

    def translate(self, event: PolledEvent) -> Batch:
        """Return the batch with an event's number; without events where it changes nothing.

        Raises:
            MalformedBatch: It cannot be read.
        """
        if event.seq <= self._last_seq:
            self._start()  # of another process, whose first events may be lost
        self._last_seq = event.seq
        problem = None
        try:
            events = list(self._read(event.body))
        except UNREADABLE as error:
            problem = without_values(error)
        except MalformedBatch as error:
            problem = str(error)
        if problem is not None:  # raised here, where no error with quoted text is kept with it
            raise MalformedBatch(f"event {event.seq}: {problem}")
        return Batch(event.seq, encode(EventBatch(0.0, events)))

    def _read(self, body: msgspec.Raw) -> Iterator[Event]:
        event = _event_decoder.decode(body)
        kind = _kind_decoder.decode(event.data).type
        if kind == "stored":
            stored = _stored_decoder.decode(event.data)
            yield from self._stored(self._group(event), stored)
        elif kind == "removed":
            removed = _removed_decoder.decode(event.data)
            yield from self._removed(self._group(event), removed)
        elif kind == "updated":
            updated = _updated_decoder.decode(event.data)
            yield from self._updated(self._group(event), updated)
        elif kind == "created":
            self._group(event)
        elif names_a_removal(kind):
            raise MalformedBatch("of an unknown type that takes blocks away")

    # --- groups -----------------------------------------------------------------------------------

    def _group(self, event: _PolledEvent) -> int:
        if event.layer_group_id is not None:
            if event.window_size:
                self._windows[event.layer_group_id] = event.window_size
            return event.layer_group_id
        group = self._groups.setdefault(event.window_size, len(self._groups))
        if group > MAX_GROUP_IDX:
            del self._groups[event.window_size]
            raise MalformedBatch(f"window_size is another than {MAX_GROUP_IDX + 1} before it")
        return group

    def _window(self, group: int) -> int | None:
        """Return the window of a group that sees less than another one."""
        window = self._windows.get(group)
        return window if window is not None and window < max(self._windows.values()) else None

    # --- blocks -----------------------------------------------------------------------------------

    def _stored(self, group: int, stored: _Stored) -> Iterator[Event]:
        parent = None if stored.parent_hash is None else _hash(stored.parent_hash)
        if not self._block_size:
            self._learn_size(group, parent, stored)
            if self._block_size:
                yield from self._released()
        if self._block_size:
            yield from self._runs(group, parent, stored)
            return
        for block in stored.blocks:  # it is the only one
            key = group, _hash(block.block_hash)
            self._hold_back(key, _HeldBack(parent, block, stored))

    def _hold_back(self, key: tuple[int, BlockHash], held_back: _HeldBack) -> None:
        """Let a block wait; the oldest are given up for it."""
        self._let_go(key)
        self._held_back[key] = held_back
        self._held_back_tokens += len(held_back.block.tokens)
        while len(self._held_back) > MAX_HELD_BACK or self._held_back_tokens > MAX_HELD_BACK_TOKENS:
            self._let_go(next(iter(self._held_back)))

    def _let_go(self, key: tuple[int, BlockHash]) -> bool:
        """Remove a waiting block; return whether it was waiting."""
        held_back = self._held_back.pop(key, None)
        if held_back is None:
            return False
        self._held_back_tokens -= len(held_back.block.tokens)
        return True

    def _learn_size(self, group: int, parent: BlockHash | None, stored: _Stored) -> None:
        before = None if parent is None else self._held_back.get((group, parent))
        if len(stored.blocks) > 1:
            self._block_size = len(stored.blocks[0].tokens)
        elif before is not None:
            self._block_size = len(before.block.tokens)

    def _released(self) -> Iterator[Event]:
        waiting, self._held_back, self._held_back_tokens = self._held_back, {}, 0
        for (group, _), (parent, block, origin) in waiting.items():
            lone = _Stored([block], None, origin.lora_id, origin.lora_name)
            yield from self._runs(group, parent, lone)

    def _runs(self, group: int, parent: BlockHash | None, stored: _Stored) -> Iterator[Event]:
        """Yield one event for each row of blocks in the same tier."""
        run: list[_Block] = []
        for block in stored.blocks:
            if len(block.tokens) > self._block_size:
                rule = f"blocks of this cache have {self._block_size}"
                raise MalformedBatch(f"a block of {len(block.tokens)} tokens: {rule}")
            key = group, _hash(block.block_hash)
            if len(block.tokens) < self._block_size:
                self._set_apart(key, None)
                break  # it can only be the last
            self._apart.pop(key, None)
            if block.tier != GPU and not self._set_apart(key, block.tier):
                break  # its place could not be found later
            if run and (block.tier, block.cache_salt) != (run[0].tier, run[0].cache_salt):
                yield self._run(group, parent, run, stored)
                parent, run = _hash(run[-1].block_hash), []
            run.append(block)
        if run:
            yield self._run(group, parent, run, stored)

    def _run(
        self,
        group: int,
        parent: BlockHash | None,
        run: list[_Block],
        stored: _Stored,
    ) -> BlockStored:
        extra_keys = [block.extra_keys() for block in run]
        window = self._window(group)
        return BlockStored(
            [_hash(block.block_hash) for block in run],
            parent,
            [
                0 if isinstance(token.token_id, str) else token.token_id
                for block in run
                for token in block.tokens
            ],
            run[0].tier,
            group,
            stored.lora_name,
            extra_keys if any(extra_keys) else None,
            "full_attention" if window is None else "sliding_window",
            window,
            self._block_size,
            stored.lora_id,
            cache_salt=run[0].cache_salt,
        )

    def _updated(self, group: int, updated: _Updated) -> Iterator[Event]:
        change = updated.cache_level
        if change is None:
            return  # a priority: another event reports when it goes
        key = group, _hash(updated.block_hash)
        old, new = _tier(change.old_value), _tier(change.new_value)
        held_back = self._held_back.get(key)
        if held_back is not None:
            held_back.block.cache_level = change.new_value
            return
        if old == new or (key in self._apart and self._apart[key] is None):
            return
        self._apart.pop(key, None)
        if new == GPU or self._set_apart(key, new):
            # First, so that it always has a copy: the meaning of its hash is known by its copies.
            yield BlockStored([key[1]], None, [], new, group)
        yield BlockRemoved([key[1]], old, group)

    def _removed(self, group: int, removed: _Removed) -> Iterator[Event]:
        by_tier: dict[str, list[BlockHash]] = {}
        for each in removed.block_hashes:
            block_hash = _hash(each)
            key = group, block_hash
            if self._let_go(key):
                continue
            tier = self._apart.pop(key, GPU)
            if tier is not None:
                by_tier.setdefault(tier, []).append(block_hash)
        for tier, hashes in by_tier.items():
            yield BlockRemoved(hashes, tier, group)

    def _set_apart(self, key: tuple[int, BlockHash], tier: str | None) -> bool:
        """Remember the tier of a block; return False if too many are remembered."""
        if len(self._apart) >= MAX_APART:
            return False
        self._apart[key] = tier
        return True


def _tier(level: int) -> str:
    return _TIERS[min(level, len(_TIERS) - 1)]


def _hash(value: int | str) -> BlockHash:
    """Return a hash as the index knows it: a number, or the digest of hexadecimal digits."""
    if isinstance(value, int):
        if value >= 2**64:
            raise MalformedBatch("a block hash must be below 2**64")
        return value
    try:
        return bytes.fromhex(value)
    except ValueError:
        raise MalformedBatch("a block hash must be a number or hexadecimal digits") from None
