"""Bytes to `EventBatch` and back; no sockets.

Written: the native form, events as msgpack maps. Read: that, vLLM's maps (>= 0.24) and positional
arrays of all versions, and SGLang's arrays; unknown fields and trailing elements are ignored. Two
typed decoders read the homogeneous batches that real engines send. A batch that they refuse is read
event by event (`_read_batch`), with error messages that name the place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, TypeAlias, TypeVar

import msgspec

from kvevents.errors import MalformedBatch
from kvevents.events import (
    AllBlocksCleared,
    BlockHash,
    BlockRemoved,
    BlockStored,
    CacheLayout,
    Event,
    EventBatch,
)

MAX_TOKEN_ID = 2**32 - 1
MAX_GROUP_IDX = 255
MAX_NAME_LENGTH = 256

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
_REMOVED_POSITIONS = ("block_hashes", "medium", "group_idx")


class _MapBatch(msgspec.Struct, array_like=True):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared | CacheLayout]
    data_parallel_rank: int | None = None


class _StoredArray(msgspec.Struct, array_like=True, tag="BlockStored"):
    """`BlockStored` as vLLM 0.9 to 0.23 and SGLang write it; shorter in older versions."""

    block_hashes: list[BlockHash]
    parent_block_hash: BlockHash | None
    token_ids: list[int]
    block_size: int | None = None
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[Any] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class _RemovedArray(msgspec.Struct, array_like=True, tag="BlockRemoved"):
    block_hashes: list[BlockHash]
    medium: str | None = None
    group_idx: int | None = None


class _ClearedArray(msgspec.Struct, array_like=True, tag="AllBlocksCleared"):
    pass


_ArrayEvent: TypeAlias = _StoredArray | _RemovedArray | _ClearedArray


class _ArrayBatch(msgspec.Struct, array_like=True):
    ts: float
    events: list[_ArrayEvent]
    data_parallel_rank: int | None = None


class _WireBatch(msgspec.Struct, array_like=True):
    ts: float
    events: list[msgspec.Raw]
    data_parallel_rank: int | None = None


_encoder = msgspec.msgpack.Encoder()
_map_decoder = msgspec.msgpack.Decoder(_MapBatch)
_array_decoder = msgspec.msgpack.Decoder(_ArrayBatch)
_wire_decoder = msgspec.msgpack.Decoder(_WireBatch)
_any_decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder()

_Decoded = TypeVar("_Decoded")
_UNREADABLE = (msgspec.MsgspecError, RecursionError, UnicodeDecodeError)


def encode(batch: EventBatch) -> bytes:
    """The third frame of the wire: `[ts, events, data_parallel_rank]`."""
    return _encoder.encode((batch.ts, batch.events, batch.data_parallel_rank))


def decode(payload: bytes) -> EventBatch:
    """Read one batch in any dialect.

    Raises:
        MalformedBatch: The payload breaks the format. Nothing of it may be applied.
    """
    batch = _decode_typed(payload)
    return _read_batch(payload) if batch is None else batch


def _decode_typed(payload: bytes) -> EventBatch | None:
    """A homogeneous batch, all maps or all arrays; None for any other."""
    batch: _MapBatch | _ArrayBatch | None = _try(_map_decoder, payload)
    if isinstance(batch, _MapBatch):
        events: list[Event] = batch.events
    else:
        batch = _try(_array_decoder, payload)
        if batch is None:
            return None
        events = [_from_array(event) for event in batch.events]
    for index, event in enumerate(events):
        _check(event, f"events[{index}]")
    return EventBatch(ts=batch.ts, events=events, data_parallel_rank=batch.data_parallel_rank)


def _try(decoder: msgspec.msgpack.Decoder[_Decoded], data: bytes | msgspec.Raw) -> _Decoded | None:
    """The decoded value, or None if *decoder* refuses *data*.

    The decoder's error is not passed on: it may quote the data, and an exception raised from it
    would keep it as its context.
    """
    with suppress(*_UNREADABLE):
        return decoder.decode(data)
    return None


def _from_array(event: _ArrayEvent) -> Event:
    if type(event) is _StoredArray:
        return BlockStored(**{name: getattr(event, name) for name in _STORED_POSITIONS})
    if type(event) is _RemovedArray:
        return BlockRemoved(event.block_hashes, event.medium, event.group_idx)
    return AllBlocksCleared()


def _read_batch(payload: bytes) -> EventBatch:
    """Read one event at a time: unknown types are skipped, errors name their place."""
    batch = _try(_wire_decoder, payload)
    if batch is None:
        raise MalformedBatch(f"payload of {len(payload)} bytes: {_why_no_batch(payload)}")
    read = [_read_event(raw, f"events[{index}]") for index, raw in enumerate(batch.events)]
    events = [event for event in read if event is not None]
    return EventBatch(
        ts=batch.ts,
        events=events,
        data_parallel_rank=batch.data_parallel_rank,
        skipped=len(read) - len(events),
    )


def _why_no_batch(payload: bytes) -> str:
    try:
        _wire_decoder.decode(payload)
    except msgspec.ValidationError as error:
        return f"not a [ts, events, rank] array ({_without_values(error)})"
    except _UNREADABLE:
        return "not msgpack"
    return ""


def _without_values(error: Exception) -> str:
    # msgspec quotes an invalid tag, and bytes from the wire stay out of the log.
    return str(error).split("value '", 1)[0]


def _read_event(raw: msgspec.Raw, place: str) -> Event | None:
    value = _try(_any_decoder, raw)
    kind, fields = _tag_and_fields(value, place)
    reader = _READERS.get(kind)
    if reader is None:
        return None
    event = reader(fields, place)
    _check(event, place)
    return event


def _tag_and_fields(value: Any, place: str) -> tuple[str, dict[str, Any]]:
    """An event's type and its fields by name, of a map or an array."""
    if isinstance(value, dict):
        kind = value.get("type")
        fields = {name: field for name, field in value.items() if isinstance(name, str)}
    elif isinstance(value, list) and value:
        kind = value[0]
        names = _REMOVED_POSITIONS if kind == "BlockRemoved" else _STORED_POSITIONS
        fields = dict(zip(names, value[1:], strict=False))
    else:
        raise MalformedBatch(
            f"{place}: an event is a map or a non-empty array, not {type(value).__name__}"
        )
    if not isinstance(kind, str):
        raise MalformedBatch(f"{place}: the event type must be a string, not {type(kind).__name__}")
    return kind, fields


def _read_stored(fields: dict[str, Any], place: str) -> Event:
    known = {name: fields[name] for name in BlockStored.__struct_fields__ if name in fields}
    token_ids = known.get("token_ids")
    known["token_ids"] = [] if token_ids is None else _plain_tokens(token_ids, place)
    known.setdefault("block_hashes", None)
    known.setdefault("parent_block_hash", None)
    known.setdefault("medium", None)
    return _convert(known, BlockStored, place)


def _plain_tokens(token_ids: Any, place: str) -> Any:
    """The prompt's tokens; SGLang with EAGLE writes `(token, next token)` pairs."""
    if isinstance(token_ids, list) and token_ids and isinstance(token_ids[0], list):
        if not all(isinstance(pair, list) and pair for pair in token_ids):
            raise MalformedBatch(f"{place}.token_ids: tokens and token pairs must not be mixed")
        return [pair[0] for pair in token_ids]
    return token_ids


def _read_removed(fields: dict[str, Any], place: str) -> Event:
    known = {name: fields.get(name) for name in _REMOVED_POSITIONS}
    return _convert(known, BlockRemoved, place)


def _read_cleared(_fields: dict[str, Any], _place: str) -> Event:
    return AllBlocksCleared()


def _read_layout(fields: dict[str, Any], place: str) -> Event:
    known = {name: fields[name] for name in CacheLayout.__struct_fields__ if name in fields}
    return _convert(known, CacheLayout, place)


_READERS: dict[str, Callable[[dict[str, Any], str], Event]] = {
    "BlockStored": _read_stored,
    "BlockRemoved": _read_removed,
    "AllBlocksCleared": _read_cleared,
    "CacheLayout": _read_layout,
}


def _convert(fields: dict[str, Any], kind: type[Event], place: str) -> Event:
    try:
        return msgspec.convert(fields | {"type": kind.__name__}, kind)
    except msgspec.ValidationError as error:
        # Raised below and not here, where it would keep this error, and with it quoted bytes.
        refusal = _without_values(error)
    raise MalformedBatch(f"{place} ({kind.__name__}): {refusal}")


def _check(event: Event, place: str) -> None:
    """The rules types cannot say. Bounds are wide: they keep later arithmetic honest, not engines
    in line."""
    if isinstance(event, BlockStored):
        _check_stored(event, place)
    if isinstance(event, CacheLayout):
        _check_layout(event, place)
    if isinstance(event, (BlockStored, BlockRemoved)):
        _check_range(event.group_idx, 0, MAX_GROUP_IDX, f"{place}.group_idx")
        _check_name(event.medium, f"{place}.medium")


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
        for token in _flat(event.lookahead_token_ids):
            _check_range(token, 0, MAX_TOKEN_ID, f"{place}.lookahead_token_ids")


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
    for group in event.groups:
        _check_name(group.kind, f"{place}.groups.kind")


def _flat(lists: Iterable[Iterable[int]]) -> Iterable[int]:
    return (item for inner in lists for item in inner)


def _check_name(name: str | None, place: str) -> None:
    if name is not None and len(name) > MAX_NAME_LENGTH:
        raise MalformedBatch(
            f"{place} has {len(name)} characters: at most {MAX_NAME_LENGTH} are allowed"
        )


def _check_range(value: int | None, low: int, high: int, place: str) -> None:
    if value is not None and not low <= value <= high:
        raise MalformedBatch(f"{place} is out of range: it must lie in [{low}, {high}]")
