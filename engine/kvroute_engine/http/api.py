"""The endpoints, like vLLM's: completions, chats, and those for routers and operators."""

from __future__ import annotations

import asyncio
import itertools
import time
import uuid
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from fastapi import FastAPI, Request, Response
from prometheus_client import CollectorRegistry, generate_latest

from kvroute_engine.core.requests import EngineRequest, SamplingParams
from kvroute_engine.http.chat import Chat
from kvroute_engine.http.clients import read_body, unless_client_leaves
from kvroute_engine.http.completion import CompletionBuilder
from kvroute_engine.http.error_handlers import add_error_handlers, json_response
from kvroute_engine.http.errors import ApiError, InvalidRequest, ModelNotFound
from kvroute_engine.http.faults import crash, restart
from kvroute_engine.http.responses import (
    ChatFormat,
    CompletionFormat,
    DetokenizeResponse,
    EngineInfo,
    KVEventEndpoint,
    ResetResponse,
    ResponseFormat,
    ServedModel,
    ServedModelList,
    TokenizeResponse,
    VersionResponse,
)
from kvroute_engine.http.schemas import (
    DEFAULT_MAX_TOKENS,
    MAX_PRIORITY,
    MIN_PRIORITY,
    ChatBody,
    CompletionBody,
    CrashFault,
    DetokenizeBody,
    GenerateBody,
    HangFault,
    RestartFault,
    SlowFault,
    TokenizeChatBody,
    check_token_ids,
    conversation,
    decode,
    decode_fault,
    decode_tokenize,
    refuse_unsupported,
)
from kvroute_engine.http.service import EngineService
from kvroute_engine.http.sse import EventStream, events
from kvroute_engine.http.text_stream import TextStream
from kvroute_engine.http.tokenizer import Tokenizer

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
PRIORITY_HEADER = "x-vllm-priority"
_MAX_PRIORITY_CHARS = 64
_MAX_REQUEST_ID_CHARS = 128
_INLINE_SIZE = 16_384
"""Longest text, body of a chat in bytes, or number of tokens that the event loop itself turns into
the other, which takes milliseconds; longer ones use a thread."""

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class ApiConfig:
    """Configuration of one engine's HTTP side."""

    model: ServedModel
    version: str
    event_endpoints: Mapping[int, KVEventEndpoint] = field(default_factory=dict)
    """The endpoints, by data-parallel rank."""
    max_body_bytes: int = 32 * 2**20
    body_timeout_s: float = 60.0
    enable_faults: bool = False
    drop_events: Callable[[int], None] | None = None
    """Makes the publisher lose the given number of batches; called on the engine's thread. None if
    the publisher cannot."""


def create_app(
    service: EngineService, tokenizer: Tokenizer, config: ApiConfig, registry: CollectorRegistry
) -> FastAPI:
    """Build the application of one engine.

    Args:
        service: The engine; the caller closes it.
    """
    app = FastAPI(
        title="kvroute engine",
        version=config.version,
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
    )
    api = _Api(service, tokenizer, config, registry)
    for path, method, handler in api.routes():
        app.add_api_route(path, handler, methods=[method], response_model=None)
    add_error_handlers(app)
    return app


class _Api:
    def __init__(
        self,
        service: EngineService,
        tokenizer: Tokenizer,
        config: ApiConfig,
        registry: CollectorRegistry,
    ) -> None:
        self._service = service
        self._tokenizer = tokenizer
        self._config = config
        self._model = config.model
        self._registry = registry
        self._serials = itertools.count()

    def routes(self) -> list[tuple[str, str, Callable[[Request], Coroutine[Any, Any, Response]]]]:
        """Return the path, the method and the handler of every route."""
        routes = [
            ("/v1/completions", "POST", self.complete),
            ("/v1/chat/completions", "POST", self.chat),
            ("/tokenize", "POST", self.tokenize),
            ("/detokenize", "POST", self.detokenize),
            ("/reset_prefix_cache", "POST", self.reset_prefix_cache),
            ("/v1/models", "GET", self.models),
            ("/kv_event_sources", "GET", self.event_sources),
            ("/server_info", "GET", self.server_info),
            ("/health", "GET", self.health),
            ("/ping", "GET", self.health),
            ("/ping", "POST", self.health),
            ("/version", "GET", self.version),
            ("/metrics", "GET", self.metrics),
        ]
        if self._config.enable_faults:
            routes.append(("/faults", "POST", self.fault))
        return routes

    # --- completions ------------------------------------------------------------------------------

    async def complete(self, request: Request) -> Response:
        body = await self._body(request, CompletionBody)
        self._check(body)
        asked = body.prompts()
        params = (
            ["prompt"] if len(asked) == 1 else [f"prompt[{index}]" for index in range(len(asked))]
        )
        prompts = [
            await self._prompt_ids(prompt, body, param)
            for prompt, param in zip(asked, params, strict=True)
        ]
        engine_requests = [
            self._engine_request(
                ids,
                body,
                self._max_tokens(body.max_tokens, DEFAULT_MAX_TOKENS, ids),
                _priority(request, body),
            )
            for ids in prompts
        ]
        response = CompletionFormat(
            _response_id("cmpl", request), self._name(body), int(time.time())
        )
        return await self._generate(request, body, response, engine_requests)

    async def chat(self, request: Request) -> Response:
        raw = await self._raw_body(request)
        body = decode(raw, ChatBody)
        self._check(body)
        ids = self._cut(await self._chat_ids(conversation(body), len(raw)), body)
        if not ids:
            raise InvalidRequest("truncate_prompt_tokens", "0", "must leave at least one token")
        requested = (
            body.max_completion_tokens
            if body.max_completion_tokens is not None
            else body.max_tokens
        )
        max_tokens = self._max_tokens(requested, self._model.max_model_len, ids)
        response = ChatFormat(_response_id("chatcmpl", request), self._name(body), int(time.time()))
        asked = self._engine_request(ids, body, max_tokens, _priority(request, body))
        return await self._generate(request, body, response, [asked])

    async def _generate(
        self,
        request: Request,
        body: GenerateBody,
        response: ResponseFormat,
        engine_requests: Sequence[EngineRequest],
    ) -> Response:
        completion = CompletionBuilder(
            [(each, self._text_stream(body)) for each in engine_requests]
        )
        generation = await unless_client_leaves(completion.start(self._service), request.receive)
        if body.stream:
            return EventStream(events(completion, generation, response, body), generation)
        async with generation:
            choices = await unless_client_leaves(completion.full(generation), request.receive)
        return json_response(response.full(choices, completion.usage))

    def _text_stream(self, body: GenerateBody) -> TextStream:
        return TextStream(self._tokenizer.detokenizer(body.skip_special_tokens), body.stops)

    def _engine_request(
        self, ids: Sequence[int], body: GenerateBody, max_tokens: int, priority: int
    ) -> EngineRequest:
        sampling = SamplingParams(
            max_tokens=max_tokens,
            temperature=1.0 if body.temperature is None else body.temperature,
            seed=body.seed,
            ignore_eos=body.ignore_eos,
            stop_token_ids=tuple(body.stop_token_ids or ()),
        )
        lora_name = body.model if body.model in self._model.adapters else None
        return EngineRequest(
            f"request-{next(self._serials)}",
            ids,
            sampling,
            lora_name,
            body.cache_salt,
            body.kv_transfer_params,
            priority,
        )

    def _check(self, body: GenerateBody) -> None:
        self._check_model(body.model)
        refuse_unsupported(body)
        if body.stream_options is not None and not body.stream:
            raise InvalidRequest(
                "stream_options",
                "given",
                "belongs to a stream: set stream to true, or leave it out",
            )

    def _max_tokens(self, requested: int | None, default: int, ids: Sequence[int]) -> int:
        """Return how many tokens to generate: *default* is cut to what fits, what the client
        requested must fit."""
        room = self._model.max_model_len - len(ids)
        rule = f"prompt and output must have at most {self._model.max_model_len} tokens together"
        if room < 1:
            raise InvalidRequest("prompt", f"{len(ids)} tokens", rule)
        if requested is None:
            return min(default, room)
        if requested > room:
            raise InvalidRequest(
                "max_tokens", f"{requested} after a prompt of {len(ids)} tokens", rule
            )
        return requested

    # --- prompts ----------------------------------------------------------------------------------

    async def _prompt_ids(
        self, prompt: str | list[int], body: CompletionBody, param: str
    ) -> list[int]:
        if isinstance(prompt, str):
            ids = await _maybe_in_thread(len(prompt), lambda: self._text_ids(prompt, body))
        else:
            ids = prompt
            check_token_ids(ids, self._model.vocab_size, param)
            ids = self._cut(ids, body)
        if not ids:
            raise InvalidRequest(param, "no tokens", "must have at least one")
        return ids

    def _text_ids(self, text: str, body: CompletionBody) -> list[int]:
        """Return the ids of a text, cut as vLLM cuts them: without a side the text gives way, and
        the special tokens that begin it stay."""
        ids = self._tokenizer.encode(text, body.add_special_tokens)
        if body.truncation_side is not None or not body.add_special_tokens:
            return self._cut(ids, body)
        added = len(ids) - len(self._tokenizer.encode(text, False))
        return ids[:added] + self._cut(ids[added:], body, added)

    def _cut(self, ids: list[int], body: GenerateBody, taken: int = 0) -> list[int]:
        """Cut a prompt to its limit.

        Args:
            ids: All of it, apart from tokens that always stay.
            body: It names the length and the side.
            taken: How many tokens stay besides.
        """
        limit = body.truncate_prompt_tokens
        if limit is None:
            return ids
        most = max((self._model.max_model_len - 1 if limit < 0 else limit) - taken, 0)
        return ids[:most] if body.truncation_side == "right" else ids[max(len(ids) - most, 0) :]

    async def _chat_ids(self, chat: Chat, body_bytes: int) -> list[int]:
        return await _maybe_in_thread(body_bytes, lambda: self._tokenizer.encode_chat(chat))

    async def tokenize(self, request: Request) -> Response:
        raw = await self._raw_body(request)
        body = decode_tokenize(raw)
        self._check_model(body.model)
        if isinstance(body, TokenizeChatBody):
            ids = await self._chat_ids(conversation(body), len(raw))
        else:
            text, special = body.prompt, body.add_special_tokens
            ids = await _maybe_in_thread(len(text), lambda: self._tokenizer.encode(text, special))
        texts = (
            await _maybe_in_thread(len(ids), lambda: self._tokenizer.token_texts(ids))
            if body.return_token_strs
            else None
        )
        return json_response(TokenizeResponse(len(ids), self._model.max_model_len, ids, texts))

    async def detokenize(self, request: Request) -> Response:
        body = await self._body(request, DetokenizeBody)
        self._check_model(body.model)
        check_token_ids(body.tokens, self._model.vocab_size, "tokens")
        text = await _maybe_in_thread(
            len(body.tokens), lambda: self._tokenizer.decode(body.tokens, skip_special_tokens=False)
        )
        return json_response(DetokenizeResponse(text))

    # --- for routers and operators ----------------------------------------------------------------

    async def models(self, _request: Request) -> Response:
        return json_response(ServedModelList.of(self._model))

    async def event_sources(self, _request: Request) -> Response:
        return json_response(self._config.event_endpoints)

    async def server_info(self, _request: Request) -> Response:
        return json_response(EngineInfo(self._model.scheduling_policy))

    async def health(self, _request: Request) -> Response:
        return Response(status_code=503 if self._service.is_dead else 200)

    async def version(self, _request: Request) -> Response:
        return json_response(VersionResponse(self._config.version))

    async def metrics(self, _request: Request) -> Response:
        return Response(generate_latest(self._registry), media_type=METRICS_TYPE)

    async def reset_prefix_cache(self, _request: Request) -> Response:
        return json_response(ResetResponse(await self._service.reset_prefix_cache()))

    async def fault(self, request: Request) -> Response:
        fault = decode_fault(await self._raw_body(request))
        if isinstance(fault, CrashFault):
            crash()
        elif isinstance(fault, RestartFault):
            restart(request.scope["server"][1])
        elif isinstance(fault, HangFault):
            self._service.faults.hang(fault.seconds)
        elif isinstance(fault, SlowFault):
            self._service.faults.slow(fault.factor)
        else:
            await self._drop_events(fault.batches)
        return json_response(fault)

    async def _drop_events(self, batches: int) -> None:
        drop = self._config.drop_events
        if drop is None:
            raise ApiError(
                "kind: drop_events; this engine's publisher cannot lose batches on demand",
                501,
                "NotImplementedError",
            )
        await self._service.run(lambda: drop(batches))

    # --- bodies -----------------------------------------------------------------------------------

    async def _body(self, request: Request, kind: type[Result]) -> Result:
        return decode(await self._raw_body(request), kind)

    async def _raw_body(self, request: Request) -> bytes:
        return await read_body(request, self._config.max_body_bytes, self._config.body_timeout_s)

    def _check_model(self, name: str | None) -> None:
        if name is not None and name != self._model.name and name not in self._model.adapters:
            raise ModelNotFound(name)

    def _name(self, body: GenerateBody) -> str:
        return body.model or self._model.name


def _priority(request: Request, body: GenerateBody) -> int:
    """Return the request's priority: of its header where that is a number, else of its body.

    Raises:
        InvalidRequest: The header's does not fit into 64 bits.
    """
    try:
        priority = int(request.headers.get(PRIORITY_HEADER, "")[:_MAX_PRIORITY_CHARS])
    except ValueError:
        return body.priority
    if not MIN_PRIORITY <= priority <= MAX_PRIORITY:
        raise InvalidRequest(PRIORITY_HEADER, "given", "must fit into 64 bits")
    return priority


def _response_id(prefix: str, request: Request) -> str:
    """Return an id that ends with the client's own id for the request, if that is short and
    printable."""
    own = request.headers.get("x-request-id", "")
    is_usable = 0 < len(own) <= _MAX_REQUEST_ID_CHARS and own.isprintable()
    return f"{prefix}-{own if is_usable else uuid.uuid4().hex}"


async def _maybe_in_thread(size: int, convert: Callable[[], Result]) -> Result:
    return convert() if size <= _INLINE_SIZE else await asyncio.to_thread(convert)
