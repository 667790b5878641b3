"""The ends of a chat's messages lie where chats that go on otherwise part, in tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tokenizers import Tokenizer

from router.prompt.local.tokenizer import LocalTokenizer
from router.prompt.prompts import NO_ENDS, ChatPiece, ChatPrompt, MessageEnds
from router.prompt.token_ids import TokenIds, Truncation

TEMPLATES = {
    "qwen": (
        "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{% if message['content'] "
        "is string %}{{ message['content'] | trim }}{% else %}{% for part in message['content'] %}"
        "{{ part['text'] }}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
    "llama3": (
        "<|begin_of_text|>{% for message in messages %}<|start_header_id|>{{ message['role'] }}"
        "<|end_header_id|>\n\n{{ message['content'] | trim }}<|eot_id|>{% endfor %}"
        "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
    ),
}


@pytest.fixture(params=["native", "library"])
def local_for(
    request: pytest.FixtureRequest,
    build_tokenizer: Callable[[str], Tokenizer],
    local_of: Callable[..., LocalTokenizer],
) -> Callable[[str], LocalTokenizer]:
    def build(kind: str) -> LocalTokenizer:
        return local_of(
            build_tokenizer(kind),
            chat_templates={"default": TEMPLATES[kind]},
            use_native=request.param == "native",
        )

    return build


def tokenised(local: LocalTokenizer, prompt: ChatPrompt) -> tuple[TokenIds, MessageEnds]:
    prepared = local.prepare(prompt, "a salt")
    ids = local.finish(prepared)
    return ids, local.message_ends(prepared, ids)


def chat(*contents: Any, **options: Any) -> ChatPrompt:
    roles = ["system", *["user", "assistant"] * 20]
    messages = [
        {"role": role, "content": content} for role, content in zip(roles, contents, strict=False)
    ]
    return ChatPrompt(messages=messages, **options)


def shared(first: TokenIds, second: TokenIds) -> int:
    return next(
        place for place, pair in enumerate(zip(first, second, strict=False)) if len({*pair}) > 1
    )


@pytest.mark.parametrize("kind", ["qwen", "llama3"])
def test_chats_with_one_system_prompt_part_right_behind_its_end(
    local_for: Callable[[str], LocalTokenizer], kind: str
) -> None:
    """The header of the next message is shared as well; a few tokens, which no block needs."""
    local, system = local_for(kind), "You are a helper.\n" * 30
    one, ends = tokenised(local, chat(system, "What is it?", "That.", "And this?"))
    other, _ = tokenised(local, chat(system, "Where is it?"))
    parted = shared(one, other)
    assert parted - 8 <= ends.expected[0] <= parted
    again, _ = tokenised(local, chat(system, "What is it?", "This."))
    assert shared(one, again) - 8 <= ends.expected[1] <= shared(one, again)
    assert len(ends.expected) == 3
    assert ends.named == ()


def test_a_long_part_ends_within_its_message(local_for: Callable[[str], LocalTokenizer]) -> None:
    """A document before the question, where no marker stands between them."""
    local, document = local_for("qwen"), "The quick brown fox jumps. " * 50
    parts = [{"type": "text", "text": document}, {"type": "text", "text": "Who jumps?"}]
    others = [parts[0], {"type": "text", "text": "How often?"}]
    one, ends = tokenised(local, chat("Answer.", parts))
    other, _ = tokenised(local, chat("Answer.", others))
    parted = shared(one, other)
    assert parted - 4 <= ends.expected[1] <= parted


def test_what_the_client_caches_is_told_apart(local_for: Callable[[str], LocalTokenizer]) -> None:
    """`cache_control` at a part; also where the form of the client has other parts."""
    local = local_for("qwen")
    marked = [{"type": "text", "text": "Rules. " * 50, "cache_control": {"type": "ephemeral"}}]
    _, ends = tokenised(local, chat(marked, "one", "two", "three"))
    assert (len(ends.named), len(ends.expected)) == (1, 2)
    pieces = [ChatPiece("Rules. " * 50, True), ChatPiece("one", False)]
    _, ends = tokenised(local, chat("Rules. " * 50, "one", pieces=pieces))
    assert (len(ends.named), len(ends.expected)) == (1, 0)


def test_what_cannot_be_found_has_no_end(local_for: Callable[[str], LocalTokenizer]) -> None:
    """A template that changes a message, a prompt that is cut, a single message."""
    local = local_for("qwen")
    assert tokenised(local, chat("alone"))[1] == NO_ENDS
    cut = Truncation(10, "left", counts_special_tokens=True)
    assert tokenised(local, chat("one " * 20, "two", truncation=cut))[1] == NO_ENDS
    pieces = [ChatPiece("not there", True), ChatPiece("two", False)]
    assert tokenised(local, chat("one " * 20, "two", pieces=pieces))[1] == NO_ENDS


def test_hundreds_of_messages_name_the_first(local_for: Callable[[str], LocalTokenizer]) -> None:
    """What lies further back is the session's own; it goes on from the end of its last prompt."""
    contents = [f"message number {number}" for number in range(40)]
    ids, ends = tokenised(local_for("llama3"), chat(*contents))
    assert len(ends.expected) == 8
    assert list(ends.expected) == sorted(ends.expected)
    assert ends.expected[-1] < len(ids) // 2
