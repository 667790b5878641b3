"""From a request's body to a decision: parse, tokenise, hash, match, rank."""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import functools
import json
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from msgspec.structs import replace

from router.errors import NoReplica, Overloaded, UnknownModel
from router.fleet.registry import ReplicaRegistry
from router.fleet.replica import Replica
from router.index.prompt import HashedPrompt
from router.policies.types import Candidate, RouteRequest
from router.prompt.body.decoding import holds_mostly_ids
from router.prompt.body.requests import read_model, read_request
from router.prompt.body.sglang_request import as_sglang_reads
from router.prompt.body.splicing import with_model
from router.prompt.endpoints import FORMS, Encoding, Endpoint
from router.prompt.errors import ProcessEndedError
from router.prompt.processes import LargeWork
from router.prompt.prompts import ChatPrompt, PromptSpec, TokenizedPrompt
from router.routing.decision import ANY_MODEL, Asked, Decision, ModelRequest, hint_form
from router.routing.key_holders import ResponseOwner, TenantSalt
from router.routing.lengths import check_length, common_length
from router.routing.model import Model
from router.routing.models import ModelSet
from router.routing.planner import RoutePlanner, prepare
from router.routing.prefill import PrefillPlanner, Serving
from router.routing.question import UNREAD_RANK, RankChoice, RankQuestion
from router.routing.stored_responses import StoredResponses
from router.routing.terms import NO_TERMS, Terms, among

_Result = TypeVar("_Result")

INLINE_BODY_BYTES = 262_144
INLINE_IDS_BYTES = 2_097_152
"""Larger bodies are parsed, and longer prompts hashed, in a thread: other streams may wait for a
few milliseconds, not longer. Of a body that is one list of token ids the compiled index reads
more in that time, and it hashes longer prompts: `PrefixIndex.inline_tokens`."""
MAX_NAMES_KNOWN = 1024
"""Models and adapters whose replicas are remembered until one of them changes."""
LARGE_AT_ONCE = 2
"""Large bodies and prompts worked on at a time: parsed JSON takes ten times the memory of its text
and more, and Python runs one thread at a time anyhow."""


class _Tokens(NamedTuple):
    """The token ids of a request's prompts."""

    of_prompts: Sequence[TokenizedPrompt] = ()
    seconds: float | None = None
    """How long it took to make them; None without a prompt."""
    known_at: float = 0.0
    """By `time.perf_counter`."""

    @staticmethod
    def made_now(of_prompts: Sequence[TokenizedPrompt], began: float) -> _Tokens:
        now = time.perf_counter()
        return _Tokens(of_prompts, now - began, now)


@dataclass(eq=False, repr=False)
class Dispatcher:
    """Decides where requests go."""

    models: ModelSet
    """Every model that requests may name."""
    replicas: ReplicaRegistry
    planner: RoutePlanner
    """Ranks the replicas of a model."""
    policy_name: str
    """The name of the planner's policy."""
    responses: StoredResponses
    """Knows which replica has which stored response."""
    large_work: LargeWork
    owns_priority: bool = False
    """True if the router decides on the `priority` of clients."""
    prefill_min_uncached_tokens: int = 0
    """The least that another replica computes of a prompt than the one that its request is sent to;
    0: none ever does."""

    def __post_init__(self) -> None:
        least = self.prefill_min_uncached_tokens
        self._prefill = PrefillPlanner(self.planner.rank, least)
        self._large = asyncio.Semaphore(LARGE_AT_ONCE)
        self._served: dict[tuple[tuple[str, ...], str | None], Serving] = {}
        self._served_at = -1
        """The registry's generation."""

    async def dispatch(
        self,
        endpoint: Endpoint | None,
        body: bytes,
        terms: Terms = NO_TERMS,
        encoding: Encoding = "json",
        *,
        needs_model: bool = True,
    ) -> Decision:
        """Decide where a request goes; the ranking may be empty.

        Args:
            endpoint: The form of the body; None for a request without a prompt to generate from,
                as `/tokenize`: it goes to the least loaded.
            encoding: Of the body; `/route` takes both.
            needs_model: As for `dispatch_by_load`, where *endpoint* is None.
        Raises:
            BadRequest: The body breaks a rule.
            UnknownResponse: The response that it continues is not that of the terms' owner.
            UnknownModel: No replica serves the model it names.
            NoReplica: The same, but some replica has not reported its models yet.
        """
        if endpoint is None:
            model, body = await self._model_in(_in_utf8(body), terms.salt)
            return self.dispatch_by_load(model, body, terms, needs_model=needs_model)
        found = self.dispatch_now(endpoint, body, terms, encoding)
        return found if isinstance(found, Decision) else await found

    def dispatch_now(
        self, endpoint: Endpoint, body: bytes, terms: Terms = NO_TERMS, encoding: Encoding = "json"
    ) -> Decision | Coroutine[Any, Any, Decision]:
        """Decide where a request goes: at once where nothing has to be waited for, else in a
        coroutine. See `dispatch`."""
        if len(body) > INLINE_BODY_BYTES and not self._reads_at_once(body):
            return self._read_later(endpoint, body, terms, encoding)
        return self._decide_now(self.read(endpoint, body, terms, encoding))

    def read(
        self, endpoint: Endpoint, body: bytes, terms: Terms = NO_TERMS, encoding: Encoding = "json"
    ) -> Asked:
        """Return what a body asks for, without a decision.

        Raises:
            RequestError: As `dispatch`.
        """
        body = _in_utf8(body, encoding)
        spec, changed = read_request(body, endpoint, encoding, terms.secret, self.owns_priority)
        return self._asked(spec, body if changed is None else changed, terms)

    async def _read_later(
        self, endpoint: Endpoint, body: bytes, terms: Terms, encoding: Encoding
    ) -> Decision:
        body = _in_utf8(body, encoding)
        spec, changed = await self._read_large(
            read_request, body, endpoint, encoding, terms.secret, self.owns_priority
        )
        body = body if changed is None else changed
        return await self._decide_later(self._asked(spec, body, terms))

    def _decide_now(self, asked: Asked) -> Decision | Coroutine[Any, Any, Decision]:
        if asked.spec.stored_response is not None:
            return self._decide_later(asked)
        started = time.perf_counter()
        tokenized = self.models.tokenization_of(asked.model).tokenize_now(
            asked.spec, lora_name=asked.lora_name
        )
        if tokenized is None:
            return self._decide_later(asked)
        tokens = _Tokens.made_now(tokenized, started)
        looked_up = self._looked_up(asked, tokens)
        if _tokens_in(looked_up) > asked.model.index.inline_tokens:
            return self._look_up_later(asked, tokens)
        prompts = prepare(asked.model.index, looked_up)
        return self._decide(asked, self._able(asked), tokens, prompts)

    def have_room(self, decision: Decision) -> bool:
        """Return whether one of the replicas that could serve a request has room for it now. A
        refused tenant waits in one line with others: that must not keep them from starting."""
        tenant = decision.tenant if decision.refused_at else ""
        return self.planner.have_room(self._replicas_of(decision).values(), tenant)

    def redecide(self, decision: Decision) -> Decision:
        """Rank the replicas again, by their present load."""
        tokens = _Tokens(decision.tokenized, decision.tokenization_s, time.perf_counter())
        replicas = self._replicas_of(decision)
        return self._decide(decision.asked, replicas, tokens, decision.prompts)

    def _replicas_of(self, decision: Decision) -> Mapping[str, Replica]:
        """The replicas that could serve a request now, whatever their state."""
        asked = decision.asked
        if not isinstance(asked, Asked) or asked.spec.stored_response is not None:
            return decision.replicas
        return self._able(asked)

    def _able(self, asked: Asked) -> Mapping[str, Replica]:
        return among(self.serving(asked.model, asked.lora_name).able, asked.is_eligible)

    def _reads_at_once(self, body: bytes) -> bool:
        return len(body) <= INLINE_IDS_BYTES and holds_mostly_ids(body)

    def _asked(self, spec: PromptSpec, body: bytes, terms: Terms) -> Asked:
        body = _owned(spec, body, terms.owner)
        session, named = terms.session or spec.session, spec.model
        if named and terms.check_model is not None:
            terms.check_model(named)
        versions = self.models.versions
        target = terms.version or versions.choose(named, terms.headers, session, self._is_served)
        if target is not None:
            spec = replace(spec, model=target)
        model, lora_name = self._resolve(spec.model)
        if not named and terms.check_model is not None:
            terms.check_model(model.name)
        for adapter in (lora_name if target is None else None, *spec.adapters):
            _check_adapter(terms, adapter, named)
        self._look_for_ends(model, lora_name, spec)
        if spec.may_differ_at_sglang and self.serving(model, lora_name).is_by_sglang:
            spec = as_sglang_reads(spec)
        if spec.is_cut_to_model:
            length = common_length(self.serving(model, lora_name).able.values(), spec.model)
            spec = spec if length is None else spec.cut_to(length)
        return Asked(
            body=body,
            model=model,
            spec=spec,
            session=session,
            tenant=terms.tenant,
            named=named,
            target=target,
            lora_name=lora_name,
            dp_rank=terms.dp_rank,
            is_eligible=terms.is_eligible,
        )

    def _look_for_ends(self, model: Model, lora_name: str | None, spec: PromptSpec) -> None:
        """Look for the ends of messages from the first chat on of which a replica takes hints."""
        tokenization = self.models.tokenization_of(model)
        if tokenization.finds_ends or not isinstance(spec.prompts[0], ChatPrompt):
            return
        serving = self.serving(model, lora_name).able.values()
        tokenization.finds_ends = any(hint_form(model, replica) for replica in serving)

    def _is_served(self, name: str) -> bool:
        """Return whether some replica can take requests for a model."""
        try:
            model, lora_name = self.models.resolve(name)
        except UnknownModel:
            return False
        return any(
            replica.is_healthy and not replica.draining
            for replica in self.serving(model, lora_name).able.values()
        )

    async def _at_holder(self, asked: Asked, response_id: str) -> Asked:
        """The same of the version that has the stored response: no other could go on with it."""
        served = {
            name: replicas
            for name in self.models.versions.models_of(asked.named or "")
            if (replicas := self.serving(*self._resolve(name)).able)
        }
        all_of_them = {id_: one for replicas in served.values() for id_, one in replicas.items()}
        holder = await self.responses.holder(response_id, all_of_them)
        target = next((name for name in served if holder and holder.id in served[name]), None)
        if holder is None or target is None or holder.id in served.get(asked.target or "", ()):
            return asked
        model, lora_name = self._resolve(target)
        spec = replace(asked.spec, model=target)
        return replace(asked, spec=spec, model=model, lora_name=lora_name, target=target)

    async def _decide_later(self, asked: Asked) -> Decision:
        if asked.target is not None and asked.spec.stored_response is not None:
            asked = await self._at_holder(asked, asked.spec.stored_response)
        started = time.perf_counter()
        tokenization = self.models.tokenization_of(asked.model)
        tokenized = await tokenization.tokenize(asked.spec, lora_name=asked.lora_name)
        return await self._look_up_later(asked, _Tokens.made_now(tokenized, started))

    async def _look_up_later(self, asked: Asked, tokens: _Tokens) -> Decision:
        index, looked_up = asked.model.index, self._looked_up(asked, tokens)
        if _tokens_in(looked_up) <= index.inline_tokens:
            prompts = prepare(index, looked_up)
        else:
            async with self._large:
                prompts = await asyncio.to_thread(prepare, index, looked_up)
        able = self.serving(asked.model, asked.lora_name).able
        if asked.spec.stored_response is not None:
            able = await self._holder(asked.spec.stored_response, able)
        return self._decide(asked, among(able, asked.is_eligible), tokens, prompts)

    def _looked_up(self, asked: Asked, tokens: _Tokens) -> Sequence[TokenizedPrompt]:
        """The prompts of a request that replicas may have cached.

        Raises:
            BadRequest: One is too long.
        """
        spec, able = asked.spec, self.serving(asked.model, asked.lora_name).able
        if not spec.is_cut_to_model:
            check_length(spec.endpoint, tokens.of_prompts, able.values(), spec.model)
        return tokens.of_prompts if spec.reads_cache else ()

    def _decide(
        self,
        asked: ModelRequest,
        replicas: Mapping[str, Replica],
        tokens: _Tokens | None = None,
        prompts: Sequence[HashedPrompt] = (),
    ) -> Decision:
        tokens = tokens or _Tokens(known_at=time.perf_counter())
        count, choice = _tokens_in(tokens.of_prompts), UNREAD_RANK
        if asked.spec is not None:
            form = FORMS[asked.spec.endpoint]
            choice = RankChoice(form.reads_rank, asked.dp_rank, form.may_pull)
        name, index = ANY_MODEL, None
        if asked.model is not None:
            name, index = asked.model.name, asked.model.index
        request = RouteRequest(model=name, prompt_tokens=count, session=asked.session)
        question = RankQuestion(request, index, prompts, choice, asked.tenant)
        ranking, excluded = self.planner.rank(question, replicas.values())
        prefillers: Mapping[str, Replica] = {}
        prefiller_for: Callable[[Candidate], Candidate | None] = _no_other
        if isinstance(asked, Asked):
            serving = self.serving(asked.model, asked.lora_name)
            prefillers = among(serving.prefillers, asked.is_eligible)
            if serving.may_split and self._prefill.allows(asked.spec, prompts):
                serving = serving._replace(able=replicas, prefillers=prefillers)
                prefiller_for = functools.partial(self._prefill.prefiller, question, serving)
        return Decision(
            asked=asked,
            tokenized=tokens.of_prompts,
            question=question,
            policy=self.policy_name,
            ranking=ranking,
            excluded=excluded,
            replicas=replicas,
            obstacle_of=self.planner.obstacle,
            expects=self.planner.visits.expected,
            tokenization_s=tokens.seconds,
            routing_s=time.perf_counter() - tokens.known_at,
            prefillers=prefillers,
            prefiller_for=prefiller_for,
        )

    async def _model_in(self, body: bytes, salt: TenantSalt | None) -> tuple[str | None, bytes]:
        """The model that a body names, and the body with its salt."""
        secret, names = (None, ()) if salt is None else (salt.secret, salt.names)
        arguments = secret, names, self.owns_priority
        if len(body) <= INLINE_BODY_BYTES:
            model, salted = read_model(body, *arguments)
        else:
            model, salted = await self._read_large(read_model, body, *arguments)
        return model, body if salted is None else salted

    def dispatch_by_load(
        self,
        name: str | None,
        body: bytes,
        terms: Terms = NO_TERMS,
        *,
        needs_model: bool = True,
        rename: Callable[[bytes, str], bytes] = with_model,
    ) -> Decision:
        """Decide where a request goes whose prompt, if it has one, is not looked at.

        Args:
            terms: What else is known of it. Where there is neither a model nor a body, such as in
                `GET /version`, there is no model to check.
            needs_model: Whether it must name one where there are several; else any replica will do.
            rename: Puts another model's name into the body.
        Raises:
            ModelNotAllowed: The client's key is not for the model.
            UnknownModel: No replica serves the model it names.
            NoReplica: The same, but some replica has not reported its models yet.
        """
        check_model, is_eligible = terms.check_model, terms.is_eligible
        is_of_any = not name and not needs_model and len(self.models) != 1
        if check_model is not None and (name or (is_of_any and body)):
            check_model(name or ANY_MODEL)
        if is_of_any:
            asked = ModelRequest(body=body, model=None, tenant=terms.tenant)
            return self._decide(asked, among(self._all_replicas(), is_eligible))
        target = self.models.versions.choose(name, terms.headers, None, self._is_served)
        model, lora_name = self._resolve(name if target is None else target)
        if not name and check_model is not None:
            check_model(model.name)
        _check_adapter(terms, lora_name if target is None else None, name)
        asked = ModelRequest(
            body=body, model=model, tenant=terms.tenant, named=name, target=target, rename=rename
        )
        return self._decide(asked, among(self.serving(model, lora_name).able, is_eligible))

    async def dispatch_to_holder(
        self, response_id: str, body: bytes, terms: Terms = NO_TERMS
    ) -> Decision:
        """Decide where a request goes that is about a stored response.

        Args:
            terms: Their key must be for the model of the replica that has it.
        Raises:
            ModelNotAllowed: It is not.
            UnknownResponse: The response is not that of the terms' owner.
        """
        if terms.owner is not None:
            terms.owner.check(response_id)
        replicas = await self._holder(response_id, self._all_replicas())
        served = next(iter(replicas.values())).served.models if len(replicas) == 1 else ()
        if terms.check_model is not None and served:
            terms.check_model(served[0])
        model = self.models.get(served[0]) if served else None
        return self._decide(ModelRequest(body=body, model=model, tenant=terms.tenant), replicas)

    async def _holder(
        self, response_id: str, replicas: Mapping[str, Replica]
    ) -> Mapping[str, Replica]:
        """Only the replica that has the response: every other one would respond 404. All
        of *replicas* where that is not known."""
        holder = await self.responses.holder(response_id, replicas)
        return replicas if holder is None else {holder.id: holder}

    def _all_replicas(self) -> dict[str, Replica]:
        return {
            replica.id: replica for replica in self.replicas.replicas() if replica.takes_requests
        }

    def _resolve(self, name: str | None) -> tuple[Model, str | None]:
        try:
            return self.models.resolve(name)
        except UnknownModel:
            # 404 would be final, and a router that has just started does not know all models yet.
            if undiscovered := self.replicas.undiscovered:
                raise NoReplica(
                    name or "(none named)",
                    f"{undiscovered} replicas have not reported their models yet",
                ) from None
            raise

    def serving(self, model: Model, lora_name: str | None) -> Serving:
        """The replicas that have the adapter; where none reports it, all that serve the base model
        under any of its names."""
        if self._served_at != self.replicas.generation or len(self._served) >= MAX_NAMES_KNOWN:
            self._served, self._served_at = {}, self.replicas.generation
        asked = model.names, lora_name
        found = self._served.get(asked)
        if found is None:
            adapted = self.replicas.serving(lora_name) if lora_name else ()
            serving = adapted or [
                replica for name in model.names for replica in self.replicas.serving(name)
            ]
            splits = self.prefill_min_uncached_tokens > 0
            found = self._served[asked] = Serving.of(serving, splits)
        return found

    async def _read_large(
        self, read: Callable[..., _Result], body: bytes, *arguments: object
    ) -> _Result:
        try:
            return await self.large_work.run(read, body, *arguments)
        except ProcessEndedError:
            raise Overloaded("had not enough memory or time to read this body") from None


def _owned(spec: PromptSpec, body: bytes, owner: ResponseOwner | None) -> bytes:
    """The body to send, with an id for a new response that names its owner; what it continues must
    be that owner's."""
    if owner is None:
        return body
    if spec.stored_response is not None:
        owner.check(spec.stored_response)
    return owner.name_response(body) if spec.endpoint is Endpoint.RESPONSES else body


def _check_adapter(terms: Terms, adapter: str | None, named: str | None) -> None:
    """Check that the key is for an adapter under its own name, where the client names it beside its
    model or together with it: a key for the model is none for that."""
    if adapter is not None and adapter != named and terms.check_model is not None:
        terms.check_model(adapter)


def _no_other(_chosen: Candidate) -> None:
    """Name no other replica to compute the prompt."""


def _in_utf8(body: bytes, encoding: Encoding = "json") -> bytes:
    """Return JSON in UTF-8 and without a byte-order mark. Engines read it by Python's `json`, which
    skips the mark and finds out what it is in; without UTF-8, one of the first bytes is no text."""
    if encoding != "json":
        return body
    found = json.detect_encoding(body[:4])
    if not found.startswith("utf-8"):
        with contextlib.suppress(UnicodeError):  # then it is refused as what it is
            return body.decode(found).encode()
    return body.removeprefix(codecs.BOM_UTF8)


def _tokens_in(tokenized: Sequence[TokenizedPrompt]) -> int:
    if len(tokenized) == 1:
        return len(tokenized[0].token_ids)
    return sum(len(prompt.token_ids) for prompt in tokenized)
