"""Writes the number by which an engine orders its queue into the header or the field that it reads.

vLLM reads a header at three paths, and elsewhere a field of the body; SGLang the field everywhere.
At other paths, as `/v1/messages`, neither reads one.
"""

from __future__ import annotations

from router.prompt.body.splicing import with_field
from router.prompt.endpoints import FORMS, Endpoint

PRIORITY_HEADER = b"x-vllm-priority"
"""vLLM reads it before it reads `priority` of the body."""
PRIORITY_FIELD = "priority"


def with_priority(
    body: bytes, endpoint: Endpoint, number: int, reads_header: bool
) -> tuple[tuple[tuple[bytes, bytes], ...], bytes]:
    """Return the header and the body that give an engine a number; the same body, and no header,
    where it would not read them.

    Args:
        body: A JSON object that was parsed before.
        number: In 64 bits.
        reads_header: True if the engine reads vLLM's header.
    """
    place = FORMS[endpoint].priority_in
    if reads_header and place == "header":
        return ((PRIORITY_HEADER, b"%d" % number),), body
    if place is not None:
        return (), with_field(body, PRIORITY_FIELD, b"%d" % number)
    return (), body
