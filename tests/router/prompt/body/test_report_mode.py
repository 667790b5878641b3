"""`kv_cache_report_mode` does not get through, however it is spelled, and nothing else
changes."""

from __future__ import annotations

import json
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.errors import BadRequest
from router.prompt.body.requests import read_request
from router.prompt.endpoints import Endpoint

_KEY = "kv_cache_report_mode"


def _strip(body: bytes, endpoint: Endpoint = Endpoint.COMPLETIONS) -> bytes:
    _, sent = read_request(body, endpoint, "json")
    return body if sent is None else sent


@pytest.mark.parametrize(
    "arguments",
    [
        b'{"kv_cache_report_mode": "full"}',
        b'{"kv_cache_report_mode": "incremental"}',
        b'{"kv_cache_report_mode": null}',
        b'{"kv_cache_report_mode": ["full"]}',
        b'{"kv_cache_report_\\u006dode": "full"}',
        b'{"\\u006Bv\\u005fcache\\u005Freport_mode": "full"}',
        b'{"kv_cache_report_mode": "x", "kv_cache_report_mode": "full"}',
    ],
)
@pytest.mark.parametrize("name", [b"vllm_xargs", b"vllm\\u005fxargs", b"\\u0076llm_xargs"])
def test_the_key_is_taken_out_however_it_is_spelled(name: bytes, arguments: bytes) -> None:
    """JSON has many spellings for one key, and an engine reads them all."""
    stripped = _strip(b'{"prompt": "a", "' + name + b'": ' + arguments + b"}")
    assert json.loads(stripped) == {"prompt": "a", "vllm_xargs": {}}


@pytest.mark.parametrize("spelled", ["{:04x}", "{:04X}"])
@pytest.mark.parametrize("at", range(len(_KEY)))
def test_any_letter_of_the_key_may_be_the_escaped_one(at: int, spelled: str) -> None:
    """A single one hides the key from a search for its plain letters."""
    name = f"{_KEY[:at]}\\u{spelled.format(ord(_KEY[at]))}{_KEY[at + 1 :]}"
    stripped = _strip(f'{{"prompt": "a", "vllm_xargs": {{"{name}": "full"}}}}'.encode())
    assert json.loads(stripped) == {"prompt": "a", "vllm_xargs": {}}


@pytest.mark.parametrize(
    "sampling",
    [
        b'{"extra_args": {"kv_cache_report_mode": "full"}}',
        b'{"\\u0065xtra_args": {"kv_cache_report_\\u006dode": "full"}}',
        b'{"extra_args": {}, "extra_args": {"kv_cache_report_mode": "full"}}',
        b'{"extra_args": {"kv_cache_report_mode": "full"}, "extra_args": {}}',
    ],
)
def test_the_key_is_taken_out_of_sampling_parameters(sampling: bytes) -> None:
    """vLLM's /inference/v1/generate takes them as the engine has them."""
    body = b'{"token_ids": [1], "sampling_params": ' + sampling + b"}"
    stripped = _strip(body, Endpoint.GENERATE)
    assert json.loads(stripped) == {"token_ids": [1], "sampling_params": {"extra_args": {}}}


@pytest.mark.parametrize(
    "arguments",
    [
        [b"{}", b'{"kv_cache_report_mode": "full"}'],
        [b'{"kv_cache_report_mode": "full"}', b"{}"],
        [b'{"kv_cache_report_mode": "full"}', b"null"],
        [b'{"kv_cache_report_mode": "full"}', b'{"kv_cache_report_mode": "full"}'],
    ],
)
def test_a_repeated_field_hides_nothing(arguments: list[bytes]) -> None:
    """Parsers differ in which of two equal names they believe."""
    fields = b", ".join(b'"vllm_xargs": ' + value for value in arguments)
    assert _KEY.encode() not in _strip(b'{"prompt": "a", ' + fields + b"}")


@pytest.mark.parametrize(
    "body",
    [
        b'{"prompt": "a"}',
        b'{"prompt": "a", "vllm_xargs": {"other": 1}}',
        b'{"prompt": "a", "vllm_xargs": null}',
        b'{"prompt": "kv_cache_report_mode", "vllm_xargs": {"other": "kv_cache_report_mode"}}',
        b'{"prompt": "a", "kv_cache_report_mode": "full"}',
        b'{"prompt": "\\u006b", "vllm_xargs": ["kv_cache_report_mode"]}',
        b'{"prompt": "a", "vllm_xargs": {"deeper": {"kv_cache_report_mode": "full"}}}',
    ],
)
def test_a_body_without_the_key_is_the_same_object(body: bytes) -> None:
    """What is not touched cannot be broken, and costs nothing."""
    assert _strip(body) is body


def test_other_fields_keep_their_bytes() -> None:
    """A number like 1.50 or an escaped character reaches the engine as the client wrote it."""
    body = (
        b'{"temperature": 1.50, "prompt": "\\u00e9\\ud83d\\ude00 \\/",'
        b' "seed": 123456789012345678901234567890, "vllm_xargs": {"a": 1e2, '
        b'"kv_cache_report_mode": "full", "b": [1.0]}, "n":1}'
    )
    stripped = _strip(body)
    for kept in (
        b"1.50",
        b'"\\u00e9\\ud83d\\ude00 \\/"',
        b"123456789012345678901234567890",
        b"1e2",
        b"[1.0]",
    ):
        assert kept in stripped
    expected = json.loads(body)
    del expected["vllm_xargs"][_KEY]
    assert json.loads(stripped) == expected


@given(
    st.dictionaries(st.text(max_size=4), st.integers() | st.text(max_size=4), max_size=4),
    st.dictionaries(st.sampled_from(["a", "b", _KEY]), st.text(max_size=4), max_size=3),
    st.booleans(),
)
def test_only_the_key_is_missing_afterwards(
    fields: dict[str, object], arguments: dict[str, str], ascii_only: bool
) -> None:
    """For any body, with text outside ASCII escaped or not."""
    body = {
        **fields,
        "prompt": "é",
        "cache_salt": None,
        "model": None,
        "vllm_xargs": arguments,
        "lora_name": None,
    }
    stripped = _strip(json.dumps(body, ensure_ascii=ascii_only).encode())
    arguments.pop(_KEY, None)
    assert json.loads(stripped) == body


def test_deep_nesting_beside_the_key_is_an_error_of_ours() -> None:
    """The search for the key must not be the way to crash the router."""
    deep = b"[" * 900 + b"]" * 900
    body = b'{"prompt": "a", "x": ' + deep + b', "vllm_xargs": {"kv_cache_report_mode": 1}}'
    with suppress(BadRequest):
        assert _KEY.encode() not in _strip(body)


@pytest.mark.parametrize("value", [b'"\xff"', b'"\\ud800"', b"[1e999]", b"1"])
def test_a_field_that_routing_skips_may_hold_anything(value: bytes) -> None:
    """It is refused or passed on; what is searched for the report mode is the whole body."""
    body = b'{"prompt": [1], "x": %b, "vllm_xargs": {"kv_cache_report_mode": "full"}}' % value
    with suppress(BadRequest):
        assert b"report_mode" not in _strip(body)
