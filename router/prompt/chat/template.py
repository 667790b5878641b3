"""A model's chat template: a conversation rendered to the text of a prompt, in a sandbox.

The settings are those of transformers, which engines render with: trimmed blocks, loop controls,
`raise_exception`, `strftime_now`, `tojson` that keeps characters outside ASCII, and a
`generation` block that only groups.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser

from router.prompt.chat.bounded_jinja import BoundedSandbox, TooMuchWork, checked_date_pattern
from router.prompt.endpoints import ContentForm
from router.prompt.errors import ModelFilesError, UntokenizableError
from router.prompt.limits import MAX_PROMPT_CHARS

# What template code may raise on a client's data. All of it means that this conversation cannot be
# rendered. The messages quote the conversation, so they are dropped.
_TEMPLATE_FAULTS = (
    TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    RuntimeError,
    TypeError,
    ValueError,
)
_WORK_PER_CHAR = 8
_LEAST_CHARS = 2**24
_MAX_SOURCE_CHARS = 1_048_576
_CONTINUATION_MARK = "CONTINUE_FINAL_MESSAGE_TAG "


class _GroupingExtension(Extension):
    """`{% generation %}` marks the assistant's words for training; in a prompt it only opens
    a scope."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class _Sandbox(BoundedSandbox):
    """The bounded sandbox with the settings of transformers."""

    def __init__(self, max_chars: int) -> None:
        super().__init__(
            _WORK_PER_CHAR * max(max_chars, _LEAST_CHARS),
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_GroupingExtension, loopcontrols],
        )
        self.set_filter("tojson", _to_json)
        self.globals["raise_exception"] = _raise_exception


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


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


class ChatTemplate:
    """A compiled template."""

    def __init__(
        self,
        source: str,
        *,
        place: str = "chat template",
        max_chars: int = MAX_PROMPT_CHARS,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        """Compile a template.

        Args:
            max_chars: Longest text that `render` returns.
            now: Clock of `strftime_now`; it should show the engine's local time.
        Raises:
            ModelFilesError: The template is not valid Jinja.
        """
        if len(source) > _MAX_SOURCE_CHARS:
            rule = f"must have at most {_MAX_SOURCE_CHARS} characters"
            raise ModelFilesError(place, f"{len(source)} characters", rule)
        environment = self._environment = _Sandbox(max_chars)
        environment.globals["strftime_now"] = lambda pattern: now().strftime(
            checked_date_pattern(pattern)
        )
        try:
            tree = environment.parse(source)
            self._template = environment.from_string(source)
        except (TemplateSyntaxError, RecursionError, SyntaxError, MemoryError) as error:
            raise ModelFilesError(place, str(error), "must be a valid jinja template") from error
        self._max_chars = max_chars
        self._mentions_content = "content" in source
        self.form: ContentForm = content_form(tree)
        """The form of content that it expects."""
        self.sglang_form = sglang_content_form(source, tree)
        """The same as SGLang sees it."""
        self.knows_developer_role = '"developer"' in source or "'developer'" in source
        """True if it accepts developer messages."""
        try:
            self.takes_inline_system = _takes_inline_system(source, max_chars)
        except TooMuchWork:
            rule = "must render four short messages in a bounded number of steps"
            raise ModelFilesError(place, "does too much", rule) from None
        """True if it accepts system messages after the first message."""

    def render(self, context: Mapping[str, Any], *, continue_final_message: bool = False) -> str:
        """Return the prompt's text.

        Args:
            context: Variables of the template; `messages` among them, normalised.
            continue_final_message: Leave the last message open.
        Raises:
            UntokenizableError: The template refused the conversation, or the text grew too long.
        """
        try:
            if continue_final_message:
                return self._render_open(context)
            return self._render(context)
        except SecurityError:
            raise UntokenizableError("template_forbidden") from None
        except _TEMPLATE_FAULTS:
            raise UntokenizableError("template_refused") from None

    def _render(self, context: Mapping[str, Any]) -> str:
        self._environment.allow()
        pieces: list[str] = []
        left = self._max_chars
        for piece in self._template.generate(context):
            left -= len(piece)
            if left < 0:
                raise UntokenizableError("prompt_too_long")
            pieces.append(piece)
        return "".join(pieces)

    def _render_open(self, context: Mapping[str, Any]) -> str:
        """Render with a mark behind the last message's text, and end where the mark is.

        A template that trims the message takes the blank at the mark's end away too; then the
        blanks before the mark are trimmed as the template would have trimmed them.
        """
        if context.get("add_generation_prompt") or not self._mentions_content:
            raise ValueError
        *others, last = context["messages"]
        text = self._render({**context, "messages": [*others, _marked(last)]})
        end = text.rindex(_CONTINUATION_MARK.strip())
        is_untrimmed = text.startswith(_CONTINUATION_MARK, end)
        return text[:end] if is_untrimmed else text[:end].rstrip()


def _takes_inline_system(source: str, max_chars: int) -> bool:
    """Try it as vLLM does: without what transformers adds to Jinja, so that a template that needs
    some of it counts as one that takes none."""
    sandbox = BoundedSandbox(
        _WORK_PER_CHAR * max(max_chars, _LEAST_CHARS),
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[loopcontrols],
    )
    sandbox.allow()
    roles = ("system", "user", "system", "user")
    messages = [{"role": role, "content": "t"} for role in roles]
    left = max_chars
    try:
        template = sandbox.from_string(source)
        for piece in template.generate(messages=messages, add_generation_prompt=False):
            left -= len(piece)
            if left < 0:
                return False
    except TooMuchWork:
        raise
    except _TEMPLATE_FAULTS:
        return False
    return True


def _marked(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return the message with the mark behind its text, behind its last part of text where it has
    parts."""
    content = message["content"]
    if isinstance(content, str):
        return {**message, "content": content + _CONTINUATION_MARK}
    index = max(index for index, part in enumerate(content) if "text" in part)
    part = {**content[index], "text": content[index]["text"] + _CONTINUATION_MARK}
    return {**message, "content": [*content[:index], part, *content[index + 1 :]]}


# --- the form of content it expects ---------------------------------------------------------------


def content_form(tree: nodes.Template) -> ContentForm:
    """Return whether a template loops over the parts of a message's content or writes the content
    as it is.

    vLLM's server decides it from the syntax tree, and so do we: the form changes the text. The
    template expects parts if it loops over the content of a message. A *message* is what a loop
    over `messages` (or over a variable set from it) runs through. *Content* is its field of that
    name, the argument of a macro called with it, or, outside of macros, a variable called
    `content`.
    """
    messages = _message_names(tree, _aliases(tree, "messages"))
    loops = [loop for loop in tree.find_all(nodes.For) if isinstance(loop.target, nodes.Name)]
    in_macros = {
        id(loop) for macro in tree.find_all(nodes.Macro) for loop in macro.find_all(nodes.For)
    }
    if any(_is_content_of(loop.iter, messages) for loop in loops):
        return "openai"
    if any(_is_name(loop.iter, {"content"}) and id(loop) not in in_macros for loop in loops):
        return "openai"
    if any(
        _loops_over_content_argument(macro, tree, messages) for macro in tree.find_all(nodes.Macro)
    ):
        return "openai"
    return "string"


_OF_MEDIA = ("image", "audio", "video", "vision")


def sglang_content_form(source: str, tree: nodes.Template) -> ContentForm:
    """Return the same as SGLang decides it: by a word for a medium anywhere in the template, or a
    loop over the content of a variable that is called as messages mostly are."""
    if any(word in source for word in _OF_MEDIA) or any(
        _is_content_of(loop.iter, {"message", "msg", "m"}) for loop in tree.find_all(nodes.For)
    ):
        return "openai"
    return "string"


def _peel(node: nodes.Node) -> nodes.Node:
    """Remove filters, tests and slices, which leave the elements the same."""
    while (inner := _inner(node)) is not None:
        node = inner
    return node


def _inner(node: nodes.Node) -> nodes.Node | None:
    if isinstance(node, (nodes.Filter, nodes.Test)):
        return node.node
    if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice):
        return node.node
    return None


def _is_name(node: nodes.Node, names: set[str]) -> bool:
    """Return whether a variable, or a field of a namespace (`ns.name`), is one of *names*."""
    if isinstance(node, nodes.Getattr) and isinstance(node.node, nodes.Name):
        return f"{node.node.name}.{node.attr}" in names
    return isinstance(node, nodes.Name) and node.ctx == "load" and node.name in names


def _aliases(tree: nodes.Template, name: str) -> set[str]:
    """Return *name* and every variable that is set from it, or from such a variable."""
    names = {name}
    while True:
        found = {
            target
            for assignment in tree.find_all(nodes.Assign)
            for target, value in _assigned(assignment)
            if _is_name(_peel(value), names)
        }
        if found <= names:
            return names
        names |= found


def _assigned(assignment: nodes.Assign) -> Iterator[tuple[str, nodes.Node]]:
    """Yield what an assignment sets, and to which value: a variable, or fields of a namespace."""
    target, value = assignment.target, assignment.node
    if isinstance(target, nodes.NSRef):
        yield f"{target.name}.{target.attr}", value
    if not isinstance(target, nodes.Name):
        return
    yield target.name, value
    if isinstance(value, nodes.Call) and _is_name(value.node, {"namespace"}):
        yield from ((f"{target.name}.{each.key}", each.value) for each in value.kwargs)


def _message_names(tree: nodes.Template, aliases: set[str]) -> set[str]:
    return {
        loop.target.name
        for loop in tree.find_all(nodes.For)
        if isinstance(loop.target, nodes.Name) and _is_name(_peel(loop.iter), aliases)
    }


def _is_content_of(node: nodes.Node, messages: set[str]) -> bool:
    node = _peel(node)
    if isinstance(node, nodes.Getitem):
        is_content = isinstance(node.arg, nodes.Const) and node.arg.value == "content"
        return is_content and _is_name(node.node, messages)
    return (
        isinstance(node, nodes.Getattr) and node.attr == "content" and _is_name(node.node, messages)
    )


def _loops_over_content_argument(
    macro: nodes.Macro, tree: nodes.Template, messages: set[str]
) -> bool:
    arguments = set(_content_arguments(macro, tree, messages))
    return any(
        isinstance(loop.iter, nodes.Name) and loop.iter.name in arguments
        for loop in macro.find_all(nodes.For)
    )


def _content_arguments(
    macro: nodes.Macro, tree: nodes.Template, messages: set[str]
) -> Iterator[str]:
    """Yield the names of the macro's arguments that get a message's content in some call."""
    names = [argument.name for argument in macro.args]
    for call in tree.find_all(nodes.Call):
        if not isinstance(call.node, nodes.Name) or call.node.name != macro.name:
            continue
        given = [
            *zip(names, call.args, strict=False),
            *((keyword.key, keyword.value) for keyword in call.kwargs),
        ]
        yield from (
            name for name, value in given if name in names and _is_content_of(value, messages)
        )
