"""Bytes to `EventBatch` and back; no sockets.

Written: the native form, events as msgpack maps. Read: that, vLLM's maps (>= 0.24) and positional
arrays of all versions, SGLang's maps (>= 0.5.20) and arrays, and Mooncake's maps; unknown fields
and trailing elements are ignored. A batch of maps with nothing to leave out, as ours are and those
of vLLM, is read at once, in less than half the time (3 µs an event, against 7). Any other is read
event by event (`_read_batch`): an event of an unknown type, or one that breaks the format, is left
out and counted, and an error message names its place.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain
from typing import Any, TypeVar

import msgspec
from msgspec.structs import asdict

from kvevents.errors import UNREADABLE, MalformedBatch
from kvevents.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    CacheLayout,
    Event,
    EventBatch,
    TierBlocksCleared,
)

MAX_TOKEN_ID = 2**32 - 1
MAX_GROUP_IDX = 255
MAX_NAME_LENGTH = 256
MAX_UNREADABLE = 1000
"""Events of one batch that may break the format; with more it is refused as a whole. Each costs ten
times what a readable one does."""

_STORED_POSITIONS = (
    "block_hashes",
    "parent_block_hash",
    "token_ids",
    "block_size",
    "lora_id",
    "medium",
    "lora_name",
    "extra_keys",
    "group_idx",
    "kv_cache_spec_kind",
    "kv_cache_spec_sliding_window",
)
_POSITIONS = {
    "BlockRemoved": ("block_hashes", "medium", "group_idx"),
    "TierBlocksCleared": ("medium",),
    "AllBlocksCleared": (),
}
"""Positions of fields by event type; all others are read as `BlockStored`. vLLM 0.9 to 0.23 and
SGLang up to 0.5.19 write them so; older versions end sooner."""

_TAKING_AWAY = re.compile(
    "clear|reset|flush|purge|wipe|evict|remov|delet|drop|invalidat|expir", re.IGNORECASE
)
"""Names of unknown event types that take blocks away; which blocks is unknown."""


_MOONCAKE = {"stored": "BlockStored", "removed": "BlockRemoved", "cleared": "AllBlocksCleared"}
"""Types by `event_type` of Mooncake's events (RFC #1527), which have no `type`."""
_MOONCAKE_OBJECT = "MooncakeObject"
"""An event about an object of the store, which names no block."""
_DEFAULT_TENANT = "default"


class _MapBatch(msgspec.Struct, array_like=True):
    ts: float
    events: list[Event]
    data_parallel_rank: int | None = None


class _MapTag(msgspec.Struct):
    type: str | None = None
    event_type: str | None = None

    @property
    def kind(self) -> str | None:
        if self.event_type is None:
            return self.type
        return _MOONCAKE.get(self.event_type, self.event_type)


class _ArrayTag(msgspec.Struct, array_like=True):
    kind: str


class _WireBatch(msgspec.Struct, array_like=True):
    ts: float
    events: list[msgspec.Raw]
    data_parallel_rank: int | None = None


_encoder = msgspec.msgpack.Encoder()
_map_decoder = msgspec.msgpack.Decoder(_MapBatch)
_wire_decoder = msgspec.msgpack.Decoder(_WireBatch)
_tag_decoders: tuple[msgspec.msgpack.Decoder[_MapTag | _ArrayTag], ...] = (
    msgspec.msgpack.Decoder(_MapTag),
    msgspec.msgpack.Decoder(_ArrayTag),
)
_any_decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder()

_EVENT_TYPE = b"event_type"
_Decoded = TypeVar("_Decoded")


def encode(batch: EventBatch) -> bytes:
    """The third frame of the wire: `[ts, events, data_parallel_rank]`."""
    return _encoder.encode((batch.ts, batch.events, batch.data_parallel_rank))


class _ExplicitStored(BlockStored, frozen=True, omit_defaults=False, tag="BlockStored"):
    """`BlockStored` written with every field."""

    __hash__ = BlockStored.__hash__


def with_block_size(event: BlockStored, block_size: int) -> BlockStored:
    """Return the event for readers that require `block_size`, such as vLLM's own class.

    Args:
        block_size: In tokens; 0 where it is unknown.
    """
    return _ExplicitStored(**asdict(event) | {"block_size": block_size})


def decode(payload: bytes) -> EventBatch:
    """Read one batch in any dialect.

    Raises:
        MalformedBatch: The payload is not a batch. Nothing of it may be applied.
    """
    return _decode_maps(payload) or _read_batch(payload)


def _decode_maps(payload: bytes) -> EventBatch | None:
    """Decode a batch of maps with nothing to leave out; None for any other."""
    if _EVENT_TYPE in payload:
        return None  # Mooncake's events name vLLM's types as well
    batch = _try(_map_decoder, payload)
    if batch is None:
        return None
    try:
        for index, event in enumerate(batch.events):
            _check(event, f"events[{index}]")
    except MalformedBatch:
        return None
    return EventBatch(batch.ts, batch.events, batch.data_parallel_rank)


def _try(decoder: msgspec.msgpack.Decoder[_Decoded], data: bytes | msgspec.Raw) -> _Decoded | None:
    """Return the decoded value, or None if *decoder* refuses *data*.

    The decoder's error is not passed on: it may quote the data, and an exception raised from it
    would keep it as its context.
    """
    with suppress(*UNREADABLE):
        return decoder.decode(data)
    return None


def _read_batch(payload: bytes) -> EventBatch:
    """Read one event at a time; those that cannot be read are left out."""
    batch = _try(_wire_decoder, payload)
    if batch is None:
        raise MalformedBatch(f"payload of {len(payload)} bytes: {_why_no_batch(payload)}")
    reading = _Reading()
    for index, raw in enumerate(batch.events):
        reading.take(raw, f"events[{index}]")
    rank = batch.data_parallel_rank
    return EventBatch(batch.ts, data_parallel_rank=rank, **asdict(reading))


class _Reading(msgspec.Struct):
    """Holds the fields of an `EventBatch` that are read event by event."""

    events: list[Event] = []
    skipped: int = 0
    unreadable: int = 0
    hides_removals: bool = False
    problem: str | None = None

    def take(self, raw: msgspec.Raw, place: str) -> None:
        """Read one event, or count it."""
        kind = None
        try:
            kind, fields = _tag_and_fields(raw, place)
            reader = _READERS.get(kind)
            if reader is not None:
                event = reader(fields, place)
                _check(event, place)
                self.events.append(event)
                return
        except MalformedBatch as error:
            self.unreadable += 1
            if self.unreadable > MAX_UNREADABLE:
                raise
            # A missing store costs hits, nothing else.
            self._note(str(error), takes_away=(kind or _tag_of(raw)) != "BlockStored")
            return
        self.skipped += 1
        if names_a_removal(kind):
            self._note(f"{place}: of an unknown type that takes blocks away", takes_away=True)

    def _note(self, problem: str, takes_away: bool) -> None:
        self.hides_removals |= takes_away
        self.problem = self.problem or problem


def names_a_removal(kind: str) -> bool:
    """Return whether the name of an unknown event type implies that blocks go."""
    return _TAKING_AWAY.search(kind) is not None


def _why_no_batch(payload: bytes) -> str:
    try:
        _wire_decoder.decode(payload)
    except msgspec.ValidationError as error:
        return f"not a [ts, events, rank] array ({without_values(error)})"
    except UNREADABLE:
        return "not msgpack"
    return ""


def without_values(error: Exception) -> str:
    """Return msgspec's message without the tag that it may quote: bytes from the wire stay out of
    the log."""
    return str(error).split("value '", 1)[0]


def _tag_of(raw: msgspec.Raw) -> str | None:
    """Return the type of an event that cannot be read as a whole, if at least that can be read."""
    tags = (_try(decoder, raw) for decoder in _tag_decoders)
    return next((tag.kind for tag in tags if tag is not None), None)


def _tag_and_fields(raw: msgspec.Raw, place: str) -> tuple[str, dict[str, Any]]:
    """Return an event's type and its fields by name, from a map or an array."""
    value = _try(_any_decoder, raw)
    if isinstance(value, dict):
        fields = {name: field for name, field in value.items() if isinstance(name, str)}
        kind = fields.get("type")
        if isinstance(fields.get("event_type"), str):
            kind, fields = _from_mooncake(fields, place)
    elif isinstance(value, list) and value:
        kind = value[0]
        names: Sequence[str] = _STORED_POSITIONS
        if isinstance(kind, str):
            names = _POSITIONS.get(kind, names)
        fields = dict(zip(names, value[1:], strict=False))
    else:
        raise MalformedBatch(
            f"{place}: an event is a map or a non-empty array, not {type(value).__name__}"
        )
    if not isinstance(kind, str):
        raise MalformedBatch(f"{place}: the event type must be a string, not {type(kind).__name__}")
    return kind, fields


def _from_mooncake(fields: dict[str, Any], place: str) -> tuple[str, dict[str, Any]]:
    """Return type and fields of Mooncake's event (RFC #1527), by vLLM's names.

    A run that begins behind its prompt's first block, and does not name the block before, has its
    hashes only: its tokens do not show where they stand. What Mooncake calls `additional_salt` in
    an event, it calls `cache_salt` in a question.
    """
    event_type = fields["event_type"]
    kind = _MOONCAKE.get(event_type, event_type)
    names_blocks = fields.get("seq_hashes") or "object_key" not in fields
    if kind in ("BlockStored", "BlockRemoved") and not names_blocks:
        return _MOONCAKE_OBJECT, {}
    known: dict[str, Any] = {
        name: fields[name] for name in ("medium", "lora_name", "block_size") if name in fields
    }
    known["block_hashes"] = fields.get("seq_hashes")
    if kind == "BlockStored":
        parent = known["parent_block_hash"] = fields.get("parent_hash")
        is_placed = parent is not None or not fields.get("base_block_idx")
        known["token_ids"] = fields.get("token_ids") if is_placed else []
        tenant, salt = fields.get("tenant_id"), fields.get("additional_salt") or None
        if tenant not in (None, "", _DEFAULT_TENANT):
            if salt is not None:
                rule = "must be empty where tenant_id is not the default one: a prompt has one salt"
                raise MalformedBatch(f"{place}.additional_salt: {rule}")
            salt = tenant  # no other's prompts are meant
        if salt is not None:
            known["cache_salt"] = salt
    return kind, known


def _read_stored(fields: dict[str, Any], place: str) -> Event:
    fields = {"block_hashes": None, "parent_block_hash": None, **fields}
    # SGLang 0.5.18 and 0.5.19 write the salt where vLLM has the adapter's name.
    if isinstance(fields.get("lora_name"), dict):
        fields |= {"lora_name": None, "cache_salt": fields["lora_name"].get("cache_salt")}
    token_ids = fields.get("token_ids")
    if token_ids is None:
        fields["token_ids"] = []
    elif isinstance(token_ids, list) and token_ids and isinstance(token_ids[0], list):
        fields |= _from_pairs(token_ids, fields["block_hashes"], place)
    return _read_fields(BlockStored, fields, place)


def _from_pairs(pairs: list[Any], hashes: Any, place: str) -> dict[str, Any]:
    """Return the tokens of a run that SGLang with EAGLE writes as `(token, next token)` pairs.

    A block's hash covers the token behind it as well: prompts that part there have other blocks.

        pairs        (1, 2) (2, 3)   (3, 4) (4, 5)
        tokens        1      2        3      4
        lookahead           3               5
    """
    if not all(isinstance(pair, list) and pair for pair in pairs):
        raise MalformedBatch(f"{place}.token_ids: tokens and token pairs must not be mixed")
    read: dict[str, Any] = {"token_ids": [pair[0] for pair in pairs]}
    blocks = len(hashes) if isinstance(hashes, list) else 0
    if blocks and len(pairs) % blocks == 0:
        size = len(pairs) // blocks
        read["lookahead_token_ids"] = [pair[1:] for pair in pairs[size - 1 :: size]]
    return read


def _read_fields(kind: type[Event], fields: dict[str, Any], place: str) -> Event:
    """Read an event whose fields stand in it as they are."""
    known = {name: fields[name] for name in kind.__struct_fields__ if name in fields}
    if "medium" in kind.__struct_fields__:
        known.setdefault("medium", None)  # engines may leave it out: that is the GPU
    try:
        return msgspec.convert(known | {"type": kind.__name__}, kind)
    except msgspec.ValidationError as error:
        # Raised below and not here, where it would keep this error, and with it quoted bytes.
        refusal = without_values(error)
    raise MalformedBatch(f"{place} ({kind.__name__}): {refusal}")


_READERS: dict[str, Callable[[dict[str, Any], str], Event]] = {
    "BlockStored": _read_stored,
    **{
        kind.__name__: partial(_read_fields, kind)
        for kind in (BlockRemoved, AllBlocksCleared, TierBlocksCleared, CacheLayout)
    },
}


def _check(event: Event, place: str) -> None:
    """Check the rules that types cannot express. Bounds are wide: they protect later arithmetic
    only."""
    if isinstance(event, BlockStored):
        _check_stored(event, place)
    if isinstance(event, CacheLayout):
        _check_layout(event, place)
        return
    _check_name(event.medium, f"{place}.medium")
    if isinstance(event, (BlockStored, BlockRemoved)):
        _check_name(event.locality, f"{place}.locality")
        _check_name(event.ownership, f"{place}.ownership")
        _check_range(event.group_idx, 0, MAX_GROUP_IDX, f"{place}.group_idx")
    if isinstance(event, BlockRemoved):
        _check_removed(event, place)


def _check_stored(event: BlockStored, place: str) -> None:
    tokens = event.token_ids
    if tokens:
        _check_range(min(tokens), 0, MAX_TOKEN_ID, f"{place}.token_ids (smallest)")
        _check_range(max(tokens), 0, MAX_TOKEN_ID, f"{place}.token_ids (largest)")
    _check_range(event.block_size, 0, 2**31, f"{place}.block_size")
    _check_range(
        event.kv_cache_spec_sliding_window, 0, 2**31, f"{place}.kv_cache_spec_sliding_window"
    )
    _check_name(event.lora_name, f"{place}.lora_name")
    _check_name(event.kv_cache_spec_kind, f"{place}.kv_cache_spec_kind")
    if event.lookahead_token_ids:
        for token in chain.from_iterable(event.lookahead_token_ids):
            _check_range(token, 0, MAX_TOKEN_ID, f"{place}.lookahead_token_ids")


def _check_removed(event: BlockRemoved, place: str) -> None:
    counts = event.remaining_copy_counts
    if counts is None:
        return
    if len(counts) != len(event.block_hashes):
        raise MalformedBatch(
            f"{place}.remaining_copy_counts has {len(counts)} entries: "
            f"it must have one for each of {len(event.block_hashes)} hashes"
        )
    for count in counts:
        _check_range(count, 0, 2**31, f"{place}.remaining_copy_counts")


def _check_layout(event: CacheLayout, place: str) -> None:
    _check_name(event.publisher_id, f"{place}.publisher_id")
    _check_name(event.hash_algorithm, f"{place}.hash_algorithm")
    if len(event.groups) > MAX_GROUP_IDX + 1:
        raise MalformedBatch(
            f"{place}.groups has {len(event.groups)}: at most {MAX_GROUP_IDX + 1} are allowed"
        )
    if event.none_hash is not None and len(event.none_hash) > MAX_NAME_LENGTH:
        raise MalformedBatch(
            f"{place}.none_hash has {len(event.none_hash)} bytes: "
            f"at most {MAX_NAME_LENGTH} are allowed"
        )
    _check_range(event.retention_hints, 0, 2**31, f"{place}.retention_hints")
    for group in event.groups:
        _check_name(group.kind, f"{place}.groups.kind")
    for index in event.eagle_groups or ():
        _check_range(index, 0, len(event.groups) - 1, f"{place}.eagle_groups")


def _check_name(name: str | None, place: str) -> None:
    if name is not None and len(name) > MAX_NAME_LENGTH:
        raise MalformedBatch(
            f"{place} has {len(name)} characters: at most {MAX_NAME_LENGTH} are allowed"
        )


def _check_range(value: int | None, low: int, high: int, place: str) -> None:
    if value is not None and not low <= value <= high:
        raise MalformedBatch(f"{place} is out of range: it must lie in [{low}, {high}]")
