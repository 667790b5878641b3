"""A template does what transformers would let it do, and no harm."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
from jinja2 import Environment

from router.tokenize import ModelFilesError, UntokenizableError
from router.tokenize.chat.template import ChatTemplate, content_form

_USER = {"role": "user", "content": "hi <&>"}


def _render(source: str, max_chars: int = 10_000, **context: Any) -> str:
    return ChatTemplate(source, max_chars=max_chars).render({"messages": [_USER], **context})


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{% if true %}\n  a\n  {% endif %}\nb", "  a\nb"),
        ("{{ 'é<>' | tojson }}", '"é<>"'),
        ("{{ {'b': 1, 'a': 2} | tojson(indent=1) }}", '{\n "b": 1,\n "a": 2\n}'),
        ("{{ {'b': 1, 'a': 2} | tojson(separators=(',', ':'), sort_keys=true) }}", '{"a":2,"b":1}'),
        (
            "{% for i in range(5) %}{% if i == 1 %}{% continue %}{% endif %}{{ i }}{% endfor %}",
            "0234",
        ),
        ("{% for i in range(5) %}{% if i == 3 %}{% break %}{% endif %}{{ i }}{% endfor %}", "012"),
        ("a{% generation %}b{% set x = 1 %}{% endgeneration %}{{ x }}c", "abc"),
        (
            "{% set ns = namespace(n=0) %}{% for i in range(3) %}{% set ns.n = ns.n + i %}{% "
            "endfor %}{{ ns.n }}",
            "3",
        ),
        ("{{ messages[0].content }}", "hi <&>"),
        ("{{ 'ab' * 3 }}{{ 2 ** 10 }}", "ababab1024"),
    ],
)
def test_settings_are_those_of_transformers(source: str, expected: str) -> None:
    """One blank more or less is another prompt."""
    assert _render(source) == expected


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('only user and ' + messages[0].content) }}",
        "{{ messages[0].content.missing.deeper }}",
        "{{ 1 / 0 }}",
        "{{ messages[7].content }}",
        "{{ messages[0].content + 1 }}",
        "{{ messages[0] | tojson(separators=7) }}",
        "{% include 'other' %}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        "{{ 2 ** 'x' }}",
    ],
)
def test_whatever_a_template_raises_is_one_error_without_the_prompt(source: str) -> None:
    """The template's own message quotes the conversation."""
    with pytest.raises(UntokenizableError) as error:
        _render(source)
    assert "hi" not in str(error.value)
    assert error.value.__cause__ is None


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.append(1) }}",
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__ }}{{ ().__class__.__bases__[0].__subclasses__() }}",
        "{{ messages[0].update({'a': 1}) }}",
        "{% for i in range(1000000) %}{% endfor %}",
        "{{ 'a' * 100000000000 }}",
        "{{ 100000000000 * [1] }}",
        "{{ 9 ** 9999999 }}",
        "{{ cycler.__init__.__globals__ }}",
    ],
)
def test_the_sandbox_holds(source: str) -> None:
    """A template comes with a model from anywhere; it must reach nothing and use up nothing."""
    with suppress(UntokenizableError):
        assert _render(source) == ""


def test_output_is_bounded_while_it_grows() -> None:
    """A loop may write without end long before it ends."""
    source = (
        "{% for i in range(90000) %}{% for j in range(90000) %}xxxxxxxxxx{% endfor %}{% endfor %}"
    )
    with pytest.raises(UntokenizableError, match="prompt_too_long"):
        _render(source, max_chars=100_000)


def test_a_broken_template_is_named_at_load() -> None:
    """Not at the first request."""
    for source in ("{% for %}", "{{ a", "{% unknown %}"):
        with pytest.raises(ModelFilesError, match="model X"):
            ChatTemplate(source, place="model X")


def _loops(over: str, body: str) -> str:
    return "{% for m in " + over + " %}" + body + "{% endfor %}"


def _over(parts: str) -> str:
    return "{% for p in " + parts + " %}{{ p.text }}{% endfor %}"


_MACRO = "{% macro w(c) %}{% for p in c %}{% endfor %}{% endmacro %}"


@pytest.mark.parametrize(
    ("source", "form"),
    [
        (_loops("messages", "{{ m.content }}"), "string"),
        (_loops("messages", _over("m.content")), "openai"),
        (_loops("messages", _over("m['content'] | list")), "openai"),
        (_loops("messages[1:]", _over("m.content")), "openai"),
        ("{% set rest = messages[1:] %}" + _loops("rest", _over("m.content")), "openai"),
        (
            "{% set a = messages %}{% set b = a | list %}" + _loops("b", _over("m.content")),
            "openai",
        ),
        (_loops("messages", "{% set content = m.content %}" + _over("content")), "openai"),
        (_MACRO + _loops("messages", "{{ w(m.content) }}"), "openai"),
        (_MACRO + _loops("messages", "{{ w(c=m.content) }}"), "openai"),
        (_MACRO + _loops("messages", "{{ w(m.other) }}"), "string"),
        (
            "{% macro w(content) %}"
            + _over("content")
            + "{% endmacro %}"
            + "{{ messages[0].content }}",
            "string",
        ),
        (_loops("messages", _over("m.tool_calls")), "string"),
        (_loops("tools", _over("m.content")), "string"),
    ],
)
def test_the_form_of_content_is_seen_in_the_template(source: str, form: str) -> None:
    """A wrong guess writes a list of objects into the prompt, or one letter per line."""
    assert content_form(Environment().parse(source)) == form
    assert ChatTemplate(source).form == form
    assert ChatTemplate(source, form="openai").form == "openai"
