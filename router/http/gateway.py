"""The proxied paths as raw ASGI: admit, read, decide, stream."""

from __future__ import annotations

import asyncio
import hmac
import uuid
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from typing import Any, TypeAlias

from async_timeout import timeout

from router.config import ServerConfig, key_bytes
from router.errors import (
    BadRequest,
    BodyTooLarge,
    NoReplica,
    RequestError,
    Unauthorized,
)
from router.http.uvicorn_protocol import client_abort
from router.observability.request_log import RoutedRequest
from router.observability.request_observer import Account, Bookkeeper, describe
from router.proxy import Attempt, Dialect, Proxy, ProxyRequest, error_body
from router.routing.admission import Admission
from router.routing.dispatcher import Dispatched, Dispatcher
from router.routing.planner import Decision
from router.tokenize import Endpoint
from router.upstream import Header, Timeouts

Scope: TypeAlias = MutableMapping[str, Any]
Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]

PROMPT_PATHS: dict[str, Endpoint] = {
    endpoint.value: endpoint
    for endpoint in (
        Endpoint.CHAT,
        Endpoint.COMPLETIONS,
        Endpoint.RESPONSES,
        Endpoint.MESSAGES,
        Endpoint.EMBEDDINGS,
    )
}
OTHER_PATHS = ("/tokenize", "/detokenize")
PROXIED_PATHS = frozenset((*PROMPT_PATHS, *OTHER_PATHS))

MAX_REQUEST_ID_LENGTH = 128
KEY_HEADERS = (b"authorization", b"x-api-key")
"""Where a client may carry its key: OpenAI's SDKs and Anthropic's."""


class ClientGone(Exception):
    """The client closed its connection before its request was whole; nobody is there to be
    answered."""


class Gateway:
    """Serves the proxied paths."""

    def __init__(
        self,
        server: ServerConfig,
        session_header: str,
        admission: Admission,
        dispatcher: Dispatcher,
        proxy: Proxy,
        books: Bookkeeper,
    ) -> None:
        self._server = server
        self._client_key = key_bytes(server.client_api_key)
        self._session_header = session_header.encode()
        self._admission = admission
        self._dispatcher = dispatcher
        self._proxy = proxy
        self._books = books
        timeouts = server.timeouts
        self._patient = Timeouts(timeouts.connect_s, timeouts.whole_answer_s, timeouts.idle_s)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request to a path of `PROXIED_PATHS`."""
        headers = dict(scope["headers"])
        request_id = _request_id(headers)
        answer_headers = ((b"x-request-id", request_id),)
        dialect = Dialect.ANTHROPIC if scope["path"] == Endpoint.MESSAGES.value else Dialect.OPENAI
        try:
            with self._admission:
                check_key(headers, self._client_key)
                body = await read_body(
                    headers,
                    receive,
                    self._server.max_body_bytes,
                    self._server.timeouts.client_body_s,
                )
                decision, dispatched = await self._decide(scope["path"], headers, body)
                routed = describe(scope["path"], request_id, decision, dispatched)
                self._require_replica(decision, routed)
                # Before anything else is waited for: a replica may be removed at any time.
                attempts = self._attempts(decision, request_id)
                request = self._request(
                    scope,
                    await self._without_report_mode(body, dispatched),
                    answer_headers,
                    dialect,
                )
                request = request._replace(timeouts=self._timeouts_for(dispatched))
                await self._proxy.stream(
                    attempts,
                    request,
                    receive,
                    send,
                    Account(self._books, decision, dispatched, routed),
                )
        except RequestError as error:
            self._books.metrics.bad_requests.labels(error.code).inc()
            if error.status >= 500:
                self._books.journal.minute.now.failed += 1
            await send_error(send, error, answer_headers, dialect)
        except ClientGone:
            self._books.metrics.bad_requests.labels("client_gone").inc()
        except asyncio.CancelledError:
            if not self._admission.is_shutting_down:
                raise
            await _cut(scope)

    async def _decide(
        self, path: str, headers: dict[bytes, bytes], body: bytes
    ) -> tuple[Decision, Dispatched | None]:
        endpoint = PROMPT_PATHS.get(path)
        if endpoint is None:
            return await self._dispatcher.by_load(body), None
        session = headers.get(self._session_header)
        dispatched = await self._dispatcher.dispatch(
            endpoint, body, session.decode("latin-1") if session else None
        )
        return dispatched.decision, dispatched

    def _require_replica(self, decision: Decision, routed: RoutedRequest) -> None:
        try:
            self._dispatcher.require_replica(decision)
        except NoReplica as error:
            self._books.journal.turned_away(routed, error.status, error.code)
            raise

    def _request(
        self, scope: Scope, body: bytes, headers: tuple[Header, ...], dialect: Dialect
    ) -> ProxyRequest:
        target: bytes = scope["raw_path"]
        if scope["query_string"]:
            target += b"?" + scope["query_string"]
        return ProxyRequest(
            method=b"POST",
            target=target,
            headers=scope["headers"],
            body=body,
            response_headers=headers,
            dialect=dialect,
            abort_client=client_abort(scope),
        )

    def _timeouts_for(self, dispatched: Dispatched | None) -> Timeouts | None:
        """None for the proxy's own; of an answer that is not streamed the first byte comes with the
        last."""
        return self._patient if dispatched is not None and not dispatched.spec.stream else None

    async def _without_report_mode(self, body: bytes, dispatched: Dispatched | None) -> bytes:
        if dispatched is None:
            return body
        stripped = await self._dispatcher.strip_report_mode(body, dispatched.spec)
        if stripped is not body:
            self._books.metrics.report_modes.inc()
        return stripped

    def _attempts(self, decision: Decision, request_id: bytes) -> Sequence[Attempt]:
        return [
            self._attempt(
                decision, ranked.candidate.replica_id, ranked.candidate.dp_rank, request_id
            )
            for ranked in decision.ranking.ranked
        ]

    def _attempt(
        self, decision: Decision, replica_id: str, dp_rank: int | None, request_id: bytes
    ) -> Attempt:
        replica = self._books.replicas.get(replica_id)
        hit = decision.hit_of(replica_id)
        return Attempt(
            replica_id=replica_id,
            origin=replica.origin,
            request_headers=self._request_headers(replica.headers, dp_rank, request_id),
            response_headers=(
                (b"x-kv-replica", replica_id.encode()),
                (b"x-kv-hit-tokens", b"%d" % hit.cached_tokens),
            ),
        )

    def _request_headers(
        self, own: tuple[Header, ...], dp_rank: int | None, request_id: bytes
    ) -> tuple[tuple[bytes, bytes | None], ...]:
        headers: list[tuple[bytes, bytes | None]] = [(b"x-request-id", request_id), *own]
        if self._client_key is not None:  # the router's key is nobody else's
            headers += [(name, None) for name in KEY_HEADERS if name not in dict(own)]
        if dp_rank is not None:
            headers.append((b"x-data-parallel-rank", b"%d" % dp_rank))
        return tuple(headers)


async def _cut(scope: Scope) -> None:
    """End a request that outlived the time for shutting down; its client must see that something is
    missing."""
    abort = client_abort(scope)
    if abort is not None:
        abort()
        # Let the server see the loss before the application returns without an answer.
        await asyncio.sleep(0)


def check_key(headers: dict[bytes, bytes], expected: bytes | None) -> None:
    """Raises `Unauthorized` unless the request carries the key, as a bearer token or in Anthropic's
    `x-api-key`."""
    if expected is None:
        return
    given = headers.get(b"authorization", b"")
    token = given[7:] if given[:7].lower() == b"bearer " else headers.get(b"x-api-key", b"")
    if not hmac.compare_digest(token, expected):
        raise Unauthorized


async def read_body(
    headers: dict[bytes, bytes], receive: Receive, limit_bytes: int, timeout_s: float
) -> bytes:
    """The whole body of a request.

    Raises:
        BodyTooLarge: It is, or says that it will be, longer than *limit_bytes*.
        BadRequest: It did not come within *timeout_s*.
        ClientGone: The client left in the middle.
    """
    announced = headers.get(b"content-length", b"0")
    if announced.isdigit() and int(announced) > limit_bytes:
        raise BodyTooLarge(limit_bytes)
    message = await receive()
    if message["type"] == "http.request" and not message.get("more_body"):
        body: bytes = message.get("body", b"")
        if len(body) > limit_bytes:
            raise BodyTooLarge(limit_bytes)
        return body
    try:
        async with timeout(timeout_s):
            return await _read_rest(message, receive, limit_bytes)
    except asyncio.TimeoutError:
        raise BadRequest("body", "not complete", f"must arrive within {timeout_s:g} s") from None


async def _read_rest(message: Message, receive: Receive, limit_bytes: int) -> bytes:
    parts: list[bytes] = []
    size = 0
    while True:
        if message["type"] == "http.disconnect":
            raise ClientGone
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > limit_bytes:
            raise BodyTooLarge(limit_bytes)
        if not message.get("more_body"):
            return b"".join(parts)
        message = await receive()


async def send_error(
    send: Send, error: RequestError, headers: Sequence[Header], dialect: Dialect = Dialect.OPENAI
) -> None:
    """Answer with an error, in the form the client's SDK understands."""
    body = error_body(dialect, str(error), error.type, error.code)
    start = [
        (b"content-type", b"application/json"),
        (b"content-length", b"%d" % len(body)),
        *headers,
        *error.headers(),
    ]
    await send({"type": "http.response.start", "status": error.status, "headers": start})
    await send({"type": "http.response.body", "body": body})


def _request_id(headers: dict[bytes, bytes]) -> bytes:
    given = headers.get(b"x-request-id", b"")
    return given if 0 < len(given) <= MAX_REQUEST_ID_LENGTH else uuid.uuid4().hex.encode()
