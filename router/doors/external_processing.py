"""The endpoint picker's gRPC server, wired: streams of external processing, and health checks.
Imported only if it listens: it needs the extra `gateway`."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import msgspec
from async_timeout import timeout_at
from google.protobuf.message import DecodeError

from kvevents.tasks import begin_lasting
from router.config.certificates import PICKER, Certificate, keep_fresh, listener_certificate
from router.config.schema import RouterConfig
from router.doors.asks import ANONYMOUS, Key, Question, new_id
from router.doors.desk import Desk
from router.doors.http.access import KEY_HEADERS, Guard
from router.doors.http.dialects import holdings
from router.doors.messages import (
    EXT_PROC_SERVICE,
    HEALTH_SERVICE,
    INDEXER_SERVICE,
    GetPodScoresRequest,
    GetPodScoresResponse,
    HealthCheckRequest,
    HealthCheckResponse,
    ProcessingRequest,
    ProcessingResponse,
)
from router.doors.picker import Pick, PickerParts
from router.doors.proxied_paths import ProxiedPaths
from router.errors import BadRequest, ConfigError, ConfigProblem, Overloaded, RequestError
from router.plane.attempts import RANK_HEADER
from router.prompt.endpoints import Endpoint
from router.routing.decision import Decision

logger = logging.getLogger(__name__)

_SERVING, _NOT_SERVING, _UNKNOWN_SERVICE = 1, 2, 3
_LIVENESS = "liveness"
_READINESS = ("", "readiness", EXT_PROC_SERVICE)
_WATCH_S = 1.0
_BLOCK_TOKENS = 16
_CODES = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    403: grpc.StatusCode.PERMISSION_DENIED,
    404: grpc.StatusCode.NOT_FOUND,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
}
_MESSAGE_BYTES = 1024 * 1024
"""The bound on a message beside its body."""
_DOOR = "ext_proc"


def make_picker(
    config: RouterConfig,
    desk: Desk,
    guard: Guard,
    paths: ProxiedPaths,
    why_not_ready: Callable[[], str | None],
) -> ExtProcServer:
    """Make the server for gateways.

    Args:
        why_not_ready: Answers health checks; None: the router is ready.
    """
    server = config.server
    needs_key = guard.needs_key("client")
    parts = PickerParts(
        desk=desk,
        paths=paths,
        caller=_callers(guard) if needs_key else lambda _headers: ANONYMOUS,
        dropped=(*(KEY_HEADERS if needs_key else ()), RANK_HEADER),
        max_body_bytes=server.max_body_bytes,
        config=config.doors.ext_proc,
    )
    body_s, silence_s = server.timeouts.client_body_s, config.doors.reservation_idle_s
    return ExtProcServer(parts, body_s, silence_s, why_not_ready)


def _callers(guard: Guard) -> Callable[[Mapping[bytes, bytes]], Key]:
    """Identify a gateway's clients by their keys. A wrong key is counted and logged; its refusal is
    not held back, since all come from the gateway's address."""

    def caller(headers: Mapping[bytes, bytes]) -> Key:
        try:
            return guard.check("client", {}, headers)
        except RequestError as error:
            if guard.wrong_keys.hold(error, _DOOR, "the gateway"):
                guard.wrong_keys.let_go()
            raise

    return caller


# --- the server -----------------------------------------------------------------------------------


@dataclass(eq=False, repr=False)
class _Shown:
    """The server's certificate and authorities. `keep_fresh` looks whether a file has changed."""

    files: Certificate

    def __post_init__(self) -> None:
        self._given = self.files.context

    def read(self) -> Any:
        """Read the files; raises OSError."""
        files = self.files
        assert files.certificate is not None
        assert files.key is not None
        pair = Path(files.key).read_bytes(), Path(files.certificate).read_bytes()
        trusted = None if files.authorities is None else Path(files.authorities).read_bytes()
        return grpc.ssl_server_certificate_configuration([pair], trusted)

    def renewed(self) -> Any:
        """Return what new connections get from now on; None: what they got. gRPC asks at each."""
        context = self.files.context
        if context is self._given:
            return None
        try:
            found = self.read()
        except OSError:  # it changes just now: the next connection asks again
            return None
        self._given = context
        return found


@dataclass(eq=False, repr=False)
class ExtProcServer:
    """Listens between `start` and `stop`, on the running event loop."""

    parts: PickerParts
    body_s: float
    """The time for a whole request to arrive."""
    silence_s: float
    """The longest silence, after which the reservation and the stream end."""
    why_not_ready: Callable[[], str | None]
    """Returns why the health checks fail; None: the router is ready."""

    def __post_init__(self) -> None:
        self.config = self.parts.config
        self.streams = 0
        """Those that are open."""
        self._server: Any = None
        self._keeping: asyncio.Task[None] | None = None
        self.port = 0

    async def start(self) -> None:
        """Begin to listen.

        Raises:
            ConfigError: The address cannot be bound, or the certificate cannot be read.
        """
        options = _options(self.parts.max_body_bytes, self.config.max_streams)
        server = self._server = grpc.aio.server(options=options)
        server.add_generic_rpc_handlers((self._picking(), self._indexer(), self._health()))
        assert self.config.listen is not None
        try:
            self.port = self._bind(server, self.config.listen)
        except (RuntimeError, OSError) as error:
            problem = ConfigProblem("doors.ext_proc", f"cannot listen: {error}")
            raise ConfigError([problem]) from None
        await server.start()
        host = self.config.listen.rpartition(":")[0]
        logger.info("the endpoint picker listens on grpc://%s:%d", host, self.port)

    async def stop(self, grace_s: float = 0.0) -> None:
        """Accept no new streams; those open have *grace_s* to end."""
        if self._keeping is not None:
            self._keeping.cancel()
        if self._server is not None:
            await self._server.stop(grace_s)

    def _bind(self, server: Any, address: str) -> int:
        files = listener_certificate(self.config.tls, PICKER)
        if files is None:
            return int(server.add_insecure_port(address))
        consequence = "the endpoint picker shows the certificate that it has"
        self._keeping = begin_lasting(keep_fresh([files]), "picker's certificate", consequence)
        shown = _Shown(files)
        needs_certificate = files.authorities is not None
        credentials = grpc.dynamic_ssl_server_credentials(
            shown.read(), shown.renewed, needs_certificate
        )
        return int(server.add_secure_port(address, credentials))

    # --- picking ----------------------------------------------------------------------------------

    def _picking(self) -> Any:
        process = grpc.stream_stream_rpc_method_handler(
            self._process,
            response_serializer=ProcessingResponse.SerializeToString,
        )
        return grpc.method_handlers_generic_handler(EXT_PROC_SERVICE, {"Process": process})

    async def _process(self, _requests: AsyncIterator[Any], context: Any) -> None:
        pick = Pick(self.parts)
        if self.streams >= self.config.max_streams:
            await context.write(pick.refused(Overloaded("has its limit of streams")))
            return
        self.streams += 1
        try:
            await self._answer(pick, context)
        finally:
            self.streams -= 1
            pick.closed()

    async def _answer(self, pick: Pick, context: Any) -> None:
        clock = asyncio.get_running_loop().time
        deadline = clock() + self.body_s
        while True:
            try:
                is_arriving = pick.is_arriving
                async with timeout_at(deadline if is_arriving else clock() + self.silence_s):
                    message = await context.read()
            except asyncio.TimeoutError:
                if not is_arriving:
                    return
                rule = f"must arrive within {self.body_s:g} s"
                await context.write(pick.refused(BadRequest("body", "not complete", rule)))
                return
            if message is grpc.aio.EOF:
                return
            for answer in await self._take(pick, message):
                await context.write(answer)
            if pick.is_refused:
                return

    async def _take(self, pick: Pick, message: bytes) -> list[Any]:
        try:
            return await pick.take(ProcessingRequest.FromString(message))
        except DecodeError:
            rule = "must be a ProcessingRequest"
            return [pick.refused(BadRequest("message", f"{len(message)} bytes", rule))]
        except Exception:
            logger.exception("a gateway's message could not be answered")
            return [pick.refused(RequestError())]

    # --- scores -----------------------------------------------------------------------------------

    def _indexer(self) -> Any:
        scores = grpc.unary_unary_rpc_method_handler(
            self._scores,
            request_deserializer=GetPodScoresRequest.FromString,
            response_serializer=GetPodScoresResponse.SerializeToString,
        )
        return grpc.method_handlers_generic_handler(INDEXER_SERVICE, {"GetPodScores": scores})

    async def _scores(self, request: Any, context: Any) -> Any:
        """Answer llm-d's question: blocks of a text that each pod would reuse."""
        body = {"model": request.model_name, "prompt": request.prompt}
        metadata = {
            each[0].encode(): each[1].encode() if isinstance(each[1], str) else each[1]
            for each in context.invocation_metadata() or ()
        }
        try:
            question = Question(
                endpoint=Endpoint.COMPLETIONS,
                body=msgspec.json.encode(body),
                path=INDEXER_SERVICE,
                request_id=new_id(),
                caller=self.parts.caller(metadata),
            )
            decision = await self.parts.desk.look_up(question)
        except RequestError as error:
            await context.abort(_CODES.get(error.status, grpc.StatusCode.UNAVAILABLE), str(error))
        answer, wanted = GetPodScoresResponse(), frozenset(request.pod_identifiers)
        for pod, blocks in _scores_of(decision).items():
            if not wanted or not wanted.isdisjoint((pod, pod.rpartition(":")[0])):
                answer.scores.add(pod=pod, score=blocks)
        return answer

    # --- health -----------------------------------------------------------------------------------

    def _health(self) -> Any:
        forms = {
            "request_deserializer": HealthCheckRequest.FromString,
            "response_serializer": HealthCheckResponse.SerializeToString,
        }
        methods = {
            "Check": grpc.unary_unary_rpc_method_handler(self._check, **forms),
            "Watch": grpc.unary_stream_rpc_method_handler(self._watch, **forms),
        }
        return grpc.method_handlers_generic_handler(HEALTH_SERVICE, methods)

    async def _check(self, request: Any, context: Any) -> Any:
        status = self._status(request.service)
        if status == _UNKNOWN_SERVICE:
            await context.abort(grpc.StatusCode.NOT_FOUND, "no such service")
        return HealthCheckResponse(status=status)

    async def _watch(self, request: Any, context: Any) -> None:
        sent = None
        while True:
            status = self._status(request.service)
            if status != sent:
                sent = status
                await context.write(HealthCheckResponse(status=status))
            await asyncio.sleep(_WATCH_S)

    def _status(self, service: str) -> int:
        if service == _LIVENESS:
            return _SERVING
        if service not in _READINESS:
            return _UNKNOWN_SERVICE
        return _NOT_SERVING if self.why_not_ready() else _SERVING


def _scores_of(decision: Decision) -> dict[str, float]:
    """Return blocks by address: the hit that all groups allow, without the last token."""
    if decision.asked.model is None or not decision.prompts:
        return {}
    found = holdings(decision.asked.model, decision.prompts[0])
    replicas = {**decision.prefillers, **decision.replicas}
    return {
        replicas[name].address: max(each.hit.cached_tokens for each in ranks) / _BLOCK_TOKENS
        for name, ranks in found.items()
        if name in replicas
    }


def _options(max_body_bytes: int, max_streams: int) -> list[tuple[str, Any]]:
    # gRPC drops new streams by chance where more than 1,000 wait to be taken: those of honest
    # gateways as well, silently. We refuse them ourselves.
    waiting = max(1000, 2 * max_streams)
    return [
        ("grpc.server.max_pending_requests", waiting),
        ("grpc.server.max_pending_requests_hard_limit", waiting),
        ("grpc.max_receive_message_length", max_body_bytes + _MESSAGE_BYTES),
        ("grpc.max_send_message_length", max_body_bytes + _MESSAGE_BYTES),
        ("grpc.so_reuseport", 0),
    ]
