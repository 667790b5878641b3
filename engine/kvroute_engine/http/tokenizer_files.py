"""Any model's `tokenizer.json`, with the chat template in the same directory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import Tokenizer as HuggingFaceTokenizer

from kvevents.errors import UNREADABLE
from kvroute_engine.http.chat import Chat
from kvroute_engine.http.chat_template import EngineChatTemplate
from kvroute_engine.http.errors import ConversationError, TokenizerError
from kvroute_engine.http.tokenizer import Detokenizer

_MAX_FILE_BYTES = 256 * 1024 * 1024
_REPLACEMENT = "\ufffd"
_MAX_HELD_IDS = 256
"""Ids that may be held back for the rest of a character.

Every character has fewer, but random ids can look like the start of one for ever.
"""


class FileTokenizer:
    """A tokenizer of the `tokenizers` library; chats are written by the model's own template."""

    def __init__(
        self,
        tokenizer: HuggingFaceTokenizer,
        eos_token_id: int | None,
        template: EngineChatTemplate | None,
    ) -> None:
        """
        Args:
            eos_token_id: The id that ends a response, if there is one.
            template: Writes chats; without one they are refused.
        """
        self._tokenizer = tokenizer
        self._template = template
        self.eos_token_id = eos_token_id
        self.vocab_size: int = tokenizer.get_vocab_size(with_added_tokens=True)

    @classmethod
    def load(cls, path: Path) -> FileTokenizer:
        """Read a `tokenizer.json`, or the directory with one, and the files next to it.

        Raises:
            TokenizerError: A file is missing or cannot be used.
        """
        file = path / "tokenizer.json" if path.is_dir() else path
        tokenizer = _tokenizer(file)
        config = _config(file.parent / "tokenizer_config.json")
        special = {
            name: text
            for name in config
            if name.endswith("_token") and (text := _token_text(config[name]))
        }
        eos = special.get("eos_token")
        return cls(
            tokenizer,
            None if eos is None else tokenizer.token_to_id(eos),
            _template(file.parent, config, special),
        )

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Tokenise a text.

        Args:
            add_special_tokens: True to have the post-processor add special tokens.
        """
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def encode_chat(self, chat: Chat) -> list[int]:
        """Tokenise the template's text of a conversation.

        Raises:
            ConversationError: No template, or it refuses the conversation.
        """
        if self._template is None:
            raise ConversationError(
                "messages: this model has no chat template; use /v1/completions"
            )
        return self.encode(self._template.render(chat), chat.add_special_tokens)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        """Return the text of ids.

        Args:
            token_ids: Any ids; unknown ones have no text.
            skip_special_tokens: True to leave special tokens out.
        """
        text: str = self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        return text

    def token_texts(self, token_ids: Sequence[int]) -> list[str]:
        return [self._tokenizer.id_to_token(token_id) or "" for token_id in token_ids]

    def detokenizer(self, skip_special_tokens: bool) -> Detokenizer:
        return _WindowDetokenizer(self, skip_special_tokens)


class _WindowDetokenizer:
    """Decodes new ids together with the few before them, on which their text may depend.

    Many decoders drop a space at the start of a text, so ids cannot be decoded one by one. `_known`
    are ids whose text was returned, `_new` those after them. It returns the text of both without
    the text of `_known`, as soon as it does not end inside a character.
    """

    def __init__(self, tokenizer: FileTokenizer, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._known: list[int] = []
        self._new: list[int] = []

    def feed(self, token_ids: Sequence[int]) -> str:
        return "".join(self._take(token_id) for token_id in token_ids)

    def finish(self) -> str:
        return self._write()

    def _take(self, token_id: int) -> str:
        self._new.append(token_id)
        if self._decode(self._new).endswith(_REPLACEMENT) and len(self._new) < _MAX_HELD_IDS:
            return ""
        return self._write()

    def _write(self) -> str:
        both = self._known + self._new
        text = self._decode(both)[len(self._decode(self._known)) :]
        # Ids without text (special tokens) give the next id no context, so older ones stay too.
        self._known, self._new = (self._new if text else both[-_MAX_HELD_IDS:]), []
        return text

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids, self._skip_special_tokens)


def _tokenizer(file: Path) -> HuggingFaceTokenizer:
    text = _read(file)
    if text is None:
        raise TokenizerError(f"{file}: missing; there must be a tokenizer.json")
    try:
        tokenizer = HuggingFaceTokenizer.from_str(text)
    except Exception as error:  # the library raises nothing narrower
        raise TokenizerError(f"{file}: no usable tokenizer: {str(error)[:300]}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _template(
    directory: Path, config: Mapping[str, Any], special_tokens: Mapping[str, str]
) -> EngineChatTemplate | None:
    file = directory / "chat_template.jinja"
    text = _read(file)
    if text is not None:
        return EngineChatTemplate(text, str(file), special_tokens)
    configured = config.get("chat_template")
    if not isinstance(configured, str):
        return None
    return EngineChatTemplate(configured, str(directory / "tokenizer_config.json"), special_tokens)


def _config(file: Path) -> dict[str, Any]:
    text = _read(file)
    try:
        return {} if text is None else msgspec.json.decode(text, type=dict[str, Any])
    except UNREADABLE as error:
        raise TokenizerError(f"{file}: must be a JSON object: {error}") from error


def _token_text(value: object) -> str | None:
    """Return the text of a token, which the file gives as a string or as an object with options."""
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else None


def _read(file: Path) -> str | None:
    try:
        if file.stat().st_size > _MAX_FILE_BYTES:
            raise TokenizerError(f"{file}: larger than {_MAX_FILE_BYTES} bytes")
        return file.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise TokenizerError(f"{file}: cannot be read ({type(error).__name__})") from error
