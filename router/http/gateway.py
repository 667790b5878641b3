"""The proxied paths as raw ASGI: admit, read, decide, stream."""

from __future__ import annotations

import asyncio
import codecs
import re
import uuid
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from typing import Any, TypeAlias

from async_timeout import timeout

from router.config import ServerConfig
from router.errors import BadRequest, BodyTooLarge, Overloaded, RequestError
from router.http.access import KEY_HEADERS, Guard, Key, Scope
from router.http.access_log import note_refused, note_routed
from router.http.networks import Networks
from router.http.proxied_paths import ProxiedPath, RoutedBy, dialect_of, salt_names
from router.http.uvicorn_protocol import client_abort, is_of_reserve
from router.observability.request_observer import RequestObservers
from router.proxy import Dialect, Proxy, ProxyRequest, error_body
from router.routing.admission import Admission
from router.routing.dispatcher import RANK_HEADER, Decision, Dispatcher, TenantSalt
from router.upstream import Header, Timeouts

Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]

MAX_REQUEST_ID_LENGTH = 128
_FORWARDING = (
    *(b"forwarded", b"x-real-ip", b"x-forwarded-for", b"x-forwarded-proto"),
    *(b"x-forwarded-host", b"x-forwarded-port"),
)
MAX_RANK_DIGITS = 5

MAX_FORM_PARTS = 256
_MAX_PART_HEAD_BYTES = 8192
_MAX_FIELD_BYTES = 1024
_SEARCH_STEP_BYTES = 1024 * 1024
"""Of a form, at a time: other threads get their turn in between."""

_BOUNDARY = re.compile(rb"""boundary\s*=\s*(?:"([^"]{1,200})"|([^\s;,"]{1,200}))""", re.IGNORECASE)
_FIELD_NAME = re.compile(
    rb"""^content-disposition\s*:[^\r\n]*?;\s*name\s*=\s*(?:"([^"\r\n]*)"|([^\s;"]+))""",
    re.IGNORECASE | re.MULTILINE,
)


class ClientLeft(Exception):
    """The client closed its connection before its whole request had arrived."""


class Gateway:
    """Serves the proxied paths."""

    def __init__(
        self,
        server: ServerConfig,
        guard: Guard,
        session_header: str,
        admission: Admission,
        dispatcher: Dispatcher,
        proxy: Proxy,
        observers: RequestObservers,
    ) -> None:
        """Keep the parts that a request passes through.

        Args:
            server: Bounds and timeouts.
            guard: Checks who sends a request.
            session_header: The header that names a client's session, in lower case.
            admission: Lets requests in.
            dispatcher: Decides where they go.
            proxy: Sends them there.
            observers: Observes what becomes of them.
        """
        self._server = server
        self._guard = guard
        self._trusted_proxies = Networks(server.trusted_proxies)
        # The router's key is for the router only: replicas do not get to see it.
        self._dropped = frozenset(
            (
                b"x-request-id",
                *_FORWARDING,
                *(KEY_HEADERS if guard.needs_key("client") else ()),
                *(() if server.trust_client_rank else (RANK_HEADER,)),
            )
        )
        self._session_header = session_header.encode()
        self._admission = admission
        self._dispatcher = dispatcher
        self._proxy = proxy
        self._observers = observers
        timeouts = server.timeouts
        self._patient = Timeouts(timeouts.connect_s, timeouts.whole_response_s, timeouts.idle_s)

    async def __call__(self, path: ProxiedPath, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request to a proxied path, by one of its methods.

        Args:
            path: What is known of it.
            scope: The request's line and headers.
            receive: Gives its body.
            send: Takes the response.
        """
        headers = dict(scope["headers"])
        request_id = _request_id(headers)
        try:
            with self._admission, self._admission.buffer() as buffer:
                if is_of_reserve(scope):
                    raise Overloaded("is out of file descriptors")
                key = self._guard.check("client", scope, headers)
                try:
                    body = await self._read_body(headers, receive, buffer.add)
                    salt = tenant_salt(key, scope["path"])
                    decision = await self._decide(path, headers, body, salt)
                except MemoryError:
                    raise self._observers.out_of_memory() from None
                observer = self._observers.observe(
                    decision, scope["path"], request_id.decode("latin-1")
                )
                note_routed(scope, observer.request)
                request = self._request(scope, decision, request_id)
                attempts = decision.attempts(self._guard.clients_see_hits)
                await self._proxy.stream(attempts, request, receive, send, observer)
        except RequestError as error:
            await self._guard.refused(error, path.label, scope)
            self._observers.refused(error)
            note_refused(scope, error.code)
            await send_error(
                send, error, ((b"x-request-id", request_id),), dialect_of(scope["path"])
            )
        except ClientLeft:
            self._observers.client_left()
        except asyncio.CancelledError:
            if not self._admission.is_shutting_down:
                raise
            await _cut(scope)

    async def _read_body(
        self, headers: dict[bytes, bytes], receive: Receive, hold: Callable[[int], None]
    ) -> bytes:
        server = self._server
        return await read_body(
            headers, receive, server.max_body_bytes, server.timeouts.client_body_s, hold
        )

    async def _decide(
        self,
        path: ProxiedPath,
        headers: dict[bytes, bytes],
        body: bytes,
        salt: TenantSalt | None,
    ) -> Decision:
        if path.routed_by is RoutedBy.RESPONSE:
            return await self._dispatcher.dispatch_to_holder(path.response_id, body)
        content_type = headers.get(b"content-type", b"")
        needs_model = path.routed_by is RoutedBy.LOAD
        if is_form(content_type) and path.routed_by is not RoutedBy.CACHE:
            model = await asyncio.to_thread(form_field, content_type, body, b"model")
            return self._dispatcher.dispatch_by_load(model, body, needs_model=needs_model)
        if path.routed_by is RoutedBy.ANY and not _is_object(body):
            if salt is not None and body.strip():
                # Python's JSON reads UTF-16 as well, so an engine might find a prompt in it.
                rule = "with this key, it must be a JSON object: a salt is added to it"
                raise BadRequest("$", f"{len(body)} bytes", rule)
            return self._dispatcher.dispatch_by_load(None, body, needs_model=False)
        session = headers.get(self._session_header)
        return await self._dispatcher.dispatch(
            path.endpoint,
            body,
            session.decode("latin-1") if session else None,
            needs_model=path.routed_by is not RoutedBy.ANY,
            dp_rank=_rank(headers) if self._server.trust_client_rank else None,
            salt=salt,
        )

    def _forwarded(self, scope: Scope) -> list[Header]:
        """Who asks; what a client says of that itself goes on only from a trusted proxy."""
        peer = str((scope.get("client") or ("",))[0])
        given = dict(scope["headers"]) if peer in self._trusted_proxies else {}
        before = given.get(b"x-forwarded-for")
        chain = (before + b", " if before else b"") + peer.encode("ascii", "replace")
        proto = given.get(b"x-forwarded-proto", b"http")
        return [(b"x-forwarded-for", chain), (b"x-forwarded-proto", proto)]

    def _request(self, scope: Scope, decision: Decision, request_id: bytes) -> ProxyRequest:
        target: bytes = scope["raw_path"]
        if scope["query_string"]:
            target += b"?" + scope["query_string"]
        headers = [header for header in scope["headers"] if header[0] not in self._dropped]
        headers += (*self._forwarded(scope), (b"x-request-id", request_id))
        # The first byte of a response that is not streamed comes with the last.
        is_whole = decision.spec is not None and not decision.spec.stream
        return ProxyRequest(
            method=scope["method"].encode(),
            target=target,
            headers=headers,
            body=decision.body,
            response_headers=((b"x-request-id", request_id),),
            dialect=dialect_of(scope["path"]),
            timeouts=self._patient if is_whole else None,
            abort_client=client_abort(scope),
        )


def tenant_salt(key: Key | None, path: str) -> TenantSalt | None:
    """The salt of a client's key, and where it belongs; None where there is none to add.

    Args:
        key: The client's, where one is needed.
        path: What is asked.
    """
    if key is None or key.cache_salt is None or not salt_names(path):
        return None
    return TenantSalt(key.cache_salt, salt_names(path))


def _is_object(body: bytes) -> bool:
    return body[:64].removeprefix(codecs.BOM_UTF8).lstrip()[:1] == b"{"


async def _cut(scope: Scope) -> None:
    """End a request that outlived the time for shutting down, so that its client sees the response
    break off."""
    abort = client_abort(scope)
    if abort is not None:
        abort()
        # Let the server see the closed socket before the application returns without a response.
        await asyncio.sleep(0)


async def read_body(
    headers: dict[bytes, bytes],
    receive: Receive,
    limit_bytes: int,
    timeout_s: float,
    hold: Callable[[int], None],
) -> bytes:
    """Read the whole body of a request.

    Args:
        headers: The request's, names in lower case.
        receive: Of the ASGI application.
        limit_bytes: Bound on the body.
        timeout_s: Time within which a body that comes in pieces must be complete.
        hold: Called with the size of each piece, before it is kept; may raise `Overloaded`.
    Raises:
        BodyTooLarge: It is, or announces to be, longer than *limit_bytes*.
        BadRequest: It did not arrive within *timeout_s*.
        ClientLeft: The client left in the middle.
    """
    announced = headers.get(b"content-length", b"0")
    if announced.isdigit() and int(announced) > limit_bytes:
        raise BodyTooLarge(limit_bytes)
    message = await receive()
    if message["type"] == "http.request" and not message.get("more_body"):
        body: bytes = message.get("body", b"")
        if len(body) > limit_bytes:
            raise BodyTooLarge(limit_bytes)
        hold(len(body))
        return body
    try:
        async with timeout(timeout_s):
            return await _read_rest(message, receive, limit_bytes, hold)
    except asyncio.TimeoutError:
        raise BadRequest("body", "not complete", f"must arrive within {timeout_s:g} s") from None


async def _read_rest(
    message: Message, receive: Receive, limit_bytes: int, hold: Callable[[int], None]
) -> bytes:
    parts: list[bytes] = []
    size = 0
    while True:
        if message["type"] == "http.disconnect":
            raise ClientLeft
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > limit_bytes:
            raise BodyTooLarge(limit_bytes)
        hold(len(parts[-1]))
        if not message.get("more_body"):
            return b"".join(parts)
        message = await receive()


def is_form(content_type: bytes) -> bool:
    """Whether a body of this type is a multipart form."""
    return content_type.lstrip()[:19].lower() == b"multipart/form-data"


def form_field(content_type: bytes, body: bytes, name: bytes) -> str | None:
    """The value of a short field; None if the form has none that can be read.

    Args:
        content_type: The header, which names the boundary between parts.
        body: The whole form.
        name: The field.
    """
    found = _BOUNDARY.search(content_type)
    if found is None:
        return None
    delimiter = b"--" + (found[1] or found[2])
    at = _find(body, delimiter, 0)
    for _ in range(MAX_FORM_PARTS):
        if at < 0:
            return None
        start = at + len(delimiter)
        head_end = body.find(b"\r\n\r\n", start, start + _MAX_PART_HEAD_BYTES)
        if head_end < 0:
            return None
        disposition = _FIELD_NAME.search(body[start:head_end])
        at = _find(body, b"\r\n" + delimiter, head_end + 2)
        if disposition is not None and (disposition[1] or disposition[2]) == name and at >= 0:
            value = body[head_end + 4 : min(at, head_end + 4 + _MAX_FIELD_BYTES)]
            return value.decode("utf-8", "replace").strip()
        at += 2 if at >= 0 else 0
    return None


def _find(body: bytes, needle: bytes, start: int) -> int:
    """As `bytes.find`, but in steps."""
    while start < len(body):
        found = body.find(needle, start, start + _SEARCH_STEP_BYTES + len(needle))
        if found >= 0:
            return found
        start += _SEARCH_STEP_BYTES
    return -1


async def send_error(
    send: Send, error: RequestError, headers: Sequence[Header], dialect: Dialect = Dialect.OPENAI
) -> None:
    """Respond with an error.

    Args:
        send: Of the ASGI application.
        error: Gives status, message, type, code and its own headers.
        headers: More headers.
        dialect: The form that the client's SDK understands.
    """
    body = error_body(dialect, str(error), error.type, error.code)
    start = [
        (b"content-type", b"application/json"),
        (b"content-length", b"%d" % len(body)),
        *headers,
        *error.headers(),
    ]
    await send({"type": "http.response.start", "status": error.status, "headers": start})
    await send({"type": "http.response.body", "body": body})


def _rank(headers: dict[bytes, bytes]) -> int | None:
    """The data-parallel rank that a request asks for; what is no number is left to the engine."""
    given = headers.get(RANK_HEADER, b"")
    return int(given) if given.isdigit() and len(given) <= MAX_RANK_DIGITS else None


def _request_id(headers: dict[bytes, bytes]) -> bytes:
    given = headers.get(b"x-request-id", b"")
    return given if 0 < len(given) <= MAX_REQUEST_ID_LENGTH else uuid.uuid4().hex.encode()
