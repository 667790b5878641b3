"""Bodies of every endpoint, good and bad."""

from __future__ import annotations

import json
from array import array
from contextlib import suppress
from typing import Any
from unittest import mock

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.errors import BadRequest
from router.prompt.body import decoding
from router.prompt.body.decoding import holds_mostly_ids
from router.prompt.body.requests import parse_request, read_model, read_request
from router.prompt.endpoints import Endpoint
from router.prompt.limits import (
    MAX_MESSAGES,
    MAX_NESTING,
    MAX_PROMPT_CHARS,
    MAX_PROMPT_TOKENS,
    MAX_PROMPTS,
    MAX_VALUES,
)
from router.prompt.prompts import (
    ChatPiece,
    ChatPrompt,
    OpaquePrompt,
    PromptSpec,
    TextPrompt,
    TokenPrompt,
)
from router.prompt.token_ids import Truncation
from tests.router.prompt.bodies import bodies

_USER = {"role": "user", "content": "hi"}
_TOO_MANY = [1] * (MAX_VALUES + 1)


def _parse(endpoint: Endpoint, body: object, **options: Any) -> PromptSpec:
    return _read(endpoint, json.dumps(body).encode(), **options)


def _read(endpoint: Endpoint, body: bytes, **options: Any) -> PromptSpec:
    """Both ways to read token ids, which must say the same."""
    packed = _outcome(endpoint, body, **options)
    with mock.patch.object(decoding, "pack_token_ids", return_value=None):
        assert _outcome(endpoint, body, **options) == packed
    return parse_request(endpoint, body, **options)


def _outcome(endpoint: Endpoint, body: bytes, **options: Any) -> PromptSpec | str:
    try:
        return parse_request(endpoint, body, **options)
    except BadRequest as error:
        return str(error)


def _chat(body: dict[str, Any]) -> ChatPrompt:
    (prompt,) = _parse(Endpoint.CHAT, {"messages": [_USER], **body}).prompts
    assert isinstance(prompt, ChatPrompt)
    return prompt


def test_a_chat_brings_all_that_routing_needs() -> None:
    """One look at the body is all there is."""
    body = {
        "model": "m",
        "messages": [_USER],
        "stream": True,
        "n": 3,
        "cache_salt": "s",
        "user": "me",
        "unknown": {"field": [1]},
    }
    spec = _parse(Endpoint.CHAT, body)
    assert (spec.model, spec.stream, spec.choices, spec.cache_salt) == ("m", True, 3, "s")
    assert (spec.session, spec.lora_name, spec.has_engine_arguments) == ("me", None, False)
    assert spec.body_bytes == len(json.dumps(body))
    (prompt,) = spec.prompts
    assert isinstance(prompt, ChatPrompt)
    assert list(prompt.messages) == [_USER]
    assert (
        prompt.add_generation_prompt,
        prompt.continue_final_message,
        prompt.add_special_tokens,
    ) == (True, False, False)


@pytest.mark.parametrize(
    ("body", "session"),
    [
        ({"session_id": "a", "user": "b"}, "a"),
        ({"prompt_cache_key": "a", "user": "b"}, "a"),
        ({"vllm_xargs": {"session_id": "a"}}, "a"),
        ({"metadata": {"user_id": "a"}}, "a"),
        ({"user": 7, "metadata": [1], "vllm_xargs": "x"}, None),
        ({"user": "u" * 1000}, "u" * 512),
    ],
)
def test_the_session_is_what_the_client_calls_it(body: dict[str, Any], session: str | None) -> None:
    """Session policies hash it; it is bounded because it is the client's."""
    assert _parse(Endpoint.CHAT, {"messages": [_USER], **body}).session == session


@pytest.mark.parametrize(
    ("given", "expected"),
    [("a", "a"), (["a", "a"], "a"), (["a", None], None), ("", None), (None, None), ([], None)],
)
def test_an_adapter_may_be_named_beside_the_model(given: object, expected: str | None) -> None:
    """SGLang's clients do: what the base model has cached is nothing to such a request."""
    body = {"prompt": ["x", "y"], "lora_path": given}
    assert _parse(Endpoint.COMPLETIONS, body).lora_name == expected
    assert _parse(Endpoint.ROUTE, {"prompt": "x", "lora_path": given}).lora_name == expected


def test_options_of_the_prompt_are_the_request_s() -> None:
    """Each of them changes the text."""
    prompt = _chat(
        {
            "add_generation_prompt": False,
            "continue_final_message": True,
            "add_special_tokens": True,
            "documents": [{"title": "t"}],
            "chat_template_kwargs": {"a": 1, "b": None, "c": "auto", "enable_thinking": True},
            "reasoning_effort": "low",
            "truncate_prompt_tokens": 9,
        }
    )
    assert (
        prompt.add_generation_prompt,
        prompt.continue_final_message,
        prompt.add_special_tokens,
    ) == (False, True, True)
    assert prompt.documents == [{"title": "t"}]
    assert prompt.template_arguments == {"a": 1, "enable_thinking": True, "reasoning_effort": "low"}
    assert prompt.truncation == Truncation(9, "left", counts_special_tokens=False)


@pytest.mark.parametrize(("effort", "enabled"), [("none", False), ("high", True)])
def test_reasoning_effort_switches_thinking(effort: str, enabled: bool) -> None:
    """The engine derives the one from the other; templates look at either."""
    assert _chat({"reasoning_effort": effort}).template_arguments == {
        "reasoning_effort": effort,
        "enable_thinking": enabled,
    }


def test_tools_get_the_shape_and_order_that_templates_see() -> None:
    """Tools stand at the start of a prompt, as JSON: another order of keys is another prefix."""
    tool = {
        "function": {"parameters": {"b": 1, "a": 2}, "extra": 1, "name": "f", "strict": True},
        "type": "function",
    }
    (shaped,) = _chat({"tools": [tool]}).tools or ()
    expected = {
        "type": "function",
        "function": {
            "name": "f",
            "description": None,
            "parameters": {"b": 1, "a": 2},
            "strict": True,
        },
    }
    assert json.dumps(shaped) == json.dumps(expected)


def test_a_template_in_the_request_is_never_run() -> None:
    """It is a program of the client's."""
    spec = _parse(Endpoint.CHAT, {"messages": [_USER], "chat_template": "{{ 1 }}"})
    assert spec.prompts == (OpaquePrompt("request_chat_template"),)


@pytest.mark.parametrize("endpoint", [Endpoint.COMPLETIONS, Endpoint.EMBEDDINGS])
@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("a", [TextPrompt("a")]),
        ("", [TextPrompt("")]),
        (["a", "b"], [TextPrompt("a"), TextPrompt("b")]),
        ([1, 2], [[1, 2]]),
        ([[1], [2, 3], []], [[1], [2, 3], []]),
        (["a", [1]], [TextPrompt("a"), [1]]),
        ([1.0, 2, 3e0], [[1, 2, 3]]),  # engines take whole numbers however they are written
        ([[1.0]], [[1]]),
    ],
)
def test_prompts_are_text_tokens_or_batches_of_them(
    endpoint: Endpoint, prompt: object, expected: list[object]
) -> None:
    """All the forms that the completions and embeddings endpoints take."""
    field = "prompt" if endpoint is Endpoint.COMPLETIONS else "input"
    found = [
        item.token_ids.tolist() if isinstance(item, TokenPrompt) else item
        for item in _parse(endpoint, {field: prompt}).prompts
    ]
    assert found == expected


def test_completions_can_do_without_special_tokens() -> None:
    """The request overrides the default of the endpoint."""
    spec = _parse(Endpoint.COMPLETIONS, {"prompt": "a", "add_special_tokens": False})
    assert spec.prompts == (TextPrompt("a", add_special_tokens=False),)


def test_embedded_prompts_are_opaque() -> None:
    """Nobody can tell their tokens, there are none."""
    spec = _parse(Endpoint.COMPLETIONS, {"prompt_embeds": ["x", "y"]})
    assert spec.prompts == (OpaquePrompt("prompt_embeds"),) * 2


@pytest.mark.parametrize("suffix", [None, ""])
def test_a_completion_without_a_suffix_is_its_prompt(suffix: str | None) -> None:
    """SGLang takes an empty one for none, and editors send it."""
    (prompt,) = _parse(Endpoint.COMPLETIONS, {"prompt": "a", "suffix": suffix}).prompts
    assert prompt == TextPrompt("a")


def test_a_suffix_makes_another_text() -> None:
    """vLLM (DeepSeek V4) and SGLang's completion templates put both between tokens of the model's
    own: the prompt is no prefix of that."""
    for texts in ("a", ["a", "b"]):
        spec = _parse(Endpoint.COMPLETIONS, {"prompt": texts, "suffix": "c"})
        assert spec.prompts == (OpaquePrompt("suffix"),) * len(texts)


@pytest.mark.parametrize(
    "text",
    [
        *("[]", "[ ]", "[1]", " [ 1 ,\n2\t, 3 ] ", "[0, 4294967295]", "[4294967296]", "[-0, 1]"),
        *("[01]", "[1,]", "[,1]", "[1 2]", "[1", "1]", "[1.0, 2]", "[1e2]", "[true]", "[null]"),
        *("[[1, 2], [3]]", "[[1], 2]", '["a"]', '"a"', '"\\ud800"', "[+1]", "[0x1]", "{}", "null"),
    ],
)
@pytest.mark.parametrize("form", [Endpoint.COMPLETIONS, Endpoint.EMBEDDINGS, Endpoint.ROUTE])
def test_token_ids_are_the_same_packed_by_the_compiled_index(form: Endpoint, text: str) -> None:
    """It reads most of the bodies of a gateway; whatever it does not take must be judged as by the
    general parser, down to the place in the message."""
    for name in ("prompt", "input", "token_ids"):
        body = f'{{"model": "m", "{name}": {text}, "user": "me"}}'.encode()
        with suppress(BadRequest):
            _read(form, body)


LONG = "[" + "12345, " * 1000 + "1]"


@pytest.mark.parametrize(
    "body",
    [
        f'{{"model": "m", "prompt": {LONG}, "user": "me"}}',
        f'{{"user": "[1, 2]", "prompt": {LONG}}}',
        f'{{"user": "{LONG}", "prompt": "text"}}',
        f'{{"metadata": {{"a": {LONG}}}, "prompt": "text"}}',
        f'{{"metadata": {{"a": [1, 2]}}, "prompt": {LONG}}}',
        f'{{"prompt": {LONG}, "prompt": "text"}}',
        f'{{"prompt": "text", "prompt": {LONG}}}',
        f'{{"prompt": {LONG}, "prompt": [7]}}',
        f'{{"prompt": {LONG}, "token_ids": [7]}}',
        f'{{"prompt": {LONG}, "user": "half',
        f'{{"prompt": {LONG}, "user": [\t \t \n\t]}}',
        f'{{"prompt": [\t \t \n\t], "user": {LONG}}}',
        f'{{"prompt": {LONG}, "model": 7}}',
        f'{{"prompt": [{LONG}, [7]]}}',
        f'["{LONG}", {LONG}]',
        LONG,
        f'{{"prompt": {LONG[:-2]} 4294967296]}}',
    ],
)
@pytest.mark.parametrize("form", [Endpoint.COMPLETIONS, Endpoint.ROUTE])
def test_token_ids_that_are_read_before_all_else_are_the_same(form: Endpoint, body: str) -> None:
    """What stands in their place meanwhile must be taken for nothing that a client sent."""
    with suppress(BadRequest):
        _read(form, body.encode())


@pytest.mark.parametrize(
    ("body", "is_light"),
    [
        (b'{"model": "m", "prompt": [' + b"12345," * 100_000 + b"1]}", True),
        (b'{"prompt": [' + b"12345," * 100_000 + b'1], "user": "%b"}' % (b"x" * 70_000), False),
        (b'{"user": "%b", "prompt": [1]}' % (b"x" * 70_000), False),
        (b'{"prompt": [[' + b"1," * 100_000 + b"1]]}", False),
        (b'{"prompt": ["' + b"a" * 100_000 + b'"]}', False),
        (b'{"messages": [{"a": "' + b"a" * 100_000 + b'"}]}', False),
        (b"[" * 100_000, False),
        (b"", False),
    ],
)
def test_a_body_is_light_where_all_but_a_little_is_one_list_of_numbers(
    body: bytes, is_light: bool
) -> None:
    """It is read in the event loop, whatever else it turns out to be."""
    assert holds_mostly_ids(body) is is_light


def test_a_million_token_ids_are_taken() -> None:
    """The longest contexts that models have."""
    ids = list(range(1_000_000))
    (prompt,) = _parse(Endpoint.ROUTE, {"model": "m", "token_ids": ids}).prompts
    assert isinstance(prompt, TokenPrompt)
    assert prompt.token_ids.tolist() == ids


@pytest.mark.parametrize(
    ("ids", "place"),
    [
        ([1, -1], "$.prompt[1]"),
        ([1, 2**32], "$.prompt[1]"),
        ([1, 2**70], "$.prompt[1]"),
        ([0, True], "$.prompt[1]"),
        ([0, 1.5], "$.prompt[1]"),
        ([0, 1e300], "$.prompt[1]"),
        ([1.0, -1.0], "$.prompt[1]"),
        ([0, "secret"], "$.prompt[1]"),
        ([0, None], "$.prompt[1]"),
        ([None], "$.prompt[0]"),
        ([[0], [1, -5]], "$.prompt[1][1]"),
        (["a", {"secret": 1}], "$.prompt[1]"),
        ({"secret": 1}, "$.prompt"),
        (7, "$.prompt"),
        ([], "$.prompt"),
        (None, "$.prompt"),
    ],
)
def test_a_bad_prompt_is_refused_with_its_place_and_without_its_value(
    ids: object, place: str
) -> None:
    """The client must find the mistake; the log must not find the prompt."""
    with pytest.raises(BadRequest) as error:
        _parse(Endpoint.COMPLETIONS, {"prompt": ids})
    assert error.value.place == place
    assert "secret" not in str(error.value)
    assert "-5" not in str(error.value)


@pytest.mark.parametrize(
    ("body", "place"),
    [
        ({}, "$.messages"),
        ({"messages": []}, "$.messages"),
        ({"messages": {"secret": 1}}, "$.messages"),
        ({"messages": ["secret"]}, "$.messages[0]"),
        ({"messages": [{"content": "secret"}]}, "$.messages[0].role"),
        ({"messages": [_USER, {"role": "user", "content": 7}]}, "$.messages[1].content"),
        ({"messages": [{"role": "user", "content": [7]}]}, "$.messages[0].content[0]"),
        (
            {"messages": [{"role": "user", "content": [{"text": 7}]}]},
            "$.messages[0].content[0].text",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": ["secret"]}]}]},
            "$.messages[0].content[0].type",
        ),
        ({"messages": [{"role": "user", "tool_calls": "secret"}]}, "$.messages[0].tool_calls"),
        ({"messages": [{"role": "user", "tool_calls": [{}]}]}, "$.messages[0].tool_calls[0]"),
        ({"messages": [_USER], "model": 7}, "$.model"),
        ({"messages": [_USER], "cache_salt": "s" * 1025}, "$.cache_salt"),
        ({"messages": [_USER], "cache_salt": ["secret"]}, "$.cache_salt"),
        ({"messages": [_USER], "tools": "secret"}, "$.tools"),
        ({"messages": [_USER], "tools": [{"type": "function"}]}, "$.tools[0].function"),
        ({"messages": [_USER], "tools": [{"function": {"name": 1}}]}, "$.tools[0].function.name"),
        (
            {"messages": [_USER], "tools": [{"function": {"name": "f", "parameters": []}}]},
            "$.tools[0].function.parameters",
        ),
        ({"messages": [_USER], "chat_template_kwargs": ["secret"]}, "$.chat_template_kwargs"),
        ({"messages": [_USER], "documents": "secret"}, "$.documents"),
    ],
)
def test_a_bad_chat_is_refused_with_its_place(body: object, place: str) -> None:
    """The same for every field that shapes the prompt."""
    with pytest.raises(BadRequest) as error:
        _parse(Endpoint.CHAT, body)
    assert error.value.place == place
    assert "secret" not in str(error.value)


def _nested(levels: int) -> Any:
    value: Any = "x"
    for _ in range(levels):
        value = [value]
    return value


@pytest.mark.parametrize("field", ["messages", "tools", "documents", "chat_template_kwargs"])
def test_nesting_is_bounded_where_templates_recurse(field: str) -> None:
    """Templates and JSON encoders go down as deep as a client digs."""
    nested = _nested(MAX_NESTING + 12)
    deep = {"role": "user", "content": "x", "function": {"name": "f"}, "deep": nested}
    body = {"messages": [_USER], field: deep if field == "chat_template_kwargs" else [deep]}
    with pytest.raises(BadRequest, match="nested too deep"):
        _parse(Endpoint.CHAT, body)


@pytest.mark.parametrize(
    "body",
    [
        {
            "messages": [
                {"role": "user", "content": ["a"] * (MAX_VALUES // 2)},
                {"role": "user", "content": [{}] * (MAX_VALUES // 2 + 1)},
            ]
        },
        {
            "messages": [_USER],
            "tools": [{"function": {"name": "f", "parameters": {"enum": _TOO_MANY}}}],
        },
        {
            "messages": [_USER],
            "chat_template_kwargs": dict.fromkeys(map(str, range(MAX_VALUES + 1)), 1),
        },
    ],
)
def test_values_are_bounded_wherever_they_hide(body: object) -> None:
    """A body of ten megabytes holds millions of them, and each costs time in the event loop."""
    with pytest.raises(BadRequest, match="too many values"):
        _parse(Endpoint.CHAT, body)


def test_nesting_up_to_the_limit_is_taken() -> None:
    """The bound is where it is said to be."""
    for levels, is_taken in ((MAX_NESTING, True), (MAX_NESTING + 1, False)):
        body = {"messages": [{"role": "user", "content": "x", "deep": _nested(levels - 1)}]}
        if is_taken:
            assert _parse(Endpoint.CHAT, body)
        else:
            with pytest.raises(BadRequest):
                _parse(Endpoint.CHAT, body)


@pytest.mark.parametrize(
    ("endpoint", "field", "unit", "most"),
    [
        (Endpoint.CHAT, "messages", [_USER], MAX_MESSAGES),
        (Endpoint.COMPLETIONS, "prompt", ["a"], MAX_PROMPTS),
        (Endpoint.COMPLETIONS, "prompt", [1], MAX_PROMPT_TOKENS),
        (Endpoint.COMPLETIONS, "prompt", "a", MAX_PROMPT_CHARS),
        (Endpoint.RESPONSES, "input", [_USER], MAX_MESSAGES),
        (Endpoint.MESSAGES, "messages", [_USER], MAX_MESSAGES),
    ],
)
def test_sizes_are_bounded(
    endpoint: Endpoint, field: str, unit: list[Any] | str, most: int
) -> None:
    """One request must not make the router hold or compute without end."""
    assert _parse(endpoint, {field: unit * most})
    with pytest.raises(BadRequest, match=f"at most {most}"):
        _parse(endpoint, {field: unit * (most + 1)})


@pytest.mark.parametrize(
    ("body", "found"),
    [
        (b"", "an empty body"),
        (b" \n", "an empty body"),
        (b'{"a": "\\ud800"}', "half of a surrogate pair"),
        (b'{"a": "\\ud800 and what follows it"}', "half of a surrogate pair"),
        (b'{"prompt": "\\ud800 and what follows it"}', "half of a surrogate pair"),
        (b'{"prompt": "\\ud800\\u0041"}', "half of a surrogate pair"),
        (b'{"prompt": "\\udc00"}', "half of a surrogate pair"),
        (b'{"a": "\\u0041', "truncated"),
    ],
)
def test_the_message_says_what_is_wrong_with_the_json(body: bytes, found: str) -> None:
    """An empty body and half a character were both called truncated."""
    with pytest.raises(BadRequest) as error:
        _read(Endpoint.COMPLETIONS, body)
    assert found in error.value.found


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"7",
        b'"text"',
        b"\xff",
        b'{"messages": "\xff"}',
        b'{"a": "\\ud800"}',
        b"{} {}",
        b"[" * 100_000,
        b"1" * 10_000,
    ],
)
def test_a_malformed_body_is_an_error_of_ours(body: bytes) -> None:
    """Whatever the parser raises, a client sees one kind of error."""
    with pytest.raises(BadRequest) as error:
        _read(Endpoint.CHAT, body)
    assert error.value.place == "$"


@settings(max_examples=200, deadline=None)
@given(endpoint=st.sampled_from(Endpoint), body=bodies())
def test_any_body_is_parsed_or_refused(endpoint: Endpoint, body: object) -> None:
    """Hostile input is normal: no other exception may come out."""
    with suppress(BadRequest):
        assert _parse(endpoint, body).prompts


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=60))
def test_random_msgpack_is_parsed_or_refused(body: bytes) -> None:
    """`/route` takes msgpack, which can carry what JSON cannot."""
    with suppress(BadRequest):
        assert parse_request(Endpoint.ROUTE, body, encoding="msgpack").prompts


@pytest.mark.parametrize(
    "odd", [{1: 2}, {b"k": b"v"}, {(1, 2): 3}, msgspec.msgpack.Ext(7, b"x"), float("inf")]
)
def test_msgpack_without_a_json_form_reaches_no_template(odd: object) -> None:
    """Templates, JSON encoders and replicas would each fail over it in their own way."""
    body = msgspec.msgpack.encode(
        {"token_ids": 1, "endpoint": Endpoint.CHAT, "messages": [{"role": "user", "odd": odd}]}
    )
    with suppress(BadRequest):
        (prompt,) = parse_request(Endpoint.ROUTE, body, encoding="msgpack").prompts
        assert isinstance(prompt, ChatPrompt)
        assert json.loads(json.dumps(list(prompt.messages), allow_nan=False)) == list(
            prompt.messages
        )


@pytest.mark.parametrize(
    ("prompt", "sent", "salts"),
    [
        (["a", "b", "c"], ["s", "", "t"], ["s", None, "t"]),
        (["a", "b"], "s", ["s", "s"]),
        (["a", "b"], "", [None, None]),
        ([[1], [2]], ["s", "t"], ["s", "t"]),
        ("a", ["s"], ["s"]),
    ],
)
def test_each_prompt_of_a_batch_may_have_a_salt_of_its_own(
    prompt: Any, sent: Any, salts: list[str | None]
) -> None:
    """SGLang takes such lists; to refuse them would take something away from its clients. An empty
    salt is none there, and vLLM refuses it itself."""
    spec = _parse(Endpoint.COMPLETIONS, {"prompt": prompt, "cache_salt": sent})
    assert [spec.salt_of(number) for number in range(len(spec.prompts))] == salts


@pytest.mark.parametrize("salts", [["s"], ["s", 7], ["s", "t" * 1025], [], ["s", ["t"]]])
def test_salts_that_fit_no_batch_are_refused(salts: list[Any]) -> None:
    """With the place; never with the salt."""
    with pytest.raises(BadRequest, match=r"\$\.cache_salt") as caught:
        _parse(Endpoint.COMPLETIONS, {"prompt": ["a", "b"], "cache_salt": salts})
    assert "'s'" not in str(caught.value)


def test_a_tenants_salt_goes_into_each_salt_of_a_batch() -> None:
    """As it is sent, so it is predicted."""
    body = json.dumps({"prompt": ["a", "b"], "cache_salt": ["s", "t"]}).encode()
    spec, sent = read_request(body, Endpoint.COMPLETIONS, "json", b"tenant")
    assert sent is not None
    assert json.loads(sent)["cache_salt"] == [spec.salt_of(0), spec.salt_of(1)]
    assert spec.salt_of(0) not in ("s", spec.salt_of(1))


def test_route_takes_msgpack_with_adapter_and_salt() -> None:
    """Gateways that hold token ids already ask in the cheaper form."""
    body = msgspec.msgpack.encode(
        {"model": "m", "token_ids": [1, 2], "lora_name": "l", "cache_salt": "s"}
    )
    spec = parse_request(Endpoint.ROUTE, body, encoding="msgpack")
    assert (spec.endpoint, spec.lora_name, spec.cache_salt) == (Endpoint.ROUTE, "l", "s")
    (prompt,) = spec.prompts
    assert isinstance(prompt, TokenPrompt)
    assert prompt.token_ids.tolist() == [1, 2]


@pytest.mark.parametrize(
    ("ids", "place"),
    [("1, 2", "$.token_ids"), (["1", "2"], "$.token_ids[0]"), ([[1, 2], "3"], "$.token_ids[1]")],
)
def test_token_ids_to_find_a_route_for_are_no_text(ids: object, place: str) -> None:
    """Whoever sends them as a string would be told of a hit that is another prompt's."""
    with pytest.raises(BadRequest) as error:
        _parse(Endpoint.ROUTE, {"model": "m", "token_ids": ids})
    assert error.value.place == place


@pytest.mark.parametrize(
    ("body", "form"),
    [
        ({"messages": [_USER]}, Endpoint.CHAT),
        ({"prompt": "a"}, Endpoint.COMPLETIONS),
        ({"input": "a"}, Endpoint.RESPONSES),
        ({"input": "a", "endpoint": "/v1/embeddings"}, Endpoint.EMBEDDINGS),
        ({"messages": [_USER], "endpoint": "/v1/messages"}, Endpoint.MESSAGES),
    ],
)
def test_route_takes_the_bodies_of_the_other_endpoints(body: object, form: Endpoint) -> None:
    """Who asks where a request should go sends that request."""
    assert _parse(Endpoint.ROUTE, body).endpoint is form


@pytest.mark.parametrize(
    "body", [{}, {"endpoint": "/secret"}, {"endpoint": ["secret"]}, {"endpoint": "/v1/messages"}]
)
def test_route_refuses_what_it_cannot_place(body: object) -> None:
    """A guess would be answered with hits of a prompt that nobody sent."""
    with pytest.raises(BadRequest) as error:
        _parse(Endpoint.ROUTE, body)
    assert "secret" not in str(error.value)


@pytest.mark.parametrize(
    ("endpoint", "fields", "expected"),
    [
        (
            Endpoint.COMPLETIONS,
            {"truncate_prompt_tokens": 5},
            Truncation(5, "left", counts_special_tokens=False),
        ),
        (
            Endpoint.EMBEDDINGS,
            {"truncate_prompt_tokens": 5},
            Truncation(5, "right", counts_special_tokens=False),
        ),
        (
            Endpoint.COMPLETIONS,
            {"truncate_prompt_tokens": 5, "truncation_side": "right"},
            Truncation(5, "right", True),
        ),
        (
            Endpoint.COMPLETIONS,
            {"truncate_prompt_tokens": -1},
            Truncation(-1, "left", counts_special_tokens=False),
        ),
        (Endpoint.COMPLETIONS, {"truncate_prompt_tokens": None}, None),
        (Endpoint.COMPLETIONS, {"truncation": "auto"}, None),
        *(
            (Endpoint.RESPONSES, {"truncation": cut}, Truncation(-1, "left", False))
            for cut in ("auto", None)
        ),
        (Endpoint.RESPONSES, {"truncation": "disabled"}, None),
        (Endpoint.RESPONSES, {"truncate_prompt_tokens": 5}, None),
        (Endpoint.MESSAGES, {"truncate_prompt_tokens": 5}, None),
    ],
)
def test_truncation_is_read_with_the_engine_s_defaults(
    endpoint: Endpoint, fields: dict[str, Any], expected: object
) -> None:
    """Generation keeps the end of a prompt, embeddings keep its beginning; in the responses API a
    prompt is cut unless that is disabled, which it is by default."""
    body = {"prompt": "a", "input": "a", "messages": [_USER], **fields}
    (prompt,) = _parse(endpoint, body).prompts
    assert isinstance(prompt, TextPrompt | ChatPrompt)
    assert prompt.truncation == expected


def test_flags_are_read_as_leniently_as_the_engine_reads_them() -> None:
    """A router that refuses what an engine takes is in the way."""
    for value, expected in (
        (True, True),
        ("true", True),
        (1, True),
        (False, False),
        (None, False),
        ("no", False),
        ([], False),
    ):
        assert _parse(Endpoint.CHAT, {"messages": [_USER], "stream": value}).stream is expected
    for count, choices in ((7, 7), (7.0, 7), (7.5, 1), (-1, 1), (True, 1), (1e300, 1)):
        assert _parse(Endpoint.CHAT, {"messages": [_USER], "n": count}).choices == choices
    for text, choices in (("7", 7), (" 7 ", 7), ("7.0", 7), ("7.5", 1), ("-7", 1), ("9" * 20, 1)):
        assert _parse(Endpoint.CHAT, {"messages": [_USER], "n": text}).choices == choices


def test_an_input_without_items_is_named_as_what_it_is() -> None:
    """Clients of this endpoint know of no messages; instructions alone are a prompt."""
    with pytest.raises(BadRequest, match=r"\$\.input: an empty list"):
        _parse(Endpoint.RESPONSES, {"input": []})
    assert _parse(Endpoint.RESPONSES, {"input": [], "instructions": "x"}).prompts


def test_a_call_joins_those_of_the_message_before_it() -> None:
    """If it has any, and they are calls."""
    call = {"type": "function_call", "name": "f", "arguments": "{}", "call_id": "c"}
    for before in ({}, {"tool_calls": None}, {"tool_calls": []}):
        items = [{"role": "user", "content": "a"}, {"role": "assistant"} | before, call]
        (prompt,) = _parse(Endpoint.RESPONSES, {"input": items}).prompts
        assert [each["id"] for each in prompt.messages[1]["tool_calls"]] == ["c"]
    items[1] = {"role": "assistant", "tool_calls": "secret"}
    with pytest.raises(BadRequest, match=r"tool_calls.*must be a list") as error:
        _parse(Endpoint.RESPONSES, {"input": items})
    assert "secret" not in str(error.value)


# --- vLLM's own endpoints -------------------------------------------------------------------------


def test_each_conversation_of_a_batch_is_a_prompt_of_its_own() -> None:
    """vLLM computes them side by side; what stands beside `messages` is for all of them."""
    body = {"messages": [[_USER], [_USER, _USER]], "chat_template_kwargs": {"a": 1}, "model": "m"}
    spec = _parse(Endpoint.CHAT_BATCH, body)
    chats = [prompt for prompt in spec.prompts if isinstance(prompt, ChatPrompt)]
    assert [list(chat.messages) for chat in chats] == [[_USER], [_USER, _USER]]
    assert [chat.template_arguments for chat in chats] == [{"a": 1}] * 2


def test_several_conversations_are_embedded_as_well() -> None:
    """vLLM takes them in `messages` or `input`; they got 400 before an engine saw them."""
    chats = [[_USER], [_USER, _USER]]
    spec = _parse(Endpoint.EMBEDDINGS, {"messages": chats, "model": "m"})
    found = [prompt for prompt in spec.prompts if isinstance(prompt, ChatPrompt)]
    assert [list(chat.messages) for chat in found] == chats
    assert not any(chat.add_generation_prompt for chat in found)
    spec = _parse(Endpoint.EMBEDDINGS, {"messages": None, "input": chats})
    assert spec.prompts == (OpaquePrompt("unknown_input_item"),)


@pytest.mark.parametrize(
    ("messages", "place"),
    [
        (None, "$.messages"),
        ([], "$.messages"),
        ([_USER], "$.messages[0]"),
        ([[_USER], []], "$.messages"),
        ([[_USER]] * (MAX_PROMPTS + 1), "$.messages"),
    ],
)
def test_a_batch_that_is_none_is_refused(messages: Any, place: str) -> None:
    """A chat sent to the wrong path, and more conversations than a batch may hold."""
    body = json.dumps({"messages": messages}).encode()
    with pytest.raises(BadRequest) as error:
        parse_request(Endpoint.CHAT_BATCH, body)
    assert error.value.place == place


@pytest.mark.parametrize(
    ("sampling", "reads_cache"),
    [
        ({}, True),
        ({"prompt_logprobs": 0}, False),
        ({"prompt_logprob_token_ids": [[1], [2]]}, False),
        ({"prompt_logprob_token_ids": None}, True),
        ({"skip_reading_prefix_cache": True}, False),
        ({"skip_reading_prefix_cache": None, "prompt_logprobs": 1}, False),
        ({"skip_reading_prefix_cache": False, "prompt_logprobs": 1}, True),
    ],
)
def test_parameters_say_whether_the_cache_is_read(
    sampling: dict[str, Any], reads_cache: bool
) -> None:
    """What an engine computes anew, whatever it has cached, is no hit."""
    body = {"token_ids": [1, 2, 3], "sampling_params": sampling}
    assert _parse(Endpoint.GENERATE, body).reads_cache is reads_cache


@pytest.mark.parametrize("size", [4, 2000])
def test_token_ids_to_go_on_from_are_read_as_they_are(size: int) -> None:
    """The engine computes exactly them; all else of the request is beside or in the parameters."""
    ids = list(range(size))
    sampling = {"n": 3, "prompt_logprobs": 1, "max_tokens": 5}
    body = {"sampling_params": sampling, "token_ids": ids, "cache_salt": "s", "stream": True}
    spec = _parse(Endpoint.GENERATE, body)
    assert spec.prompts == (TokenPrompt(array("I", ids)),)
    assert (spec.choices, spec.reads_cache, spec.cache_salt, spec.stream) == (3, False, "s", True)


@pytest.mark.parametrize(
    ("extra", "prompt"),
    [
        (
            {"features": {"mm_placeholders": {"image": [{"offset": 3, "length": 1}]}}},
            TokenPrompt(array("I", [1, 2, 3]), is_prefix=True),
        ),
        ({"features": {"mm_placeholders": {"image": [{"offset": "x"}]}}}, OpaquePrompt("media")),
        ({"features": {"mm_hashes": {}}}, OpaquePrompt("media")),
        ({"content_parts": [{"type": "image_url"}]}, OpaquePrompt("media")),
        ({"features": None, "content_parts": []}, TokenPrompt(array("I", [1, 2, 3, 4]))),
    ],
)
def test_ids_are_certain_up_to_the_first_medium(extra: dict[str, Any], prompt: Any) -> None:
    """Blocks with a medium have its hash in theirs, and parts put their own ids in."""
    body = {"token_ids": [1, 2, 3, 4], "sampling_params": {}, **extra}
    assert _parse(Endpoint.GENERATE, body).prompts == (prompt,)


@pytest.mark.parametrize("value", [2**63, -(2**63) - 1, 10**22, 1e30, "9" * 23])
@pytest.mark.parametrize("endpoint", [Endpoint.COMPLETIONS, Endpoint.EMBEDDINGS, None])
def test_a_priority_above_64_bits_is_refused(endpoint: Endpoint | None, value: object) -> None:
    """vLLM up to 0.32 answers it with 500, which looks like a failing replica."""
    body = json.dumps({"prompt": "a", "input": "a", "priority": value}).encode()
    with pytest.raises(BadRequest, match=r"\$\.priority: .*64 bits"):
        read_model(body) if endpoint is None else parse_request(endpoint, body)


@pytest.mark.parametrize("value", [0, -5, 2**63 - 1, -(2**63), 1.5, "7", "high", None, [1]])
def test_other_priorities_are_the_engines_to_judge(value: object) -> None:
    """One may read what another refuses."""
    body = json.dumps({"prompt": "a", "priority": value}).encode()
    assert parse_request(Endpoint.COMPLETIONS, body).has_priority
    assert read_model(body) == (None, None)
    assert read_model(body, drops_priority=True) == (None, b'{"prompt": "a"}')


def test_the_breakpoints_of_a_client_s_cache_are_read() -> None:
    """Anthropic's `cache_control`, at the system prompt and at blocks; without any, the messages
    themselves tell where they end."""
    marked = {"type": "text", "text": "Rules.", "cache_control": {"type": "ephemeral"}}
    body = {
        "model": "m",
        "system": [marked],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "A document."}, marked]},
            {"role": "assistant", "content": "Yes."},
        ],
    }
    (prompt,) = _parse(Endpoint.MESSAGES, body).prompts
    assert isinstance(prompt, ChatPrompt)
    assert prompt.pieces == [
        ChatPiece("Rules.", True),
        ChatPiece("A document.", False),
        ChatPiece("Rules.", True),
        ChatPiece("Yes.", False),
    ]
    plain = {**body, "system": "Rules.", "messages": [{"role": "user", "content": "Yes?"}]}
    (prompt,) = _parse(Endpoint.MESSAGES, plain).prompts
    assert isinstance(prompt, ChatPrompt)
    assert prompt.pieces is None


@pytest.mark.parametrize(("echo", "reads_cache"), [(True, False), (False, True)])
def test_an_echo_keeps_vllm_from_reading_its_cache_in_batches_too(
    echo: bool, reads_cache: bool
) -> None:
    """Each conversation becomes a chat, with a chat's defaults for logprobs."""
    body = json.dumps({"messages": [[{"role": "user", "content": "hi"}]], "echo": echo}).encode()
    assert parse_request(Endpoint.CHAT_BATCH, body).reads_cache is reads_cache
