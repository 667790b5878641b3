"""What the router changes in a body before it is sent on.

It takes `kv_cache_report_mode` out. Any client can send `vllm_xargs: {"kv_cache_report_mode":
"full"}`. The engine then announces every block of a hit again, even blocks that do not exist, which
corrupts the index's counts for all clients.

It puts a tenant's salt in, so that the tenant's cached blocks are found for that tenant only.
"""

from __future__ import annotations

import hashlib
import json
import re
from typing import Any

import msgspec

from router.tokenize.body.json_fields import encode_json
from router.tokenize.errors import RequestBodyError
from router.tokenize.prompts import PromptSpec

ARGUMENTS_FIELD = "vllm_xargs"
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
        spec: What `parse_request` made of it.
    """
    if not spec.has_engine_arguments or not _SUSPICIOUS.search(body):
        return body
    if not any(_asks_for_report_mode(arguments) for arguments in _occurrences(body)):
        return body
    return _without_report_mode(body)


def _occurrences(body: bytes) -> list[Any]:
    """Every value of the field in the body, including those that a later one overrides."""
    try:
        pairs = json.loads(body, object_pairs_hook=_Pairs)
    except RecursionError:
        raise RequestBodyError("$", "nested too deep", "must be nested less deep") from None
    except ValueError as error:
        # In a field that routing skips; the engine reads it.
        found = "not UTF-8" if isinstance(error, UnicodeError) else "malformed"
        raise RequestBodyError("$", found, "the body must be valid json") from None
    return [value for name, value in pairs if name == ARGUMENTS_FIELD]


def _asks_for_report_mode(arguments: object) -> bool:
    return isinstance(arguments, _Pairs) and any(name == _REPORT_MODE for name, _ in arguments)


def _without_report_mode(body: bytes) -> bytes:
    fields: dict[str, Any] = dict(_RAW_FIELDS.decode(body))
    arguments = bytes(fields[ARGUMENTS_FIELD])
    if arguments.lstrip().startswith(b"{"):
        kept: dict[str, Any] = dict(_RAW_FIELDS.decode(arguments))
        kept.pop(_REPORT_MODE, None)
        fields[ARGUMENTS_FIELD] = kept
    return encode_json(fields)


# --- a tenant's salt ------------------------------------------------------------------------------


_SALT_FIELD = "cache_salt"


class _OnlySalt(msgspec.Struct):
    cache_salt: Any = None


def with_tenant_salt(body: bytes, tenant_salt: bytes) -> bytes:
    """Return a JSON body with a `cache_salt` made of the tenant's and, if it has one, its own.

    The field is put at the end, where it wins over one of the client's: parsers of JSON take the
    last of equal names. What is not an object stays as it is, to be refused.

    Args:
        body: As the client sent it.
        tenant_salt: The same for all whose prompts may share cached blocks.
    """
    text = body.strip()
    if text[:1] != b"{" or text[-1:] != b"}":
        return body
    try:
        own = msgspec.json.decode(text, type=_OnlySalt).cache_salt
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return body
    if own is not None and not (isinstance(own, str) and own):
        return body  # not what the field may be: to be refused
    fields = text[:-1].rstrip()
    separator = b"" if fields == b"{" else b","
    return b'%b%b"%b":"%b"}' % (
        fields,
        separator,
        _SALT_FIELD.encode(),
        _combined(tenant_salt, own),
    )


def _combined(tenant_salt: bytes, own: str | None) -> bytes:
    # A tenant's salt has no zero byte, so no two pairs are the same text.
    text = tenant_salt + b"\0" + (own or "").encode("utf-8", "surrogatepass")
    return hashlib.sha256(text).hexdigest().encode()
