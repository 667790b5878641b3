"""The bodies of a request whose prompt is computed by another engine than its response.

    prefiller  {..., "max_tokens": 1, "stream": false,
                "kv_transfer_params": {"do_remote_decode": true, "do_remote_prefill": false}}
    it answers {..., "kv_transfer_params": {"do_remote_prefill": true, "remote_host": "...", ...}}
    then       the request as it was, with that object

That is what vLLM's `NixlConnector` reads and writes (0.33, `kv_connector/v1/nixl`). An engine that
shares a store with the prefiller answers without the object: it finds the cache by its content.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from router.prompt.body.owned_fields import SAMPLING_FIELD, TRANSFER_FIELD
from router.prompt.body.splicing import (
    with_changed,
    with_field,
    with_members,
    without_fields,
)
from router.prompt.endpoints import Endpoint

_ASKS = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
"""Without the nulls, some versions fail."""
_LIMITS = {
    Endpoint.CHAT: ("max_tokens", "max_completion_tokens"),
    Endpoint.COMPLETIONS: ("max_tokens",),
    Endpoint.MESSAGES: ("max_tokens",),
    Endpoint.RESPONSES: ("max_output_tokens",),
}
"""The fields that bound what is generated; elsewhere it is one of `sampling_params`."""
_LIMIT, _LEAST = "max_tokens", "min_tokens"


class _Response(msgspec.Struct):
    kv_transfer_params: dict[str, msgspec.Raw] | None = None


def for_prefiller(body: bytes, endpoint: Endpoint) -> bytes:
    """Return the body for the engine that computes the prompt, and one token, which nobody gets.

    Args:
        body: A JSON object that was parsed before, and is not empty; likewise below.
    """
    body = with_field(without_fields(body, "stream_options", _LEAST), "stream", b"false")
    for name in _LIMITS.get(endpoint, ()):
        body = with_field(body, name, b"1")
    if endpoint is Endpoint.GENERATE:
        body = _with_members(body, SAMPLING_FIELD, {_LIMIT: 1}, _LEAST)
    if endpoint is Endpoint.RESPONSES:  # else it may answer before it has computed, and keep it
        body = with_field(without_fields(body, "background"), "store", b"false")
    return _with_members(body, TRANSFER_FIELD, _ASKS)


def with_handed_over(body: bytes, response: bytes) -> bytes:
    """Return the body for the engine that responds.

    Args:
        response: The prefiller's. The same body comes back where it does not say how to get its
            cache.
    """
    try:
        handed_over = msgspec.json.decode(response, type=_Response).kv_transfer_params
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return body
    return _with_members(body, TRANSFER_FIELD, handed_over) if handed_over else body


def _with_members(body: bytes, name: str, members: Mapping[str, object], *gone: str) -> bytes:
    """Return the body with members of a field that is an object, in place of those that it has of
    these names, and without some others."""

    def without(value: bytes) -> bytes:
        return without_fields(value, *members, *gone) if value[:1] == b"{" else value

    return with_members(with_changed(body, {name: without}), name, msgspec.json.encode(members))
