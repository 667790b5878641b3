"""What the core reads of a body without Python, held to the parser that reads everything."""

from __future__ import annotations

import json
import math
from importlib import import_module
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from router.errors import BadRequest
from router.prompt.body.requests import read_request
from router.prompt.endpoints import Endpoint
from router.prompt.prompts import TokenPrompt

NAMES = st.sampled_from(
    (
        *("model", "prompt", "stream", "max_tokens", "temperature", "stop", "user", "n", "echo"),
        *("cache_salt", "stream_options", "vllm_xargs", "priority", "x", "mod\\u0065l", "ü"),
    )
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 2**33) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
IDS = st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=20)


@st.composite
def bodies(draw: st.DrawFn) -> bytes:
    """Usual bodies, odd ones, and some that are cut or changed."""
    fields: list[tuple[str, Any]] = [("model", "m"), ("prompt", draw(IDS))]
    fields += draw(st.lists(st.tuples(NAMES, VALUES), max_size=4))
    fields = draw(st.permutations(fields))
    space = draw(st.sampled_from(("", " ", "\n\t")))
    pairs = [f'"{name}":{space}{json.dumps(value)}' for name, value in fields]
    body = ("{" + f",{space}".join(pairs) + "}" + space).encode()
    if draw(st.integers(0, 3)) == 0:
        place = draw(st.integers(0, len(body)))
        return body[:place] + draw(st.binary(max_size=3)) + body[place + draw(st.integers(0, 3)) :]
    return body


@given(bodies())
@example(b'{"model": "m", "prompt": [1], "stream": true}')
@example(b'{"model": "m", "prompt": [1], "stream": [true]}')
@example(b'{"model": "m", "prompt": [1], "stop": "\\ud800"}')
@example(b'{"model": "m", "prompt": [1], "max_tokens": 01}')
@example(b'{"model": "m", "prompt": [1], "prompt": [2]}')
@example(b'{"model": "m", "prompt": [1]} ,')
def test_what_the_core_reads_is_what_the_parser_reads(body: bytes) -> None:
    """It is sent on without another look: a body that the parser refuses or changes must be left to
    it, and so must one in which it sees more."""
    found = import_module("router._core").read_ask(body)
    if found is None:
        return
    spec, changed = read_request(body, Endpoint.COMPLETIONS, "json")
    (prompt,) = spec.prompts
    assert isinstance(prompt, TokenPrompt)
    assert found == (spec.model, list(prompt.token_ids), spec.stream)
    assert (changed, spec.choices, spec.cache_salt, spec.session) == (None, 1, None, None)
    assert spec.reads_cache
    assert not any((spec.has_priority, spec.has_transfer_params, spec.keeps_prompt))


@given(IDS, st.booleans(), st.dictionaries(st.sampled_from(("max_tokens", "x")), VALUES))
@example([0], False, {"max_tokens": math.inf})
def test_usual_bodies_are_read(ids: list[int], streams: bool, more: dict[str, Any]) -> None:
    """The test above would pass if nothing were."""
    body = {"model": "m", "prompt": ids, "stream": streams, **more}
    text = json.dumps(body, ensure_ascii=False)
    found = import_module("router._core").read_ask(text.encode("utf-8", "surrogatepass"))
    is_usual = text.isascii() and not any(each in text for each in ("\\", "\x7f", "Infinity"))
    assert found == ("m", ids, streams) or not is_usual


def test_a_refused_body_is_left_to_who_says_why() -> None:
    """A client needs place, value and rule."""
    body = b'{"model": "m", "prompt": [1, -1]}'
    assert import_module("router._core").read_ask(body) is None
    with pytest.raises(BadRequest):
        read_request(body, Endpoint.COMPLETIONS, "json")
