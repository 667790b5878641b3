"""The id of a response is read from its first bytes, however they are cut."""

from __future__ import annotations

import pytest

from router.plane.usage import MAX_ID_BYTES, ResponseIdReader

JSON = b'{"id":"resp_1","object":"response","output":[]}'
EVENTS = (
    b"event: response.created\n"
    b'data: {"response":{"id": "resp_1","tools":[]},"sequence_number":0}\n\n'
)


@pytest.mark.parametrize("body", [JSON, b' {\n "id" : "resp_1"}', EVENTS])
@pytest.mark.parametrize("size", [1, 7, 1000])
def test_the_id_is_found_once_wherever_the_body_is_cut(body: bytes, size: int) -> None:
    """It is learned before the client can use it."""
    reader = ResponseIdReader()
    found = [reader.feed(body[at : at + size]) for at in range(0, len(body), size)]
    assert [name for name in found if name] == ["resp_1"]


@pytest.mark.parametrize(
    "body",
    [
        b'{"error": {"id": "x"}}',
        b'{"text": "\\"response\\":{\\"id\\":\\"resp_2\\"}"}',
        b'{"id": 7}',
        b'{"id": "a b"}',
        b"x" * 2 * MAX_ID_BYTES + JSON,
        b"",
    ],
)
def test_what_is_no_id_is_not_taken_for_one(body: bytes) -> None:
    """Text that a model generates may look like anything."""
    reader = ResponseIdReader()
    assert [reader.feed(body[at : at + 1000]) for at in range(0, len(body), 1000)].count(None) == (
        len(range(0, len(body), 1000))
    )
