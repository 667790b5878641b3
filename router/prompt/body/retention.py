"""Writes retention hints into a request's body.

    kvroute    {"kv_transfer_params": {"kvroute": {"keep": [640, 1200], "keep_end": true}}}
    vLLM       {"vllm_xargs": {"kvroute_keep": [640, 1200], "kvroute_keep_end": 1}}

The second one is for vLLM's plug-in (`integrations/vllm`). The router owns these fields: its hints
are learned from the whole fleet, and a client that could give them would keep others from keeping
theirs. A client's are taken out; it names what it caches by `cache_control`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any

import msgspec

from router.prompt.body.pulling import SOURCE, TRANSFER_FIELD
from router.prompt.body.rewriting import ARGUMENTS_FIELD, EXTRA_FIELD, SAMPLING_FIELD
from router.prompt.body.splicing import with_changed, with_members, without_members
from router.prompt.endpoints import FORMS, Endpoint

_PLAIN = b"kvroute", SOURCE.encode()
_ESCAPE = b"\\u00"
"""The beginning of an escaped letter of a name in a string."""


class HintForm(Enum):
    """The form of hints to a replica; the value is the field of the body."""

    KVROUTE = TRANSFER_FIELD
    VLLM = ARGUMENTS_FIELD

    def is_read_at(self, endpoint: Endpoint) -> bool:
        """Return whether engines read the field in bodies of some path."""
        form = FORMS[endpoint]
        return form.reads_hints if self is HintForm.KVROUTE else form.reads_arguments


_NAMES = {
    HintForm.KVROUTE: ("kvroute",),
    HintForm.VLLM: ("kvroute_keep", "kvroute_keep_end"),
}


def with_hints(
    body: bytes, endpoint: Endpoint, form: HintForm, keep: Sequence[int], keep_end: bool
) -> bytes:
    """Return the body with hints; the same object where the engine reads none there.

    Args:
        body: A JSON object that was parsed before, without hints.
        keep: Lengths of prefixes in tokens.
        keep_end: True to keep the response as well.
    """
    if not form.is_read_at(endpoint) or not (keep or keep_end):
        return body
    hints: Mapping[str, Any]
    if form is HintForm.KVROUTE:
        hints = {"kvroute": {"keep": keep} | ({"keep_end": True} if keep_end else {})}
    else:
        hints = {"kvroute_keep": keep} | ({"kvroute_keep_end": 1} if keep_end else {})
    return with_members(body, form.value, msgspec.json.encode(hints))


def strip_hints(body: bytes) -> bytes:
    """Return the body without hints, and without a peer to pull from; the same object if it has
    neither.

    Args:
        body: A JSON object that was parsed before.
    """
    if not any(name in body for name in (*_PLAIN, _ESCAPE)):
        return body
    for form, names in _NAMES.items():
        body = without_members(body, form.value, names)
    body = without_members(body, TRANSFER_FIELD, (SOURCE,))
    vllm = _NAMES[HintForm.VLLM]
    return with_changed(
        body,
        SAMPLING_FIELD,
        lambda value: without_members(value, EXTRA_FIELD, vllm) if value[:1] == b"{" else value,
    )
