"""Tokenisation in the router: the model's chat template, and fastokens, or else the tokenizers
library behind a cache.

Nothing here waits for anything: `prepare` and `finish` are functions of the prompt and the
cache, safe to call from any thread. `finish` is where the tokenizer runs, and it runs without the
interpreter lock.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from tokenizers import AddedToken, Tokenizer

from kvevents.errors import UNREADABLE
from router.prompt.chat.renderer import ChatRenderer
from router.prompt.errors import ModelFilesError, UntokenizableError
from router.prompt.limits import MAX_PROMPT_TOKENS
from router.prompt.local.backend import find_ends
from router.prompt.local.cache import LookedUp, SegmentCacheStatistics, SegmentedTokenizer
from router.prompt.local.message_ends import EndFinder, pieces_of
from router.prompt.local.native import NativeTokenizer, load_native
from router.prompt.local.segments import RANDOM_MODEL, choose_segmenter, obstacle_in
from router.prompt.model_files import ModelFiles
from router.prompt.prompts import NO_ENDS, ChatPrompt, Coverage, MessageEnds, TextPrompt
from router.prompt.token_ids import TokenIds, truncate

_DEFAULT_CACHE_BYTES = 256 * 1024 * 1024
# Of fastokens on real text; at least 8 on any.
_NATIVE_SPEEDUP = 48


class TokenizerBackend(NamedTuple):
    """Names the library that tokenises a model's prompts."""

    name: Literal["fastokens", "tokenizers"]
    """The library."""
    reason: str | None
    """Why it is not fastokens, in a word of a small fixed set; None where it is."""

    def __str__(self) -> str:
        return self.name if self.reason is None else f"{self.name} ({self.reason})"


@dataclass(frozen=True)
class LocalStatistics:
    """How a tokenizer works."""

    backend: TokenizerBackend
    """The library's tokenizer."""
    obstacle: str | None
    """Why the tokenizer's rules forbid cutting texts, so that no cache can help; None where texts
    are cut, or need not be."""
    cache: SegmentCacheStatistics | None
    """The segment cache; None where fastokens does without."""


@dataclass(frozen=True)
class PreparedPrompt:
    """A prompt as text."""

    prompt: TextPrompt | ChatPrompt
    """The prompt it was made of."""
    text: str = field(repr=False)
    """The text to tokenise."""
    coverage: Coverage
    """The coverage of its ids."""
    looked_up: LookedUp | None
    """Its segments in the cache; None where fastokens tokenises it."""
    slow_chars: int
    """The cost of `finish`, in characters that the tokenizers library has to run over."""


class LocalTokenizer:
    """The tokenizer and the chat templates of one model."""

    def __init__(
        self,
        files: ModelFiles,
        *,
        chat_template: str | None = None,
        template_arguments: Mapping[str, Any] = MappingProxyType({}),
        use_native: bool = True,
        cache_bytes: int = _DEFAULT_CACHE_BYTES,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        """Load everything and decide, once, how to tokenise.

        Args:
            chat_template: Text of a template that replaces the model's.
            template_arguments: Variables of templates that requests may override.
            use_native: Tokenise by fastokens where it gives the right ids.
            cache_bytes: Bound on the memory of the segment cache, where fastokens is not used.
            now: Clock for templates that write the date.
        Raises:
            ModelFilesError: The tokenizer or a template cannot be used.
        """
        backend = build_backend(files)
        self._ends = find_ends(backend)
        self._segmenter, self._obstacle = choose_segmenter(backend, _obstacle_in(files))
        native = self._load_native(backend) if use_native else "configured"
        self._native: NativeTokenizer | None = None
        self._library: SegmentedTokenizer | None = None
        self._why_not_native: str | None = None
        if isinstance(native, str):
            self._why_not_native = native
            self._library = SegmentedTokenizer(backend, self._segmenter, cache_bytes)
        else:
            self._native, self._obstacle = native, None
        self._renderer = ChatRenderer(files, chat_template, now, template_arguments)
        self._end_finder = self._make_end_finder(backend)
        del backend
        _give_back_memory()
        self.warm_thread()

    @property
    def backend(self) -> TokenizerBackend:
        return TokenizerBackend(
            "tokenizers" if self._native is None else "fastokens", self._why_not_native
        )

    @property
    def is_harmony(self) -> bool:
        """Return whether vLLM writes the model's chats in OpenAI's harmony format."""
        return self._renderer.is_harmony

    def warm_thread(self) -> None:
        """Warm up a thread: its first text takes longer than all others."""
        if self._native is not None:
            self._native.encode("a")

    def prepare(self, prompt: TextPrompt | ChatPrompt, cache_salt: str | None) -> PreparedPrompt:
        """Render, and look up.

        Args:
            prompt: Text or a chat; a chat is rendered by the model's template.
            cache_salt: Only equal salts share cached segments.
        Raises:
            UntokenizableError: The text cannot be known here, or is too long.
        """
        text, coverage = self._text(prompt)
        looked_up = self._library.look_up(text, cache_salt) if self._library else None
        slow_chars = looked_up.missing_chars if looked_up else len(text) // _NATIVE_SPEEDUP
        return PreparedPrompt(prompt, text, coverage, looked_up, slow_chars)

    def finish(self, prepared: PreparedPrompt) -> TokenIds:
        """Run the tokenizer, and put the ids together.

        Raises:
            UntokenizableError: Too many ids.
        """
        prompt = prepared.prompt
        ends = self._ends if prompt.add_special_tokens else None
        ids = truncate(self._encode(prepared), prompt.truncation, ends)
        if len(ids) > MAX_PROMPT_TOKENS:
            raise UntokenizableError("prompt_too_long")
        return ids

    def message_ends(self, prepared: PreparedPrompt, ids: TokenIds) -> MessageEnds:
        """Return where the messages of a chat end; nothing for a text, or where it was cut.

        Args:
            ids: From `finish`.
        """
        prompt = prepared.prompt
        if self._end_finder is None or not isinstance(prompt, ChatPrompt) or prompt.truncation:
            return NO_ENDS
        pieces = pieces_of(prompt.messages) if prompt.pieces is None else prompt.pieces
        return self._end_finder.find(
            prepared.text, pieces, ids, lambda text: self._count_tokens(text, prepared)
        )

    def statistics(self) -> LocalStatistics:
        cache = self._library.statistics() if self._library else None
        return LocalStatistics(self.backend, self._obstacle, cache)

    def _load_native(self, backend: Tokenizer) -> NativeTokenizer | str:
        # Where special tokens depend on the text, only the library knows them.
        return "special_tokens" if self._ends is None else load_native(backend)

    def _make_end_finder(self, backend: Tokenizer) -> EndFinder | None:
        if self._segmenter is None:
            return None
        ids = {anchor: backend.token_to_id(anchor) for anchor in self._segmenter.anchors}
        known = {anchor: number for anchor, number in ids.items() if number is not None}
        return EndFinder(self._segmenter, known)

    def _count_tokens(self, text: str, prepared: PreparedPrompt) -> int:
        """Count the tokens of a part of a prompt; with the salt of that prompt."""
        if self._library is None or prepared.looked_up is None:
            assert self._native is not None
            return len(self._native.encode(text))
        salt = prepared.looked_up.keys[0][0]
        return len(self._library.join(self._library.look_up(text, salt)))

    def _text(self, prompt: TextPrompt | ChatPrompt) -> tuple[str, Coverage]:
        if self._obstacle == RANDOM_MODEL:
            raise UntokenizableError(RANDOM_MODEL)
        if isinstance(prompt, TextPrompt):
            return prompt.text, Coverage.WHOLE
        chat = self._renderer.render(prompt)
        if not chat.is_prefix:
            return chat.text, Coverage.WHOLE
        return self._certain_part(chat.text, prompt), Coverage.PREFIX

    def _certain_part(self, text: str, prompt: ChatPrompt) -> str:
        """Return the part of a text whose ids are certain although its continuation is unknown:
        that may change the ids behind the last anchor, and the part that a truncation keeps."""
        starts = self._segmenter.starts(text) if self._segmenter else []
        if not starts or not starts[-1] or prompt.truncation or prompt.add_special_tokens:
            raise UntokenizableError("media")
        return text[: starts[-1]]

    def _encode(self, prepared: PreparedPrompt) -> TokenIds:
        adds_special_tokens = prepared.prompt.add_special_tokens
        if prepared.looked_up is None or self._library is None:
            assert self._native is not None
            ids = self._native.encode(prepared.text)
        elif adds_special_tokens and self._ends is None:
            return self._library.encode_whole(prepared.text)
        else:
            ids = self._library.join(prepared.looked_up)
        return self._ends.around(ids) if adds_special_tokens and self._ends else ids


def _give_back_memory() -> None:
    """Give freed memory back to the system: loading takes twice what is kept, and glibc would keep
    all of it."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _obstacle_in(files: ModelFiles) -> str | None:
    try:
        return obstacle_in(files.tokenizer_json)
    except UNREADABLE as error:
        raise ModelFilesError(
            f"{files.path}/tokenizer.json", str(error), "must be a tokenizer"
        ) from error


# --- the tokenizers library -----------------------------------------------------------------------


def build_backend(files: ModelFiles) -> Tokenizer:
    """Load the tokenizer, set up as transformers sets it up for the engine.

    `add_bos_token` and `add_eos_token` of `tokenizer_config.json` are ignored on purpose:
    transformers 5 ignores them if there is a `tokenizer.json`, and uses the post-processor in it.

    Raises:
        ModelFilesError: The tokenizers library cannot read `tokenizer.json`.
    """
    try:
        backend = Tokenizer.from_buffer(files.tokenizer_json)
    except ValueError as error:
        rule = "must be a tokenizer that the installed tokenizers library reads"
        raise ModelFilesError(f"{files.path}/tokenizer.json", str(error), rule) from error
    # Truncation and padding stored in the file are defaults of the training run; the engine sets
    # its own.
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = files.splits_special_tokens
    _add_missing_tokens(backend, files)
    return backend


def _add_missing_tokens(backend: Tokenizer, files: ModelFiles) -> None:
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    for _, token in sorted(files.added_tokens.items()):
        if token["content"] not in known:
            options = {
                name: token.get(name) is True
                for name in ("lstrip", "rstrip", "single_word", "special")
            }
            normalized = token.get("normalized", not options["special"]) is True
            backend.add_tokens([AddedToken(token["content"], normalized=normalized, **options)])
            known.add(token["content"])
    named = dict.fromkeys([*files.special_tokens.values(), *files.extra_special_tokens])
    missing = [text for text in named if text not in known]
    backend.add_tokens([AddedToken(text, special=True, normalized=False) for text in missing])
