"""`ChatPrompt` -> text of the prompt, with the templates of one model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from types import MappingProxyType
from typing import Any

from router.prompt.chat.conversation import (
    merge_system_messages,
    normalise,
    without_developer_role,
)
from router.prompt.chat.parts import has_media
from router.prompt.chat.sglang_conversation import as_sglang
from router.prompt.chat.template import ChatTemplate
from router.prompt.errors import UntokenizableError
from router.prompt.model_files import ModelFiles
from router.prompt.prompts import ChatPrompt

# vLLM writes the chats of these models with code of its own; their templates, where there are any,
# are not used. It tells them by `architectures`; these are the types that have them.
_RENDERED_BY_CODE = frozenset(
    (
        *("deepseek_v32", "deepseek_v4", "deepseek_v41", "inkling_mm_model", "inkling_model"),
        *("kimi_audio", "kimi_k3"),
    )
)
# This one too, and before 0.33 the engine's `/tokenize` follows the template all the same and
# returns other ids than chats have. SGLang writes its chats with the template.
_HARMONY = "gpt_oss"
_HARMONY_REASON = "harmony"

# Private characters that stand where a medium was, so that two renderings part just there.
_MARKS = ("\ue000", "\ue001")

_PROCESSOR = "processor"
_EFFORTS = ("low", "medium", "high", "xhigh", "max")
"""What clients of `/v1/messages` may ask for."""

_TEMPLATE = "chat_template"
# Template variables that are the renderer's own; a client's argument of the same name is ignored.
_RESERVED = frozenset(("messages", "add_generation_prompt", "continue_final_message", "tokenize"))


@dataclass(frozen=True)
class RenderedChat:
    """Text of a prompt."""

    text: str = field(repr=False)
    """All of it, or the part that certainly stands before the first medium."""
    is_prefix: bool = False
    """True for a part only."""


class ChatRenderer:
    """Chooses a template, prepares the messages, renders."""

    def __init__(
        self,
        files: ModelFiles,
        chat_template: str | None = None,
        now: Callable[[], datetime] = datetime.now,
        template_arguments: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        """Compile the templates of *files*.

        Args:
            chat_template: Text of a template that replaces the model's (the engine's
                `--chat-template`).
            now: Clock of templates that write the date.
            template_arguments: Variables that requests may override (the engine's
                `--default-chat-template-kwargs`).
        Raises:
            ModelFilesError: A template is not valid Jinja.
        """
        self._templates = {
            name: ChatTemplate(source, place=f"{files.path}: chat template {name}", now=now)
            for name, source in _sources(files, chat_template).items()
        }
        self._special_tokens = dict(files.special_tokens)
        self._default_arguments = template_arguments
        self._obstacle = _obstacle(files)
        self._takes_inline_system = all(
            template.takes_inline_system for template in self._templates.values()
        )
        self._turns_thinking_off = self._obstacle is not None or self._tries_without_thinking()

    @property
    def is_harmony(self) -> bool:
        """Return whether vLLM writes the model's chats in OpenAI's harmony format."""
        return self._obstacle == _HARMONY_REASON

    def render(self, prompt: ChatPrompt) -> RenderedChat:
        """Write *prompt* as text.

        Raises:
            UntokenizableError: The model has no template, the engine does not use it, or it refused
                the conversation; or the client brings its own.
        """
        if self._obstacle is not None and not self._is_by_template(prompt):
            raise UntokenizableError(self._obstacle)
        if _TEMPLATE in prompt.template_arguments:
            # As in the field of that name: a client's template is never run here.
            raise UntokenizableError("request_chat_template")
        if prompt.is_sglang and prompt.continue_final_message:
            # SGLang adds the ids of the open message to those of the rest.
            raise UntokenizableError("engine_renders_itself")
        template = self._choose(has_tools=prompt.tools is not None)
        if not has_media(prompt.messages):
            return RenderedChat(self._render(template, prompt, None))
        # Up to the first medium the engine's text is what two renderings have in common that differ
        # only there.
        form = template.sglang_form if prompt.is_sglang else template.form
        first = self._render(template, prompt, _MARKS[0] if form == "string" else None)
        second = self._render(template, prompt, _MARKS[1])
        return RenderedChat(_common_prefix(first, second), is_prefix=True)

    def _is_by_template(self, prompt: ChatPrompt) -> bool:
        """Return whether SGLang writes a chat with the template that vLLM does not use."""
        return prompt.is_sglang and self.is_harmony and not prompt.is_of_responses

    def _choose(self, *, has_tools: bool) -> ChatTemplate:
        """Pick by name as transformers does; a processor's template goes first where there are no
        tools."""
        names = ("tool_use", "default", _PROCESSOR) if has_tools else (_PROCESSOR, "default")
        for name in names:
            if name in self._templates:
                return self._templates[name]
        raise UntokenizableError("no_chat_template")

    def _render(self, template: ChatTemplate, prompt: ChatPrompt, media_mark: str | None) -> str:
        messages: Sequence[Mapping[str, Any]]
        if prompt.is_sglang:
            messages = as_sglang(self._arranged(prompt), template.sglang_form, media_mark)
            return template.render({**self._context(prompt), "messages": messages})
        messages = normalise(self._arranged(prompt), template.form, media_mark)
        if not template.knows_developer_role and any(
            message["role"] == "developer" for message in messages
        ):
            messages = without_developer_role(messages)
        context = {**self._context(prompt), "messages": messages}
        return template.render(context, continue_final_message=prompt.continue_final_message)

    def _arranged(self, prompt: ChatPrompt) -> Sequence[Mapping[str, Any]]:
        """Return the messages, with one system message in front where the templates take no
        others."""
        if (
            prompt.merge_inline_system
            and not self._takes_inline_system
            and any(message["role"] == "system" for message in prompt.messages[1:])
        ):
            return merge_system_messages(prompt.messages, "\n" if prompt.is_sglang else "")
        return prompt.messages

    def _tries_without_thinking(self) -> bool:
        """Return whether the effort `none` makes a text of its own, as vLLM tries it: else it asks
        for `low`."""
        without = self._try_effort("none")
        return without is not None and all(
            self._try_effort(effort) != without for effort in _EFFORTS
        )

    def _try_effort(self, effort: str) -> str | None:
        fields = {"reasoning_effort": effort, "enable_thinking": effort != "none"}
        messages = [{"role": "user", "content": "Hi"}]
        try:
            return self.render(ChatPrompt(messages, template_arguments=fields)).text
        except UntokenizableError:
            return None

    def _context(self, prompt: ChatPrompt) -> dict[str, Any]:
        """Gather the variables; later ones win, in the engine's order."""
        given = prompt.template_arguments
        if prompt.least_thinking is not None and not self._turns_thinking_off:
            given = prompt.least_thinking
        given = {**self._default_arguments, **given}
        arguments = {name: value for name, value in given.items() if name not in _RESERVED}
        tools = {} if prompt.tools is None else {"tools": prompt.tools}
        documents = {} if prompt.documents is None else {"documents": prompt.documents}
        return {
            "tools": None,
            "documents": None,
            **self._special_tokens,
            **tools,
            **arguments,
            **documents,
            "add_generation_prompt": prompt.add_generation_prompt,
        }


def _sources(files: ModelFiles, chat_template: str | None) -> Mapping[str, str]:
    if chat_template:
        return {"default": chat_template}
    if files.processor_template is None:
        return files.chat_templates
    return {**files.chat_templates, _PROCESSOR: files.processor_template}


def _obstacle(files: ModelFiles) -> str | None:
    """Return why no template of this model can be trusted; None where it can."""
    if files.model_type == _HARMONY:
        return _HARMONY_REASON
    if files.model_type in _RENDERED_BY_CODE or files.has_mistral_tokenizer:
        return "engine_renders_itself"
    return None


def _common_prefix(first: str, second: str) -> str:
    """Return the common prefix, in a few comparisons of slices."""
    low, high = 0, min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle - 1
    return first[:low]
