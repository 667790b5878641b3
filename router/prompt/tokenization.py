"""The tokenisation of one model, for an event loop: in the router if possible, else at a replica,
else not at all.

A prompt whose ids cannot be known is routed by load, without an error; the engine responds to the
client as usual.
"""

from __future__ import annotations

import asyncio
import threading
from array import array
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Annotated, TypeAlias, TypeVar

import msgspec

from kvevents.field_docs import counter
from kvevents.threads import begun_pool
from router.prompt.chat.parts import has_media
from router.prompt.errors import ReplicaAnswerError, ReplicaRefusedError, UntokenizableError
from router.prompt.local.tokenizer import LocalStatistics, LocalTokenizer, PreparedPrompt
from router.prompt.prompts import (
    NO_ENDS,
    ChatPrompt,
    Coverage,
    MessageEnds,
    OpaquePrompt,
    Prompt,
    PromptSpec,
    TextPrompt,
    TokenizedPrompt,
    TokenPrompt,
)
from router.prompt.remote import RemoteTokenizer
from router.prompt.token_ids import TokenIds, truncate

_Result = TypeVar("_Result")
_Attempt: TypeAlias = PreparedPrompt | UntokenizableError
_Outcome: TypeAlias = tuple[TokenIds, Coverage, MessageEnds] | UntokenizableError

# A replica may know ids that the router cannot, except for these reasons: it would not know either,
# or would cost too much.
_FINAL_REASONS = frozenset(("random_model", "media", "prompt_too_long", "harmony", "busy"))

# Messages and prompts to prepare in the event loop: a template takes some 7 us a message, however
# short.
_INLINE_ITEMS = 256


@dataclass(frozen=True)
class TokenizationStatistics:
    """Counts since the start."""

    prompts: Annotated[Mapping[Coverage, int], counter("kvroute_tokenized_prompts", "coverage")]
    """Prompts by how much of them was tokenised: `whole`, `prefix`, `unknown`."""
    unknown: Annotated[Mapping[str, int], counter("kvroute_untokenized_prompts", "reason")]
    """Prompts not tokenised in full, by reason."""
    waiting: int
    """Requests now in a thread or waiting for one."""
    local: LocalStatistics | None
    """None without a local tokenizer."""


class Tokenization:
    """Turns parsed requests for one model into token ids without blocking the event loop."""

    def __init__(
        self,
        *,
        local: LocalTokenizer | None = None,
        remote: RemoteTokenizer | None = None,
        max_threads: int = 2,
        max_waiting: int = 256,
        inline_chars: int = 2048,
        inline_body_bytes: int = 262_144,
    ) -> None:
        """Use *local* first, and *remote* for prompts that it cannot tokenise.

        Args:
            max_threads: Tokenizers that run at once beside the event loop.
            max_waiting: Requests that may be in a thread or wait for one; beyond
                that, ids stay unknown.
            inline_chars: Characters that the tokenizers library may tokenise in the event loop,
                some 0.5 ms, and as much work for fastokens; above that a thread does it.
            inline_body_bytes: Size of a body up to which templates are rendered in the event loop.
        """
        self.local = local
        """The router's own tokenizer of the model, if it has one."""
        self._remote = remote
        self._threads: _Threads | None = None
        if local is not None:
            warm = local.warm_thread if local.backend.name == "fastokens" else None
            self._threads = _Threads(begun_pool(max_threads, "tokenize", warm), max_waiting)
        self._inline_chars = inline_chars
        self._inline_body_bytes = inline_body_bytes
        self.finds_ends = False
        """True to look for the ends of messages, which takes some time; set it where engines get
        hints to keep them."""
        self.asks_harmony: Callable[[], bool] = lambda: False
        """Tells whether all replicas return the ids of gpt-oss's chats as vLLM makes them."""
        self._prompts: Counter[Coverage] = Counter()
        self._unknown: Counter[str] = Counter()

    async def tokenize(
        self, spec: PromptSpec, *, lora_name: str | None = None
    ) -> list[TokenizedPrompt]:
        """Return one result for each prompt, in order. Raises only on cancellation.

        Args:
            lora_name: The adapter that `spec.model` turned out to be.
        """
        spec = _as_computed(spec)
        local = await self._tokenize_locally(spec)
        adapter = lora_name or spec.lora_name
        return [
            self._result(await self._settle(spec, number, outcome), adapter, spec.salt_of(number))
            for number, outcome in enumerate(local)
        ]

    def tokenize_now(
        self, spec: PromptSpec, *, lora_name: str | None = None
    ) -> list[TokenizedPrompt] | None:
        """Do what `tokenize` does without waiting; None where that may take a thread or replica."""
        spec = _as_computed(spec)
        first = spec.prompts[0]
        if len(spec.prompts) == 1 and isinstance(first, TokenPrompt):
            # What most gateways send.
            outcome = _given(first)
            return [self._result(outcome, lora_name or spec.lora_name, spec.salt_of(0))]
        is_short = self.local is not None and spec.body_bytes <= self._inline_chars
        texts = [isinstance(prompt, TextPrompt | ChatPrompt) for prompt in spec.prompts]
        if not is_short and any(texts):
            return None
        outcomes = [
            self._finish(prompt, self._prepare(prompt, spec.salt_of(number)))
            for number, prompt in enumerate(spec.prompts)
        ]
        if self._remote is not None and any(
            is_text and isinstance(outcome, UntokenizableError)
            for is_text, outcome in zip(texts, outcomes, strict=True)
        ):
            return None
        adapter = lora_name or spec.lora_name
        return [
            self._result(outcome, adapter, spec.salt_of(number))
            for number, outcome in enumerate(outcomes)
        ]

    def close(self) -> None:
        """Let the threads end after the queued work; ids of new prompts stay unknown."""
        if self._threads is not None:
            self._threads.close()

    def statistics(self) -> TokenizationStatistics:
        return TokenizationStatistics(
            prompts=dict(self._prompts),
            unknown=dict(self._unknown),
            waiting=self._threads.waiting if self._threads else 0,
            local=self.local.statistics() if self.local else None,
        )

    async def _tokenize_locally(self, spec: PromptSpec) -> list[_Outcome]:
        """Prepare all prompts, then finish them, each step in a thread if it is large."""
        try:
            attempts = await self._run(
                lambda: [
                    self._prepare(prompt, spec.salt_of(number))
                    for number, prompt in enumerate(spec.prompts)
                ],
                is_small=self._is_small(spec),
            )
            slow_chars = sum(
                attempt.slow_chars for attempt in attempts if isinstance(attempt, PreparedPrompt)
            )
            return await self._run(
                lambda: [
                    self._finish(prompt, attempt)
                    for prompt, attempt in zip(spec.prompts, attempts, strict=True)
                ],
                is_small=slow_chars <= self._inline_chars,
            )
        except UntokenizableError as error:
            return [error] * len(spec.prompts)

    def _is_small(self, spec: PromptSpec) -> bool:
        messages = sum(
            len(prompt.messages) for prompt in spec.prompts if isinstance(prompt, ChatPrompt)
        )
        return (
            spec.body_bytes <= self._inline_body_bytes
            and messages + len(spec.prompts) <= _INLINE_ITEMS
        )

    async def _run(self, job: Callable[[], _Result], *, is_small: bool) -> _Result:
        if is_small or self._threads is None:
            return job()
        return await self._threads.run(job)

    def _prepare(self, prompt: Prompt, cache_salt: str | None) -> _Attempt:
        if isinstance(prompt, OpaquePrompt):
            return UntokenizableError(prompt.reason)
        if isinstance(prompt, TokenPrompt) or self.local is None:
            return UntokenizableError("no_local_tokenizer")
        try:
            return self.local.prepare(prompt, cache_salt)
        except UntokenizableError as error:
            return error

    def _finish(self, prompt: Prompt, attempt: _Attempt) -> _Outcome:
        if isinstance(prompt, TokenPrompt):
            return _given(prompt)
        if isinstance(attempt, UntokenizableError):
            return attempt
        assert self.local is not None, "it has prepared the prompt"
        try:
            ids = self.local.finish(attempt)
            ends = self.local.message_ends(attempt, ids) if self.finds_ends else NO_ENDS
            return ids, attempt.coverage, ends
        except UntokenizableError as error:
            return error

    async def _settle(self, spec: PromptSpec, number: int, outcome: _Outcome) -> _Outcome:
        """Ask a replica for ids that the router could not produce."""
        prompt = spec.prompts[number]
        if not isinstance(outcome, UntokenizableError) or self._remote is None:
            return outcome
        if not isinstance(prompt, (TextPrompt, ChatPrompt)):
            return outcome
        if outcome.reason in _FINAL_REASONS and not self._asks_all_the_same(prompt, outcome):
            return outcome
        try:
            ids = await self._remote.tokenize(
                prompt,
                model=spec.model,
                cache_salt=spec.salt_of(number),
                is_large=spec.body_bytes > self._inline_body_bytes,
            )
        except UntokenizableError as error:
            return error
        except ReplicaRefusedError:
            return UntokenizableError("replica_refused")
        except (ReplicaAnswerError, OSError, asyncio.TimeoutError):
            return UntokenizableError("replica_failed")
        return ids, Coverage.WHOLE, NO_ENDS

    def _asks_all_the_same(
        self, prompt: TextPrompt | ChatPrompt, outcome: UntokenizableError
    ) -> bool:
        """Return whether replicas know the ids of a chat in harmony format: vLLM's do from 0.33 on,
        but not with an effort, which their `/tokenize` has no field for, nor what `/v1/responses`
        makes of it. Such a chat is never cut."""
        return (
            outcome.reason == "harmony"
            and isinstance(prompt, ChatPrompt)
            and not prompt.is_of_responses
            and prompt.truncation is None
            and "reasoning_effort" not in prompt.template_arguments
            and self.asks_harmony()
        )

    def _result(
        self, outcome: _Outcome, lora_name: str | None, cache_salt: str | None
    ) -> TokenizedPrompt:
        ids: TokenIds
        reason: str | None
        if isinstance(outcome, UntokenizableError):
            ids, coverage, ends = array("I"), Coverage.UNKNOWN, NO_ENDS
            reason = outcome.reason
        else:
            ids, coverage, ends = outcome
            reason = "media" if coverage is Coverage.PREFIX else None
        self._prompts[coverage] += 1
        if reason is not None:
            self._unknown[reason] += 1
        return TokenizedPrompt(ids, coverage, reason, lora_name, cache_salt, ends=ends)


def _as_computed(spec: PromptSpec) -> PromptSpec:
    """Return a request with the token ids that engines compute in place of its chats."""
    if not spec.has_transfer_params:
        return spec
    prompts = tuple(
        TokenPrompt(prompt.forwarded_ids)
        if isinstance(prompt, ChatPrompt)
        and prompt.forwarded_ids is not None
        and not has_media(prompt.messages)
        else prompt
        for prompt in spec.prompts
    )
    return msgspec.structs.replace(spec, prompts=prompts)


def _given(prompt: TokenPrompt) -> tuple[TokenIds, Coverage, MessageEnds]:
    ids = truncate(prompt.token_ids, prompt.truncation, None)
    return ids, Coverage.PREFIX if prompt.is_prefix else Coverage.WHOLE, NO_ENDS


class _Threads:
    """A pool of threads and a bounded queue before it."""

    def __init__(self, pool: ThreadPoolExecutor, max_waiting: int) -> None:
        self._pool = pool
        self._max_waiting = max_waiting
        self._lock = threading.Lock()
        self.waiting = 0

    async def run(self, job: Callable[[], _Result]) -> _Result:
        """Run *job* in a thread.

        Raises:
            UntokenizableError: Too many wait already, or the threads are gone.
        """
        with self._lock:
            if self.waiting >= self._max_waiting:
                raise UntokenizableError("busy")
            self.waiting += 1
        try:
            future = self._pool.submit(job)
        except RuntimeError:
            self._leave()
            raise UntokenizableError("busy") from None
        # A caller that gives up does not stop the thread: the place is free when the job has really
        # ended.
        future.add_done_callback(lambda _: self._leave())
        return await asyncio.wrap_future(future)

    def close(self) -> None:
        self._pool.shutdown(wait=False)

    def _leave(self) -> None:
        with self._lock:
            self.waiting -= 1
