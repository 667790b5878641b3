"""Tokenisation in the router: the tokenizers library, a cache by segment, and the model's chat
template.

Nothing here waits for anything: `prepare` and `finish` are functions of the prompt and the
cache, safe to call from any thread. `finish` is where the tokenizer runs, and it runs without the
interpreter lock.
"""

from __future__ import annotations

import threading
import time
from array import array
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime

import msgspec

from router.tokenize.chat.renderer import ChatRenderer, ChatSettings
from router.tokenize.errors import ModelFilesError, UntokenizableError
from router.tokenize.limits import PromptLimits
from router.tokenize.local.backend import build_backend, encode_all, find_ends
from router.tokenize.local.cache import SegmentCache, SegmentCacheStatistics, SegmentKey
from router.tokenize.local.segments import TokenizerRules, choose_segmenter, read_rules
from router.tokenize.model_files import ModelFiles
from router.tokenize.prompts import ChatPrompt, Coverage, TextPrompt, TokenIds
from router.tokenize.truncation import truncate

_DEFAULT_CACHE_BYTES = 256 * 1024 * 1024


@dataclass(frozen=True)
class LocalStatistics:
    """Counts since the start."""

    prompts: int
    """Prompts tokenised."""
    tokens: int
    """Token ids returned for them."""
    whole_prompts: int
    """Prompts tokenised at once because the tokenizer's rules forbid cutting."""
    obstacle: str | None
    """Why they do; None where texts are cut."""
    refused: Mapping[str, int]
    """Prompts whose text or ids cannot be known here, by reason."""
    prepare_s: float
    """Seconds in chat templates, in cutting and in looking up."""
    encode_s: float
    """Seconds in the tokenizer, summed over threads."""
    encoded_chars: int
    """Characters that the tokenizer ran over; the others came from the cache."""
    cache: SegmentCacheStatistics
    """The segment cache."""


@dataclass(frozen=True)
class PreparedPrompt:
    """A prompt as text, cut and looked up."""

    prompt: TextPrompt | ChatPrompt
    """Where it came from."""
    keys: list[SegmentKey] = field(repr=False)
    """Salt and text of every segment."""
    found: list[TokenIds | None] = field(repr=False)
    """Their ids; None where the tokenizer has to run."""
    missing_chars: int
    """Characters of those segments."""
    coverage: Coverage
    """What the ids of all segments cover."""


class LocalTokenizer:
    """The tokenizer and the chat templates of one model."""

    def __init__(
        self,
        files: ModelFiles,
        *,
        chat: ChatSettings | None = None,
        limits: PromptLimits | None = None,
        cache_bytes: int = _DEFAULT_CACHE_BYTES,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        """Load everything and decide, once, whether texts may be cut.

        Args:
            files: The model's files.
            chat: How the engine's server renders chats.
            limits: Bounds on a prompt.
            cache_bytes: Bound on the memory of the segment cache.
            now: Clock for templates that write the date.
        Raises:
            ModelFilesError: The tokenizer or a template cannot be used.
        """
        self._limits = limits or PromptLimits()
        self._backend = build_backend(files)
        self._rules = _rules_of(files)
        self._ends = find_ends(self._backend)
        self._segmenter, self._obstacle = choose_segmenter(self._backend, self._rules)
        self._renderer = ChatRenderer(files, chat, max_chars=self._limits.max_prompt_chars, now=now)
        self._cache = SegmentCache(cache_bytes)
        self._counts = _Counts()

    def prepare(self, prompt: TextPrompt | ChatPrompt, cache_salt: str | None) -> PreparedPrompt:
        """Render, cut and look up.

        Args:
            prompt: Text or a chat; a chat is rendered by the model's template.
            cache_salt: Only equal salts share cached segments.
        Raises:
            UntokenizableError: The text cannot be known here, or is too long.
        """
        start = time.perf_counter()
        try:
            text, coverage = self._text(prompt)
            segments = self._cut(text, prompt, coverage)
        except UntokenizableError as error:
            self._counts.refuse(error.reason)
            raise
        keys: list[SegmentKey] = [(cache_salt, segment) for segment in segments]
        found = self._cache.get_all(keys)
        missing_chars = sum(
            len(key[1]) for key, ids in zip(keys, found, strict=True) if ids is None
        )
        self._counts.add_preparation(time.perf_counter() - start)
        return PreparedPrompt(prompt, keys, found, missing_chars, coverage)

    def finish(self, prepared: PreparedPrompt) -> TokenIds:
        """Run the tokenizer where it has to run, and put the ids together.

        Raises:
            UntokenizableError: There are too many ids.
        """
        prompt = prepared.prompt
        ids = self._by_library(prepared) if self._needs_library(prepared) else self._join(prepared)
        ids = truncate(ids, prompt.truncation, self._ends if prompt.add_special_tokens else None)
        if len(ids) > self._limits.max_prompt_tokens:
            self._counts.refuse("prompt_too_long")
            raise UntokenizableError("prompt_too_long")
        self._counts.add_prompt(len(ids), is_whole=self._segmenter is None)
        return ids

    def statistics(self) -> LocalStatistics:
        """Return a snapshot of the counts."""
        return self._counts.snapshot(self._obstacle, self._cache.statistics())

    def _text(self, prompt: TextPrompt | ChatPrompt) -> tuple[str, Coverage]:
        if self._rules.is_random:
            raise UntokenizableError("random_model")
        if isinstance(prompt, TextPrompt):
            return prompt.text, Coverage.WHOLE
        chat = self._renderer.render(prompt)
        return chat.text, Coverage.PREFIX if chat.is_prefix else Coverage.WHOLE

    def _cut(self, text: str, prompt: TextPrompt | ChatPrompt, coverage: Coverage) -> list[str]:
        segments = [text] if self._segmenter is None else self._segmenter.split(text)
        if coverage is Coverage.WHOLE:
            return segments
        # What follows the text is unknown: it may change the ids of the last segment, and what a
        # truncation keeps.
        segments = segments[:-1]
        if not segments or prompt.truncation is not None or prompt.add_special_tokens:
            raise UntokenizableError("media")
        return segments

    def _needs_library(self, prepared: PreparedPrompt) -> bool:
        """Whether special tokens are to be added by a rule that only the library knows."""
        return prepared.prompt.add_special_tokens and self._ends is None

    def _by_library(self, prepared: PreparedPrompt) -> TokenIds:
        text = "".join(text for _, text in prepared.keys)
        return self._timed_encode([text], add_special_tokens=True)[0]

    def _join(self, prepared: PreparedPrompt) -> TokenIds:
        found = self._fill_in(prepared)
        ids = array("I")
        for segment_ids in found:
            ids.extend(segment_ids)
        return self._ends.around(ids) if prepared.prompt.add_special_tokens and self._ends else ids

    def _fill_in(self, prepared: PreparedPrompt) -> list[TokenIds]:
        """Return the ids of all segments, running the tokenizer once over every missing text."""
        missing = dict.fromkeys(
            key for key, ids in zip(prepared.keys, prepared.found, strict=True) if ids is None
        )
        if not missing:
            return [ids for ids in prepared.found if ids is not None]
        # While this prompt waited for a thread, another one may have done its work.
        again = self._cache.peek_all(missing)
        rest = [key for key in missing if key not in again]
        encoded = self._timed_encode([text for _, text in rest], add_special_tokens=False)
        for key, ids in zip(rest, encoded, strict=True):
            self._cache.put(key, ids)
        new = {**again, **dict(zip(rest, encoded, strict=True))}
        return [
            new[key] if ids is None else ids
            for key, ids in zip(prepared.keys, prepared.found, strict=True)
        ]

    def _timed_encode(self, texts: list[str], *, add_special_tokens: bool) -> list[TokenIds]:
        start = time.perf_counter()
        encoded = (
            encode_all(self._backend, texts, add_special_tokens=add_special_tokens) if texts else []
        )
        self._counts.add_encoding(time.perf_counter() - start, sum(map(len, texts)))
        return encoded


def _rules_of(files: ModelFiles) -> TokenizerRules:
    try:
        return read_rules(files.tokenizer_json)
    except msgspec.MsgspecError as error:
        raise ModelFilesError(
            f"{files.path}/tokenizer.json", str(error), "must be a tokenizer"
        ) from error


class _Counts:
    """The counters, added to from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._prompts = 0
        self._tokens = 0
        self._whole_prompts = 0
        self._refused: Counter[str] = Counter()
        self._prepare_s = 0.0
        self._encode_s = 0.0
        self._encoded_chars = 0

    def refuse(self, reason: str) -> None:
        with self._lock:
            self._refused[reason] += 1

    def add_preparation(self, seconds: float) -> None:
        with self._lock:
            self._prepare_s += seconds

    def add_encoding(self, seconds: float, chars: int) -> None:
        with self._lock:
            self._encode_s += seconds
            self._encoded_chars += chars

    def add_prompt(self, tokens: int, *, is_whole: bool) -> None:
        with self._lock:
            self._prompts += 1
            self._tokens += tokens
            self._whole_prompts += is_whole

    def snapshot(self, obstacle: str | None, cache: SegmentCacheStatistics) -> LocalStatistics:
        with self._lock:
            return LocalStatistics(
                prompts=self._prompts,
                tokens=self._tokens,
                whole_prompts=self._whole_prompts,
                obstacle=obstacle,
                refused=dict(self._refused),
                prepare_s=self._prepare_s,
                encode_s=self._encode_s,
                encoded_chars=self._encoded_chars,
                cache=cache,
            )
