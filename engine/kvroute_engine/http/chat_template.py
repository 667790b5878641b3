"""A model's chat template, rendered in a sandbox with the options and helpers of transformers.

The router renders templates too, in `router/prompt/chat`, and shares no code with this on
purpose: the end-to-end tests compare the router's token ids with the engine's, and only an
independent implementation makes that a test.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from kvroute_engine.http.chat import Chat, message_parts, message_text
from kvroute_engine.http.errors import ConversationError, TokenizerError

MAX_PROMPT_CHARS = 16_777_216

# What a template may raise over a client's data. The messages quote the conversation, so they are
# dropped.
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
_SENTINEL = "b7c1-open-end"


class _GenerationBlock(Extension):
    """`{% generation %}` marks the assistant's words for training; in a prompt it is a scope."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(
            parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line
        )


class EngineChatTemplate:
    """A compiled template: chats in, text out."""

    def __init__(self, text: str, file: str, special_tokens: Mapping[str, str]) -> None:
        """
        Args:
            file: The file it was read from, for the error.
            special_tokens: Variables for the template, such as `bos_token`.

        Raises:
            TokenizerError: The template is invalid.
        """
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals.update(
            raise_exception=_refuse, strftime_now=lambda pattern: datetime.now().strftime(pattern)
        )
        try:
            self._template = environment.from_string(text)
        except (TemplateSyntaxError, RecursionError) as error:
            raise TokenizerError(f"{file}: invalid chat template: {error}") from error
        self._special_tokens = dict(special_tokens)
        self._takes_parts = self._knows_parts()

    def render(self, chat: Chat) -> str:
        """Write a chat as the text of a prompt.

        Raises:
            ConversationError: The template refuses the conversation, or the text gets too long.
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
        """Render up to the end of the last message's text, which a sentinel behind it shows."""
        last = messages[-1]
        content = last["content"]
        extended: object = content + _SENTINEL
        if isinstance(content, list):
            extended = [*content, {"type": "text", "text": _SENTINEL}]
        text = self._render([*messages[:-1], {**last, "content": extended}], context)
        end = text.rfind(_SENTINEL)
        if end < 0:
            raise ConversationError(
                "messages: the model's chat template cannot leave the last message open"
            )
        return text[:end]

    def _normalised(self, message: Mapping[str, Any], index: int) -> dict[str, Any]:
        """Return the message as the template expects it.

        Its content is one text or a list of parts; the arguments of tool calls are objects.
        """
        path = f"messages[{index}]"
        text: str | list[dict[str, str]] = message_text(message, path)
        if self._takes_parts:
            text = [{"type": "text", "text": part} for part in message_parts(message, path)]
        normalised = {**message, "content": text}
        if calls := message.get("tool_calls"):
            normalised["tool_calls"] = [_with_arguments(call) for call in calls]
        return normalised

    def _knows_parts(self) -> bool:
        """Return whether the template writes the parts of a content, found by rendering one.

        A template that expects text writes the list itself: `[{'type': 'text', ...}]`.
        """
        parts = [{"role": "user", "content": [{"type": "text", "text": _SENTINEL}]}]
        try:
            text = self._render(parts, {**self._special_tokens, "add_generation_prompt": False})
        except ConversationError:
            return False
        return _SENTINEL in text and "'text'" not in text and '"text"' not in text


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
