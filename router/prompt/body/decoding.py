"""Bytes -> the fields of a body that are read here.

A list of token ids is most of a long body, and is packed without being read as JSON."""

from __future__ import annotations

import re
from collections.abc import Container
from itertools import chain, compress, repeat
from operator import is_not
from typing import Any

import msgspec
from msgspec.structs import astuple

from router.errors import BadRequest
from router.prompt.body.owned_fields import (
    ARGUMENTS_FIELD,
    PRIORITY_FIELD,
    SAMPLING_FIELD,
    TRANSFER_FIELD,
)
from router.prompt.endpoints import FORMS, Endpoint
from router.prompt.errors import describe
from router.prompt.token_ids import pack_token_ids

_HIGH_SURROGATE = re.compile(rb"\\u[dD][89abAB][0-9a-fA-F]{2}")
_PLACE = re.compile(r"\(byte (\d+)\)")
_TEXT_FIELDS = frozenset(("messages", "prompt", "input"))
RETENTION_FIELD = "prompt_cache_retention"
SESSION_FIELDS: tuple[str, ...] = (
    *("session_id", "prompt_cache_key", "conversation", "previous_response_id", "user"),
)
_WITH_TOKEN_IDS = {
    endpoint: frozenset(form.id_fields) for endpoint, form in FORMS.items() if form.id_fields
}
_MAX_REST_BYTES = 65_536
_SHORT_BODY_BYTES = 4096
_TAKEN_OUT = b"[\t \t \n\t]"

FIELD_NAMES = (
    *("model", "cache_salt", "token_ids", "messages", "prompt", "input"),
    *("stream", "n", "prompt_logprobs", "logprobs", "echo"),
    *("truncate_prompt_tokens", "truncation_side", "add_special_tokens", "lora_path"),
    *(ARGUMENTS_FIELD, "metadata", *SESSION_FIELDS),
    *("chat_template", "chat_template_kwargs", "tools", "documents", "reasoning_effort"),
    *("add_generation_prompt", "continue_final_message", "tool_choice", "input_ids"),
    *(SAMPLING_FIELD, TRANSFER_FIELD, PRIORITY_FIELD, RETENTION_FIELD),
    *chain.from_iterable(form.fields for form in FORMS.values()),
)
"""The fields that are read; all others are skipped."""


def _decoder(undecoded: Container[str] = ()) -> msgspec.json.Decoder[Any]:
    fields: list[tuple[str, Any, Any]] = [
        (name, msgspec.Raw if name in undecoded else Any, msgspec.UNSET) for name in FIELD_NAMES
    ]
    return msgspec.json.Decoder(msgspec.defstruct("_Fields", fields, gc=False))


_FIELDS_DECODER = _decoder()
_PACKING_DECODERS = {endpoint: _decoder(names) for endpoint, names in _WITH_TOKEN_IDS.items()}


def holds_mostly_ids(body: bytes) -> bool:
    """Return whether all but a small part of a JSON body is one list of numbers, which the core
    reads in a fraction of the time that anything else takes."""
    start, end = _first_list(body)
    if not end or start + len(body) - end > _MAX_REST_BYTES:
        return False
    return all(body.find(other, start + 1, end) < 0 for other in (b"[", b'"', b"{"))


def _first_list(body: bytes) -> tuple[int, int]:
    """Return the first list's span, from its bracket to behind the first one that closes; the end
    is 0 without both."""
    start = body.find(b"[", 0, _MAX_REST_BYTES)
    return start, 0 if start < 0 else body.find(b"]", start) + 1


def decode_fields(body: bytes, encoding: str, endpoint: Endpoint) -> dict[str, Any]:
    try:
        if encoding == "json":
            return _read_fields(body, endpoint)
        fields = msgspec.msgpack.decode(body)
        if isinstance(fields, dict) and not _TEXT_FIELDS.isdisjoint(fields):
            # Templates and replicas know JSON only: other keys, bytes and dates are converted.
            fields = msgspec.json.decode(msgspec.json.encode(fields))
    except RecursionError:
        raise BadRequest("$", "nested too deep", "must be nested less deep") from None
    except (msgspec.MsgspecError, TypeError, ValueError) as error:
        # ValueError: text that is not UTF-8. TypeError: msgpack types without a JSON equivalent.
        # The messages hold offsets and type names, but no content.
        found = _fault(body, error) if encoding == "json" else str(error)
        raise BadRequest("$", found, f"the body must be valid {encoding}") from None
    if not isinstance(fields, dict):
        raise BadRequest("$", describe(fields), "the body must be an object")
    return fields


def _read_fields(body: bytes, endpoint: Endpoint) -> dict[str, Any]:
    """Read the fields of a JSON body that are used here."""
    packing = _PACKING_DECODERS.get(endpoint)
    try:
        if packing is None:
            return _present(_FIELDS_DECODER.decode(body))
        if len(body) > _SHORT_BODY_BYTES and (found := _around_ids(body, endpoint)):
            return found
        fields = _present(packing.decode(body))
        for name in _WITH_TOKEN_IDS[endpoint]:
            if name in fields:
                fields[name] = pack_token_ids(fields[name]) or msgspec.json.decode(fields[name])
        return fields
    except msgspec.ValidationError:
        # It is JSON, but not an object; the types demand no more.
        is_list = body.lstrip().startswith(b"[")
        whole = msgspec.json.decode(body, type=list[msgspec.Raw] if is_list else Any)
        raise BadRequest("$", describe(whole), "the body must be an object") from None
    except (msgspec.DecodeError, UnicodeError):
        _FIELDS_DECODER.decode(body)  # names the place in the body, not in the field
        raise


def _around_ids(body: bytes, endpoint: Endpoint) -> dict[str, Any] | None:
    """The fields of a body whose first list is its token ids: they are packed first, and the rest
    is read without them, since a parser takes as long to skip them. None for any other body."""
    start, end = _first_list(body)
    ids = pack_token_ids(body[start:end]) if end else None
    if not ids:
        return None
    # In place of the ids: a list that no body has, and that is no JSON inside of a string.
    rest = body[:start] + _TAKEN_OUT + body[end:]
    try:
        fields = _present(_PACKING_DECODERS[endpoint].decode(rest))
    except msgspec.DecodeError:
        return None
    holding = [name for name in _WITH_TOKEN_IDS[endpoint] if name in fields]
    if [bytes(fields[name]) for name in holding] != [_TAKEN_OUT] or rest.count(_TAKEN_OUT) != 1:
        return None
    fields[holding[0]] = ids
    return fields


def _present(found: Any) -> dict[str, Any]:
    values = astuple(found)
    is_there = map(is_not, values, repeat(msgspec.UNSET))
    return dict(compress(zip(FIELD_NAMES, values, strict=True), is_there))


def _fault(body: bytes, error: Exception) -> str:
    """Return the error in JSON, where the decoder's own message would mislead."""
    if isinstance(error, UnicodeError):
        return "not UTF-8"
    text = str(error)
    if not body.strip():
        return "an empty body"
    # The decoder has another message where the body ends before the other half could follow, and
    # where it skips the string.
    at = int(place[1]) if (place := _PLACE.search(text)) else len(body)
    if "surrogate" in text or _HIGH_SURROGATE.search(body[max(at - 16, 0) : at + 8]):
        return "half of a surrogate pair in an escape, which is no character"
    return text
