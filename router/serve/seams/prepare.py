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
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias

from msgspec.structs import replace

from router.config.origin import Header
from router.doors.asks import ANONYMOUS, Key, tenant_salt
from router.doors.http.gateway import Begun
from router.doors.http.question_fields import unrestricted_name
from router.doors.proxied_paths import PREPARED
from router.doors.terms_reader import TermsReader
from router.errors import RequestError
from router.fleet.engine_order import EngineOrder
from router.fleet.limits import KeyUsage
from router.index.base import SourceId
from router.index.mirror_types import STEP
from router.prompt.body.retention import HintForm, with_hints
from router.prompt.endpoints import Endpoint
from router.prompt.prompts import ChatPrompt, OpaquePrompt, TextPrompt, TokenizedPrompt, TokenPrompt
from router.routing.decision import Asked
from router.routing.dispatcher import INLINE_BODY_BYTES, Dispatcher
from router.routing.model import Model
from router.routing.planner import prepare
from router.routing.steering import ContinuationSign
from router.telemetry.settled import Settled
from router.telemetry.spans import PlacedTrace, Tracer
from router.telemetry.trace_context import read_context

if TYPE_CHECKING:
    from router._core import Plane

logger = logging.getLogger(__name__)


MAX_HINTED = 16_384
"""The most requests whose end steering waits for."""


class Names(Protocol):
    """Knows the names that the core serves."""

    def want(self, adapter: str) -> None:
        """Have the core know an adapter that a request names."""

    def hint_form(self, name: str) -> HintForm | None:
        """The form of retention hints to the replicas of a name; None where they get none."""


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


class _UnusualRequest(Exception):
    """A request that is left to be opened in Python."""


@dataclass(eq=False, repr=False)
class Preparation:
    """Belongs to one event loop."""

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
        """Read a prompt, and answer.

        Args:
            number: The request's, in the core.
            path: Its place among `PREPARED`.
            headers: Names in lower case; none where they do not matter.
        """
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
        """Read the prompt of a gateway's question, and answer; see `PromptPreparer`."""
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
            announced = model.index.announced(SourceId(settled.replica, settled.dp_rank or 0))
            step = STEP if announced is None else announced.scheduler_block_size or STEP
            model.steering.count_outcome(lengths, settled.tokens[2], step)

    def hand_over(self, number: int) -> Begun | None:
        """Return the state of a request that others serve from now on."""
        self._tokenising.discard(number)
        self._hinted.pop(number, None)
        return self._begun.pop(number, None)

    def left(self, number: int) -> None:
        """The client has left before its request was placed."""
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
        trace = self.tracer.begin(context, "POST", path, path)
        return Begun(context=context, placed=PlacedTrace(trace))

    def _enter(self, number: int, headers: list[Header]) -> Key:
        """Check the client's key and its limits; return it."""
        if self.check_key is None:
            return ANONYMOUS
        key = self.check_key(dict(headers))
        _check_content_type(key, headers)
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
        _check_content_type(key, headers)
        is_told_salt = kind == _SELECTION and key.cache_salt is not None
        if self.tracer is not None or key.usage is not None or is_told_salt:
            raise _UnusualRequest
        return key

    def _read(self, endpoint: Endpoint, key: Key, headers: list[Header], body: bytes) -> Asked:
        if len(body) > INLINE_BODY_BYTES:
            raise _UnusualRequest
        salt = tenant_salt(key, endpoint.value)
        terms = self.terms.read(key, dict(headers), salt)
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
            go_on(tokenized[0], time.perf_counter() - started)
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
            go_on(tokenized, time.perf_counter() - started)

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
        spec, begun = asked.spec, self._begun.get(number)
        if not tokenized.exact or not tokenized.token_ids:
            self._open(number)
            return
        usage: tuple[Header, ...] = ()
        added: tuple[Header, ...] = ()
        if begun is not None and begun.usage is not None:
            if not begun.usage.may_spend(len(tokenized.token_ids)):
                self._open(number)
                return
            begun.usage.spend(len(tokenized.token_ids))
            begun.has_spent, usage = True, begun.usage.headers()
        if begun is not None and begun.placed is not None:
            added = begun.placed.placed(seconds)
        elif begun is not None and begun.context is not None:
            added = begun.context.headers()
        name = spec.model or asked.model.name
        sent, keep = self._steer(number, name, asked, tokenized)
        session = (asked.session or "").encode("utf-8", "surrogatepass")
        changed = None if sent is body else sent
        salt, order = tokenized.cache_salt, self._class_of(begun)
        more = (
            changed,
            salt,
            session,
            asked.tenant,
            added,
            usage,
            keep,
            asked.target is not None,
            order,
            "",
        )
        has_more = any(more) or salt is not None or order is not None
        assert self.plane is not None
        tokens, is_comparable = tokenized.token_ids, spec.choices == 1
        self.plane.place(
            number,
            name,
            tokens,
            spec.stream,
            is_comparable,
            seconds,
            more if has_more else None,
        )

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
        spec = asked.spec
        gets_hints = (
            kind == _RESERVATION
            and self.names is not None
            and self.names.hint_form(spec.model or asked.model.name) is not None
        )
        if not tokenized.exact or not tokenized.token_ids or gets_hints:
            self._open(number)
            return
        session = (asked.session or "").encode("utf-8", "surrogatepass")
        salt = tokenized.cache_salt
        more = None, salt, session, asked.tenant, (), (), (), False, None, name
        assert self.plane is not None
        self.plane.place(
            number,
            spec.model or asked.model.name,
            tokenized.token_ids,
            spec.stream,
            spec.choices == 1,
            seconds,
            more if any(more) or salt is not None else None,
        )

    def _class_of(self, begun: Begun | None) -> int | None:
        """The priority of its key, where that has one of its own."""
        if begun is None or begun.key.priority is None:
            return None
        return self.engine_order.class_of(begun.key.priority)

    def _steer(
        self, number: int, name: str, asked: Asked, tokenized: TokenizedPrompt
    ) -> tuple[bytes, Sequence[int]]:
        """The body with what its engine should keep of the prompt, and the lengths of that."""
        form = None if self.names is None else self.names.hint_form(name)
        spec, model = asked.spec, asked.model
        if form is None or not form.is_read_at(spec.endpoint):
            return asked.body, ()
        (prompt,) = prepare(model.index, [tokenized])
        keys = prompt.prefix_keys(STEP)
        lengths = model.steering.named(keys)
        if lengths and len(self._hinted) < MAX_HINTED:
            self._hinted[number] = _HintedPrompt(model, lengths)
        sign = ContinuationSign.NONE if asked.session is None else ContinuationSign.SESSION
        sign = ContinuationSign.RETENTION if spec.keeps_prompt else sign
        hints = model.steering.hints(keys, tokenized.token_ids, tokenized.ends, asked.tenant, sign)
        body = with_hints(asked.body, spec.endpoint, form, *hints)
        return body, () if body is asked.body else hints.keep

    def _open(self, number: int) -> None:
        assert self.plane is not None
        self.plane.open(number)


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
        and not spec.has_report_mode
        and bool(spec.model or not asked.model.aliases)
    )


def _is_usual_question(kind: int, name: str, asked: Asked) -> bool:
    """Return whether the core can answer it: not a selection that is to be kept, nor where the
    gateway is told to change its request's body."""
    forms = _RESERVED_FORMS if kind == _RESERVATION else _ASKED_FORMS
    is_kept = kind == _SELECTION and bool(name)
    spec = asked.spec
    return not is_kept and spec.endpoint in forms and not spec.lora_name and asked.target is None


def _check_content_type(key: Key, headers: list[Header]) -> None:
    """Leave a body to be refused that an engine might not read as the router does."""
    types = sum(name == b"content-type" for name, _ in headers)
    if types > 1 and (key.usage is not None or key.cache_salt is not None):
        raise _UnusualRequest


def _check_model(usage: KeyUsage) -> Callable[[str], None]:
    """Leave a request for a model that the key is not for to be refused when it is opened."""

    def check(model: str) -> None:
        if not usage.allows(model):
            raise _UnusualRequest

    return check
