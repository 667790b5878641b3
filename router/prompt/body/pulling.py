"""Writes into a request's body the peer that an engine is to pull a prefix from.

    {"kv_transfer_params": {"remote_kv_source": {"kv_request_id": "...", "remote_host": "10.0.0.5",
                                                 "remote_port": 7777}}}

The form is that of vLLM 0.33 with a `p2p` tier. The router owns the field: an engine connects to
any address that it names, so a client's is taken out.
"""

from __future__ import annotations

from uuid import uuid4

import msgspec

from router.prompt.body.splicing import with_members

TRANSFER_FIELD = "kv_transfer_params"
SOURCE = "remote_kv_source"


def with_source(body: bytes, host: str, port: int) -> bytes:
    """Return the body with the peer to pull from.

    Args:
        body: A JSON object that was parsed before, without such a field, for an endpoint that
            `may_pull`.
    """
    source = {"kv_request_id": uuid4().hex, "remote_host": host, "remote_port": port}
    return with_members(body, TRANSFER_FIELD, msgspec.json.encode({SOURCE: source}))
