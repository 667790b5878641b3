"""Text <-> token ids: the interface of tokenizers, and the engine's own, whose tokens are bytes."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from kvroute_engine.http.chat import Chat, message_text
from kvroute_engine.http.errors import ConversationError

NUM_BYTES = 256
BOS_TOKEN_ID = 256
EOS_TOKEN_ID = 257
_ROLES = {
    "system": 258,
    "developer": 258,
    "user": 259,
    "assistant": 260,
    "tool": 261,
    "function": 261,
}
_END_OF_TURN = 262

_SPECIAL_TEXTS = {
    BOS_TOKEN_ID: "<|bos|>",
    EOS_TOKEN_ID: "<|eos|>",
    258: "<|system|>",
    259: "<|user|>",
    260: "<|assistant|>",
    261: "<|tool|>",
    _END_OF_TURN: "<|end|>",
}


class Detokenizer(Protocol):
    """Turns the ids of one response into text as they come.

    The texts it returns, joined, are the text of all ids.
    """

    def feed(self, token_ids: Sequence[int]) -> str:
        """Take ids; return the text that is certain now. Half a character is held back."""

    def finish(self) -> str:
        """Return the text held back, since no more ids will come."""


class Tokenizer(Protocol):
    """Text to token ids and back. Safe to call from several threads at once."""

    @property
    def vocab_size(self) -> int:
        """Return one more than the largest id it makes."""

    @property
    def eos_token_id(self) -> int | None:
        """Return the id that ends a response."""

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Tokenise a text.

        Args:
            add_special_tokens: True to add the special tokens that the model expects around it.
        """

    def encode_chat(self, chat: Chat) -> list[int]:
        """Tokenise a conversation.

        Raises:
            ConversationError: It cannot be written as a prompt.
        """

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        """Return the text of ids.

        Args:
            token_ids: Any ids; unknown ones have no text.
            skip_special_tokens: True to leave special tokens out.
        """

    def token_texts(self, token_ids: Sequence[int]) -> list[str]:
        """Return the text of each id by itself, for people."""

    def detokenizer(self, skip_special_tokens: bool) -> Detokenizer:
        """Return a detokenizer for one response."""


class ByteTokenizer:
    """Ids 0 to 255 are UTF-8 bytes; the few above are special tokens, which text cannot forge."""

    vocab_size = _END_OF_TURN + 1
    eos_token_id = EOS_TOKEN_ID

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Return the text's bytes.

        Args:
            add_special_tokens: True to put a beginning-of-sequence token before them.
        """
        return [*([BOS_TOKEN_ID] if add_special_tokens else []), *text.encode()]

    def encode_chat(self, chat: Chat) -> list[int]:
        """Write each message as its role, its text and an end of turn.

        Tools come first, as a system message in JSON.

        Raises:
            ConversationError: A role is unknown, or a content is not text.
        """
        ids = [BOS_TOKEN_ID] * (1 + chat.add_special_tokens)
        if chat.tools:
            ids += [_ROLES["system"], *_json_bytes(chat.tools), _END_OF_TURN]
        for index, message in enumerate(chat.messages):
            ids += [
                _role_token(message, index),
                *_message_bytes(message, f"messages[{index}]"),
                _END_OF_TURN,
            ]
        if chat.continue_final_message:
            return ids[:-1]
        return [*ids, _ROLES["assistant"]] if chat.add_generation_prompt else ids

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        """Return the text of ids; invalid UTF-8 becomes U+FFFD.

        Args:
            token_ids: Any ids; unknown ones have no text.
            skip_special_tokens: True to leave special tokens out.
        """
        return _bytes_of(token_ids, skip_special_tokens).decode("utf-8", "replace")

    def token_texts(self, token_ids: Sequence[int]) -> list[str]:
        return [self.decode([token_id], skip_special_tokens=False) for token_id in token_ids]

    def detokenizer(self, skip_special_tokens: bool) -> Detokenizer:
        return _ByteDetokenizer(skip_special_tokens)


class _ByteDetokenizer:
    def __init__(self, skip_special_tokens: bool) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._skip_special_tokens = skip_special_tokens

    def feed(self, token_ids: Sequence[int]) -> str:
        return self._decoder.decode(_bytes_of(token_ids, self._skip_special_tokens))

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


def _bytes_of(token_ids: Iterable[int], skip_special_tokens: bool) -> bytes:
    pieces = (
        bytes((token_id,))
        if 0 <= token_id < NUM_BYTES
        else _special_bytes(token_id, skip_special_tokens)
        for token_id in token_ids
    )
    return b"".join(pieces)


def _special_bytes(token_id: int, skip_special_tokens: bool) -> bytes:
    return b"" if skip_special_tokens else _SPECIAL_TEXTS.get(token_id, "").encode()


def _role_token(message: Mapping[str, Any], index: int) -> int:
    token_id = _ROLES.get(str(message.get("role")))
    if token_id is None:
        raise ConversationError(
            f"messages[{index}].role: unknown; must be one of {', '.join(_ROLES)}"
        )
    return token_id


def _message_bytes(message: Mapping[str, Any], path: str) -> bytes:
    calls = message.get("tool_calls")
    return message_text(message, path).encode() + (_json_bytes(calls) if calls else b"")


def _json_bytes(value: object) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()
