"""A model's chat template, rendered in a sandbox as transformers renders it: trimmed blocks, loop
controls, its helpers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from offload.engine.http.chat import Chat, message_parts, message_text
from offload.engine.http.errors import ConversationError, TokenizerError

MAX_PROMPT_CHARS = 16_777_216

# What a template may raise over a client's data. The messages quote the conversation, so they go no
# further.
_TEMPLATE_ERRORS = (
    TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    RuntimeError,
    TypeError,
    ValueError,
)
_RESERVED = frozenset(("messages", "add_generation_prompt", "tools"))
_MARK = "b7c1-open-end"


class _GenerationBlock(Extension):
    """`{% generation %}` marks what the assistant said, for training; in a prompt it is a scope."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(
            parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line
        )


class EngineChatTemplate:
    """A compiled template; chats in, text out."""

    def __init__(self, source: str, place: str, special_tokens: Mapping[str, str]) -> None:
        """
        Args:
            source: The template.
            place: Where it came from, for the error.
            special_tokens: Variables of the template, such as `bos_token`.

        Raises:
            TokenizerError: It is no valid template.
        """
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals.update(
            raise_exception=_refuse, strftime_now=lambda pattern: datetime.now().strftime(pattern)
        )
        try:
            self._template = environment.from_string(source)
        except (TemplateSyntaxError, RecursionError) as error:
            raise TokenizerError(f"{place}: no valid chat template: {error}") from error
        self._special_tokens = dict(special_tokens)
        self._takes_parts = self._knows_parts()

    def render(self, chat: Chat) -> str:
        """The prompt's text.

        Raises:
            ConversationError: The template refuses the conversation, or the text grows too long.
        """
        messages = [self._normalised(message, index) for index, message in enumerate(chat.messages)]
        context = {
            **self._special_tokens,
            **{
                name: value
                for name, value in chat.template_arguments.items()
                if name not in _RESERVED
            },
            "tools": chat.tools,
            "add_generation_prompt": chat.add_generation_prompt and not chat.continue_final_message,
        }
        if chat.continue_final_message:
            return self._render_open(messages, context)
        return self._render(messages, context)

    def _render(self, messages: Sequence[Mapping[str, Any]], context: Mapping[str, Any]) -> str:
        pieces: list[str] = []
        left = MAX_PROMPT_CHARS
        try:
            for piece in self._template.generate({**context, "messages": messages}):
                left -= len(piece)
                if left < 0:
                    raise ConversationError(
                        f"messages: their text is longer than {MAX_PROMPT_CHARS} characters"
                    )
                pieces.append(piece)
        except _TEMPLATE_ERRORS:
            raise ConversationError(
                "messages: the model's chat template refuses this conversation"
            ) from None
        return "".join(pieces)

    def _render_open(self, messages: list[dict[str, Any]], context: Mapping[str, Any]) -> str:
        """Up to the end of the last message's text, found by a mark behind it."""
        last = messages[-1]
        content = last["content"]
        marked: object = content + _MARK
        if isinstance(content, list):
            marked = [*content, {"type": "text", "text": _MARK}]
        text = self._render([*messages[:-1], {**last, "content": marked}], context)
        end = text.rfind(_MARK)
        if end < 0:
            raise ConversationError(
                "messages: the model's chat template cannot leave the last message open"
            )
        return text[:end]

    def _normalised(self, message: Mapping[str, Any], index: int) -> dict[str, Any]:
        """The message with its content in the form that the template expects, and calls with their
        arguments as objects."""
        place = f"messages[{index}]"
        text: str | list[dict[str, str]] = message_text(message, place)
        if self._takes_parts:
            text = [{"type": "text", "text": part} for part in message_parts(message, place)]
        normalised = {**message, "content": text}
        if calls := message.get("tool_calls"):
            normalised["tool_calls"] = [_with_arguments(call) for call in calls]
        return normalised

    def _knows_parts(self) -> bool:
        """Does it write the parts of a content, rather than the content as it is? It is asked to
        write some."""
        parts = [{"role": "user", "content": [{"type": "text", "text": _MARK}]}]
        try:
            text = self._render(parts, {**self._special_tokens, "add_generation_prompt": False})
        except ConversationError:
            return False
        return _MARK in text and "'text'" not in text and '"text"' not in text


def _with_arguments(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        raise ConversationError("messages: tool_calls must hold objects with a function")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments else {}
        except (ValueError, RecursionError):
            arguments = {}
    return {**call, "function": {**function, "arguments": arguments}}


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja's own filter escapes for HTML, which no model was trained on.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)
