"""A template does what transformers would let it do, and no harm."""

from __future__ import annotations

import re
import subprocess
import sys
from contextlib import suppress
from typing import Any

import pytest
from jinja2 import Environment, Template
from jinja2.sandbox import ImmutableSandboxedEnvironment

from router.prompt.chat.bounded_jinja import BoundedSandbox
from router.prompt.chat.template import ChatTemplate, content_form
from router.prompt.errors import ModelFilesError, UntokenizableError

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
    with suppress(UntokenizableError, ModelFilesError):
        assert _render(source) == ""


_DOUBLE = "{% set n = namespace(x=X) %}{% for i in range(60) %}{% set n.x = Y %}{% endfor %}"
BOMBS = {
    "loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "empty loops": "{% for i in range(99999) %}{% for j in range(99999) if false %}{% endfor %}"
    "{% endfor %}",
    "macros": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}"
    "{{ m(60) }}",
    "~": _DOUBLE.replace("X", "'a'").replace("Y", "n.x ~ n.x") + "{{ n.x|length }}",
    "+": _DOUBLE.replace("X", "'a'").replace("Y", "n.x + n.x") + "{{ n.x|length }}",
    "+ of lists": _DOUBLE.replace("X", "[1]").replace("Y", "n.x + n.x"),
    "captured": "{% set n = namespace(x='a') %}{% for i in range(60) %}{% set n.x %}{{ n.x }}"
    "{{ n.x }}{% endset %}{% endfor %}",
    "nested": _DOUBLE.replace("X", "['a']").replace("Y", "[n.x, n.x]") + "{{ n.x }}",
    "nested as JSON": _DOUBLE.replace("X", "['a']").replace("Y", "[n.x, n.x]") + "{{ n.x|tojson }}",
    "nested, compared": _DOUBLE.replace("X", "['a']").replace("Y", "[n.x, n.x]")
    + _DOUBLE.replace("X", "['a']")
    .replace("Y", "[n.x, n.x]")
    .replace("n.", "m.")
    .replace("set n ", "set m ")
    + "{{ n.x == m.x }}",
    "numbers": _DOUBLE.replace("X", "3").replace("Y", "n.x * n.x"),
    "center": "{{ 'a'|center(2000000000) }}",
    "ljust": "{{ 'a'.ljust(2000000000) }}",
    "%": "{{ '%02000000000d' % 1 }}",
    "format": "{{ '{:>2000000000}'.format(1) }}",
    "format filter": "{{ '%2000000000s'|format('a') }}",
    "indent": "{{ messages|tojson(indent=2000000000) }}",
    "replace": "{{ ('a' * 999999).replace('a', 'b' * 999999)|length }}",
    "replace filter": "{{ ('a' * 999999)|replace('a', 'b' * 999999)|length }}",
    "join": "{{ ('a' * 999999).join(['b'] * 999999)|length }}",
    "searches": "{% set x = 'a' * 9999999 %}{% for i in range(99999) %}{{ 'b' in x }}{% endfor %}",
    "slices": "{% set x = [1] * 9999999 %}{% for i in range(99999) %}{% set y = x[1:] %}"
    "{% endfor %}",
    "filters": "{% set x = [1] * 9999999 %}{% for i in range(99999) %}{% set y = x|list %}"
    "{% endfor %}",
    "strip": "{{ ('a' * 999999).strip('b' * 999999 ~ 'a')|length }}",
    "strip, its argument named": "{% for i in range(9999) %}"
    "{{ ('a' * 99999).lstrip(*['b' * 99999 ~ 'a'])|length }}{% endfor %}",
    "trim filter": "{{ ('a' * 999999)|trim('b' * 999999 ~ 'a')|length }}",
    "split": "{% set n = namespace(x=[]) %}{% for i in range(99) %}"
    "{% set n.x = n.x + [('ab ' * 999999).split(' ')] %}{% endfor %}",
    "split at blanks": "{% set n = namespace(x=[]) %}{% for i in range(99) %}"
    "{% set n.x = n.x + [('ab ' * 999999).split()] %}{% endfor %}",
    "+ of many": _DOUBLE.replace("X", "'a'").replace("Y", "n.x + n.x + n.x + n.x")
    + "{{ n.x|length }}",
    "dates": "{{ strftime_now('%02000000000d') }}",
}


@pytest.mark.parametrize("source", BOMBS.values(), ids=BOMBS)
def test_a_bomb_costs_a_bounded_time_and_memory(source: str) -> None:
    """Each of them made gigabytes, or never ended, at the start of a router that heard no signal;
    the child that would be killed here keeps the test from hanging."""
    code = (
        "import resource, sys\n"
        "resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))\n"
        "resource.setrlimit(resource.RLIMIT_CPU, (90, 90))\n"
        "from router.prompt.errors import ModelFilesError, UntokenizableError\n"
        "from router.prompt.chat.template import ChatTemplate\n"
        "messages = [{'role': 'user', 'content': 'hi'}]\n"
        "try:\n"
        "    print(len(ChatTemplate(sys.argv[1]).render({'messages': messages})))\n"
        "except (ModelFilesError, UntokenizableError) as error:\n"
        "    print('refused')\n"
        # Not ru_maxrss: a child begins with its parent's.
        "status = open('/proc/self/status').read()\n"
        "print(int(status.partition('VmHWM:')[2].split()[0]) // 1024)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, source], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    said, mebibytes = done.stdout.split()
    assert said == "refused"
    assert int(mebibytes) < 800


class _Told(dict[str, object]):
    def __missing__(self, name: str) -> str:
        return f"no {name}"


SHORTCUTS = (
    *("m.role", "m.nothing", "m['nothing']", "m.nothing.more", "m.items", "m.get", "m._x", "m.k.x"),
    *("m.get('role')", "m.get('nothing')", "m.get('nothing', 1)", "m.get(1)", "m.get()"),
    *("m.items()|list", "m.keys()|list", "m.values()|list", "m.pop('role')", "m.copy().role"),
    *("told.x", "told.get('x')", "hiding.get", "hiding.items", "hiding['get']", "hiding.split"),
    *("m.content.split('b')", "m.content.split()", "m.content.split('b', 1)", "'a b'.rsplit()"),
    *("m.content.split(sep='b')", "m.content.strip('xa')", "m.content.startswith('x')"),
    *("m.content.startswith(('x', 'a'))", "m.content.strip(1)", "m.content.upper().lower()"),
    *("m.content.format", "'{}'.format(m.role)", "'{0.__class__}'.format(m)", "m.content.get('x')"),
    *("m.content.__class__", "m.__class__", "n.__class__", "n._x", "n.x", "n.nothing", "n.none"),
    *("n.f('x')", "m.n.split('b')", "m.l.split('b')", "none.x", "none.split('b')", "x.split('b')"),
    *("'a' + m.role + 'b' + m.content", "1 + 2 + 3", "'a' + 1", "1 + 'a'", "[1] + [2] + [m.n]"),
    *("'a' + (m.role + 'b')", "m.n + 1 + 2.5", "m.x + 'a'", "'a' + m.x", "'a' + none"),
    *("'a' + m.role|upper + 'b'", "mac('x')", "mac()", "mac('x', 'y')", "mac(a='x')", "mac.name"),
    *("mac.__call__", "dict(a=1).a", "cycler('a', 'b').next()", "range(3).start", "(1).real"),
)


@pytest.mark.parametrize("expression", SHORTCUTS)
def test_short_ways_lead_where_jinja_s_own_lead(expression: str) -> None:
    """What is faster must not be another language."""
    source = (
        "{% macro mac(a, b='d') %}{{ a }}{{ b }}{{ caller() if caller }}{% endmacro %}"
        "{% set n = namespace(x='y', none=none, f=mac) %}"
        "{% for m in messages %}{{ EXPRESSION }};{{ loop.index }}{{ loop.index0 }}{{ loop.first }}"
        "{{ loop.last }}{{ loop.length }}{{ loop.revindex }}{{ loop.depth }}{{ loop.nothing }}"
        "{{ loop.previtem is defined }}{{ loop.cycle('a', 'b') }}"
        "{% call mac('c') %}called {{ m.role }}{% endcall %}{% endfor %}"
    ).replace("EXPRESSION", expression)
    messages = [
        {"role": "user", "content": "xabxb cx", "n": 3, "l": ["b"], "k": None, "_x": "under"},
        {"role": "assistant", "content": "", "n": 0, "l": [], "k": {"x": 1}, "_x": "under"},
    ]
    context = {
        "messages": messages,
        "told": _Told(y=1),
        "hiding": {"get": 1, "items": 2, "split": 3},
    }
    settings = {"trim_blocks": True, "lstrip_blocks": True}
    ours, theirs = (
        _outcome(environment.from_string(source), context)
        for environment in (
            BoundedSandbox(2**20, **settings),
            ImmutableSandboxedEnvironment(**settings),
        )
    )
    assert ours == theirs


def _outcome(template: Template, context: dict[str, object]) -> object:
    """What it writes, or what it raises; objects without their addresses."""
    try:
        return re.sub("0x[0-9a-f]+", "", template.render(context))
    except Exception as error:  # noqa: BLE001 - whatever it is
        return type(error)


def test_a_template_that_does_too_much_is_named_at_load() -> None:
    """So a start, and its check, say so; it does not hang."""
    with pytest.raises(ModelFilesError, match="model X: does too much; must render four short"):
        ChatTemplate(BOMBS["loops"], place="model X")


def test_a_long_conversation_is_no_bomb() -> None:
    """The bound is for templates that multiply, not for clients that write much."""
    source = (
        "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content']|trim ~ '\\n' }}"
        "{% if loop.index0 == messages|length - 1 %}end{% endif %}{% endfor %}"
    )
    messages = [{"role": "user", "content": "x" * 700} for _ in range(20_000)]
    assert len(_render(source, 2**24, messages=messages)) == 20_000 * 709 + 3


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
            "{% set ns = namespace(rest=messages) %}" + _loops("ns.rest", _over("m.content")),
            "openai",
        ),
        (
            "{% set ns = namespace(rest=[]) %}{% if true %}{% set ns.rest = messages[1:] %}"
            "{% endif %}{% set loop_messages = ns.rest %}"
            + _loops("loop_messages", _over("m.content")),
            "openai",
        ),
        (
            "{% set ns = namespace(rest=messages) %}" + _loops("ns.others", _over("m.content")),
            "string",
        ),
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
