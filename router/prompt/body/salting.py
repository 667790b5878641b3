"""Puts a tenant's salt into a body, so that the tenant's cached blocks are found for that tenant
only."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import msgspec

from kvevents.errors import UNREADABLE
from router.errors import BadRequest
from router.prompt.body.json_fields import encode_json
from router.prompt.errors import describe

_RAW_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])
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
        BadRequest: It is not a JSON object, or its own salt breaks the rule: an engine may
            ignore it.
    """
    try:
        fields: dict[str, Any] = dict(_RAW_FIELDS.decode(body))
        own = {name: msgspec.json.decode(fields[name]) for name in names if name in fields}
    except UNREADABLE:
        raise BadRequest("$", f"{len(body)} bytes", "must be a JSON object") from None
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
    raise BadRequest(f"$.{name}", describe(own), _SALT_RULE)
