"""Hints in a request's body: put in for engines that read them, a client's own taken out."""

from __future__ import annotations

import json

import pytest

from router.prompt.body.owned_fields import HintForm, strip_hints, with_hints
from router.prompt.body.requests import read_request
from router.prompt.endpoints import Endpoint


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        (HintForm.KVROUTE, {"kv_transfer_params": {"kvroute": {"keep": [64], "keep_end": True}}}),
        (HintForm.VLLM, {"vllm_xargs": {"kvroute_keep": [64], "kvroute_keep_end": 1}}),
    ],
)
def test_each_engine_is_told_in_its_own_form(form: HintForm, expected: object) -> None:
    """Nothing else in the body changes."""
    body = b'{"prompt": [1,  2], "n": 1.0}'
    told = with_hints(body, Endpoint.COMPLETIONS, form, (64,), True)
    assert json.loads(told) == {"prompt": [1, 2], "n": 1.0, **expected}  # type: ignore[dict-item]
    assert told.endswith(body[1:])
    assert strip_hints(told) != told


@pytest.mark.parametrize("form", HintForm)
def test_an_engine_that_reads_none_there_gets_none(form: HintForm) -> None:
    """Embeddings are not asked for again, and a stored form has no such field."""
    body = b'{"input": "a"}'
    assert with_hints(body, Endpoint.EMBEDDINGS, form, (64,), True) is body
    assert with_hints(body, Endpoint.COMPLETIONS, form, (), False) is body


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (
            '{"prompt":"a","kv_transfer_params":{"kvroute":{"keep":[1]},"do_remote_prefill":true}}',
            {"prompt": "a", "kv_transfer_params": {"do_remote_prefill": True}},
        ),
        (
            '{"prompt":"a","vllm_xargs":{"kvroute_keep":[1],"kvroute_keep_end":1,"x":2}}',
            {"prompt": "a", "vllm_xargs": {"x": 2}},
        ),
        (
            '{"prompt":"a","vllm_xargs":{"kv\\u0072oute_keep":[1]}}',
            {"prompt": "a", "vllm_xargs": {}},
        ),
        ('{"prompt":"kvroute","vllm_xargs":"kvroute_keep"}', None),
    ],
)
def test_a_client_does_not_say_what_is_kept(body: str, expected: object) -> None:
    """It would drive out what others reuse; what it caches it names by `cache_control`."""
    _, sent = read_request(body.encode(), Endpoint.COMPLETIONS, "json")
    assert (None if sent is None else json.loads(sent)) == expected


def test_nor_where_arguments_are_nested() -> None:
    """vLLM hands them to the same place."""
    body = b'{"token_ids":[1],"sampling_params":{"extra_args":{"kvroute_keep":[1]},"n":1}}'
    _, sent = read_request(body, Endpoint.GENERATE, "json")
    assert sent is not None
    assert json.loads(sent)["sampling_params"] == {"extra_args": {}, "n": 1}
