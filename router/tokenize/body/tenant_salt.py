"""Putting a tenant's salt into a body, so that its cached blocks are found for that tenant only."""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec

_FIELD = "cache_salt"


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
    return b'%b%b"%b":"%b"}' % (fields, separator, _FIELD.encode(), _combined(tenant_salt, own))


def _combined(tenant_salt: bytes, own: str | None) -> bytes:
    # A tenant's salt has no zero byte, so no two pairs are the same text.
    text = tenant_salt + b"\0" + (own or "").encode("utf-8", "surrogatepass")
    return hashlib.sha256(text).hexdigest().encode()
