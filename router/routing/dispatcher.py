"""From a request's body to a decision: parse, tokenise, hash, match, rank."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeVar

import msgspec

from router.errors import BadRequest, NoReplica, UnknownModel
from router.index import PreparedPrompt
from router.observability.metrics import RouterMetrics
from router.replicas import Replica
from router.routing.models import Model, ModelName, ModelSet
from router.routing.planner import Decision, RoutePlanner, prepare
from router.scoring import RouteRequest
from router.tokenize import (
    Endpoint,
    PromptLimits,
    PromptSpec,
    RequestBodyError,
    TokenizedPrompt,
    parse_request,
    strip_report_mode,
)

_Result = TypeVar("_Result")

INLINE_BODY_BYTES = 262_144
INLINE_TOKENS = 65_536
"""Larger bodies are parsed, and longer prompts hashed, in a thread: a few milliseconds are what
other streams may wait."""
LARGE_AT_ONCE = 2
"""Of these, at the same time: parsed JSON takes ten times the room of its text and more, and Python
runs one thread at a time anyhow."""


class ReplicaDirectory(Protocol):
    """What dispatching needs of the registry."""

    def serving(self, model: str) -> Sequence[Replica]:
        """All replicas that serve a model or an adapter of that name, whatever their state."""

    @property
    def undiscovered(self) -> int:
        """How many have not said yet what they serve."""


@dataclass(frozen=True, slots=True)
class Dispatched:
    """A request that knows where to go."""

    spec: PromptSpec
    model: Model
    tokenized: Sequence[TokenizedPrompt]
    prompts: Sequence[PreparedPrompt]
    decision: Decision

    @property
    def is_comparable(self) -> bool:
        """Will the engine's `cached_tokens` be about the same thing as the prediction?"""
        return len(self.tokenized) == 1 and self.spec.choices == 1 and self.tokenized[0].exact


class _OnlyModel(msgspec.Struct):
    model: str | None = None


class Dispatcher:
    """Decides where requests go."""

    def __init__(
        self,
        models: ModelSet,
        replicas: ReplicaDirectory,
        planner: RoutePlanner,
        metrics: RouterMetrics,
        limits: PromptLimits | None = None,
    ) -> None:
        self._models = models
        self._replicas = replicas
        self._planner = planner
        self._metrics = metrics
        self._limits = limits or PromptLimits()
        self._large = asyncio.Semaphore(LARGE_AT_ONCE)

    async def dispatch(
        self,
        endpoint: Endpoint,
        body: bytes,
        session: str | None = None,
        encoding: Literal["json", "msgpack"] = "json",
    ) -> Dispatched:
        """Decide where a request goes; the decision's ranking may be empty.

        Raises:
            BadRequest: The body breaks a rule.
            UnknownModel: Nobody serves the model it names.
            NoReplica: The same, but some replica has not said yet what it serves.
        """
        spec = await self._parse(endpoint, body, encoding)
        found = self._resolve(spec.model)
        started = time.perf_counter()
        tokenized = await found.model.tokenization.tokenize(spec, lora_name=found.lora_name)
        tokenized_at = time.perf_counter()
        self._metrics.tokenization.labels(found.model.name).observe(tokenized_at - started)
        count = sum(len(prompt.token_ids) for prompt in tokenized)
        looked_up = tokenized if spec.reads_cache else ()
        prompts = await self._run(
            lambda: prepare(found.model.index, looked_up), count <= INLINE_TOKENS
        )
        request = RouteRequest(
            model=found.model.name, prompt_tokens=count, session=session or spec.session
        )
        decision = self._decide(request, found, prompts, time.perf_counter() - tokenized_at)
        return Dispatched(spec, found.model, tokenized, prompts, decision)

    async def by_load(self, body: bytes) -> Decision:
        """Decide for a request that has no prompt of its own, as /tokenize.

        Raises:
            BadRequest: The body is no JSON object.
            UnknownModel: Nobody serves the model it names.
            NoReplica: The same, but some replica has not said yet what it serves.
        """
        try:
            named = await self._run(
                lambda: msgspec.json.decode(body, type=_OnlyModel), len(body) <= INLINE_BODY_BYTES
            )
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            raise BadRequest(
                "$", f"{len(body)} bytes", "must be a JSON object whose `model` is a string"
            ) from None
        found = self._resolve(named.model)
        return self._decide(RouteRequest(model=found.model.name, prompt_tokens=0), found, (), 0.0)

    async def strip_report_mode(self, body: bytes, spec: PromptSpec) -> bytes:
        """See `router.tokenize.strip_report_mode`; raises `BadRequest`."""
        if not spec.has_engine_arguments:
            return body
        try:
            return await self._run(
                lambda: strip_report_mode(body, spec), len(body) <= INLINE_BODY_BYTES
            )
        except RequestBodyError as error:
            raise BadRequest(error.place, error.found, error.rule) from None

    def require_replica(self, decision: Decision) -> None:
        """Raises `NoReplica`, with the reasons counted, if a decision found nobody."""
        if not decision.ranking.ranked:
            raise NoReplica(decision.model, decision.ranking.empty_reason)

    def _decide(
        self,
        request: RouteRequest,
        found: ModelName,
        prompts: Sequence[PreparedPrompt],
        seconds: float,
    ) -> Decision:
        decision = self._planner.decide(
            request, found.model.index, prompts, self._serving(found), seconds
        )
        self._metrics.routing.labels(found.model.name).observe(decision.seconds)
        return decision

    def _resolve(self, name: str | None) -> ModelName:
        try:
            return self._models.resolve(name)
        except UnknownModel:
            # A router that has just started must not tell clients for good that there is no such
            # model.
            if undiscovered := self._replicas.undiscovered:
                raise NoReplica(
                    name or "(none named)",
                    f"{undiscovered} replicas have not said yet what they serve",
                ) from None
            raise

    def _serving(self, found: ModelName) -> Sequence[Replica]:
        """Replicas that have the adapter; or, where none says so, all that serve the base model
        under any of its names."""
        adapted = self._replicas.serving(found.lora_name) if found.lora_name else ()
        if adapted:
            return adapted
        by_id = {
            replica.id: replica
            for name in found.model.names
            for replica in self._replicas.serving(name)
        }
        return tuple(by_id.values())

    async def _parse(
        self, endpoint: Endpoint, body: bytes, encoding: Literal["json", "msgpack"]
    ) -> PromptSpec:
        try:
            return await self._run(
                lambda: parse_request(endpoint, body, encoding=encoding, limits=self._limits),
                len(body) <= INLINE_BODY_BYTES,
            )
        except RequestBodyError as error:
            raise BadRequest(error.place, error.found, error.rule) from None

    async def _run(self, job: Callable[[], _Result], is_small: bool) -> _Result:
        if is_small:
            return job()
        async with self._large:
            return await asyncio.to_thread(job)
