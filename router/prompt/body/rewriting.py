"""Changes a body before it is sent on.

It takes `kv_cache_report_mode` out. Any client can send `vllm_xargs: {"kv_cache_report_mode":
"full"}`, or the same to `/inference/v1/generate` in `sampling_params: {"extra_args": ...}`. The
engine then announces every block of a hit again, even blocks that do not exist, which corrupts the
index's counts for all clients.

It puts a tenant's salt in, so that the tenant's cached blocks are found for that tenant only.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from typing import Any

import msgspec

from kvevents.errors import UNREADABLE
from router.prompt.body.json_fields import encode_json
from router.prompt.errors import RequestBodyError, describe
from router.prompt.prompts import PromptSpec

ARGUMENTS_FIELD = "vllm_xargs"
SAMPLING_FIELD = "sampling_params"
EXTRA_FIELD = "extra_args"
_REPORT_MODE = "kv_cache_report_mode"

# The key in plain letters, or an escape that could spell one of its letters: a-z are U+0061 to
# U+007A, _ is U+005F. Text outside ASCII is escaped with other numbers, so that bodies full of it
# do not come this way.
_SUSPICIOUS = re.compile(rb"kv_cache_report_mode|\\u00(?:[67][0-9a-fA-F]|5[fF])")

_RAW_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])


class _Pairs(list[tuple[str, Any]]):
    """An object as its pairs in order, so that repeated names stay visible; a JSON list is a plain
    list."""


def strip_report_mode(body: bytes, spec: PromptSpec) -> bytes:
    """Return the body without the report mode; the same object if it has none.

    Otherwise all other fields keep their bytes, except that repeated names collapse to their last
    value, the one that the engine's own parser uses.

    Args:
        body: The JSON body that *spec* was parsed from.
        spec: From `parse_request`.
    """
    if not spec.has_engine_arguments or not _SUSPICIOUS.search(body):
        return body
    if not any(_asks_for_report_mode(arguments) for arguments in _occurrences(body)):
        return body
    return _without_report_mode(body)


def _occurrences(body: bytes) -> list[Any]:
    """Return all values of a field, overridden ones too."""
    try:
        pairs = json.loads(body, object_pairs_hook=_Pairs)
    except RecursionError:
        raise RequestBodyError("$", "nested too deep", "must be nested less deep") from None
    except ValueError as error:
        # In a field that routing skips; the engine reads it.
        found = "not UTF-8" if isinstance(error, UnicodeError) else "malformed"
        raise RequestBodyError("$", found, "the body must be valid json") from None
    inner = [
        pair
        for name, value in pairs
        if name == SAMPLING_FIELD and isinstance(value, _Pairs)
        for pair in value
    ]
    outer = [value for name, value in pairs if name == ARGUMENTS_FIELD]
    return outer + [value for name, value in inner if name == EXTRA_FIELD]


def _asks_for_report_mode(arguments: object) -> bool:
    return isinstance(arguments, _Pairs) and any(name == _REPORT_MODE for name, _ in arguments)


def _without_report_mode(body: bytes) -> bytes:
    fields: dict[str, Any] = dict(_RAW_FIELDS.decode(body))
    _strip(fields, ARGUMENTS_FIELD)
    if (sampling := _object(fields.get(SAMPLING_FIELD))) is not None:
        _strip(sampling, EXTRA_FIELD)
        fields[SAMPLING_FIELD] = sampling
    return encode_json(fields)


def _strip(fields: dict[str, Any], name: str) -> None:
    """Take the report mode out of the object that *name* holds, if it does."""
    if (arguments := _object(fields.get(name))) is not None:
        arguments.pop(_REPORT_MODE, None)
        fields[name] = arguments


def _object(raw: Any) -> dict[str, Any] | None:
    """Return the fields of an object, undecoded; None for any other value."""
    is_object = raw is not None and bytes(raw).lstrip().startswith(b"{")
    return dict(_RAW_FIELDS.decode(raw)) if is_object else None


# --- a tenant's salt ------------------------------------------------------------------------------


SALT_FIELD = "cache_salt"
_SALT_RULE = "must be a string that is not empty, or a list of such strings"


def tenant_salt_of(tenant_salt: bytes, own: str | None) -> str:
    """The salt for a request: made of the tenant's, and of the request's own if it has one.

    Args:
        tenant_salt: The same for all whose prompts may share cached blocks.
    """
    # A tenant's salt has no zero byte, so no two pairs are the same text.
    text = tenant_salt + b"\0" + (own or "").encode("utf-8", "surrogatepass")
    return hashlib.sha256(text).hexdigest()


def with_tenant_salt(
    body: bytes, tenant_salt: bytes, names: Sequence[str] = (SALT_FIELD,)
) -> bytes:
    """Return a JSON body with a salt made of the tenant's and its own, if it has one.

    Args:
        names: The fields that engines read a salt from at this path.
    Raises:
        RequestBodyError: It is not a JSON object, or its own salt breaks the rule: an engine may
            ignore it.
    """
    try:
        fields: dict[str, Any] = dict(_RAW_FIELDS.decode(body))
        own = {name: msgspec.json.decode(fields[name]) for name in names if name in fields}
    except UNREADABLE:
        raise RequestBodyError("$", f"{len(body)} bytes", "must be a JSON object") from None
    salts = {name: _salted(tenant_salt, own.get(name), name) for name in names}
    if own:
        return encode_json({**fields, **salts})
    # The other fields keep their bytes, so the usual body costs no time.
    start = body.rstrip()[:-1]
    return b"%b%b%b" % (start, b"," if fields else b"", msgspec.json.encode(salts)[1:])


def _salted(tenant_salt: bytes, own: object, name: str) -> str | list[str]:
    if isinstance(own, list) and own and all(isinstance(item, str) and item for item in own):
        return [tenant_salt_of(tenant_salt, item) for item in own]
    if own is None or (isinstance(own, str) and own):
        return tenant_salt_of(tenant_salt, own)
    raise RequestBodyError(f"$.{name}", describe(own), _SALT_RULE)
