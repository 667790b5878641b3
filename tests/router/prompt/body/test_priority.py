"""The number by which an engine orders what waits: in the header or the body, never beside a
client's own."""

from __future__ import annotations

import json

import pytest

from router.prompt.body.owned_fields import with_priority
from router.prompt.endpoints import Endpoint

BODY = b' {"prompt": [1, 2],  "priority": -9, "priority":7 , "x": {"priority": 1}}'
BARE = b'{ "input": "a"}'


@pytest.mark.parametrize("endpoint", [Endpoint.CHAT, Endpoint.COMPLETIONS, Endpoint.RESPONSES])
def test_vllm_reads_a_header_and_the_body_stays(endpoint: Endpoint) -> None:
    """It reads the header before the body's field."""
    found = with_priority(BODY, endpoint, 12, reads_header=True)
    assert found == (((b"x-vllm-priority", b"12"),), BODY)
    assert found[1] is BODY


@pytest.mark.parametrize(
    ("endpoint", "reads_header"),
    [(Endpoint.CHAT, False), (Endpoint.EMBEDDINGS, True), (Endpoint.GENERATE, True)],
)
def test_elsewhere_the_field_is_set_in_place_of_the_client_s(
    endpoint: Endpoint, reads_header: bool
) -> None:
    """Parsers disagree on which of two counts, so both change; all other bytes stay."""
    headers, body = with_priority(BODY, endpoint, -12, reads_header)
    assert headers == ()
    assert body == b' {"prompt": [1, 2],  "priority": -12, "priority":-12, "x": {"priority": 1}}'
    _, added = with_priority(BARE, endpoint, 5, reads_header)
    assert json.loads(added) == {"priority": 5, "input": "a"}


def test_where_engines_read_none_nothing_changes() -> None:
    """A field that an engine does not know may be refused."""
    for endpoint in (Endpoint.MESSAGES, Endpoint.CHAT_BATCH):
        for reads_header in (True, False):
            assert with_priority(BODY, endpoint, 5, reads_header) == ((), BODY)
