"""One request of a gateway that asks over Envoy's external processing (ext_proc): its stream's
messages and their answers. Owns no socket.

    state      input                        answers                                     next
    HEAD       request headers              nothing, or in buffered mode that they pass BODY
               the same, without a body     where to                                    SENT
    BODY       a piece of the body          nothing                                     BODY
               its last piece, or trailers  where to, and the body                      SENT
    SENT       response headers             that they pass                              RESPONSE
    RESPONSE   a piece of the body          that piece                                  RESPONSE
               its last piece, or trailers  that                                        OVER
    any        it is refused                an immediate response                       OVER

The headers and the metadata with the destination stand in the answer to the request's headers; in
buffered mode, where that was given before there was a body, in the answer to the body.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

from router.config.origin import Header
from router.config.server import ExtProcConfig
from router.doors.asks import ANONYMOUS, Key, Question, request_id_in
from router.doors.desk import DecidedReservation, Desk
from router.doors.messages import ProcessingResponse
from router.doors.names import RANK_ADDRESS_HEADER, SIDECAR_HEADERS
from router.doors.proxied_paths import ProxiedPaths, dialect_of
from router.doors.reservations import Outcome
from router.errors import BadRequest, BodyTooLarge, NoReplica, RequestError
from router.fleet.replica import IsEligible, Replica
from router.plane.attempts import RANK_HEADER, Attempt
from router.plane.proxied_messages import error_body
from router.routing.admission import BodyBuffer

ENDPOINT = "x-gateway-destination-endpoint"
SERVED = "x-gateway-destination-endpoint-served"
_LB, _HINT, _SUBSET = "envoy.lb", "envoy.lb.subset_hint", "x-gateway-destination-endpoint-subset"
_ATTRIBUTES, _UPSTREAM = "envoy.filters.http.ext_proc", "upstream.address"
_DROPPED = b"x-llm-d-request-dropped-reason"
_MAX_PORT = 65_535

MAX_CHUNK_BYTES = 62_000
"""Some gateways take no more than 64 KiB in a message."""
_OVERWRITE = 2
_NONE, _STREAMED, _BUFFERED, _BUFFERED_PARTIAL, _FULL_DUPLEX = range(5)


class PickerParts(NamedTuple):
    """Holds the parts that all requests share."""

    desk: Desk
    paths: ProxiedPaths
    caller: Callable[[Mapping[bytes, bytes]], Key]
    """Returns the key of a request by its headers; raises `RequestError`."""
    dropped: Sequence[bytes]
    """Headers that are not for replicas."""
    max_body_bytes: int
    config: ExtProcConfig


class Stage(Enum):
    """How far a request has come; see above."""

    HEAD = "head"
    BODY = "body"
    SENT = "sent"
    RESPONSE = "response"
    OVER = "over"


@dataclass(slots=True)
class _Head:
    """Holds the head of the request."""

    headers: dict[bytes, bytes]
    path: str
    is_eligible: IsEligible | None
    is_duplex: bool
    is_buffered: bool
    """True if its body comes in one message; followed by trailers, that has not its end."""


class Pick:
    """One stream of the gateway."""

    def __init__(self, parts: PickerParts) -> None:
        self.stage = Stage.HEAD
        self.is_refused = False
        """True after a refusal: nothing more is answered."""
        self._parts = parts
        self._buffer = BodyBuffer(parts.desk.admission)
        self._body: list[bytes] = []
        self._size = 0
        self._head = _Head({}, "", None, False, False)
        self._caller = ANONYMOUS
        self._reservation: DecidedReservation | None = None
        self._status: int | None = None
        self._is_response_duplex = False

    @property
    def is_arriving(self) -> bool:
        """Return whether more of the request must come before there is an answer."""
        return self.stage is Stage.HEAD or self.stage is Stage.BODY

    async def take(self, message: Any) -> list[Any]:
        """Handle a message of the gateway; return the answer."""
        if message.HasField("protocol_config"):
            self._is_response_duplex = message.protocol_config.response_body_mode == _FULL_DUPLEX
        try:
            return await self._take(message)
        except RequestError as error:
            return [self.refused(error)]

    def refused(self, error: RequestError) -> Any:
        """Respond to the client with an error; the request is over."""
        self._parts.desk.observers.refused(error)
        self.stage, self.is_refused = Stage.OVER, True
        self._let_go_of_body()
        answer = ProcessingResponse()
        refusal = answer.immediate_response
        refusal.status.code = error.status
        refusal.details = error.code
        refusal.body = error_body(dialect_of(self._head.path), str(error), error.type, error.code)
        headers = [(b"content-type", b"application/json"), *error.headers()]
        if error.status in (429, 503):
            headers.append((_DROPPED, error.code.encode()))
        _set_headers(refusal.headers, headers)
        return answer

    def closed(self) -> None:
        """The stream is over, complete or not."""
        self._let_go_of_body()
        if self._reservation is not None:
            # The gateway's own reason is unknown: its client has left, or the replica.
            self._reservation.end(Outcome.CLIENT_LEFT, self._status)
        self.stage = Stage.OVER

    # --- the request ------------------------------------------------------------------------------

    async def _take(self, message: Any) -> list[Any]:
        if message.HasField("request_headers"):
            return await self._request_headers(message)
        if message.HasField("request_body"):
            return await self._request_body(message.request_body)
        if message.HasField("request_trailers"):
            return await self._request_trailers()
        if message.HasField("response_headers"):
            return self._response_headers(message)
        if message.HasField("response_body"):
            return self._response_body(message.response_body)
        if message.HasField("response_trailers"):
            return self._response_trailers()
        return []

    async def _request_headers(self, message: Any) -> list[Any]:
        if self.stage is not Stage.HEAD:
            raise BadRequest("request_headers", "twice", "must come once, and first")
        headers = _headers(message.request_headers.headers)
        path = headers.get(b":path", b"/").decode("latin-1").partition("?")[0]
        mode = message.protocol_config.request_body_mode
        if mode in (_STREAMED, _BUFFERED_PARTIAL):
            rule = "must be FULL_DUPLEX_STREAMED, BUFFERED or NONE"
            raise BadRequest("request_body_mode", str(mode), rule)
        is_duplex = mode == _FULL_DUPLEX
        self._head = _Head(headers, path, _eligible(message), is_duplex, mode == _BUFFERED)
        self._caller = self._parts.caller(headers)
        self.stage = Stage.BODY
        if message.request_headers.end_of_stream:
            return await self._pick()
        if mode == _NONE and message.HasField("protocol_config"):
            return await self._pick()
        return [] if is_duplex else [_passing("request_headers")]

    async def _request_body(self, piece: Any) -> list[Any]:
        if self.stage is not Stage.BODY:
            raise BadRequest("request_body", f"after {self.stage.value}", "must follow the headers")
        self._size += len(piece.body)
        if self._size > self._parts.max_body_bytes:
            raise BodyTooLarge(self._parts.max_body_bytes)
        self._buffer.add(len(piece.body))
        self._body.append(piece.body)
        is_whole = piece.end_of_stream or self._head.is_buffered
        return await self._pick(has_body=True) if is_whole else []

    async def _request_trailers(self) -> list[Any]:
        answers = await self._pick(has_body=True) if self.stage is Stage.BODY else []
        if self.stage is Stage.OVER:
            return answers
        return [*answers, _passing("request_trailers")]

    async def _pick(self, has_body: bool = False) -> list[Any]:
        body = b"".join(self._body)
        self._body.clear()
        reservation = await self._reserve(body)
        self._reservation, self.stage = reservation, Stage.SENT
        sent = reservation.decision.asked.body if reservation.attempt.body is None else None
        sent = reservation.attempt.body if sent is None else sent
        assert sent is not None
        self._let_go_of_body()
        is_in_body = has_body and not self._head.is_duplex
        answer = ProcessingResponse()
        part = answer.request_body if is_in_body else answer.request_headers
        self._set_destination(answer, part.response, len(sent) if sent != body else None)
        if is_in_body and sent != body:
            part.response.body_mutation.body = sent
        if not has_body or is_in_body:
            return [answer]
        return [answer, *_pieces(sent)]

    async def _reserve(self, body: bytes) -> DecidedReservation:
        head, parts = self._head, self._parts
        known = parts.paths.find(head.path)
        question = Question(
            endpoint=None if known is None else known.endpoint,
            response_id="" if known is None else known.response_id,
            body=body,
            path=head.path,
            request_id=request_id_in(head.headers),
            headers=head.headers,
            is_eligible=head.is_eligible,
            caller=self._caller,
        )
        return await parts.desk.reserve(question)

    def _set_destination(self, answer: Any, common: Any, length: int | None) -> None:
        reservation, parts = self._reservation, self._parts
        assert reservation is not None
        decision = reservation.decision
        endpoints = [decision.replicas[reservation.attempt.replica_id].address]
        endpoints += [
            decision.replicas[ranked.candidate.replica_id].address
            for ranked in itertools.islice(decision.ranking, 1, 1 + parts.config.fallbacks)
        ]
        where = ",".join(endpoints)
        headers: list[Header] = [(ENDPOINT.encode(), where.encode())]
        headers += [
            (name, value)
            for name, value in reservation.attempt.request_headers
            if value is not None
        ]
        if length is not None:
            headers.append((b"content-length", b"%d" % length))
        if parts.config.rank_ports:
            headers += _rank_address(endpoints[0], reservation.attempt)
        _set_headers(common.header_mutation, headers)
        names = {name for name, _ in headers}
        common.header_mutation.remove_headers.extend(
            name.decode() for name in (*parts.dropped, *SIDECAR_HEADERS) if name not in names
        )
        common.clear_route_cache = True
        answer.dynamic_metadata.update({_LB: {ENDPOINT: where}})
        if not parts.config.read_response:
            answer.mode_override.response_header_mode = 1
            answer.mode_override.response_body_mode = _NONE

    # --- the response -----------------------------------------------------------------------------

    def _response_headers(self, message: Any) -> list[Any]:
        headers = _headers(message.response_headers.headers)
        status = headers.get(b":status", b"")
        self._status = int(status) if status.isdigit() and len(status) == 3 else 502
        answer = _passing("response_headers")
        reservation = self._reservation
        if reservation is not None:
            self._note_served(reservation, _served(message))
            self.stage = Stage.RESPONSE
            replica_id = reservation.attempt.replica_id
            _set_headers(
                answer.response_headers.response.header_mutation,
                [(b"x-kv-replica", replica_id.encode())],
            )
            if message.response_headers.end_of_stream or not self._parts.config.read_response:
                self._end()
        return [answer]

    def _response_body(self, piece: Any) -> list[Any]:
        reservation = self._reservation
        if reservation is not None and not reservation.is_over:
            if piece.body:
                reservation.prefill_complete(status=self._status or 200, is_whole=None)
                reservation.observer.on_chunk(piece.body)
                reservation.touch()
            if piece.end_of_stream:
                self._end()
        answer = ProcessingResponse()
        part = answer.response_body
        part.SetInParent()
        if self._is_response_duplex:
            streamed = part.response.body_mutation.streamed_response
            streamed.body, streamed.end_of_stream = piece.body, piece.end_of_stream
        return [answer]

    def _response_trailers(self) -> list[Any]:
        self._end()
        return [_passing("response_trailers")]

    def _end(self) -> None:
        self.stage = Stage.OVER
        if self._reservation is not None:
            self._reservation.end(Outcome.COMPLETED, self._status)

    def _note_served(self, reservation: DecidedReservation, served: str) -> None:
        """Note the replica that served: the gateway may have tried another one by itself."""
        if not served:
            return
        replicas = reservation.decision.replicas
        if replicas[reservation.attempt.replica_id].address == served:
            return
        replica = next((each for each in replicas.values() if each.address == served), None)
        if replica is not None:
            prefiller = reservation.attempt.prefiller
            reservation.served_by(Attempt(replica.id, replica.origin, prefiller=prefiller))

    def _let_go_of_body(self) -> None:
        self._body.clear()
        self._buffer.__exit__(None, None, None)
        self._buffer = BodyBuffer(self._parts.desk.admission)


# --- messages -------------------------------------------------------------------------------------


def _eligible(message: Any) -> IsEligible | None:
    """Return which replicas the gateway allows."""
    metadata = message.metadata_context.filter_metadata
    if _HINT not in metadata or _SUBSET not in metadata[_HINT].fields:
        return None
    value = metadata[_HINT].fields[_SUBSET]
    texts = [each.string_value for each in value.list_value.values] or [value.string_value]
    named = frozenset(part.strip() for text in texts for part in text.split(",") if part.strip())
    if not named:
        raise NoReplica("any model", "the gateway allows no endpoint")

    def is_eligible(replica: Replica) -> bool:
        host = replica.origin.host
        return not named.isdisjoint((replica.address, host, f"[{host}]"))

    return is_eligible


def _served(message: Any) -> str:
    """The endpoint that gave the response, as far as the gateway reports it; after retries, the
    last."""
    metadata, attributes = message.metadata_context.filter_metadata, message.attributes
    if _LB in metadata and SERVED in metadata[_LB].fields:
        return str(metadata[_LB].fields[SERVED].string_value)
    if _ATTRIBUTES in attributes and _UPSTREAM in attributes[_ATTRIBUTES].fields:
        return str(attributes[_ATTRIBUTES].fields[_UPSTREAM].string_value)
    return ""


def _rank_address(address: str, attempt: Attempt) -> list[Header]:
    """Return the address of the rank that a request is for."""
    rank = dict(attempt.request_headers).get(RANK_HEADER)
    host, _, port = address.rpartition(":")
    if rank is None or int(port) + int(rank) > _MAX_PORT:
        return []
    return [(RANK_ADDRESS_HEADER, f"{host}:{int(port) + int(rank)}".encode())]


def _headers(found: Any) -> dict[bytes, bytes]:
    return {
        each.key.lower().encode("latin-1", "replace"): each.raw_value
        or each.value.encode("latin-1", "replace")
        for each in found.headers
    }


def _set_headers(mutation: Any, headers: Sequence[Header]) -> None:
    for name, value in headers:
        option = mutation.set_headers.add(append_action=_OVERWRITE)
        option.header.key, option.header.raw_value = name.decode("latin-1"), value


def _passing(part: str) -> Any:
    answer = ProcessingResponse()
    getattr(answer, part).SetInParent()
    return answer


def _pieces(body: bytes) -> Iterator[Any]:
    """Split the body into messages that every gateway takes."""
    for start in range(0, len(body) or 1, MAX_CHUNK_BYTES):
        answer = ProcessingResponse()
        streamed = answer.request_body.response.body_mutation.streamed_response
        streamed.body = body[start : start + MAX_CHUNK_BYTES]
        streamed.end_of_stream = start + MAX_CHUNK_BYTES >= len(body)
        yield answer
