"""Reads the prompts of requests that the data plane holds: a body in, token ids out.

    core thread ──Prepare──> Preparation ──> Dispatcher.read ──> Tokenization
         ^                                                            │
         └──────────── Ask, to be decided there; or Open ─────────────┘

Unusual requests, errors included, are left to the server that opens them.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeAlias

from msgspec.structs import replace

from router._core import Plane
from router.config.origin import Header
from router.doors.asks import ANONYMOUS, Key
from router.doors.http.access import check_one_content_type
from router.doors.http.gateway import Begun
from router.doors.http.question_fields import unrestricted_name
from router.doors.proxied_paths import PREPARED
from router.doors.terms_reader import TermsReader
from router.errors import RequestError
from router.fleet.entrance import EngineOrder
from router.fleet.limits import KeyUsage
from router.index.base import SourceId
from router.index.mirror_types import STEP
from router.prompt.body.owned_fields import HintForm, with_hints
from router.prompt.endpoints import Endpoint
from router.prompt.prompts import ChatPrompt, OpaquePrompt, TextPrompt, TokenizedPrompt, TokenPrompt
from router.routing.decision import Asked
from router.routing.dispatcher import INLINE_BODY_BYTES, Dispatcher
from router.routing.model import Model
from router.routing.planner import prepare
from router.telemetry.settled import Settled
from router.telemetry.spans import Tracer
from router.telemetry.trace_context import read_context

logger = logging.getLogger(__name__)

MAX_HINTED = 16_384
"""The most requests whose end steering waits for."""


class Names(Protocol):
    """Knows the names that the core serves; see `NativeDecisions`."""

    def want(self, adapter: str) -> None: ...
    def hint_form(self, name: str) -> HintForm | None: ...


class _HintedPrompt(NamedTuple):
    """A prompt of which some prefixes had been named to engines."""

    model: Model
    lengths: list[int]


_GoOn: TypeAlias = Callable[[TokenizedPrompt, float], None]
"""Called with a prompt's token ids, and the seconds that they took."""
_WHERE, _SELECTION, _RESERVATION = range(3)
"""The kinds of gateways' questions."""
_RESERVED_FORMS = (Endpoint.COMPLETIONS, Endpoint.CHAT)
_ASKED_FORMS = (*_RESERVED_FORMS, Endpoint.ROUTE)


class _More(NamedTuple):
    """Holds what the core has to know besides the prompt: see `Plane.place`."""

    body: bytes | None = None
    salt: str | None = None
    session: bytes = b""
    tenant: str = ""
    added: Sequence[Header] = ()
    reported: Sequence[Header] = ()
    keep: Sequence[int] = ()
    is_renamed: bool = False
    order: int | None = None
    reservation: str = ""


_NOTHING_MORE = _More()


class _UnusualRequest(Exception):
    """A request that is left to be opened in Python."""


@dataclass(eq=False, repr=False)
class Preparation:
    """Reads prompts as a `PromptPreparer`. Belongs to one event loop."""

    dispatcher: Dispatcher
    names: Names | None
    """The names that the core knows; None: no name, so that it never asks."""
    check_key: Callable[[Mapping[bytes, bytes]], Key] | None
    """Returns the key of a request by its headers, or raises `RequestError`; None: no key is
    needed."""
    check_asker: Callable[[Mapping[bytes, bytes]], Key] | None
    """The same for the key of a gateway that asks where a request goes."""
    terms: TermsReader
    tracer: Tracer | None
    """Begins the trace of each; None where none is recorded."""
    engine_order: EngineOrder
    """The numbers for engines that order by them."""

    def __post_init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()
        self._tokenising: set[int] = set()
        """Requests of these tasks whose clients have not left."""
        self._hinted: dict[int, _HintedPrompt] = {}
        self._begun: dict[int, Begun] = {}
        """State by number, of requests that are neither opened nor ended."""
        self.plane: Plane | None = None
        """The core's plane, set before the first request."""

    @property
    def under_way(self) -> int:
        """Requests whose prompts are being tokenised."""
        return len(self._tasks)

    def prepare(self, number: int, path: int, headers: list[Header], body: bytes) -> None:
        endpoint = PREPARED[path]
        begun = self._begin(endpoint.value, headers)
        if begun is not None:
            self._begun[number] = begun
        try:
            key = self._enter(number, headers)
            asked = self._read(endpoint, key, headers, body)
            if asked.target is not None:
                self._begun.setdefault(number, Begun()).version = asked.named or "", asked.target
        except (RequestError, _UnusualRequest):
            self._open(number)
            return
        self._tokenize(number, asked, functools.partial(self._place, number, body, asked))

    def prepare_question(self, number: int, kind: int, headers: list[Header], body: bytes) -> None:
        try:
            key = self._asker(kind, headers)
            asked = self._read(Endpoint.ROUTE, key, headers, body)
            name = "" if kind == _WHERE else unrestricted_name(body)
            if name is None or not _is_usual_question(kind, name, asked):
                raise _UnusualRequest
        except (RequestError, _UnusualRequest):
            self._open(number)
            return
        self._tokenize(number, asked, functools.partial(self._answer, number, kind, name, asked))

    def settled(self, number: int, settled: Settled) -> None:
        """A request that was placed has ended."""
        begun = self._begun.pop(number, None)
        if begun is not None and begun.usage is not None:
            begun.usage.leave(settled.response_tokens)
        hinted = self._hinted.pop(number, None)
        if hinted is not None:
            model, lengths = hinted
            source = SourceId(settled.replica, settled.dp_rank or 0)
            model.count_outcome(lengths, source, settled.tokens[2])

    def hand_over(self, number: int) -> Begun | None:
        self._tokenising.discard(number)
        self._hinted.pop(number, None)
        return self._begun.pop(number, None)

    def left(self, number: int) -> None:
        begun = self.hand_over(number)
        if begun is not None:
            begun.left()

    def begun(self, number: int) -> Begun | None:
        """Return the state of a request that goes on."""
        return self._begun.get(number)

    def _begin(self, path: str, headers: list[Header]) -> Begun | None:
        """Begin its trace, or read its client's; None where it has none."""
        context = read_context(headers)
        if self.tracer is None:
            return None if context is None else Begun(context=context)
        return Begun(context=context, trace=self.tracer.begin(context, "POST", path, path))

    def _enter(self, number: int, headers: list[Header]) -> Key:
        """Check the client's key and its limits; return it."""
        if self.check_key is None:
            return ANONYMOUS
        key = self.check_key(dict(headers))
        if key.usage is not None or key.cache_salt is not None:
            check_one_content_type(headers)
        if key.usage is not None:
            if not key.usage.may_enter():
                raise _UnusualRequest
            key.usage.enter()
            self._begun.setdefault(number, Begun()).usage = key.usage
        self._begun.setdefault(number, Begun()).key = key
        return key

    def _asker(self, kind: int, headers: list[Header]) -> Key:
        """Check a gateway's key, and that the core can answer: not where questions are traced or
        counted, nor where the gateway is told to set the salt of its key."""
        key = ANONYMOUS if self.check_asker is None else self.check_asker(dict(headers))
        if key.cache_salt is not None:
            check_one_content_type(headers)
        is_told_salt = kind == _SELECTION and key.cache_salt is not None
        if self.tracer is not None or key.usage is not None or is_told_salt:
            raise _UnusualRequest
        return key

    def _read(self, endpoint: Endpoint, key: Key, headers: list[Header], body: bytes) -> Asked:
        if len(body) > INLINE_BODY_BYTES:
            raise _UnusualRequest
        terms = self.terms.read(key, dict(headers), endpoint.value)
        if key.usage is not None:
            terms = replace(terms, check_model=_check_model(key.usage))
        asked = self.dispatcher.read(endpoint, body, terms)
        if not _is_usual(asked):
            raise _UnusualRequest
        if asked.lora_name is not None and self.names is not None:
            self.names.want(asked.spec.model or "")
        return asked

    def _tokenize(self, number: int, asked: Asked, go_on: _GoOn) -> None:
        """Have the token ids made, now or in a task; then go on."""
        started = time.perf_counter()
        tokenization = self.dispatcher.models.tokenization_of(asked.model)
        tokenized = tokenization.tokenize_now(asked.spec, lora_name=asked.lora_name)
        if tokenized is not None:
            self._continue(number, tokenized[0], time.perf_counter() - started, go_on)
            return
        if tokenization.local is None:
            self._open(number)  # a replica is asked once, and may keep the caller waiting
            return
        self._tokenising.add(number)
        task = asyncio.get_running_loop().create_task(self._tokenize_later(number, asked, go_on))
        self._tasks.add(task)
        task.add_done_callback(functools.partial(self._tokenized, number))

    async def _tokenize_later(self, number: int, asked: Asked, go_on: _GoOn) -> None:
        started = time.perf_counter()
        tokenization = self.dispatcher.models.tokenization_of(asked.model)
        (tokenized,) = await tokenization.tokenize(asked.spec, lora_name=asked.lora_name)
        if number in self._tokenising:
            self._continue(number, tokenized, time.perf_counter() - started, go_on)

    def _continue(
        self, number: int, tokenized: TokenizedPrompt, seconds: float, go_on: _GoOn
    ) -> None:
        if tokenized.exact and tokenized.token_ids:
            go_on(tokenized, seconds)
        else:
            self._open(number)

    def _tokenized(self, number: int, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._tokenising.discard(number)
        if task.cancelled():
            self._open(number)
        elif (error := task.exception()) is not None:
            logger.error("a prompt could not be read", exc_info=error)
            self._open(number)

    def _place(
        self, number: int, body: bytes, asked: Asked, tokenized: TokenizedPrompt, seconds: float
    ) -> None:
        begun = self._begun.get(number)
        usage: tuple[Header, ...] = ()
        added: tuple[Header, ...] = ()
        if begun is not None and begun.usage is not None:
            if not begun.usage.may_spend(len(tokenized.token_ids)):
                self._open(number)
                return
            begun.usage.spend(len(tokenized.token_ids))
            begun.has_spent, usage = True, begun.usage.headers()
        if begun is not None and begun.trace is not None:
            added = begun.trace.placed(seconds)
        elif begun is not None and begun.context is not None:
            added = begun.context.headers()
        sent, keep = self._steer(number, asked, tokenized)
        more = _More(
            body=None if sent is body else sent,
            added=added,
            reported=usage,
            keep=keep,
            is_renamed=asked.target is not None,
            order=self._class_of(begun),
        )
        self._return(number, asked, tokenized, seconds, more)

    def _answer(
        self,
        number: int,
        kind: int,
        name: str,
        asked: Asked,
        tokenized: TokenizedPrompt,
        seconds: float,
    ) -> None:
        """Have the core answer a question, unless the gateway is told to set hints.

        Args:
            name: Of the reservation; empty: it gets one, or there is none.
        """
        if kind == _RESERVATION and self._hint_form(asked) is not None:
            self._open(number)
        else:
            self._return(number, asked, tokenized, seconds, _More(reservation=name))

    def _return(
        self, number: int, asked: Asked, tokenized: TokenizedPrompt, seconds: float, more: _More
    ) -> None:
        """Give the core the token ids, and what else it has to know."""
        more = more._replace(
            salt=tokenized.cache_salt,
            session=(asked.session or "").encode("utf-8", "surrogatepass"),
            tenant=asked.tenant,
        )
        assert self.plane is not None
        self.plane.place(
            number,
            _name_of(asked),
            tokenized.token_ids,
            asked.spec.stream,
            asked.spec.choices == 1,
            seconds,
            None if more == _NOTHING_MORE else more,
        )

    def _class_of(self, begun: Begun | None) -> int | None:
        """The priority of its key, where that has one of its own."""
        if begun is None or begun.key.priority is None:
            return None
        return self.engine_order.class_of(begun.key.priority)

    def _hint_form(self, asked: Asked) -> HintForm | None:
        return None if self.names is None else self.names.hint_form(_name_of(asked))

    def _steer(
        self, number: int, asked: Asked, tokenized: TokenizedPrompt
    ) -> tuple[bytes, Sequence[int]]:
        """The body with what its engine should keep of the prompt, and the lengths of that."""
        form, model = self._hint_form(asked), asked.model
        if form is None or not form.is_read_at(asked.spec.endpoint):
            return asked.body, ()
        (prompt,) = prepare(model.index, [tokenized])
        keys = prompt.prefix_keys(STEP)
        lengths = model.steering.named(keys)
        if lengths and len(self._hinted) < MAX_HINTED:
            self._hinted[number] = _HintedPrompt(model, lengths)
        hints = asked.steer(keys, tokenized)
        body = with_hints(asked.body, asked.spec.endpoint, form, *hints)
        return body, () if body is asked.body else hints.keep

    def _open(self, number: int) -> None:
        assert self.plane is not None
        self.plane.open(number)


def _name_of(asked: Asked) -> str:
    return asked.spec.model or asked.model.name


def _is_of_words(prompt: TokenPrompt | TextPrompt | ChatPrompt | OpaquePrompt) -> bool:
    """Return whether it has no media, and nothing else that only engines can read: such a prompt
    would be read here in vain."""
    if not isinstance(prompt, ChatPrompt):
        return not isinstance(prompt, OpaquePrompt)
    contents = [message.get("content") for message in prompt.messages]
    return all(
        isinstance(part, dict) and part.get("type") == "text"
        for content in contents
        if isinstance(content, list)
        for part in content
    )


def _is_usual(asked: Asked) -> bool:
    """Return whether the core can decide such a request once its prompt's token ids are known."""
    spec = asked.spec
    return (
        len(spec.prompts) == 1
        and _is_of_words(spec.prompts[0])
        and spec.reads_cache
        and spec.stored_response is None
        and not spec.adapters
        and not spec.has_report_mode
        and bool(spec.model or not asked.model.aliases)
    )


def _is_usual_question(kind: int, name: str, asked: Asked) -> bool:
    """Return whether the core can answer it: not a selection that is to be kept, nor where the
    gateway is told to change its request's body."""
    forms = _RESERVED_FORMS if kind == _RESERVATION else _ASKED_FORMS
    is_kept = kind == _SELECTION and bool(name)
    spec = asked.spec
    return not is_kept and spec.endpoint in forms and asked.target is None


def _check_model(usage: KeyUsage) -> Callable[[str], None]:
    """Leave a request for a model that the key is not for to be refused when it is opened."""

    def check(model: str) -> None:
        if not usage.allows(model):
            raise _UnusualRequest

    return check
