"""The bytes of a request's head."""

from __future__ import annotations

from collections.abc import Sequence

from router.upstream.origin import Origin

# An answer to HEAD has no body whatever its headers say, and CONNECT makes a tunnel: the parser is
# told of neither.
_UNSUPPORTED = frozenset((b"HEAD", b"CONNECT"))
# RFC 9110 8.6: methods that define a meaning for content send a length even when it is 0.
_WITH_CONTENT = frozenset((b"POST", b"PUT", b"PATCH"))


def request_head(
    origin: Origin,
    method: bytes,
    target: bytes,
    headers: Sequence[tuple[bytes, bytes]],
    body_bytes: int,
) -> bytes:
    """Request line and headers, up to and with the blank line.

    Raises:
        ValueError: A line break or a NUL in a part, white space in the target, or a method this
            client does not speak.
    """
    lines = [
        b"%b %b%b HTTP/1.1\r\nhost: %b" % (method, origin.target_prefix, target, origin.host_header)
    ]
    lines += [b"%b: %b" % (name, value) for name, value in headers]
    if body_bytes or method in _WITH_CONTENT:
        lines.append(b"content-length: %d" % body_bytes)
    lines.append(b"\r\n")
    head = b"\r\n".join(lines)
    # Every part is one line, so any other number of line breaks means that one was smuggled in.
    breaks = len(lines) + 1
    if head.count(b"\n") != breaks or head.count(b"\r") != breaks or b"\0" in head:
        raise ValueError(
            "request head: method, target and headers must hold no line break and no NUL"
        )
    if b" " in target or method in _UNSUPPORTED:
        raise ValueError(
            f"request head: a target must hold no space, and method {method!r} must be a plain one"
        )
    return head
