"""The bodies for two engines of which one computes the prompt: each is the client's, but for what
makes the two a pair."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.prompt.body.transfer_fields import for_prefiller, with_handed_over
from router.prompt.endpoints import FORMS, Endpoint

SPLIT = [
    endpoint
    for endpoint, form in FORMS.items()
    if form.may_split and endpoint is not Endpoint.ROUTE
]
VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
LIMITS = ["max_tokens", "max_completion_tokens", "max_output_tokens", "min_tokens"]
ASKS = {"do_remote_decode": True, "do_remote_prefill": False} | dict.fromkeys(
    ["remote_engine_id", "remote_block_ids", "remote_host", "remote_port"]
)


def objects(*names: str) -> st.SearchStrategy[dict[str, Any]]:
    return st.dictionaries(st.sampled_from(names) | st.text(), VALUES, max_size=6)


BODIES = st.builds(
    lambda body, transfer, sampling: body | {"model": "m"} | transfer | sampling,
    objects("stream", "stream_options", "store", "background", "prompt", *LIMITS),
    st.fixed_dictionaries({}, optional={"kv_transfer_params": objects("other", *ASKS)}),
    st.fixed_dictionaries({}, optional={"sampling_params": objects("n", *LIMITS)}),
)


@given(st.sampled_from(SPLIT), BODIES, st.sampled_from([None, 1]))
def test_the_prefiller_generates_one_token_for_nobody(
    endpoint: Endpoint, body: dict[str, Any], indent: int | None
) -> None:
    """At each path in the fields that its engine reads there; all else decides what the prompt is,
    and stays."""
    expected = {name: body[name] for name in body if name not in ("stream_options", "min_tokens")}
    expected["stream"] = False
    if endpoint is Endpoint.GENERATE:
        sampling = dict(body.get("sampling_params", {}))
        sampling.pop("min_tokens", None)
        expected["sampling_params"] = sampling | {"max_tokens": 1}
    elif endpoint is Endpoint.RESPONSES:
        expected.pop("background", None)
        expected |= {"max_output_tokens": 1, "store": False}
    else:
        expected["max_tokens"] = 1
    if endpoint is Endpoint.CHAT:
        expected["max_completion_tokens"] = 1
    expected["kv_transfer_params"] = body.get("kv_transfer_params", {}) | ASKS
    sent = for_prefiller(json.dumps(body, indent=indent).encode(), endpoint)
    assert json.loads(sent, object_pairs_hook=unrepeated) == expected


@given(BODIES, objects("other", "remote_block_ids", *ASKS))
def test_what_the_prefiller_says_is_passed_on_unread(
    body: dict[str, Any], handed_over: dict[str, Any]
) -> None:
    """Newer engines say more, and a client's own must not come between."""
    response = json.dumps({"id": "x", "kv_transfer_params": handed_over, "usage": {}}).encode()
    written = json.dumps(body).encode()
    sent = with_handed_over(written, response)
    if not handed_over:
        assert sent is written
        return
    expected = body | {"kv_transfer_params": body.get("kv_transfer_params", {}) | handed_over}
    assert json.loads(sent, object_pairs_hook=unrepeated) == expected


@pytest.mark.parametrize(
    "response",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xff",
        b'{"kv_transfer_params": null}',
        b'{"kv_transfer_params": {}}',
        b'{"kv_transfer_params": [1]}',
        b'{"usage": {}}',
        b"[" * 100_000,
    ],
)
def test_a_response_that_names_no_cache_leaves_the_request_as_it_is(response: bytes) -> None:
    """The engine computes the prompt, or finds it in a store."""
    body = b'{"prompt": "a"}'
    assert with_handed_over(body, response) is body


def unrepeated(members: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object in which no name stands twice: engines do not agree on which one counts."""
    found = dict(members)
    assert len(found) == len(members), members
    return found
