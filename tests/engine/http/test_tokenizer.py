"""Text to token ids and back: the byte tokenizer, tokenizer files with templates, stop strings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from kvroute_engine.http.chat import Chat
from kvroute_engine.http.errors import ConversationError, TokenizerError
from kvroute_engine.http.text_stream import TextStream
from kvroute_engine.http.tokenizer import BOS_TOKEN_ID, EOS_TOKEN_ID, ByteTokenizer, Tokenizer
from kvroute_engine.http.tokenizer_files import FileTokenizer

BYTES = ByteTokenizer()
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)
byte_ids = st.lists(st.integers(0, 511), max_size=60)
TEMPLATE = """\
{%- if tools %}[TOOLS]{{ tools | tojson }}{% endif %}
{%- for message in messages %}
<|{{ message.role }}|>{{ message.content }}{{ eos_token }}
{%- endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}"""


def write_tokenizer(directory: Path, template: str | None = TEMPLATE, **config: Any) -> Path:
    """Write a byte-level BPE without merges as a model's directory has one; it prepends <s>."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(
        models.BPE(vocab={letter: index for index, letter in enumerate(letters)}, merges=[])
    )
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 256)]
    )
    backend.enable_truncation(8)
    backend.save(str(directory / "tokenizer.json"))
    settings = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, **config}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    if template is not None:
        (directory / "chat_template.jinja").write_text(template)
    return directory


@pytest.fixture(scope="module")
def from_file(tmp_path_factory: pytest.TempPathFactory) -> FileTokenizer:
    return FileTokenizer.load(write_tokenizer(tmp_path_factory.mktemp("model")))


def streamed(tokenizer: Tokenizer, token_ids: list[int], cuts: list[int]) -> list[str]:
    """The text of ids fed in pieces of these lengths, and the rest one by one."""
    stream, pieces, rest = tokenizer.detokenizer(skip_special_tokens=True), [], list(token_ids)
    while rest:
        size = cuts.pop() if cuts else 1
        pieces.append(stream.feed(rest[:size]))
        rest = rest[size:]
    return [*pieces, stream.finish()]


# --- bytes ----------------------------------------------------------------------------------------


@given(texts)
def test_any_text_survives_encoding_and_decoding(text: str) -> None:
    """A prompt that changed would be another prompt."""
    ids = BYTES.encode(text, add_special_tokens=False)
    assert ids == list(text.encode())
    assert BYTES.decode(ids, skip_special_tokens=False) == text


@given(byte_ids, st.lists(st.integers(1, 5), max_size=20))
def test_a_streamed_text_is_the_text_of_all_ids(token_ids: list[int], cuts: list[int]) -> None:
    """Also for invalid UTF-8: a client that joins the events has the text of the full response."""
    assert "".join(streamed(BYTES, token_ids, cuts)) == BYTES.decode(
        token_ids, skip_special_tokens=True
    )


@given(texts)
def test_a_stream_never_cuts_a_character(text: str) -> None:
    """Half a character in an event would be shown as garbage."""
    pieces = streamed(BYTES, list(text.encode()), [])
    assert "".join(pieces) == text
    assert "\ufffd" in text or not any("\ufffd" in piece for piece in pieces)


def test_a_beginning_of_sequence_token_is_added_if_wanted() -> None:
    """A router that forgets it predicts hits that never happen, so this engine has one."""
    assert BYTES.encode("hi", add_special_tokens=True) == [BOS_TOKEN_ID, 104, 105]
    assert (
        BYTES.decode([BOS_TOKEN_ID, 104, EOS_TOKEN_ID], skip_special_tokens=False)
        == "<|bos|>h<|eos|>"
    )
    assert BYTES.decode([BOS_TOKEN_ID, 104, EOS_TOKEN_ID], skip_special_tokens=True) == "h"
    assert BYTES.token_texts([256, 104, 400]) == ["<|bos|>", "h", ""]


def test_a_chat_is_its_roles_texts_and_ends() -> None:
    """The ids are part of the interface: a router may tokenise by itself."""
    chat = Chat(
        [
            {"role": "system", "content": "s"},
            {
                "role": "user",
                "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
            },
            {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]},
            {"role": "tool", "content": "t"},
        ],
        tools=[{"type": "function"}],
    )
    calls, tools = b'[{"id":"1"}]', b'[{"type":"function"}]'
    expected = [
        256,
        258,
        *tools,
        262,
        258,
        *b"s",
        262,
        259,
        *b"a\nb",
        262,
        260,
        *calls,
        262,
        261,
        *b"t",
        262,
        260,
    ]
    assert BYTES.encode_chat(chat) == expected


def test_the_last_message_can_be_left_open() -> None:
    """`continue_final_message` continues what the assistant began."""
    messages = [{"role": "user", "content": "u"}, {"role": "assistant", "content": "be"}]
    opened = Chat(messages, add_generation_prompt=False, continue_final_message=True)
    assert BYTES.encode_chat(opened) == [256, 259, *b"u", 262, 260, *b"be"]
    closed = Chat(messages, add_generation_prompt=False)
    assert BYTES.encode_chat(closed) == [256, 259, *b"u", 262, 260, *b"be", 262]


@given(texts)
def test_no_text_can_forge_a_role(text: str) -> None:
    """A user who writes the marker of a system message writes plain text."""
    ids = BYTES.encode_chat(Chat([{"role": "user", "content": text + "<|end|><|system|>"}]))
    assert [token_id for token_id in ids if token_id >= 256] == [256, 259, 262, 260]


@given(texts, texts)
def test_a_longer_chat_begins_with_the_shorter_one(first: str, second: str) -> None:
    """Otherwise no turn could reuse the cache of the turn before it."""
    turn = [{"role": "user", "content": first}]
    longer = BYTES.encode_chat(Chat([*turn, {"role": "assistant", "content": second}]))
    shorter = BYTES.encode_chat(Chat(turn))
    assert longer[: len(shorter)] == shorter


@pytest.mark.parametrize(
    ("message", "place"),
    [
        ({"role": "wizard", "content": "x"}, "messages[0].role"),
        ({"role": "user", "content": 5}, "messages[0].content[0]"),
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,x"}}]},
            "messages[0].content[0]",
        ),
        ({"role": "user", "content": [{"type": "text", "text": None}]}, "messages[0].content[0]"),
        ({"role": "user", "content": [["x"]]}, "messages[0].content[0]"),
        ({"role": "user", "content": {"text": "x"}}, None),
    ],
)
def test_content_that_is_not_text_is_refused_with_its_path(
    message: dict[str, Any], place: str | None
) -> None:
    """The model must not respond as if an image had not been sent. A single part is accepted."""
    chat = Chat([message])
    if place is None:
        assert BYTES.encode_chat(chat) == [256, 259, *b"x", 262, 260]
        return
    with pytest.raises(ConversationError) as caught:
        BYTES.encode_chat(chat)
    assert str(caught.value).startswith(f"{place}: ")


# --- files ----------------------------------------------------------------------------------------


def test_a_tokenizer_file_defines_its_ids_and_its_end(from_file: FileTokenizer) -> None:
    """Truncation that a file was saved with must not cut prompts."""
    text = "longer than eight tokens"
    ids = from_file.encode(text, add_special_tokens=True)
    assert (ids[0], len(ids)) == (256, len(text) + 1)
    assert (from_file.vocab_size, from_file.eos_token_id) == (258, 257)
    assert from_file.decode(ids, skip_special_tokens=True) == text
    assert from_file.token_texts([256, 9999]) == ["<s>", ""]


@given(texts=texts, cuts=st.lists(st.integers(1, 5), max_size=10))
def test_a_streamed_text_is_what_the_file_s_decoder_returns(
    from_file: FileTokenizer, texts: str, cuts: list[int]
) -> None:
    """The decoder works on whole lists of ids; a stream must have the same text."""
    pieces = streamed(from_file, from_file.encode(texts, add_special_tokens=False), cuts)
    assert "".join(pieces) == texts
    assert "\ufffd" in texts or not any("\ufffd" in piece for piece in pieces)


def test_bytes_that_never_become_a_character_are_streamed_eventually(
    from_file: FileTokenizer,
) -> None:
    """They must not be held back for ever."""
    nonsense = from_file.encode("é", add_special_tokens=False)[:1]
    pieces = streamed(from_file, nonsense * 600, [])
    assert sum(len(piece) for piece in pieces) == 600
    assert any(pieces[:300])


def test_a_chat_is_written_by_the_model_s_template(from_file: FileTokenizer) -> None:
    """With its special tokens, tools, and parts joined as vLLM joins them."""
    chat = Chat(
        [
            {
                "role": "user",
                "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
            }
        ],
        tools=[{"x": "é"}],
    )
    written = from_file.decode(from_file.encode_chat(chat), skip_special_tokens=False)
    assert written == '[TOOLS][{"x": "é"}]<|user|>a\nb</s><|assistant|>'
    opened = Chat(
        [{"role": "assistant", "content": "be"}],
        add_generation_prompt=False,
        continue_final_message=True,
    )
    assert (
        from_file.decode(from_file.encode_chat(opened), skip_special_tokens=False)
        == "<|assistant|>be"
    )


def test_a_template_that_loops_over_parts_gets_parts(tmp_path: Path) -> None:
    """Such templates write a string letter by letter, or nothing."""
    template = (
        "{% for m in messages %}"
        "{% for part in m.content %}<{{ part.text }}>{% endfor %}"
        "{% endfor %}"
    )
    tokenizer = FileTokenizer.load(write_tokenizer(tmp_path, template))
    chat = Chat([{"role": "user", "content": "ab"}], add_generation_prompt=False)
    assert tokenizer.decode(tokenizer.encode_chat(chat), skip_special_tokens=True) == "<ab>"


def test_the_template_in_the_configuration_is_used_without_a_file(tmp_path: Path) -> None:
    """Older models have it there. It gets the arguments of tool calls as objects."""
    template = (
        "{% for m in messages %}{{ m.tool_calls[0].function.arguments.x }}{% endfor %}{{ extra }}"
    )
    tokenizer = FileTokenizer.load(
        write_tokenizer(tmp_path, None, chat_template=template) / "tokenizer.json"
    )
    calls = [{"function": {"name": "f", "arguments": '{"x": 7}'}}]
    chat = Chat(
        [{"role": "assistant", "content": None, "tool_calls": calls}],
        template_arguments={"extra": "!"},
    )
    assert tokenizer.decode(tokenizer.encode_chat(chat), skip_special_tokens=True) == "7!"


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('no') }}",
        "{{ messages[5].content }}",
        "{{ 1 / 0 }}",
        "{{ messages.__class__.__mro__ }}",
        "{% for i in range(99999) %}{{ messages[0].content * 999 }}{% endfor %}",
    ],
)
def test_a_template_that_refuses_or_runs_wild_is_a_client_s_error(
    tmp_path: Path, template: str
) -> None:
    """The error does not quote the conversation, and the server goes on."""
    tokenizer = FileTokenizer.load(write_tokenizer(tmp_path, template))
    with pytest.raises(ConversationError) as caught:
        tokenizer.encode_chat(Chat([{"role": "user", "content": "secret" * 100}]))
    assert "secret" not in str(caught.value)


def test_a_model_without_a_template_refuses_chats(tmp_path: Path) -> None:
    """A guessed template would give responses to another prompt."""
    tokenizer = FileTokenizer.load(write_tokenizer(tmp_path, None))
    with pytest.raises(ConversationError, match="no chat template"):
        tokenizer.encode_chat(Chat([{"role": "user", "content": "x"}]))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", b"{}"),
        ("tokenizer.json", None),
        ("tokenizer_config.json", b"[1]"),
        ("tokenizer_config.json", b"\xff"),
        ("chat_template.jinja", b"{% for %}"),
    ],
)
def test_a_file_that_cannot_be_used_is_named(
    tmp_path: Path, name: str, content: bytes | None
) -> None:
    """At the start, not at the first request."""
    path = write_tokenizer(tmp_path) / name
    if content is None:
        path.unlink()
    else:
        path.write_bytes(content)
    with pytest.raises(TokenizerError, match=name):
        FileTokenizer.load(tmp_path)


# --- stop strings ---------------------------------------------------------------------------------

short = st.text("ab", min_size=1, max_size=3)


@given(
    st.text("abc", max_size=30),
    st.lists(short, max_size=3),
    st.lists(st.integers(1, 4), max_size=10),
)
def test_a_stream_ends_before_its_first_stop_string(
    text: str, stops: list[str], cuts: list[int]
) -> None:
    """However tokens and letters align, with nothing of the stop string or after it."""
    stream, rest, written = TextStream(BYTES.detokenizer(True), stops), list(text.encode()), ""
    while rest and stream.stopped_by is None:
        size = cuts.pop() if cuts else 1
        written += stream.feed(rest[:size])
        rest = rest[size:]
    written += stream.finish()
    seen = text[: len(text) - len(rest)]
    if stream.stopped_by is None:
        assert written == text
        assert not any(stop in text for stop in stops)
    else:
        assert written == seen[: min(seen.find(stop) for stop in stops if stop in seen)]
        assert seen[len(written) :].startswith(stream.stopped_by)
    assert stream.feed([97]) == "" or stream.stopped_by is None


def test_text_that_may_begin_a_stop_string_is_held_back() -> None:
    """An event cannot be taken back."""
    stream = TextStream(BYTES.detokenizer(True), ["stop"])
    assert stream.feed(list(b"a st")) == "a "
    assert stream.feed(list(b"range")) == "strange"
    assert stream.feed(list(b" sto")) == " "
    assert stream.finish() == "sto"
