"""The fields of a body by which the router tells engines something: it writes them in, and takes a
client's own out.

    retention  {"kv_transfer_params": {"kvroute": {"keep": [640, 1200], "keep_end": true}}}
    in vLLM    {"vllm_xargs": {"kvroute_keep": [640, 1200], "kvroute_keep_end": 1}}
    pulling    {"kv_transfer_params": {"remote_kv_source": {"kv_request_id": "...",
                                                            "remote_host": "10.0.0.5",
                                                            "remote_port": 7777}}}
    priority   {"priority": 12}

Hints are learned from the whole fleet, and a client that could give them would keep others from
keeping theirs; it names what it caches by `cache_control`. Those in vLLM's form are for its plug-in
(`integrations/vllm`). The peer to pull from has the form of vLLM 0.33 with a `p2p` tier; an engine
connects to any address that it names. The number by which an engine orders its queue vLLM reads
from a header at three paths, and elsewhere from the body; SGLang always from the body. At other
paths, as `/v1/messages`, neither reads one.

One more is only taken out, `vllm_xargs: {"kv_cache_report_mode": "full"}`: the engine would
announce every block of a hit again, even blocks that do not exist, which corrupts the index's
counts for all clients. What stands in `vllm_xargs` may stand in `sampling_params: {"extra_args":
...}` of `/inference/v1/generate` as well. Forms of `/v1/audio/*` have `vllm_xargs` as text.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any
from uuid import uuid4

import msgspec

from router.prompt.body.splicing import (
    Change,
    with_changed,
    with_field,
    with_members,
    without_fields,
)
from router.prompt.endpoints import FORMS, Endpoint

PRIORITY_HEADER = b"x-vllm-priority"
"""vLLM reads it before it reads `priority` of the body."""
PRIORITY_FIELD = "priority"
ARGUMENTS_FIELD = "vllm_xargs"
SAMPLING_FIELD = "sampling_params"
TRANSFER_FIELD = "kv_transfer_params"
_EXTRA_FIELD = "extra_args"
_SOURCE = "remote_kv_source"
_KVROUTE = "kvroute"
_KEEP, _KEEP_END = "kvroute_keep", "kvroute_keep_end"
_REPORT_MODE = "kv_cache_report_mode"
_ESCAPE = re.compile(rb"\\u00(?:[67][0-9a-fA-F]|5[fF])")
"""Finds escapes that could spell a letter of these names: a-z are U+0061 to U+007A, _ is U+005F.
Text outside ASCII is escaped with other numbers, so bodies full of it are not searched."""


class HintForm(Enum):
    """The form of hints to a replica; the value is the field of the body."""

    KVROUTE = TRANSFER_FIELD
    VLLM = ARGUMENTS_FIELD

    def is_read_at(self, endpoint: Endpoint) -> bool:
        """Return whether engines read the field in bodies of some path."""
        form = FORMS[endpoint]
        return form.reads_hints if self is HintForm.KVROUTE else form.reads_arguments


# --- written in: the body is a JSON object that was parsed before, without a client's own ---------


def with_hints(
    body: bytes, endpoint: Endpoint, form: HintForm, keep: Sequence[int], keep_end: bool
) -> bytes:
    """Return the body with hints; the same object where the engine reads none there.

    Args:
        keep: Lengths of prefixes in tokens.
        keep_end: True to keep the response as well.
    """
    if not form.is_read_at(endpoint) or not (keep or keep_end):
        return body
    hints: Mapping[str, Any]
    if form is HintForm.KVROUTE:
        hints = {_KVROUTE: {"keep": keep} | ({"keep_end": True} if keep_end else {})}
    else:
        hints = {_KEEP: keep} | ({_KEEP_END: 1} if keep_end else {})
    return with_members(body, form.value, msgspec.json.encode(hints))


def with_source(body: bytes, host: str, port: int) -> bytes:
    """Return the body with the peer to pull from, for an endpoint that `may_pull`."""
    source = {"kv_request_id": uuid4().hex, "remote_host": host, "remote_port": port}
    return with_members(body, TRANSFER_FIELD, msgspec.json.encode({_SOURCE: source}))


def with_priority(
    body: bytes, endpoint: Endpoint, number: int, reads_header: bool
) -> tuple[tuple[tuple[bytes, bytes], ...], bytes]:
    """Return the header and the body that give an engine a number; the same body, and no header,
    where it would not read them.

    Args:
        number: In 64 bits.
        reads_header: True if the engine reads vLLM's header.
    """
    place = FORMS[endpoint].priority_in
    if reads_header and place == "header":
        return ((PRIORITY_HEADER, b"%d" % number),), body
    if place is not None:
        return (), with_field(body, PRIORITY_FIELD, b"%d" % number)
    return (), body


# --- taken out: the same object comes back if there is nothing to take ----------------------------


def strip_report_mode(body: bytes) -> bytes:
    """Return the body without the report mode.

    Args:
        body: A JSON object that was parsed before; likewise below.
    """
    if not _may_name(body, _REPORT_MODE):
        return body
    return with_changed(body, _of_arguments(_without(_REPORT_MODE)))


def strip_hints(body: bytes) -> bytes:
    """Return the body without hints, and without a peer to pull from."""
    if not _may_name(body, _KVROUTE, _SOURCE):
        return body
    changes = {TRANSFER_FIELD: _without(_KVROUTE, _SOURCE)}
    return with_changed(body, changes | _of_arguments(_without(_KEEP, _KEEP_END)))


def strip_form(form: bytes) -> bytes:
    """Return a multipart form in which no field of JSON names the report mode, hints or a peer,
    wherever and however it is spelled: other readers may find fields that this one does not.

    Args:
        form: With media of many megabytes, in which these names do not appear.
    """
    if not _may_name(form, _REPORT_MODE, _KVROUTE, _SOURCE):
        return form
    return _OWNED_NAMES.sub(_OTHER_NAME, form)


def _spellings(name: str) -> bytes:
    """Return a pattern of a name in JSON, where each letter may be escaped."""
    return b"".join(rb"(?:%c|\\u00(?i:%02x))" % (letter, letter) for letter in name.encode())


_OWNED_NAMES = re.compile(b"|".join(map(_spellings, (_REPORT_MODE, _KEEP, _SOURCE))))
_OTHER_NAME = b"not_for_clients"


def _may_name(body: bytes, *names: str) -> bool:
    """Return whether one of the names may be in the body, however it is spelled."""
    return any(name.encode() in body for name in names) or _ESCAPE.search(body) is not None


def _without(*names: str) -> Change:
    """Takes some members out of a field that is an object."""
    return lambda value: without_fields(value, *names) if value[:1] == b"{" else value


def _of_arguments(change: Change) -> dict[str, Change]:
    """The changes of a body that change the engine's own arguments, in both places."""
    extra = {_EXTRA_FIELD: change}
    return {
        ARGUMENTS_FIELD: change,
        SAMPLING_FIELD: lambda value: with_changed(value, extra) if value[:1] == b"{" else value,
    }
