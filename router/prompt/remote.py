"""Tokenisation at a replica: `POST /tokenize`, as vLLM offers it, through the caller's function.

Exact by definition, at the price of a round trip. Used for models whose files the router does not
have, and for chats that only the engine can render.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from array import array
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Annotated, Any

import msgspec

from router.prompt.body.json_fields import encode_json
from router.prompt.chat.conversation import merge_system_messages
from router.prompt.chat.parts import has_media
from router.prompt.errors import (
    ProcessEndedError,
    ReplicaAnswerError,
    ReplicaRefusedError,
    UntokenizableError,
)
from router.prompt.limits import MAX_PROMPT_CHARS, MAX_PROMPT_TOKENS
from router.prompt.local.cache import SegmentCache
from router.prompt.processes import LargeWork
from router.prompt.prompts import ChatPrompt, TextPrompt
from router.prompt.token_ids import TokenIds, ends_of, truncate

# (path, body) -> (status, body). Raises OSError or TimeoutError if no replica responds; bounds time
# and size.
Fetch = Callable[[str, bytes], Awaitable[tuple[int, bytes]]]

_PATH = "/tokenize"
_DEFAULT_CACHE_BYTES = 64 * 1024 * 1024
# Ten digits, a comma and a blank for every id, and the other fields.
_MAX_BYTES_PER_TOKEN = 12
_MAX_OTHER_BYTES = 65_536

_ZONES_APART_S = 900
"""Time zones differ by multiples of it."""
_INLINE_ANSWER_BYTES = 262_144
_STEP_CHARS = 1_048_576
_RESPONSES_TEXTS = ("input_text", "output_text")

_TokenId = Annotated[int, msgspec.Meta(ge=0, lt=2**32)]


class _TokenizeResponse(msgspec.Struct):
    tokens: list[_TokenId]
    count: int | None = None


_ANSWER_DECODER = msgspec.json.Decoder(_TokenizeResponse)


class RemoteTokenizer:
    """Asks a replica for token ids and caches them."""

    def __init__(
        self,
        fetch: Fetch,
        *,
        cache_bytes: int = _DEFAULT_CACHE_BYTES,
        large_work: LargeWork | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Send nothing yet.

        Args:
            cache_bytes: Room for whole prompts; 0 caches nothing.
            large_work: Reads large responses; None reads them here.
            clock: The time of day, in seconds since 1970.
        """
        self._fetch = fetch
        self._large_work = large_work
        self._clock = clock
        self._merges_system = False
        """True once the template was found to take system messages in front only."""
        self._cache = SegmentCache(cache_bytes)

    async def tokenize(
        self,
        prompt: TextPrompt | ChatPrompt,
        *,
        model: str | None,
        cache_salt: str | None,
        is_large: bool = False,
    ) -> TokenIds:
        """Return the ids of *prompt*.

        Args:
            model: The client's name of it: an adapter may bring tokens of its own.
            cache_salt: Keeps answers of different tenants apart.
            is_large: True to encode the prompt in a thread.
        Raises:
            UntokenizableError: `/tokenize` cannot produce this prompt's ids.
            ReplicaAnswerError: The replica refused, or its response is malformed.
            OSError: No replica responded; TimeoutError likewise.
        """
        if isinstance(prompt, TextPrompt) and len(prompt.text) > MAX_PROMPT_CHARS:
            raise UntokenizableError("prompt_too_long")
        merged = _merged(prompt)
        if merged is None or self._merges_system:
            return await self._tokenize(merged or prompt, model, cache_salt, is_large)
        # The engine merges them where its template takes none in mid-conversation, and that shows
        # here alone.
        try:
            return await self._tokenize(prompt, model, cache_salt, is_large)
        except ReplicaRefusedError:
            ids = await self._tokenize(merged, model, cache_salt, is_large)
        self._merges_system = True
        return ids

    async def _tokenize(
        self,
        prompt: TextPrompt | ChatPrompt,
        model: str | None,
        cache_salt: str | None,
        is_large: bool,
    ) -> TokenIds:
        if is_large:
            body, digest = await asyncio.to_thread(_request_body, prompt, model)
        else:
            body, digest = _request_body(prompt, model)
        # A template may write the date, which changes at a quarter of an hour in every time zone.
        quarter = str(self._clock() // _ZONES_APART_S) if isinstance(prompt, ChatPrompt) else ""
        ids = await self._ask(body, (cache_salt, digest + quarter))
        truncation = prompt.truncation
        if truncation is None or not truncation.cuts(len(ids)):
            return ids
        if truncation.counts_special_tokens or not prompt.add_special_tokens:
            return truncate(ids, truncation, None)
        # The text gives way, and the special tokens stay: which of the ids those are, shows what
        # the replica makes of the same text without them.
        body, digest = _request_body(replace(prompt, add_special_tokens=False), model)
        ends = ends_of(ids, await self._ask(body, (cache_salt, digest + quarter)))
        if ends is None:
            raise UntokenizableError("truncation")
        return truncate(ids, truncation, ends)

    async def _ask(self, body: bytes, key: tuple[str | None, str]) -> TokenIds:
        (known,) = self._cache.get_all([key])
        if known is not None:
            return known
        ids = await self._read(*await self._fetch(_PATH, body))
        self._cache.put(key, ids)
        return ids

    async def _read(self, status: int, answer: bytes) -> TokenIds:
        """Check a response; its text may hold the prompt and is never quoted."""
        if 400 <= status < 500:
            raise ReplicaRefusedError(_PATH, f"status {status}", "the replica must take the prompt")
        if status != 200:
            raise ReplicaAnswerError(_PATH, f"status {status}", "must answer 200")
        if len(answer) > MAX_PROMPT_TOKENS * _MAX_BYTES_PER_TOKEN + _MAX_OTHER_BYTES:
            raise ReplicaAnswerError(_PATH, f"{len(answer)} bytes", "must fit the bound on tokens")
        if self._large_work is None or len(answer) <= _INLINE_ANSWER_BYTES:
            return _read_tokens(answer)
        try:
            return await self._large_work.run(_read_tokens, answer)
        except ProcessEndedError:
            raise UntokenizableError("busy") from None


def _merged(prompt: TextPrompt | ChatPrompt) -> ChatPrompt | None:
    """Return a prompt of `/v1/messages` with one system message in front; None where it has no
    others."""
    if not isinstance(prompt, ChatPrompt) or not prompt.merge_inline_system:
        return None
    if all(message["role"] != "system" for message in prompt.messages[1:]):
        return None
    messages = merge_system_messages(prompt.messages, "\n" if prompt.is_sglang else "")
    sent = prompt.sent and {**prompt.sent, "messages": messages}
    return replace(prompt, messages=messages, sent=sent)


def _read_tokens(answer: bytes) -> TokenIds:
    try:
        decoded = _ANSWER_DECODER.decode(answer)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        raise ReplicaAnswerError(
            _PATH, f"{len(answer)} bytes", "must be an object with a list of tokens"
        ) from None
    if decoded.count is not None and decoded.count != len(decoded.tokens):
        found = f"{len(decoded.tokens)} tokens and a count of {decoded.count}"
        raise ReplicaAnswerError(_PATH, found, "must count its tokens right")
    if len(decoded.tokens) > MAX_PROMPT_TOKENS:
        raise UntokenizableError("prompt_too_long")
    return array("I", decoded.tokens)


def _request_body(prompt: TextPrompt | ChatPrompt, model: str | None) -> tuple[bytes, str]:
    """Return the body, and a digest of it."""
    fields: dict[str, Any] = {} if model is None else {"model": model}
    fields["add_special_tokens"] = prompt.add_special_tokens
    if isinstance(prompt, TextPrompt):
        body = _with_text(encode_json(fields), prompt.text)
    else:
        body = encode_json({**fields, **_chat_fields(prompt)})
    return body, hashlib.sha256(body).hexdigest()


def _with_text(fields: bytes, text: str) -> bytes:
    """Add the prompt to an object that is not empty; in pieces, between which other threads get
    their turn."""
    pieces = [
        encode_json(text[at : at + _STEP_CHARS])[1:-1] for at in range(0, len(text), _STEP_CHARS)
    ]
    return b"".join((fields[:-1], b',"prompt":"', *pieces, b'"}'))


def _chat_fields(prompt: ChatPrompt) -> dict[str, Any]:
    if has_media(prompt.messages):
        # The replica would fetch and decode every image once more, only to count its tokens.
        raise UntokenizableError("media")
    if prompt.is_sglang and prompt.sent is not None:
        return {**prompt.sent, "messages": list(map(_chat_message, prompt.sent["messages"]))}
    arguments = dict(prompt.template_arguments)
    if prompt.documents is not None:
        # The endpoint has no field for them, but its template arguments take them.
        arguments["documents"] = prompt.documents
    fields: dict[str, Any] = {
        "messages": [_chat_message(message) for message in prompt.messages],
        "continue_final_message": prompt.continue_final_message,
    }
    if not prompt.add_generation_prompt:
        # Not where it is the default: SGLang then renders as for a chat, and refuses the field
        # itself where it writes a model's chats with code of its own.
        fields["add_generation_prompt"] = False
    if prompt.tools is not None:
        fields["tools"] = prompt.tools
    if arguments:
        fields["chat_template_kwargs"] = arguments
    return fields


def _chat_message(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Give the parts of a responses request the type that text has in a chat, the only one that
    `/tokenize` takes. The engine's own endpoint treats both alike."""
    content = message.get("content")
    if not isinstance(content, list) or not any(map(_is_responses_text, content)):
        return message
    parts = [{**part, "type": "text"} if _is_responses_text(part) else part for part in content]
    return {**message, "content": parts}


def _is_responses_text(part: object) -> bool:
    return isinstance(part, dict) and part.get("type") in _RESPONSES_TEXTS
