"""One field of a multipart form, as audio is sent in. The form itself goes to the replica as it
is."""

from __future__ import annotations

import re

MAX_PARTS = 256
MAX_PART_HEAD_BYTES = 8192
MAX_VALUE_BYTES = 1024
_STEP_BYTES = 1024 * 1024
"""Searched at a time: other threads get their turn in between."""

_BOUNDARY = re.compile(rb"""boundary\s*=\s*(?:"([^"]{1,200})"|([^\s;,"]{1,200}))""", re.IGNORECASE)
_NAME = re.compile(
    rb"""^content-disposition\s*:[^\r\n]*?;\s*name\s*=\s*(?:"([^"\r\n]*)"|([^\s;"]+))""",
    re.IGNORECASE | re.MULTILINE,
)


def is_form(content_type: bytes) -> bool:
    """Whether a body of this type is a multipart form."""
    return content_type.lstrip()[:19].lower() == b"multipart/form-data"


def form_field(content_type: bytes, body: bytes, name: bytes) -> str | None:
    """The value of a short field; None if the form has none that can be read.

    Args:
        content_type: The header, which names the boundary between parts.
        body: The whole form.
        name: The field.
    """
    found = _BOUNDARY.search(content_type)
    if found is None:
        return None
    delimiter = b"--" + (found[1] or found[2])
    at = _find(body, delimiter, 0)
    for _ in range(MAX_PARTS):
        if at < 0:
            return None
        start = at + len(delimiter)
        head_end = body.find(b"\r\n\r\n", start, start + MAX_PART_HEAD_BYTES)
        if head_end < 0:
            return None
        disposition = _NAME.search(body[start:head_end])
        at = _find(body, b"\r\n" + delimiter, head_end + 2)
        if disposition is not None and (disposition[1] or disposition[2]) == name and at >= 0:
            value = body[head_end + 4 : min(at, head_end + 4 + MAX_VALUE_BYTES)]
            return value.decode("utf-8", "replace").strip()
        at += 2 if at >= 0 else 0
    return None


def _find(body: bytes, needle: bytes, start: int) -> int:
    """As `bytes.find`, but in steps."""
    while start < len(body):
        found = body.find(needle, start, start + _STEP_BYTES + len(needle))
        if found >= 0:
            return found
        start += _STEP_BYTES
    return -1
