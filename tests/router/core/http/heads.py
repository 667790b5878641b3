"""Heads for tests, and what is expected of them."""

from __future__ import annotations

from typing import Any

from router import _core as core

MALFORMED = (400, "malformed_http", "request: not a well-formed HTTP/1.1 request")


def read_request(data: bytes, **bounds: int) -> dict[str, Any]:
    """The head of a request that is whole."""
    head = core.read_request_head(data, **bounds)
    assert isinstance(head, dict), head
    return head


def read_response(data: bytes, is_of_head_request: bool = False) -> dict[str, Any]:
    """The head of a response that is whole."""
    head = core.read_response_head(data, is_of_head_request)
    assert isinstance(head, dict), head
    return head


def post(*lines: bytes) -> bytes:
    """The head of a request with a host, and these lines."""
    return b"\r\n".join((b"POST /x HTTP/1.1", b"host: a", *lines, b"", b""))


def response(*lines: bytes, first: bytes = b"HTTP/1.1 200 OK") -> bytes:
    """The head of a response."""
    return b"\r\n".join((first, *lines, b"", b""))
